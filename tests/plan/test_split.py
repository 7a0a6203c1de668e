"""Closed forms: the numbers that must come out, where the optimum moves, and the simulation."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.plan.des import Simulated, setting_of, simulate
from verl_audit.plan.split import (
    TERMS,
    Candidates,
    Prediction,
    best_ratio,
    fluid_cycle,
    least_theta,
    one,
    overlap,
    overlap_of,
    predict,
    sync_share,
)
from verl_audit.plan.tail import lognormal
from verl_audit.plan.workload import Work, Workload, two_pools

LENGTHS = lognormal(1.0, 4)
SYNC = 0.18
TIMES = st.floats(0.1, 50)


def workload(a: float, b: float, k: float, size: float = 1, **other: Any) -> Workload:
    """512 trajectories a cycle on 128 slots; a and b are times of a cycle."""
    return two_pools(
        slots=128, groups=512 / size / k, group_size=size, mean_duration=a * 128 / 512, update_seconds=b / k,
        sync_seconds=SYNC, durations=LENGTHS, **other,
    )  # fmt: skip


def at(k: float, theta: float, cards: tuple[float, float] = (1, 1)) -> Candidates:
    return one(*cards, k, theta)


def both(work: Workload, k: float, theta: float) -> tuple[Prediction, Simulated]:
    return predict(work, at(k, theta)), simulate(setting_of(work, 1, 1, k, theta), work.durations.values)


# -- the simple model -----------------------------------------------------------------------------------------

MUST = [
    (64, 16, 1.000, 0.500, 0.50, 1.00), (64, 24, 0.933, 0.600, 0.54, 0.83), (64, 32, 1.000, 0.750, 0.50, 0.67),
    (128, 32, 0.500, 0.250, 0.50, 1.00), (128, 40, 0.473, 0.273, 0.53, 0.92), (128, 48, 0.467, 0.300, 0.54, 0.83),
    (128, 64, 0.500, 0.375, 0.50, 0.67),
]  # fmt: skip
"""Cards, training cards; A(0) and A(1) over a step of 3 + 1 on 32 cards; throughput per card of both."""


@pytest.mark.parametrize(("cards", "train", "none", "full", "card_none", "card_full"), MUST)
def test_splits_of_a_3_to_1_baseline(
    cards: int, train: int, none: float, full: float, card_none: float, card_full: float
) -> None:
    a, b = Work(3, 32).on(np.array(cards - train)), Work(1, 32).on(np.array(train))
    for s, time, card in ((0, none, card_none), (1, full, card_full)):
        found = float(overlap(a, b, s)) / 4
        assert found == pytest.approx(time, abs=5e-4)
        assert 32 / cards / found == pytest.approx(card, abs=6e-3)


def test_scaling_exponents() -> None:
    """At 32:96 of 128 with exponents .9 and .8 balance costs 12 % (rollouts 1.12 in place of 1.00)."""
    assert float(Work(3, 32, 0.9).on(np.array(96.0))) == pytest.approx(1.116, abs=1e-3)
    assert float(Work(1, 32, 0.8).on(np.array(32.0))) == 1


def test_three_to_one_is_best_only_for_an_overlap_of_two_thirds() -> None:
    assert best_ratio(3, 1, 0) == pytest.approx(1.732, abs=1e-3)
    assert best_ratio(3, 1, 0.5) == pytest.approx(2.449, abs=1e-3)
    assert best_ratio(3, 1, 2 / 3) == pytest.approx(3)
    assert best_ratio(3, 1, 0.66) < 3 == best_ratio(3, 1, 0.67) == best_ratio(3, 1, 1)
    assert best_ratio(1, 3, 0.5) == pytest.approx(1 / best_ratio(3, 1, 0.5))


@given(TIMES, TIMES, st.floats(0, 1))
def test_the_best_ratio_is_the_minimum_of_a_scan(rollout: float, train: float, s: float) -> None:
    train_share = np.linspace(0.001, 0.999, 9_999)
    scan = overlap(rollout / (1 - train_share), train / train_share, s)
    r = best_ratio(rollout, train, s)
    best = float(overlap(rollout * (1 + r) / r, train * (1 + r), s))
    assert best <= scan.min() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ratio", "shares"), [(4, (0.20, 0.11, 0.06)), (10, (0.09, 0.05, 0.02))], ids=["T_mb = 4 T", "T_mb = 10 T"]
)
def test_sync_share(ratio: float, shares: tuple[float, ...]) -> None:
    found = sync_share(ratio, 1, [1, 2, 4])
    assert [round(float(x), 2) for x in found] == list(shares)


# -- k and theta ----------------------------------------------------------------------------------------------


@given(TIMES, TIMES, st.integers(1, 16), st.floats(0, 3))
def test_the_overlap_gives_the_same_cycle(a: float, b: float, k: int, theta: float) -> None:
    """Of the three terms the admission term is A(s) at its s; the first-batch term comes on top."""
    with_s = float(overlap(a, b, overlap_of(a, b, k, theta)))
    assert with_s == pytest.approx(max(a, b, (1 - theta) * a + b / k))
    assert float(fluid_cycle(a, b, k, theta)) >= with_s - 1e-9


@given(TIMES, TIMES, st.integers(1, 16))
def test_more_theta_than_the_least_useful_one_gains_nothing(a: float, b: float, k: int) -> None:
    theta = float(least_theta(a, b, k))
    assert float(fluid_cycle(a, b, k, theta + 1e-6)) == pytest.approx(max(a, b), rel=1e-4)
    if theta > 1e-3:
        assert float(fluid_cycle(a, b, k, theta * 0.9)) > max(a, b)


@given(TIMES, TIMES, st.sampled_from([1, 2, 4, 8]), st.floats(0, 3), st.sampled_from([1, 8, 16]))
def test_bounds_of_a_prediction(a: float, b: float, k: int, theta: float, size: int) -> None:
    found = predict(workload(a, b, k, size), at(k, theta))
    cycle, mean = float(found.cycle[0]), a * 128 / 512
    assert cycle >= max(a, b) + SYNC - 1e-9
    latest = max(float(LENGTHS.longest_of(512)), 4 + float(LENGTHS.last_of(128)))
    assert cycle <= mean * latest + b + SYNC + 1e-9
    for name in ("train_idle", "rollout_idle", "sync_share", "evicted"):
        assert 0 <= float(getattr(found, name)[0]) <= 1
    assert 0 <= float(found.lag_versions[0]) <= theta + 1e-9
    idle = (float(found.train_idle[0]), float(found.rollout_idle[0]))
    if TERMS[int(found.binds[0])] in ("rollout", "trainer"):
        assert min(idle) == pytest.approx(0, abs=1e-9)


@given(TIMES, TIMES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 8]))
def test_more_theta_never_lengthens_a_cycle(a: float, b: float, k: int, size: int) -> None:
    thetas = [0.0, 0.1, 0.3, 0.5, 1.0, 2.0]
    cycles = [float(predict(workload(a, b, k, size), at(k, t)).cycle[0]) for t in thetas]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in pairwise(cycles)), cycles


@given(TIMES, TIMES, st.floats(0, 2))
def test_more_cards_never_lengthen_a_cycle(a: float, b: float, theta: float) -> None:
    work = workload(a, b, 4, 8)
    base = float(predict(work, at(4, theta)).cycle[0])
    assert float(predict(work, at(4, theta, (2, 1))).cycle[0]) <= base * (1 + 1e-9)


# -- the simulation -------------------------------------------------------------------------------------------

LOADS = [(3.72, 3.72), (3.72, 1.86), (1.86, 3.72)]
GRID = list(product(LOADS, (1, 4), (0.0, 0.1, 0.3, 0.5, 2.0), (1, 8)))


@pytest.mark.parametrize(("load", "k", "theta", "size"), GRID)
def test_cycle_and_idle_against_the_simulation(load: tuple[float, float], k: int, theta: float, size: int) -> None:
    found, run = both(workload(*load, k, size), k, theta)
    assert float(found.cycle[0]) == pytest.approx(run.cycle, rel=0.035)
    assert float(found.train_idle[0]) == pytest.approx(run.train_idle, abs=0.035)
    assert float(found.rollout_idle[0]) == pytest.approx(run.rollout_idle, abs=0.035)


@pytest.mark.parametrize(("load", "k", "theta", "size"), [g for g in GRID if g[0][0] != g[0][1]])
def test_lag_against_the_simulation(load: tuple[float, float], k: int, theta: float, size: int) -> None:
    found, run = both(workload(*load, k, size), k, theta)
    assert float(found.lag_versions[0]) == pytest.approx(run.lag_versions, abs=0.06)


ROOMY = list(product((1, 4), (0.0, 0.3, 1.0, 2.0), (0.5, 1, 4), (1, 8)))


@pytest.mark.parametrize(("k", "theta", "b", "size"), ROOMY)
def test_a_pool_with_a_slot_for_everyone(k: int, theta: float, b: float, size: int) -> None:
    work = two_pools(
        slots=2048, groups=512 / size / k, group_size=size, mean_duration=1, update_seconds=b / k,
        sync_seconds=SYNC, durations=LENGTHS,
    )  # fmt: skip
    found, run = both(work, k, theta)
    assert float(found.cycle[0]) == pytest.approx(run.cycle, rel=0.035)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_a_drain_costs_the_tail_in_every_cycle(theta: float) -> None:
    found, run = both(workload(3.72, 3.72, 4, 1, partial=False), 4, theta)
    assert float(found.cycle[0]) == pytest.approx(run.cycle, rel=0.035)
    assert run.cycle > 6.5


@pytest.mark.parametrize("load", [*LOADS, (3.72, 9.0)])
def test_one_step_off_against_the_simulation(load: tuple[float, float]) -> None:
    found, run = both(workload(*load, 1, 8, mode="one_step_off"), 1, 1.0)
    assert float(found.cycle[0]) == pytest.approx(run.cycle, rel=0.035)
    assert run.lag_versions == float(found.lag_versions[0]) == 1


@pytest.mark.parametrize(("theta", "threshold", "share"), [(2.0, 2.0, 1 / 3), (3.0, 2.0, 0.5), (3.0, 3.0, 0.25)])
@pytest.mark.parametrize("a", [1.86, 6.0])
def test_eviction_against_the_simulation(a: float, theta: float, threshold: float, share: float) -> None:
    found, run = both(workload(a, 3.72, 1, 8, evict_above=threshold), 1, theta)
    assert float(found.evicted[0]) == pytest.approx(share, abs=0.03)
    assert run.evicted == pytest.approx(share, abs=0.04)
    assert float(found.cycle[0]) == pytest.approx(run.cycle, rel=0.06)


def test_an_ample_threshold_evicts_nothing() -> None:
    found, run = both(workload(1.86, 3.72, 1, 8, evict_above=8.0), 1, 1.0)
    assert float(found.evicted[0]) == run.evicted == 0
