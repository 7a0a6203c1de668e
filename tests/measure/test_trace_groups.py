"""Rows of the store as arrays, and their sums per group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.trace_groups import (
    FATE_NAMES,
    MIXED,
    TRAINED,
    group_up,
    read_rows,
    rows,
    without_trajectory,
)


def test_rows_come_from_the_store_with_unknown_as_nan() -> None:
    con = trace_store(
        trajectories=[
            {"group": "b", "session": 0, "fate": "stale", "reasons": ["stale", "filtered"], "response_length": 7},
            {"group": "a", "session": 1, "fate": "trained", "response_length": None, "prompt_key": "p"},
            {"group": "b", "session": 1, "fate": "melted", "response_length": 9, "truncated": True},
            {"run": "another", "group": "a", "fate": "trained", "response_length": 1},
        ]
    )
    data = read_rows(con, RUN)
    assert data.group.tolist() == [0, 1, 0]
    assert [FATE_NAMES[f] for f in data.fate] == ["stale", "trained", "unknown"]
    assert data.reasons.tolist() == [0b11, 0, 0]
    assert data.prompt.tolist() == [-1, 0, -1]
    np.testing.assert_equal(data.numbers["response_length"], [7, np.nan, 9])
    np.testing.assert_equal(data.numbers["truncated"], [np.nan, np.nan, 1])


def test_an_empty_run_has_no_groups() -> None:
    data = read_rows(trace_store(), RUN)
    assert (len(data), len(group_up(data))) == (0, 0)


def test_a_group_has_the_fate_of_its_rows_or_is_mixed() -> None:
    groups = group_up(rows([0, 0, 1, 1, 2], ["trained", "trained", "trained", "stale", "in_flight"]))
    assert groups.fate.tolist() == [TRAINED, MIXED, FATE_NAMES.index("in_flight")]
    assert groups.trained.tolist() == [True, True, False]
    assert groups.open.tolist() == [False, False, True]


def test_a_failed_group_without_trajectories_counts_no_trajectory() -> None:
    data = rows([0, 1, 1], ["failed", "failed", "failed"], session=[np.nan, 0, 1], response_length=[0, 0, 5])
    assert without_trajectory(data).tolist() == [True, False, False]
    assert group_up(data).rows.tolist() == [0, 2]


def test_a_column_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no such column: lenght"):
        rows([0], ["trained"], lenght=[1])


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(FATE_NAMES), st.none() | st.integers(0, 99)),
        min_size=1,
        max_size=40,
    )
)
def test_sums_are_those_of_a_plain_loop(table: list[tuple[int, str, int | None]]) -> None:
    codes, fates, lengths = zip(*table, strict=True)
    length = [np.nan if x is None else float(x) for x in lengths]
    groups = group_up(rows(codes, fates, session=range(len(table)), response_length=length))
    for i, code in enumerate(sorted(set(codes))):
        mine = [(f, x) for c, f, x in table if c == code]
        known = [x for _, x in mine if x is not None]
        assert groups.rows[i] == len(mine)
        assert (groups.length.total[i], groups.length.count[i]) == (sum(known), len(known))
        assert groups.length.trained_total[i] == sum(x for f, x in mine if x is not None and f == "trained")
        assert groups.trained_rows[i] == sum(f == "trained" for f, _ in mine)
        np.testing.assert_equal(groups.longest[i], max(known, default=np.nan))
