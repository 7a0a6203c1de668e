"""The ledger as a flow: what was generated, or decided, on the left, and where it went on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from verl_audit.report.head_block import Document
from verl_audit.report.html.axes import SIZE
from verl_audit.report.html.words import grouped
from verl_audit.report.page import clean, percent

LEFT, RIGHT = 30, 400
"""Where the blocks of source and fates end and begin, in thousandths of the width; labels stand right of them."""
GAPS = 180
"""Space that the gaps between the fates share; one gap has at most a third of it."""
LEAST_APART = 85
"""Least distance of two labels in thousandths of the height: one line of text."""
UNCHECKED = "How many groups were generated is not logged: the left side is those decided, and the sum is unchecked."
UNITS = ("groups", "trajectories", "tokens")


@dataclass(frozen=True)
class Share:
    """One fate with its amount and its share of the source."""

    name: str
    amount: float
    share: float
    kept: bool


@dataclass(frozen=True)
class Flow:
    """A flow ready for the page."""

    id: str
    unit: str
    source: str
    shares: tuple[Share, ...]
    svg: Markup


def ledger(document: Document) -> dict[str, Any] | None:
    """Flows in every unit known: of the traces where there are any, else of the groups that the metrics count."""
    traced = (document.get("traces") or {}).get("ledger")
    if traced:
        flows = [f for unit in UNITS if (f := _traced(traced, unit)) is not None]
        return {"flows": flows, "rows": _rows(traced), "unknown": [], "note": _residual(traced)} if flows else None
    return _counted(document["ledger"])


def _traced(traced: Mapping[str, Any], unit: str) -> Flow | None:
    amounts = [(clean(row["fate"]), row.get(unit)) for row in traced["unit_rows"]]
    known = [(name, float(v)) for name, v in amounts if isinstance(v, int | float) and v > 0]
    generated = (traced.get("generated") or {}).get(unit)
    return flow(unit, known, generated, "generated") if known else None


def _rows(traced: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = (*UNITS, "mean_length")
    return [(clean(row["fate"]), *(grouped(row.get(name)) for name in names)) for row in traced["unit_rows"]]


def _residual(traced: Mapping[str, Any]) -> str:
    left = traced.get("residual") or {}
    told = [f"{grouped(left[unit])} {unit}" for unit in UNITS if left.get(unit) is not None]
    return f"Residual (generated less the sum over fates): {', '.join(told)}." if told else ""


def _counted(counts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not counts or not counts.get("decided"):
        return None
    fates = {clean(k).removesuffix("_groups"): v for k, v in (counts.get("fates") or {}).items()}
    known = [(name, float(v)) for name, v in fates.items() if isinstance(v, int | float) and v > 0]
    if not known:
        return None
    unknown = [name for name, v in fates.items() if v is None]
    generated = counts.get("generated")
    sure = isinstance(generated, int | float)
    made = flow("groups", known, generated if sure else counts["decided"], "generated" if sure else "decided")
    return {"flows": [made], "rows": [], "unknown": unknown, "note": "" if sure else UNCHECKED}


def flow(unit: str, fates: Sequence[tuple[str, float]], whole: float | None, word: str) -> Flow:
    """A flow of `whole` (else of the sum) into its fates, the trained ones first; what is left over has its own."""
    total = sum(v for _, v in fates)
    source = max(float(whole or 0.0), total)
    ordered = sorted(fates, key=lambda fate: (fate[0] != "trained", -fate[1]))
    if source - total > 1e-9 * source:
        ordered.append(("unaccounted", source - total))
    shares = tuple(Share(name, v, v / source, name == "trained") for name, v in ordered)
    said = f"{grouped(source)} {unit} {word}"
    return Flow(f"fig-flow-{unit}", unit, said, shares, _draw(f"fig-flow-{unit}", said, shares))


def _draw(id_: str, said: str, shares: Sequence[Share]) -> Markup:
    gap = min(GAPS / max(len(shares) - 1, 1), GAPS / 3)
    room = SIZE - gap * (len(shares) - 1)
    parts, left, right, centres = [], 0.0, 0.0, []
    for share in shares:
        height = max(share.share * room, 3.0)
        parts.append(_ribbon(left, share.share * SIZE, right, height, kept=share.kept))
        centres.append(right + height / 2)
        left, right = left + share.share * SIZE, right + height + gap
    labels = [
        Markup('<text class="fate" x="{}%" y="{:g}%" dx="10" dy=".34em">{} {} ({})</text>').format(
            RIGHT / 10 + 3, y / 10, grouped(share.amount), share.name, percent(share.share)
        )
        for share, y in zip(shares, _apart(centres), strict=True)
    ]
    told = "; ".join(f"{s.name} {grouped(s.amount)} ({percent(s.share)})" for s in shares)
    return Markup(
        '<svg class="flow" role="img" aria-labelledby="{id}-t {id}-d"><title id="{id}-t">{said}</title>'
        '<desc id="{id}-d">{told}</desc><svg class="paths" viewBox="0 0 {size} {size}" preserveAspectRatio="none">'
        "{parts}</svg>{labels}</svg>"
    ).format(id=id_, said=said, told=told, size=SIZE, parts=Markup("").join(parts), labels=Markup("").join(labels))


def _ribbon(left: float, thick: float, right: float, height: float, *, kept: bool) -> Markup:
    middle = (LEFT + RIGHT) / 2
    return Markup(
        '<path class="ribbon {kept}" d="M{a} {l0}C{m} {l0} {m} {r0} {b} {r0}V{r1}C{m} {r1} {m} {l1} {a} {l1}Z"/>'
        '<rect class="block {kept}" x="0" y="{l0}" width="{a}" height="{thick}"/>'
        '<rect class="block {kept}" x="{b}" y="{r0}" width="{a}" height="{height}"/>'
    ).format(
        kept="kept" if kept else "lost",
        a=LEFT,
        b=RIGHT,
        m=round(middle),
        l0=round(left),
        l1=round(left + thick),
        r0=round(right),
        r1=round(right + height),
        thick=max(round(thick), 1),
        height=round(height),
    )


def _apart(centres: Sequence[float]) -> list[float]:
    """Label positions as near to the centres as their distance allows, inside the height."""
    at: list[float] = []
    for centre in centres:
        at.append(max(centre, at[-1] + LEAST_APART if at else 40.0))
    over = max(at[-1] - (SIZE - 40.0), 0.0) if at else 0.0
    for i in range(len(at) - 1, -1, -1):
        top = SIZE - 40.0 if i == len(at) - 1 else at[i + 1] - LEAST_APART
        at[i] = min(at[i], top) if over else at[i]
    return at
