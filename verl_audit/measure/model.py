"""A measure: a named quantity with unit, interval, number of points, and the reason when it has no value."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Scalar = float | bool | str
MeasureType = Literal["number", "bool", "text"]
Level = Literal["traces", "metrics"]
"""What a measure was computed from: the per-trajectory traces, or the metric series."""


@dataclass(frozen=True)
class MeasureDef:
    """A measure's entry in `catalog.toml`; `needs` lists signals, each entry a tuple of alternatives."""

    name: str
    unit: str
    definition: str
    needs: tuple[tuple[str, ...], ...] = ()
    type: MeasureType = "number"
    baseline: bool = False
    traces: bool = False
    """Only traces give it a value."""
    every_step: bool = False
    """Whether it needs every step, so that a selection of them is not enough."""


@dataclass(frozen=True)
class Measure:
    """One value. `value is None` means not computed, and `missing` says for want of what."""

    name: str
    value: Scalar | None
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None
    missing: str = ""
    """Why there is no value, in words; empty when there is one."""
    wants: tuple[str, ...] = ()
    """Signals (or the word `baseline`) that would give it a value."""
    level: Level = "metrics"

    def number(self) -> float | None:
        """The value as a finite number, else None."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            return None
        return float(self.value) if math.isfinite(self.value) else None


@cache
def catalog() -> Mapping[str, MeasureDef]:
    """All measures by name, as `catalog.toml` defines them."""
    text = files("verl_audit.measure").joinpath("catalog.toml").read_text(encoding="utf-8")
    return {name: _definition(name, raw) for name, raw in tomllib.loads(text)["measure"].items()}


def _definition(name: str, raw: Mapping[str, object]) -> MeasureDef:
    needs = raw.get("needs", [])
    assert isinstance(needs, list)
    return MeasureDef(
        name=name,
        unit=str(raw["unit"]),
        definition=str(raw["definition"]),
        needs=tuple((n,) if isinstance(n, str) else tuple(n) for n in needs),
        type=raw.get("type", "number"),  # type: ignore[arg-type]
        baseline=bool(raw.get("baseline", False)),
        traces=bool(raw.get("traces", False)),
        every_step=bool(raw.get("every_step", False)),
    )
