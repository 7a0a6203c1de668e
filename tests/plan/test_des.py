"""The simulation by itself: conservation, Little's law, the same bytes twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_audit.plan.des import MAX_CYCLE, Setting, setting_of, simulate
from verl_audit.plan.tail import lognormal
from verl_audit.plan.workload import Reference, Work, Workload

LENGTHS = lognormal(0.8, 4).values
BASE = Setting(32, 8, 4, 4, 0.5, 1.0, 0.1, 1.0, cycles=12, warm_up=4)
SETTINGS = st.builds(
    Setting,
    slots=st.integers(1, 64),
    groups=st.integers(1, 12),
    group_size=st.integers(1, 5),
    updates=st.integers(1, 4),
    theta=st.sampled_from([0.0, 0.2, 0.5, 1.0, 2.0]),
    update_seconds=st.floats(0, 5),
    sync_seconds=st.floats(0, 1),
    mean_duration=st.floats(0.1, 5),
    drain=st.booleans(),
    cycles=st.just(9),
    warm_up=st.just(3),
)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert simulate(BASE, LENGTHS, 1) == simulate(BASE, LENGTHS, 1)
    assert simulate(BASE, LENGTHS, 1).cycle != simulate(BASE, LENGTHS, 2).cycle


@settings(max_examples=60)
@given(SETTINGS)
def test_time_and_groups_are_conserved(setting: Setting) -> None:
    run = simulate(setting, LENGTHS)
    assert 0 <= run.train_idle <= 1 and 0 <= run.rollout_idle <= 1 and 0 <= run.sync_share <= 1
    batch = setting.groups * setting.updates
    for before, cycle in zip(run.cycles, run.cycles[1:], strict=False):
        assert cycle.start == before.end
        waited = sum(high - low for low, high in cycle.waits)
        used = waited + batch * setting.update_seconds / setting.groups + setting.sync_seconds
        assert cycle.end - cycle.start == pytest.approx(used)
        assert len(cycle.lags) == batch
        assert cycle.rollout_busy <= setting.slots * (cycle.end - cycle.start) * (1 + 1e-9)
        assert all(0 <= lag <= age for lag, age in zip(cycle.lags, cycle.ages, strict=True))
        assert cycle.under_way <= max(batch, round((1 + setting.theta) * batch))


@settings(max_examples=30)
@given(SETTINGS)
def test_nobody_is_in_two_places(setting: Setting) -> None:
    run = simulate(setting, LENGTHS)
    trace = np.array(run.trace)
    assert (trace[:, 2] <= setting.slots).all()
    assert (trace[1:, 0] >= trace[:-1, 1] - 1e-9).all()
    busy = float(((trace[:, 1] - trace[:, 0]) * trace[:, 2]).sum())
    assert busy >= sum(c.rollout_busy for c in run.cycles) * (1 - 1e-9)


@pytest.mark.parametrize("theta", [1.0, 2.0, 5.0])
def test_littles_law(theta: float) -> None:
    """Trained in the order they finish, groups are on average (under way at a sync) / Q - 1 versions old."""
    run = simulate(replace(BASE, theta=theta, cycles=60, warm_up=10), LENGTHS)
    kept = run.cycles[10:]
    assert run.under_way / (BASE.groups * BASE.updates) - 1 == pytest.approx(theta)
    assert run.age_versions == pytest.approx(theta, abs=0.05)
    assert sum(len(c.lags) for c in kept) == 50 * BASE.groups * BASE.updates


def test_one_slot_does_one_after_the_other() -> None:
    run = simulate(Setting(1, 5, 1, 1, 0.0, 2.0, 0.5, 3.0, cycles=8, warm_up=3), np.array([1.0]))
    assert run.cycle == pytest.approx(5 * 3 + 2 + 0.5)
    assert run.lag_versions == 0


def test_a_huge_batch_is_scaled_down_and_keeps_its_times() -> None:
    work = Workload("fully_async", Work(100, 8), Work(10, 8), Reference(1, 16, ""), 0.0, 1e6, 8, 1e5, lognormal(0.5, 4))
    setting = setting_of(work, 8, 8, 4, 0.5)
    assert setting.groups * setting.group_size * setting.updates * 1.5 <= MAX_CYCLE * 1.01
    assert setting.groups * setting.group_size * setting.mean_duration / setting.slots == pytest.approx(100)
