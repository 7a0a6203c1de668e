"""Whether changing one knob brought learning speed back: the speed of one run against another, either way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_audit.measure.eviction import reward_admissible
from verl_audit.measure.run import RunData
from verl_audit.measure.speed import Symptom, symptom

Outcome = Literal["faster", "slower", "unclear", "untested"]


@dataclass(frozen=True)
class Change:
    """Learning speed per update after a change over that before it; the interval is two-sided 90 %."""

    outcome: Outcome
    value: float | None
    low: float | None
    high: float | None
    because: str


def changed(before: RunData, after: RunData, *, run_sd: float) -> Change:
    """Speed of `after` against `before`: faster where the whole interval is above 1, slower where it is below.

    A run that hardly learns is no clock to measure by; then the speed is measured against `after` and inverted.
    """
    found = _against(after, before, run_sd)
    if found.per_update is not None:
        speed = found.per_update
        return _told(speed.value, speed.low, speed.high, found.because)
    turned = _against(before, after, run_sd)
    if turned.per_update is not None:
        speed = turned.per_update
        because = f"measured the other way round: {turned.because}"
        return _told(1 / speed.value, 1 / speed.high, 1 / speed.low, because)
    return Change("untested", None, None, None, found.because)


def _against(run: RunData, baseline: RunData, run_sd: float) -> Symptom:
    return symptom(run, [baseline], admissible=reward_admissible(run), run_sd=run_sd)


def _told(value: float, low: float, high: float, because: str) -> Change:
    outcome: Outcome = "faster" if low > 1 else "slower" if high < 1 else "unclear"
    return Change(outcome, value, low, high, because)
