"""Where two runs part first: the earliest stretch of a clock on which their curves differ beyond their own noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from verl_audit.measure.stats import Array, ar1_phi, inflation, normal_quantile

LEVEL = 0.05
"""Chance of a false report over the whole range, both directions together."""
WINDOWS = 12
"""Stretches into which the common range is cut, fewer where points are few."""
LEAST = 5
"""Points of a stretch; of fewer no noise can be told."""
PIECE = 60
"""Points that one straight line follows where the noise is taken; along fewer slow noise would pass for a trend."""
RUN_TO_RUN = "no difference beyond noise within the runs is seen"


@dataclass(frozen=True)
class Divergence:
    """The first stretch [low, high] of the clock that differs, and by how much the second run is above the first."""

    low: float
    high: float
    difference: float
    direction: Literal["above", "below"]


@dataclass(frozen=True)
class NoDivergence:
    """None was found, and why."""

    because: str


def first_divergence(reference: tuple[Array, Array], other: tuple[Array, Array]) -> Divergence | NoDivergence:
    """First stretch in which `other` departs from `reference` (x and y each, x rising) and stays apart in the next.

    The reference is interpolated at the x of the other run within the range that both cover. Per stretch of w points
    z = mean difference / sqrt(v / w), v the variance of the differences about straight lines (one for every `PIECE`
    points, two at least) times the AR(1) inflation; what both curves have in common cancels. Two neighbouring
    stretches must both exceed the normal quantile at `LEVEL` / 2 / (stretches - 1) in one direction; the last stretch
    alone is never reported. False reports on curves that differ by noise alone: at most .05 at 60 points and phi .8,
    under .01 at 240 and 1,000. Differences between runs of one configuration are not in v: two seeds part as well, and
    repeats of a baseline show how early.
    """
    x, difference = _paired(reference, other)
    count = min(WINDOWS, len(x) // LEAST)
    if count < 3:
        return NoDivergence(f"{len(x)} common points, {3 * LEAST} are needed")
    edges = np.linspace(0, len(x), count + 1).astype(int)
    parts = [slice(a, b) for a, b in pairwise(edges)]
    means = np.array([difference[p].mean() for p in parts])
    sizes = np.diff(edges)
    se = np.sqrt(_long_run_variance(difference) / sizes)
    limit = normal_quantile(1 - LEVEL / 2 / (count - 1))
    beyond = np.where(np.abs(means) > limit * se, np.sign(means), 0.0)
    for i in range(count - 1):
        if beyond[i] and beyond[i] == beyond[i + 1]:
            part = parts[i]
            apart: Literal["above", "below"] = "above" if beyond[i] > 0 else "below"
            return Divergence(float(x[part][0]), float(x[part][-1]), float(means[i]), apart)
    return NoDivergence(RUN_TO_RUN)


def _paired(reference: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """x and other less reference over the common range."""
    (x1, y1), (x2, y2) = reference, other
    if not len(x1) or not len(x2):
        return np.array([]), np.array([])
    inside = (x2 >= x1[0]) & (x2 <= x1[-1])
    return x2[inside], y2[inside] - np.interp(x2[inside], x1, y1)


def _long_run_variance(y: Array) -> float:
    """Variance about straight lines, times the AR(1) inflation of what is left; n times that of a mean."""
    rest = []
    for part in np.array_split(y, max(2, len(y) // PIECE)):
        t = np.arange(len(part)) - (len(part) - 1) / 2
        centred = part - part.mean()
        rest.append(centred - t * float(t @ centred) / float(t @ t))
    residual = np.concatenate(rest)
    variance = float(residual @ residual) / (len(residual) - 2 * len(rest))
    return variance * inflation(ar1_phi(residual)) if math.isfinite(variance) else math.inf
