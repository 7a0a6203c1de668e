"""Markdown, JUnit and GitHub: small, escaped, the same words as the terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.report.test_terminal import cause, document, finding, verdict
from verl_audit import AuditError
from verl_audit.report.forms import append_job_summary, rendered
from verl_audit.report.github import MOST, append_summary, render_github
from verl_audit.report.junit import render_junit
from verl_audit.report.markdown import MARK, render_markdown

EVIL = "a | b <img src=x> @someone `code` *bold*\n::error::owned %0A \x1b[31m"


def hostile() -> dict[str, Any]:
    made = document(findings=[finding(title=EVIL, explain=EVIL, decisive=EVIL)])
    made["run"]["name"] = EVIL
    made["causes"]["mismatch"] = cause(because=EVIL)
    return made


def test_markdown_says_verdict_causes_findings_and_what_is_missing() -> None:
    text = render_markdown(document())
    assert text.startswith(f"{MARK}\n\n## Undetermined: toy\n")
    assert "**Confidence** " in text
    assert "| 3 | eviction bias | ▲ at work (risk) | 6.9% (0.0% to 12.7%) | measured |" in text
    assert "- **medium** Groups were evicted as stale (`eviction-stale-groups`)" in text
    assert "### What would decide it" in text and "- stale\\_groups: `set fates=true`" in text
    assert "(`blind`)" not in text  # info


def test_markdown_of_a_hostile_run_is_text() -> None:
    text = render_markdown(hostile())
    assert "<img" not in text.replace("\\<img", "") and "@someone" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 6


def cases(text: str) -> dict[str, list[str]]:
    suite = ElementTree.fromstring(text)[0]
    return {str(c.get("name")): [child.tag for child in c] for c in suite}


def test_junit_fails_from_medium_on() -> None:
    rules = [
        finding("grave", severity="high"),
        finding("seen", severity="low"),
        finding("quiet", status="clear"),
        finding("blind", status="insufficient", missing=[{"measure": "ess", "because": "not logged"}]),
        finding("elsewhere", status="not_applicable"),
        finding("broken", status="error", error="no such measure"),
    ]
    text = render_junit(document(findings=rules))
    assert cases(text) == {
        "verdict": ["skipped"],
        "grave": ["failure"],
        "seen": ["system-out"],
        "quiet": [],
        "blind": ["skipped"],
        "elsewhere": ["skipped"],
        "broken": ["error"],
    }
    root = ElementTree.fromstring(text)
    assert root.attrib == {"name": "verl-audit", "tests": "7", "failures": "1", "errors": "1", "skipped": "3"}
    assert "ess: not logged" in text


@pytest.mark.parametrize(("outcome", "tag"), [("cause", "failure"), ("none", "system-out"), ("other", "failure")])
def test_junit_of_a_verdict(outcome: str, tag: str) -> None:
    assert cases(render_junit(document(verdict=verdict(outcome=outcome))))["verdict"] == [tag]


def test_junit_of_a_hostile_run_is_well_formed() -> None:
    assert "a | b <img src=x>" in str(ElementTree.fromstring(render_junit(hostile()))[0].get("name"))


def test_github_annotations_are_one_line_each_and_few() -> None:
    many = [finding(f"rule-{i}", severity="medium", title=f"Finding {i}") for i in range(30)]
    lines = render_github(document(findings=many)).splitlines()
    assert lines[0].startswith("::notice title=verl-audit%3A toy::Undetermined")
    assert [line.split(" ")[0] for line in lines[1:]] == ["::warning"] * MOST
    evil = render_github(hostile()).splitlines()
    assert len(evil) == 2 and all(line.startswith(("::notice title=", "::warning title=")) for line in evil)
    assert "%250A" in evil[1]


def test_the_job_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    append_job_summary(document())
    assert summary.read_text(encoding="utf-8") == "before\n" + render_markdown(document())
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    append_job_summary(document())
    with pytest.raises(AuditError, match="absent"):
        append_summary(document(), tmp_path / "absent" / "summary.md")


@pytest.mark.parametrize("form", ["html", "markdown", "junit", "github"])
def test_a_document_that_lost_a_part_is_an_error_and_no_crash(form: str) -> None:
    broken = document()
    del broken["verdict"]
    with pytest.raises(AuditError, match="not whole"):
        rendered(broken, form)
