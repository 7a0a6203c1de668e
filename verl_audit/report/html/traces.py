"""What only per-trajectory traces show: the loss by lag, survival by length, and shares of the off-policy loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_audit.report.head_block import Document, ranged
from verl_audit.report.html.chart import Chart, Stroke
from verl_audit.report.html.figure import Figure, figure
from verl_audit.report.html.reward import numbers
from verl_audit.report.html.svg import interval
from verl_audit.report.page import clean, number, percent

PARTS: Mapping[str, str] = {"update": "the update itself", "staleness": "staleness", "mismatch": "mismatch"}
QUANTITIES: Mapping[str, str] = {
    "clip": "Clipped tokens",
    "chi2": "Chi-square of the weights",
    "ess": "Effective sample size lost",
    "second": "Second moment of the log-ratio",
}
PER_LAG = (
    ("tokens", "Tokens", "tokens"),
    ("mean_abs_diff", "Mean difference of log-probabilities", "nats per token"),
    ("ess", "Effective sample size", "share"),
    ("clipped_share", "Clipped tokens", "share of tokens"),
)
BY: Mapping[str, tuple[str, str]] = {
    "length": ("Survival by length", "response length, tokens"),
    "difficulty": ("Survival by difficulty", "mean score of the group"),
}


def per_lag(document: Document) -> dict[str, Any] | None:
    """Difference, effective sample size and clipped share of tokens by their lag; lag 0 is the mismatch alone."""
    rows = _traces(document, "per_lag")
    if not rows:
        return None
    figures = [f for name, title, unit in PER_LAG if (f := _by_lag(rows, name, title, unit)) is not None]
    return {"figures": figures} if figures else None


def _by_lag(rows: Sequence[Mapping[str, Any]], name: str, title: str, unit: str) -> Figure | None:
    values = numbers([row.get(name) for row in rows])
    if not any(v is not None for v in values):
        return None
    lags = numbers([row["lag"] for row in rows])
    said = ", ".join(f"lag {number(x)}: {number(y)}" for x, y in zip(lags, values, strict=True))
    chart = Chart(
        id=f"fig-lag-{name.replace('_', '-')}",
        title=f"{title} by lag",
        says=f"{title} by lag, in {unit}: {said}.",
        x="lag, versions",
        y=unit,
        strokes=(Stroke(title, "run", lags, values, kind="stems" if name == "tokens" else "line"),),
        zero=name != "ess",
    )
    return figure(chart)


def survival(document: Document) -> dict[str, Any] | None:
    """Share of the groups that were trained on, by length and by difficulty, with 95 % intervals."""
    rows = _traces(document, "survival")
    figures = [f for by in BY if (f := _survival([r for r in rows if r["by"] == by], by)) is not None]
    return {"figures": figures} if figures else None


def _survival(rows: Sequence[Mapping[str, Any]], by: str) -> Figure | None:
    if not rows:
        return None
    title, x = BY[by]
    middle: list[float | None] = [(float(r["low"]) + float(r["high"])) / 2 for r in rows]
    share, low, high = (numbers([r.get(k) for r in rows]) for k in ("trained_share", "low95", "high95"))
    told = (
        f"{number(r['low'])} to {number(r['high'])}: {number(r['trained_share'])} of {number(r['groups'])} groups"
        for r in rows
    )
    chart = Chart(
        id=f"fig-survival-{by}",
        title=title,
        says=f"Share of groups trained on, with 95 % intervals. {'; '.join(told)}.",
        x=x,
        y="share of groups trained on",
        strokes=(Stroke("trained share, 95 % interval", "run", middle, share, low, high, kind="points"),),
        span=(min(float(r["low"]) for r in rows), max(float(r["high"]) for r in rows)),
        zero=True,
    )
    return figure(chart)


def shares(document: Document) -> dict[str, Any] | None:
    """How much of clipping, chi-square and lost sample size is due to the update, staleness and mismatch."""
    rows = [_share(row) for row in _traces(document, "shares")]
    return {"rows": rows} if rows else None


def _share(row: Mapping[str, Any]) -> dict[str, Any]:
    exact = row.get("method") == "exact"
    return {
        "quantity": QUANTITIES.get(row["quantity"], clean(row["quantity"])),
        "parts": [_part(row.get(part)) for part in PARTS],
        "bracket": "exact" if exact else _bracket(row),
    }


def _part(value: object) -> tuple[str, Any]:
    if not isinstance(value, int | float):
        return "not known", ""
    held = min(max(float(value), 0.0), 1.0)
    return percent(float(value)), interval(0.0, held, held, 1.0)


def _bracket(row: Mapping[str, Any]) -> str:
    low, high = row.get("low"), row.get("high")
    if not (isinstance(low, int | float) and isinstance(high, int | float)):
        return "bracket without bounds"
    return f"bracket of mismatch: {ranged('', percent(low), percent(high)).strip(' ()')}"


def replicas(document: Document) -> dict[str, Any] | None:
    """The replicas' rows as the traces give them."""
    rows = _traces(document, "replicas")
    if not rows:
        return None
    head = list(dict.fromkeys(name for row in rows for name in row))
    return {"head": [clean(h).replace("_", " ") for h in head], "rows": list(_cells(rows, head))}


def _cells(rows: Sequence[Mapping[str, Any]], head: Sequence[str]) -> Iterator[list[str]]:
    for row in rows:
        yield [number(row.get(name)) for name in head]


def _traces(document: Document, name: str) -> Sequence[Mapping[str, Any]]:
    return (document.get("traces") or {}).get(name) or ()
