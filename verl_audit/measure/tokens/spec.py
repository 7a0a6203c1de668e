"""What the token reducer counts, and the fixed edges it counts in.

Every edge is a constant or a setting of `Spec`, never derived from the data, so that sums of different files add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

REDUCER_VERSION = 1
"""Raised with every change of what is counted: cached sums of another version are made anew."""

UNKNOWN = -1
"""Stands for an unknown step, lag or mini-batch in keys; NULL in the tables of the store."""

CLAMP = 20.0
"""Bound on |d|, that of verl's log-ratios (verl, trainer/ppo/rollout_corr_helper.py: SAFETY_BOUND)."""

BUCKETS = 1024
"""Buckets of |d|: its float32 bits >> 21, four to a factor of two, so a quantile is known to within 25 %."""

BINS = 16
"""Bins of the behave log-prob b: |b| below 2^-11, then a factor of two each, the last from 2^3 on."""

CLUSTERS = 64
"""Clusters of prompt groups, for intervals that respect that trajectories of a group are alike."""

FIRST_EXPONENT = 127 - 12
"""Exponent bits of a float32 in bin 0, or below."""


@dataclass(frozen=True)
class Spec:
    """Settings of one reduction; sums of different settings do not add.

    `clip_low` and `clip_high` are the eps of the clipped loss: a ratio is clipped below 1 - `clip_low` if the advantage
    is negative and above 1 + `clip_high` if it is positive. `fates` names the fates whose tokens count in cells,
    strata, subsets and histogram; per-trajectory sums are made for every fate. `run`: only rows of this run count.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    fates: tuple[str, ...] = ("trained", "unknown")
    run: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no loss can mean."""
        if not (0 <= self.clip_low < 1 and self.clip_high >= 0):
            raise ValueError(f"needed: 0 <= clip_low < 1 and clip_high >= 0; given: {self.clip_low}, {self.clip_high}")

    @property
    def clip_below(self) -> float:
        """Log-ratio below which a token of negative advantage is clipped."""
        return math.log1p(-self.clip_low)

    @property
    def clip_above(self) -> float:
        """Log-ratio above which a token of positive advantage is clipped."""
        return math.log1p(self.clip_high)


def cluster(group: str) -> int:
    """Cluster of a prompt group: the same on every machine."""
    return crc32(group.encode()) % CLUSTERS


def bucket_edges() -> NDArray[np.float64]:
    """Edges of the histogram's buckets: bucket i holds edges[i] <= |d| < edges[i + 1]; the last are never met."""
    bits = np.minimum(np.arange(BUCKETS + 1, dtype=np.uint32) << np.uint32(21), np.uint32(0x7F800000))
    edges: NDArray[np.float64] = bits.view(np.float32).astype(np.float64)
    return edges


def bin_edges() -> NDArray[np.float64]:
    """Edges of the strata's bins: bin i holds edges[i] <= |b| < edges[i + 1]."""
    return np.array([0.0, *(2.0**k for k in range(-11, 4)), math.inf])
