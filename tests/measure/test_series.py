"""Series to draw: bounded, on the clocks of their run, and honest about what a thinned point stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.measure.run import EMPTY, RunData, Series
from verl_audit.measure.series import MAX_BASELINES, MAX_POINTS, draw, on_clock, side_by_side, thinned
from verl_audit.measure.speed import Symptom

UNTESTED = Symptom("untested", "no baseline")


def series(step: Any, value: Any) -> Series:
    return Series(np.asarray(step, dtype=float), np.asarray(value, dtype=float))


def run(name: str = "run", facts: dict[str, Any] | None = None, **signals: Series) -> RunData:
    return RunData(name, signals, {n: {"": s} for n, s in signals.items()}, facts=facts or {})


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=700))
def test_a_thinned_line_keeps_its_mean_its_ends_and_its_extremes(values: list[float]) -> None:
    given_ = series(range(len(values)), values)
    step, value, low, high = thinned(given_, limit=50)
    assert len(step) == len(value) == min(len(values), 50)
    assert np.all(np.diff(step) > 0)
    if low is None or high is None:
        assert value.tolist() == values
        return
    assert (low.min(), high.max()) == (min(values), max(values))
    assert np.all(low <= value + 1e-6) and np.all(value <= high + 1e-6)


def test_clocks() -> None:
    found = run(facts={"updates_per_version": 4.0, "samples_per_step": 64.0}, time_step=series([1, 2, 4], [30, 60, 90]))
    step = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    assert on_clock(found, step, "update") == pytest.approx([0, 4, 8, 12, 16])
    assert on_clock(found, step, "sample") == pytest.approx([0, 64, 128, 192, 256])
    hours = on_clock(found, step, "hour")
    assert hours == pytest.approx(np.array([0, 30, 90, 180, 270]) / 3600)  # step 3 was not logged: as long as step 4


def test_a_clock_that_the_run_does_not_tell_is_none() -> None:
    assert [on_clock(run(), np.array([1.0]), c) for c in ("update", "sample", "hour")] == [None, None, None]


def test_what_is_drawn_is_bounded() -> None:
    steps = np.arange(1, 5001)
    noisy = series(steps, np.sin(steps))
    bases = [run(f"base{i}", score_trained=noisy, gap_prob_mean=noisy) for i in range(9)]
    drawn = draw(run(score_trained=noisy, gap_prob_mean=noisy, lag_mean=noisy), bases, UNTESTED)
    (reward,) = drawn.reward
    assert [line.run for line in reward.lines] == ["run", *(f"base{i}" for i in range(MAX_BASELINES))]
    lines = [line for q in (*drawn.reward, *drawn.signals) for line in q.lines]
    assert {line.points for line in lines} == {5000} and {len(line.step) for line in lines} == {MAX_POINTS}
    assert {q.name: len(q.lines) for q in drawn.signals} == {"gap_prob_mean": 2, "lag_mean": 1}


def test_inert_signals_are_not_drawn() -> None:
    clip = series(range(1, 9), np.zeros(8))
    silent = RunData("run", {"clip_share": clip}, inert={"clip_share": "0 by construction"})
    assert draw(silent, [], UNTESTED).signals == ()
    assert len(draw(run(clip_share=clip), [], UNTESTED).signals) == 1


def test_where_mechanisms_begin() -> None:
    steps = range(1, 6)
    lagging = run(lag_oldest_max=series(steps, [0, 0, 1, 2, 0]), stale_groups=series(steps, [0, 0, 0, 8, 0]))
    assert draw(lagging, [], UNTESTED).began == {"staleness": 3, "eviction": 4}
    assert draw(run(lag_oldest_max=series(steps, [0] * 5)), [], UNTESTED).began == {}


def test_side_by_side_takes_the_runs_that_have_a_signal() -> None:
    has, hasnt = run("has", entropy=series([1, 2], [1, 2])), run("hasnt")
    (found,) = side_by_side([hasnt, has], ["entropy", "grad_norm"])
    assert (found.name, [line.run for line in found.lines]) == ("entropy", ["has"])
    assert len(EMPTY) == 0
