"""What a figure shows, apart from how it is drawn: strokes, bands, levels, units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Number = float | None
Kind = Literal["line", "stems", "points"]


@dataclass(frozen=True)
class Stroke:
    """One series of a figure. `style` is a class of the style sheet, which gives colour and dash together.

    `low` and `high` are drawn as a band around a line and as bars at points.
    """

    name: str
    style: str
    x: Sequence[Number]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    kind: Kind = "line"


@dataclass(frozen=True)
class Band:
    """A range of x that is marked: shaded, or as a bracket above the plot."""

    name: str
    low: float
    high: float
    bracket: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure with axes; `id` is its anchor, `says` one sentence for who cannot see it."""

    id: str
    title: str
    says: str
    x: str
    y: str
    strokes: tuple[Stroke, ...]
    bands: tuple[Band, ...] = ()
    tall: bool = False
    zero: bool = False
    """Whether the y axis must show 0."""
    span: tuple[float, float] | None = None
    """A range that the x axis shows at least."""
    whole: str = ""
    """The command that gives every point, where the figure holds a selection."""
    note: str = ""
