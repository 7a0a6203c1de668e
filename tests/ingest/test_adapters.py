"""The adapters: every key of the real runs is placed, and each trap of a framework's metrics holds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_audit.ingest.adapters import (
    CONDITION_FACTS,
    Adapter,
    AdapterError,
    Mapped,
    candidates,
    choose_adapter,
    expand,
    load_adapters,
    load_signals,
    map_keys,
    read_adapter,
    read_signals,
    setting_for,
)
from verl_audit.ingest.detect import FACTS, detect, plain

SHARED = Path(__file__).parents[2].parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="shared inputs are not here")
VERL = next(a for a in load_adapters() if a.framework == "verl")
SEP: dict[str, object] = {"trainer": "separate_async", "trainer_family": "v1", "is_async": True}
SYNC: dict[str, object] = {"trainer": "sync", "trainer_family": "v1", "is_async": False}
V0: dict[str, object] = {"trainer": "v0", "trainer_family": "v0", "is_async": False}
FA: dict[str, object] = {"trainer": "fully_async", "trainer_family": "fully_async", "is_async": True}
OSO: dict[str, object] = {"trainer": "one_step_off", "trainer_family": "one_step_off", "is_async": True}
SPANS = "training/off_policy/trajectory_spans/mean"


def one(key: str, facts: Mapping[str, object] | None = None, *others: str, adapter: Adapter = VERL) -> Mapped:
    found = map_keys(adapter, [key, *others], facts or {})
    return next(m for m in found.mapped if m.key == key)


def is_only_known(key: str, facts: Mapping[str, object], *others: str) -> bool:
    return key in map_keys(VERL, [key, *others], facts).known


def jsonl_values(path: Path) -> dict[str, tuple[float, float]]:
    values: dict[str, tuple[float, float]] = {}
    for line in path.read_text().splitlines():
        data: dict[str, Any] = json.loads(line)["data"]
        for key, value in data.items():
            number = float("nan") if value is None else float(value)
            low, high = values.get(key, (number, number))
            values[key] = (min(low, number), max(high, number))
    return values


def console_keys(path: Path) -> set[str]:
    text = path.read_text(errors="replace")
    lines = [line for line in text.splitlines() if re.search(r"\bstep:\d+ - ", line)]
    return {piece.rpartition(":")[0] for line in lines for piece in line.split(" - ")[1:] if ":" in piece}


# ------------------------------------------------------------------ real inputs


@needs_shared
@pytest.mark.parametrize("path", sorted(SHARED.glob("real_runs/*/file_logger/*/*.jsonl")), ids=lambda p: p.stem)
def test_every_key_of_a_real_run_is_mapped_or_known(path: Path) -> None:
    values = jsonl_values(path)
    facts = plain(detect(values, None, (), values))
    found = map_keys(VERL, values, facts)
    assert found.unknown == ()
    assert len(found.mapped) + len(found.known) == len(values)


@needs_shared
def test_old_public_log_leaves_only_the_users_own_keys_unknown() -> None:
    keys = console_keys(SHARED / "public_logs" / "verl_logicrl_m950nfkl_output.log")
    adapter, _ = choose_adapter(keys)
    assert adapter is VERL
    found = map_keys(adapter, keys, plain(detect(keys, None)))
    assert {key.split("/")[0] for key in found.unknown} == {"reward"}
    signals = {m.signal for m in found.mapped}
    assert {"validation", "mfu_actor", "time_gen", "entropy", "clip_share", "kl_ref"} <= signals


UNKNOWN_IN_CASES = {
    "hpt-m4-queue768-oscillation": {"actor/entropy_mean"},
    "hpt-probs-diff-placeholder": {
        "training/rollout_probs_diff_rl_mean",
        "training/rollout_actor_probs_pearson_corr_rl",
    },
}


@needs_shared
@pytest.mark.parametrize(
    ("case", "framework"),
    [
        ("hpt-m4-queue768-oscillation", "verl"),
        ("hpt-probs-diff-placeholder", "verl"),
        ("verl-7519-dapo-fp8-tensorwise", "verl"),
        ("mimo-flash-20steps", "mimo"),
        ("trl-5312-original-log", "trl"),
    ],
)
def test_keys_of_the_published_cases(case: str, framework: str) -> None:
    files = [p for p in (SHARED / "cases" / case).glob("*.jsonl") if not p.name.startswith("val_")]
    keys = {key for path in files for key in jsonl_values(path)}
    adapter, reason = choose_adapter(keys)
    assert adapter is not None
    assert adapter.framework == framework, reason
    assert set(map_keys(adapter, keys, {}).unknown) == UNKNOWN_IN_CASES.get(case, set())


@needs_shared
def test_lines_of_forks_keep_their_own_keys_unknown() -> None:
    entropy = console_keys(SHARED / "cases" / "entropy-21-one-line" / "console.log")
    assert map_keys(VERL, entropy, {}).unknown == ()
    agent = console_keys(SHARED / "cases" / "agent-r1-30-nan" / "console.log")
    own = {key.split("/")[0] for key in map_keys(VERL, agent, {}).unknown}
    assert own <= {"state_tokens", "critic", "turns"}


@needs_shared
def test_the_whole_trl_line_is_placed() -> None:
    text = (SHARED / "cases" / "trl-5312-original-log" / "console.log").read_text()
    keys = set(re.findall(r"'([^']+)':", text))
    adapter, _ = choose_adapter(keys)
    assert adapter is not None
    assert adapter.framework == "trl"
    assert map_keys(adapter, keys, {}).unknown == ()


# ------------------------------------------------------------------ inert, corrupt


def test_clip_share_is_inert_in_decoupled_mode_with_one_update_per_version() -> None:
    facts = {**SEP, "log_prob_mode": "decoupled", "on_policy_updates": True}
    for key in ("actor/pg_clipfrac", "actor/ppo_kl"):
        mapped = one(key, facts)
        assert mapped.inert_because is not None
        assert "cannot see staleness" in mapped.inert_because
        assert mapped.contains == ("update",)


def test_clip_share_with_several_updates_moves_but_holds_no_staleness() -> None:
    mapped = one("actor/pg_clipfrac", {**SEP, "log_prob_mode": "decoupled", "on_policy_updates": False})
    assert mapped.inert_because is None
    assert mapped.contains == ("update",)


def test_clip_share_in_bypass_mode_holds_everything() -> None:
    mapped = one("actor/pg_clipfrac", {**SEP, "log_prob_mode": "bypass", "on_policy_updates": True})
    assert mapped.inert_because is None
    assert mapped.contains == ("mismatch", "staleness", "update")
    assert "rollout" in mapped.against


def test_clip_share_of_an_unknown_mode_is_not_called_inert() -> None:
    mapped = one("actor/pg_clipfrac", {"on_policy_updates": True})
    assert mapped.inert_because is None
    assert "unknown" in mapped.against


def test_dual_clip_of_a_loss_without_one_is_inert() -> None:
    mapped = one("actor/pg_clipfrac_lower", {"loss_mode": "gspo", "log_prob_mode": "bypass"})
    assert mapped.inert_because is not None


def test_lag_is_inert_only_in_sync() -> None:
    key = "training/off_policy/trajectory_staleness/mean"
    assert one(key, SYNC).inert_because is not None
    assert one(key, SEP).inert_because is None
    assert one(key, {"trainer_family": "v1"}).inert_because is None


def test_clip_ratio_is_no_truncation_rate_in_v1() -> None:
    key = "response_length/clip_ratio"
    assert one(key, SEP).corrupt_because is not None
    assert one(key, {"trainer_family": "v1"}).corrupt_because is not None
    assert one(key, {}).corrupt_because is not None
    assert one(key, V0).corrupt_because is None
    assert one(key, FA).corrupt_because is None


@pytest.mark.parametrize("name", ["log_ppl_abs_diff", "chi2_seq", "rollout_is_seq_mean"])
def test_means_per_trajectory_are_corrupt_in_v1(name: str) -> None:
    assert one(f"rollout_corr/{name}", SYNC).corrupt_because is not None
    assert one(f"rollout_corr/{name}", V0).corrupt_because is None


def test_token_means_are_believed_in_v1() -> None:
    assert one("rollout_corr/kl", SYNC).corrupt_because is None


def test_throughput_of_one_step_off_is_corrupt() -> None:
    assert one("perf/throughput", OSO).corrupt_because is not None
    assert one("perf/throughput", SEP).corrupt_because is None


def test_largest_weight_saturates_in_token_mode_only() -> None:
    key = "rollout_corr/rollout_is_max"
    assert one(key, {"correction": "token"}).inert_because is not None
    sequence = one(key, {"correction": "sequence"})
    assert sequence.inert_because is None
    assert sequence.weight == "trajectory"
    assert "raw" in sequence.against


def test_learning_rate_printed_with_three_decimals_is_inert() -> None:
    assert one("actor/lr", {"three_decimals": True}).inert_because is not None
    assert one("actor/lr", {"three_decimals": False}).inert_because is None


# ------------------------------------------------------------------ meaning


def test_staleness_is_not_in_the_gap_of_a_sync_run() -> None:
    assert one("training/rollout_probs_diff_mean", SYNC).contains == ("mismatch",)
    assert one("training/rollout_probs_diff_mean", SEP).contains == ("mismatch", "staleness")
    assert one("training/rollout_probs_diff_mean", {}).contains == ("mismatch", "staleness")


def test_probability_gap_is_not_a_log_prob_gap() -> None:
    assert one("training/rollout_probs_diff_mean").unit_kind == "probability"
    assert one("rollout_corr/kl").unit_kind == "log_prob"


def test_gap_of_the_actor_is_against_theta_and_contains_the_update() -> None:
    mapped = one("actor/rollout_corr/kl", FA)
    assert (mapped.signal, mapped.contains) == ("gap_kl", ("mismatch", "staleness", "update"))
    assert mapped.against.startswith("theta")


def test_gen_is_generation_in_sync_and_waiting_in_async() -> None:
    assert one("timing_s/gen", SYNC).signal == "time_gen"
    assert one("timing_s/gen", V0).signal == "time_gen"
    assert one("timing_s/gen", SEP).signal == "wait_seconds"
    assert one("timing_s/gen", OSO).signal == "wait_seconds"
    assert one("timing_s/gen", {"trainer_family": "v1", "is_async": True}).signal == "wait_seconds"
    assert is_only_known("timing_s/gen", {})
    assert is_only_known("timing_s/gen", FA)


def test_num_preempted_is_not_seconds() -> None:
    assert is_only_known("timing_s/agent_loop/num_preempted/mean", V0)
    note = next(k.note for k in VERL.known if k.pattern.fullmatch("timing_s/agent_loop/num_preempted/max"))
    assert "not seconds" in note


def test_spans_with_and_without_the_plus_one_are_different_signals() -> None:
    assert one("training/off_policy/trajectory_spans/max", SEP).signal == "span_max"
    assert one("fully_async/partial/max_partial_span", FA).signal == "partial_span_max"
    assert load_signals()["span_max"].on_policy == 1
    assert load_signals()["partial_span_max"].on_policy == 0


def test_age_of_evicted_groups_is_not_a_lag() -> None:
    mapped = one("training/off_policy/evicted_samples_staleness/mean", SEP)
    assert (mapped.signal, mapped.weight, mapped.on_policy) == ("stale_age_mean", "group", None)


def test_fully_async_names_that_say_staleness_and_mean_something_else() -> None:
    assert one("fully_async/count/dropped_stale_samples", FA).signal == "overflow_groups_total"
    assert one("fully_async/count/staleness_samples", FA).signal == "in_flight_groups"
    assert is_only_known("training/global_step", FA)
    assert one("training/global_step", SEP).signal == "global_step"


def test_a_repeating_key_gives_way() -> None:
    assert is_only_known("perf/time_per_step", SEP, "timing_s/step")
    assert one("perf/time_per_step", SEP).signal == "time_step"
    assert is_only_known("actor/entropy_loss", SEP, "actor/entropy")
    assert is_only_known("num_turns/mean", SEP, "training/num_turns/mean")
    assert is_only_known("timing_s/sync_rollout_weights", OSO, "timing_s/update_weights")


@pytest.mark.parametrize(
    ("key", "signal", "label"),
    [
        ("val-core/math/algebra/acc/mean@8", "validation", "math/algebra/acc/mean@8"),
        ("val-aux/math/reward/best@4/mean", "validation_aux", "math/reward/best@4/mean"),
        ("val/test_score/gsm8k", "validation", "gsm8k"),
        ("test_score/gsm8k", "validation", "gsm8k"),
        ("val/mean@8", "validation", "mean@8"),
        ("mfu/actor", "mfu_actor", None),
        ("timing/gen", "time_gen", None),
        ("timing/step", "time_step", None),
        ("critic/score", "score_trained", None),
        ("actor/entropy_loss", "entropy", None),
        ("mismatch/mismatch_k3_kl", "gap_k3", None),
        ("timing_s/wait_prev_gen", "wait_seconds", None),
        ("timing_s/sync_rollout_weights", "time_update_weights", None),
        ("timing_s/timing_s/param_sync", "time_update_weights", None),
        ("training/off_policy/dropped_samples", "stale_groups", None),
        ("training/off_policy/dropped_samples_staleness/max", "stale_age_max", None),
        ("checkpoint_engine/payload_mb", "sync_payload_mb", None),
    ],
)
def test_old_and_labelled_names(key: str, signal: str, label: str | None) -> None:
    mapped = one(key, V0)
    assert (mapped.signal, mapped.label) == (signal, label)


def test_a_key_of_nobody_is_unknown() -> None:
    assert map_keys(VERL, ["val-aux/num_turns/mean", "my/own"], {}).unknown == ("my/own",)


# ------------------------------------------------------------------ zero fill, shift


@pytest.mark.parametrize(
    ("key", "facts", "filled"),
    [
        ("training/off_policy/evicted_samples", SEP, True),
        ("training/off_policy/evicted_samples", SYNC, True),
        ("training/off_policy/evicted_samples", {"trainer_family": "v1", "is_async": True}, True),
        ("training/off_policy/evicted_samples", {"trainer_family": "v1"}, True),
        ("training/off_policy/evicted_samples", FA, False),
        ("training/off_policy/evicted_samples", {}, False),
        ("training/off_policy/dropped_samples", SEP, True),
        ("training/filter_groups/evicted_samples", SYNC, True),
        ("training/rollout_failure/evicted_samples", SYNC, True),
        ("training/rollout_failure/evicted_samples", SEP, True),
        ("training/off_policy/evicted_samples_staleness/mean", SEP, False),
        ("critic/rewards/mean", SEP, False),
    ],
)
def test_zero_is_filled_in_only_where_an_absent_key_means_zero(
    key: str, facts: Mapping[str, object], filled: bool
) -> None:
    assert one(key, facts, SPANS).zero_with == (SPANS if filled else None)


def test_a_count_never_logged_is_implied_to_be_zero() -> None:
    implied = {m.signal: m for m in map_keys(VERL, [SPANS], SEP).implied}
    assert set(implied) == {"stale_groups", "filtered_groups", "surplus_groups", "failed_groups"}
    assert implied["stale_groups"].zero_with == SPANS
    assert {m.signal for m in map_keys(VERL, [SPANS], SYNC).implied} == set(implied), "sync evicts none: 0 as well"
    assert map_keys(VERL, ["fully_async/partial/partial_ratio"], FA).implied == ()
    dropped = map_keys(VERL, [SPANS, "training/off_policy/dropped_samples"], SEP).implied
    assert "stale_groups" not in {m.signal for m in dropped}


def test_fully_async_rows_are_late_except_the_rollouters() -> None:
    assert VERL.axis_key == "fully_async/count/current_param_version"
    assert VERL.is_shifted("critic/rewards/mean")
    for key in ("fully_async/rollouter/idle_ratio", "val-core/x/acc/mean@1", "rollouter/validate_time"):
        assert not VERL.is_shifted(key)


# ------------------------------------------------------------------ choosing, settings


def test_adapter_is_chosen_by_distinctive_keys() -> None:
    assert choose_adapter(["critic/score/mean", "actor/pg_loss"])[0] is VERL
    adapter, reason = choose_adapter(["my/own", "loss"])
    assert adapter is None
    assert "none of the 2 keys" in reason
    trl, _ = choose_adapter(["train/completions/mean_length", "train/reward"])
    assert trl is not None
    assert map_keys(trl, ["train/reward"], {}).mapped[0].signal == "reward_trained"


CAUSE_SIGNALS = """
gap_prob_mean gap_prob_max gap_prob_std gap_prob_valid gap_pearson gap_kl gap_k3 gap_logppl_abs gap_logp_abs
chi2_token chi2_seq ess is_weight_mean is_weight_max is_weight_min is_weight_std is_weight_seq_mean tis_share
rs_masked_share lag_mean lag_newest_mean lag_newest_max lag_newest_min lag_oldest_mean lag_oldest_max
lag_oldest_min span_mean span_max span_min stale_groups stale_age_mean stale_age_max stale_age_min
filtered_groups surplus_groups failed_groups overflow_groups_total generated_groups generated_groups_total
stale_trajectories_total in_flight_groups partial_share partial_trajectories partial_span_max queue_size
time_update_weights param_version sync_payload_mb entropy clip_share ppo_kl
""".split()  # noqa: SIM905


@pytest.mark.parametrize("signal", CAUSE_SIGNALS)
def test_every_signal_a_cause_needs_has_a_setting_or_an_honest_no(signal: str) -> None:
    assert setting_for(signal, VERL)


def test_settings_name_full_keys_and_absent_metrics_say_so() -> None:
    assert "actor_rollout_ref.rollout.calculate_log_probs=true" in (setting_for("gap_prob_mean", VERL) or "")
    assert (setting_for("gap_logp_abs", VERL) or "").startswith("verl has no metric for it")


def test_candidates_narrow_with_what_is_known() -> None:
    assert candidates({"trainer_family": "v1", "is_async": False}) == {"sync"}
    assert candidates({"is_async": False}) == {"sync", "v0"}
    assert candidates({"trainer": "v0"}) == {"v0"}


# ------------------------------------------------------------------ definition files


def test_conditions_use_facts_that_detection_derives() -> None:
    assert set(FACTS) >= CONDITION_FACTS


def test_mapped_signals_say_what_they_contain() -> None:
    for adapter in load_adapters():
        for entry in adapter.maps:
            if entry.signal.startswith(("gap_k", "gap_p", "chi2", "lag_", "clip_", "is_")):
                assert entry.contains or entry.signal == "gap_prob_valid", (adapter.framework, entry.key)


def test_braces_expand_in_order() -> None:
    assert expand("a/{x,y}_z") == ["a/x_z", "a/y_z"]
    assert expand("a") == ["a"]


HEAD = 'framework = "x"\nadapter_version = 1\ncovers = "all"\ndistinctive = []\n'


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('[[map]]\nkey = "a"\nsignal = "nope"', r"x\.toml, \[\[map\]\] number 1 \(a\): signal 'nope'"),
        ('[[map]]\npattern = "a("\nsignal = "lr"', "is no regular expression"),
        ('[[map]]\nkey = "a"', "signal is missing"),
        ('[[map]]\nsignal = "lr"', "needs either key or pattern"),
        ('[[map]]\nkey = "{a,b}"\nsignal = "lr"', "key stands for 2 names, signal for 1"),
        ('[[map]]\nkey = "a"\nsignal = "lr"\ncolour = 1', "colour is not a field"),
        ('[[map]]\nkey = "a"\nsignal = "lr"\ncontains = ["luck"]', "contains 'luck'"),
        ('[[map]]\nkey = "a"\nsignal = "lr"\ntrainers = ["v9"]', "trainer 'v9'"),
        ('[[map]]\nkey = "a"\nsignal = "lr"\nwhen = { moon = ["full"] }', "fact 'moon'"),
        ('[[known]]\npattern = "a"', "note is missing"),
        ("[unrecorded]\nnope = 'x'", "signal 'nope'"),
        ("[[map", r"x\.toml: "),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(HEAD + entry)
    with pytest.raises(AdapterError, match=message):
        read_adapter(path, load_signals())


def test_a_wrong_signal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        '[signal.a]\ntitle = "A"\nunit = "1"\nunit_kind = "furlong"\nweight = "token"\nreducer = "mean"\n'
        'description = "A."\n'
    )
    with pytest.raises(AdapterError, match=r"s\.toml, \[signal\.a\]: unit_kind 'furlong'"):
        read_signals(path)
