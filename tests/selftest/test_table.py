"""Counting: intervals, who is counted in which share, and the list of mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.selftest.score import Answer, Judged, Truth
from verl_audit.selftest.table import RATES, Count, amiss, counted, matrix, text, wilson

STALE = Truth(frozenset({"staleness"}), frozenset({"staleness"}), None, 0.5)
TWO = Truth(frozenset({"mismatch", "sync"}), frozenset({"mismatch", "sync"}), None, 0.5)
HARMLESS = Truth(frozenset(), frozenset(), None, 1.0)
SLOW_BY_OTHER = Truth(frozenset(), frozenset(), "repeated data", 0.5)
RUNS = [
    Judged("stale_bypass", "small", 0, "metrics", STALE, Answer("cause", ("staleness",))),
    Judged("stale_bypass", "small", 1, "metrics", STALE, Answer("cause", ("eviction",))),
    Judged("frozen_and_fp4", "small", 0, "metrics", TWO, Answer("cause", ("sync",))),
    Judged("async", "small", 0, "metrics", HARMLESS, Answer("none")),
    Judged("data_repeated", "small", 0, "metrics", SLOW_BY_OTHER, Answer("cause", ("sync",))),
]


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(8, 10)  # 0.4902 to 0.9433: Agresti and Coull 1998, formula 4
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_is_the_same_from_the_other_side(found: tuple[int, int]) -> None:
    hits, runs = found
    low, high = wilson(hits, runs)
    assert 0 <= low <= hits / runs + 1e-12 and hits / runs - 1e-12 <= high <= 1
    assert wilson(runs - hits, runs) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_each_share_counts_the_runs_it_speaks_of() -> None:
    found = {rate.name: counted(rate, RUNS) for rate in RATES}
    assert found["right cause, of harmed runs"] == Count(2, 3)
    assert found["both causes named, of harmed runs with two"] == Count(0, 1)
    assert found["wrong cause, of runs with a cause"] == Count(1, 3)
    assert found["false alarm, of harmless runs"] == Count(0, 1)
    assert found["one of the four named, of runs slowed by something else"] == Count(1, 1)


def test_a_target_is_met_by_the_share_and_only_where_there_is_one() -> None:
    right, wrong = RATES[0], RATES[2]
    assert (right.met("traces+baseline", 0.89), right.met("metrics+baseline", 0.89)) == (False, True)
    assert right.met("metrics", 0.1) is None and right.target("metrics") == ""
    assert (wrong.met("metrics", 0.01), wrong.met("metrics", 0.02)) == (True, False)


def test_the_matrix_has_a_line_a_scenario_and_mistakes_are_listed() -> None:
    assert matrix(RUNS)[0] == ("stale_bypass", "harmful", "right 1, wrong 1")
    assert [line.split(" ")[:2] for line in amiss(RUNS)] == [
        ["wrong:", "stale_bypass"],
        ["part:", "frozen_and_fp4"],
        ["false", "alarm:"],
    ]
    assert "wrong cause, of runs with a cause: 1/3 = 33.3% (6% to 79%); at most 1%: MISSED" in text(RUNS)
    assert text(RUNS[:1]).endswith("No verdict was wrong, none left a harmed run without its cause.")
