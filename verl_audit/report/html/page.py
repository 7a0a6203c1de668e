"""The page: sections in their order, one style sheet, a policy that forbids every load."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verl_audit.report.head_block import Document
from verl_audit.report.html.causes import cards, damages, steps
from verl_audit.report.html.findings import findings
from verl_audit.report.html.flow import ledger
from verl_audit.report.html.inputs import inputs
from verl_audit.report.html.interactive import flow_json, plot_json, scripts
from verl_audit.report.html.reward import reward
from verl_audit.report.html.signals import others, timelines
from verl_audit.report.html.traces import per_lag, replicas, shares, survival
from verl_audit.report.html.unjudged import unjudged
from verl_audit.report.html.verdict import verdict
from verl_audit.report.html.words import grouped
from verl_audit.report.page import clean, percent


@dataclass(frozen=True)
class Section:
    """A part of the page: its anchor, its heading, its template, and what the template prints."""

    id: str
    title: str
    template: str
    content: Mapping[str, Any] | None


def render(document: Document, *, interactive: bool = False, include_text: bool = False) -> str:
    """The report of one audit as one HTML file; the same bytes for the same document.

    `interactive` embeds plotly for zoom and hover. `include_text` also shows text of the model in evidence.
    """
    title = f"{clean(document['run']['name'])}: {clean(document['verdict']['outcome'])} · verl-audit"
    return assemble(_sections(document, include_text=include_text), title, _version(document), interactive=interactive)


def _version(document: Document) -> str:
    return clean(document["tool"]["version"])


def _sections(document: Document, *, include_text: bool) -> list[Section]:
    """In the order in which a review asks; what has no data is left out."""
    return [
        Section("verdict", "", "verdict.html", verdict(document)),
        Section("reward", "Reward", "reward.html", reward(document)),
        Section("steps", "The four steps", "steps.html", steps(document)),
        Section("damage", "Causes", "damages.html", damages(document)),
        Section("cards", "Cause by cause", "cards.html", cards(document)),
        Section("lag", "Loss by lag", "figures.html", per_lag(document)),
        Section("survival", "Who survives", "figures.html", survival(document)),
        Section("ledger", "Ledger", "ledger.html", ledger(document)),
        Section("shares", "Shares of the off-policy loss", "shares.html", shares(document)),
        Section("replicas", "Replicas", "replicas.html", replicas(document)),
        Section("time", "Time", "figures.html", timelines(document)),
        Section("others", "What else moved", "figures.html", others(document)),
        Section("unjudged", "Not judged", "unjudged.html", unjudged(document)),
        Section("findings", "Findings", "findings.html", findings(document, include_text=include_text)),
        Section("inputs", "Inputs", "inputs.html", inputs(document)),
    ]


def assemble(
    sections: Sequence[Section], title: str, version: str, *, kind: str = "verl-audit report", interactive: bool = False
) -> str:
    """The sections that have content, as a whole file."""
    css = _text("report.css")
    code = scripts() if interactive else ()
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            kind=kind,
            version=version,
            sections=[s for s in sections if s.content is not None],
            css=Markup(css),
            policy=policy(css, code),
            scripts=[Markup(text) for text in code],
            plot=plot_json if interactive else None,
            plot_flow=flow_json,
        )
    )


def policy(css: str, code: Sequence[str]) -> str:
    """Content security policy: nothing may be loaded, and only this style sheet and these scripts take effect.

    plotly writes styles of its own, so that with scripts the style sheet cannot be held to its hash.
    """
    style = "'unsafe-inline'" if code else _hash(css)
    script = f"; script-src {' '.join(map(_hash, code))}" if code else ""
    return f"default-src 'none'; style-src {style}{script}; base-uri 'none'; form-action 'none'"


def prose(text: str) -> str:
    """Text in which no line breaks between a number and its per cent sign."""
    return text.replace(" %", "\u00a0%")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(name: str) -> str:
    return files("verl_audit.report.html").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("verl_audit.report.html", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Callable[..., Any]] = {"number": grouped, "percent": percent, "prose": prose}
    made.filters.update(filters)
    return made
