"""Figures: round ticks, positions inside the plot, well-formed whatever the values."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.report.html.axes import SIZE, axis
from verl_audit.report.html.chart import Band, Chart, Stroke
from verl_audit.report.html.figure import MAX_ROWS, figure
from verl_audit.report.html.flow import flow
from verl_audit.report.html.svg import draw, interval

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.0, 60.0), ("0", "20", "40", "60")),
        ((1.0, 2000.0), ("500", "1,000", "1,500", "2,000")),
        ((0.21, 0.78), ("0.4", "0.6")),
        ((0.0, 0.03), ("0.00", "0.01", "0.02", "0.03")),
        ((-1.0, 1.0), ("-1.0", "-0.5", "0.0", "0.5", "1.0")),
        ((0.0, 3e-5), ("0", "1e-05", "2e-05", "3e-05")),
        ((5.0, 5.0), ("4.50", "4.75", "5.00", "5.25", "5.50")),
    ],
)
def test_ticks(values: tuple[float, float], labels: tuple[str, ...]) -> None:
    assert axis(values, ticks=4).labels == labels


@given(st.lists(NUMBERS, max_size=30), st.booleans(), st.booleans())
def test_an_axis_holds_its_values(values: list[float], widen: bool, zero: bool) -> None:
    found = axis(values, widen=widen, zero=zero)
    assert found.low < found.high and len(found.ticks) == len(found.labels) <= 12
    for value in values:
        if math.isfinite(value) and found.high - found.low < math.inf:
            assert -1 <= found.at(value) <= SIZE + 1
    if zero and found.high - found.low < math.inf:
        assert found.low <= 0 or not [v for v in values if math.isfinite(v)]


SERIES = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=60)


@given(SERIES, st.sampled_from(["line", "stems", "points"]), st.booleans())
def test_a_figure_is_well_formed(points: list[tuple[float, ...]], kind: str, spread: bool) -> None:
    x, y, low, high = ([p[i] for p in points] for i in range(4))
    stroke = Stroke("<a & b>", "run", x, y, low if spread else None, high if spread else None, kind)  # type: ignore[arg-type]
    chart = Chart("fig", "<t>", "says", "step", "unit", (stroke,), (Band("b", 0, 1),))
    drawn = str(draw(chart))
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn and "inf" not in drawn
    assert len(figure(chart).rows) <= MAX_ROWS


def test_the_line_goes_where_the_points_are() -> None:
    chart = Chart("f", "t", "s", "step", "u", (Stroke("a", "run", [0, 5, 10], [0.0, 1.0, 0.5]),))
    (path,) = re.findall(r'class="run" d="([^"]*)"', str(draw(chart)))
    assert path == "M0 1000l500 -1000 500 500"


def test_missing_points_are_left_out_of_line_and_table() -> None:
    made = figure(Chart("f", "t", "s", "step", "u", (Stroke("a", "run", [0, None, 2], [1.0, 2.0, None]),)))
    assert made.rows == (("0", "1"),)


def test_the_table_merges_lines_by_x() -> None:
    strokes = (Stroke("a", "run", [1, 2], [0.5, 0.6]), Stroke("b", "base1", [2, 3], [0.7, 0.8], [0.1, 0.2], [0.9, 1.0]))
    made = figure(Chart("f", "t", "s", "step", "u", strokes))
    assert made.head == ("step", "a", "b")
    assert made.rows == (("1", "0.5", ""), ("2", "0.6", "0.7 (0.1 to 0.9)"), ("3", "", "0.8 (0.2 to 1)"))


def test_an_interval_is_drawn_to_scale() -> None:
    drawn = str(interval(0.1, 0.2, 0.5, 1.0, marks=(0.8,)))
    assert 'd="M100 500H500"' in drawn and 'd="M200 500h0"' in drawn and 'd="M800 0V1000"' in drawn


FATES = st.lists(st.tuples(st.sampled_from(["trained", "stale", "filtered", "failed"]), st.floats(1, 1e12)), min_size=1,
                 max_size=4, unique_by=lambda f: f[0])  # fmt: skip


@given(FATES, st.none() | st.floats(0, 1e13))
def test_a_flow_adds_up_and_its_labels_do_not_overlap(fates: list[tuple[str, float]], whole: float | None) -> None:
    made = flow("groups", fates, whole, "generated")
    assert sum(s.share for s in made.shares) == pytest.approx(1)
    places = [float(y) for y in re.findall(r'class="fate" x="[^"]*" y="([\d.]+)%"', str(made.svg))]
    assert len(places) == len(made.shares)
    assert all(b - a >= 8 for a, b in pairwise(places))
    assert places[0] >= 0 and places[-1] <= 97
    ElementTree.fromstring(str(made.svg))
