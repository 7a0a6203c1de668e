"""Log rows of sources that several writers share, and which process life each belongs to.

A trainer and a rollout process that log into one file need not log their steps in order. A row starts a new
process life only if most of its keys were already logged at a higher step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from verl_audit.ingest.model import MetricBuffer, ValueKind

INT64 = 1 << 63
STEP_KEYS = (
    "step",
    "_step",
    "global_step",
    "training/global_step",
    "train/step",
    "rollout/step",
    "eval/step",
    "trainer/global_step",
    "train/global_step",
    "Step",
)
"""Names under which trackers and frameworks log the step, the ones told apart best first."""
_SPELLED = {
    "nan": math.nan,
    "inf": math.inf,
    "+inf": math.inf,
    "-inf": -math.inf,
    "infinity": math.inf,
    "-infinity": -math.inf,
}
_DEEPEST = 8


@dataclass
class Row:
    """One log call: values under their keys, in order."""

    step: int
    values: list[tuple[str, float, ValueKind | None]] = field(default_factory=list)
    wall_time: float | None = None
    place: tuple[int, int] = (0, 0)
    """Record and segment in the buffer, once it was added."""

    def take(self, key: str, value: object) -> bool:
        """Append a logged value if it is a number, and say whether it is."""
        taken = number(value)
        if taken is not None:
            self.values.append((key, *taken))
        return taken is not None


def emit(rows: Iterable[Row], metrics: MetricBuffer) -> None:
    """Add rows to the buffer as they come."""
    last: dict[str, int] = {}
    for row in rows:
        step = row.step
        seen = [last[key] for key, _, _ in row.values if key in last]
        restart = 2 * sum(step < before for before in seen) > len(seen)
        if restart:
            last = {}
        metrics.next_record(step, row.wall_time, restart)
        row.place = metrics.place
        for key, value, kind in row.values:
            metrics.add(key, value, kind)
            if last.get(key, step) <= step:
                last[key] = step


def step_of(row: Mapping[str, object]) -> tuple[int, str] | None:
    """The step a row tells, and under which key."""
    for key in STEP_KEYS:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if abs(value) < INT64 and value == int(value):
            return int(value), key
    return None


def number(value: object) -> tuple[float, ValueKind | None] | None:
    """A logged value as a number: booleans count, and so do the words for NaN and infinity."""
    if isinstance(value, str):
        spelled = _SPELLED.get(value.lower())
        return None if spelled is None else (spelled, None)
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        return float(value), None
    except OverflowError:
        return (math.inf if value > 0 else -math.inf), "clamped"


def flatten(tree: Mapping[str, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Leaves of nested mappings under keys joined by `/`."""
    for key, value in tree.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from flatten(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value
