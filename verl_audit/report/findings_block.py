"""The findings: what fired with its evidence, confirmation and remedy, and what could not be judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_audit.report.head_block import Document, fact
from verl_audit.report.page import Page, clean, count, listed, table, wrap_words

Finding = Mapping[str, Any]
SEVERITIES: Mapping[str, str] = {
    "critical": "bold red",
    "high": "red",
    "medium": "yellow",
    "low": "cyan",
    "info": "",
}
"""Severities, gravest first, with their styles."""
MAX_ROWS = 6
MAX_REASONS = 5
_SQL_COMMENT = re.compile(r"('[^']*')|--[^\n]*")
_SQL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")


def show_findings(page: Page, document: Document, *, verbose: bool) -> None:
    """Broken rules first, then what fired, gravest first, then counts of the rest."""
    findings: Sequence[Finding] = document["findings"]
    fired = fired_findings(document)
    page.heading("Findings", _summary(fired))
    _show_errors(page, [f for f in findings if f["status"] == "error"])
    for finding in fired:
        if finding["severity"] != "info" or verbose:
            _show_finding(page, finding, document)
    brief = [] if verbose else [f for f in fired if f["severity"] == "info"]
    if brief:
        page.blank()
    for finding in brief:
        page.item("INFO", f"{clean(finding['title'])} ({clean(finding['rule'])})", indent=2, column=12)
    page.blank()
    _show_insufficient(page, [f for f in findings if f["status"] == "insufficient"], document, verbose=verbose)
    _show_rest(page, findings)


def fired_findings(document: Document) -> list[Finding]:
    """Findings that fired, gravest first; of equal ones those of what the verdict names first."""
    order, verdict = list(SEVERITIES), document["verdict"]
    named = ["health"] if verdict["outcome"] == "other" else verdict["causes"] or verdict["risks"]
    fired = [f for f in document["findings"] if f["status"] == "fired"]
    return sorted(
        fired,
        key=lambda f: (order.index(f["severity"]) if f["severity"] in order else -1, f["cause"] not in named),
    )


def _summary(fired: Sequence[Finding]) -> str:
    counts = Counter(clean(f["severity"]) for f in fired)
    return ", ".join(f"{n} {severity}" for severity, n in counts.items()) or "none fired"


def _show_errors(page: Page, broken: Sequence[Finding]) -> None:
    if not broken:
        return
    page.para(
        f"BROKEN RULES: {count(len(broken), 'rule')} could not run; what they check is not cleared.", 2, "bold red"
    )
    for f in broken:
        page.item(clean(f["rule"]), f["error"] or "no reason given", indent=4)


def _show_finding(page: Page, finding: Finding, document: Document) -> None:
    severity = clean(finding["severity"])
    page.blank()
    page.item(severity.upper(), finding["title"], indent=2, column=12, style=SEVERITIES.get(severity, "bold"))
    step = f"step {finding['step']} ({clean(finding['cause'])})" if finding["step"] else clean(finding["cause"])
    page.para(f"{clean(finding['rule'])}, {step}, confidence {clean(finding['confidence'])}", indent=12)
    if clean(finding["explain"]) not in clean(document["verdict"]["sentence"]):
        page.para(finding["explain"], indent=4)
    _show_evidence(page, finding["evidence"] or {})
    if finding["confirm"]:
        page.item("confirm", finding["confirm"], indent=4, column=14, style="bold")
    _show_remedies(page, finding, document)
    if finding["missing"]:
        page.item("missing", listed([m["measure"] for m in finding["missing"]], 6), indent=4, column=14)


def _show_evidence(page: Page, evidence: Mapping[str, Any]) -> None:
    sql = evidence.get("sql")
    if not sql:
        return
    if evidence.get("error"):
        page.item("evidence", f"its query failed: {clean(evidence['error'])}", indent=4, column=14, style="bold red")
        return
    rows = [row for row in evidence.get("rows") or () if says_something(row)]
    shown = rows[:MAX_ROWS]
    left = table(page, shown, told_columns(shown), 4) if shown else []
    title = "the same rows" if shown else "no rows; the query"
    if shown and (evidence.get("more") or len(rows) > MAX_ROWS):
        title = f"first {count(len(shown), 'row')} with a value; all of them"
    page.para(f"{title}{f', and {listed(left, 8)}' if left else ''}:", indent=4)
    page.verbatim(_command(page, sql), indent=6)


def without_comments(sql: object) -> str:
    """SQL without its comments, fit for one line."""
    return _SQL_COMMENT.sub(r"\1", str(sql))


def says_something(row: Mapping[str, Any]) -> bool:
    """Whether a row of evidence holds a value beside its step."""
    return any(value is not None for name, value in row.items() if name != "step")


def told_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the columns that hold a value in any of the rows."""
    return [name for name in rows[0] if any(row.get(name) is not None for row in rows)]


def _command(page: Page, sql: object) -> list[str]:
    """The command that shows the rows, breaking only between words of the SQL, so that it can be pasted."""
    words = _SQL_WORD.findall(page.text(without_comments(sql)))
    quoted = [word.replace("'", "'\"'\"'") for word in words] or [""]
    quoted[0] = f"'{quoted[0]}"
    quoted[-1] = f"{quoted[-1]}'"
    return wrap_words(["verl-audit", "sql", "RUN_DIR", *quoted], page.width - 6)


def _show_remedies(page: Page, finding: Finding, document: Document) -> None:
    own, others = remedies(finding, document)
    if own:
        page.para("remedy", 4, "bold")
    for remedy in own:
        price = f"; price: {clean(remedy['price'])}" if remedy.get("price") else ""
        page.para(remedy["set"], indent=6)
        page.para(f"{clean(remedy['framework'])}{price}", indent=10)
    if others:
        page.para(f"({len(others)} more for other frameworks or trainers)", indent=6)


def remedies(finding: Finding, document: Document) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Remedies for the run's own framework and trainer, and the others; where none fits, all."""
    told: list[Mapping[str, Any]] = list(finding["remedy"])
    facts = document["run"]["facts"]
    known = {str(fact(facts, name)) for name in ("framework", "trainer_family", "trainer")}
    own = [r for r in told if set(_words(r["framework"])) <= known]
    return (own, [r for r in told if r not in own]) if own else (told, [])


def _words(framework: object) -> Iterator[str]:
    """Words of a remedy's framework, what stands in brackets left out."""
    yield from re.sub(r"\([^)]*\)", "", str(framework)).split()


def _show_insufficient(page: Page, findings: Sequence[Finding], document: Document, *, verbose: bool) -> None:
    if not findings:
        return
    if not sum(document["coverage"]["keys"].values()) and not verbose:
        page.para(f"{count(len(findings), 'rule')} without data, as no metric was read.", indent=2)
        return
    reasons = Counter(part for f in findings for part in reasons_of(f))
    told = [f"{why} ({count(n, 'rule')})" for why, n in reasons.most_common()]
    cap = len(told) if verbose else MAX_REASONS
    more = f"; {count(len(told) - cap, 'more reason')} (--verbose)" if len(told) > cap else ""
    page.para(f"{count(len(findings), 'rule')} without data: {'; '.join(told[:cap])}{more}.", indent=2, hang=2)
    for f in findings if verbose else ():
        page.item(clean(f["rule"]), listed([f"{m['measure']}: {m['because']}" for m in f["missing"]], 20), indent=4)


def reasons_of(finding: Finding) -> list[str]:
    """Its reasons, each once; "a; b" joins several."""
    return list(dict.fromkeys(clean(part) for m in finding["missing"] for part in str(m["because"]).split("; ")))


def _show_rest(page: Page, findings: Sequence[Finding]) -> None:
    counts = Counter(f["status"] for f in findings)
    page.para(f"{count(counts['clear'], 'rule')} clear, {counts['not_applicable']} not applicable to this run.", 2)
