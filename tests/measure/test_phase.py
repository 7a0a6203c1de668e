"""Order inside the sync cycle: found where it is, not found in autocorrelated noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.phase import Phase, known_period, phase, read_series, unknown_period


def series(rng: np.random.Generator, n: int, phi: float, amplitude: float = 0.0, period: int = 4) -> np.ndarray:
    """AR(1) noise of unit variance about 20, a trend, and a sine."""
    noise, last = np.empty(n), rng.normal()
    for i, kick in enumerate(rng.normal(size=n) * math.sqrt(1 - phi**2)):
        noise[i] = last = phi * last + kick
    return np.asarray(20 + noise + np.arange(n) / n + amplitude * np.sin(2 * np.pi * np.arange(n) / period))


def p_of(found: Phase) -> float:
    assert found.p.value is not None
    return float(found.p.value)


@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_noise_is_seldom_called_ordered(phi: float) -> None:
    rng = np.random.default_rng(50)
    drawn = [series(rng, 120, phi) for _ in range(100)]
    assert sum(p_of(known_period(x, 4)) < 0.01 for x in drawn) <= 4
    assert sum(p_of(unknown_period(x)) < 0.01 for x in drawn) <= 4


def test_an_order_of_known_period_is_found() -> None:
    rng = np.random.default_rng(51)
    drawn = [series(rng, 160, 0.4, 0.6) for _ in range(20)]
    assert all(p_of(known_period(x, 4)) < 0.01 for x in drawn)


def test_an_order_of_unknown_period_is_found_with_its_period() -> None:
    rng = np.random.default_rng(52)
    found = [unknown_period(series(rng, 160, 0.4, 1.0, period=5)) for _ in range(20)]
    assert all(p_of(f) < 0.01 and f.period.value == pytest.approx(5, abs=0.2) for f in found)


def test_short_then_long_shows_in_the_phase_means() -> None:
    x = np.tile([89.0, 97.0, 104.0, 110.0], 20) + np.random.default_rng(53).normal(0, 1, 80)
    found = phase(x, 4)
    assert np.allclose(found.means, [-11, -3, 4, 10], atol=0.6)
    assert found.amplitude.value == pytest.approx(0.105, abs=0.005)
    assert p_of(found) == 1 / 2000


def test_the_result_is_the_same_every_time() -> None:
    x = series(np.random.default_rng(54), 80, 0.3)
    assert phase(x, 4) == phase(x, 4)


@pytest.mark.parametrize(
    ("x", "period", "why"),
    [
        ([1.0] * 20, 4, "5 cycles of 4 mini-batches, 10 needed"),
        ([1.0] * 20, None, "20 points, 40 needed where the period is unknown"),
        ([1.0] * 60, None, "the series does not vary"),
        ([1.0] * 59 + [math.nan], 1, "the series has gaps"),
    ],
)
def test_what_cannot_be_tested_says_why(x: list[float], period: int | None, why: str) -> None:
    found = phase(x, period)
    assert (found.p.value, found.p.missing, found.amplitude.missing) == (None, why, why)


def test_a_constant_series_of_known_period_has_no_order() -> None:
    assert p_of(phase(np.full(60, 3.0), 4)) == 1


def rows_of(table: Sequence[tuple[int, int | None, int]]) -> list[dict[str, object]]:
    return [
        {"group": str(i), "fate": "trained", "decided_step": s, "train_minibatch": m, "response_length": n}
        for i, (s, m, n) in enumerate(table)
    ]


def test_the_series_is_the_mean_of_each_mini_batch_in_order() -> None:
    table = [(2, 1, 30), (1, 0, 10), (1, 1, 20), (2, 0, 5), (2, 0, 7), (3, 0, 99)]
    x, period = read_series(trace_store(trajectories=rows_of(table)), RUN)
    assert (x.tolist(), period) == ([10, 20, 6, 30], 2)


def test_without_mini_batches_there_is_one_value_a_step_and_no_period() -> None:
    x, period = read_series(trace_store(trajectories=rows_of([(1, None, 4), (1, None, 6), (2, None, 8)])), RUN)
    assert (x.tolist(), period) == ([5, 8], None)


def test_an_empty_run_has_no_series() -> None:
    assert len(read_series(trace_store(), RUN)[0]) == 0


def test_only_known_columns_become_a_series() -> None:
    with pytest.raises(ValueError, match="no series of"):
        read_series(trace_store(), RUN, "1; DROP TABLE trajectories")
