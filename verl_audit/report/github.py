"""The audit document as annotations of GitHub Actions, and as the summary of the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from verl_audit.errors import AuditError
from verl_audit.report.findings_block import fired_findings
from verl_audit.report.head_block import Document
from verl_audit.report.markdown import render_markdown
from verl_audit.report.page import clean

LEVELS = {"critical": "error", "high": "error", "medium": "warning", "low": "notice", "info": "notice"}
MOST = 9
"""Findings of a kind: GitHub shows 10 annotations of a kind and step, and the verdict is a notice."""
SUMMARY_BYTES = 1_000_000
"""A summary above 1 MiB is not shown at all."""


def render_github(document: Document) -> str:
    """One line an annotation: the verdict, then what fired, gravest first."""
    return "".join(f"{line}\n" for line in _annotations(document))


def append_summary(document: Document, file: Path) -> None:
    """Add the Markdown report to the job summary, as the file named by GITHUB_STEP_SUMMARY."""
    text = render_markdown(document)
    if len(text.encode()) > SUMMARY_BYTES:
        text = text.encode()[:SUMMARY_BYTES].decode(errors="ignore") + "\n\n(cut)\n"
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise AuditError(f"{file}: {error.strerror or error}") from None


def _annotations(document: Document) -> Iterator[str]:
    verdict = document["verdict"]
    yield _line("notice", f"verl-audit: {clean(document['run']['name'])}", verdict["sentence"])
    seen: Counter[str] = Counter()
    for finding in fired_findings(document):
        level = LEVELS.get(finding["severity"], "notice")
        seen[level] += 1
        if seen[level] <= MOST:
            yield _line(level, f"{clean(finding['rule'])} ({clean(finding['severity'])})", finding["explain"])


def _line(level: str, title: str, message: object) -> str:
    """A workflow command; without the escapes a log could write commands of its own."""
    return f"::{level} title={_property(title)}::{_data(clean(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
