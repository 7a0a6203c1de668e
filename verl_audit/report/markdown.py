"""The audit document as Markdown for a pull request, a chat or a job summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl_audit.report.findings_block import fired_findings
from verl_audit.report.head_block import (
    NAMES,
    OUTCOMES,
    STATES,
    Document,
    after_word,
    damage_of,
    kind_of,
    missing_settings,
    ranged,
    ratio,
    standing_of,
    steps_of,
    without_steps,
)
from verl_audit.report.page import clean, count

MARK = "<!-- verl-audit report -->"
"""First line of every such file."""
MOST_FINDINGS = 12
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~$])")


def render_markdown(document: Document) -> str:
    """Verdict, reward, the four causes, findings that fired and what would decide the rest."""
    verdict = document["verdict"]
    word = OUTCOMES.get(verdict["outcome"], (clean(verdict["outcome"]).upper(), ""))[0]
    sentence = after_word(clean(verdict["sentence"]), word)
    parts = [
        MARK,
        f"## {word.capitalize()}: {escaped(document['run']['name'])}",
        escaped(sentence),
        f"**Confidence** {escaped(verdict['confidence'])}: {escaped(verdict['because'])}",
        "\n".join(_about(document)),
        *([] if without_steps(document["run"]) else ["\n".join(_causes(document))]),
        *_listed("Findings", _findings(document)),
        *_listed(
            "What would decide it", (f"{escaped(names)}: `{code(how)}`" for names, how in missing_settings(document))
        ),
        f"<sub>verl-audit {escaped(document['tool']['version'])}</sub>",
    ]
    return "\n\n".join(parts) + "\n"


def escaped(value: object) -> str:
    """Text that Markdown shows as it is; an @ calls nobody."""
    return _SPECIAL.sub(r"\\\1", clean(value)).replace("@", "&#64;")


def code(value: object) -> str:
    """Text for between backticks."""
    return clean(value).replace("`", "'")


def _about(document: Document) -> Iterator[str]:
    run, symptom = document["run"], document["symptom"]
    yield f"- Run: {escaped(kind_of(run['facts']))}, {escaped(steps_of(run))}"
    for baseline in document["baselines"]:
        yield f"- Baseline: {escaped(baseline['name'])}, {escaped(kind_of(baseline['facts']))}"
    yield f"- Reward: {escaped(STATES.get(symptom['state'], symptom['state']))}"
    speeds = [f"{ratio_of(s)} {clean(name).replace('_', ' ')}" for name, s in _known(symptom)]
    if speeds:
        yield f"- Learning speed, the baseline's = 1: {', '.join(speeds)}"


def ratio_of(speed: Mapping[str, Any]) -> str:
    """A learning speed with its interval."""
    return ranged(ratio(speed["value"]), ratio(speed["low"]), ratio(speed["high"]))


def _known(symptom: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, s) for name, s in symptom["speed"].items() if s]


def _causes(document: Document) -> Iterator[str]:
    yield "| step | cause | status | signal lost (range) | because |"
    yield "|---|---|---|---|---|"
    for step, (name, cause) in enumerate(document["causes"].items(), 1):
        shape, _, word, _ = standing_of(cause)
        cells = (str(step), NAMES.get(name, name), f"{shape} {word}", damage_of(cause) or "–", cause["because"])
        yield "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def _findings(document: Document) -> Iterator[str]:
    found = [f for f in fired_findings(document) if f["severity"] != "info"]
    for f in found[:MOST_FINDINGS]:
        decisive = "" if clean(f["decisive"]) == clean(f["title"]) else f": {escaped(f['decisive'])}"
        yield f"**{escaped(f['severity'])}** {escaped(f['title'])} (`{code(f['rule'])}`){decisive}"
    if len(found) > MOST_FINDINGS:
        yield f"and {count(len(found) - MOST_FINDINGS, 'more finding')}"


def _listed(title: str, lines: Iterator[str]) -> list[str]:
    told = [f"- {line}" for line in lines]
    return [f"### {title}", "\n".join(told)] if told else []
