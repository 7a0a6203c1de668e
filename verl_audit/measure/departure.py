"""When a series left its own early level: an interval, since noise hides the exact step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.run import Series
from verl_audit.measure.stats import Array, ar1_phi, inflation

MIN_STEPS = 20
"""Fewest points in which an onset is looked for."""
EARLY = 0.2
"""Share of the run, at least 8 points, that is taken as its early level."""
BAND = 3.0
"""Standard errors of the smoothed series around the early level within which it has not left."""


@dataclass(frozen=True)
class Departure:
    """`low`: last step still within the early band. `high`: first step by which half of the change has happened."""

    low: float
    high: float
    before: float
    after: float


def departure(series: Series) -> Departure | None:
    """How the smoothed series left the level of its first fifth for that of its last tenth, and never came back.

    Smoothing is a running median over a twentieth of the run (3 points at least); the band is 3 standard errors of
    such a median about the early one, from the early points about their own line, widened for autocorrelation. None
    below 20 points, or where the end lies within the band.
    """
    step, value = series.step, series.value
    n = len(value)
    if n < MIN_STEPS:
        return None
    width = max(3, n // 20)
    smooth = running_median(value, width)
    head = max(8, int(EARLY * n))
    before, after = float(np.median(value[:head])), float(np.median(value[-max(3, n // 10) :]))
    band = BAND * _spread(value[:head]) / math.sqrt(width)
    if abs(after - before) <= band:
        return None
    away = (smooth - before) * math.copysign(1.0, after - before)
    out = _first_of_the_rest(away > band)
    half = _first_of_the_rest(away > abs(after - before) / 2)
    first, second = step[max(min(out, half) - 1, 0)], step[min(max(out, half), n - 1)]
    return Departure(float(first), float(second), before, after)


def _spread(values: Array) -> float:
    """Robust sd about a line, times the inflation of a mean by autocorrelation; 1.25 for the median."""
    x = np.arange(len(values), dtype=np.float64)
    rest = values - np.polyval(np.polyfit(x, values, 1), x)
    sd = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    return 1.25 * max(sd, 1e-12) * math.sqrt(inflation(min(ar1_phi(rest), 0.8)))


def _first_of_the_rest(true: NDArray[np.bool_]) -> int:
    """Index from which all are true (the length of the array when the last one is not)."""
    false = np.flatnonzero(~true)
    return int(false[-1]) + 1 if len(false) else 0


def running_median(values: Array, width: int) -> Array:
    """Median of `width` points around each, the ends mirrored; same length as `values`."""
    left = (width - 1) // 2
    padded = np.pad(values, (left, width - 1 - left), mode="reflect")
    medians: Array = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    return medians
