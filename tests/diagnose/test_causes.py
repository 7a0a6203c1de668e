"""How causes are weighed: symptom, rules that fired, damage and what is missing, as a decision table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnose.judged import FASTER, SOUND, SYMPTOMS, finding, measures, speed
from verl_audit.diagnose.causes import Judgement, weigh
from verl_audit.diagnose.damage import D0, EVIDENCE, evidence
from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.left_open import UNSPLIT_RULE
from verl_audit.diagnose.rules import CAUSES, Cause
from verl_audit.diagnose.verdict import decide
from verl_audit.measure.model import Measure
from verl_audit.measure.speed import Symptom

LARGE: Mapping[Cause, Mapping[str, Any]] = {
    "mismatch": {"damage_mismatch": 0.1, "gap_prob_lag0": 0.05},
    "staleness": {"damage_staleness": 0.1, "lag_updates": 20.0},
    "eviction": {"damage_eviction": 0.3, "evicted_share": 0.4},
    "sync": {"off_policy_loss": 0.2, "sync_share": 0.3},
}
"""Measures that show a cause at full damage; sync needs a rule besides."""


def judge(
    over: Mapping[str, Any] | None = None, findings: Sequence[Finding] = (), symptom: Symptom = SYMPTOMS["slower"]
) -> dict[Cause, Judgement]:
    return weigh(measures(over), findings, symptom)


def status(
    cause: Cause,
    over: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] = (),
    symptom: Symptom = SYMPTOMS["slower"],
) -> tuple[str, bool]:
    judged = judge(over, findings, symptom)[cause]
    return judged.status, judged.risk


def proof(cause: Cause) -> list[Finding]:
    return [finding("sync", "high")] if cause == "sync" else []


def test_evidence_is_even_at_d0_and_reached_at_the_margin() -> None:
    for cause in CAUSES:
        assert evidence(D0[cause], cause) == pytest.approx(0.5)
        margin = (EVIDENCE / (1 - EVIDENCE)) ** (1 / 2.5)
        assert evidence(margin * D0[cause], cause) == pytest.approx(EVIDENCE)
        assert evidence(0.0, cause) == evidence(-1.0, cause) == 0


def test_a_sound_run_is_cleared_of_everything() -> None:
    for symptom in SYMPTOMS.values():
        judged = judge(symptom=symptom)
        assert {c: (j.status, j.risk) for c, j in judged.items()} == dict.fromkeys(CAUSES, ("cleared", False))
        assert all(j.because and not j.missing for j in judged.values())


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(
    ("symptom", "expected"),
    [
        (SYMPTOMS["slower"], ("implicated", True)),
        (SYMPTOMS["not_shown"], ("cannot_tell", True)),
        (FASTER, ("cleared", True)),
        (SYMPTOMS["unclear"], ("cannot_tell", True)),
        (SYMPTOMS["untested"], ("cannot_tell", True)),
    ],
)
def test_damage_names_a_cause_only_where_harm_is_shown(
    cause: Cause, symptom: Symptom, expected: tuple[str, bool]
) -> None:
    assert status(cause, LARGE[cause], proof(cause), symptom) == expected


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("severity", ["medium", "high", "critical"])
def test_a_rule_that_fired_without_damage_is_a_risk_and_no_cause(cause: Cause, severity: str) -> None:
    lost = {f"damage_{cause}": None, "off_policy_loss": None}
    judged = judge(lost, [finding(cause, severity)])[cause]
    assert (judged.status, judged.risk, judged.at_work) == ("cannot_tell", True, ("a-rule",))


@pytest.mark.parametrize("severity", ["info", "low"])
def test_notes_change_no_judgement(severity: str) -> None:
    for cause in CAUSES:
        assert status(cause, findings=[finding(cause, severity)]) == ("cleared", False)


def test_a_rule_of_another_cause_is_no_evidence() -> None:
    assert status("mismatch", findings=[finding("staleness"), finding("health", "critical")]) == ("cleared", False)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("broken", ["error", "insufficient", "not_applicable", "clear"])
def test_only_a_measurement_clears_and_never_the_state_of_a_rule(cause: Cause, broken: Any) -> None:
    """A broken rule is no pass: with nothing measured all rules clear leave the cause open."""
    outcome = [finding(cause, "high", broken, f"rule-{i}") for i in range(3)]
    nothing = dict.fromkeys([n for n in SOUND if n != "steps_logged"])
    assert status(cause, nothing, outcome) == ("cannot_tell", False)


NEEDED: Mapping[Cause, Sequence[tuple[str, ...]]] = {
    "mismatch": [("gap_prob_lag0", "gap_prob_mean")],
    "staleness": [("off_policy_loss", "damage_staleness")],
    "eviction": [("evicted_share", "stale_groups"), ("evicted_share", "failed_groups")],
    "sync": [("sync_share",), ("gap_trend",), ("lag_max_slope",)],
}


@pytest.mark.parametrize(("cause", "gone"), [(c, gone) for c in CAUSES for gone in NEEDED[c]])
@pytest.mark.parametrize("symptom", SYMPTOMS.values(), ids=SYMPTOMS.keys())
def test_a_missing_signal_never_clears(cause: Cause, gone: tuple[str, ...], symptom: Symptom) -> None:
    judged = judge(dict.fromkeys(gone), symptom=symptom)[cause]
    assert judged.status == "cannot_tell"
    assert judged.missing


@given(
    gone=st.sets(st.sampled_from([n for n in SOUND if n not in ("trainer", "is_async")])),
    fired=st.sets(st.sampled_from(CAUSES)),
    damaged=st.sets(st.sampled_from(CAUSES)),
    state=st.sampled_from(list(SYMPTOMS)),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_the_contract_holds_everywhere(gone: set[str], fired: set[Cause], damaged: set[Cause], state: str) -> None:
    over = {k: v for cause in sorted(damaged) for k, v in LARGE[cause].items()} | dict.fromkeys(gone)
    symptom = SYMPTOMS[state]  # type: ignore[index]
    judged = judge(over, [finding(c, "high") for c in CAUSES if c in fired], symptom)
    assert list(judged) == list(CAUSES)
    implicated = [c for c in CAUSES if judged[c].status == "implicated"]
    assert len(implicated) <= 1
    for cause, found in judged.items():
        named = found.status in ("implicated", "contributing")
        assert not named or (state == "slower" and found.damage is not None and found.risk)
        assert not (found.status == "contributing" and not implicated)
        assert not (cause in fired and not found.risk)
        assert not (found.status == "cleared" and found.missing)
        assert found.because and "None" not in found.because and "nan" not in found.because
        if found.damage is not None:
            assert found.damage[1] <= found.damage[0] <= found.damage[2]


# -- weighing against each other --------------------------------------------------------------------------------


def test_the_larger_damage_is_the_cause_and_a_tenth_of_the_sum_contributes() -> None:
    over = {**LARGE["mismatch"], **LARGE["eviction"]}
    judged = judge(over)
    assert (judged["mismatch"].status, judged["eviction"].status) == ("implicated", "contributing")
    judged = judge({**over, "damage_mismatch": 0.018, "damage_eviction": 1.2})
    assert (judged["eviction"].status, judged["mismatch"].status) == ("implicated", "cannot_tell")
    assert judged["mismatch"].risk


def test_a_loss_that_the_lag_cannot_explain_is_not_staleness() -> None:
    old = judge({**LARGE["staleness"], "lag_updates": 22.0})
    fresh = judge({**LARGE["staleness"], "lag_updates": 2.0})
    assert old["staleness"].status == "implicated"
    assert fresh["staleness"].status == "cannot_tell"
    assert "too little for a loss" in fresh["staleness"].because


def test_what_costs_hours_only_is_no_mechanism_of_a_slower_update() -> None:
    costly = replace(finding("sync", "medium"), clock="hour")
    assert not judge({}, [costly])["sync"].risk
    assert judge({}, [costly], symptom=SYMPTOMS["not_shown"])["sync"].risk


def test_a_sync_fault_explains_the_loss_it_makes() -> None:
    over = {**LARGE["staleness"], "off_policy_loss": 0.2}
    judged = judge(over, [finding("sync", "high")])
    assert judged["sync"].status == "implicated"
    assert judged["staleness"].damage == pytest.approx((0.02, 0.02, 0.02))
    assert judged["staleness"].status not in ("implicated", "contributing")


def test_a_slow_sync_alone_costs_no_signal() -> None:
    judged = judge({"sync_share": 0.4}, [finding("sync", "medium")])["sync"]
    assert (judged.status, judged.risk, judged.damage) == ("cannot_tell", True, (0.0, 0.0, 0.0))


# -- what clears ------------------------------------------------------------------------------------------------


def of(name: str, value: float | None, low: float | None = None, high: float | None = None, n: int = 30) -> Measure:
    return Measure(name, value, low=low, high=high, n=n, missing="" if value is not None else "unknown")


def test_one_lag_0_step_before_the_first_sync_does_not_clear_what_came_after() -> None:
    """Step 1 samples come from the initial weights: a gap of .2 after it may be what the syncs delivered."""
    over = {"gap_prob_lag0": of("gap_prob_lag0", 0.004, n=1), "gap_prob_mean": 0.2, "off_policy_loss": 0.05}
    judged = judge(over)
    assert judged["mismatch"].status == judged["sync"].status == "cannot_tell"
    assert judged["mismatch"].missing == ("gap_at_lag0",)
    later = judge({**over, "gap_after_first_sync": 1.1})
    assert later["mismatch"].status == "cleared"
    small = judge({**over, "off_policy_loss": 0.002})
    assert small["mismatch"].status == "cleared"


def test_a_small_total_gap_does_not_clear_a_large_loss() -> None:
    over = {"gap_prob_lag0": None, "gap_prob_mean": 0.004}
    assert status("mismatch", over)[0] == "cleared"
    assert status("mismatch", {**over, "off_policy_loss": None})[0] == "cleared"
    assert status("mismatch", {**over, "off_policy_loss": 0.1})[0] == "cannot_tell"


def test_gauges_that_contradict_clear_no_mismatch() -> None:
    assert status("mismatch", {"gauge_contradiction": 1.5}) == ("cannot_tell", False)


@pytest.mark.parametrize(("name", "fine", "raised"), [("gap_logp_lag0", 0.02, 0.021), ("gap_kl_lag0", 0.005, 0.0051)])
def test_each_gauge_has_its_own_limit(name: str, fine: float, raised: float) -> None:
    none = {"gap_prob_lag0": None, "gap_prob_mean": None}
    assert status("mismatch", {**none, name: fine})[0] == "cleared"
    assert status("mismatch", {**none, name: raised})[0] == "cannot_tell"


def test_staleness_is_cleared_by_lag_0_by_a_synchronous_trainer_or_by_a_bound() -> None:
    nothing = {"damage_staleness": None, "off_policy_loss": None}
    assert status("staleness", nothing)[0] == "cannot_tell"
    assert status("staleness", {**nothing, "lag_oldest_max": 0.0})[0] == "cleared"
    no_lag = {**nothing, "lag_oldest_max": None, "lag_mean": None}
    assert status("staleness", {**no_lag, "is_async": False})[0] == "cleared"
    assert status("staleness", {**nothing, "is_async": False})[0] == "cannot_tell"  # the log says lag 2
    bounded = of("damage_staleness", None, 0.0, 0.015)
    assert status("staleness", {**nothing, "damage_staleness": bounded})[0] == "cleared"
    wide = of("damage_staleness", None, 0.0, 0.016)
    assert status("staleness", {**nothing, "damage_staleness": wide})[0] == "cannot_tell"
    assert "up to 1.6% of the signal may be lost" in judge({**nothing, "damage_staleness": wide})["staleness"].because


def test_staleness_is_not_cleared_by_a_bound_while_a_gap_of_unknown_lag_is_reported() -> None:
    unsplit = finding("mismatch", "low", rule=UNSPLIT_RULE)
    no_lag = {"lag_oldest_max": None, "lag_mean": None, "lag0_steps": None}
    assert status("staleness", no_lag)[0] == "cleared"
    judged = judge(no_lag, [unsplit])["staleness"]
    assert (judged.status, judged.missing) == ("cannot_tell", ("lag_newest_mean",))
    assert "the gap is raised and the lag not known" in judged.because
    assert status("staleness", {**no_lag, "lag0_steps": 0.0}, [unsplit])[0] == "cleared"  # known, and never 0
    assert status("staleness", {**no_lag, "is_async": False}, [unsplit])[0] == "cleared"


def test_a_synchronous_trainer_has_no_lag_to_speak_of() -> None:
    judged = judge({"is_async": False, "trainer": "sync", "lag_oldest_max": 0.0, "lag_mean": 0.0})
    assert judged["staleness"].because == "rollouts do not overlap training (trainer sync)"
    assert judged["sync"].status == "cleared" and "lag" not in judged["sync"].because
    assert status("sync", {"is_async": False, "lag_oldest_max": None, "lag_mean": None, "lag_max_slope": None})[0] == (
        "cleared"
    )


def test_both_ends_of_the_lag_are_printed() -> None:
    both = {"lag_newest_mean": 0.96, "lag_oldest_mean": 1.51}
    assert "mean lag 0.96 versions (newest token) to 1.51 (oldest)" in judge(both)["staleness"].because
    assert "mean lag 1.20 versions;" in judge()["staleness"].because


def test_a_few_evicted_groups_clear_and_an_unknown_share_does_not() -> None:
    assert status("eviction", {"evicted_share": 0.05, "stale_groups": 9.0})[0] == "cleared"
    judged = judge({"evicted_share": None, "stale_groups": 9.0, "damage_eviction": None})["eviction"]
    assert (judged.status, judged.missing) == ("cannot_tell", ("groups_per_step", "evicted_lengths"))


def test_sync_is_not_cleared_while_the_gap_grows() -> None:
    """Weights that never arrive: the mean after step 1 is only twice that of step 1, but it climbs all along."""
    grows = {"gap_after_first_sync": 2.2, "gap_trend_lag0": 2.2, "gap_trend": 2.2}
    assert status("sync", grows)[0] == "cannot_tell"
    assert status("sync", {**grows, "gap_trend_lag0": 1.0})[0] == "cleared"
    assert status("sync", {"gap_trend": 1.6})[0] == "cannot_tell"
    assert status("sync", {"gap_after_first_sync": 3.5})[0] == "cannot_tell"


@pytest.mark.parametrize(
    ("slope", "low", "high", "n", "expected"),
    [
        (0.0, -0.05, 0.05, 25, "a slope of 0.00 versions per version over 25 steps"),
        (-0.3, -0.4, -0.2, 25, "a slope of -0.30 versions per version over 25 steps"),
        (0.03, -0.1, 0.3, 25, "a slope of 0.03 versions per version over 25 steps"),  # grows by less than a version
        (0.03, -0.6, 0.6, 25, ""),
        (0.35, 0.33, 0.37, 25, ""),
        (0.15, 0.11, 0.19, 25, ""),
    ],
)
def test_sync_is_cleared_only_by_a_largest_lag_that_does_not_climb(
    slope: float, low: float, high: float, n: int, expected: str
) -> None:
    judged = judge({"lag_max_slope": of("lag_max_slope", slope, low, high, n)})["sync"]
    assert judged.status == ("cleared" if expected else "cannot_tell")
    assert expected in judged.because
    if not expected:
        assert judged.missing == ("replica_versions",)
        assert (f"climbs {slope:.2f} versions per version over {n} steps" in judged.because) == (low > 0)
        assert (f"within {low:.2f} and {high:.2f}" in judged.because) == (low <= 0)


def test_the_gap_of_a_cleared_sync_comes_with_its_number() -> None:
    assert "ends at 1.40 times its early level (limit 1.5)" in judge({"gap_trend": 1.4})["sync"].because


def test_a_sync_that_is_half_measured_says_what_was_seen() -> None:
    half = judge({"sync_share": None, "gap_trend": None})["sync"]
    assert (half.status, half.damage) == ("cannot_tell", (0.0, 0.0, 0.0))
    assert half.because.startswith("no fault in what was logged (the largest lag has a slope of 0.00")
    assert "ends at 1.60 times" in judge({"gap_trend": 1.6})["sync"].because


def test_nothing_measured_is_no_damage_of_0() -> None:
    nothing = dict.fromkeys([n for n in SOUND if n != "steps_logged"])
    for judged in judge(nothing).values():
        assert (judged.damage, judged.because) == (None, "not measured")


def test_a_gap_of_unknown_lag_is_given_with_its_numbers_and_wants_the_lag_only() -> None:
    no_lag = {"gap_prob_lag0": None, "lag0_steps": None, "damage_mismatch": None, "off_policy_loss": None}
    judged = judge({**no_lag, "gap_prob_mean": 0.066, "gap_logp_mean": 0.809})["mismatch"]
    assert judged.because == "the gap is 0.066 in probability, 0.809 nats, lag unknown: mismatch or staleness"
    assert judged.missing == ("lag_oldest_max",)
    logp = judge({**no_lag, "gap_prob_mean": None, "gap_logp_mean": 0.809})["mismatch"]
    assert logp.because == "the gap is 0.809 nats, lag unknown: mismatch or staleness"
    assert logp.missing == ("lag_oldest_max",)
    never = judge({**no_lag, "gap_prob_mean": 0.066, "lag0_steps": 0.0})["mismatch"]
    assert never.missing == ("gap_at_lag0",) and "0 steps at lag 0" in never.because


def test_the_number_shown_is_the_one_that_decided() -> None:
    one = {"gap_prob_lag0": of("gap_prob_lag0", 0.0023, n=1), "off_policy_loss": 0.006}
    assert judge(one)["mismatch"].because == (
        "at most 0.6% of the signal lost, staleness included; mean probability difference 0.0023 at the one lag-0 step"
    )
    assert judge({**one, "off_policy_loss": 0.009})["mismatch"].status == "cannot_tell"
    many = {"gap_prob_lag0": of("gap_prob_lag0", 0.0023, n=9), "off_policy_loss": 0.2}
    assert "0.0023 over 9 steps" in judge(many)["mismatch"].because


def test_two_rules_do_not_say_one_number_twice() -> None:
    def said(*phrases: str) -> str:
        fired = [replace(finding("mismatch", rule=f"r{i}"), decisive=p) for i, p in enumerate(phrases)]
        return judge(findings=fired, symptom=SYMPTOMS["untested"])["mismatch"].because

    gap = "mean probability difference 0.0129 at lag 0"
    assert said(f"{gap}, 3.1 times the baseline's", f"{gap}, above verl's 0.01") == (
        f"{gap}, 3.1 times the baseline's and above verl's 0.01"
    )
    assert said("1.20 nats of gap", "Gap 1.20 nats, 3.4 times before") == "gap 1.20 nats, 3.4 times before"
    assert said("KL 0.05", "gap 0.07", "weights differ") == "kL 0.05; gap 0.07; weights differ"


def test_sync_is_not_cleared_by_a_slope_nobody_could_measure() -> None:
    judged = judge({"lag_max_slope": None})["sync"]
    assert (judged.status, judged.missing) == ("cannot_tell", ("lag_oldest_max",))
    assert status("sync", {"lag_max_slope": None, "lag_oldest_max": 0.0})[0] == "cleared"


@pytest.mark.parametrize("steps", [0, 1, 9, None])
def test_a_short_run_is_cleared_of_nothing(steps: float | None) -> None:
    for cause, judged in judge({"steps_logged": steps, "is_async": False, "lag_oldest_max": 0.0}).items():
        assert judged.status == "cannot_tell", cause


# -- the only cause left ----------------------------------------------------------------------------------------

LEFT: Mapping[str, Any] = {"recipe_differences": 0.0, "damage_mismatch": 0.01, "gap_prob_lag0": 0.03}
"""A gap at lag 0 whose damage is less than evidence, all else sound, and the baseline's recipe."""
HARD = SYMPTOMS["slower"]


def test_the_only_mechanism_at_work_is_named_where_all_else_is_excluded() -> None:
    judged = judge(LEFT, [finding("mismatch")], HARD)
    assert (judged["mismatch"].status, judged["mismatch"].eliminated) == ("implicated", True)
    assert {judged[c].status for c in CAUSES if c != "mismatch"} == {"cleared"}


@pytest.mark.parametrize(
    ("over", "findings", "symptom"),
    [
        ({"recipe_differences": 1.0}, [], HARD),
        ({"recipe_differences": None}, [], HARD),
        ({"sync_share": None}, [], HARD),
        ({"damage_staleness": 0.02}, [], HARD),
        ({}, [finding("staleness")], HARD),
        ({}, [finding("health", "high")], HARD),
        ({"steps_logged": 5.0}, [], HARD),
        ({}, [], SYMPTOMS["not_shown"]),
        ({}, [], SYMPTOMS["unclear"]),
        ({}, [], replace(HARD, evidence="trained_reward")),
        ({}, [], replace(HARD, per_update=speed(0.7, 0.48, 1.02))),
    ],
    ids=[
        "recipe differs", "recipe unknown", "sync open", "staleness open", "two at work", "health event", "too short",
        "no slowdown", "unclear", "trained reward", "by the end alone",
    ],
)  # fmt: skip
def test_nothing_is_named_by_elimination_while_anything_else_may_explain_it(
    over: Mapping[str, Any], findings: Sequence[Finding], symptom: Symptom
) -> None:
    judged = judge({**LEFT, **over}, [finding("mismatch"), *findings], symptom)
    assert all(j.status not in ("implicated", "contributing") for j in judged.values())


def test_a_health_event_that_follows_the_cause_does_not_stand_in_the_way() -> None:
    event = replace(finding("health", "high"), follows=("mismatch",))
    assert judge(LEFT, [finding("mismatch"), event], HARD)["mismatch"].eliminated


def test_a_mismatch_that_was_there_before_the_first_sync_is_named_beside_the_sync() -> None:
    over = {"off_policy_loss": 0.2, "damage_mismatch": 0.02, "damage_staleness": 0.18}
    broken = [finding("sync", "high")]
    unknown = judge(over, broken)
    assert (unknown["sync"].status, unknown["mismatch"].status) == ("implicated", "cleared")
    both = judge({**over, "loss_first_step": 0.06}, broken)
    assert {c for c in CAUSES if both[c].status in ("implicated", "contributing")} == {"sync", "mismatch"}


def test_a_rule_of_thumb_alone_is_not_named_by_elimination() -> None:
    quiet = {**LEFT, "damage_mismatch": 0.001, "gap_prob_lag0": 0.004}
    assert not judge(quiet, [finding("eviction", rule="eviction-prompt-shift")], HARD)["eviction"].eliminated
    assert judge(quiet, [finding("eviction", rule="eviction-truncated-at-sync")], HARD)["eviction"].eliminated


def test_beside_a_proven_cause_even_evidence_is_enough() -> None:
    over = {**LARGE["eviction"], "damage_mismatch": 0.0155}
    assert judge(over, [finding("eviction"), finding("mismatch")])["mismatch"].status == "contributing"
    assert judge({"damage_mismatch": 0.0155}, [finding("mismatch")])["mismatch"].status == "cannot_tell"
    ageless = {**LARGE["mismatch"], "damage_staleness": 0.2, "lag_mean": None}
    beside = judge(ageless, [finding("mismatch"), finding("staleness")])
    assert (beside["mismatch"].status, beside["staleness"].status) == ("implicated", "cannot_tell")


def test_a_long_sync_costs_hours_and_does_not_keep_a_slowdown_per_update_open() -> None:
    assert status("sync", {"sync_share": 0.3}, symptom=SYMPTOMS["slower"]) == ("cleared", False)
    assert status("sync", {"sync_share": 0.3}, symptom=SYMPTOMS["unclear"]) == ("cannot_tell", False)


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"lag_updates": 20.0}, "implicated"),
        ({"lag_updates": None, "lag_mean": 20.0}, "implicated"),
        ({"lag_updates": None, "lag_mean": 1.8}, "cannot_tell"),
        ({"lag_updates": None, "lag_mean": None}, "cannot_tell"),
    ],
)
def test_staleness_is_named_only_where_the_samples_are_known_to_be_old(over: Mapping[str, Any], expected: str) -> None:
    judged = judge({**LARGE["staleness"], **over})["staleness"]
    assert (judged.status, judged.risk) == (expected, True)
    told = {"updates_per_version", "lag_newest_mean", "lag_mean"} & set(judged.missing)
    assert bool(told) == (expected == "cannot_tell")


def test_a_recipe_that_differs_is_told_beside_the_event_it_may_have_led_to() -> None:
    recipe = finding("health", "high", rule="health-recipe-differs")
    recipe = replace(recipe, title="Another recipe", explain="lr differs.")
    event = replace(finding("health", "high"), onset=(40.0, 50.0))
    found = decide(judge(), [recipe, event], SYMPTOMS["slower"], measures())
    assert found.other == "title of health"
    assert found.sentence.endswith("lr differs.")
    alone = decide(judge(), [recipe], SYMPTOMS["slower"], measures())
    assert alone.other == "another recipe"


def test_a_gap_that_came_after_step_1_is_not_named_mismatch() -> None:
    later = finding("sync", rule="sync-gap-appears-later")
    assert judge(LARGE["mismatch"], [finding("mismatch")])["mismatch"].status == "implicated"
    judged = judge(LARGE["mismatch"], [finding("mismatch"), later])
    assert all(j.status not in ("implicated", "contributing") for j in judged.values())
    assert (judged["mismatch"].risk, judged["sync"].risk) == (True, True)
    assert "replica_versions" in judged["mismatch"].missing
