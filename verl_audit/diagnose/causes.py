"""Weigh the four causes in the order of the diagnosis: damage in one unit, harm gate, two tiers.

A cause is *implicated* only when harm is shown and its damage proxy reaches the evidence level; a mechanism that
works without shown harm is a *risk*; *cleared* needs a measurement that excludes it, never the absence of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from verl_audit.diagnose.clearing import LAG0_GAP, excluded_by
from verl_audit.diagnose.damage import (
    CLEARLY_BELOW,
    D0,
    EVIDENCE,
    FIRST_LOSS,
    damage_of,
    evidence,
    in_even_evidence,
)
from verl_audit.diagnose.evaluate import Finding, fired_for, rule_fired
from verl_audit.diagnose.left_open import UNSPLIT_RULE, age_wanted, unless_unsplit, why_open
from verl_audit.diagnose.readings import number_of, too_fresh
from verl_audit.diagnose.rules import CAUSES, Cause
from verl_audit.measure.model import Level, Measure
from verl_audit.measure.speed import Symptom

CauseStatus = Literal["implicated", "contributing", "cleared", "cannot_tell"]
CONTRIBUTES = 0.1
"""Share of the summed damage, in units of even evidence, from which a second cause is named."""
UNCOUNTED = frozenset({"eviction-truncated-at-sync", "eviction-short-responses-lost"})
"""Rules for harm that the damage of their cause leaves out: that of eviction is the loss of long responses."""
FEW_STEPS = 10
"""Training steps below which nothing is said about a run but that it is short."""
LATER_RULE = "sync-gap-appears-later"
"""Reports a gap that is not of the lag and was not there at step 1: numerics that changed, or a sync that delivers a
part; while it does, neither is named."""


@dataclass(frozen=True)
class Judgement:
    """What is said of one cause."""

    status: CauseStatus
    risk: bool
    damage: tuple[float, float, float] | None
    """Estimate, low, high: share of the training signal lost."""
    evidence_level: Literal["traces", "metrics", "config"]
    because: str
    missing: tuple[str, ...] = ()
    at_work: tuple[str, ...] = ()
    """Rules that fired at medium severity or above."""
    eliminated: bool = False
    """Implicated because nothing else is left, with less damage than would be evidence alone."""


def weigh(measures: Mapping[str, Measure], findings: Sequence[Finding], symptom: Symptom) -> dict[Cause, Judgement]:
    """Judge each cause, in step order."""
    if symptom.state == "slower":  # per update: what costs hours only does not explain that
        findings = [f for f in findings if f.clock != "hour"]
    damages = {cause: damage_of(measures, findings, cause) for cause in CAUSES}
    total = sum(in_even_evidence(d, cause) for cause, d in damages.items())
    draft = {cause: _judge(cause, measures, findings, damages[cause], symptom) for cause in CAUSES}
    if (last := _last_left(draft, measures, findings, symptom)) is not None:
        draft[last] = replace(draft[last], status="implicated", eliminated=True)
    nameable = {cause for cause in CAUSES if not _wanted_to_name(cause, measures, findings)}
    return _rank(draft, total, nameable, first_known=number_of(measures, FIRST_LOSS) is not None)


def _last_left(
    judged: Mapping[Cause, Judgement], measures: Mapping[str, Measure], findings: Sequence[Finding], symptom: Symptom
) -> Cause | None:
    """The one cause at work, where everything else that could slow the run is excluded by a measurement.

    Else must be: the other three, the recipe, and every health event that is not a consequence of this cause; and the
    learning speed from validation must show the slowdown by itself, since the damage is too little to be evidence.
    """
    working = [c for c in CAUSES if judged[c].risk]
    if len(working) != 1 or any(j.status == "implicated" for j in judged.values()) or not _clearly_slower(symptom):
        return None
    (last,) = working
    if measures["recipe_differences"].number() != 0 or steps_at_least(measures) < FEW_STEPS:
        return None
    if any(last not in event.follows for event in fired_for(findings, "health", "high")):
        return None
    excluded = all(_excluded(judged[c], c) for c in CAUSES if c != last)
    return last if excluded and _may_explain(judged[last], last) else None


def _clearly_slower(symptom: Symptom) -> bool:
    """Whether the learning speed over all of validation is slower by its test, not the end of the curves alone."""
    speed = symptom.per_update
    return symptom.state == "slower" and symptom.evidence == "validation" and speed is not None and speed.slower


def _may_explain(judgement: Judgement, cause: Cause) -> bool:
    """Whether a cause at work is not itself excluded by its damage, as far as the damage counts what it does."""
    large = judgement.damage is not None and judgement.damage[0] > CLEARLY_BELOW * D0[cause]
    return bool(judgement.at_work) and (large or not UNCOUNTED.isdisjoint(judgement.at_work))


def _excluded(judgement: Judgement, cause: Cause) -> bool:
    """Whether a cause cannot explain a slowdown: cleared, or a bound on its damage is far below what would."""
    if judgement.status == "cleared":
        return True
    bounded = judgement.damage is not None and judgement.damage[2] <= CLEARLY_BELOW * D0[cause]
    return bounded and cause in ("mismatch", "staleness")  # what eviction and sync do is not all in their damage


def steps_at_least(measures: Mapping[str, Measure]) -> float:
    """Training steps that were logged, as far as it is known."""
    logged = measures["steps_logged"]
    return logged.number() or logged.low or 0


def _judge(
    cause: Cause,
    measures: Mapping[str, Measure],
    findings: Sequence[Finding],
    damage: tuple[float, float, float] | None,
    symptom: Symptom,
) -> Judgement:
    fired = fired_for(findings, cause)
    strong = damage is not None and evidence(damage[0], cause) >= EVIDENCE
    if strong and cause == "staleness" and too_fresh(measures):
        fired, strong = [], False  # something else made these samples off-policy
    clearing, missing = excluded_by(cause, measures, hours=symptom.state != "slower")
    if cause == "staleness" and rule_fired(findings, UNSPLIT_RULE) is not None:
        clearing, missing = unless_unsplit(measures, clearing, missing)
    short = steps_at_least(measures) < FEW_STEPS
    missing = _lacking(measures, missing)
    level = _level(cause, measures, fired)
    base = Judgement("cannot_tell", bool(fired) or strong, damage, level, "", missing, tuple(f.rule for f in fired))
    if strong and (wanted := _wanted_to_name(cause, measures, findings)):
        return replace(base, because=_work(fired, damage), missing=tuple(dict.fromkeys((*missing, *wanted))))
    if symptom.state == "slower" and strong:
        return replace(base, status="implicated", because=_work(fired, damage))
    if fired or strong:
        return replace(base, because=_work(fired, damage), status=_without_harm(symptom))
    if clearing and short:
        return replace(base, because=f"too few steps to exclude it ({clearing})", missing=())
    if clearing:
        return replace(base, status="cleared", because=clearing, missing=())
    return replace(base, because=why_open(cause, measures, missing, measured=damage is not None))


def _level(cause: Cause, measures: Mapping[str, Measure], fired: Sequence[Finding]) -> Level:
    """Traces where the damage of the cause, or any rule that fired for it, rests on them."""
    damage = measures.get(f"damage_{cause}")
    traced = any(f.level == "traces" for f in fired) or (damage is not None and damage.level == "traces")
    return "traces" if traced else "metrics"


TRACED: Mapping[str, str] = {
    LAG0_GAP: "gap_logp_lag0",
    "gap_prob_mean": "gap_logp_mean",
    "replica_versions": "trace_replicas_behind",
    "evicted_lengths": "trace_kept_length_shift",
}
"""Signal to the measure by which traces show that they hold it."""


def _lacking(measures: Mapping[str, Measure], missing: tuple[str, ...]) -> tuple[str, ...]:
    """What is missing, less what the traces hold: a measure that decided nothing was recorded all the same."""
    held = {name for name, m in TRACED.items() if measures[m].level == "traces" and measures[m].value is not None}
    return tuple(name for name in missing if name not in held)


def _wanted_to_name(cause: Cause, measures: Mapping[str, Measure], findings: Sequence[Finding]) -> tuple[str, ...]:
    """Signals without which a cause is not named whatever its damage, since something else would explain that."""
    if cause == "mismatch":
        return ("replica_versions",) if rule_fired(findings, LATER_RULE) is not None else ()
    return age_wanted(measures) if cause == "staleness" else ()


def _without_harm(symptom: Symptom) -> CauseStatus:
    """A mechanism at work is cleared of harm only where the whole interval of the speed excludes a slowdown."""
    return "cleared" if symptom.excluded else "cannot_tell"


def _work(fired: Sequence[Finding], damage: tuple[float, float, float] | None) -> str:
    """What shows the mechanism: the decisive numbers of the rules that fired, else the damage alone."""
    words = "; ".join(_joined([f.decisive[0].lower() + f.decisive[1:] for f in fired]))
    return words or f"{(damage or (0.0,))[0]:.1%} of the training signal lost"


def _joined(phrases: Sequence[str]) -> list[str]:
    """Phrases without repetition: the same start is said once, and of two that give the same number the fuller one."""
    tails: dict[str, list[str]] = {}
    for phrase in dict.fromkeys(phrases):
        head, _, tail = phrase.partition(", ")
        tails.setdefault(head, []).extend([tail] if tail else [])
    whole = [f"{head}, {' and '.join(tail)}" if tail else head for head, tail in tails.items()]
    kept: list[str] = []
    for phrase in sorted(whole, key=lambda p: -len(_decimals(p))):
        if not any(_decimals(phrase)[:1] == _decimals(k)[:1] != [] for k in kept):
            kept.append(phrase)
    return [phrase for phrase in whole if phrase in kept]


def _decimals(phrase: str) -> list[str]:
    return re.findall(r"\d+\.\d+ ?%?", phrase)


def _rank(
    judged: dict[Cause, Judgement], total: float, nameable: Collection[Cause], *, first_known: bool
) -> dict[Cause, Judgement]:
    """The largest damage stays implicated; another is contributing from a tenth of the sum, else a risk.

    Damages are compared in units of their even evidence: 5 % of the signal lost to mismatch slows a run as much as 33 %
    lost to selection. Beside a proven cause even evidence is enough: something does harm here, and this is at work.
    """
    proven = [c for c in CAUSES if judged[c].status == "implicated"]
    top = max(proven, key=lambda c: in_even_evidence(judged[c].damage, c), default=None)
    if top is None:
        return judged
    by_labels = {"staleness"} if first_known else {"mismatch", "staleness"}
    explained = by_labels if "sync" in proven else set()  # a broken sync falsifies the labels that split these two
    for cause in CAUSES:
        level = in_even_evidence(judged[cause].damage, cause)
        enough = cause in proven or (level >= 1 and cause in nameable and bool(judged[cause].at_work))
        if cause != top and enough:
            contributes = cause not in explained and total > 0 and level / total >= CONTRIBUTES
            judged[cause] = replace(judged[cause], status="contributing" if contributes else "cannot_tell")
    return judged
