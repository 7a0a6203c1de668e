"""Can the weights have moved this far?  The gap of later steps against what the first steps show a lag to cost.

The first batches are sampled from the initial weights, which every engine holds, so their labels are true whatever the
syncs deliver. They show how far an optimizer update moves the policy. Weights that are as old as their labels say
cannot be farther away than a straight walk at that pace.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl_audit.measure.lag import mean_lag
from verl_audit.measure.model import Measure
from verl_audit.measure.run import RunData, Series, aligned, measured
from verl_audit.measure.stats import Array, Estimate, ar1_mean, early_late

PACE_STEPS = 6
"""Steps from whose gap the pace is taken, the first left out: its lag is 0."""
MOVED = 0.5
"""Versions of lag from which a step shows movement."""
LEVEL_SHARE = 0.2
"""Share of the early gap up to which the level at lag 0 may contribute; above it numerics are most of the gap."""


def motion_measures(run: RunData) -> Iterator[Measure]:
    """How many times farther than a straight walk the sampled weights are, as a ratio of divergences."""
    yield measured("gap_over_motion", _over_motion(run))


def _gauge(run: RunData) -> Series:
    """A divergence, which grows with the square of the distance. In bypass mode ppo_kl is one to the rollout."""
    if run.has("gap_kl"):
        return run.get("gap_kl")
    return run.get("ppo_kl") if run.facts.get("log_prob_mode") == "bypass" else run.get("gap_k3")


def _over_motion(run: RunData) -> Estimate | None:
    """Mean over the second or the last third of the run, whichever is less.

    Divergence beyond the first step's over pace x lag^2, the pace being the largest of the first steps. It grows with
    the square of the learning rate; lags below a version count as one. None where the first step is missing, or its
    level is a fifth of the early gap or more, so that numerics could be what grows.
    """
    steps, gap, age = aligned(_gauge(run), mean_lag(run))
    early = (steps > 1) & (steps <= PACE_STEPS)
    if not len(steps) or steps[0] != 1 or early.sum() < 2:
        return None
    drift = np.maximum(gap - max(gap[0], 0.0), 0.0)
    moved = early & (age >= MOVED)
    if age[0] != 0 or not moved.any() or max(gap[0], 0.0) > LEVEL_SHARE * drift[moved].max():
        return None
    pace = float((drift[moved] / age[moved] ** 2).max())
    if pace <= 0:
        return None
    ratio = drift / (pace * np.maximum(age, 1.0) ** 2 * _rate_growth(run, steps) ** 2)
    return _lesser(ratio[steps > PACE_STEPS])


def _rate_growth(run: RunData, steps: Array) -> Array:
    """Largest learning rate so far over that of the first steps; 1 where it only falls or is not logged."""
    rate = run.get("lr")
    if not len(rate) or rate.step[0] > PACE_STEPS:
        return np.ones(len(steps))
    first = float(rate.value[rate.step <= PACE_STEPS].max())
    if first <= 0:
        return np.full(len(steps), np.inf)
    highest = np.maximum.accumulate(rate.value)
    return np.maximum(np.interp(steps, rate.step, highest) / first, 1.0)


def _lesser(ratio: Array) -> Estimate | None:
    """The middle or the last third, whichever is less; None when either is too short for an interval."""
    _, late = early_late(ratio)
    middle = ratio[len(ratio) // 3 : len(ratio) - len(late)]
    found = [ar1_mean(part) for part in (middle, late)]
    known = [estimate for estimate in found if estimate is not None]
    return min(known, key=lambda e: e.value) if len(known) == len(found) else None
