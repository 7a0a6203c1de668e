"""The forms in which an audit document is written to a file or a stream."""

from __future__ import annotations

import os
from pathlib import Path

from verl_audit.errors import AuditError
from verl_audit.report.github import append_summary, render_github
from verl_audit.report.head_block import Document
from verl_audit.report.html.page import render
from verl_audit.report.junit import render_junit
from verl_audit.report.markdown import render_markdown

SUMMARY = "GITHUB_STEP_SUMMARY"
"""Variable in which GitHub Actions names the file of the job summary."""


def rendered(document: Document, form: str, *, interactive: bool = False, include_text: bool = False) -> str:
    """The document as html, markdown, junit or github; `AuditError` where a kept one has lost a part."""
    try:
        if form == "html":
            return render(document, interactive=interactive, include_text=include_text)
        plain = {"markdown": render_markdown, "junit": render_junit, "github": render_github}
        return plain[form](document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise AuditError(f"the audit document is not whole: {error!r}") from error


def append_job_summary(document: Document) -> None:
    """Add the Markdown report to the summary of the GitHub job this runs in, if it runs in one."""
    if os.environ.get(SUMMARY):
        append_summary(document, Path(os.environ[SUMMARY]))
