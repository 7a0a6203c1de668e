"""The matrix of scenarios by result, and the list of mistakes."""

from __future__ import annotations

from dataclasses import replace

from tests.selftest.made import RUNS
from verl_audit.selftest.score import Answer, Truth
from verl_audit.selftest.table import amiss, matrix, text


def test_the_matrix_has_a_line_a_scenario_and_mistakes_are_listed() -> None:
    with_baseline = [replace(run, way="metrics+baseline") for run in RUNS]
    assert matrix(RUNS)[0] == ("stale_bypass", "harmful", "1 right, 1 wrong")
    assert [line.split(" ")[:2] for line in amiss(with_baseline)] == [
        ["wrong:", "stale_bypass"],
        ["part:", "frozen_and_fp4"],
        ["false", "alarm:"],
    ]
    assert "wrong cause, of runs with a cause: 1/3 = 33.3% (5% to 84%); at most 1%: MISSED" in text(RUNS)
    assert text(RUNS[:1]).endswith("No verdict was wrong, none left a harmed run without its cause.")


def test_several_seeds_are_told_with_their_counts() -> None:
    first = RUNS[0]
    mild = replace(first, seed=9, truth=Truth(first.truth.causes, first.truth.at_work, None, 0.9))
    five = [*(replace(first, seed=seed) for seed in range(4)), mild]
    assert matrix(five) == [("stale_bypass", "4 harmful, 1 mild", "5 right")]
    unsure = replace(first, seed=4, answer=Answer("undetermined"))
    assert matrix([*five[:4], unsure]) == [("stale_bypass", "harmful", "4 right, 1 undetermined")]


def test_seeds_that_are_amiss_alike_take_one_line_and_only_mistakes_are_told_without_a_baseline() -> None:
    part = replace(RUNS[2], way="metrics+baseline")
    (line,) = amiss([part, replace(part, seed=3), replace(part, seed=4)])
    assert line.startswith("part: frozen_and_fp4") and line.endswith("; likewise seed 3, 4")
    assert not list(amiss([replace(part, way="metrics")]))
    assert "[metrics without lag]" in next(amiss([replace(RUNS[1], hidden="lag")]))
