"""Did reward slow down: known answers, false alarms and power, invariances, real curves."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from verl_audit.measure.symptom import (
    Curve,
    Gap,
    Speed,
    Untestable,
    end_gap,
    learning_speed,
    onset,
    per_hour,
    per_sample,
    single_run,
)

Array = NDArray[np.floating[Any]]
Shape = Callable[[Array], Array]
X = np.arange(1.0, 201.0)
SHARED = Path(__file__).parents[2].parent / "shared" / "real_runs"

SHAPES: dict[str, Shape] = {
    "saturating": lambda t: 0.7 - 0.6 * np.exp(-t / 80),
    "slow": lambda t: 0.7 - 0.6 * np.exp(-t / 300),
    "power": lambda t: 0.75 - 0.65 / np.sqrt(1 + t / 30),
    "straight": lambda t: 0.2 + 0.002 * t,
    "sigmoid": lambda t: 0.1 + 0.6 / (1 + np.exp(-(t - 50) / 25)),
}
saturating = SHAPES["saturating"]


def ar1(rng: np.random.Generator, n: int, phi: float, sd: float = 0.05) -> Array:
    kicks = rng.normal(size=n) * math.sqrt(1 - phi**2)
    series = np.empty(n)
    last = rng.normal()
    for i in range(n):
        last = phi * last + kicks[i]
        series[i] = sd * last
    return series


def noisy(rng: np.random.Generator, y: Array, phi: float = 0.3, x: Array = X) -> Curve:
    return Curve(x, y + ar1(rng, len(x), phi))


def speed(run: Curve, *baselines: Curve, min_points: int = 40) -> Speed:
    found = learning_speed(run, baselines, min_points=min_points)
    assert isinstance(found, Speed), found
    return found


def gap(run: Curve, baseline: Curve) -> Gap:
    found = end_gap(run, baseline)
    assert isinstance(found, Gap), found
    return found


# -- learning speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["saturating", "slow", "straight"])
@pytest.mark.parametrize("a", [0.3, 0.6, 1.0, 1.5])
def test_speed_of_noiseless_curves(shape: str, a: float) -> None:
    found = speed(Curve(X, SHAPES[shape](a * X)), Curve(X, SHAPES[shape](X)))
    assert found.value == pytest.approx(a, rel=0.01)
    assert found.slower == (a < 0.65)
    assert found.no_slowdown == (a >= 0.8)
    assert not found.at_bound


def test_the_interval_and_power_statement_follow_the_stated_formulas() -> None:
    rng = np.random.default_rng(1)
    found = speed(noisy(rng, saturating(0.6 * X)), noisy(rng, saturating(X)))
    assert found.se_log == pytest.approx(math.sqrt(found.se_within**2 + 2 * 0.15**2))
    assert found.z == pytest.approx(math.log(found.value) / found.se_log)
    assert math.log(found.high / found.value) == pytest.approx(1.645 * found.se_log, rel=1e-3)
    assert found.smallest_detectable == pytest.approx(math.exp(-(1.645 + 0.842) * found.se_log), rel=0.01)
    assert (found.n_run, found.n_base, found.run_sd_used, found.few_points) == (200, 200, 0.15, False)


def rate_slower(a: float, run_sd: float, phi: float, shape: str = "saturating") -> float:
    """Share of 80 runs called slower, the run-to-run term stratified: quantiles of sqrt 2 run_sd * normal."""
    rng = np.random.default_rng(7)
    curve = SHAPES[shape]

    def pair(p: float) -> tuple[Curve, Curve]:
        apart = math.exp(math.sqrt(2) * run_sd * NormalDist().inv_cdf(p) / 2)
        return noisy(rng, curve(a * apart * X), phi), noisy(rng, curve(X / apart), phi)

    return float(np.mean([speed(*pair((i + 0.5) / 80)).slower for i in range(80)]))


@pytest.mark.parametrize("shape", list(SHAPES))
def test_false_alarms_with_run_to_run_variation(shape: str) -> None:
    assert rate_slower(1.0, 0.15, 0.3, shape) <= 0.07


def test_false_alarms_under_strong_autocorrelation() -> None:
    assert rate_slower(1.0, 0.15, 0.6) <= 0.07
    assert rate_slower(1.0, 0.0, 0.6) <= 0.03


def test_power() -> None:
    assert rate_slower(0.6, 0.0, 0.3) >= 0.95
    assert rate_slower(0.6, 0.15, 0.3) >= 0.65
    assert rate_slower(0.4, 0.15, 0.6) >= 0.95


def test_a_mild_slowing_is_not_called() -> None:
    assert rate_slower(0.8, 0.0, 0.3) <= 0.05


def test_three_baselines_keep_the_level_and_add_power() -> None:
    rng = np.random.default_rng(13)

    def rate(a: float) -> float:
        clocks = [[r * math.exp(0.15 * rng.normal()) for r in (a, 1.0, 1.0, 1.0)] for _ in range(60)]
        return float(np.mean([speed(*(noisy(rng, saturating(c * X)) for c in four)).slower for four in clocks]))

    assert rate(1.0) <= 0.12  # nominal .05
    assert rate(0.55) >= 0.85


def test_measured_run_to_run_sd_replaces_part_of_the_default() -> None:
    alike = [Curve(X, saturating(X)) for _ in range(5)]
    apart = [Curve(X, saturating(a * X)) for a in (0.5, 0.8, 1.0, 1.25, 2.0)]
    close, wide = speed(Curve(X, saturating(X)), *alike), speed(Curve(X, saturating(X)), *apart)
    assert close.run_sd_used == pytest.approx(0.15 * math.sqrt(4 / 8), rel=0.01)
    assert wide.run_sd_used > 0.3
    assert close.critical == wide.critical == pytest.approx(1.8595, rel=1e-3)


def test_a_run_that_does_not_learn_is_at_the_bound() -> None:
    rng = np.random.default_rng(2)
    for y in (np.full(200, 0.1), 0.1 - 0.0005 * X):
        found = speed(noisy(rng, y), noisy(rng, saturating(X)))
        assert found.at_bound
        assert found.value < 0.1
        assert found.slower


def test_a_baseline_that_does_not_learn_is_untestable() -> None:
    rng = np.random.default_rng(3)
    run = Curve(X, saturating(X))
    flat = [learning_speed(run, [noisy(rng, 0 * X + 0.5, phi)]) for phi in (0.0, 0.6) for _ in range(50)]
    assert sum(isinstance(found, Untestable) for found in flat) >= 97
    for y in (np.zeros(200), np.full(200, 0.3)):
        found = learning_speed(run, [Curve(X, y)])
        assert isinstance(found, Untestable)
        assert "rises too little" in found.reason and found.flaw == "flat"
    falling = learning_speed(run, [noisy(rng, 1 - saturating(X))])
    assert isinstance(falling, Untestable)
    assert "falls" in falling.reason and falling.flaw == "falls"


def test_a_lower_start_is_not_slowness() -> None:
    rng = np.random.default_rng(4)
    found = [speed(noisy(rng, saturating(X) - 0.2), noisy(rng, saturating(X))) for _ in range(30)]
    assert not any(f.slower for f in found)
    assert np.median([f.start_shift or 0.0 for f in found]) == pytest.approx(-0.2, abs=0.03)
    assert np.median([f.value for f in found]) == pytest.approx(1, abs=0.1)
    usual = [speed(noisy(rng, saturating(X)), noisy(rng, saturating(X))) for _ in range(50)]
    assert sum(f.start_shift is not None for f in usual) <= 3


def test_a_resumed_run_is_compared_from_where_it_starts() -> None:
    late = X[X > 100]
    found = speed(Curve(late, saturating(101 + 0.5 * (late - 101))), Curve(X, saturating(X)))
    assert found.value == pytest.approx(0.5, rel=0.03)


def test_number_of_points() -> None:
    def length(n: int) -> Speed | Untestable:
        return learning_speed(Curve(X[:n], saturating(3 * X[:n])), [Curve(X, saturating(3 * X))])

    short = length(39)
    assert isinstance(short, Untestable)
    assert "39 points, 40 are needed" in short.reason
    for n, few in ((40, True), (99, True), (100, False)):
        found = length(n)
        assert isinstance(found, Speed)
        assert found.few_points == few
    assert isinstance(learning_speed(Curve(X, saturating(X)), []), Untestable)
    assert isinstance(learning_speed(Curve(X + 500, saturating(X)), [Curve(X, saturating(X))]), Untestable)
    assert isinstance(learning_speed(Curve(X[:0], X[:0]), [Curve(X, saturating(X))]), Untestable)


def test_validation_curves() -> None:
    x = np.arange(20.0, 201.0, 20.0)
    rng = np.random.default_rng(5)
    null = [
        speed(noisy(rng, saturating(x), 0.0, x), noisy(rng, saturating(x), 0.0, x), min_points=8) for _ in range(100)
    ]
    slow = [
        speed(noisy(rng, saturating(x / 3), 0.0, x), noisy(rng, saturating(x), 0.0, x), min_points=8)
        for _ in range(100)
    ]
    assert sum(f.slower for f in null) <= 5
    assert sum(f.slower for f in slow) >= 80
    assert isinstance(learning_speed(Curve(x[:7], x[:7]), [Curve(x, x)], min_points=8), Untestable)


def test_same_input_same_output_and_fast_enough() -> None:
    rng = np.random.default_rng(6)
    x = np.arange(1.0, 301.0)
    run, base = noisy(rng, saturating(x), x=x), noisy(rng, saturating(x), x=x)
    began = time.perf_counter()
    first = speed(run, base)
    assert time.perf_counter() - began < 1
    assert speed(run, base) == first


@settings(max_examples=15, deadline=None)
@given(
    scale=st.floats(0.01, 1000),
    shift=st.floats(-10, 10),
    stretch=st.floats(0.1, 100),
    seed=st.integers(0, 1000),
)
def test_speed_does_not_depend_on_the_units(scale: float, shift: float, stretch: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run, base = noisy(rng, saturating(0.7 * X)), noisy(rng, saturating(X))
    first = speed(run, base)
    moved = speed(*(Curve(stretch * c.x, scale * (c.y + shift)) for c in (run, base)))
    assert moved.value == pytest.approx(first.value, rel=1e-4)
    assert moved.se_log == pytest.approx(first.se_log, rel=1e-3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_speed_ignores_order_and_non_finite_points(seed: int, bad: float) -> None:
    rng = np.random.default_rng(seed)
    run, base = noisy(rng, saturating(0.7 * X)), noisy(rng, saturating(X))
    order = rng.permutation(201)
    jumbled = Curve(np.append(run.x, 77.0)[order], np.append(run.y, bad)[order])
    assert speed(jumbled, base) == speed(run, base)


def test_a_step_logged_twice_counts_once() -> None:
    run, base = Curve(X, saturating(0.7 * X)), Curve(X, saturating(X))
    twice = Curve(np.concatenate([X, X[:50]]), np.concatenate([run.y, run.y[:50]]))
    assert speed(twice, base) == speed(run, base)


# -- other clocks ------------------------------------------------------------------------------------------


def test_clocks() -> None:
    found = speed(Curve(X, saturating(0.6 * X)), Curve(X, saturating(X)))
    hourly = per_hour(found, 30, 10)
    assert hourly.value == pytest.approx(3 * found.value)
    assert hourly.low == pytest.approx(3 * found.low)
    assert hourly.se_log == found.se_log
    assert found.slower
    assert not hourly.slower
    assert hourly.no_slowdown
    sampled = per_sample(found, 128, 64)
    assert sampled.value == pytest.approx(found.value / 2)
    assert sampled.slower
    with pytest.raises(ValueError, match="positive"):
        per_hour(found, 0, 10)


# -- the gap at the end ------------------------------------------------------------------------------------


def test_gap_known_answer() -> None:
    found = gap(Curve(X, saturating(X) - 0.3), Curve(X, saturating(X)))
    assert found.value == pytest.approx(0.3)
    assert found.relative == pytest.approx(0.3 / found.baseline_gain)
    assert found.paired
    assert found.harm
    assert found.low < 0.3 < found.high


def test_gap_on_other_steps_uses_the_fitted_baseline() -> None:
    x = np.arange(5.5, 200, 10)
    found = gap(Curve(x, saturating(x) - 0.3), Curve(X, saturating(X)))
    assert not found.paired
    assert found.value == pytest.approx(0.3, abs=0.01)


def test_gap_operating_characteristics() -> None:
    rng = np.random.default_rng(8)

    def rate(a: float) -> float:
        pairs = [[r * math.exp(0.15 * rng.normal()) for r in (a, 1.0)] for _ in range(100)]
        return float(np.mean([gap(*(noisy(rng, saturating(r * X)) for r in pair)).harm for pair in pairs]))

    assert rate(1.0) <= 0.08
    assert rate(0.4) >= 0.9


def test_gap_floor_and_measured_sd() -> None:
    run, base = Curve(X, saturating(X) - 0.03), Curve(X, saturating(X))
    tight = end_gap(run, base, sd_baseline=0.002)
    loose = end_gap(run, base, sd_baseline=0.02)
    assert isinstance(tight, Gap)
    assert isinstance(loose, Gap)
    assert (tight.threshold, tight.harm, loose.harm) == (0.035, True, False)
    assert loose.threshold * loose.baseline_gain == pytest.approx(2 * math.sqrt(2) * 0.02)
    tiny = end_gap(Curve(X, saturating(X) - 0.015), base, sd_baseline=0.0)
    assert isinstance(tiny, Gap)
    assert not tiny.harm


def test_gap_refusals() -> None:
    flat = end_gap(Curve(X, saturating(X)), Curve(X, 0 * X))
    sparse = end_gap(Curve(np.append(X[:30], 200.0), saturating(np.append(X[:30], 200.0))), Curve(X, saturating(X)))
    assert isinstance(flat, Untestable)
    assert isinstance(sparse, Untestable)
    assert "last part" in sparse.reason


# -- onset -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["saturating", "slow", "straight"])
@pytest.mark.parametrize("t0", [0.0, 60.0, 120.0])
def test_onset_interval_covers_a_full_stop(shape: str, t0: float) -> None:
    rng = np.random.default_rng(9)
    curve = SHAPES[shape]
    pairs = [(noisy(rng, curve(np.minimum(X, max(t0, 1)))), noisy(rng, curve(X))) for _ in range(40)]
    found = [onset(run, base, run_sd=0.01) for run, base in pairs]  # equal runs differ by noise only
    held = [f for f in found if f is not None]
    assert len(held) >= 36
    assert np.mean([low <= t0 + 1 and high >= t0 for low, high in held]) >= 0.85
    assert np.median([high - low for low, high in held]) < 150


def test_nine_of_ten_onset_intervals_hold_though_equal_runs_differ() -> None:
    """Clocks of run and baseline differ by sd .15; harm at once or building up, at the start or in the middle."""
    rng = np.random.default_rng(21)
    held = []
    for t0 in (0.0, 40.0, 80.0):
        since = np.maximum(X - t0, 0)
        for slowed in (0.25 * since, 0 * since, np.where(since < 60, since - since**2 / 150, 0.2 * since + 24)):
            for mine, theirs in np.exp(0.15 * rng.normal(size=(20, 2))):
                run = noisy(rng, saturating(mine * (np.minimum(X, t0) + slowed)))
                base = noisy(rng, saturating(theirs * X))
                speed, found = learning_speed(run, [base]), onset(run, base)
                if isinstance(speed, Speed) and speed.slower and found is not None:
                    held.append(found[0] <= t0 + 1 and found[1] >= t0 - 1)
    assert len(held) >= 80
    assert np.mean(held) >= 0.9


def test_the_onset_is_earliest_at_0_and_latest_at_a_point_unless_a_stretch_without_a_fall_is_shown() -> None:
    rng = np.random.default_rng(22)
    x = X[4::5]
    always = onset(noisy(rng, saturating(0.3 * x), x=x), noisy(rng, saturating(x), x=x), min_points=8)
    stopped = onset(
        noisy(rng, 0.002 * np.minimum(X, 120) - 0.02 * np.maximum(X - 120, 0)), noisy(rng, 0.002 * X), run_sd=0.01
    )
    assert always is not None and stopped is not None
    assert always[0] == 0 and always[1] in x
    assert 60 < stopped[0] <= 120 <= stopped[1] < 140


def test_onset_is_none_without_a_fall() -> None:
    rng = np.random.default_rng(10)
    found = [onset(noisy(rng, saturating(X)), noisy(rng, saturating(X))) for _ in range(40)]
    assert sum(f is not None for f in found) <= 6
    assert onset(Curve(X, saturating(X)), Curve(X, saturating(X))) is None
    assert onset(Curve(X, saturating(X) + 0.1), Curve(X, saturating(X))) is None
    assert onset(Curve(X[:20], X[:20]), Curve(X, X)) is None


# -- one run only ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [0.3, 0.7])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_natural_saturation_is_not_called_slowing(shape: str, phi: float) -> None:
    rng = np.random.default_rng(11)
    runs = [single_run(noisy(rng, SHAPES[shape](X), phi), 100) for _ in range(60)]
    assert sum(r.slowed for r in runs) <= 4


@pytest.mark.parametrize("shape", ["saturating", "straight"])
def test_a_reversal_is_found(shape: str) -> None:
    rng = np.random.default_rng(12)
    clock = np.where(X < 100, X, 200 - X)
    runs = [single_run(noisy(rng, SHAPES[shape](clock)), 100) for _ in range(60)]
    assert sum(r.slowed for r in runs) >= 36
    assert all(r.reason == "learning slowed at the switch" for r in runs if r.slowed)


def test_single_run_says_why_it_cannot_tell() -> None:
    short = single_run(Curve(X, saturating(X)), 10)
    assert (short.slowed, short.p_kink, short.n_pre) == (False, None, 9)
    assert "20 are needed" in short.reason
    usual = single_run(Curve(X, saturating(X)), 100)
    assert "give a baseline" in usual.reason
    assert usual.slope_ratio is not None
    assert usual.slope_ratio < 0.5
    flat = single_run(Curve(X, 0 * X), 100)
    assert (flat.slowed, flat.slope_ratio) == (False, None)
    assert "no learning before" in flat.reason


# -- real curves -------------------------------------------------------------------------------------------


def real(name: str) -> Curve:
    found = sorted((SHARED / name / "file_logger").glob("*/*.jsonl"))
    if not found:
        pytest.skip("the real runs are not here")
    rows = [json.loads(line) for line in found[0].read_text().splitlines()]
    points = [(r["step"], r["data"]["critic/score/mean"]) for r in rows if "critic/score/mean" in r["data"]]
    return Curve(*np.array(points, dtype=np.float64).T)


@pytest.mark.parametrize(
    ("run", "base"), list(itertools.permutations(["sync_baseline", "async_mild", "fp8_mismatch"], 2))
)
def test_no_real_pair_is_called_slower(run: str, base: str) -> None:
    found, behind = learning_speed(real(run), [real(base)]), end_gap(real(run), real(base))
    assert not (isinstance(found, Speed) and found.slower)
    assert not (isinstance(behind, Gap) and behind.harm)
    assert not single_run(real(run), 25).slowed
