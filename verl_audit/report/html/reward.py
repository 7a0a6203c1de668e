"""The reward of the run beside its baselines on three clocks, and its learning speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_audit.report.head_block import STATES, Document, between, limits, ranged, ratio, without_steps
from verl_audit.report.html.chart import Band, Chart, Number, Stroke
from verl_audit.report.html.figure import Figure, figure
from verl_audit.report.html.svg import interval
from verl_audit.report.page import clean, number

CLOCKS: Mapping[str, tuple[str, str]] = {
    "update": ("Per update", "optimizer updates"),
    "sample": ("Per sample", "trained samples"),
    "hour": ("Per hour", "hours"),
}
MARGIN = 0.8
"""Learning speed below which a run is called slower (docs/verdict.md), marked beside 1."""


def reward(document: Document) -> dict[str, Any] | None:
    """Curves per clock, the evidence used first; None where no reward was logged or the run died before a step."""
    quantities = (document.get("series") or {}).get("reward") or []
    if without_steps(document["run"]):
        return None
    symptom = document["symptom"]
    used = clean(symptom["evidence"] or "")
    because = clean(symptom["because"])
    ordered = sorted(quantities, key=lambda q: (q["quantity"] != used, q["quantity"] == "trained_reward"))
    return {
        "state": STATES.get(symptom["state"], clean(symptom["state"])),
        "because": "" if because in clean(document["verdict"]["sentence"]) else because,
        "limits": list(limits(symptom)),
        "caveats": [clean(c) for c in symptom.get("caveats") or ()],
        "speeds": list(_speeds(symptom["speed"])),
        "interval": next((s["interval"] for s in symptom["speed"].values() if s), ""),
        "clocks": [
            (clock, name, [f for q in ordered if (f := _figure(q, clock, document)) is not None])
            for clock, (name, _) in CLOCKS.items()
        ],
    }


def _speeds(speeds: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = [s for s in speeds.values() if s]
    end = max([1.5, *(_finite(s["high"], 3.0) for s in known)])
    for name, s in speeds.items() if known else ():
        words = clean(name).replace("_", " ")
        if s is None:
            yield {"clock": words, "text": "not known", "drawn": ""}
            continue
        low, value, high = (min(_finite(s[k], end), end) for k in ("low", "value", "high"))
        text = ranged(ratio(s["value"]), ratio(s["low"]), ratio(s["high"]))
        yield {"clock": words, "text": text, "drawn": interval(low, value, high, end, (MARGIN, 1.0))}


def _finite(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _figure(quantity: Mapping[str, Any], clock: str, document: Document) -> Figure | None:
    lines = [line for line in quantity["lines"] if line[clock] is not None]
    if not lines or not any(line["run"] == document["run"]["name"] for line in lines):
        return None
    scale, unit = scaled_clock(clock, lines)
    strokes = tuple(_stroke(line, clock, scale, document) for line in lines)
    name = CLOCKS[clock][0].lower()
    used = quantity["quantity"] == document["symptom"]["evidence"]
    title = f"{clean(quantity['title'])} {name}"
    others = [clean(line["run"]) for line in lines[1:]]
    beside = f" beside {', '.join(others)}" if others else ""
    chart = Chart(
        id=f"fig-{clean(quantity['quantity']).replace('_', '-')}-{clock}",
        title=title,
        says=f"{title} of {clean(document['run']['name'])}{beside}. {_ends(strokes)}",
        x=unit,
        y=clean(quantity["unit"]),
        strokes=strokes,
        bands=tuple(_bands(document, clock, scale)) if used else (),
        tall=True,
        note=_note(quantity["quantity"], document),
        whole=whole(f"select step, {'validation' if quantity['quantity'] == 'validation' else _TRAINED} from steps"),
    )
    return figure(chart)


_TRAINED = "coalesce(score_trained, reward_trained) as reward"


def whole(query: str) -> str:
    """The command that prints a query's rows."""
    return f"verl-audit sql RUN_DIR '{query} order by step'"


def _stroke(line: Mapping[str, Any], clock: str, scale: float, document: Document) -> Stroke:
    place = _place(line["run"], document)
    style = "run" if place == 0 else f"base{min(place, 4)}"
    x: list[Number] = [v * scale if isinstance(v, int | float) else None for v in line[clock]]
    name = clean(line["run"]) + ("" if place == 0 else " (baseline)")
    return Stroke(name, style, x, numbers(line["value"]), _side(line["low"]), _side(line["high"]))


def _place(run: str, document: Document) -> int:
    """0 for the audited run, then the baselines in the order in which they are drawn."""
    drawn = [line["run"] for quantity in document["series"]["reward"] for line in quantity["lines"]]
    return list(dict.fromkeys([document["run"]["name"], *drawn])).index(run)


def numbers(values: Sequence[Any]) -> list[Number]:
    """Values with None for what is no finite number."""
    return [v if isinstance(v, int | float) else None for v in values]


def _side(values: Sequence[Any] | None) -> list[Number] | None:
    return None if values is None else numbers(values)


def scaled_clock(clock: str, lines: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Factor and name of a clock's unit: minutes or seconds where no run took two hours or minutes."""
    if clock != "hour":
        return 1.0, CLOCKS[clock][1]
    longest = max((v for line in lines for v in line[clock] if isinstance(v, int | float)), default=0.0)
    return (1.0, "hours") if longest >= 2 else (60.0, "minutes") if longest >= 2 / 60 else (3600.0, "seconds")


def _bands(document: Document, clock: str, scale: float) -> Iterator[Band]:
    series = document["series"]
    window, onset = ((series[name] or {}).get(clock) for name in ("window", "onset"))
    if window:
        yield Band("range in which speed was compared", window["low"] * scale, window["high"] * scale, bracket=True)
    if onset:
        low, high = onset["low"] * scale, onset["high"] * scale
        yield Band(f"began to fall behind {between('', low, high)}", low, high)


def _ends(strokes: Sequence[Stroke]) -> str:
    """First and last value of each line in words."""
    told = []
    for stroke in strokes:
        known = [y for y in stroke.y if y is not None]
        if known:
            told.append(f"{stroke.name}: from {number(known[0])} to {number(known[-1])}")
    return "; ".join(told) + "." if told else ""


def _note(quantity: str, document: Document) -> str:
    """What keeps a curve from being read as performance."""
    admissible = (document["measures"].get("reward_admissible") or {}).get("value")
    if quantity == "trained_reward" and admissible is False:
        return "Averages over what was kept after eviction: not to be read as performance."
    return ""
