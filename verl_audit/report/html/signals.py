"""Figures of signals over steps: for each cause the one that shows its mechanism, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_audit.measure.eviction import REASONS
from verl_audit.measure.gap import GAPS
from verl_audit.report.head_block import Document
from verl_audit.report.html.chart import Chart, Stroke
from verl_audit.report.html.figure import Figure, figure
from verl_audit.report.html.reward import numbers, whole
from verl_audit.report.page import clean, number


@dataclass(frozen=True)
class Shown:
    """A figure to make from the signals that a run has: of `signals` all, or with `first` only the first there is."""

    id: str
    title: str
    unit: str
    signals: tuple[str, ...]
    first: bool = False
    stems: bool = False


OF_CAUSES: Mapping[str, tuple[Shown, ...]] = {
    "mismatch": (Shown("gap", "Gap between rollout engine and trainer", "", GAPS, first=True),),
    "staleness": (
        Shown(
            "lag", "Lag of the trained samples", "versions", ("lag_newest_mean", "lag_oldest_mean", "lag_oldest_max")
        ),
        Shown("lag", "Lag of the trained samples", "versions", ("lag_mean",)),
    ),
    "eviction": (Shown("evicted", "Evicted groups", "groups", REASONS, stems=True),),
    "sync": (Shown("sync", "Time of a weight sync", "seconds", ("time_update_weights",)),),
}
TIMES = (
    Shown(
        "time",
        "Time of a step",
        "seconds",
        ("time_step", "wait_seconds", "time_gen", "time_update_actor", "time_old_log_prob", "time_update_weights"),
    ),
    Shown("idle", "Idle time", "share of time", ("trainer_idle_share", "rollout_idle_share")),
)
OTHERS = (
    Shown("ess", "Effective sample size", "share", ("ess",)),
    Shown("response", "Trained response length", "tokens", ("response_length_mean",)),
    Shown("prompt", "Trained prompt length", "tokens", ("prompt_length_mean",)),
    Shown("entropy", "Entropy", "nats per token", ("entropy",)),
    Shown("gradient", "Gradient norm", "norm", ("grad_norm",)),
)
NAMES: Mapping[str, str] = {
    "lag_newest_mean": "newest token, mean",
    "lag_oldest_mean": "oldest token, mean",
    "lag_oldest_max": "oldest token, largest",
    "lag_mean": "mean",
    "stale_groups": "stale",
    "filtered_groups": "filtered",
    "failed_groups": "failed",
    "surplus_groups": "surplus",
    "time_step": "whole step",
    "wait_seconds": "waiting for samples",
    "time_gen": "generation",
    "time_update_actor": "policy update",
    "time_old_log_prob": "old log-probs",
    "time_update_weights": "weight sync",
    "trainer_idle_share": "trainer",
    "rollout_idle_share": "rollout",
}
STYLES = ("run", "line2", "line3", "line4", "line5", "line6")


def cause_figures(cause: str, document: Document) -> Iterator[Figure]:
    """The figure of the mechanism of a cause, where its signals were logged and, for evictions, are not all 0."""
    for shown in OF_CAUSES.get(cause, ()):
        made = _figure(shown, document)
        if made is not None:
            yield made
            return


def timelines(document: Document) -> dict[str, Any] | None:
    """Where the time of a step goes, and how idle trainer and rollout are."""
    figures = [f for shown in TIMES if (f := _figure(shown, document)) is not None]
    return {"figures": figures} if figures else None


def others(document: Document) -> dict[str, Any] | None:
    """What else moved: effective sample size, lengths, entropy, gradient norm."""
    figures = [f for shown in OTHERS if (f := _figure(shown, document)) is not None]
    return {"figures": figures} if figures else None


def _figure(shown: Shown, document: Document) -> Figure | None:
    known = {q["signal"]: q for q in (document.get("series") or {}).get("signals") or ()}
    there = [known[name] for name in shown.signals if name in known]
    there = there[:1] if shown.first else there
    if shown.stems:
        there = [q for q in there if any(v for v in q["lines"][0]["value"])]
    if not there:
        return None
    strokes = _compared(there[0], document) if len(there) == 1 else [*map(_own, there, STYLES)]
    if shown.stems and len(strokes) == 1:
        strokes = [Stroke(strokes[0].name, "run", strokes[0].x, strokes[0].y, kind="stems")]
    of = clean(there[0]["unit"]) if not shown.unit else shown.unit
    names = ", ".join(clean(q["signal"]) for q in there)
    chart = Chart(
        id=f"fig-{shown.id}",
        title=shown.title,
        says=f"{shown.title} over the steps, in {of}. {_means(strokes)}",
        x="step",
        y=of,
        strokes=tuple(strokes),
        zero=shown.id not in ("ess", "entropy"),
        whole=whole(f"select step, {names} from steps"),
    )
    return figure(chart)


def _own(quantity: Mapping[str, Any], style: str) -> Stroke:
    line = quantity["lines"][0]
    name = NAMES.get(quantity["signal"], clean(quantity["title"]))
    return Stroke(name, style, numbers(line["step"]), numbers(line["value"]))


def _compared(quantity: Mapping[str, Any], document: Document) -> list[Stroke]:
    strokes = []
    for line in quantity["lines"]:
        own = line["run"] == document["run"]["name"]
        low, high = ((None if line[k] is None else numbers(line[k])) for k in ("low", "high"))
        name = clean(line["run"]) + ("" if own else " (baseline)")
        x, y = numbers(line["step"]), numbers(line["value"])
        strokes.append(Stroke(name, "run" if own else "base1", x, y, low, high))
    return strokes


def _means(strokes: Sequence[Stroke]) -> str:
    """The mean of each line in words."""
    told = []
    for stroke in strokes:
        known = [y for y in stroke.y if y is not None]
        if known:
            told.append(f"{stroke.name}: mean {number(sum(known) / len(known))}")
    return "; ".join(told) + "." if told else ""
