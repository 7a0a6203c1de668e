"""The top of the page: outcome, sentence, confidence, the run, and how much could be judged."""

from __future__ import annotations

import re
from typing import Any

from verl_audit.report.coverage_block import keys_read
from verl_audit.report.head_block import ENDED, NAMES, Document, after_word, died, kind_of, steps_of
from verl_audit.report.html.words import verdict_status
from verl_audit.report.page import clean, count, listed

_CUT = re.compile(r"[:;] (?![^(]*\))|(?<=\.) (?=[A-Z])")
"""Where the headline ends: after its first clause, never inside brackets."""


def verdict(document: Document) -> dict[str, Any]:
    """Everything of the first lines; the sentence is cut for two sizes of type."""
    said, run = document["verdict"], document["run"]
    status = verdict_status(said["outcome"])
    sentence = after_word(clean(said["sentence"]), status.word.upper())
    first, rest = headline(sentence, clean(said["outcome"]))
    return {
        "status": status,
        "crashed": run["last_step"] if run["ended"] == "crashed" else None,
        "sentence": first,
        "rest": rest,
        "confidence": clean(said["confidence"]),
        "because": clean(said["because"]),
        "coverage": coverage_line(document),
        "error": run["last_error"] if died(run) else None,
        "run": clean(run["name"]),
        "about": f"{kind_of(run['facts'])}, {steps_of(run)}, {ENDED.get(run['ended'], clean(run['ended']))}",
        "baselines": [(clean(b["name"]), kind_of(b["facts"])) for b in document["baselines"]],
    }


def headline(sentence: str, outcome: str) -> tuple[str, str]:
    """The first clause of a verdict, and the rest: of a named cause up to the bracket with the numbers."""
    if outcome == "cause" and " (" in sentence:
        head, rest = sentence.split(" (", 1)
        rest = _without_closing(rest)
    else:
        head, *parts = _CUT.split(sentence, maxsplit=1)
        rest = parts[0] if parts else ""
    return head.rstrip("."), rest[:1].upper() + rest[1:]


def _without_closing(text: str) -> str:
    """The text without the first bracket that closes more than was opened in it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return text[:i] + text[i + 1 :]
    return text


def coverage_line(document: Document) -> str:
    """How many of the causes and rules could be judged, and from how many metric keys."""
    causes = document["causes"]
    open_ = [clean(name) for name, c in causes.items() if c["status"] == "cannot_tell" and not c["risk"]]
    rules = [f for f in document["findings"] if f["status"] in ("fired", "clear")]
    asked = [f for f in document["findings"] if f["status"] != "not_applicable"]
    told = f"{len(causes) - len(open_)} of {len(causes)} causes judged"
    told += f" (not {listed([NAMES.get(name, name) for name in open_], 4)})" if open_ else ""
    read = keys_read(document["coverage"]["keys"])
    return f"{told}; {len(rules)} of {count(len(asked), 'rule')} that apply had data; {read}."
