"""Counting: intervals, who is counted in which share, and targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.selftest.made import RUNS, STALE
from verl_audit.selftest.score import Answer, Judged, Truth
from verl_audit.selftest.shares import BY_CAUSE, BY_NEARNESS, BY_SPEED, HIDDEN, RATES, Count, counted, wilson


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(0.8, 10)  # 0.4902 to 0.9433: Agresti and Coull 1998, formula 4
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert Count(0, 0, 0).interval == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_is_the_same_from_the_other_side(found: tuple[int, int]) -> None:
    hits, runs = found
    low, high = wilson(hits / runs, runs)
    assert 0 <= low <= hits / runs + 1e-12 and hits / runs - 1e-12 <= high <= 1
    assert wilson(1 - hits / runs, runs) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_each_share_counts_the_runs_it_speaks_of() -> None:
    found = {rate.name: counted(rate, RUNS) for rate in RATES}
    assert found["right cause, of harmed runs"] == Count(2, 3, 2)
    assert found["both causes named, of harmed runs with two"] == Count(0, 1, 1)
    assert found["wrong cause, of runs with a cause"] == Count(1, 3, 2)
    assert found["false alarm, of harmless runs"] == Count(0, 1, 1)
    assert found["one of the four named, of runs slowed by something else"] == Count(1, 1, 1)


def test_a_target_is_met_by_the_share_and_only_where_there_is_one() -> None:
    right, wrong = RATES[0], RATES[2]
    assert (right.met("traces+baseline", 0.89), right.met("metrics+baseline", 0.89)) == (False, True)
    assert right.met("metrics", 0.1) is None and right.target("metrics") == ""
    assert (wrong.met("metrics", 0.01), wrong.met("metrics", 0.02)) == (True, False)


def test_more_seeds_of_the_same_scenarios_do_not_narrow_the_interval() -> None:
    one, five = (Count(hits, runs, 28) for hits, runs in ((21, 28), (105, 140)))
    assert one.interval == five.interval
    low, high = Count(105, 140, 140).interval
    assert five.interval[0] < low < high < five.interval[1]


def test_the_right_cause_is_also_counted_by_the_true_one() -> None:
    found = {rate.name.split(" ")[0]: counted(rate, RUNS) for rate in BY_CAUSE}
    assert found["staleness"] == Count(1, 2, 1)
    assert (found["sync"], found["mismatch"], found["eviction"].runs) == (Count(1, 1, 1), Count(0, 1, 1), 0)


def test_targets_of_several_ways_are_told_once_where_they_are_the_same() -> None:
    right, wrong = RATES[0], RATES[2]
    assert right.short(["traces+baseline", "metrics"]) == "≥ 90% / –"
    assert wrong.short(["traces", "metrics"]) == "≤ 1%"
    assert right.short(["traces"]) == ""
    assert {wrong.target(way) for way in ("traces", "metrics")} == {"at most 1%"}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (Answer("undetermined", missing=("lag_mean",)), (1, 1)),
        (Answer("undetermined", missing=("gap_kl",)), (0, 0)),
        (Answer("undetermined", lacking=("lag_oldest_max",)), (1, 0)),
    ],
)
def test_a_hidden_signal_is_named_by_the_verdict_or_by_the_coverage(answer: Answer, named: tuple[int, int]) -> None:
    whole = Answer("cause", ("staleness",))
    run = Judged("stale_bypass", "small", 0, "metrics+baseline", STALE, answer, "lag", whole)
    assert tuple(counted(rate, [run]).hits for rate in HIDDEN[2:]) == named
    same = replace(run, whole=Answer("undetermined"))
    assert counted(HIDDEN[2], [same]).runs == 0  # it was undetermined already


def test_a_wrong_cause_counts_where_something_is_hidden() -> None:
    run = Judged("stale_bypass", "small", 0, "metrics", STALE, Answer("cause", ("sync",)), "lag", Answer("none"))
    assert counted(HIDDEN[0], [run]).hits == 1 and HIDDEN[0].met("metrics", 0.0) and not HIDDEN[0].met("metrics", 0.001)


@pytest.mark.parametrize(
    ("at_work", "speed", "found"),
    [({"mismatch"}, 0.82, (1, 0)), ({"mismatch"}, 0.95, (0, 1)), (set(), 0.82, (0, 1)), ({"mismatch"}, 0.79, (0, 0))],
)
def test_a_false_alarm_just_above_the_limit_is_told_apart(
    at_work: set[str], speed: float, found: tuple[int, int]
) -> None:
    truth = Truth(frozenset(), frozenset(at_work), None, speed)
    run = Judged("fp4_tis", "small", 0, "traces+baselines", truth, Answer("cause", ("mismatch",)))
    assert tuple(counted(rate, [run]).hits for rate in BY_NEARNESS) == found


def test_harmed_runs_are_counted_by_how_much_they_are_slowed() -> None:
    among = [counted(rate, RUNS).runs for rate in BY_SPEED]
    assert sum(among) == counted(RATES[0], RUNS).runs > 0
    assert BY_SPEED[0].name.endswith("0.0 to 0.4 of the speed") and BY_SPEED[-1].name.endswith(
        "0.7 to 0.8 of the speed"
    )
