"""What was not judged, and the setting that would record it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from verl_audit.report.coverage_block import gap_advice, grouped_reasons
from verl_audit.report.findings_block import reasons_of
from verl_audit.report.head_block import NAMES, Document, missing_settings
from verl_audit.report.page import clean, count


def unjudged(document: Document) -> dict[str, Any] | None:
    """Missing signals with their settings; signals that cannot move or mean something else; rules without data."""
    read = sum(document["coverage"]["keys"].values())
    told: dict[str, Any] = {
        "deciding": list(missing_settings(document)),
        "missing": list(_missing(document)) if read else [],
        "inert": grouped_reasons(document, "inert"),
        "corrupt": grouped_reasons(document, "corrupt"),
        "rules": list(_without_data(document)) if read else ["no metric was read"],
        "unknown": [clean(k) for k in document["coverage"]["unknown_keys"]],
    }
    return told if any(told.values()) else None


def _missing(document: Document) -> Iterator[tuple[str, str, str]]:
    """(signal, causes that need it, what would record it), without those that the verdict names already."""
    needed: dict[tuple[str, str], list[str]] = {}
    for cause, entries in document["coverage"]["causes"].items():
        for entry in entries:
            if entry["standing"] == "missing" and entry["signal"] not in document["verdict"]["missing"]:
                key = clean(entry["signal"]), gap_advice(entry)
                needed.setdefault(key, []).append(NAMES.get(cause, clean(cause)))
    for (signal, advice), causes in needed.items():
        yield signal, ", ".join(causes), advice


def _without_data(document: Document) -> Iterator[str]:
    findings: list[Mapping[str, Any]] = [f for f in document["findings"] if f["status"] == "insufficient"]
    reasons = Counter(part for f in findings for part in reasons_of(f))
    for why, n in reasons.most_common():
        yield f"{why} ({count(n, 'rule')})"
