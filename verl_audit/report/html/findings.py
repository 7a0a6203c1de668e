"""Every finding with its evidence, the query that gives all of it, confirmation, remedy and sources."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from verl_audit.report.findings_block import fired_findings, remedies, says_something, told_columns, without_comments
from verl_audit.report.head_block import NAMES, Document
from verl_audit.report.html.words import RULES, severity_status
from verl_audit.report.page import clean, number

TEXT_COLUMNS = frozenset(
    ("prompt", "prompts", "response", "responses", "completion", "completions", "input", "output", "text", "messages",
     "prompt_text", "response_text", "completion_text", "input_text", "output_text", "answer", "ground_truth", "gts")
)  # fmt: skip
"""Columns of evidence that hold text of a model or a data set: left out unless asked for."""
LONGEST_CELL = 400
"""Characters of a cell; the query gives the rest."""
_SCHEME = re.compile(r"\b[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def findings(document: Document, *, include_text: bool) -> dict[str, Any]:
    """What fired, gravest first, in full; the other rules by name."""
    fired = [_finding(f, document, include_text=include_text) for f in fired_findings(document)]
    rest = [
        (RULES[status], [(clean(f["rule"]), _why(f)) for f in document["findings"] if f["status"] == status])
        for status in RULES
    ]
    return {"fired": fired, "rest": [(status, rules) for status, rules in rest if rules]}


def _why(finding: Mapping[str, Any]) -> str:
    if finding["status"] == "error":
        return clean(finding["error"] or "no reason given")
    return "; ".join(f"{clean(m['measure'])}: {clean(m['because'])}" for m in finding["missing"])


def _finding(finding: Mapping[str, Any], document: Document, *, include_text: bool) -> dict[str, Any]:
    own, others = remedies(finding, document)
    evidence = finding["evidence"] or {}
    cause = clean(finding["cause"])
    return {
        "rule": clean(finding["rule"]),
        "status": severity_status(finding["severity"]),
        "title": clean(finding["title"]),
        "of": f"step {finding['step']}, {NAMES.get(cause, cause)}" if finding["step"] else cause,
        "confidence": clean(finding["confidence"]),
        "explain": clean(finding["explain"]),
        "measures": [(clean(name), number(value)) for name, value in finding["measures"].items()],
        "evidence": _evidence(evidence, include_text=include_text),
        "command": command(evidence["sql"]) if evidence.get("sql") else "",
        "error": clean(evidence.get("error") or ""),
        "confirm": clean(finding["confirm"] or ""),
        "remedies": [(clean(r["set"]), clean(r["framework"]), clean(r.get("price") or "")) for r in own],
        "others": len(others),
        "refs": [without_scheme(clean(ref)) for ref in finding["refs"]],
    }


def command(sql: object) -> str:
    """The command that prints all rows of a query."""
    return f"verl-audit sql RUN_DIR {shlex.quote(clean(without_comments(sql)))}"


def without_scheme(text: str) -> str:
    """An address as text only: the page links to nothing outside itself."""
    return _SCHEME.sub("", text)


def _evidence(evidence: Mapping[str, Any], *, include_text: bool) -> dict[str, Any] | None:
    rows = [row for row in evidence.get("rows") or () if says_something(row)]
    if not rows:
        return None
    names = told_columns(rows)
    kept = [n for n in names if include_text or n.lower() not in TEXT_COLUMNS]
    return {
        "head": [clean(n) for n in kept],
        "right": [not any(isinstance(row.get(n), str) for row in rows) for n in kept],
        "rows": [[_cell(row.get(n)) for n in kept] for row in rows],
        "more": bool(evidence.get("more")),
        "left_out": [clean(n) for n in names if n not in kept],
    }


def _cell(value: object) -> str:
    text = number(value)
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]} …"
