"""What a configuration will let an audit decide: the run it would make, seen through the same coverage and rules."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_audit.diagnose.clearing import LAG0_GAP
from verl_audit.diagnose.coverage import TRACES_ONLY, Entry, coverage
from verl_audit.diagnose.evaluate import Finding, RuleSet
from verl_audit.diagnose.rules import SEVERITIES
from verl_audit.ingest.adapters import load_adapters, map_keys, setting_for
from verl_audit.ingest.detect import RECORDER, detect, plain
from verl_audit.measure.model import Scalar
from verl_audit.measure.run import RunData, Series
from verl_audit.measure.speed import MIN_VALIDATION
from verl_audit.preflight.configuration import configuration
from verl_audit.preflight.predict import Prediction, predict
from verl_audit.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Decidable = Literal["yes", "in part", "no"]
STEPS = np.arange(1.0, 101.0)
"""Steps of the imagined run; enough for every count that coverage makes."""
SAMPLER = "trainer.v1.sampler.custom_sampler"
RECORD_ONLY = frozenset({*TRACES_ONLY, LAG0_GAP})
"""Signals that the recorder adds."""
RECORDING = (
    "config-gap-not-recorded",
    "config-bypass-unmeasured",
    "config-lag-unrecorded-bypass",
    "config-no-validation",
    "config-validation-rare",
    "config-console-only",
)
"""Rules whose first remedy records what a judgement needs."""


@dataclass(frozen=True)
class Answer:
    """Whether a cause (or the symptom) will be decidable, and the standing of each signal it needs."""

    cause: str
    decidable: Decidable
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Paste:
    """Overrides to add to the command line, what they record, and their price."""

    overrides: str
    records: str
    price: str


@dataclass(frozen=True)
class Preflight:
    """The answer to one configuration."""

    sources: tuple[str, ...]
    facts: Mapping[str, Scalar | None]
    answers: tuple[Answer, ...]
    paste: tuple[Paste, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...] = ()
    """Keys and values that look misspelt."""
    prediction: Prediction | None = None

    def worst(self) -> int:
        """Index in `SEVERITIES` of the gravest finding that fired, a problem being medium; -1 if there is none."""
        found = [*(f.severity for f in self.findings), *("medium" for _ in self.problems)]
        return max(map(SEVERITIES.index, found), default=-1)


def preflight(
    path: Path | None,
    overrides: Sequence[str],
    rules: RuleSet,
    settings: Settings | None = None,
    profile: Path | None = None,
) -> Preflight:
    """Judge a configuration before its run. `profile` is a finished run of the same model for predictions.

    Raises `AuditError` where the configuration or the profile cannot be used, or verl would refuse an override.
    """
    given = configuration(path, overrides)
    facts = plain(detect([], given.tree, given=(settings or Settings()).facts))
    is_recorded = RECORDER in str(_at(given.tree, f"{SAMPLER}.path"))
    findings = tuple(f for f in rules.evaluate(facts) if f.status in ("fired", "error"))
    found = coverage(imagined(facts), _setting)
    return Preflight(
        sources=given.sources,
        facts=facts,
        answers=tuple(_answer(cause, entries, is_recorded) for cause, entries in found.items()),
        paste=_paste(findings, facts, is_recorded),
        findings=findings,
        problems=given.problems,
        prediction=predict(facts, profile) if profile is not None else None,
    )


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _adapter() -> Any:
    return next(a for a in load_adapters() if a.framework == "verl")


def _setting(signal: str) -> str | None:
    return setting_for(signal, _adapter())


def imagined(facts: Mapping[str, Scalar | None]) -> RunData:
    """The run that this configuration would make, as far as coverage looks: which signals, and which are inert.

    Values say nothing, except that lag is 0 where rollouts do not overlap training and above it elsewhere.
    """
    mapping = map_keys(_adapter(), expected_keys(facts), facts)
    lag = 0.0 if facts.get("is_async") is False else 1.0
    series = {
        m.signal: Series(STEPS, np.full(len(STEPS), lag if m.signal.startswith("lag_") else 0.5))
        for m in mapping.mapped
    }
    for implied in mapping.implied:
        series.setdefault(implied.signal, Series(STEPS, np.zeros(len(STEPS))))
    inert = {m.signal: m.inert_because for m in mapping.mapped if m.inert_because}
    return RunData("preflight", series, inert=inert, facts=facts)


def expected_keys(facts: Mapping[str, Scalar | None]) -> list[str]:
    """Keys that verl will log under these facts, of those that coverage asks for."""
    text = files("verl_audit.preflight").joinpath("expected.toml").read_text(encoding="utf-8")
    frequency = facts.get("test_freq")
    steps = facts.get("total_steps")
    often = isinstance(frequency, float) and (not isinstance(steps, float) or MIN_VALIDATION * frequency <= steps)
    known = {**facts, "validates": often and isinstance(frequency, float) and frequency > 0}
    return [
        name
        for group in tomllib.loads(text)["keys"]
        if all(known.get(fact) in allowed for fact, allowed in group["when"].items())
        for name in group["names"]
    ]


def _answer(cause: str, entries: Sequence[Entry], is_recorded: bool) -> Answer:
    seen = tuple(
        Entry(e.signal, "present", "the recorder writes it") if is_recorded and e.signal in RECORD_ONLY else e
        for e in entries
    )
    there = [e.standing in ("present", "derivable") for e in seen]
    # A lesser gauge that cannot move by construction is no gap that a setting could close.
    closed = all(ok or e.standing == "inert" for ok, e in zip(there, seen, strict=True))
    decidable: Decidable = "no" if not there[0] else "yes" if closed else "in part"
    return Answer(cause, decidable, seen)


def _paste(findings: Sequence[Finding], facts: Mapping[str, Scalar | None], is_recorded: bool) -> tuple[Paste, ...]:
    fired = {f.rule: f for f in findings if f.status == "fired"}
    made = [
        Paste(fired[name].remedy[0]["set"], fired[name].title, fired[name].remedy[0]["price"])
        for name in RECORDING
        if name in fired
    ]
    trainer = facts.get("trainer")
    if not is_recorded and trainer in ("sync", "colocate_async", "separate_async"):
        name = "AuditReplayBuffer" if trainer == "sync" else "AuditReplayBufferAsync"
        made.append(
            Paste(
                f"{SAMPLER}.path=pkg://verl_audit.record.verl {SAMPLER}.name={name}",
                "the fate of every trajectory, versions by segment and replica, the buffer and each sync",
                "verl-audit installed on every node; half a second of one core and 200 MB at 8192 answers of 8k tokens "
                "a step, 30 MB of disk; it replaces another custom sampler",
            )
        )
    return tuple(made)
