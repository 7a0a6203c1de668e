"""Weighting recovers the generated reward where it is valid, and gives bounds where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.measure.evictions import SIZE, lengths, longest, traces
from verl_audit.measure.cohorts import cohorts
from verl_audit.measure.ipw import generated_reward


def drawn(seed: int, groups: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Lengths, and rewards that fall with the longest response of the group."""
    rng = np.random.default_rng(seed)
    length = lengths(rng, groups)
    reward = (rng.random(length.shape) < np.exp(-length.max(axis=1, keepdims=True) / 2500)).astype(float)
    return rng, length, reward


def test_weights_recover_the_reward_of_everything_generated() -> None:
    rng, length, reward = drawn(30, 1500)
    chance = np.interp(length.max(axis=1), [600, 2500], [1.0, 0.25])
    found = generated_reward(*traces(length, rng.random(1500) > chance, reward=reward))
    truth = reward.mean()
    assert found.generated.value == pytest.approx(truth)
    assert found.weighted.low is not None and found.weighted.high is not None
    assert found.weighted.low <= truth <= found.weighted.high
    assert float(found.trained.value or 0) - truth > 3 * abs(float(found.weighted.value or 0) - truth)
    assert float(found.ess.value or 0) > 0.3


def test_unrecorded_rewards_of_the_evicted_still_weigh() -> None:
    rng, length, reward = drawn(31, 1500)
    evicted = rng.random(1500) > np.interp(length.max(axis=1), [600, 2500], [1.0, 0.25])
    hidden = np.where(evicted[:, None], np.nan, reward)
    found = generated_reward(*traces(length, evicted, reward=hidden))
    assert found.generated.value is None
    assert found.weighted.value == pytest.approx(reward.mean(), abs=0.03)


def test_lengths_that_were_never_trained_leave_bounds() -> None:
    _, length, reward = drawn(32, 600)
    found = generated_reward(*traces(length, longest(length, 0.4), reward=reward), reward_range=(0, 1))
    assert found.weighted.value is None
    assert "never trained" in found.weighted.missing
    assert found.weighted.low is not None and found.weighted.high is not None
    assert found.weighted.low <= reward.mean() <= found.weighted.high
    assert found.weighted.high - found.weighted.low == pytest.approx(0.4, abs=0.01)


def test_few_heavy_weights_leave_bounds() -> None:
    rng, length, reward = drawn(33, 1200)
    evicted = longest(length, 0.8) & (rng.random(1200) > 0.02)
    found = generated_reward(*traces(length, evicted, reward=reward))
    assert float(found.ess.value or 0) <= 0.3
    assert found.weighted.missing.startswith("ESS_w")


def test_a_reward_filter_is_not_undone_by_length() -> None:
    rng, length, _ = drawn(34, 600)
    reward = np.repeat(rng.random((600, 1)) < 0.5, SIZE, axis=1).astype(float)
    evicted = (reward[:, 0] == 1) & (rng.random(600) < 0.6)
    found = generated_reward(*traces(length, evicted, reward=reward, fate="filtered"))
    assert (found.weighted.value, found.ess.value is not None) == (None, True)
    assert "more than length" in found.weighted.missing


def test_a_dump_of_training_batches_estimates_nothing() -> None:
    _, length, reward = drawn(35, 60)
    groups, _ = traces(length, np.zeros(60, dtype=bool), reward=reward)
    found = generated_reward(groups, cohorts(groups, outstanding=0, evicted_recorded=False))
    assert {m.value for m in (found.trained, found.generated, found.weighted, found.ess, found.lost)} == {None}


def test_nothing_trained_has_a_reason() -> None:
    _, length, reward = drawn(36, 40)
    found = generated_reward(*traces(length, np.ones(40, dtype=bool), reward=reward))
    assert "no trained trajectory" in found.weighted.missing
