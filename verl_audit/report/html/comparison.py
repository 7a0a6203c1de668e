"""The page of a comparison: speed, calibration table, configuration, curves, where runs part, measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from verl_audit.report.compare_view import CLOCKS, describe, reward_note, stretch, sweep_table
from verl_audit.report.head_block import ranged, ratio
from verl_audit.report.html.chart import Chart, Stroke
from verl_audit.report.html.figure import Figure, figure
from verl_audit.report.html.page import Section, assemble
from verl_audit.report.html.reward import CLOCKS as CLOCK_NAMES
from verl_audit.report.html.reward import MARGIN, numbers, scaled_clock
from verl_audit.report.html.svg import interval
from verl_audit.report.html.words import Status, verdict_status
from verl_audit.report.page import clean, count, number

Comparison = Mapping[str, Any]
STYLES = ("base1", "run", "line2", "line3", "line4", "line5", "line6", "base2")
"""The reference is drawn as baselines are."""
SPEEDS: Mapping[str, str] = {"per_update": "per update", "per_sample": "per sample", "per_hour": "per hour"}
STATE_STATUS: Mapping[str, Status] = {
    "slower": Status("▼", "slower", "bad"),
    "not_shown": Status("✓", "no slowdown shown", "good"),
    "unclear": Status("?", "not clear", "warn"),
    "untested": Status("?", "not testable", "open"),
}
CHANGES: Mapping[str, Status] = {
    "faster": Status("▲", "recovered", "good"),
    "slower": Status("▼", "fell", "bad"),
    "unclear": Status("?", "not clear", "warn"),
    "untested": Status("?", "not testable", "open"),
}
MOST_KEYS = 3


def render_comparison(tree: Comparison, *, interactive: bool = False) -> str:
    """The comparison as one HTML file; the same bytes for the same tree."""
    names = [clean(run["name"]) for run in tree["runs"]]
    sections = [
        Section("speed", "", "compare_head.html", head(tree)),
        Section("curves", "Reward", "compare_curves.html", curves(tree)),
        Section("sweep", "Side by side", "compare_sweep.html", sweep(tree)),
        Section("parting", "Where they part first", "compare_parting.html", parting(tree)),
        Section("configuration", "Configuration", "compare_config.html", configuration(tree)),
        Section("signals", "Signals", "figures.html", signals(tree)),
        Section("measures", "Measures", "compare_measures.html", measures(tree)),
        Section("verdicts", "Verdicts", "compare_verdicts.html", verdicts(tree)),
    ]
    title = f"{' · '.join(names)} · verl-audit compare"
    version = clean(tree["tool"]["version"])
    return assemble(sections, title, version, kind="verl-audit comparison", interactive=interactive)


def head(tree: Comparison) -> dict[str, Any]:
    """Learning speed of each run against the first, and what changing one key did."""
    known = [s[name] for s in tree["speed"] if s for name in SPEEDS if s[name]]
    end = min(max([1.5, *(float(s["high"]) for s in known if isinstance(s["high"], int | float))]), 5.0)
    return {
        "title": _title(tree),
        "reference": clean(tree["runs"][0]["name"]),
        "speeds": [_speed(run, speed, end) for run, speed in zip(tree["runs"], tree["speed"], strict=True)],
        "heads": list(SPEEDS.values()),
        "changes": [
            (
                CHANGES.get(c["outcome"], CHANGES["untested"]),
                clean(c["before"]),
                clean(c["after"]),
                clean(c["sentence"]),
            )
            for c in tree["interventions"]
        ],
        "keys": len(tree["configuration"]["differs"]),
        "source": tree["configuration"]["source"],
    }


def _title(tree: Comparison) -> str:
    states = [s["state"] for s in tree["speed"] if s]
    slower = states.count("slower")
    reference = clean(tree["runs"][0]["name"])
    if slower:
        return f"{slower} of {count(len(states), 'run')} learned slower than {reference}"
    if states.count("not_shown") == len(states):
        return f"No slowdown against {reference} is shown"
    return f"No run is shown to be slower than {reference}; {len(states) - states.count('not_shown')} could not be told"


def _speed(run: Mapping[str, Any], speed: Mapping[str, Any] | None, end: float) -> dict[str, Any]:
    cells: list[tuple[str, Any]] = []
    for name in SPEEDS if speed else ():
        found = speed[name] if speed else None
        if not found:
            cells.append(("not known", ""))
            continue
        text = ranged(ratio(found["value"]), ratio(found["low"]), ratio(found["high"]))
        low, value, high = (min(v, end) if isinstance(v, int | float) else end for v in _ends(found))
        cells.append((text, interval(low, value, high, end, (MARGIN, 1.0))))
    return {
        "run": clean(run["name"]),
        "about": describe(run),
        "status": STATE_STATUS.get(speed["state"], STATE_STATUS["untested"]) if speed else None,
        "because": clean(speed["because"]) if speed and not any(speed[n] for n in SPEEDS) else "",
        "caveats": [clean(c) for c in speed["caveats"]] if speed else [],
        "cells": cells,
    }


def _ends(speed: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return speed["low"], speed["value"], speed["high"]


def curves(tree: Comparison) -> dict[str, Any] | None:
    """Reward of all runs on each clock."""
    made = [
        (
            clock,
            CLOCK_NAMES[clock][0],
            [f for q in tree["series"]["reward"] if (f := _curve(q, clock, tree)) is not None],
        )
        for clock in CLOCK_NAMES
    ]
    return {"clocks": made} if any(figures for _, _, figures in made) else None


def _curve(quantity: Mapping[str, Any], clock: str, tree: Comparison) -> Figure | None:
    lines = [line for line in quantity["lines"] if line[clock] is not None]
    if not lines:
        return None
    scale, unit = scaled_clock(clock, lines)
    title = f"{clean(quantity['title'])} {CLOCK_NAMES[clock][0].lower()}"
    name = clean(quantity["quantity"]).replace("_", "-")
    chart = Chart(
        id=f"fig-{name}-{clock}",
        title=title,
        says=f"{title} of {', '.join(clean(line['run']) for line in lines)}.",
        x=unit,
        y=clean(quantity["unit"]),
        strokes=tuple(_stroke(line, clock, scale, tree) for line in lines),
        tall=True,
    )
    return figure(chart)


def _stroke(line: Mapping[str, Any], clock: str, scale: float, tree: Comparison) -> Stroke:
    names = [run["name"] for run in tree["runs"]]
    style = STYLES[names.index(line["run"]) % len(STYLES)]
    x = [None if v is None else v * scale for v in numbers(line[clock])]
    return Stroke(clean(line["run"]), style, x, numbers(line["value"]))


def signals(tree: Comparison) -> dict[str, Any] | None:
    """The other quantities of all runs over steps."""
    figures = [_signal(q, tree) for q in tree["series"]["signals"]]
    return {"figures": figures} if figures else None


def _signal(quantity: Mapping[str, Any], tree: Comparison) -> Figure:
    title, unit = clean(quantity["title"]), clean(quantity["unit"])
    chart = Chart(
        id=f"fig-{clean(quantity['quantity']).replace('_', '-')}",
        title=title,
        says=f"{title} of {', '.join(clean(line['run']) for line in quantity['lines'])} over steps, in {unit}.",
        x="step",
        y=unit,
        strokes=tuple(_stroke(line, "step", 1.0, tree) for line in quantity["lines"]),
        zero=quantity["quantity"] not in ("ess", "entropy"),
    )
    return figure(chart)


def sweep(tree: Comparison) -> dict[str, Any]:
    """The calibration table."""
    columns, rows = sweep_table(tree, MOST_KEYS)
    return {
        "head": columns,
        "rows": rows,
        "note": reward_note(tree),
        "left": max(len(tree["sweep"]["keys"]) - MOST_KEYS, 0),
    }


def parting(tree: Comparison) -> dict[str, Any] | None:
    """For each run the quantities that part, earliest first, and by name those that do not."""
    runs = [_parted(run["name"], tree) for run in tree["runs"][1:]]
    if not tree["divergence"]:
        return None
    return {"runs": runs, "clocks": list(CLOCKS.values()), "reference": clean(tree["runs"][0]["name"])}


def _parted(run: str, tree: Comparison) -> dict[str, Any]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for d in tree["divergence"]:
        if d["run"] == run:
            found.setdefault(clean(d["title"]), {})[d["clock"]] = d
    apart = {title: by for title, by in found.items() if any(d["low"] is not None for d in by.values())}
    few = [t for t, by in found.items() if t not in apart and any("common points" in d["because"] for d in by.values())]
    return {
        "run": clean(run),
        "rows": [(t, [_stretch(apart[t].get(clock)) for clock in CLOCKS]) for t in sorted(apart, key=_earliest(apart))],
        "together": [t for t in found if t not in apart and t not in few],
        "few": few,
    }


def _earliest(apart: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Callable[[str], float]:
    def begin(title: str) -> float:
        low = apart[title].get("update", {}).get("low")
        return math.inf if low is None else float(low)

    return begin


def _stretch(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "clock not known"
    if found["low"] is None:
        return "–"
    return f"{stretch(found)}, {found['direction']} by {number(abs(found['difference']))}"


def configuration(tree: Comparison) -> dict[str, Any]:
    """Keys that differ, those that are not counted, and how many are the same."""
    found = tree["configuration"]
    return {
        "names": [clean(run["name"]) for run in tree["runs"]],
        "differs": [_values(entry) for entry in found["differs"]],
        "incidental": [_values(entry) for entry in found["incidental"]],
        "same": found["same"],
        "facts": found["source"] == "facts",
        "unknown": [clean(name) for name in found["unknown"]],
    }


def _values(entry: Mapping[str, Any]) -> list[str]:
    return [clean(entry["key"]), *("not set" if v is None else clean(v) for v in entry["values"])]


def measures(tree: Comparison) -> dict[str, Any]:
    """Every measure of every run, with its interval."""
    rows = [[clean(m["measure"]), clean(m["unit"]), *(_measured(v) for v in m["values"])] for m in tree["measures"]]
    return {"names": [clean(run["name"]) for run in tree["runs"]], "rows": rows}


def _measured(value: Mapping[str, Any]) -> str:
    if value["low"] is None or value["high"] is None or value["value"] is None:
        return number(value["value"])
    return ranged(number(value["value"]), number(value["low"]), number(value["high"]))


def verdicts(tree: Comparison) -> dict[str, Any]:
    """The verdict on each run, judged against the first."""
    rows = [
        (clean(run["name"]), verdict_status(run["outcome"]), clean(run["sentence"]), clean(run["confidence"]))
        for run in tree["runs"]
    ]
    return {
        "rows": rows,
        "command": " ".join(clean(w) for w in tree["tool"]["command"]),
        "problems": len(tree["problems"]),
    }
