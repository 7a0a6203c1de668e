"""Order statistics and residual lives: known distributions, and the simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.plan.des import Setting, simulate
from verl_audit.plan.tail import drain, from_sample, lognormal, makespan, sigma_of

LENGTHS = st.lists(st.floats(0.01, 100), min_size=2, max_size=60)


def test_exponential_durations_are_memoryless() -> None:
    """Residual lives of an exponential are exponential: mean 1, E[last of n] the n-th harmonic number."""
    shares = (np.arange(20_000) + 0.5) / 20_000
    exponential = from_sample(-np.log1p(-shares), "exponential")
    assert exponential.residual_mean == pytest.approx(1, abs=0.01)
    harmonic = sum(1 / i for i in range(1, 33))
    assert float(exponential.last_of(32)) == pytest.approx(harmonic, rel=0.01)
    assert float(exponential.longest_of(32)) == pytest.approx(harmonic, rel=0.01)
    assert float(exponential.residual_quantile(0.5)) == pytest.approx(math.log(2), rel=0.01)


def test_equal_durations() -> None:
    """Residual lives are uniform: E[last of n] = n / (n + 1); a group lasts as long as one."""
    equal = from_sample([7, 7, 7], "equal")
    assert equal.residual_mean == pytest.approx(0.5)
    assert float(equal.last_of(9)) == pytest.approx(0.9, rel=1e-3)
    assert float(equal.longest_of(100)) == pytest.approx(1)
    assert float(equal.of_groups(16)[1]) == pytest.approx(1)


def test_published_group_tail() -> None:
    """A log-normal of sigma 1 cut at 4 x mean: the longest of 16 is 3.16 means of the uncut distribution."""
    cut = lognormal(1.0, 4)
    uncut_mean = float(np.mean(np.minimum(4, np.exp(np.random.default_rng(0).normal(size=400_000) - 0.5))))
    assert float(cut.longest_of(16)) * uncut_mean == pytest.approx(3.16, rel=0.01)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize(("trajectories", "slots"), [(512, 512), (512, 128), (2048, 512)])
def test_makespan_against_the_simulation(sigma: float, trajectories: int, slots: int) -> None:
    lengths = lognormal(sigma, 4)
    run = simulate(Setting(slots, trajectories, 1, 1, 0.0, 0.0, 0.0, 1.0, cycles=25), lengths.values)
    assert float(makespan(lengths, trajectories, slots)) == pytest.approx(run.cycle, rel=0.04)


@given(LENGTHS)
def test_residual_lives_are_a_distribution(values: list[float]) -> None:
    lengths = from_sample(values, "drawn")
    below = lengths.residual_below
    assert below[0] == 0 and below[-1] == pytest.approx(1)
    assert (np.diff(below) >= -1e-12).all()
    second = float(np.mean(lengths.values**2)) / 2
    assert lengths.residual_mean == pytest.approx(second, rel=0.01, abs=1e-3)


@given(LENGTHS, st.floats(1, 500), st.floats(1, 500))
def test_more_trajectories_take_longer_and_more_slots_less(values: list[float], n: float, slots: float) -> None:
    lengths = from_sample(values, "drawn")
    base = float(makespan(lengths, n, slots))
    assert float(makespan(lengths, 2 * n, slots)) >= base - 1e-9
    assert base >= max(float(lengths.longest_of(n)), n / slots) - 1e-9
    assert float(drain(lengths, 2 * slots)) >= float(drain(lengths, slots)) - 1e-9


@given(st.floats(0.05, 2.0))
def test_sigma_is_found_again(sigma: float) -> None:
    largest = float(lognormal(sigma).longest_of(64))
    assert sigma_of(largest, 64) == pytest.approx(sigma, abs=0.03)


def test_sigma_of_many_draws() -> None:
    drawn = np.exp(0.7 * np.random.default_rng(0).normal(size=(500, 8192)) - 0.7**2 / 2)
    assert sigma_of(float(drawn.max(axis=1).mean()), 8192) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1.0, float("nan")], [1.0, -1.0]])
def test_lengths_that_are_none_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        from_sample(values, "bad")
