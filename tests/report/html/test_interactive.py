"""The interactive report: plotly as it is published, its figures valid, and no address left in the file."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import plotly.graph_objects as go
import plotly.offline
import pytest

from tests.report.html.pages import page, parsed

PLOTS = re.compile(r'<script type="application/json" id="[^"]*">(.*?)</script>', re.DOTALL)
CASES = ("stale", "undetermined", "traced", "compared")


@pytest.mark.parametrize("case", CASES)
def test_every_figure_is_valid_for_plotly(case: str) -> None:
    html = page(case, interactive=True)
    plots = [json.loads(text) for text in PLOTS.findall(html)]
    assert len(plots) == [tag for tag, _ in parsed(page(case)).tags].count("figure")
    for plot in plots:
        go.Figure(plot)  # raises for a property that plotly does not have


def test_the_bundle_is_that_of_the_plotly_that_checks_it() -> None:
    bundle = files("verl_audit.report.html").joinpath("vendor/plotly-basic.min.js").read_text(encoding="utf-8")
    assert f"v{plotly.offline.get_plotlyjs_version()}" in bundle[:400]


def test_it_holds_plotly_once_and_no_address() -> None:
    html = page("undetermined", interactive=True)
    assert html.count("plotly.js (basic - minified)") == 1
    addresses = re.findall(r"[a-z]+://[^\s\"'`)]*", html.replace("pkg://", ""))
    assert {a.split("/")[2] for a in addresses} == {"www.w3.org"}  # names of XML namespaces
    assert 1_200_000 < len(html.encode()) < 1_500_000
    assert "showSendToCloud: false" in html and 'plotlyServerURL: ""' in html


def test_the_policy_names_the_scripts() -> None:
    html = page("undetermined", interactive=True)
    (policy,) = (a["content"] for t, a in parsed(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.count("sha256-") == 2 and "unsafe-eval" not in policy
