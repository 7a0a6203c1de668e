"""The `series` of an audit document: what its figures draw, with titles, units and rounded points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_audit.ingest.adapters import load_signals
from verl_audit.measure.series import DIGITS, MAX_POINTS, Drawn, Line, Quantity
from verl_audit.measure.stats import Array

TITLES: Mapping[str, str] = {"validation": "Validation", "trained_reward": "Trained reward"}


def series_tree(drawn: Drawn) -> dict[str, Any]:
    """Plain JSON types; every line has at most `MAX_POINTS` points of `DIGITS` digits."""
    return {
        "most_points": MAX_POINTS,
        "window": _ranges(drawn.window),
        "onset": _ranges(drawn.onset),
        "began": dict(drawn.began),
        "reward": [_reward(q) for q in drawn.reward],
        "signals": [_signal(q) for q in drawn.signals],
    }


def _ranges(on: Mapping[str, tuple[float, float] | None]) -> dict[str, Any] | None:
    if not on:
        return None
    return {clock: None if at is None else {"low": rounded(at[0]), "high": rounded(at[1])} for clock, at in on.items()}


def lines_tree(quantity: Quantity) -> list[dict[str, Any]]:
    """The lines of a quantity on every clock."""
    return [_line(line) | _clocks(line) for line in quantity.lines]


def title_and_unit(signal: str) -> tuple[str, str]:
    """What a signal is called and measured in."""
    meant = load_signals()[signal]
    return meant.title, meant.unit


def _reward(quantity: Quantity) -> dict[str, Any]:
    title = TITLES[quantity.name]
    return {"quantity": quantity.name, "title": title, "unit": "score", "lines": lines_tree(quantity)}


def _signal(quantity: Quantity) -> dict[str, Any]:
    title, unit = title_and_unit(quantity.name)
    return {"signal": quantity.name, "title": title, "unit": unit, "lines": [_line(line) for line in quantity.lines]}


def _line(line: Line) -> dict[str, Any]:
    return {
        "run": line.run,
        "points": line.points,
        "step": _numbers(line.step),
        "value": _numbers(line.value),
        "low": _numbers(line.low),
        "high": _numbers(line.high),
    }


def _clocks(line: Line) -> dict[str, Any]:
    return {clock: _numbers(at) for clock, at in (line.clocks or {}).items()}


def _numbers(values: Array | None) -> list[float] | None:
    return None if values is None else [rounded(v) for v in values.tolist()]


def rounded(value: float) -> float:
    """With `DIGITS` significant digits, whole numbers in full."""
    return value if not np.isfinite(value) or value == round(value) else float(f"{value:.{DIGITS}g}")
