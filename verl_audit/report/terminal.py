"""The audit document as terminal text: the verdict first, the next steps last. Reads the document, computes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from verl_audit.report.coverage_block import show_coverage, show_files, show_ledger
from verl_audit.report.findings_block import Finding, fired_findings, remedies, show_findings
from verl_audit.report.head_block import BASELINE, died, missing_settings, show_causes, show_run, show_verdict
from verl_audit.report.page import Page, clean

MAX_ACTIONS = 3
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
NOTHING_TO_SET = "nothing to set"
"""Ends the advice for a signal that a trainer logs by itself, or never."""


def render(document: Mapping[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print the report; text from the document is never read as markup, and no line is wider than the console."""
    page = Page(console)
    show_verdict(page, document)
    show_run(page, document, verbose=verbose)
    show_causes(page, document, verbose=verbose)
    show_findings(page, document, verbose=verbose)
    show_coverage(page, document, verbose=verbose)
    show_ledger(page, document["ledger"])
    show_files(page, document, verbose=verbose)
    _show_next(page, document)


def _show_next(page: Page, document: Mapping[str, Any]) -> None:
    page.heading("Next")
    actions = list(dict.fromkeys(_actions(document)))[:MAX_ACTIONS]
    for i, action in enumerate(actions or ["Nothing to change."], 1):
        page.item(f"{i}.", action, indent=2, column=5)


def _actions(document: Mapping[str, Any]) -> Iterator[str]:
    """What to do, most urgent first: repair what stopped it, then decide or mend, as the outcome asks."""
    run, outcome = document["run"], document["verdict"]["outcome"]
    if died(run):
        yield f"Repair what stopped the run: {clean(run['last_error']['exception'])}"
    finding = _leading(document)
    deciding = _record(document)
    mending = list(_mend(finding, document)) if finding else []
    if outcome == "undetermined":
        yield from [*deciding, *reversed(mending)]
    else:
        yield from [*mending, *deciding]
    if not document["baselines"] and not died(run):
        yield f"Compare with a synchronous run: verl-audit diagnose RUN_DIR {BASELINE}"
    if outcome == "undetermined":
        yield from _validate(document)


def _validate(document: Mapping[str, Any]) -> Iterator[str]:
    """Validation, where none is logged: the only reward that eviction cannot lift."""
    for entry in document["coverage"]["causes"].get("symptom", ()):
        if entry["signal"] == "validation" and entry["standing"] == "missing" and entry["record"]:
            yield f"Record validation: {clean(entry['record'])}"


def _leading(document: Mapping[str, Any]) -> Finding | None:
    """The gravest finding behind the verdict: of a named cause or risk, or one of medium severity or above."""
    verdict = document["verdict"]
    named = [*verdict["causes"], *(verdict.get("risks") or ())]
    serious = [f for f in fired_findings(document) if f["severity"] not in ("low", "info")]
    of_cause = [f for f in fired_findings(document) if f["cause"] in named and f["severity"] != "info"]
    if verdict["outcome"] == "other":
        return next(iter(serious), None)
    return next(iter(of_cause or serious), None)


def _mend(finding: Finding, document: Mapping[str, Any]) -> Iterator[str]:
    for remedy in remedies(finding, document)[0][:1]:
        price = f" (price: {clean(remedy['price'])})" if remedy.get("price") else ""
        yield f"Set {clean(remedy['set'])}{price}"
    if finding["confirm"]:
        yield f"To confirm {clean(finding['rule'])}: {_first_sentence(clean(finding['confirm']))}"


def _first_sentence(text: str) -> str:
    """The experiment itself; what its outcomes prove stands with the finding."""
    return _SENTENCE_END.split(text, maxsplit=1)[0]


def _record(document: Mapping[str, Any]) -> Iterator[str]:
    """The first signal that the verdict lacks and a setting records; no baseline has a line of its own."""
    for names, setting in missing_settings(document):
        if setting.endswith(NOTHING_TO_SET):
            continue
        if not setting.startswith(BASELINE):
            yield f"Record {names}: {clean(setting)}"
            return
        if document["baselines"]:
            yield f"Give {clean(setting)}"
            return
