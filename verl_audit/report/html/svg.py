"""Figures as inline SVG without fixed width: the plot stretches with the page, its text and strokes do not.

The SVG is the plot itself, and its text stands in the margins that the style sheet leaves around it. The paths live in
an inner SVG of 1000 x 1000 units that is stretched to the plot; `vector-effect` in the style sheet keeps strokes as
wide as they are, and a dot is a stroke of no length with round ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from markupsafe import Markup

from verl_audit.report.html.axes import SIZE, Axis, axis
from verl_audit.report.html.chart import Band, Chart, Number, Stroke

FEW = 40
"""Points up to which each of them gets a dot."""
WIDEST_LABEL = 10
"""Characters of a tick label for which the style sheet has a margin."""


def draw(chart: Chart) -> Markup:
    """The figure's SVG, with its title and description for screen readers."""
    across = axis(_across(chart))
    up = axis(_up(chart), ticks=5 if chart.tall else 3, widen=True, zero=chart.zero)
    room = min(max((len(text) for text in up.labels), default=1), WIDEST_LABEL)
    inner = Markup("").join(
        [
            *(_level_tick(up, tick, text) for tick, text in zip(up.ticks, up.labels, strict=True)),
            *(_across_tick(across, tick, text) for tick, text in zip(across.ticks, across.labels, strict=True)),
            Markup('<svg class="paths" viewBox="0 0 {0} {0}" preserveAspectRatio="none">').format(SIZE),
            *(_band(band, across) for band in chart.bands),
            *(part for stroke in chart.strokes for part in _stroke(stroke, across, up)),
            Markup("</svg>"),
        ]
    )
    return Markup(
        '<svg class="chart m{room}{tall}" role="img" aria-labelledby="{id}-t {id}-d">'
        '<title id="{id}-t">{title}</title><desc id="{id}-d">{says}</desc>{inner}'
        '<text class="name" x="0" y="-10">{y}</text>'
        '<text class="name" x="100%" y="100%" dy="2.75em" text-anchor="end">{x}</text></svg>'
    ).format(
        tall=" tall" if chart.tall else "",
        id=chart.id,
        title=chart.title,
        says=chart.says,
        y=chart.y,
        x=chart.x,
        room=room,
        inner=inner,
    )


def swatch(style: str) -> Markup:
    """The sample of a stroke or band that stands in a legend."""
    if style in ("band", "bracket"):
        shape = '<rect class="band" x="2" y="2" width="24" height="10"/>' if style == "band" else ""
        shape = shape or '<path class="bracket" d="M3 10V5H25V10"/>'
    else:
        shape = '<path class="{}" d="M1 7H27"/>'
    return Markup('<svg class="swatch" aria-hidden="true" viewBox="0 0 28 14">' + shape + "</svg>").format(style)


def interval(low: float, value: float, high: float, end: float, marks: Iterable[float] = ()) -> Markup:
    """A value with its interval on a line from 0 to `end`, for a table; the cell beside it has the numbers."""
    at = Axis(0.0, end, (), ())
    ticks = Markup("").join(Markup('<path class="mark" d="M{} 0V1000"/>').format(at.at(m)) for m in marks)
    return Markup(
        '<svg class="interval" aria-hidden="true" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
        '<path class="base" d="M0 500H1000"/>{ticks}<path class="range" d="M{low} 500H{high}"/>'
        '<path class="dot" d="M{value} 500h0"/></svg>'
    ).format(ticks=ticks, low=at.at(low), high=at.at(high), value=at.at(value))


def _across(chart: Chart) -> Iterator[float]:
    yield from chart.span or ()
    for stroke in chart.strokes:
        yield from (x for x in stroke.x if x is not None)


def _up(chart: Chart) -> Iterator[float]:
    for stroke in chart.strokes:
        for values in (stroke.y, stroke.low or (), stroke.high or ()):
            yield from (y for y in values if y is not None)
        if stroke.kind == "stems":
            yield 0.0


def _level_tick(up: Axis, tick: float, text: str) -> Markup:
    at = f"{100 - up.at(tick) / 10:g}%"
    return Markup(
        '<line class="gridline" x1="0" x2="100%" y1="{0}" y2="{0}"/><text class="tick" x="0" dx="-8" y="{0}" '
        'dy=".34em" text-anchor="end">{1}</text>'
    ).format(at, text)


def _across_tick(across: Axis, tick: float, text: str) -> Markup:
    return Markup(
        '<line class="tickmark" x1="{0}" x2="{0}" y1="100%" y2="102%"/>'
        '<text class="tick" x="{0}" y="100%" dy="1.45em" text-anchor="middle">{1}</text>'
    ).format(across.percent(tick), text)


def _band(band: Band, across: Axis) -> Markup:
    low, high = (min(max(across.at(v), 0), SIZE) for v in (band.low, band.high))
    if band.bracket:
        return Markup('<path class="bracket" d="M{0} 25V0H{1}V25"/>').format(low, high)
    return Markup('<rect class="band" x="{}" y="0" width="{}" height="{}"/>').format(low, max(high - low, 3), SIZE)


def _stroke(stroke: Stroke, across: Axis, up: Axis) -> Iterator[Markup]:
    at = _positions(stroke.x, stroke.y, across, up)
    if stroke.kind == "stems":
        stems = "".join(f"M{x} {SIZE - up.at(0.0)}V{y}" for x, y in at if y != SIZE - up.at(0.0))
        thin = " thin" if len(at) > FEW else ""
        yield Markup('<path class="stems{} {}" d="{}"/>').format(thin, stroke.style, stems)
        return
    if stroke.low is not None and stroke.high is not None:
        yield _spread(stroke, across, up)
    if stroke.kind == "line":
        yield Markup('<path class="{}" d="{}"/>').format(stroke.style, _path(at))
    if stroke.kind == "points" or len(at) <= FEW:
        dots = "".join(f"M{x} {y}h0" for x, y in at)
        yield Markup('<path class="dots {}" d="{}"/>').format(stroke.style, dots)


def _positions(xs: Sequence[Number], ys: Sequence[Number], across: Axis, up: Axis) -> list[tuple[int, int]]:
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return [(across.at(x), SIZE - up.at(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def _path(at: Sequence[tuple[int, int]]) -> str:
    """A line through the points, each relative to the one before: shorter than absolute ones."""
    if not at:
        return ""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(at)]
    return f"M{at[0][0]} {at[0][1]}" + ("l" if steps else "h0") + " ".join(f"{dx} {dy}" for dx, dy in steps)


def _spread(stroke: Stroke, across: Axis, up: Axis) -> Markup:
    """The band between low and high of a line; a bar at each of single points."""
    low = _positions(stroke.x, stroke.low or (), across, up)
    high = _positions(stroke.x, stroke.high or (), across, up)
    if stroke.kind == "points":
        bars = "".join(f"M{x} {y}V{top}" for (x, y), (_, top) in zip(low, high, strict=False))
        return Markup('<path class="bars {}" d="{}"/>').format(stroke.style, bars)
    return Markup('<path class="spread {}" d="{}Z"/>').format(stroke.style, _path([*high, *reversed(low)]))
