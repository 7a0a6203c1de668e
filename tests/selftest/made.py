"""A few judged runs, written by hand."""

from __future__ import annotations

from verl_audit.selftest.score import Answer, Judged, Truth

STALE = Truth(frozenset({"staleness"}), frozenset({"staleness"}), None, 0.5)
TWO = Truth(frozenset({"mismatch", "sync"}), frozenset({"mismatch", "sync"}), None, 0.5)
HARMLESS = Truth(frozenset(), frozenset(), None, 1.0)
SLOW_BY_OTHER = Truth(frozenset(), frozenset(), "repeated data", 0.5)
RUNS = [
    Judged("stale_bypass", "small", 0, "metrics", STALE, Answer("cause", ("staleness",))),
    Judged("stale_bypass", "small", 1, "metrics", STALE, Answer("cause", ("eviction",))),
    Judged("frozen_and_fp4", "small", 0, "metrics", TWO, Answer("cause", ("sync",))),
    Judged("async", "small", 0, "metrics", HARMLESS, Answer("none")),
    Judged("data_repeated", "small", 0, "metrics", SLOW_BY_OTHER, Answer("cause", ("sync",))),
]
