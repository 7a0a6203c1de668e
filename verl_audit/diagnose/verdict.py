"""One sentence: which cause, how sure and why, or what could not be judged and what would record it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from verl_audit.diagnose.causes import FEW_STEPS, Judgement, steps_at_least
from verl_audit.diagnose.clearing import LAG0_GAP
from verl_audit.diagnose.damage import evidence
from verl_audit.diagnose.evaluate import SUFFIXES, Finding, fired_for, rule_fired
from verl_audit.diagnose.left_open import unseen_clips
from verl_audit.diagnose.readings import ADVANTAGE, CONFIGURATION, wants
from verl_audit.diagnose.rules import CAUSES, SEVERITIES, Cause, Confidence
from verl_audit.measure.model import Measure
from verl_audit.measure.speed import MIN_VALIDATION, Symptom

Outcome = Literal["cause", "other", "none", "undetermined"]
NAMES: Mapping[Cause, str] = {
    "mismatch": "train-inference mismatch",
    "staleness": "staleness",
    "eviction": "eviction bias",
    "sync": "weight sync",
}
RECIPE_RULE = "health-recipe-differs"
"""Told beside another event, which the difference may have led to, and as the answer only where there is none."""
POWERLESS = 1 / 3
"""Smallest slowdown a pair of runs could have shown, below which a test that shows none is no test; most pairs of 40
validations reach 0.6, curves that hardly rise 0.1 to 0.2."""
WORDS: Mapping[str, str] = {
    "updates_per_version": "the configuration, which tells the optimizer updates of a version",
    "evicted_lengths": "lengths and rewards of the evicted groups",
    "replica_versions": "the version of each replica",
    "groups_per_step": "the batch size in groups",
    LAG0_GAP: "the gap at lag 0",
    CONFIGURATION: "the configuration of run and baseline, which tells whether they share the recipe",
    ADVANTAGE: "the advantage of each trajectory in the traces",
    "validation": f"{MIN_VALIDATION} or more validation points",
}
"""Missing signals whose name alone says too little."""


@dataclass(frozen=True)
class Verdict:
    """The answer. `causes` are proven ones; `risks` work in the run without proof that they did harm."""

    outcome: Outcome
    causes: tuple[Cause, ...]
    risks: tuple[Cause, ...]
    other: str | None
    confidence: Confidence
    because: str
    """Why the confidence is what it is."""
    sentence: str
    missing: tuple[str, ...]


def decide(
    judged: Mapping[Cause, Judgement],
    findings: Sequence[Finding],
    symptom: Symptom,
    measures: Mapping[str, Measure],
    *,
    error: str = "",
) -> Verdict:
    """Weigh health first, then the causes behind the harm gate, then what is left open.

    `error` is the exception that stopped the run, told when it died before its first step.
    """
    risks = tuple(c for c in CAUSES if judged[c].risk and judged[c].status not in ("implicated", "contributing"))
    health = _health(findings, judged, symptom)
    if health is not None:
        recipe = rule_fired(findings, RECIPE_RULE)
        apart = recipe.explain if recipe is not None and recipe != health else ""
        words = health.title[0].lower() + health.title[1:]
        if error and measures["died_before_step1"].value is True:
            words = f"{words}: {error}"
        return Verdict(
            "other",
            (),
            risks,
            words,
            health.confidence,
            f"the {'configurations show' if health.rule == RECIPE_RULE else 'log shows'} it directly",
            f"Other: {words.rstrip('.')}. {health.explain} {apart}".rstrip(),
            (),
        )
    named = sorted(
        (c for c in CAUSES if judged[c].status in ("implicated", "contributing")),
        key=lambda c: judged[c].status != "implicated",
    )
    if named:
        return _cause(tuple(named), judged, symptom, risks, _followed(findings, named))
    return _without_cause(judged, findings, symptom, measures, risks)


def _health(findings: Sequence[Finding], judged: Mapping[Cause, Judgement], symptom: Symptom) -> Finding | None:
    """The health event that explains the curve: a critical one always, else the first high one that stands alone."""
    fired = fired_for(findings, "health", "high")
    critical = [f for f in fired if f.severity == "critical"]
    high = [f for f in fired if f.severity == "high" and _explains(f, judged, symptom)]
    first = min(high, key=lambda f: (f.rule == RECIPE_RULE, f.onset or (0.0, 0.0)), default=None)
    return next(iter(critical), None) or first


def _explains(event: Finding, judged: Mapping[Cause, Judgement], symptom: Symptom) -> bool:
    """Whether an event can be why reward flattened.

    Not where no slowdown is there to explain (unless hardly any could have been shown), nor while a cause is at work
    whose consequence it can be; beside a proven cause only if the run is shown to have kept up until the event had
    begun: where the order is open, the cause stays the answer.
    """
    if (symptom.state == "not_shown" and not _powerless(symptom)) or any(judged[c].risk for c in event.follows):
        return False
    if all(j.status != "implicated" for j in judged.values()):
        return True
    behind = symptom.onset
    return behind is not None and event.onset is not None and event.onset[1] <= behind[0]


def _unchecked(
    findings: Sequence[Finding], judged: Mapping[Cause, Judgement], symptom: Symptom, measures: Mapping[str, Measure]
) -> tuple[str, ...]:
    """Signals for want of which an event that would have been the answer is not known to have happened or not."""
    grave = [f for f in findings if f.cause == "health" and SEVERITIES.index(f.severity) >= SEVERITIES.index("high")]
    open_ = [f for f in grave if f.status == "insufficient" and _explains(f, judged, symptom)]
    names = [stem for f in open_ for name in f.missing for stem in (name, *map(name.removesuffix, SUFFIXES))]
    return wants(measures, *dict.fromkeys(name for name in names if name in measures))


def _powerless(symptom: Symptom) -> bool:
    """Whether a run at a third of the baseline's speed would have passed unseen, so that seeing none says nothing."""
    return symptom.per_update is not None and symptom.per_update.smallest_detectable < POWERLESS


def _followed(findings: Sequence[Finding], named: Sequence[Cause]) -> str:
    """Health events that followed the named causes, with their onset."""
    events = [f for f in fired_for(findings, "health", "info") if set(f.follows) & set(named)]
    told = [
        f.title[0].lower() + f.title[1:] + (f" (from step {f.onset[0]:.0f} to {f.onset[1]:.0f} on)" if f.onset else "")
        for f in events
    ]
    return f" It was followed by this: {'; '.join(told)}." if told else ""


def _cause(
    named: tuple[Cause, ...],
    judged: Mapping[Cause, Judgement],
    symptom: Symptom,
    risks: tuple[Cause, ...],
    followed: str,
) -> Verdict:
    first = judged[named[0]]
    damage, least, _ = first.damage or (0.0, 0.0, 0.0)
    # both the estimate and the low end of its bracket must be evidence
    shown = symptom.evidence == "validation" and evidence(damage, named[0]) >= 0.8 and evidence(least, named[0]) >= 0.5
    traced = first.evidence_level == "traces"
    confidence: Confidence = "low" if symptom.evidence == "single_run" or not shown else "high" if traced else "medium"
    if first.eliminated:
        return _only_one_left(named[0], first, symptom, followed)
    shower = "validation" if symptom.evidence == "validation" else "trained reward"
    because = f"from {'traces' if traced else f'{first.evidence_level} only'}; {shower} shows the slowdown"
    also = f", with {' and '.join(NAMES[c] for c in named[1:])} contributing" if len(named) > 1 else ""
    told = f"{damage:.1%} of the" in first.because
    cost = first.because if told else f"{first.because}; {damage:.1%} of the training signal is lost to it"
    sentence = f"{_upper(NAMES[named[0]])}{also}: reward is slower ({symptom.because}); {cost}.{followed}"
    return Verdict("cause", named, risks, None, confidence, because, sentence, _missing(judged, symptom))


def _only_one_left(cause: Cause, found: Judgement, symptom: Symptom, followed: str) -> Verdict:
    because = "by elimination: its own damage is less than evidence, and all else is excluded by a measurement"
    rest = _upper(_names([c for c in CAUSES if c != cause]))
    sentence = (
        f"{_upper(NAMES[cause])}, by elimination: reward is slower ({symptom.because}); {found.because}. "
        f"{rest} are excluded, the recipe is the baseline's, and no health event explains it.{followed}"
    )
    return Verdict("cause", (cause,), (), None, "low", because, sentence, ())


def _without_cause(
    judged: Mapping[Cause, Judgement],
    findings: Sequence[Finding],
    symptom: Symptom,
    measures: Mapping[str, Measure],
    risks: tuple[Cause, ...],
) -> Verdict:
    unjudged = [c for c in CAUSES if judged[c].status == "cannot_tell" and not judged[c].risk]
    missing = _missing(judged, symptom)
    steps = steps_at_least(measures)
    if steps < FEW_STEPS:
        sentence = _short_run(steps, findings, missing)
        return Verdict("undetermined", (), risks, None, "low", "too few steps", sentence, missing)
    settled = (not unjudged or symptom.excluded) and (not risks or symptom.state == "not_shown")
    if symptom.state == "slower" or (symptom.state != "untested" and not settled):
        firmer = ("validation",) if symptom.evidence == "trained_reward" else ()
        events = _unchecked(findings, judged, symptom, measures)  # where harm is untested, what would test it is first
        missing = tuple(dict.fromkeys((*missing, *unseen_clips(measures), *firmer, *events)))
    if symptom.state == "slower":
        sentence = _unexplained(judged, symptom, risks, unjudged, missing)
        because = "harm is shown, its cause is not measured"
        return Verdict("undetermined", (), risks, None, "low", because, sentence, missing)
    if risks:
        return _at_risk(judged, symptom, risks, unjudged, missing)
    if unjudged and not symptom.excluded:
        names = _names(unjudged)
        sentence = f"Undetermined: {names} could not be judged. {_absent(missing)}{_doubts(findings)}".strip()
        return Verdict("undetermined", (), (), None, "low", f"signals missing for {names}", sentence, missing)
    each = "No cause at work: mismatch, staleness, eviction and weight sync are each excluded by a measurement. "
    left = f" {_upper(_names(unjudged))} could not be judged." if unjudged else ""
    sentence = f"{'' if unjudged else each}{_upper(_harm(symptom))}.{left}"
    confidence: Confidence = "medium" if symptom.state == "not_shown" and not unjudged else "low"
    return Verdict("none", (), (), None, confidence, _tested(symptom), sentence, missing)


def _short_run(steps: float, findings: Sequence[Finding], missing: tuple[str, ...]) -> str:
    lead = f"Undetermined: only {steps:.0f} training step{'s' * (steps != 1)} logged, too few to judge anything."
    shown = [f.title[0].lower() + f.title[1:] for f in findings if f.status == "fired" and f.severity != "info"]
    return " ".join(
        part for part in (lead, f"Seen so far: {'; '.join(shown)}." if shown else "", _absent(missing)) if part
    )


def _doubts(findings: Sequence[Finding]) -> str:
    """Health findings that say which gauge not to believe."""
    doubts = [f.title for f in fired_for(findings, "health") if f.severity == "medium"]
    return "".join(f" {d}." for d in doubts)


def _at_risk(
    judged: Mapping[Cause, Judgement],
    symptom: Symptom,
    risks: tuple[Cause, ...],
    unjudged: Sequence[Cause],
    missing: tuple[str, ...],
) -> Verdict:
    working = _working(judged, risks)
    if symptom.state == "not_shown" and (not unjudged or symptom.excluded):
        sentence = f"{_upper(_harm(symptom))}. As a risk, {working}."
        confidence: Confidence = "medium" if symptom.excluded and not unjudged else "low"
        return Verdict("none", (), risks, None, confidence, _tested(symptom), sentence, missing)
    left = f" {_upper(_names(unjudged))} could not be judged." if unjudged else ""
    sentence = f"Undetermined: {working}, but {_harm(symptom)}.{left} {_absent(missing)}".rstrip()
    because = "the mechanism is measured, its effect on reward is not"
    return Verdict("undetermined", (), risks, None, "medium", because, sentence, missing)


def _unexplained(
    judged: Mapping[Cause, Judgement],
    symptom: Symptom,
    risks: tuple[Cause, ...],
    unjudged: Sequence[Cause],
    missing: tuple[str, ...],
) -> str:
    at_work = _working(judged, risks) if risks else "no cause is measured at a level that explains it"
    left = f"; {_names(unjudged)} could not be judged" if unjudged else ""
    return f"Undetermined: reward is slower ({symptom.because}); {at_work}{left}. {_absent(missing)}".rstrip()


def _working(judged: Mapping[Cause, Judgement], risks: Sequence[Cause]) -> str:
    return " and ".join(f"{NAMES[c]} is at work ({judged[c].because})" for c in risks)


def _missing(judged: Mapping[Cause, Judgement], symptom: Symptom) -> tuple[str, ...]:
    """Signals that would decide what is open, and the baseline when harm could not be tested for want of one."""
    names = [m for c in CAUSES if judged[c].status == "cannot_tell" for m in judged[c].missing]
    if symptom.state == "untested" and symptom.wants:
        names.append(symptom.wants)
    return tuple(dict.fromkeys(names))


def _absent(missing: Sequence[str]) -> str:
    """What was not recorded, in words; a missing baseline is said by the symptom already."""
    words = [WORDS.get(m, m) for m in missing if m != "baseline"]
    return f"Not recorded: {', '.join(words)}." if words else ""


def _names(causes: Sequence[Cause]) -> str:
    words = [NAMES[c] for c in causes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _harm(symptom: Symptom) -> str:
    """What is known of the slowdown, as a clause."""
    return {
        "not_shown": f"no slowdown is shown: {symptom.because}",
        "unclear": f"a slowdown is neither shown nor excluded ({symptom.because})",
        "untested": f"whether reward slowed was not testable: {symptom.because}",
        "slower": f"reward is slower ({symptom.because})",
    }[symptom.state]


def _tested(symptom: Symptom) -> str:
    """Whether harm was tested, and what the test could have shown."""
    if symptom.state != "not_shown":
        return "harm was not tested" if symptom.state == "untested" else "a slowdown is not excluded"
    if symptom.per_update is None:
        return "harm was tested against a baseline"
    shown = f"a slowdown to {symptom.per_update.smallest_detectable:.2f} of its speed would have shown"
    return f"harm was tested against a baseline: {shown} with probability 0.8"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
