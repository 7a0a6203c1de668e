"""The whole page, without a browser: what it says, and that it can neither fetch nor run anything."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.report.html.pages import CASES, LONG_STEPS, ROOT, comparison, document, page, parsed
from verl_audit.report.html.page import render
from verl_audit.report.html.verdict import headline

LARGEST = 300_000
"""Bytes that a static report may have."""


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_sound_document(case: str) -> None:
    found = parsed(page(case))
    ids = found.values("id")
    assert len(ids) == len(set(ids)), [i for i in ids if ids.count(i) > 1]
    assert {href.removeprefix("#") for href in found.values("href")} <= set(ids)
    named = " ".join(found.values("aria-labelledby") + found.values("for")).split()
    assert set(named) <= set(ids)
    assert [tag for tag, _ in found.tags].count("h1") == 1
    headings = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b - a <= 1 for a, b in pairwise(headings))


@pytest.mark.parametrize("case", CASES)
def test_it_can_fetch_nothing(case: str) -> None:
    html = page(case)
    found = parsed(html)
    assert {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object", "form", "base"} == set()
    assert found.values("src") + found.values("style") + found.values("onclick") == []
    assert all(href.startswith("#") for href in found.values("href"))
    html = html.replace("pkg://", "")  # verl's way to name a module of Python: no browser knows it
    assert "://" not in html and "url(" not in html and "@import" not in html


@pytest.mark.parametrize("case", ["undetermined", "compared"])
def test_the_policy_allows_this_style_sheet_and_nothing_else(case: str) -> None:
    html = page(case)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (a["content"] for t, a in parsed(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("case", CASES)
def test_it_is_small(case: str) -> None:
    size = len(page(case).encode())
    assert size <= LARGEST, size
    assert document("long")["run"]["steps_logged"] == LONG_STEPS


def test_the_same_bytes_in_two_processes() -> None:
    code = """
import hashlib
from verl_audit import audit
from verl_audit.report.html.page import render
found = audit("fixtures/real/async_drop_bias", baselines=["fixtures/real/sync_baseline"]).document
print(*(hashlib.sha256(render(found, interactive=i).encode()).hexdigest() for i in (False, True)))
"""
    seeds = ("1", "271828")
    told = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": s}, cwd=ROOT, check=True, capture_output=True
        )
        for s in seeds
    ]
    assert told[0].stdout == told[1].stdout
    assert len(told[0].stdout.split()) == 2


def test_a_kept_document_gives_the_same_page() -> None:
    kept = json.loads(json.dumps(document("undetermined")))
    assert render(kept) == page("undetermined")


def text_of(html: str) -> str:
    """The words of a page in order."""
    return " ".join(" ".join(parsed(html).text).split())


ORDER = ["Reward", "The four steps", "Causes", "Cause by cause", "Loss by lag", "Who survives", "Ledger"]
ORDER += ["Shares of the off-policy loss", "Replicas", "Time", "What else moved", "Not judged", "Findings", "Inputs"]


def test_sections_come_in_the_order_of_a_review() -> None:
    html = page("traced")
    assert re.findall(r'<h2 id="[^"]*">(.*?)</h2>', html) == ORDER
    assert html.index("Confidence medium") < html.index("<h1>") < html.index(">Coverage<") < html.index("<h2 id=")


def test_sections_without_data_are_left_out() -> None:
    for case, absent in {
        "undetermined": ["Loss by lag", "Who survives", "Shares of the off-policy loss", "Replicas"],
        "crashed": ["Reward", "Causes", "Cause by cause", "Ledger", "Time"],
    }.items():
        titles = re.findall(r"<h2 [^>]*>(.*?)</h2>", page(case))
        assert titles and not set(absent) & set(titles)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("healthy", ["✓ No cause", "No cause at work", "4 of 4 causes judged", "2.04 (1.25 to 3.35)"]),
        ("stale", ["● Cause", "Staleness: reward is slower", "● implicated", "began to fall behind"]),
        ("mismatched", ["? Undetermined", "Train-inference mismatch is at work", "▲ at work (risk)"]),
        ("evicted", ["● Cause", "Eviction bias: reward is slower", "Cheap experiment", "price:"]),
        ("undetermined", ["140 stale (12.7%)", "verl-audit diagnose async_drop_bias --baseline sync_baseline"]),
        (
            "undetermined",
            ["per-trajectory traces with a row for every evicted trajectory", "not to be read as performance"],
        ),
        ("crashed", ["■ Other", "The run died before its first training step", "TypeError: Logger._log()"]),
        ("traced", ["690,000 tokens generated", "bracket of mismatch: 25.0% to 50.0%", "19,000 unaccounted"]),
        ("compared", ["1 of 2 runs learned slower than sync", "▲ recovered", "max_off_policy_threshold"]),
    ],
)
def test_it_says(case: str, words: list[str]) -> None:
    told = text_of(page(case))
    assert [w for w in words if w not in told] == []


def test_every_finding_that_fired_has_its_anchor_evidence_and_query() -> None:
    ids = parsed(page("undetermined")).values("id")
    fired = [f for f in document("undetermined")["findings"] if f["status"] == "fired"]
    assert len(fired) >= 5
    for finding in fired:
        assert finding["rule"] in ids
        assert f"{finding['rule']}-e1" in ids
    assert text_of(page("undetermined")).count("verl-audit sql RUN_DIR") >= len(fired)


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'


def hostile() -> dict[str, Any]:
    """A document in which every text of the run is an attack."""
    made = copy.deepcopy(document("undetermined"))
    made["run"]["name"] = HOSTILE
    made["run"]["last_error"] = {"exception": HOSTILE, "frames": [HOSTILE], "path": HOSTILE, "offset": 3}
    made["run"]["ended"] = "crashed"
    for line in (q["lines"][0] for q in [*made["series"]["reward"], *made["series"]["signals"]]):
        line["run"] = HOSTILE
    made["sources"][0]["path"] = HOSTILE
    made["problems"] = [{"path": HOSTILE, "offset": 1, "kind": HOSTILE, "detail": HOSTILE, "count": 1}]
    made["coverage"]["unknown_keys"] = [HOSTILE]
    finding = next(f for f in made["findings"] if f["status"] == "fired")
    finding["evidence"]["rows"] = [{"step": 1, "note": HOSTILE, "response": "the model wrote this"}]
    return made


@pytest.mark.parametrize("interactive", [False, True])
def test_text_of_a_run_stays_text(interactive: bool) -> None:
    html = render(hostile(), interactive=interactive)
    found = parsed(html)
    scripts = [attrs for tag, attrs in found.tags if tag == "script"]
    assert all(attrs.get("type") == "application/json" for attrs in scripts[: -2 if interactive else None])
    assert "img" not in {tag for tag, _ in found.tags}
    assert HOSTILE in " ".join(found.text)


def test_text_of_the_model_is_shown_on_request_only() -> None:
    assert "the model wrote this" not in render(hostile())
    assert "Left out, as text of the model or the data: response" in text_of(render(hostile()))
    assert "the model wrote this" in render(hostile(), include_text=True)


def test_a_document_without_series_is_still_a_page() -> None:
    made = {**document("undetermined"), "series": {}}
    titles = re.findall(r"<h2 [^>]*>(.*?)</h2>", render(made))
    assert "Findings" in titles and "Time" not in titles


@pytest.mark.parametrize(
    ("sentence", "outcome", "told"),
    [
        ("No slowdown is shown: speed 1.", "none", ("No slowdown is shown", "Speed 1.")),
        ("At work (a: 1; b), but no: why.", "undetermined", ("At work (a: 1; b), but no", "Why.")),
        ("Lag: it is slow (speed 0.4 (90 %)); lost.", "cause", ("Lag: it is slow", "Speed 0.4 (90 %); lost.")),
        ("The run died.", "other", ("The run died", "")),
        ("It died: A. B.", "other", ("It died", "A. B.")),
    ],
)  # fmt: skip
def test_the_headline_is_the_first_clause(sentence: str, outcome: str, told: tuple[str, str]) -> None:
    assert headline(sentence, outcome) == told


def test_the_comparison_says_what_one_key_did() -> None:
    changes = {(c["before"], c["after"]): c for c in comparison()["interventions"]}
    assert {pair: c["outcome"] for pair, c in changes.items()} == {
        ("sync", "lagging"): "slower",
        ("lagging", "lowered"): "faster",
    }
    assert changes["lagging", "lowered"]["key"].endswith("max_off_policy_threshold")
