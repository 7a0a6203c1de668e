"""The pace of the first steps, and weights that are farther away than their labels allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.measure.test_measures import ASYNC, Points, run, value
from verl_audit.measure.run import RunData, Series

BYPASS: Mapping[str, Any] = {**ASYNC, "log_prob_mode": "bypass", "updates_per_version": 1}
STEPS = range(1, 121)
LAG = {s: float(min(s - 1, 2)) for s in STEPS}
"""Labelled lag: 0 at step 1, then up to 2 versions."""


def walked(
    age: Mapping[int, float], *, level: float = 0.0, pace: float = 1e-3, noise: float = 0.02
) -> dict[int, float]:
    """Divergence of weights that are `age` versions old and move straight ahead."""
    draw = np.random.default_rng(5)
    return {s: level + pace * age[s] ** 2 * (1 + 0.02 * float(draw.standard_normal())) for s in age}


def made(
    gap: Points, lag: Points = LAG, facts: Mapping[str, Any] = ASYNC, name: str = "gap_kl", **more: Points
) -> RunData:
    return run(facts, **{name: gap, "lag_newest_mean": lag, **more})


def test_weights_as_old_as_their_labels_stay_within_a_straight_walk() -> None:
    assert value(made(walked(LAG)), "gap_over_motion") == pytest.approx(1, abs=0.1)
    deep = {s: float(min(s - 1, 30)) for s in STEPS}
    slower_than_straight = {s: 1e-3 * deep[s] for s in STEPS}
    assert value(made(slower_than_straight, deep), "gap_over_motion") < 0.1


def test_weights_that_never_arrive_are_farther_with_every_step() -> None:
    from_step_1 = {s: float(s - 1) for s in STEPS}
    assert value(made(walked(from_step_1)), "gap_over_motion") > 100
    assert value(made(walked(from_step_1), facts=BYPASS, name="ppo_kl"), "gap_over_motion") > 100


def test_numerics_that_are_there_from_the_start_give_no_pace() -> None:
    assert value(made(walked(LAG, level=0.01)), "gap_over_motion") is None


def test_a_rate_that_rises_moves_weights_farther_and_one_that_falls_does_not_excuse() -> None:
    rate = {s: 1e-6 * min(s / 6, 10) for s in STEPS}
    moved = {s: v * (rate[s] / rate[6]) ** 2 for s, v in walked(LAG).items()}
    assert value(made(moved, lr=rate), "gap_over_motion") < 1.1
    assert value(made(moved), "gap_over_motion") > 20
    falling = {s: 1e-6 / s for s in STEPS}
    assert value(made(walked(LAG), lr=falling), "gap_over_motion") == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("lag", "gap"),
    [
        ({s: v for s, v in LAG.items() if s > 1}, walked(LAG)),
        (dict.fromkeys(STEPS, 0.0), walked(LAG)),
        (dict.fromkeys(STEPS, 1.0), walked(LAG)),
        (LAG, dict.fromkeys(STEPS, 0.0)),
        ({s: LAG[s] for s in range(1, 12)}, {s: walked(LAG)[s] for s in range(1, 12)}),
    ],
    ids=["no first step", "no lag", "step 1 has lag", "no gap", "too short"],
)
def test_nothing_is_said_without_a_pace_or_enough_steps(lag: Points, gap: Points) -> None:
    assert value(made(gap, lag), "gap_over_motion") is None


def test_a_step_that_stands_twice_counts_once() -> None:
    once = made(walked(LAG))
    gap, lag = once.get("gap_kl"), once.get("lag_newest_mean")
    twice = Series(np.insert(gap.step, 3, gap.step[3]), np.insert(gap.value, 3, gap.value[3]))
    assert value(
        RunData("r", {"gap_kl": twice, "lag_newest_mean": lag}, facts=dict(ASYNC)), "gap_over_motion"
    ) == value(once, "gap_over_motion")
