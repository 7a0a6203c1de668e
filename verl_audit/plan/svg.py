"""The figures of a plan as static SVG: no script, no font and no address from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from verl_audit.plan.figures import Heatmap, Lane

FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
STOPS = ((255, 255, 229), (199, 233, 180), (127, 205, 187), (65, 182, 196), (34, 94, 168), (8, 29, 88))
"""Light to dark blue (ColorBrewer YlGnBu): dark is better; told apart without colour as well."""
COLOURS = {"update": "#225ea8", "wait": "#e5e5e5", "sync": "#d95f0e", "rollout": "#41b6c4"}
SIDE = 620
"""Pixels of a heatmap's longer side, about."""
MAX_LABELLED = 20
"""Rows and columns up to which each cell shows its number."""


def heatmap_svg(figure: Heatmap) -> str:
    """A heatmap with its scale; small ones have a number in each cell."""
    columns, rows = len(figure.train), len(figure.rollout)
    cell = max(3.0, min(34.0, SIDE / max(columns, rows)))
    left, top = 64, 62
    width, height = max(left + cell * columns + 30, 560), top + cell * rows + 92
    body = [
        _text(left, 22, figure.title, size=15, weight="bold"),
        _text(left, 42, figure.note, size=11, fill="#555"),
        *_cells(figure, left, top, cell),
        *_axes(figure, left, top, cell),
        *_scale(figure, left, top + cell * rows + 58),
    ]
    return _document(width, height, body, figure.title)


def timeline_svg(lanes: Sequence[Lane]) -> str:
    """Trainer blocks above the busy share of rollout slots, for each choice on the same time axis."""
    left, width, lane = 70.0, 780.0, 116.0
    span = max(item.span for item in lanes)
    body = [_text(left, 22, "What both pools do, simulated", size=15, weight="bold"), *_legend(left, 34)]
    for i, item in enumerate(lanes):
        body += _lane(item, left, 66 + i * lane, (width - left - 20) / span)
    bottom = 66 + len(lanes) * lane
    body += _time_axis(left, bottom, width - left - 20, span)
    return _document(width, bottom + 44, body, "What both pools do, simulated")


def _document(width: float, height: float, body: Sequence[str], title: str) -> str:
    lines = (
        "<!-- verl-audit plan -->",
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' aria-label='{escape(title, quote=True)}' {FONT}>",
        "<rect width='100%' height='100%' fill='white'/>",
        *body,
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def _text(
    x: float, y: float, text: str, *, size: int = 10, anchor: str = "start", fill: str = "#222", weight: str = "normal"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{fill}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, extra: str = "") -> str:
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}'{extra}/>"


def shade(figure: Heatmap) -> tuple[float, float]:
    """Logarithms of the values shown lightest and darkest; all beyond four times the best one are lightest."""
    best = np.nanmin(figure.values) if figure.better == "low" else np.nanmax(figure.values)
    worst = (
        min(4 * best, np.nanmax(figure.values)) if figure.better == "low" else max(best / 4, np.nanmin(figure.values))
    )
    return math.log(worst), math.log(best)


def colour(value: float, scale: tuple[float, float]) -> tuple[str, bool]:
    """Colour of a value, and whether it is dark."""
    light, dark = scale
    share = 1.0 if light == dark else min(max((math.log(value) - light) / (dark - light), 0.0), 1.0)
    at = share * (len(STOPS) - 1)
    low = min(int(at), len(STOPS) - 2)
    mixed = [round(a + (b - a) * (at - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True)]
    return "#" + "".join(f"{c:02x}" for c in mixed), share > 0.6


def _cells(figure: Heatmap, left: float, top: float, cell: float) -> Iterator[str]:
    scale = shade(figure)
    rows = len(figure.rollout)
    labelled = max(rows, len(figure.train)) <= MAX_LABELLED
    mark = ""
    for i, rollout in enumerate(figure.rollout):
        for j, train in enumerate(figure.train):
            value = float(figure.values[i, j])
            if math.isnan(value):
                continue
            x, y = left + j * cell, top + (rows - 1 - i) * cell
            fill, dark = colour(value, scale)
            edge = " stroke='white' stroke-width='.5'" if labelled else " shape-rendering='crispEdges'"
            yield _rect(x, y, cell, cell, fill, edge)
            if labelled:
                shown = f"{value:.2f}" if value < 9.995 else f"{value:.0f}"
                yield _text(x + cell / 2, y + cell / 2 + 4, shown, anchor="middle", fill="white" if dark else "#222")
            if (train, rollout) == figure.chosen:
                mark = _rect(x, y, cell, cell, "none", " stroke='#d95f0e' stroke-width='3'")
    yield mark


def _axes(figure: Heatmap, left: float, top: float, cell: float) -> Iterator[str]:
    rows, columns = len(figure.rollout), len(figure.train)
    bottom = top + rows * cell
    every = max(1, math.ceil(30 / cell))
    for j in range(every - 1 if every > 1 else 0, columns, every):
        yield _text(left + (j + 0.5) * cell, bottom + 14, str(figure.train[j]), anchor="middle")
    for i in range(every - 1 if every > 1 else 0, rows, every):
        yield _text(left - 6, bottom - (i + 0.5) * cell + 4, str(figure.rollout[i]), anchor="end")
    yield _text(left + columns * cell / 2, bottom + 32, "training cards", size=12, anchor="middle")
    x, y = left - 40, top + rows * cell / 2
    yield (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='12' text-anchor='middle' fill='#222' "
        f"transform='rotate(-90 {x:.1f} {y:.1f})'>rollout cards</text>"
    )


def _scale(figure: Heatmap, left: float, y: float) -> Iterator[str]:
    light, dark = shade(figure)
    for n in range(60):
        value = math.exp(light + (dark - light) * n / 59)
        yield _rect(left + n * 3, y, 3.5, 10, colour(value, (light, dark))[0])
    sign = "over " if figure.better == "low" else "below "
    yield _text(left, y + 24, f"{sign}{math.exp(light):.2f}")
    yield _text(left + 180, y + 24, f"{math.exp(dark):.2f} best", anchor="end")
    yield _rect(left + 226, y - 1, 12, 12, "none", " stroke='#d95f0e' stroke-width='3'")
    yield _text(left + 246, y + 9, f"first choice, {figure.chosen[0]}:{figure.chosen[1]} training:rollout", size=11)


def _legend(left: float, y: float) -> Iterator[str]:
    words = (
        ("update", "update"),
        ("wait", "waits for samples"),
        ("sync", "weight sync"),
        ("rollout", "rollout slots busy"),
    )
    x = left
    for kind, word in words:
        yield _rect(x, y, 12, 12, COLOURS[kind], " stroke='#999' stroke-width='.5'")
        yield _text(x + 17, y + 10, word, size=11)
        x += 40 + 6.2 * len(word)


def _lane(lane: Lane, left: float, top: float, scale: float) -> Iterator[str]:
    yield _text(left, top + 12, lane.title, size=11, weight="bold")
    yield _text(left - 8, top + 35, "trainer", anchor="end")
    yield _text(left - 8, top + 72, "rollouts", anchor="end")
    for block in lane.blocks:
        yield _rect(
            left + block.start * scale, top + 20, max((block.end - block.start) * scale, 0.3), 22, COLOURS[block.kind]
        )
    base, high = top + 96, 46
    points = [f"{left + t * scale:.1f},{base - share * high:.1f}" for t, share in lane.busy]
    first, last = points[0].partition(",")[0], points[-1].partition(",")[0]
    yield f"<polygon points='{first},{base:.1f} {' '.join(points)} {last},{base:.1f}' fill='{COLOURS['rollout']}'/>"
    yield _rect(left, base - high, lane.span * scale, high, "none", " stroke='#bbb' stroke-width='.5'")


def _time_axis(left: float, y: float, width: float, span: float) -> Iterator[str]:
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 8)
    n = 0
    while n * step <= span:
        x = left + n * step / span * width
        yield f"<line x1='{x:.1f}' y1='{y - 4:.1f}' x2='{x:.1f}' y2='{y + 2:.1f}' stroke='#555'/>"
        yield _text(x, y + 14, f"{n * step:g}", anchor="middle")
        n += 1
    yield _text(left + width / 2, y + 34, "time, in updates of the reference run", size=12, anchor="middle")
