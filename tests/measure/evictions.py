"""Groups of known make, and evictions of known kind, for the statistics of selection."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.cohorts import Cohorts, cohorts
from verl_audit.measure.trace_groups import Groups, group_up, rows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

SIZE = 8


def lengths(rng: np.random.Generator, groups: int, *, icc: float = 0.7, sd: float = 0.6) -> Array:
    """Log-normal response lengths, groups by trajectories."""
    shared, own = rng.normal(size=(groups, 1)), rng.normal(size=(groups, SIZE))
    return np.asarray(np.ceil(500 * np.exp(sd * (math.sqrt(icc) * shared + math.sqrt(1 - icc) * own))))


def longest(length: Array, share: float) -> Mask:
    """The groups with the longest responses."""
    return np.asarray(np.argsort(np.argsort(-length.max(axis=1))) < math.ceil(share * len(length)))


def traces(length: Array, evicted: Mask, *, reward: Array | None = None, fate: str = "stale") -> tuple[Groups, Cohorts]:
    """Eight groups submitted a step and decided three steps later; all of them decided."""
    n = len(length)
    group = np.repeat(np.arange(n), SIZE)
    step = group // 8 + 1
    made = group_up(
        rows(
            group,
            np.where(np.repeat(evicted, SIZE), fate, "trained"),
            session=np.tile(np.arange(SIZE), n),
            response_length=length.ravel(),
            reward=None if reward is None else reward.ravel(),
            submit_step=step,
            decided_step=step + 3 * (group % 8 > 0),
        )
    )
    return made, cohorts(made, outstanding=0)
