"""Whether one change brought learning back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_audit.measure.intervention import changed
from verl_audit.measure.run import RunData, Series

FACTS: dict[str, Any] = {"updates_per_version": 1.0, "groups_per_step": 16.0, "trainer": "sync", "is_async": False}


def run(name: str, speed: float, *, seed: int = 0, level: float = 0.6, steps: int = 120) -> RunData:
    rng = np.random.default_rng(seed)
    at = np.arange(0.0, steps + 1, 4)
    score = 0.8 - level * np.exp(-speed * at / 40) + rng.normal(0, 0.005, len(at))
    validation = Series(at, score)
    step = np.arange(1.0, steps + 1)
    signals = {"validation": validation, "time_step": Series(step, np.ones(steps))}
    return RunData(name, signals, {"validation": {"toy": validation}}, facts=FACTS)


@pytest.mark.parametrize(
    ("before", "after", "outcome"), [(0.3, 1.0, "faster"), (1.0, 0.3, "slower"), (1.0, 1.0, "unclear")]
)
def test_outcomes(before: float, after: float, outcome: str) -> None:
    found = changed(run("before", before, seed=1), run("after", after, seed=2), run_sd=0.15)
    assert found.outcome == outcome
    assert found.value is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx(after / before, rel=0.25)
    assert found.low < found.value < found.high


def test_a_run_that_does_not_learn_is_measured_the_other_way_round() -> None:
    flat, learns = run("flat", 0.0, seed=1), run("learns", 1.0, seed=2)
    found = changed(flat, learns, run_sd=0.15)
    assert (found.outcome, found.because.startswith("measured the other way round")) == ("faster", True)
    assert found.value is not None and found.value > 5


def test_without_a_score_it_says_why() -> None:
    silent = RunData("silent", {}, facts=FACTS)
    found = changed(silent, silent, run_sd=0.15)
    assert (found.outcome, found.value) == ("untested", None)
    assert "validation" in found.because
