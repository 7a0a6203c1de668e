"""Parts by reason add up to the shift and share what they evict together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.measure.cohorts import cohorts
from verl_audit.measure.reasons import ReasonPart, parts_by_reason, shapley
from verl_audit.measure.survival import reward_bias
from verl_audit.measure.trace_groups import EVICTIONS, group_up, rows

STALE, FILTERED, FAILED = (1 << EVICTIONS.index(r) for r in ("stale", "filtered", "failed"))


def parts(bits: np.ndarray, length: np.ndarray) -> dict[str, ReasonPart]:
    """Single-trajectory groups with these reasons; the first reason is the fate."""
    first = [next((r for i, r in enumerate(EVICTIONS) if b >> i & 1), "trained") for b in bits]
    n = len(bits)
    groups = group_up(
        rows(
            np.arange(n),
            first,
            reasons=bits,
            session=np.zeros(n),
            response_length=length,
            reward=length / 10,
            submit_step=np.ones(n),
            decided_step=np.ones(n),
        )
    )
    return {p.reason: p for p in parts_by_reason(groups, cohorts(groups, outstanding=0))}


def test_two_reasons_for_the_same_groups_share_equally() -> None:
    bits = np.array([STALE | FILTERED] * 20 + [0] * 40)
    found = parts(bits, np.where(bits > 0, 40.0, 10.0))
    assert found["stale"].length.value == pytest.approx(-5)
    assert found["filtered"].length.value == pytest.approx(-5)
    assert (found["stale"].groups.value, found["stale"].alone.value) == (20, 0)


def test_reasons_that_do_not_meet_have_parts_of_their_own() -> None:
    bits = np.array([STALE] * 20 + [FILTERED] * 20 + [0] * 60)
    found = parts(bits, np.where(bits == STALE, 40.0, np.where(bits == FILTERED, 2.0, 10.0)))
    stale, filtered = found["stale"].length, found["filtered"].length
    assert stale.high is not None and stale.high < 0
    assert filtered.low is not None and filtered.low > 0
    assert float(stale.value or 0) + float(filtered.value or 0) == pytest.approx(10 - (800 + 40 + 600) / 100)


def test_a_reason_that_does_not_occur_has_no_part() -> None:
    assert set(parts(np.array([FAILED] * 10 + [0] * 30), np.ones(40))) == {"failed"}


def test_without_any_trained_group_there_is_a_reason() -> None:
    found = parts(np.full(30, STALE), np.ones(30))["stale"].length
    assert (found.value, found.missing) == (None, "a set of reasons leaves nothing")


def test_evicted_trajectories_of_trained_groups_count_by_themselves() -> None:
    """The slowest of four is surplus in every group."""
    n = 120
    group, length = np.arange(n) // 4, np.tile([1.0, 2.0, 3.0, 10.0], 30)
    groups = group_up(
        rows(group, np.tile(["trained"] * 3 + ["surplus"], 30), session=np.arange(n) % 4, response_length=length)
    )
    (part,) = parts_by_reason(groups, cohorts(groups))
    assert (part.reason, part.groups.value, part.length.value) == ("surplus", 30, 2 - 4)


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(1, 100)), min_size=1, max_size=60))
def test_parts_add_up_to_the_shift(table: list[tuple[int, float]]) -> None:
    bits, x = np.array([0, *(b for b, _ in table)]), np.array([5.0, *(v for _, v in table)])
    players = [i for i in range(3) if (bits >> i & 1).any()]
    found = shapley(x, np.ones(len(x)), bits, players)
    assert sum(p.value for p in found.values()) == pytest.approx(x[bits == 0].mean() - x.mean(), abs=1e-9)
    for p in found.values():
        assert p.influence.sum() == pytest.approx(0, abs=1e-9)


def test_one_reason_is_the_whole_shift_with_its_interval() -> None:
    rng = np.random.default_rng(40)
    bits = np.where(rng.random(200) < 0.3, STALE, 0)
    length = rng.lognormal(4, 0.5, 200)
    n = len(bits)
    groups = group_up(
        rows(
            np.arange(n),
            np.where(bits, "stale", "trained"),
            session=np.zeros(n),
            response_length=length,
            reward=length,
            submit_step=np.ones(n),
            decided_step=np.ones(n),
        )
    )
    where = cohorts(groups, outstanding=0)
    (part,), whole = parts_by_reason(groups, where), reward_bias(groups, where).total
    assert part.reward.value == pytest.approx(whole.value)
    assert part.reward.low == pytest.approx(whole.low)
    assert part.reward.high == pytest.approx(whole.high)
