"""The ledger adds up, and says what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.ledger import Depth, Expected, Ledger, ledger, read_depth, unseen
from verl_audit.measure.trace_groups import FATE_NAMES, group_up, read_rows, rows


def book(table: list[dict[str, Any]], **others: Any) -> Ledger:
    """The ledger of rows in the store."""
    data = read_rows(trace_store(trajectories=table), RUN)
    return ledger(data, group_up(data), **others)


def group(name: str, fate: str, *lengths: int | None, step: int = 1, age: int = 1) -> list[dict[str, Any]]:
    """A whole group of one fate."""
    return [
        {
            "group": name,
            "session": i,
            "fate": fate,
            "response_length": n,
            "submit_step": step,
            "decided_step": step + age,
        }
        for i, n in enumerate(lengths)
    ]


def amounts(found: Ledger) -> dict[str, tuple[Any, Any, Any]]:
    return {x.fate: (x.groups.value, x.trajectories.value, x.tokens.value) for x in found.lines if x.groups.value}


def test_fates_sum_to_what_was_generated() -> None:
    found = book([*group("a", "trained", 3, 4), *group("b", "stale", 10, 20), *group("c", "filtered", 1, 1)])
    assert amounts(found) == {"trained": (1, 2, 7), "stale": (1, 2, 30), "filtered": (1, 2, 2)}
    assert (found.total.groups.value, found.total.trajectories.value, found.total.tokens.value) == (3, 6, 39)
    assert found.closes is None


def test_a_group_of_two_fates_is_mixed_and_its_trajectories_keep_theirs() -> None:
    table = [*group("a", "trained", 3, 4), {"group": "a", "session": 2, "fate": "surplus", "response_length": 9}]
    found = book(table, expected=Expected(group_size=3))
    assert amounts(found) == {"mixed": (1, 0, 0)}
    assert {x.fate: x.trajectories.value for x in found.lines if x.trajectories.value} == {"trained": 2, "surplus": 1}
    assert (found.residual_trajectories.value, found.closes) == (0, False)


def test_unknown_tokens_are_no_number_but_a_lower_bound() -> None:
    tokens = next(x.tokens for x in book(group("a", "stale", 3, None)).lines if x.fate == "stale")
    assert (tokens.value, tokens.low, tokens.missing) == (None, 3, "unknown for 1 of 2 rows")


def test_a_failed_group_without_trajectories_owes_them_and_its_tokens() -> None:
    table = [*group("a", "trained", 3, 4), {"group": "b", "fate": "failed", "response_length": 0}]
    found = book(table, expected=Expected(group_size=2))
    assert amounts(found) == {"trained": (1, 2, 7), "failed": (1, 0, None)}
    assert (found.undelivered.value, found.residual_trajectories.value, found.closes) == (2, 0, True)
    assert (found.total.tokens.value, found.total.tokens.low) == (None, 7)


def test_missing_sessions_of_a_trained_group_do_not_close() -> None:
    found = book(group("a", "trained", 3, 4), expected=Expected(group_size=4))
    assert (found.residual_trajectories.value, found.closes) == (2, False)


def test_turns_of_one_session_are_one_session() -> None:
    table = [{"group": "a", "session": 0, "turn": t, "fate": "trained", "response_length": 1} for t in (0, 1)]
    found = book(table, expected=Expected(group_size=1))
    assert (found.residual_trajectories.value, found.duplicates.value, found.closes) == (0, 0, True)


def test_repeated_rows_are_counted() -> None:
    found = book([*group("a", "trained", 3), *group("a", "trained", 3)], expected=Expected(group_size=1))
    assert (found.duplicates.value, found.closes) == (1, False)


def test_given_totals_give_residuals() -> None:
    found = book(group("a", "trained", 3, 4), expected=Expected(groups=3, tokens=10))
    assert (found.residual_groups.value, found.residual_tokens.value, found.closes) == (2, 3, False)


def test_unknown_sessions_leave_the_residual_unknown() -> None:
    found = book([{"group": "a", "fate": "trained", "response_length": 3}], expected=Expected(group_size=2))
    assert found.residual_trajectories.value is None
    assert "session" in found.residual_trajectories.missing


def flow(vanish: int | None = None) -> tuple[list[dict[str, Any]], Depth]:
    """One group a step, each two steps in the buffer, the last two still there; `vanish` leaves no row."""
    table = [r for s in range(1, 29) if s != vanish for r in group(f"g{s}", "trained", 5, step=s, age=2)]
    step = np.arange(1, 31, dtype=float)
    return table, Depth(step, np.minimum(step, 2.0))


def test_the_buffer_agrees_with_the_rows_but_for_what_is_in_flight() -> None:
    table, depth = flow()
    found = book(table, depth=depth)
    assert (found.open_groups.value, found.lost_groups.value, found.closes) == (2, 0, True)


def test_a_group_that_vanishes_from_the_buffer_without_a_row_is_lost() -> None:
    table, depth = flow(vanish=10)
    found = book(table, depth=depth)
    assert (found.lost_groups.value, found.closes) == (1, False)


def test_groups_in_flight_with_a_row_are_not_open_twice() -> None:
    table, depth = flow()
    table += [
        {**r, "fate": "in_flight", "decided_step": None} for s in (29, 30) for r in group(f"g{s}", "x", 0, step=s)
    ]
    assert book(table, depth=depth).open_groups.value == 0


def test_without_steps_the_buffer_says_nothing() -> None:
    groups = group_up(rows([0], ["trained"]))
    assert np.isnan(unseen(groups, Depth(np.array([1.0]), np.array([3.0])))).all()


def test_depth_is_the_last_count_of_each_step() -> None:
    counts: list[dict[str, Any]] = [
        {"step": 1, "t": 2.0, "running": 5},
        {"step": 1, "t": 1.0, "running": 9},
        {"step": 2},
    ]
    depth = read_depth(trace_store(buffer_depth=counts), RUN)
    assert (depth.step.tolist(), depth.groups.tolist()) == ([1], [5])


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.sampled_from(FATE_NAMES), st.none() | st.integers(0, 50)),
        max_size=40,
    )
)
def test_lines_always_sum_to_the_total(table: list[tuple[int, int, str, int | None]]) -> None:
    code, fate = [g for g, *_ in table], [FATE_NAMES.index(f) for *_, f, _ in table]
    lengths = [np.nan if n is None else n for *_, n in table]
    data = rows(code, np.array(fate, dtype=int), session=[s for _, s, *_ in table], response_length=lengths)
    found = ledger(data, group_up(data))
    assert sum(int(x.groups.value or 0) for x in found.lines) == found.total.groups.value == len(set(code))
    assert sum(int(x.trajectories.value or 0) for x in found.lines) == found.total.trajectories.value == len(table)
    known = sum(int(x.tokens.value if x.tokens.value is not None else x.tokens.low or 0) for x in found.lines)
    assert known == (found.total.tokens.value if found.total.tokens.value is not None else found.total.tokens.low)
