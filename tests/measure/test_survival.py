"""Selection by length is found, selection by chance is not; survival curves, age and truncation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.evictions import SIZE, lengths, longest, traces
from verl_audit.measure.cohorts import cohorts
from verl_audit.measure.survival import (
    difficulty,
    evicted_share,
    evicted_trajectories,
    falling,
    length_bias,
    prompt_age,
    reward_bias,
    reward_by_length,
    stale_share,
    survival_by_difficulty,
    survival_by_length,
    truncation,
    truncation_point,
)
from verl_audit.measure.trace_groups import group_up, rows

FOUND = -0.05
"""A bias is found when the upper limit is below it."""


def upper(length: np.ndarray, evicted: np.ndarray) -> float:
    high = length_bias(*traces(length, evicted)).within.high
    assert high is not None
    return high


def test_random_eviction_gives_no_finding() -> None:
    rng = np.random.default_rng(11)
    found = [upper(lengths(rng, 100), rng.random(100) < 0.2) < FOUND for _ in range(100)]
    assert sum(found) <= 5


def test_random_eviction_of_growing_responses_late_in_the_run_gives_no_finding() -> None:
    rng = np.random.default_rng(12)
    found = []
    for _ in range(100):
        length = lengths(rng, 200) * np.linspace(1, 4, 200)[:, None]
        groups, where = traces(length, (rng.random(200) < 0.5) & (np.arange(200) >= 100))
        bias = length_bias(groups, where)
        found.append((bias.within.high or 0) < FOUND)
        assert (bias.composition.number() or 0) < 0
    assert sum(found) <= 5


def test_removing_the_longest_tenth_of_100_groups_is_found() -> None:
    rng = np.random.default_rng(13)
    drawn = [lengths(rng, 100) for _ in range(100)]
    assert sum(upper(x, longest(x, 0.1)) < FOUND for x in drawn) >= 95


def test_selection_by_length_shifts_the_reward_through_length_alone() -> None:
    rng = np.random.default_rng(14)
    length = lengths(rng, 600)
    reward = (rng.random(length.shape) < np.exp(-length.max(axis=1, keepdims=True) / 2000)).astype(float)
    groups, where = traces(length, longest(length, 0.3), reward=reward)
    shift, by_length = reward_bias(groups, where), reward_by_length(groups, where)
    assert shift.total.low is not None and shift.total.low > 0
    assert by_length.total.value == pytest.approx(shift.total.value)
    assert by_length.within.low is not None and by_length.within.high is not None
    assert by_length.within.low < 0 < by_length.within.high


def test_a_reward_filter_shifts_the_reward_at_equal_length() -> None:
    rng = np.random.default_rng(15)
    length = lengths(rng, 300)
    reward = np.repeat(rng.random((300, 1)) < 0.5, SIZE, axis=1).astype(float)
    groups, where = traces(length, (reward[:, 0] == 1) & (rng.random(300) < 0.8), reward=reward, fate="filtered")
    within = reward_by_length(groups, where).within
    assert within.high is not None and within.high < -0.1


def test_few_groups_or_unknown_rewards_give_a_reason() -> None:
    rng = np.random.default_rng(16)
    groups, where = traces(lengths(rng, 19), np.zeros(19, dtype=bool))
    assert length_bias(groups, where).total.missing == "19 groups in resolved cohorts, 20 needed"
    groups, where = traces(lengths(rng, 40), np.arange(40) < 8)
    assert reward_bias(groups, where).within.missing == "known for 0 of 40 groups in resolved cohorts"


def test_all_evicted_gives_a_reason() -> None:
    groups, where = traces(lengths(np.random.default_rng(17), 40), np.ones(40, dtype=bool))
    assert "nothing was trained" in length_bias(groups, where).total.missing


def test_a_dump_of_training_batches_claims_no_absence_of_bias() -> None:
    groups, _ = traces(lengths(np.random.default_rng(18), 60), np.zeros(60, dtype=bool))
    where = cohorts(groups, outstanding=0, evicted_recorded=False)
    for m in (length_bias(groups, where).total, evicted_share(groups, where), stale_share(groups, where)):
        assert (m.value, "only trained" in m.missing) == (None, True)
    assert "only trained" in survival_by_length(groups, where).missing
    assert "only trained" in truncation_point(groups, where).missing


# -- curves ------------------------------------------------------------------------------------------------


def test_survival_falls_where_the_longest_are_evicted() -> None:
    length = lengths(np.random.default_rng(20), 300)
    groups, where = traces(length, longest(length, 1 / 6))
    shares = [b.trained.value for b in survival_by_length(groups, where).bins]
    assert shares == [1, 1, 1, 1, 1, 0]
    bins = survival_by_length(groups, where).bins
    assert all(a.high == b.low for a, b in pairwise(bins))
    assert (bins[0].low, bins[-1].high) == (groups.longest.min(), groups.longest.max())


def test_equal_lengths_share_one_bin() -> None:
    groups, where = traces(np.full((30, SIZE), 7.0), np.arange(30) < 15)
    (only,) = survival_by_length(groups, where).bins
    assert (only.low, only.high, only.trained.value, only.trained.n) == (7, 7, 0.5, 30)


def test_l50_is_where_survival_halves() -> None:
    rng = np.random.default_rng(21)
    length = lengths(rng, 2000)
    chance = 1 / (1 + np.exp((length.max(axis=1) - 1200) / 80))
    groups, where = traces(length, rng.random(2000) > 0.9 * chance)
    point = truncation_point(groups, where)
    assert point.value is not None and point.low is not None and point.high is not None
    assert float(point.value) == pytest.approx(1200, abs=80)
    assert point.low <= float(point.value) <= point.high


def test_l50_of_an_even_survival_is_not_there() -> None:
    rng = np.random.default_rng(22)
    groups, where = traces(lengths(rng, 400), rng.random(400) < 0.5)
    assert truncation_point(groups, where).missing == "survival never falls below half of its plateau"


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=20))
def test_falling_is_monotone_keeps_the_mean_and_leaves_a_falling_sequence(pairs: list[tuple[float, int]]) -> None:
    y, w = (np.array(c, dtype=float) for c in zip(*pairs, strict=True))
    fit = falling(y, w)
    assert (np.diff(fit) <= 1e-12).all()
    assert fit @ w == pytest.approx(y @ w)
    np.testing.assert_allclose(falling(fit, w), fit)


def test_difficulty_is_that_of_the_other_groups_of_a_prompt() -> None:
    groups = group_up(rows(range(4), ["trained"] * 4, prompt=[0, 0, 0, -1], reward=[1, 0, 0.5, 9], session=[0] * 4))
    score, variable = difficulty(groups)
    np.testing.assert_allclose(score, [0.25, 0.75, 0.5, np.nan])
    assert variable == "mean reward of the prompt's other groups"


def test_one_epoch_falls_back_on_the_groups_own_reward() -> None:
    rng = np.random.default_rng(23)
    reward = np.repeat(rng.integers(0, 3, (120, 1)) / 2, SIZE, axis=1)
    groups, where = traces(lengths(rng, 120), reward[:, 0] != 0.5, reward=reward, fate="filtered")
    found = survival_by_difficulty(groups, where)
    assert found.variable.startswith("own mean reward")
    assert [b.trained.value for b in found.bins] == [0, 1, 0]


def test_difficulty_of_unknown_rewards_has_a_reason() -> None:
    groups, where = traces(lengths(np.random.default_rng(24), 40), np.zeros(40, dtype=bool))
    assert survival_by_difficulty(groups, where).missing == "reward known for 0 of 40 groups in resolved cohorts"


# -- share, age, truncation --------------------------------------------------------------------------------


def test_groups_trained_in_part_show_in_the_share_of_trajectories() -> None:
    n = 160
    groups = group_up(rows(np.arange(n) // 4, np.tile(["trained"] * 3 + ["surplus"], 40), session=np.arange(n) % 4))
    where = cohorts(groups)
    assert (evicted_share(groups, where).value, evicted_trajectories(groups, where).value) == (0, 0.25)


def test_age_counts_the_submitting_step() -> None:
    groups = group_up(
        rows(
            range(4),
            ["trained", "trained", "stale", "failed"],
            session=[0] * 4,
            submit_step=[1, 1, 1, 1],
            decided_step=[1, 3, 5, 9],
        )
    )
    mean, oldest, youngest = prompt_age(groups)
    assert (mean.value, oldest.value, youngest.value) == (2, 3, 5)
    assert stale_share(groups, cohorts(groups)).value == 0.25


def test_age_without_steps_has_a_reason() -> None:
    assert {m.missing for m in prompt_age(group_up(rows([0], ["trained"])))} == {
        "submission or deciding steps are unknown"
    }


def test_truncated_shares_of_trained_and_evicted() -> None:
    n = 400
    group = np.arange(n) // 4
    evicted = group % 4 == 0
    groups = group_up(
        rows(
            group,
            np.where(evicted, "stale", "trained"),
            session=np.arange(n) % 4,
            truncated=evicted & (np.arange(n) % 2 == 0),
            submit_step=group,
            decided_step=group,
        )
    )
    found = truncation(groups, cohorts(groups, outstanding=0))
    assert (found.trained.value, found.evicted.value, found.difference.value) == (0, 0.5, 0.5)


def test_unknown_truncation_has_a_reason() -> None:
    groups, where = traces(lengths(np.random.default_rng(25), 40), np.arange(40) < 9)
    assert truncation(groups, where).difference.missing == "truncation is not known of any trained trajectory"
