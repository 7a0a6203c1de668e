"""The `traces` part of the audit document: ledger, survival, the gap by lag, whose it is, replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl_audit.measure.decompose.bracket import Bracket
from verl_audit.measure.decompose.per_lag import LagRow
from verl_audit.measure.decompose.shapley import Split
from verl_audit.measure.decompose.tables import Refused
from verl_audit.measure.ledger import Ledger, Line
from verl_audit.measure.model import Measure
from verl_audit.measure.reasons import ReasonPart
from verl_audit.measure.replicas import Replica
from verl_audit.measure.survival import Survival
from verl_audit.measure.traced import COMPONENTS, GAUGES, Tokens, Traced

BY = ("length", "difficulty")
"""What survival is told by, in the order of `Traced.survival`."""
MAX_LAGS = 40
"""Lags in the table; those beyond are added up in its last row."""


def tree(traced: Traced) -> dict[str, Any]:
    """What the traces of the audited run tell, as plain types."""
    return {
        "rows": traced.rows,
        "cohorts": _cohorts(traced),
        "ledger": _ledger(traced.ledger),
        "survival": [row for by, found in zip(BY, traced.survival, strict=True) for row in _survival(by, found)],
        "reasons": [_reason(part) for part in traced.reasons],
        "identity": _identity(traced.tokens),
        "per_lag": [_lag(row) for row in traced.tokens.lags[:MAX_LAGS]] if traced.tokens else [],
        "lags_left_out": max(0, len(traced.tokens.lags) - MAX_LAGS) if traced.tokens else 0,
        "shares": _shares(traced.tokens),
        "share_refused": _refused(traced.tokens),
        "replicas": [_replica(r) for r in traced.replicas.each],
    }


def _cohorts(traced: Traced) -> dict[str, Any]:
    where = traced.where
    return {
        "basis": where.basis or None,
        "weaker": where.weaker or None,
        "blind": where.blind or None,
        "total": where.total,
        "open": where.open,
        "edge": where.edge,
    }


def _ledger(book: Ledger) -> dict[str, Any]:
    rows = [_line(line) for line in book.lines if line.groups.value or line.trajectories.value]
    return {
        "unit_rows": rows,
        "generated": _line(book.total),
        "open_groups": book.open_groups.value,
        "undelivered_trajectories": book.undelivered.value,
        "residual": {
            "groups": book.residual_groups.value,
            "trajectories": book.residual_trajectories.value,
            "tokens": book.residual_tokens.value,
        },
        "lost_groups": book.lost_groups.value,
        "closes": book.closes,
    }


def _line(line: Line) -> dict[str, Any]:
    tokens, trajectories = line.tokens.number(), line.trajectories.number()
    return {
        "fate": line.fate,
        "groups": line.groups.value,
        "trajectories": line.trajectories.value,
        "tokens": line.tokens.value,
        "mean_length": tokens / trajectories if tokens is not None and trajectories else None,
    }


def _survival(by: str, found: Survival) -> list[dict[str, Any]]:
    return [
        {
            "by": by,
            "variable": found.variable,
            "low": bin_.low,
            "high": bin_.high,
            "groups": bin_.trained.n,
            "trained_share": bin_.trained.value,
            "low95": bin_.trained.low,
            "high95": bin_.trained.high,
        }
        for bin_ in found.bins
    ]


def _reason(part: ReasonPart) -> dict[str, Any]:
    return {
        "reason": part.reason,
        "groups": part.groups.value,
        "alone": part.alone.value,
        "length": _interval(part.length),
        "reward": _interval(part.reward),
    }


def _interval(m: Measure) -> dict[str, Any]:
    return {"value": m.value, "low": m.low, "high": m.high}


def _identity(tokens: Tokens | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    known = tokens.identity
    return {
        "recorded": list(known.recorded),
        "exact": list(known.exact),
        "unknown": list(known.unknown),
        "reason": known.reason,
        "wants": list(known.wants),
    }


def _lag(row: LagRow) -> dict[str, Any]:
    return {
        "lag": row.lag,
        "updates": row.updates,
        "tokens": row.tokens,
        "mean_abs_diff": _finite(row.mean_abs.value),
        "low95": _finite(row.mean_abs.low),
        "high95": _finite(row.mean_abs.high),
        "ess": _finite(row.ess.value),
        "clipped_share": _finite(row.clip_share.value),
        "tail_share": _finite(row.tail_share.value),
    }


def _shares(tokens: Tokens | None) -> list[dict[str, Any]]:
    if tokens is None:
        return []
    exact = [_split(short, tokens.splits[name]) for name, short in GAUGES.items() if name in tokens.splits]
    return [*exact, *([_bracket(tokens.bracket)] if isinstance(tokens.bracket, Bracket) else [])]


def _refused(tokens: Tokens | None) -> str | None:
    """Why the mismatch share is not bracketed; null where it is, or where parts are told apart."""
    return tokens.bracket.reason if tokens is not None and isinstance(tokens.bracket, Refused) else None


def _split(quantity: str, split: Split) -> dict[str, Any]:
    parts: Mapping[str, Any] = {COMPONENTS.get(p.component, p.component): p.share for p in split.parts}
    ours = parts.get("mismatch")
    return {
        "quantity": quantity,
        **{
            name: _finite(parts[name].value) if parts.get(name) else None
            for name in ("update", "staleness", "mismatch")
        },
        "joined": {c: _finite(p.value) for c, p in parts.items() if "+" in c and p is not None},
        "low": _finite(ours.low) if ours else None,
        "high": _finite(ours.high) if ours else None,
        "method": "exact",
    }


def _bracket(found: Bracket) -> dict[str, Any]:
    return {
        "quantity": "second",
        "update": None,
        "staleness": 1 - found.value,
        "mismatch": found.value,
        "joined": {},
        "low": found.low,
        "high": found.high,
        "method": "bracket",
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _replica(found: Replica) -> dict[str, Any]:
    return {
        "server": found.server,
        "behind": found.behind.value,
        "behind_at_end": found.end.value,
        "behind_most": found.worst.value,
        "slope": found.slope.value,
    }
