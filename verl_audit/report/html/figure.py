"""A chart made ready for the page: its SVG, its legend, and the table of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from verl_audit.report.html.chart import Chart
from verl_audit.report.html.svg import draw, swatch
from verl_audit.report.page import count, number

MAX_ROWS = 24
"""Rows of the table behind a figure; beyond them evenly chosen ones stand for all."""


@dataclass(frozen=True)
class Figure:
    """A chart with everything the template prints; `rows` hold text, the first column being x."""

    chart: Chart
    svg: Markup
    legend: tuple[tuple[Markup, str], ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    said: str
    """What the table holds of all points."""


def figure(chart: Chart) -> Figure:
    """Draw a chart and make its legend and table."""
    strokes = [s for s in chart.strokes if len(s.x)]
    legend = [(swatch(s.style), s.name) for s in strokes]
    legend += [(swatch("bracket" if b.bracket else "band"), b.name) for b in chart.bands]
    rows = _rows(chart)
    chosen = _evenly(rows, MAX_ROWS)
    said = "all points of the figure" if len(chosen) == len(rows) else f"{len(chosen)} of {count(len(rows), 'point')}"
    return Figure(chart, draw(chart), tuple(legend), (chart.x, *(s.name for s in strokes)), tuple(chosen), said)


def _rows(chart: Chart) -> list[tuple[str, ...]]:
    strokes = [s for s in chart.strokes if len(s.x)]
    table: dict[float, list[str]] = {}
    for column, stroke in enumerate(strokes):
        for i, (x, y) in enumerate(zip(stroke.x, stroke.y, strict=True)):
            if x is None or y is None:
                continue
            low, high = (None if side is None else side[i] for side in (stroke.low, stroke.high))
            spread = f" ({number(low)} to {number(high)})" if low is not None and high is not None else ""
            table.setdefault(x, [""] * len(strokes))[column] = f"{number(y)}{spread}"
    return [(number(x), *table[x]) for x in sorted(table)]


def _evenly(rows: Sequence[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
