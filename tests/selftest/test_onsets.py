"""Distances between dated and true onsets."""

from __future__ import annotations

from dataclasses import replace

from verl_audit.selftest.onsets import DATED, error, words
from verl_audit.selftest.score import Answer, Interval, Judged, Truth
from verl_audit.selftest.shares import Count

SET_IN, FROM_START, EVENT = DATED
FROZEN = Truth(frozenset({"sync"}), frozenset({"sync"}), None, 0.5, sets_in=21, behind=60)
DECAYED = Truth(frozenset(), frozenset(), "learning rate decayed", 0.4, sets_in=41, behind=44)


def slower(onset: Interval | None, truth: Truth = FROZEN) -> Judged:
    answer = Answer("cause", ("sync",), symptom="slower", onset=onset)
    return Judged("frozen_replicas", "small", 0, "metrics+baseline", truth, answer)


def test_an_interval_holds_the_true_step_to_one_step() -> None:
    runs = [slower((22, 40)), slower((23, 41)), slower((0, 20)), slower(None)]
    found = error(SET_IN, runs)
    assert (found.runs, found.holds) == (4, Count(2, 3, 1))
    assert (found.width, found.after) == (18, -20)
    assert words(found) == "3 of 4 dated, 2 hold it; width 18, ends -20 from surely behind"


def test_only_runs_with_a_true_onset_count() -> None:
    always = replace(FROZEN, sets_in=None, behind=None)
    assert words(error(SET_IN, [slower((0, 20), always)])) == "" == words(error(FROM_START, [slower((0, 20))]))
    assert words(error(SET_IN, [slower(None)])) == "0 of 1 dated"


def test_a_mechanism_there_from_the_start_is_dated_to_the_start_not_to_where_it_surely_shows() -> None:
    always = replace(FROZEN, sets_in=None, behind=30)
    found = error(FROM_START, [slower((0, 35), always), slower((25, 35), always)])
    assert words(found) == "2 of 2 dated, 1 hold it; width 22, ends +5 from surely behind"


def test_a_run_taken_for_unharmed_is_not_asked_for_an_onset() -> None:
    run = slower(None)
    assert not error(SET_IN, [replace(run, answer=replace(run.answer, symptom="not_shown"))]).runs


def test_an_event_is_compared_where_the_verdict_names_one() -> None:
    named = Judged("rate_decayed", "small", 0, "metrics", DECAYED, Answer("other", other="decayed", event=(41, 41)))
    assert error(EVENT, [named, replace(named, answer=Answer("undetermined"))]).holds == Count(1, 1, 1)
