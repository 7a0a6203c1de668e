"""Words and shapes of the page that no audit document holds: what each step asks, what each cause is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_audit.report.head_block import OUTCOMES, standing_of
from verl_audit.report.page import clean, number


@dataclass(frozen=True)
class Cause:
    """What a reader must know of a cause before its evidence."""

    asks: str
    is_: str
    refuted: str


@dataclass(frozen=True)
class Status:
    """A shape and words, which carry the meaning; `tone` is the colour that repeats it."""

    shape: str
    word: str
    tone: str


CAUSES: Mapping[str, Cause] = {
    "mismatch": Cause(
        "Do rollout engine and trainer agree about the same weights?",
        "Rollout engine and trainer compute different log-probabilities for the same weights: kernels, precision, "
        "MoE routing or sampling parameters. It is there at lag 0, and in synchronous runs.",
        "A gap at lag 0 no larger than that of a synchronous run with the same numerics.",
    ),
    "staleness": Cause(
        "Are samples trained on after the weights have moved on?",
        "Samples come from weights several versions old. The loss grows with the lag and is zero at lag 0.",
        "The same loss of signal on the samples with lag 0, or a reward that does not recover when the lag is halved.",
    ),
    "eviction": Cause(
        "Is what was trained on still what was generated?",
        "Stale drop, filters, failed groups or completion order take groups out, so that the trained distribution "
        "is no longer the generated one.",
        "Evicted and trained groups with equal lengths, difficulty and reward: eviction then took a random part.",
    ),
    "sync": Cause(
        "Did every weight sync reach every replica, in time?",
        "A weight sync is slow, partial or never delivered, or one replica is left behind.",
        "The same policy version on every replica after each sync, and a gap that falls after each of them.",
    ),
}
TONES: Mapping[str, str] = {
    "implicated": "bad",
    "contributing": "bad",
    "at work (risk)": "warn",
    "cleared": "good",
    "cannot tell": "open",
}
SEVERITIES: Mapping[str, Status] = {
    "critical": Status("■", "critical", "bad"),
    "high": Status("◆", "high", "bad"),
    "medium": Status("▲", "medium", "warn"),
    "low": Status("▼", "low", "open"),
    "info": Status("○", "info", "open"),
}
RULES: Mapping[str, Status] = {
    "error": Status("✕", "broken", "bad"),
    "insufficient": Status("?", "without data", "open"),
    "clear": Status("✓", "clear", "good"),
    "not_applicable": Status("–", "not applicable", "open"),
}
VERDICTS: Mapping[str, tuple[str, str]] = {
    "cause": ("●", "bad"),
    "other": ("■", "bad"),
    "none": ("✓", "good"),
    "undetermined": ("?", "warn"),
}


def verdict_status(outcome: str) -> Status:
    """How an outcome is shown."""
    shape, tone = VERDICTS.get(outcome, ("?", "open"))
    word = OUTCOMES[outcome][0] if outcome in OUTCOMES else clean(outcome)
    return Status(shape, word.capitalize(), tone)


def cause_status(cause: Mapping[str, Any]) -> Status:
    """How the standing of a cause is shown."""
    shape, _, word, _ = standing_of(cause)
    return Status(shape, word, TONES.get(word, "open"))


def severity_status(severity: object) -> Status:
    """How the severity of a finding is shown."""
    return SEVERITIES.get(clean(severity), Status("?", clean(severity), "open"))


def grouped(value: object) -> str:
    """A number as `number` gives it, from five digits on with commas between thousands."""
    text = number(value)
    return f"{int(text):,}" if text.isdigit() and len(text) >= 5 else text
