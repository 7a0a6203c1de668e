"""The audit document as JUnit XML: one test case a rule, and one for the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from verl_audit.diagnose.rules import SEVERITIES
from verl_audit.report.head_block import Document
from verl_audit.report.page import clean

FAILS_FROM = "medium"
"""Severity from which a finding that fired is a failure; below it the case passes and says what was seen."""

KINDS: Mapping[str, str] = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(document: Document) -> str:
    """Fired rules fail from medium severity on, rules without data are skipped with the reason, broken ones err."""
    root = ElementTree.Element("testsuites", name="verl-audit")
    suite = ElementTree.SubElement(root, "testsuite", name=clean(document["run"]["name"]))
    _verdict(suite, document["verdict"])
    for finding in document["findings"]:
        case = ElementTree.SubElement(suite, "testcase", classname=_class(finding), name=clean(finding["rule"]))
        _outcome(case, finding)
    counts = {"tests": len(suite), **{name: len(suite.findall(f"testcase/{kind}")) for name, kind in KINDS.items()}}
    for element in (root, suite):
        element.attrib |= {name: str(n) for name, n in counts.items()}
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _class(finding: Mapping[str, Any]) -> str:
    return f"step{finding['step']}.{clean(finding['cause'])}"


def _verdict(suite: ElementTree.Element, verdict: Mapping[str, Any]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="verdict", name="verdict")
    sentence = clean(verdict["sentence"])
    kind = {"cause": "failure", "other": "failure", "undetermined": "skipped"}.get(verdict["outcome"])
    if kind is None:
        ElementTree.SubElement(case, "system-out").text = sentence
    else:
        ElementTree.SubElement(case, kind, message=sentence)


def _outcome(case: ElementTree.Element, finding: Mapping[str, Any]) -> None:
    status, title = finding["status"], clean(finding["title"])
    if status == "fired":
        grave = SEVERITIES.index(finding["severity"]) >= SEVERITIES.index(FAILS_FROM)
        told = ElementTree.SubElement(case, "failure", message=title) if grave else None
        told = ElementTree.SubElement(case, "system-out") if told is None else told
        told.text = f"{clean(finding['severity'])}: {clean(finding['explain'])}"
    elif status == "error":
        ElementTree.SubElement(case, "error", message=clean(finding["error"] or "the rule is broken"))
    elif status == "insufficient":
        why = "; ".join(f"{clean(m['measure'])}: {clean(m['because'])}" for m in finding["missing"])
        ElementTree.SubElement(case, "skipped", message=f"without data: {why}")
    elif status == "not_applicable":
        ElementTree.SubElement(case, "skipped", message="not applicable to this run")
