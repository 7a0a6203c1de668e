"""Published cases: the expected cause, or undetermined naming the missing signal; never what must not be claimed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_audit import audit

CASES = Path(__file__).parents[2].parent / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the published cases are not beside the repository")

FILES = ("metrics.jsonl", "partial.jsonl", "console.log")
INPUTS = sorted(p for p in CASES.glob("*/*") if p.name in FILES)
CAUSE = {
    "buffer_bias": "eviction",
    "weight_sync": "sync",
    "train_inference_mismatch": "mismatch",
    "staleness": "staleness",
}
DECIDES: Mapping[str, set[str]] = {
    "mismatch": {"gap_prob_mean", "gap_kl", "gap_logp_abs", "lag_oldest_max", "lag_mean", "ess"},
    "staleness": {"lag_newest_mean", "lag_oldest_mean", "lag_oldest_max", "lag_mean", "ess"},
    "eviction": {"stale_groups", "failed_groups", "evicted_lengths", "groups_per_step"},
    "sync": {"lag_oldest_max", "gap_prob_mean", "time_update_weights", "replica_versions"},
}
"""Signals that would decide a cause: an undetermined verdict names one of them."""
FORBIDDEN = {
    "staleness": "staleness",
    "mismatch": "mismatch",
    "train_inference_mismatch": "mismatch",
    "train_inference_mismatch as root cause": "mismatch",
    "precision problem": "mismatch",
    "precision or kernel drift": "mismatch",
    "buffer_bias": "eviction",
    "DAPO filter": "eviction",
}
"""Claims of the cases that are one of the four causes; `alone`, `collapse` and the like are checked by hand below."""
SEVERE = ("medium", "high", "critical")


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def judged(path: Path) -> dict[str, Any]:
    baseline = path.parent / "baseline.jsonl"
    return audit(path, baselines=[baseline] if baseline.exists() else []).document


def expected(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))
    return found


def test_every_input_is_there() -> None:
    assert len(INPUTS) >= 9


@pytest.mark.parametrize("path", INPUTS, ids=named)
def test_expected_cause(path: Path) -> None:
    document = judged(path)
    verdict, cause = document["verdict"], CAUSE.get(expected(path)["primary_cause"])
    if cause is None:
        assert verdict["outcome"] in ("other", "undetermined", "none")
        assert verdict["causes"] == []
    elif verdict["outcome"] == "undetermined" and cause not in verdict["risks"]:
        assert set(verdict["missing"]) & DECIDES[cause]
    else:
        assert cause in {*verdict["causes"], *verdict["risks"]}


@pytest.mark.parametrize("path", INPUTS, ids=named)
def test_nothing_is_claimed_that_must_not_be(path: Path) -> None:
    document = judged(path)
    verdict = document["verdict"]
    fired = {f["cause"] for f in document["findings"] if f["status"] == "fired" and f["severity"] in SEVERE}
    claims = {*verdict["causes"], *verdict["risks"], *fired}
    for text in expected(path)["must_not_claim"]:
        assert FORBIDDEN.get(text) not in claims, text
        if "healthy" in text:
            assert verdict["outcome"] != "none"
        if text == "precision alone":
            assert verdict["causes"] != ["mismatch"]


@pytest.mark.parametrize("path", INPUTS, ids=named)
def test_too_few_steps_clear_no_cause_that_needs_a_measurement(path: Path) -> None:
    """The verdict says that so few lines judge nothing; then no cause may carry a green tick either."""
    document = judged(path)
    if document["run"]["steps_logged"] >= 4 or document["verdict"]["outcome"] == "other":
        return
    assert {c: j["because"] for c, j in document["causes"].items() if j["status"] == "cleared"} == {}


def test_nan_is_other() -> None:
    document = judged(CASES / "agent-r1-30-nan" / "console.log")
    assert document["verdict"]["outcome"] == "other"
    assert "health-nonfinite-updates" in {f["rule"] for f in document["findings"] if f["status"] == "fired"}


def test_placeholder_rows_are_seen_as_gauges_that_contradict() -> None:
    document = judged(CASES / "hpt-probs-diff-placeholder" / "metrics.jsonl")
    assert "health-gauges-contradict" in {f["rule"] for f in document["findings"] if f["status"] == "fired"}
    assert document["causes"]["mismatch"]["status"] == "cannot_tell"


def test_mimo_lag_moves_the_gap() -> None:
    document = judged(CASES / "mimo-flash-20steps" / "metrics.jsonl")
    assert "staleness-gap-follows-lag" in {f["rule"] for f in document["findings"] if f["status"] == "fired"}
    assert not document["causes"]["mismatch"]["risk"]
