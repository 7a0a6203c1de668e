"""Preflight as terminal text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import SEVERITIES
from verl_audit.preflight.decide import Answer, Paste, Preflight
from verl_audit.report.findings_block import SEVERITIES as STYLES
from verl_audit.report.page import Page, clean, number

COLUMN = 12


def render(found: Preflight, console: Console) -> None:
    """What looks misspelt, answers by cause, overrides to paste, findings."""
    page = Page(console)
    page.item("Configuration", ", then ".join(found.sources), style="bold")
    page.item("Trainer", clean(found.facts.get("trainer") or "not known"), style="bold")
    if found.problems:
        page.heading("Misspelt?")
    for problem in found.problems:
        page.para(clean(problem), 2)
    page.heading("What an audit of this run could decide")
    for answer in found.answers:
        _show_answer(page, answer)
    if found.prediction is not None:
        _show_prediction(page, found)
    page.heading("To record more, add" if found.paste else "Nothing more can be recorded by settings")
    for paste in found.paste:
        _show_paste(page, paste)
    order = sorted(found.findings, key=lambda f: -SEVERITIES.index(f.severity))
    page.heading("Findings", "" if order else "none: no setting contradicts another")
    for finding in order:
        _show_finding(page, finding)


def _show_answer(page: Page, answer: Answer) -> None:
    missing = [e.signal for e in answer.entries if e.standing in ("missing", "corrupt")]
    inert = [e.signal for e in answer.entries if e.standing == "inert"]
    what = f"not recorded: {', '.join(missing)}" if missing else "all it needs is recorded"
    what += f"; logged and cannot move: {', '.join(inert)}" if inert else ""
    page.item(answer.cause, f"{answer.decidable}; {what}", indent=2, column=COLUMN + 2)


def _show_prediction(page: Page, found: Preflight) -> None:
    prediction = found.prediction
    assert prediction is not None
    lag = "not known" if prediction.lag is None else f"at most {number(prediction.lag)} versions on average"
    page.heading("Predicted", f"lag {lag}")
    if prediction.drop_above is not None:
        page.para(f"answers above about {number(round(prediction.drop_above))} tokens are dropped", 2)
    page.para(f"from {prediction.because}", 2)


def _show_paste(page: Page, paste: Paste) -> None:
    page.verbatim(paste.overrides.split(), 2)
    page.item("for", paste.records, indent=4, column=COLUMN)
    page.item("price", paste.price, indent=4, column=COLUMN)


def _show_finding(page: Page, finding: Finding) -> None:
    page.item(
        finding.severity.upper(), finding.title, indent=2, column=COLUMN, style=STYLES.get(finding.severity, "bold")
    )
    page.para(finding.error or finding.explain, 4)
    for remedy in _first(finding):
        page.item("set", remedy, indent=4, column=COLUMN)
    page.para(f"({finding.rule})", 4)


def _first(finding: Finding) -> Sequence[str]:
    return [f"{r['set']} (price: {r['price']})" for r in finding.remedy[:1]]
