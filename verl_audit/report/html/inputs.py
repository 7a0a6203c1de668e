"""What the audit was made from: files, damage, facts, versions, command; and how accurate such audits are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from verl_audit.report.head_block import Document
from verl_audit.report.html.words import grouped
from verl_audit.report.page import clean, count, listed, number

MOST_PROBLEMS = 40
MOST_SOURCES = 60


def inputs(document: Document) -> dict[str, Any]:
    """Sources, skipped files, problems, facts with their reasons, settings, versions, and the command."""
    tool, sources, problems, skipped = (document[k] for k in ("tool", "sources", "problems", "skipped"))
    return {
        "sources": [_source(s) for s in sources[:MOST_SOURCES]],
        "more_sources": max(len(sources) - MOST_SOURCES, 0),
        "problems": [_problem(p) for p in problems[:MOST_PROBLEMS]],
        "more_problems": max(len(problems) - MOST_PROBLEMS, 0),
        "skipped": [(clean(f["path"]), clean(f["reason"])) for f in skipped["files"]],
        "skipped_told": _skipped(skipped),
        "facts": [
            (clean(name), number(f["value"]), clean(f["reason"]))
            for name, f in document["run"]["facts"].items()
            if f["value"] is not None
        ],
        "together": [clean(why) for why in dict.fromkeys(document["run"]["put_together_because"])],
        "versions": _versions(document),
        "settings": [(clean(k), number(v)) for k, v in tool["settings"].items()],
        "command": command_line(document),
        "accuracy": accuracy(),
    }


def command_line(document: Document) -> str:
    """The command that makes this audit again."""
    return shlex.join(clean(word) for word in document["tool"].get("command") or ())


def _source(source: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (grouped(source[k]) for k in ("records", "values_read", "values_lost", "bytes"))
    return (clean(source["path"]), clean(source["format"]), clean(source["role"] or ""), *counts)


def _problem(problem: Mapping[str, Any]) -> tuple[str, ...]:
    place = "" if problem.get("offset") is None else f"byte {number(problem['offset'])}"
    return (
        clean(problem["path"]),
        place,
        clean(problem["kind"]),
        clean(problem["detail"] or ""),
        number(problem["count"]),
    )


def _skipped(skipped: Mapping[str, Any]) -> str:
    told = len(skipped["files"]) + skipped["more"]
    others = skipped["count"] - told
    parts = [f"{skipped['more']} more that may hold what the run logged"] if skipped["more"] else []
    parts += [f"{count(others, 'file')} of other kinds"] if others else []
    return listed(parts, 2)


def _versions(document: Document) -> list[tuple[str, str]]:
    facts = document["run"]["facts"]
    known = [(clean(n), f["value"]) for n, f in facts.items() if n in ("framework", "framework_version")]
    tool = document["tool"]
    return [
        (f"{clean(tool['name'])}", clean(tool["version"])),
        ("audit.json schema", clean(document["schema_version"])),
        *((name.replace("_", " "), clean(value)) for name, value in known if value is not None),
    ]


def accuracy() -> list[str]:
    """Sentences about measured accuracy that ship with the package; none where they were not generated.

    The file holds `{"statement": [sentence, ...]}`.
    """
    file = files("verl_audit.report").joinpath("accuracy.json")
    if not file.is_file():
        return []
    told = json.loads(file.read_text(encoding="utf-8")).get("statement") or []
    return [clean(sentence) for sentence in ([told] if isinstance(told, str) else told)]
