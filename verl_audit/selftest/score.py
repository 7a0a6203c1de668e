"""What is true of a run beside what was answered: right, wrong, undetermined, false alarm. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Kind = Literal["harmful", "mild", "per hour", "harmless", "other"]
Result = Literal[
    "right", "part", "beside", "wrong", "false alarm", "undetermined", "missed", "none", "other", "false other", "error"
]
HARMFUL = 0.8
"""True learning speed per update, as a share of the baseline's, below which a run is called harmed."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Truth:
    """What is true of a simulated run. `speed` is measured from its exact expected reward, None without a baseline."""

    causes: frozenset[str]
    """Causes that the scenario states as slowing it."""
    at_work: frozenset[str]
    """Mechanisms present, harmful or not."""
    other: str | None
    speed: float | None
    per_hour: bool = False
    sets_in: int | None = None
    """First logged step that the mechanism touches, where it sets in in the middle of the run."""
    behind: int | None = None
    """Logged step from which on the run is surely behind."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Truth:
        """From the tree of a `truth.json`."""
        return cls(
            frozenset(found["causes"]),
            frozenset(found["at_work"]),
            found["other"],
            found["speed_per_update"],
            found["per_hour_only"],
            found["onset"]["sets_in"],
            found["onset"]["behind"],
        )

    @property
    def harmed(self) -> bool:
        """Whether it learned slower, by measurement and not by the label of its scenario."""
        return self.speed is not None and self.speed < HARMFUL

    @property
    def mechanisms(self) -> frozenset[str]:
        """Every one of the four that is present."""
        return self.causes | self.at_work

    @property
    def kind(self) -> Kind:
        """What may be expected of a verdict.

        harmful: slowed by one of the four. mild: its scenario states a cause, the measured speed is above the limit.
        other: slowed or flattened by none of the four.
        """
        if self.other is not None:
            return "other"
        if self.per_hour:
            return "per hour"
        if self.harmed and self.mechanisms:
            return "harmful"
        return "mild" if self.causes else "harmless"


@dataclass(frozen=True)
class Answer:
    """What a verdict said. `outcome` is `error` where the audit gave up."""

    outcome: str
    causes: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    other: str | None = None
    missing: tuple[str, ...] = ()
    symptom: str = ""
    speed: tuple[float, float, float] | None = None
    """Learning speed per update with its 90 % interval, where there was a baseline."""
    onset: Interval | None = None
    """Steps between which the run began to fall behind."""
    event: Interval | None = None
    """Steps between which the event named as `other` began, where its rule dates it."""
    lacking: tuple[str, ...] = ()
    """Signals that the coverage calls missing, inert or corrupt; kept where a family is hidden: those of it that were
    not so with everything."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Answer:
        """From the tree of an `audit.json`."""
        verdict, symptom = document["verdict"], document["symptom"]
        found = symptom["speed"]["per_update"]
        return cls(
            verdict["outcome"],
            tuple(verdict["causes"]),
            tuple(verdict["risks"]),
            verdict["other"],
            tuple(verdict["missing"]),
            symptom["state"],
            None if found is None else (found["value"], found["low"], found["high"]),
            _interval(symptom["onset"]),
            _event(verdict["other"], document["findings"]),
            _lacking(document["coverage"]["causes"].values()),
        )

    @property
    def said(self) -> tuple[str, tuple[str, ...]]:
        """Outcome and causes: what makes one verdict another."""
        return self.outcome, self.causes


def _interval(found: Mapping[str, float] | None) -> Interval | None:
    return None if found is None else (found["low"], found["high"])


def _event(other: str | None, findings: Iterable[Mapping[str, Any]]) -> Interval | None:
    """When the event named by the verdict began: that of the fired finding whose title it says."""
    fired = (f for f in findings if f["status"] == "fired" and f["cause"] == "health")
    named = (f["onset"] for f in fired if other is not None and other[1:].startswith(f["title"][1:]))
    return _interval(next(named, None))


def _lacking(causes: Iterable[Iterable[Mapping[str, str]]]) -> tuple[str, ...]:
    entries = [entry for needs in causes for entry in needs if entry["standing"] not in ("present", "derivable")]
    return tuple(dict.fromkeys(entry["signal"] for entry in entries))


@dataclass(frozen=True)
class Score:
    """A verdict weighed against the truth."""

    kind: Kind
    result: Result
    mechanism: bool | None
    """Whether every mechanism present is named or a risk; None where none is."""
    reason: bool | None
    """Of an undetermined one: whether a mechanism present is a risk, or a missing signal is named."""
    covered: bool | None
    """Whether the stated interval of the learning speed holds the true one; None where either is unknown."""


@dataclass(frozen=True)
class Judged:
    """One run judged one way."""

    scenario: str
    environment: str
    seed: int
    way: str
    truth: Truth
    answer: Answer
    hidden: str = ""
    """Family of signals that was hidden; empty: none."""
    whole: Answer | None = None
    """What was answered with everything, where a family is hidden."""

    @cached_property
    def score(self) -> Score:
        """The verdict weighed against the truth."""
        return score(self.truth, self.answer)

    @property
    def silenced(self) -> bool:
        """Whether the verdict became undetermined for what was hidden."""
        return (
            self.whole is not None
            and self.whole.outcome not in ("undetermined", "error")
            and self.answer.outcome == "undetermined"
        )


def score(truth: Truth, answer: Answer) -> Score:
    """Weigh one verdict.

    part: one of two causes is named. beside: what is named is at work and is not what slows the run. missed: harm is
    true and the verdict sees none. false other: something outside the four is named where nothing of that kind is.
    """
    result = _result(truth, answer)
    seen = truth.mechanisms & {*answer.causes, *answer.risks}
    return Score(
        truth.kind,
        result,
        seen == truth.mechanisms if truth.mechanisms else None,
        bool(seen or answer.missing) if result == "undetermined" else None,
        _covered(truth, answer),
    )


def _result(truth: Truth, answer: Answer) -> Result:
    if answer.outcome == "cause":
        return _named(truth, frozenset(answer.causes))
    if answer.outcome == "other":
        return "other" if truth.kind == "other" else "false other"
    if answer.outcome == "none":
        return "missed" if truth.harmed else "none"
    return "undetermined" if answer.outcome == "undetermined" else "error"


def _named(truth: Truth, named: frozenset[str]) -> Result:
    if truth.kind in ("harmless", "other"):
        return "false alarm"
    if named - truth.mechanisms:
        return "wrong"
    expected = truth.causes or truth.at_work
    if named >= expected:
        return "right"
    return "part" if named & expected else "beside"


def _covered(truth: Truth, answer: Answer) -> bool | None:
    if truth.speed is None or answer.speed is None:
        return None
    _, low, high = answer.speed
    return low <= truth.speed <= high
