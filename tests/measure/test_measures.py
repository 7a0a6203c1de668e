"""Every measure on small runs whose answer is known without the product."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_audit.diagnose.rules import builtin_dir, load_files
from verl_audit.measure.compute import Context, compute
from verl_audit.measure.eviction import ledger
from verl_audit.measure.gap import at_lag0, ess_series, is_on_policy, lag0_steps
from verl_audit.measure.health import ONSETS
from verl_audit.measure.lag import in_updates
from verl_audit.measure.model import Measure, MeasureDef, catalog
from verl_audit.measure.run import EMPTY, SELECTION, RunData, Series, without_value
from verl_audit.measure.speed import Symptom

Points = Mapping[int, float] | float
SYNC: Mapping[str, Any] = {"trainer": "sync", "is_async": False, "log_prob_mode": "decoupled"}
ASYNC: Mapping[str, Any] = {"trainer": "separate_async", "is_async": True, "log_prob_mode": "decoupled"}


def series(points: Points, steps: int = 40) -> Series:
    at = points if isinstance(points, Mapping) else dict.fromkeys(range(1, steps + 1), points)
    return Series(np.array(sorted(at), dtype=float), np.array([at[s] for s in sorted(at)], dtype=float))


def run(facts: Mapping[str, Any] | None = None, **signals: Points) -> RunData:
    made = {name: series(points) for name, points in signals.items()}
    labels = {"validation": {"toy": made["validation"]}} if "validation" in made else {}
    return RunData("r", made, labels, facts=dict(SYNC if facts is None else facts))


def measures(data: RunData, *baselines: RunData, context: Context | None = None) -> Mapping[str, Measure]:
    return compute(data, baselines, context or Context())[0]


def value(data: RunData, name: str, *baselines: RunData) -> Any:
    return measures(data, *baselines)[name].value


def noisy(level: float, sd: float, steps: int = 60, seed: int = 0) -> dict[int, float]:
    rng = np.random.default_rng(seed)
    return {s: level + sd * float(rng.standard_normal()) for s in range(1, steps + 1)}


# -- the contract -----------------------------------------------------------------------------------------------


def full() -> tuple[RunData, RunData]:
    """A run with a baseline in which every signal any measure asks for is logged."""
    needed = sorted({s for d in catalog().values() for need in d.needs for s in need})
    steps = range(1, 61)
    moving = {s: 0.3 + 0.1 * math.sin(s) + s / 1000 for s in steps}
    signals: dict[str, Points] = dict.fromkeys(needed, moving)
    signals |= {name: {s: float(s % 3) for s in steps} for name in needed if name.endswith("_groups")}
    signals |= {name: {s: 20.0 * s for s in steps} for name in needed if name.endswith("_total")}
    signals |= {
        "lag_oldest_max": {s: float(s > 20) for s in steps},
        "gap_kl": {**moving, 1: 0.0},
        "gap_logp_abs": moving,
        **{key: {**moving, **dict.fromkeys((2, 3), 1.0), 1: 0.0} for key in ("lag_newest_mean", "lag_oldest_mean")},
        "lr": {s: 1.0 if s < 50 else 0.01 for s in steps},
        "score_trained_min": dict.fromkeys(steps, 0.0),
        "score_trained_max": dict.fromkeys(steps, 1.0),
    }
    signals |= {name: {s: 0.3 + (s > 30) + 0.01 * math.sin(s) for s in steps} for name in ONSETS.values()}
    signals |= {
        "validation": {s: 1 - math.exp(-s / 20) + 0.001 * math.cos(s) - 0.01 * max(s - 30, 0) for s in range(0, 61, 5)}
    }
    facts = {
        "trainer": "fully_async",
        "is_async": True,
        "log_prob_mode": "bypass",
        "groups_per_step": 1000.0,
        "samples_per_step": 8000.0,
        "updates_per_version": 2.0,
        "train_files": "a.parquet",
        "fa_staleness_share": 0.5,
    }
    made = run(facts, **signals)
    return replace(made, nonfinite={"grad_norm": (7,)}), made


def test_every_entry_of_the_catalogue_is_a_fact_or_is_produced() -> None:
    data, baseline = full()
    found = measures(data, baseline, context=Context(recipe=("lr is 2, the baseline's 1",)))
    assert list(found) == list(catalog())
    dead = [n for n, m in found.items() if m.value is None and catalog()[n].unit != "fact" and not catalog()[n].traces]
    assert dead == []


@pytest.mark.parametrize("facts", [{}, SYNC, ASYNC, {"trainer": "fully_async", "is_async": True}])
@pytest.mark.parametrize("baseline", [False, True])
def test_no_value_comes_with_a_reason_and_no_reason_with_a_value(facts: Mapping[str, Any], baseline: bool) -> None:
    for data in (run(facts), run(facts, gap_prob_mean=0.1), run(facts, lag_mean={3: 1.0}), run(facts, grad_norm=1.0)):
        for measure in measures(data, *([run()] if baseline else [])).values():
            assert (measure.value is None) == bool(measure.missing), measure
            assert not (isinstance(measure.value, float) and math.isnan(measure.value)), measure


def test_rules_name_only_measures_of_the_catalogue() -> None:
    stems = {*catalog(), *(f"{n}{s}" for n in catalog() for s in ("_low", "_high", "_n"))}
    named = {m for r in load_files([builtin_dir()]) for case in r.cases for m in case.measures}
    assert named <= stems


def test_a_measure_without_value_names_the_signals_it_wants() -> None:
    found = measures(run())["gap_prob_lag0_ratio"]
    assert found.wants == ("gap_prob_mean", "lag_oldest_max", "baseline")
    assert "no baseline run was given" in found.missing


def test_inert_and_corrupt_signals_are_named_as_such() -> None:
    definition = MeasureDef("clip_share", "share", "", (("clip_share",),))
    inert = replace(run(clip_share=0.0), inert={"clip_share": "it is 0 by construction"})
    assert "inert: it is 0 by construction" in without_value(definition, inert, has_baseline=False).missing
    corrupt = replace(run(), corrupt={"clip_share": "rows are padded"})
    assert "rows are padded" in without_value(definition, corrupt, has_baseline=False).missing


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(
    st.dictionaries(
        st.sampled_from(sorted({s for d in catalog().values() for need in d.needs for s in need})),
        st.dictionaries(st.integers(0, 30), finite, max_size=12),
        max_size=12,
    ),
    st.sampled_from([{}, SYNC, ASYNC, {"trainer": "fully_async", "is_async": True, "groups_per_step": 4.0}]),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_no_log_breaks_a_measure(signals: dict[str, dict[int, float]], facts: dict[str, Any]) -> None:
    data = run(facts, **signals)
    for measure in measures(data, data).values():
        assert (measure.value is None) == bool(measure.missing)


# -- step 1 -----------------------------------------------------------------------------------------------------


def test_lag0_steps_are_those_whose_largest_lag_is_0() -> None:
    lag = {1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 2.0}
    data = run(
        ASYNC, lag_oldest_max=lag, lag_newest_max=dict.fromkeys(lag, 0.0), gap_prob_mean={s: s / 10 for s in lag}
    )
    steps = lag0_steps(data)
    assert steps is not None and list(steps) == [1, 2, 4]
    assert value(data, "lag0_steps") == 3
    assert value(data, "gap_prob_lag0") == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert value(data, "gap_prob_mean") == pytest.approx(0.3)


def test_without_lag_a_synchronous_run_is_lag_0_and_an_asynchronous_one_unknown() -> None:
    assert value(run(gap_prob_mean=0.004), "gap_prob_lag0") == pytest.approx(0.004)
    asynchronous = run(ASYNC, gap_prob_mean=0.004)
    assert lag0_steps(asynchronous) is None
    assert at_lag0(asynchronous, asynchronous.get("gap_prob_mean")) is EMPTY
    assert value(asynchronous, "gap_prob_lag0") is None
    assert lag0_steps(run({}, gap_prob_mean=0.004)) is None


def test_ratio_against_a_baseline() -> None:
    ours, theirs = run(gap_prob_mean=noisy(0.012, 0.0005)), run(gap_prob_mean=noisy(0.004, 0.0002, seed=1))
    found = measures(ours, theirs)["gap_prob_lag0_ratio"]
    assert found.value == pytest.approx(3, abs=0.1)
    assert found.low is not None and found.high is not None and found.low < 3 < found.high


def test_the_log_prob_gap_is_read_whatever_the_lag() -> None:
    found = measures(run(ASYNC, gap_logp_abs=0.8))
    assert found["gap_logp_mean"].value == pytest.approx(0.8)
    assert found["gap_logp_lag0"].value is None


def test_on_policy_is_lag_0_in_every_step() -> None:
    assert is_on_policy(run()) and is_on_policy(run(ASYNC, lag_mean=0.0))
    assert not is_on_policy(run(ASYNC)) and not is_on_policy(run(ASYNC, lag_mean={1: 0.0, 2: 0.1}))


def test_no_ratio_to_a_baseline_that_is_no_level() -> None:
    for level in (0.0, -0.001):
        assert value(run(gap_kl=0.01), "gap_kl_ratio", run(gap_kl=level)) is None
    assert value(run(gap_kl=0.01), "gap_kl_ratio", run(gap_kl=noisy(0.0001, 0.01))) is None


def test_a_ratio_pairs_a_gauge_with_itself() -> None:
    assert value(run(gap_prob_mean=0.01), "gap_prob_ratio", run(gap_kl=0.01)) is None


@given(st.floats(-0.4, 50))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_ess_from_chi2(chi2: float) -> None:
    data = run(chi2_token=chi2)
    assert ess_series(data).value == pytest.approx(1 / (1 + chi2))
    assert value(data, "ess") == pytest.approx(min(1.0, 1 / (1 + chi2)))


def test_logged_ess_comes_before_chi2() -> None:
    assert value(run(ess=0.5, chi2_token=0.0), "ess") == 0.5


def test_gauges_that_cannot_describe_the_same_tokens() -> None:
    assert value(run(gap_prob_mean=0.2, chi2_token=0.01), "gauge_contradiction") == pytest.approx(2.0)
    assert value(run(gap_prob_mean=0.05, ess=1 / 1.01), "gauge_contradiction") == pytest.approx(0.5)
    truncated = run(gap_prob_mean=0.5, ess=0.9, chi2_token=4.0)
    assert value(truncated, "gauge_contradiction") == pytest.approx(0.25)


@pytest.mark.parametrize("ess", [0.0, 1.0])
def test_an_ess_at_its_ends_breaks_nothing(ess: float) -> None:
    assert value(run(gap_prob_mean=0.1, ess=ess), "ess") == ess


def test_gap_over_time() -> None:
    grown = {s: 0.002 * (1 if s <= 13 else 2 if s <= 26 else 3) for s in range(1, 40)}
    assert value(run(gap_prob_mean=grown), "gap_trend") == pytest.approx(3)
    assert value(run(gap_prob_mean={1: 0.01, 2: 0.05, 3: 0.07}), "gap_after_first_sync") == pytest.approx(6)
    assert value(run(gap_prob_mean={500: 0.01, 501: 0.05}), "gap_after_first_sync") is None
    assert value(run(gap_prob_mean={1: 0.1, 2: 0.1}), "gap_trend") is None


# -- step 2 -----------------------------------------------------------------------------------------------------


def test_mean_lag_is_the_middle_of_newest_and_oldest() -> None:
    data = run({**ASYNC, "updates_per_version": 4.0}, lag_newest_mean=1.0, lag_oldest_mean=2.0)
    assert value(data, "lag_mean") == 1.5
    assert value(data, "lag_updates") == in_updates(1.5, 4) == 4 * 1.5 + 1.5
    unknown = measures(run(ASYNC, lag_mean=1.0))["lag_updates"]
    assert unknown.value is None and "updates per version" in unknown.missing


def test_lag_extremes_and_the_first_step() -> None:
    data = run(ASYNC, lag_newest_min={1: 1.0, 2: -1.0}, lag_newest_max={1: 3.0, 2: 5.0})
    assert (value(data, "lag_min"), value(data, "lag_first_step"), value(data, "lag_newest_max")) == (-1, 1, 5)
    assert value(run(ASYNC, lag_newest_min={500: 1.0}), "lag_first_step") is None


def test_lag_trend_is_per_100_steps() -> None:
    assert value(run(ASYNC, lag_mean={s: s / 50 for s in range(1, 61)}), "lag_trend") == pytest.approx(2)


def test_a_gap_that_follows_the_lag_and_one_that_does_not() -> None:
    lag = {s: 1 + math.sin(s) for s in range(1, 60)}
    together = run(ASYNC, lag_mean=lag, gap_prob_mean={s: 0.01 * v for s, v in lag.items()})
    assert value(together, "lag_gap_correlation") == pytest.approx(1)
    apart = run(ASYNC, lag_mean=lag, gap_prob_mean=noisy(0.01, 0.001, 59))
    assert abs(value(apart, "lag_gap_correlation")) < 0.4
    assert value(run(ASYNC, lag_mean=2.0, gap_prob_mean=0.1), "lag_gap_correlation") is None


def test_stale_share_survives_a_restart_of_the_counter() -> None:
    facts = {"trainer": "fully_async", "is_async": True, "samples_per_step": 10.0}
    counts = {1: 5.0, 2: 10.0, 3: 15.0, 4: 5.0, 5: 10.0}
    assert value(run(facts, stale_trajectories_total=counts), "stale_share") == pytest.approx(20 / 40)


# -- damage -----------------------------------------------------------------------------------------------------


def test_damage_is_split_in_a_bracket() -> None:
    lag = {s: float(s > 4) for s in range(1, 41)}
    data = run(ASYNC, lag_oldest_max=lag, gap_prob_mean={s: 0.03 if v else 0.01 for s, v in lag.items()}, ess=0.8)
    found = measures(data)
    r = 0.01 / (0.03 * 0.9 + 0.01 * 0.1)
    share = found["mismatch_share"]
    assert (share.low, share.value, share.high) == pytest.approx((r * r, (r + r * r) / 2, r))
    assert found["off_policy_loss"].value == pytest.approx(0.1)
    mismatch, stale = found["damage_mismatch"], found["damage_staleness"]
    assert (mismatch.low, mismatch.high) == pytest.approx((0.1 * r * r, 0.1 * r))
    assert (stale.low, stale.high) == pytest.approx((0.1 * (1 - r), 0.1 * (1 - r * r)))
    assert mismatch.value + stale.value == pytest.approx(0.1)  # type: ignore[operator]


def test_enough_lag_0_steps_split_the_damage_by_their_own_ess() -> None:
    lag = {s: float(s > 10) for s in range(1, 41)}
    data = run(ASYNC, lag_oldest_max=lag, gap_prob_mean=0.03, ess={s: 0.7 if v else 0.98 for s, v in lag.items()})
    found = measures(data)
    loss = (1 - (0.7 * 0.75 + 0.98 * 0.25)) / 2
    assert found["damage_mismatch"].value == pytest.approx(0.01)
    assert found["damage_staleness"].value == pytest.approx(loss - 0.01)


def test_at_lag_0_all_of_the_loss_is_mismatch_less_the_baseline() -> None:
    data, baseline = run(gap_prob_mean=0.02, ess=0.9), run(gap_prob_mean=0.004, ess=0.98)
    assert value(data, "mismatch_share") == 1
    assert value(data, "damage_mismatch") == pytest.approx(0.05)
    assert value(data, "damage_mismatch", baseline) == pytest.approx(0.04)
    assert value(data, "damage_staleness") == 0


def test_without_lag_0_and_without_a_like_baseline_the_split_is_unknown_but_bounded() -> None:
    data = run({**ASYNC, "rollout_dtype": "fp8"}, lag_oldest_max=3.0, gap_prob_mean=0.02, ess=0.8)
    for found in (measures(data), measures(data, run({**SYNC, "rollout_dtype": "bf16"}, gap_prob_mean=0.01))):
        for name in ("damage_mismatch", "damage_staleness"):
            assert found[name].value is None and found[name].missing
            assert (found[name].low, found[name].high) == pytest.approx((0.0, 0.1))


def test_a_baseline_of_equal_numerics_gives_the_level_at_lag_0() -> None:
    numerics = {"rollout_quantization": "none", "rollout_dtype": "bf16", "trainer_dtype": "bf16"}
    data = run({**ASYNC, **numerics}, lag_oldest_max=3.0, gap_prob_mean=0.02, ess=0.8)
    baseline = run({**SYNC, **numerics}, gap_prob_mean=0.005)
    assert measures(data, baseline)["mismatch_share"].high == pytest.approx(0.25)


def test_a_run_that_borrows_its_level_from_the_baseline_has_the_mismatch_of_the_baseline() -> None:
    """Lag 6 and an ESS of .7 where the like baseline has .99: all of the loss beyond it is staleness."""
    numerics = {"rollout_quantization": "none", "rollout_dtype": "bf16", "trainer_dtype": "bf16"}
    baseline = run({**SYNC, **numerics}, gap_prob_mean=0.004, ess=0.99)
    for gap in (0.004, 0.02):
        found = measures(run({**ASYNC, **numerics}, lag_oldest_max=6.0, gap_prob_mean=gap, ess=0.7), baseline)
        assert found["damage_mismatch"].value == 0
        assert found["damage_staleness"].value == pytest.approx(0.15 - 0.005)
        assert found["damage_mismatch"].high == pytest.approx(0.004 / gap * 0.15 - 0.005)


def test_clip_counts_only_in_bypass_mode() -> None:
    bypass = {**ASYNC, "log_prob_mode": "bypass"}
    assert value(run(bypass, clip_share=0.1), "off_policy_loss") == pytest.approx(0.1)
    assert value(run(bypass, clip_share=0.1), "clip_excess", run(bypass, clip_share=0.03)) == pytest.approx(0.07)
    for facts in (ASYNC, {**ASYNC, "log_prob_mode": None}):
        assert value(run(facts, clip_share=0.1), "clip_share") is None
        assert value(run(facts, clip_share=0.1), "off_policy_loss") is None
    inert = replace(run(bypass, clip_share=0.0), inert={"clip_share": "constant"})
    assert measures(inert)["clip_share"].value is None


# -- step 3 -----------------------------------------------------------------------------------------------------

BATCH = {**ASYNC, "groups_per_step": 10.0}


def evicting(facts: Mapping[str, Any] = BATCH, **signals: Points) -> RunData:
    none = {"stale_groups": 0.0, "failed_groups": 0.0, "filtered_groups": 0.0, "surplus_groups": 0.0, "grad_norm": 1.0}
    return run(facts, **{**none, **signals})


def test_the_ledger_sums_up() -> None:
    data = evicting(stale_groups={1: 30.0, 5: 10.0}, failed_groups={2: 20.0}, filtered_groups={3: 40.0})
    counts = ledger(data)
    assert counts["trained_groups"] == 400
    assert counts["decided"] == 400 + 40 + 20 + 40
    assert value(data, "stale_groups") == 40
    found = measures(data)["stale_groups_share"]
    assert found.value == pytest.approx(40 / 500)
    assert found.low is not None and found.high is not None and found.low < 0.08 < found.high
    assert value(data, "evicted_share") == pytest.approx(60 / 500)
    assert value(data, "filtered_share") == pytest.approx(40 / 500)
    assert value(data, "reward_admissible") is False
    assert value(evicting(stale_groups={1: 20.0}), "reward_admissible") is True


def test_a_fate_the_trainer_has_not_is_0_and_one_it_has_is_unknown() -> None:
    assert value(run(grad_norm=1.0), "stale_groups") == 0
    assert value(run(ASYNC, grad_norm=1.0), "stale_groups") is None
    assert value(run({}, grad_norm=1.0), "evicted_share") is None


def test_nothing_evicted_is_0_whatever_the_batch() -> None:
    assert value(run(grad_norm=1.0), "evicted_share") == 0
    assert value(run(grad_norm=1.0), "reward_admissible") is True
    assert value(run(grad_norm=1.0), "damage_eviction") == 0


def test_without_the_batch_size_a_share_has_a_lower_bound_only() -> None:
    """Trained trajectories are tokens over length; at least two make a group."""
    data = evicting(
        ASYNC, stale_groups=10.0, tokens_step=64 * 150.0, response_length_mean=100.0, prompt_length_mean=50.0
    )
    found = measures(data)["stale_groups_share"]
    assert found.value is None and found.high is None
    assert found.low == pytest.approx(400 / (32 * 40 + 400))
    assert value(data, "reward_admissible") is False
    few = evicting(
        ASYNC, stale_groups={1: 1.0}, tokens_step=64 * 150.0, response_length_mean=100.0, prompt_length_mean=50.0
    )
    assert value(few, "reward_admissible") is None


def test_counters_that_contradict_each_other_stay_shares() -> None:
    facts = {"trainer": "fully_async", "is_async": True}
    data = run(facts, overflow_groups_total={1: 9.0, 2: 12.0}, generated_groups_total={1: 5.0, 2: 10.0})
    assert value(data, "overflow_share") == 1
    assert value(evicting(stale_groups=-1.0), "stale_groups_share") == 0


SAME = {**BATCH, "train_files": "toy.parquet"}


def test_prompt_length_shift_needs_the_same_data() -> None:
    ours, theirs = evicting(SAME, prompt_length_mean=40.0), evicting(SAME, prompt_length_mean=50.0)
    assert value(ours, "prompt_length_shift", theirs) == pytest.approx(math.log(0.8))
    other = evicting({**BATCH, "train_files": "math.parquet"}, prompt_length_mean=50.0)
    assert value(ours, "prompt_length_shift", other) is None
    assert value(ours, "prompt_length_shift", evicting(BATCH, prompt_length_mean=50.0)) is None


def test_a_length_shift_is_read_where_both_ran() -> None:
    """Responses grow in both runs alike; the run was resumed at 41 and the baseline covers 1 to 80."""
    ours = evicting(SAME, response_length_mean={s: 100.0 + s for s in range(41, 121)})
    theirs = evicting(SAME, response_length_mean={s: 100.0 + s for s in range(1, 81)})
    assert value(ours, "response_length_shift", theirs) == pytest.approx(0)
    apart = evicting(SAME, response_length_mean=dict.fromkeys(range(200, 230), 1.0))
    assert value(apart, "response_length_shift", theirs) is None


def test_damage_of_eviction_is_bounded_by_what_was_evicted() -> None:
    theirs = evicting(SAME, prompt_length_mean=noisy(50.0, 1.0, 40, seed=2))
    ours = evicting(SAME, stale_groups=1.0, prompt_length_mean=noisy(48.0, 1.0, 40))
    found = measures(ours, theirs)["damage_eviction"]
    assert found.value == pytest.approx(1 - 48 / 50, abs=0.01)
    far = evicting(SAME, stale_groups=1.0, prompt_length_mean=noisy(20.0, 1.0, 40))
    assert value(far, "damage_eviction", theirs) == pytest.approx(1 / 11)
    unknown = measures(evicting(stale_groups=1.0))["damage_eviction"]
    assert unknown.value is None
    assert (unknown.low, unknown.high) == pytest.approx((0.0, 1 / 11))


def test_clumping_is_corrected_for_groups_per_step() -> None:
    """A mean over 4 times fewer groups varies 4 times as much, and is no clumping."""
    theirs = evicting({**SAME, "groups_per_step": 40.0}, prompt_length_mean=noisy(50.0, 1.0, 400, seed=3))
    ours = evicting({**SAME, "groups_per_step": 10.0}, prompt_length_mean=noisy(50.0, 2.0, 400, seed=4))
    assert value(ours, "batch_clumping", theirs) == pytest.approx(1, abs=0.25)
    clumped = evicting({**SAME, "groups_per_step": 10.0}, prompt_length_mean=noisy(50.0, 4.0, 400, seed=4))
    assert value(clumped, "batch_clumping", theirs) == pytest.approx(4, abs=1)


def test_divergence_of_trained_and_validation_reward() -> None:
    steps = range(5, 105, 5)
    theirs = run(reward_trained=dict.fromkeys(range(1, 105), 0.5), validation=dict.fromkeys(steps, 0.5))
    ours = run(reward_trained=dict.fromkeys(range(1, 105), 0.7), validation=dict.fromkeys(steps, 0.4))
    assert value(ours, "trained_val_divergence", theirs) == pytest.approx(0.3)
    assert value(ours, "trained_val_divergence") is None
    few = run(reward_trained=0.5, validation={5: 0.4, 10: 0.4})
    assert value(few, "trained_val_divergence", theirs) is None


# -- step 4 and resources ---------------------------------------------------------------------------------------


def test_admission_pause_is_the_part_of_a_cycle_in_which_the_quota_is_used_up() -> None:
    """50 groups left over rise evenly to the quota of 150 in the first part of the cycle, and stay there."""
    facts = {"trainer": "fully_async", "groups_per_step": 100.0, "fa_staleness_share": 0.5}
    for paused in (0.0, 0.3, 0.8):
        average = (1 - paused) * 100 + paused * 150
        assert value(run(facts, in_flight_groups=average), "admission_pause") == pytest.approx(paused, abs=1e-9)
    assert value(run(facts, in_flight_groups=80.0), "admission_pause") == 0
    assert value(run({"groups_per_step": 100.0}, in_flight_groups=80.0), "admission_pause") is None


def test_queue_and_stragglers() -> None:
    data = run(
        {"groups_per_step": 64.0}, queue_size=16.0, rollout_seconds_p95=10.0, rollout_seconds_max=40.0, time_step=50.0
    )
    assert value(data, "queue_steps") == pytest.approx(0.25)
    assert value(data, "straggler_ratio") == pytest.approx(4)
    assert value(data, "straggler_share") == pytest.approx(0.8)
    assert value(run(queue_size=16.0), "queue_steps") is None
    falling = run(active_tasks={s: 100.0 - s for s in range(1, 61)})
    assert value(falling, "active_trend") == pytest.approx(49.5 / 89.5)


def test_sync_share_is_a_share_of_time_and_not_a_mean_of_shares() -> None:
    data = run(time_update_weights={1: 1.0, 2: 1.0}, time_step={1: 2.0, 2: 18.0})
    assert value(data, "sync_share") == pytest.approx(0.1)
    assert value(run(time_update_weights=1.0), "sync_share") is None
    assert value(run(time_update_weights=1.0, time_step=0.0), "sync_share") is None


def test_the_largest_lag_climbs_one_a_step_behind_a_frozen_replica() -> None:
    frozen = run(ASYNC, lag_oldest_max={s: float(s) for s in range(1, 31)})
    assert value(frozen, "lag_max_slope") == pytest.approx(1)
    assert value(run(ASYNC, lag_oldest_max=3.0), "lag_max_slope") == pytest.approx(0)
    assert value(run(ASYNC, lag_oldest_max={s: float(s) for s in range(1, 20)}), "lag_max_slope") is None
    gaps = run(ASYNC, lag_oldest_max={s: float(s) for s in range(1, 200, 7)})
    assert value(gaps, "lag_max_slope") == pytest.approx(1)


def test_speedup_and_payload() -> None:
    ours, theirs = run(time_step=noisy(5.0, 0.1)), run(time_step=noisy(10.0, 0.1, seed=1))
    assert value(ours, "step_speedup", theirs) == pytest.approx(2, abs=0.05)
    assert value(run(sync_payload_mb={1: 0.0, 2: 3.0}), "sync_payload_zero_share") == 0.5
    assert value(run(time_gen=5.0, time_step=10.0), "gen_share") == pytest.approx(0.5)


# -- symptom ----------------------------------------------------------------------------------------------------


def learner(speed: float, facts: Mapping[str, Any] | None = None, steps: int = 80, **more: Points) -> RunData:
    rng = np.random.default_rng(round(100 * speed))
    score = {s: 0.8 - 0.6 * math.exp(-speed * s / 30) + 0.01 * float(rng.standard_normal()) for s in range(steps)}
    return run(facts, score_trained=score, validation={s: score[s] for s in range(0, steps, 5)}, **more)


def symptom_of(data: RunData, *baselines: RunData) -> Symptom:
    return compute(data, baselines, Context())[1]


def test_speed_on_three_clocks() -> None:
    small = {**SYNC, "updates_per_version": 1.0, "samples_per_step": 32.0}
    large = {**SYNC, "updates_per_version": 1.0, "samples_per_step": 64.0}
    found = measures(learner(0.5, small, time_step=2.0), learner(1.0, large, time_step=8.0))
    update = found["speed_update"].value
    assert update == pytest.approx(0.5, abs=0.05)
    assert found["speed_sample"].value == pytest.approx(2 * update)  # type: ignore[operator]
    assert found["speed_hour"].value == pytest.approx(4 * update)  # type: ignore[operator]


def test_the_clock_is_updates_only_when_they_are_known_for_every_run() -> None:
    """Half the steps with twice the updates each is the same speed per update."""
    known = learner(2.0, {**SYNC, "updates_per_version": 2.0}, steps=40, time_step=2.0)
    plain = learner(1.0, {**SYNC, "updates_per_version": 1.0}, time_step=1.0)
    assert value(known, "speed_update", plain) == pytest.approx(1, abs=0.1)
    assert value(known, "speed_hour", plain) == pytest.approx(1, abs=0.1)
    unknown = learner(1.0, time_step=1.0)
    assert value(known, "speed_update", unknown) == pytest.approx(2, abs=0.2)
    assert value(known, "speed_hour", unknown) == pytest.approx(1, abs=0.1)


def test_validation_is_read_only_where_every_run_has_it() -> None:
    ours, theirs = learner(0.4), learner(1.0)
    assert symptom_of(ours, theirs).evidence == "validation"
    other = replace(theirs, labels={"validation": {"another task": theirs.series["validation"]}})
    assert symptom_of(ours, other).evidence == "trained_reward"


def test_trained_reward_is_not_compared_across_data() -> None:
    ours = replace(learner(0.4, {**SYNC, "train_files": "data/gsm8k/train.parquet"}), labels={})
    for files, state in (
        ("data/math/train.parquet", "untested"),
        ("/elsewhere/gsm8k/train.parquet", "slower"),
        (None, "slower"),
    ):
        theirs = replace(learner(1.0, {**SYNC, "train_files": files}), labels={})
        assert symptom_of(ours, theirs).state == state, files
    assert value(ours, "speed_update", learner(1.0, {**SYNC, "train_files": "data/math/train.parquet"})) is None


def test_selected_trained_reward_is_no_evidence() -> None:
    ours = replace(learner(0.4, BATCH, stale_groups=5.0, failed_groups=0.0), labels={})
    found = symptom_of(ours, replace(learner(1.0), labels={}))
    assert found.state == "untested" and "inadmissible" in found.because


EVICTING: Mapping[str, Any] = {**ASYNC, "groups_per_step": 16.0}


def unvalidated(speed: float, facts: Mapping[str, Any] | None = None, name: str = "r", **more: Points) -> RunData:
    return replace(learner(speed, facts, 80, **more), labels={}, name=name)


def test_the_trained_reward_of_a_baseline_that_evicted_is_no_evidence() -> None:
    """Selection lifts it, so an equal run would be called slower."""
    evicted = unvalidated(2.0, EVICTING, "dropper", stale_groups=5.0, failed_groups=0.0)
    found = symptom_of(unvalidated(1.0), evicted)
    assert (found.state, found.wants) == ("untested", "validation")
    assert "since the baseline dropper evicted more than 5 % of its groups" in found.because
    kept = unvalidated(2.0, EVICTING, stale_groups={1: 1.0}, failed_groups=0.0)
    assert symptom_of(unvalidated(1.0), kept).state == "slower"


def test_an_asynchronous_baseline_with_unknown_evictions_is_no_evidence_either() -> None:
    found = symptom_of(unvalidated(1.0), unvalidated(2.0, ASYNC, "fast"))
    assert found.state == "untested"
    assert "the baseline fast is asynchronous and how many groups it evicted is not known" in found.because
    nobody = symptom_of(unvalidated(0.3), unvalidated(1.0, {}, "plain"))
    assert nobody.state == "slower" and "whether the baseline plain evicted groups is not known" in nobody.caveats


def test_a_refused_baseline_is_left_out_and_the_others_are_used() -> None:
    evicted = unvalidated(3.0, EVICTING, "dropper", stale_groups=5.0, failed_groups=0.0)
    found = symptom_of(unvalidated(1.0), evicted, unvalidated(1.0))
    assert found.per_update is not None and found.per_update.value == pytest.approx(1, abs=0.1)
    assert [c for c in found.caveats if "dropper" in c] == [
        "left out, since the baseline dropper evicted more than 5 % of its groups"
    ]


def test_a_baseline_that_is_asynchronous_or_evicted_is_warned_of() -> None:
    base = replace(learner(1.0, EVICTING, stale_groups=5.0, failed_groups=0.0), name="b")
    found = symptom_of(learner(1.0), base)
    assert found.evidence == "validation"
    assert [c.partition(", so")[0] for c in found.caveats[:2]] == [
        "the baseline b is itself asynchronous",
        "the baseline b evicted more than 5 % of its groups",
    ]
    assert not any("baseline" in c for c in symptom_of(learner(1.0), learner(1.0)).caveats)


def test_only_validation_points_in_the_steps_of_all_runs_count() -> None:
    """Eleven points, but the run ends where the baseline has four of them."""
    sparse = run(validation={s: 1 - math.exp(-s / 100) for s in range(0, 220, 20)})
    short = run(validation={s: 1 - math.exp(-s / 100) for s in range(0, 80, 5)}, grad_norm=1.0)
    found = symptom_of(short, sparse)
    assert found.evidence is None and found.because.startswith("only 4 validation points in common")
    dense = run(validation={s: 1 - math.exp(-s / 100) for s in range(0, 220, 10)})
    assert symptom_of(short, dense).evidence == "validation"


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({}, "trainer.test_freq=9 gives them in 79 steps"),
        ({"total_steps": 200.0}, "trainer.test_freq=25 gives them in 200 steps"),
        ({"total_steps": 200.0, "test_freq": 50.0}, "trainer.test_freq=25 instead of 50 gives them in 200 steps"),
        ({"total_steps": 200.0, "test_freq": 20.0}, "at step 160 they are there"),
        ({"total_steps": 200.0, "test_freq": -1.0}, "trainer.test_freq=25 gives them in 200 steps"),
    ],
)
def test_the_advised_test_freq_gives_eight_points(facts: Mapping[str, Any], advice: str) -> None:
    both = [unvalidated(speed, {**SYNC, **facts}) for speed in (0.4, 1.0)]
    assert advice in " ".join(symptom_of(*both).caveats)


def test_a_baseline_that_rises_too_little_is_said_with_its_steps() -> None:
    flat = run(score_trained=noisy(0.5, 0.05, 50))
    found = symptom_of(unvalidated(1.0), flat)
    assert found.because == "over steps 1 to 50 the baseline's trained reward rises too little to measure a speed"
    falls = run(score_trained={s: 1 - 0.01 * s for s in range(1, 51)})
    assert "over steps 1 to 50 the baseline's trained reward falls" in symptom_of(unvalidated(1.0), falls).because


def test_the_onset_is_in_whole_steps() -> None:
    found = symptom_of(learner(0.2), learner(1.0)).onset
    assert found is not None
    assert all(bound == int(bound) for bound in found)


def test_alone_nothing_is_shown() -> None:
    assert symptom_of(learner(0.3)).state == "untested"


# -- health -----------------------------------------------------------------------------------------------------


def test_nonfinite_steps_are_counted_once_and_the_first_named() -> None:
    data = replace(run(grad_norm=1.0), nonfinite={"grad_norm": (9, 10), "pg_loss": (10, 12), "gap_kl": (1,)})
    assert (value(data, "nonfinite_steps"), value(data, "nonfinite_first_step")) == (3, 9)
    assert (value(run(grad_norm=1.0), "nonfinite_steps"), value(run(), "nonfinite_steps")) == (0, None)


def test_entropy_and_gradient_over_the_run() -> None:
    assert value(run(entropy={s: 1.0 if s < 20 else 0.1 for s in range(1, 41)}), "entropy_ratio") == pytest.approx(0.1)
    outlier = {s: 1000.0 if s == 39 else 2.0 if s > 26 else 1.0 for s in range(1, 40)}
    assert value(run(grad_norm=outlier), "grad_norm_ratio") == pytest.approx(2)
    assert value(run(entropy={1: 1.0, 2: 0.1}), "entropy_ratio") is None


def test_flat_rewards_and_constant_lengths() -> None:
    low, high = {1: 0.0, 2: 0.0, 3: 1.0}, {1: 1.0, 2: 0.0, 3: 1.0, 9: 9.0}
    assert value(run(score_trained_min=low, score_trained_max=high), "reward_flat_steps") == pytest.approx(2 / 3)
    assert value(run(response_length_min=low, response_length_max=high), "length_constant_steps") == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize(("bad", "tail"), [((38, 39, 40), 3), ((40,), 1), ((20, 39), 0), ((), 0), (range(1, 41), 40)])
def test_the_nonfinite_tail_ends_at_the_last_step_that_logs_the_vitals(bad: Sequence[int], tail: int) -> None:
    finite = {s: 1.0 for s in range(1, 41) if s not in bad}
    data = replace(run(grad_norm=finite, validation={0: 0.1, 50: 0.2}), nonfinite={"grad_norm": tuple(bad)})
    assert value(data, "nonfinite_tail") == tail
    both = replace(run(grad_norm=1.0), nonfinite={"pg_loss": tuple(bad)})
    assert value(both, "nonfinite_tail") == tail
    assert value(run(validation=1.0), "nonfinite_tail") is None


def test_step_0_is_no_training_step() -> None:
    assert value(run(validation={0: 0.1}, grad_norm={0: 1.0, 7: 1.0}), "steps_logged") == 1
    assert value(run(validation={0: 0.1}), "steps_logged") == 0


def test_what_the_context_says_is_passed_on() -> None:
    found = measures(run(), context=Context(died_before_step1=True, source_differences=3, rewritten_values=7))
    assert (found["died_before_step1"].value, found["source_differences"].value) == (True, 3)
    assert found["rewritten_values"].value == 7
    assert measures(run(), run(), run())["baseline_runs"].value == 2


def test_measures_are_json_after_all() -> None:
    """No value or bound is NaN or infinite, also near the end of the float range."""
    data = run(ASYNC, grad_norm=1e308, time_step=1e308, chi2_token=1e308, lag_oldest_max=1e308, gap_kl=1e308)
    found = measures(data, data)
    json.dumps([m.value for m in found.values() if m.number() is not None], allow_nan=False)


# -- a selection of the steps -----------------------------------------------------------------------------------


def test_what_needs_every_step_is_not_told_from_a_selection() -> None:
    data, base = full()
    whole, picked = measures(data, base), measures(replace(data, sampled=frozenset(data.series)), base)
    for name, definition in catalog().items():
        if definition.every_step:
            assert picked[name].value is None and picked[name].missing == SELECTION, name
    for name in ("gap_prob_mean", "lag_oldest_mean", "ess", "sync_share", "step_seconds", "validation_points"):
        assert picked[name].value == whole[name].value is not None, name
    assert picked["steps_logged"].low == whole["steps_logged"].value
    assert picked["reward_admissible"].value is None and picked["damage_eviction"].value is None


def test_a_selection_shows_no_run_to_be_on_policy_throughout() -> None:
    data = run(ASYNC, lag_oldest_max=0.0, gap_prob_mean=0.01)
    assert is_on_policy(data) and not is_on_policy(replace(data, sampled=frozenset({"lag_oldest_max"})))


def test_only_the_signals_of_the_export_are_a_selection() -> None:
    data = replace(
        run({**ASYNC, "groups_per_step": 8}, stale_groups=2.0, lag_oldest_max=1.0),
        sampled=frozenset({"lag_oldest_max"}),
    )
    assert value(data, "stale_groups") == 80.0 and value(data, "lag_oldest_max") is None
    assert ledger(replace(data, sampled=frozenset({"stale_groups"})))["stale_groups"] is None


# -- gauges of other frameworks ---------------------------------------------------------------------------------


def test_kept_against_generated_lengths() -> None:
    both = run(ASYNC, generated_length_mean=100.0, kept_length_mean=80.0)
    assert value(both, "kept_length_shift") == pytest.approx(math.log(0.8))
    rarely = run(
        ASYNC,
        generated_length_mean=100.0,
        kept_length_mean=dict.fromkeys(range(1, 11), 80.0),
        evicted_length_mean=150.0,
    )
    assert value(rarely, "kept_length_shift") == pytest.approx(math.log(0.8) / 4), "30 of 40 steps dropped nothing"
    assert value(run(ASYNC, generated_length_mean=100.0), "kept_length_shift") is None


def test_no_lag_since_admission_is_no_lag() -> None:
    data = run(ASYNC, lag_admission_max={1: 0.0, 2: 1.0, 3: 0.0}, gap_k3={1: 0.01, 2: 0.5, 3: 0.03})
    found = measures(data)
    assert found["lag0_steps"].value == 2
    assert found["gap_k3_lag0"].value == pytest.approx(0.02)
    exact = run(ASYNC, lag_admission_max=1.0, lag_oldest_max=0.0)
    assert value(exact, "lag0_steps") == 40, "the lag of the oldest token is known better than its bound"


def test_k3_is_compared_with_k3_only() -> None:
    data = run(ASYNC, gap_k3=0.02, lag_admission_max=1.0)
    assert value(data, "gap_k3_ratio", run(gap_k3=0.01)) == pytest.approx(2)
    assert value(data, "gap_k3_ratio", run(gap_kl=0.01, gap_prob_mean=0.01)) is None
    assert value(data, "mismatch_share") is None and value(data, "gap_trend") == pytest.approx(1)


# -- bypass mode at lag 0 -------------------------------------------------------------------------------------

BYPASS: Mapping[str, Any] = {**ASYNC, "log_prob_mode": "bypass", "updates_per_version": 1}
FIRST_FRESH = {s: float(min(s - 1, 2)) for s in range(1, 61)}
"""Only step 1 is without lag."""


def bypass(first: float, later: float, **facts: Any) -> RunData:
    clip = {s: first if s == 1 else later + 0.002 * math.sin(s) for s in range(1, 61)}
    kl = dict.fromkeys(range(1, 61), first / 5)
    return run({**BYPASS, **facts}, clip_share=clip, ppo_kl=kl, lag_oldest_max=FIRST_FRESH)


def test_the_clip_share_of_the_first_step_is_mismatch_and_what_is_beyond_it_age() -> None:
    found = measures(bypass(0.06, 0.2))
    assert found["loss_first_step"].value == pytest.approx(0.06)
    assert found["damage_mismatch"].value == pytest.approx(0.06)
    assert found["damage_staleness"].value == pytest.approx(0.2 - 0.06, abs=0.01)
    assert found["gap_kl_lag0"].value == pytest.approx(0.012)


def test_a_first_step_that_clips_nothing_leaves_all_to_age() -> None:
    found = measures(bypass(0.0, 0.2))
    assert (found["loss_first_step"].value, found["damage_mismatch"].value) == (0, 0)
    assert found["damage_staleness"].value == pytest.approx(0.2, abs=0.01)


def test_several_updates_a_step_tell_nothing_of_lag_0() -> None:
    found = measures(bypass(0.06, 0.2, updates_per_version=4))
    assert found["loss_first_step"].value is None
    assert found["gap_kl_lag0"].value is None


def test_a_level_has_the_noise_of_its_own_gauge() -> None:
    facts = {**BYPASS, "updates_per_version": 4}
    ess = {s: 0.9 + 0.05 * math.sin(s) for s in range(1, 61)}
    found = measures(run(facts, clip_share=0.2, ess=ess, lag_oldest_max=FIRST_FRESH))["loss_first_step"]
    assert found.value == pytest.approx((1 - ess[1]) / 2)
    assert found.low is not None and found.high is not None and found.high - found.low > 0.01


def test_the_first_step_is_0_where_a_framework_counts_so() -> None:
    facts = {"framework": "trl", "is_async": True, "log_prob_mode": "decoupled"}
    ess = {s: 0.98 if s == 0 else 0.5 + 0.01 * math.sin(s) for s in range(60)}
    fresh = {s: float(s > 1) for s in range(60)}
    assert value(run(facts, ess=ess, lag_oldest_max=fresh), "loss_first_step") == pytest.approx(0.01)
    later = {s: v for s, v in ess.items() if s > 4}
    assert value(run(facts, ess=later, lag_oldest_max=dict.fromkeys(later, 0.0)), "loss_first_step") is None


def test_what_the_baseline_clips_as_well_is_taken_off() -> None:
    base = run({**SYNC, "log_prob_mode": "bypass", "updates_per_version": 1}, clip_share=0.01, lag_oldest_max=0.0)
    assert measures(bypass(0.06, 0.2), base)["loss_first_step"].value == pytest.approx(0.05)


def test_in_decoupled_mode_the_first_step_is_read_from_ess() -> None:
    ess = {s: 0.9 if s == 1 else 0.8 + 0.01 * math.sin(s) for s in range(1, 61)}
    found = measures(run(ASYNC, ess=ess, lag_oldest_max=FIRST_FRESH))
    assert found["loss_first_step"].value == pytest.approx(0.05)
