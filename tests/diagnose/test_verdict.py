"""The verdict over symptom, causes, health and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnose.judged import FASTER, SOUND, SYMPTOMS, finding, measures, speed
from tests.diagnose.test_causes import LARGE
from verl_audit.diagnose.causes import weigh
from verl_audit.diagnose.coverage import FACTS, NEEDS, TRACES_ONLY, UNASKED
from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import CAUSES, Cause
from verl_audit.diagnose.verdict import Verdict, decide
from verl_audit.measure.model import Measure
from verl_audit.measure.speed import Symptom

SIGNALS = {s for needs in NEEDS.values() for need in needs for s in need} | {*TRACES_ONLY, *FACTS, *UNASKED, "baseline"}


def verdict(
    over: Mapping[str, Any] | None = None,
    findings: Sequence[Finding] = (),
    symptom: Symptom = SYMPTOMS["slower"],
) -> Verdict:
    found = measures(over)
    return decide(weigh(found, findings, symptom), findings, symptom, found)


@pytest.mark.parametrize(
    ("symptom", "outcome"),
    [
        (SYMPTOMS["slower"], "undetermined"),
        (SYMPTOMS["not_shown"], "none"),
        (SYMPTOMS["unclear"], "none"),
        (SYMPTOMS["untested"], "none"),
    ],
)
def test_all_excluded(symptom: Symptom, outcome: str) -> None:
    found = verdict(symptom=symptom)
    assert (found.outcome, found.causes, found.risks) == (outcome, (), ())
    if symptom.state in ("unclear", "untested"):
        assert found.confidence == "low"


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(
    ("symptom", "outcome"),
    [
        (SYMPTOMS["slower"], "cause"),
        (SYMPTOMS["unclear"], "undetermined"),
        (SYMPTOMS["untested"], "undetermined"),
        (FASTER, "none"),
    ],
)
def test_one_cause_at_work(cause: Cause, symptom: Symptom, outcome: str) -> None:
    found = verdict(LARGE[cause], [finding("sync", "high")] if cause == "sync" else [], symptom)
    assert found.outcome == outcome
    assert (cause in found.causes) == (outcome == "cause")
    assert (cause in found.risks) == (outcome != "cause")


def test_the_first_cause_is_the_implicated_one() -> None:
    found = verdict({**LARGE["mismatch"], **LARGE["eviction"]})
    assert found.causes == ("mismatch", "eviction")
    assert found.sentence.startswith("Train-inference mismatch, with eviction bias contributing: reward is slower")


def test_confidence_needs_validation_and_strong_evidence() -> None:
    assert verdict(LARGE["mismatch"]).confidence == "medium"
    assert verdict({**LARGE["mismatch"], "damage_mismatch": 0.02}).confidence == "low"
    trained = Symptom("slower", "learning speed 0.40", "trained_reward", SYMPTOMS["slower"].per_update)
    assert verdict(LARGE["mismatch"], symptom=trained).confidence == "low"
    alone = Symptom("slower", "at the switch", "single_run")
    assert verdict(LARGE["mismatch"], symptom=alone).confidence == "low"


def test_critical_health_beats_everything_and_high_health_only_a_quiet_run() -> None:
    assert verdict(LARGE["mismatch"], [finding("health", "critical")]).outcome == "other"
    assert verdict(LARGE["mismatch"], [finding("health", "high")]).outcome == "cause"
    other = verdict(findings=[finding("health", "high")])
    assert (other.outcome, other.other, other.causes) == ("other", "title of health", ())
    assert verdict(findings=[finding("health", "medium")]).outcome == "undetermined"
    assert verdict(findings=[finding("health", "critical", "error")]).outcome == "undetermined"


def test_an_event_explains_a_run_in_which_hardly_any_slowdown_could_be_shown() -> None:
    wide = replace(SYMPTOMS["not_shown"], per_update=replace(speed(1.05, 0.3, 3.8), smallest_detectable=0.15))
    assert verdict(findings=[finding("health", "high")], symptom=wide).outcome == "other"
    assert verdict(findings=[finding("health", "high")], symptom=SYMPTOMS["not_shown"]).outcome == "none"


@pytest.mark.parametrize(("behind", "outcome"), [((60.0, 90.0), "other"), ((0.0, 90.0), "cause"), (None, "cause")])
def test_beside_a_proven_cause_an_event_is_the_answer_only_if_the_run_kept_up_until_it(
    behind: tuple[float, float] | None, outcome: str
) -> None:
    event = replace(finding("health", "high"), onset=(40.0, 50.0))
    slower = replace(SYMPTOMS["slower"], onset=behind)
    assert verdict(LARGE["staleness"], [event], slower).outcome == outcome


def test_no_cause_is_said_with_medium_confidence_only_where_harm_was_tested_and_nothing_is_open() -> None:
    tested = verdict(symptom=FASTER)
    assert (tested.outcome, tested.confidence) == ("none", "medium")
    assert "a slowdown to 0.50 of its speed would have shown" in tested.because
    partly = verdict({"sync_share": None}, symptom=FASTER)
    assert (partly.outcome, partly.confidence) == ("none", "low")
    unclear = verdict(symptom=SYMPTOMS["unclear"])
    assert (unclear.confidence, unclear.because) == ("low", "a slowdown is not excluded")
    alone = verdict(symptom=SYMPTOMS["untested"])
    assert (alone.confidence, alone.because) == ("low", "harm was not tested")


def test_a_single_run_asks_for_a_baseline() -> None:
    found = verdict(LARGE["staleness"], symptom=SYMPTOMS["untested"])
    assert "baseline" in found.missing


def test_a_short_run_is_undetermined() -> None:
    found = verdict({"steps_logged": 1.0}, [finding("staleness")], SYMPTOMS["untested"])
    assert (found.outcome, found.confidence) == ("undetermined", "low")
    assert "only 1 training step logged" in found.sentence


def test_what_is_missing_is_named() -> None:
    found = verdict({"sync_share": None, "gap_prob_lag0": None, "gap_prob_mean": None})
    assert {"time_update_weights", "gap_prob_mean"} <= set(found.missing)
    assert "train-inference mismatch and weight sync could not be judged" in found.sentence


def unread(*names: str, follows: tuple[Cause, ...] = ()) -> Finding:
    """A grave health rule that could not be decided for want of these measures."""
    return replace(finding("health", "high", "insufficient"), missing=names, follows=follows)


def test_what_would_show_an_event_that_explains_a_slower_run_is_named() -> None:
    open_ = verdict(findings=[unread("lr_low_share", "entropy_ratio_low")])
    assert (open_.outcome, open_.missing) == ("undetermined", ("lr", "entropy"))
    assert "Not recorded: lr, entropy." in open_.sentence
    assert verdict(findings=[unread("lr_low_share")], symptom=SYMPTOMS["not_shown"]).missing == ()
    assert verdict({"lr_low_share": 0.1}, [unread("lr_low_share")]).missing == ()
    assert verdict(LARGE["mismatch"], [unread("lr_low_share")]).missing == ()


def test_an_event_that_a_cause_at_work_would_lead_to_is_not_asked_for() -> None:
    consequence = unread("entropy_ratio", follows=("staleness",))
    assert verdict(findings=[consequence, finding("staleness")]).missing == ()
    assert verdict(findings=[consequence, finding("eviction")]).missing == ("entropy",)


def test_an_event_is_asked_for_where_a_slowdown_is_unclear_and_a_cause_at_work() -> None:
    for findings, expected in (([finding("staleness")], ("lr",)), ([], ())):
        assert verdict(findings=[unread("lr_low_share"), *findings], symptom=SYMPTOMS["unclear"]).missing == expected


def test_a_slower_run_of_unknown_recipe_asks_for_the_configuration() -> None:
    unknown = measure("recipe_differences")
    found = verdict({"recipe_differences": unknown}, [unread("recipe_differences")])
    assert found.missing == ("configuration",)
    assert "the configuration of run and baseline" in found.sentence
    alone = replace(unknown, wants=("baseline",))
    assert verdict({"recipe_differences": alone}, [unread("recipe_differences")]).missing == ("baseline",)


def measure(name: str, *wants: str) -> Measure:
    """One without a value."""
    return Measure(name, None, missing="was not logged", wants=wants)


BYPASS: Mapping[str, Any] = {
    "log_prob_mode": "bypass", "gap_prob_mean": None, "gap_prob_lag0": None, "damage_mismatch": None,
}  # fmt: skip


def test_in_bypass_mode_the_clip_fraction_is_asked_for_in_place_of_importance_weights() -> None:
    lost = {"off_policy_loss": None, "damage_staleness": measure("damage_staleness", "ess")}
    found = verdict({**BYPASS, **lost}).missing
    assert "clip_share" in found and "ess" not in found
    assert "ess" in verdict({**BYPASS, **lost, "log_prob_mode": "decoupled"}).missing


def test_a_clip_fraction_of_unknown_mode_asks_for_the_configuration() -> None:
    lost = {"off_policy_loss": measure("off_policy_loss"), "damage_staleness": None, "lag0_steps": 1.0}
    assert "configuration" in verdict({**lost, "log_prob_mode": None}).missing
    assert "configuration" not in verdict({**lost, "log_prob_mode": "decoupled"}).missing


def test_traces_that_do_not_see_the_clips_of_the_log_ask_for_the_advantage() -> None:
    at_work = [finding("mismatch")]
    traced = {**BYPASS, "damage_mismatch": 0.007, "off_policy_loss": 0.008, "clip_excess": 0.05}
    assert "advantage" in verdict(traced, at_work).missing
    for seen in ({"clip_excess": 0.004}, {"clip_share_mismatch": 0.9}, {"log_prob_mode": "decoupled"}):
        assert "advantage" not in verdict({**traced, **seen}, at_work).missing


def test_a_loss_bounded_by_importance_weights_alone_asks_for_the_clips_though_it_clears() -> None:
    unclipped = {"log_prob_mode": "bypass", "clip_excess": None, "damage_staleness": 0.001}
    assert verdict(unclipped).missing == ("clip_share",)
    assert verdict({**unclipped, "log_prob_mode": "decoupled"}).missing == ()


def test_what_trained_reward_leaves_open_validation_would_decide() -> None:
    trained = replace(SYMPTOMS["slower"], evidence="trained_reward")
    assert verdict(findings=[finding("mismatch")], symptom=trained).missing == ("validation",)
    assert verdict(LARGE["mismatch"], symptom=trained).missing == ()
    unseen = replace(SYMPTOMS["not_shown"], evidence="trained_reward")
    assert "validation" in verdict({"sync_share": None}, symptom=unseen).missing
    assert verdict(findings=[finding("mismatch")], symptom=unseen).missing == ()


def test_an_unsplit_gap_asks_for_the_gap_at_lag_0() -> None:
    found = verdict({"gap_prob_lag0": None, "gap_prob_mean": 0.02}, symptom=SYMPTOMS["untested"])
    assert "gap_at_lag0" in found.missing or "lag_oldest_max" in found.missing


OPTIONAL = [n for n in SOUND if n not in ("trainer", "is_async")]
EVENTS = [("health", "critical"), ("health", "high"), *((c, "high") for c in CAUSES), *((c, "medium") for c in CAUSES)]


@given(
    gone=st.sets(st.sampled_from(OPTIONAL)),
    damaged=st.sets(st.sampled_from(CAUSES)),
    events=st.lists(st.sampled_from(EVENTS), max_size=4),
    status=st.sampled_from(["fired", "fired", "clear", "error", "insufficient"]),
    state=st.sampled_from(list(SYMPTOMS)),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_contract_holds_everywhere(
    gone: set[str], damaged: set[Cause], events: list[tuple[str, str]], status: Any, state: Any
) -> None:
    over = {k: v for cause in sorted(damaged) for k, v in LARGE[cause].items()} | dict.fromkeys(gone)
    findings = [finding(cause, severity, status, f"rule-{i}") for i, (cause, severity) in enumerate(events)]
    found = verdict(over, findings, SYMPTOMS[state])
    assert (found.outcome == "cause") == bool(found.causes)
    assert (found.outcome == "other") == (found.other is not None)
    assert not set(found.causes) & set(found.risks)
    assert found.outcome != "cause" or state == "slower"
    assert found.outcome != "none" or state != "slower"
    assert found.confidence in ("low", "medium", "high")
    assert set(found.missing) <= SIGNALS
    assert found.sentence.endswith(".")
    for text in (found.sentence, found.because, found.other or ""):
        assert "None" not in text and "nan" not in text and "  " not in text
    judged = weigh(measures(over), findings, SYMPTOMS[state])
    open_causes = [c for c in CAUSES if judged[c].status == "cannot_tell" and not judged[c].risk]
    if found.outcome == "undetermined" and open_causes and "steps_logged" not in gone:
        assert found.missing, open_causes
    if found.outcome == "none" and not found.risks and state != "not_shown":
        assert not open_causes
