"""Zoom and hover: figures as JSON for plotly.js, whose basic bundle is embedded once, without any address in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from verl_audit.report.html.chart import Chart, Number, Stroke
from verl_audit.report.html.flow import Flow

PLOTLY = "vendor/plotly-basic.min.js"
_ADDRESS = re.compile(r"https?://(?!www\.w3\.org/)[^\s\"'`)\\]*")
"""Addresses in the bundle other than XML namespaces: of its makers, its map tiles and its cloud."""
LOOKS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "solid"),
    "base1": ("base", "dash"),
    "base2": ("base", "dot"),
    "base3": ("base", "dashdot"),
    "base4": ("base", "longdash"),
    "line2": ("line2", "dash"),
    "line3": ("line3", "dot"),
    "line4": ("line4", "dashdot"),
    "line5": ("base", "longdash"),
    "line6": ("ink", "solid"),
}
"""Per style of the style sheet the variable of its colour, which `explore.js` looks up, and its dash."""


def scripts() -> tuple[str, str]:
    """plotly.js and the few lines that draw a figure when its fold is opened."""
    folder = files("verl_audit.report.html")
    plotly, own = (folder.joinpath(name).read_text(encoding="utf-8") for name in (PLOTLY, "explore.js"))
    return _ADDRESS.sub("", plotly), own


def plot_json(chart: Chart) -> Markup:
    """A chart as `{data, layout}` of plotly.js."""
    layout = {
        "xaxis": {"title": {"text": chart.x}},
        "yaxis": {"title": {"text": chart.y}, **({"rangemode": "tozero"} if chart.zero else {})},
        "shapes": [
            {"type": "rect", "xref": "x", "yref": "paper", "x0": b.low, "x1": b.high, "y0": 0, "y1": 1, "opacity": 0.15,
             "line": {"width": 0}, "fillcolor": "gray"}
            for b in chart.bands if not b.bracket
        ],
    }  # fmt: skip
    return _embedded({"data": [t for s in chart.strokes for t in _traces(s)], "layout": layout})


def flow_json(flow: Flow) -> Markup:
    """A flow as bars: the bundle has no flows."""
    names, amounts = [s.name for s in flow.shares], [s.amount for s in flow.shares]
    bars = {"type": "bar", "orientation": "h", "y": names, "x": amounts, "name": flow.unit, "meta": "run"}
    layout = {"xaxis": {"title": {"text": flow.unit}}, "yaxis": {"autorange": "reversed"}}
    return _embedded({"data": [bars], "layout": layout})


def _traces(stroke: Stroke) -> Iterator[dict[str, Any]]:
    colour, dash = LOOKS.get(stroke.style, LOOKS["run"])
    if stroke.kind == "stems":
        yield {"type": "bar", "name": stroke.name, "meta": colour, "x": list(stroke.x), "y": list(stroke.y)}
        return
    made: dict[str, Any] = {
        "type": "scatter",
        "name": stroke.name,
        "mode": "markers" if stroke.kind == "points" else "lines",
        "x": list(stroke.x),
        "y": list(stroke.y),
        "meta": colour,
        "line": {"dash": dash},
    }
    if stroke.low is not None and stroke.high is not None:
        up, down = _apart(stroke.high, stroke.y), _apart(stroke.y, stroke.low)
        made["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1}
    yield made


def _apart(upper: Sequence[Number], lower: Sequence[Number]) -> list[Number]:
    return [None if a is None or b is None else a - b for a, b in zip(upper, lower, strict=True)]


def _embedded(value: object) -> Markup:
    """JSON that no text of a run can end early: `<`, `>` and `&` are escaped."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
