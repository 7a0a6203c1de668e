"""Scales of a figure: round ticks, their labels, and positions in thousandths of the plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIZE = 1000
"""Units along each side of a plot; the page stretches them to its width."""
LARGEST = 1e300
"""Values beyond are drawn here: twice their distance would be no number."""
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A linear scale from `low` to `high` with its ticks and their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def at(self, value: float) -> int:
        """Position in thousandths from the low end, held to one plot beyond either end."""
        share = (_held(value) - self.low) / (self.high - self.low)
        return round(SIZE * min(max(share, -1.0), 2.0))

    def percent(self, value: float) -> str:
        """Position as a percentage from the low end."""
        return f"{self.at(value) / 10:g}%"


def axis(values: Iterable[float], *, ticks: int = 5, widen: bool = False, zero: bool = False) -> Axis:
    """An axis over the finite values with about `ticks` round ticks; `widen` lets it begin and end at a tick."""
    finite = [_held(v) for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if zero and low > 0:
        low = 0.0
    if not high > low:
        spare = abs(high) * 0.1 or 1.0
        low, high = (low, high + spare) if zero and low >= 0 else (low - spare, high + spare)
    step = _step((high - low) / ticks)
    if not (math.isfinite(step) and low + step != low and high - step != high):  # too close to be told apart
        return Axis(low, high, (), ())
    if widen:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    at = tuple(k * step for k in range(first, last + 1))
    return Axis(low, high, at, labels(at, step))


def _held(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST)


def _step(rough: float) -> float:
    if not 0 < rough < math.inf:
        return math.nan
    power = 10.0 ** math.floor(math.log10(rough))
    return next((s for s in STEPS if s * power >= rough * (1 - 1e-9)), 10.0) * power


def labels(at: Sequence[float], step: float) -> tuple[str, ...]:
    """Tick labels of equal precision, in powers of ten where plain digits would be long."""
    largest = max(map(abs, at), default=0.0)
    if largest and not 1e-4 <= step <= 1e9:
        return tuple(f"{v:.3g}" for v in at)
    exponent = math.floor(math.log10(step))
    decimals = max(0, -exponent + (round(step / 10.0**exponent, 6) % 1 > 0))
    return tuple(f"{0.0 if abs(v) < step / 2 else v:,.{decimals}f}" for v in at)
