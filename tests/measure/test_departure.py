import numpy as np
import pytest

from verl_audit.measure.departure import departure, running_median
from verl_audit.measure.run import Series


def series(values: np.ndarray) -> Series:
    return Series(np.arange(1, len(values) + 1, dtype=float), values)


def noise(n: int, seed: int, phi: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.zeros(n)
    for i in range(1, n):
        out[i] = phi * out[i - 1] + rng.normal()
    return out


def test_a_level_shift_is_dated() -> None:
    for seed in range(20):
        values = 1.0 + 0.05 * noise(200, seed) - 0.6 * (np.arange(200) >= 120)
        found = departure(series(values))
        assert found is not None
        assert found.low <= 122
        assert found.high >= 119
        assert found.high - found.low <= 15


def test_a_slow_fall_is_dated_within_it() -> None:
    fall = np.clip((np.arange(300) - 100) / 100, 0, 1)
    found = departure(series(2 - fall + 0.02 * noise(300, 1)))
    assert found is not None
    assert 100 <= found.low <= found.high <= 160


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_noise_about_one_level_is_seldom_a_departure(phi: float) -> None:
    found = sum(departure(series(10 + noise(200, seed, phi))) is not None for seed in range(200))
    assert found <= 20


def test_an_excursion_that_comes_back_is_none() -> None:
    bump = ((np.arange(200) > 80) & (np.arange(200) < 120)).astype(float)
    assert departure(series(1 + bump + 0.01 * noise(200, 3))) is None


def test_a_short_or_constant_series_has_none() -> None:
    assert departure(series(np.ones(100))) is None
    assert departure(series(np.arange(10.0))) is None


def test_the_running_median_keeps_the_length_and_drops_spikes() -> None:
    values = np.ones(9)
    values[4] = 100
    assert running_median(values, 3).tolist() == [1.0] * 9
    assert len(running_median(np.arange(7.0), 4)) == 7
