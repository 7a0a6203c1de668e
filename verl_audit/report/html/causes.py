"""The four steps, the causes with their damage, and a card for each cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from verl_audit.report.findings_block import fired_findings, remedies
from verl_audit.report.head_block import NAMES, Document, between, damage_of, without_steps
from verl_audit.report.html.signals import cause_figures
from verl_audit.report.html.svg import interval
from verl_audit.report.html.words import CAUSES, Cause, cause_status, severity_status
from verl_audit.report.page import clean, listed, number, percent

UNKNOWN = Cause("", "", "")
LEVELS: Mapping[str, str] = {
    "traces": "traces",
    "metrics": "metrics",
    "config": "configuration",
}
SMALLEST_SCALE = 0.1
"""Least share at the end of the damage scale: smaller damages are to look small."""
MOST_REMEDIES = 3
"""Remedies on a card, those of the gravest finding first; the findings below have all."""
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")


def steps(document: Document) -> dict[str, Any]:
    """One row a step, in order: what it asks, the answer, the number that decided."""
    rows = [
        {
            "step": step,
            "cause": clean(name),
            "name": NAMES.get(name, clean(name)),
            "asks": CAUSES.get(name, UNKNOWN).asks,
            "status": cause_status(cause),
            "because": clean(cause["because"]),
            "missing": listed(cause["missing"], 6),
        }
        for step, (name, cause) in enumerate(document["causes"].items(), 1)
    ]
    return {"rows": rows, "judged": not without_steps(document["run"])}


def damages(document: Document) -> dict[str, Any] | None:
    """One row a cause: share of the training signal lost with its interval, onset, status, level of evidence."""
    if without_steps(document["run"]):
        return None
    highest = max([SMALLEST_SCALE, *(_high(c) for c in document["causes"].values())])
    end = next(e for e in (0.1, 0.2, 0.5, 1.0) if e >= min(highest, 1.0))
    rows = []
    for name, cause in document["causes"].items():
        damage, text = cause.get("damage"), damage_of(cause)
        rows.append(
            {
                "cause": clean(name),
                "name": NAMES.get(name, clean(name)),
                "text": text or "not measured",
                "drawn": _drawn(damage, end) if text else "",
                "began": _began(name, cause, document),
                "status": cause_status(cause),
                "level": LEVELS.get(cause["evidence_level"], clean(cause["evidence_level"])),
            }
        )
    return {"rows": rows, "end": percent(end).replace(".0", "")}


def _drawn(damage: Mapping[str, Any] | None, end: float) -> Markup:
    """The interval of a damage; nothing where an end of it is no number."""
    ends = [(damage or {}).get(name) for name in ("low", "estimate", "high")]
    low, value, high = (min(float(v), end) if isinstance(v, int | float) else -1.0 for v in ends)
    return interval(low, value, high, end) if low >= 0 and high >= 0 else Markup("")


def _high(cause: Mapping[str, Any]) -> float:
    high = (cause.get("damage") or {}).get("high")
    return float(high) if damage_of(cause) and isinstance(high, int | float) else 0.0


def _began(name: str, cause: Mapping[str, Any], document: Document) -> str:
    """The onset of the symptom for what is shown to slow reward, else the first step at which the mechanism shows."""
    onset = document["symptom"].get("onset")
    if onset and cause["status"] in ("implicated", "contributing"):
        return f"reward began to fall behind {between('step', onset['low'], onset['high'])}"
    first = ((document.get("series") or {}).get("began") or {}).get(name)
    return f"first at step {number(first)}" if first is not None else "–"


def cards(document: Document) -> dict[str, Any] | None:
    """What a colleague wants to check of each cause; the gravest standing first."""
    if without_steps(document["run"]):
        return None
    order = {"bad": 0, "warn": 1, "open": 2, "good": 3}
    made = [_card(step, name, document) for step, name in enumerate(document["causes"], 1)]
    return {"cards": sorted(made, key=lambda card: order[card["status"].tone])}


def _card(step: int, name: str, document: Document) -> dict[str, Any]:
    cause, known = document["causes"][name], CAUSES.get(name, UNKNOWN)
    own = [f for f in fired_findings(document) if f["cause"] == name]
    leading = next((f for f in own if f["severity"] != "info"), None)
    return {
        "step": step,
        "cause": clean(name),
        "name": NAMES.get(name, clean(name)),
        "status": cause_status(cause),
        "is_": known.is_,
        "because": clean(cause["because"]),
        "missing": listed(cause["missing"], 6),
        "damage": damage_of(cause),
        "findings": [(severity_status(f["severity"]), clean(f["rule"]), clean(f["title"]), _decisive(f)) for f in own],
        "quiet": [clean(f["rule"]) for f in document["findings"] if f["cause"] == name and f["status"] == "clear"],
        "refuted": known.refuted,
        **_experiment(leading),
        "remedies": list(_remedies(own, document))[:MOST_REMEDIES],
        "figures": list(cause_figures(name, document)),
    }


def _decisive(finding: Mapping[str, Any]) -> str:
    """The number that decided, where it says more than the title."""
    decisive = clean(finding["decisive"])
    return "" if decisive == clean(finding["title"]) else decisive


def _experiment(finding: Mapping[str, Any] | None) -> dict[str, str]:
    """The experiment of a finding, and what its outcomes would say."""
    first, *rest = _SENTENCE_END.split(clean(finding["confirm"]), maxsplit=1) if finding else [""]
    return {"experiment": first, "outcomes": rest[0] if rest else ""}


def _remedies(found: Sequence[Mapping[str, Any]], document: Document) -> Iterator[dict[str, str]]:
    """Remedies of the findings above info for the run's own framework, each once."""
    seen = set[str]()
    for finding in found:
        for remedy in remedies(finding, document)[0] if finding["severity"] != "info" else ():
            if (key := clean(remedy["set"])) not in seen:
                seen.add(key)
                yield {
                    "set": key,
                    "framework": clean(remedy["framework"]),
                    "price": clean(remedy.get("price") or "none stated"),
                }
