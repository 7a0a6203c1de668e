"""Estimates against known answers, and the coverage they claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from verl_audit.measure import stats
from verl_audit.measure.stats import Estimate

Array = NDArray[np.floating[Any]]
RNG_SEED = 20240101


def ar1(rng: np.random.Generator, n: int, phi: float) -> Array:
    """Stationary AR(1) series of unit variance."""
    kicks = rng.normal(size=n) * math.sqrt(1 - phi**2)
    series = np.empty(n)
    last = rng.normal()
    for i in range(n):
        last = phi * last + kicks[i]
        series[i] = last
    return series


def coverage(estimate: Callable[[np.random.Generator], Estimate | None], truth: float, draws: int = 300) -> float:
    rng = np.random.default_rng(RNG_SEED)
    found = [estimate(rng) for _ in range(draws)]
    return float(np.mean([e is not None and e.low <= truth <= e.high for e in found]))


def need(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.95, 5, 2.01505),
        (0.975, 30, 2.04227),
        (0.995, 10, 3.16927),
    ],
)
def test_t_quantile_agrees_with_the_tables(p: float, df: float, expected: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(expected, rel=0.005)
    assert stats.t_quantile(1 - p, df) == pytest.approx(-expected, rel=0.005)


def test_t_quantile_and_probability_agree_with_scipy() -> None:
    t = pytest.importorskip("scipy.stats").t
    for df in (3, 4, 7, 12, 50, 500):
        for p in (0.9, 0.95, 0.975, 0.99):
            assert stats.t_quantile(p, df) == pytest.approx(t.ppf(p, df), rel=0.006)
        for value in (-3.0, -1.0, 0.0, 0.5, 2.0):
            assert stats.t_below(value, df) == pytest.approx(t.cdf(value, df), abs=0.002)


def test_mean_of_a_known_series() -> None:
    found = need(stats.ar1_mean([1.0, 3.0] * 10))
    assert found.value == 2.0
    assert found.n == 20
    assert found.se == pytest.approx(np.std([1.0, 3.0] * 10, ddof=1) / math.sqrt(20))  # negative phi counts as 0


@pytest.mark.parametrize(("phi", "least"), [(0.0, 0.92), (0.5, 0.91), (0.8, 0.88)])
def test_mean_covers_under_autocorrelation(phi: float, least: float) -> None:
    assert coverage(lambda rng: stats.ar1_mean(ar1(rng, 200, phi)), 0.0) >= least


def test_an_independent_interval_would_not_cover() -> None:
    def naive(rng: np.random.Generator) -> Estimate:
        x = ar1(rng, 200, 0.8)
        half = 1.96 * x.std() / math.sqrt(200)
        return Estimate(x.mean(), x.mean() - half, x.mean() + half, 200, half)

    assert coverage(naive, 0.0) < 0.6


def test_ar1_phi_is_nearly_unbiased() -> None:
    rng = np.random.default_rng(RNG_SEED)
    assert np.mean([stats.ar1_phi(ar1(rng, 60, 0.6)) for _ in range(300)]) == pytest.approx(0.6, abs=0.03)
    assert stats.ar1_phi(np.ones(50)) == 0
    assert stats.ar1_phi(np.arange(500.0)) == stats.PHI_MAX


def test_ratio_of_means() -> None:
    rng = np.random.default_rng(RNG_SEED)
    x, y = 4 + ar1(rng, 300, 0.3), 2 + 0.2 * ar1(rng, 200, 0.3)
    ratio, log = need(stats.ratio_of_means(x, y)), need(stats.log_ratio(x, y))
    assert ratio.value == pytest.approx(2, rel=0.1)
    assert ratio.low < 2 < ratio.high
    assert math.log(ratio.low) == pytest.approx(log.low)
    assert ratio.se == log.se
    assert need(stats.ratio_of_means(y, x)).value == pytest.approx(1 / ratio.value)


def test_ratio_of_means_refuses_what_has_no_logarithm() -> None:
    assert stats.ratio_of_means(np.zeros(20), np.ones(20)) is None
    assert stats.ratio_of_means(np.ones(20), -np.ones(20)) is None


def test_slope_of_a_line_in_any_order_and_unit() -> None:
    x = np.linspace(0, 1e6, 50)
    found = need(stats.slope(x[::-1], 3 + 2e-6 * x[::-1]))
    assert found.value == pytest.approx(2e-6)
    assert found.se < 1e-12


@pytest.mark.parametrize(("phi", "most"), [(0.0, 0.09), (0.6, 0.09), (0.8, 0.11)])
def test_slope_false_alarms(phi: float, most: float) -> None:
    x = np.arange(200.0)
    assert 1 - coverage(lambda rng: stats.slope(x, ar1(rng, 200, phi)), 0.0) <= most


def test_correlation_of_independent_autocorrelated_series_covers_zero() -> None:
    assert coverage(lambda rng: stats.correlation(ar1(rng, 200, 0.8), ar1(rng, 200, 0.8)), 0.0) >= 0.92


def test_correlation_known_value() -> None:
    rng = np.random.default_rng(RNG_SEED)
    x = rng.normal(size=2000)
    y = 0.6 * x + 0.8 * rng.normal(size=2000)
    found = need(stats.correlation(x, y))
    assert found.low < 0.6 < found.high
    assert found.high - found.low < 0.1
    assert need(stats.correlation(x, 2 * x)).value == pytest.approx(1)
    assert stats.correlation(x, np.ones(2000)) is None


def test_correlation_of_changes_ignores_a_common_trend() -> None:
    rng = np.random.default_rng(RNG_SEED)
    trend = np.linspace(0, 50, 200)
    x, y = trend + rng.normal(size=200), trend + rng.normal(size=200)
    levels = stats.correlation(x, y)
    assert levels is None or levels.value > 0.99
    changes = need(stats.correlation_of_changes(x, y))
    assert changes.low < 0 < changes.high
    independent = coverage(
        lambda r: stats.correlation_of_changes(r.normal(size=100), r.normal(size=100)), 0.0, draws=500
    )
    assert 0.92 <= independent <= 0.99


def test_correlation_of_changes_does_not_bridge_a_gap() -> None:
    rng = np.random.default_rng(RNG_SEED)
    x = rng.normal(size=30)
    y = x.copy()
    y[10] = math.nan
    found = need(stats.correlation_of_changes(x, y))
    assert (found.n, found.dropped) == (27, 2)
    assert found.value == pytest.approx(1)


@pytest.mark.parametrize("n", [20, 100, 2000])
def test_variance_ratio_covers(n: int) -> None:
    assert coverage(lambda r: stats.variance_ratio(2 * r.normal(size=n), r.normal(size=n)), 4.0) >= 0.92


def test_variance_ratio_covers_heavy_tails_and_autocorrelation() -> None:
    heavy = coverage(lambda r: stats.variance_ratio(r.standard_t(5, size=200), r.standard_t(5, size=200)), 1.0)
    red = coverage(lambda r: stats.variance_ratio(ar1(r, 200, 0.7), ar1(r, 200, 0.7)), 1.0)
    assert heavy >= 0.9
    assert red >= 0.9
    assert stats.variance_ratio(np.ones(20), np.arange(20.0)) is None


def test_variance_ratio_is_close_to_the_f_interval() -> None:
    f = pytest.importorskip("scipy.stats").f
    rng = np.random.default_rng(RNG_SEED)
    found = need(stats.variance_ratio(rng.normal(size=200), rng.normal(size=200)))
    exact = math.log(f.ppf(0.975, 199, 199))
    assert math.log(found.high / found.value) == pytest.approx(exact, rel=0.15)


def test_fraction_is_wilson() -> None:
    found = need(stats.fraction(5, 20))
    assert found.low == pytest.approx(0.1119, abs=1e-4)
    assert found.high == pytest.approx(0.4687, abs=1e-4)
    nothing = need(stats.fraction(0, 30))
    assert nothing.low == 0
    assert 0.1 < nothing.high < 0.13
    assert stats.fraction(0, 0) is None
    with pytest.raises(ValueError, match="3 successes of 2"):
        stats.fraction(3, 2)


def test_early_late_thirds_do_not_overlap() -> None:
    early, late = stats.early_late([1.0, 2.0, math.nan, 3.0, 4.0, 5.0, 6.0])
    assert early.tolist() == [1, 2]
    assert late.tolist() == [5, 6]
    assert [len(part) for part in stats.early_late([1.0, 2.0])] == [0, 0]
    with pytest.raises(ValueError, match="share"):
        stats.early_late([1.0], share=0.7)


def test_block_bootstrap_keeps_values_shape_and_autocorrelation() -> None:
    rng = np.random.default_rng(RNG_SEED)
    x = ar1(rng, 400, 0.8)
    copies = stats.block_bootstrap(x, np.random.default_rng(1), 100)
    assert copies.shape == (100, 400)
    assert np.isin(copies, x).all()
    assert np.mean([stats.ar1_phi(c) for c in copies]) == pytest.approx(stats.ar1_phi(x), abs=0.1)
    assert np.array_equal(copies, stats.block_bootstrap(x, np.random.default_rng(1), 100))
    assert stats.block_bootstrap([], np.random.default_rng(1), 3).shape == (3, 0)
    assert stats.block_bootstrap([2.0], np.random.default_rng(1), 2).tolist() == [[2.0], [2.0]]


def test_too_few_points_give_none() -> None:
    few = np.arange(1.0, 8.0)
    assert stats.ar1_mean(few) is None
    assert stats.slope(few, few) is None
    assert stats.slope(np.ones(20), np.arange(20.0)) is None
    assert stats.correlation(few, few[::-1]) is None
    assert stats.variance_ratio(few, few) is None
    assert stats.ratio_of_means(few, np.arange(1.0, 30.0)) is None


def test_unequal_pairs_are_an_error() -> None:
    for function in (stats.slope, stats.correlation, stats.correlation_of_changes):
        with pytest.raises(ValueError, match="unequal"):
            function(np.arange(10.0), np.arange(11.0))


values = st.lists(st.floats(-1e6, 1e6).map(lambda v: round(v, 3)), min_size=8, max_size=60)
holes = st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=5)


@settings(max_examples=60, deadline=None)
@given(values, holes)
def test_non_finite_values_are_dropped_and_counted(x: list[float], bad: list[float]) -> None:
    clean, dirty = need(stats.ar1_mean(x)), need(stats.ar1_mean(bad + x))
    assert dirty.dropped == len(bad)
    assert (dirty.value, dirty.low, dirty.high, dirty.n) == (clean.value, clean.low, clean.high, clean.n)


@settings(max_examples=60, deadline=None)
@given(values)
def test_intervals_hold_their_value(x: list[float]) -> None:
    mean, trend = need(stats.ar1_mean(x)), need(stats.slope(np.arange(len(x)), x))
    for found in (mean, trend):
        assert found.low <= found.value <= found.high
        assert math.isfinite(found.se)
        assert found.se >= 0
    related = stats.correlation(np.arange(len(x)), x)
    assert related is None or -1 <= related.low <= related.value <= related.high <= 1
