"""The end of the page: the accuracy statement is there when it was generated, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.html.pages import document
from verl_audit.report.html import inputs
from verl_audit.report.html.page import render


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package's own."""
    monkeypatch.setattr(inputs, "files", lambda _: tmp_path)
    return tmp_path


def test_no_statement_is_shown_where_none_was_generated(shipped: Path) -> None:
    assert inputs.accuracy() == []
    assert ">Accuracy<" not in render(document("healthy"))


def test_the_statement_is_shown_as_text(shipped: Path) -> None:
    (shipped / "accuracy.json").write_text('{"statement": ["Right in 9 of 10 <b>runs</b>."]}', encoding="utf-8")
    html = render(document("healthy"))
    assert ">Accuracy<" in html and "Right in 9 of 10 &lt;b&gt;runs&lt;/b&gt;." in html


def test_the_command_can_be_pasted() -> None:
    tool = {"tool": {"command": ["verl-audit", "diagnose", "my run", "--set", "run_sd=0.2"]}}
    assert inputs.command_line(tool) == "verl-audit diagnose 'my run' --set run_sd=0.2"
    assert inputs.command_line({"tool": {}}) == ""
