"""Weigh the four causes in the order of the diagnosis: damage in one unit, harm gate, two tiers.

A cause is *implicated* only when harm is shown and its damage proxy reaches the evidence level; a mechanism that
works without shown harm is a *risk*; *cleared* needs a measurement that excludes it, never the absence of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import CAUSES, SEVERITIES, Cause, Severity
from verl_audit.measure.model import Measure
from verl_audit.measure.speed import Symptom
from verl_audit.measure.symptom import MARGIN as SLOWER

CauseStatus = Literal["implicated", "contributing", "cleared", "cannot_tell"]
D0: Mapping[Cause, float] = {"mismatch": 0.015, "staleness": 0.03, "eviction": 0.10, "sync": 0.03}
"""Damage at which the evidence for a cause is even, share of the training signal (method note 4.2)."""
EVIDENCE = 0.6
CONTRIBUTES = 0.2
"""Share of the summed damage from which a second cause is named."""
FEW_STEPS = 10
"""Training steps below which nothing is said about a run but that it is short."""
FEW_LAG0 = 8
"""Lag-0 steps below which one must come after the first sync: in most asynchronous runs only step 1 has lag 0, whose
samples come from the initial weights and say nothing of what the syncs delivered."""
LAG0_GAP = "gap_at_lag0"
UNSPLIT = "the gap is logged, but too seldom at lag 0 to tell mismatch from staleness"
MARGIN = math.exp(math.log(EVIDENCE / (1 - EVIDENCE)) / 2.5)
"""D / D0 at which the evidence reaches EVIDENCE: 1.18."""


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


def evidence(damage: float, cause: Cause) -> float:
    """sigmoid(2.5 ln(D / D0)): 0.5 at D0, 0.6 at 1.18 D0, 0.85 at 2 D0."""
    if damage <= 0:
        return 0.0
    return float(1 / (1 + (D0[cause] / damage) ** 2.5))


def weigh(measures: Mapping[str, Measure], findings: Sequence[Finding], symptom: Symptom) -> dict[Cause, Judgement]:
    """Judge each cause, in step order."""
    damages = {cause: _damage(measures, findings, cause) for cause in CAUSES}
    total = sum(d[0] for d in damages.values() if d is not None)
    draft = {cause: _judge(cause, measures, findings, damages[cause], symptom) for cause in CAUSES}
    return _rank(draft, total)


def _fired(findings: Sequence[Finding], cause: str, least: Severity = "medium") -> list[Finding]:
    bar = SEVERITIES.index(least)
    return [f for f in findings if f.cause == cause and f.status == "fired" and SEVERITIES.index(f.severity) >= bar]


def _damage(
    measures: Mapping[str, Measure], findings: Sequence[Finding], cause: Cause
) -> tuple[float, float, float] | None:
    """Damage of one cause. A sync fault explains the off-policy loss it makes: the other two keep a fifth of theirs."""
    broken = bool(_fired(findings, "sync", "high"))
    if cause == "sync":
        loss = measures["off_policy_loss"].number()
        return (0.0, 0.0, 0.0) if not broken else None if loss is None else (loss, 0.0, loss)
    found = measures[f"damage_{cause}"]
    value = found.number()
    if value is None:
        return None
    keep = 0.2 if broken and cause in ("mismatch", "staleness") else 1.0
    low, high = (value if bound is None else bound for bound in (found.low, found.high))
    return keep * value, keep * low, keep * high


def _judge(
    cause: Cause,
    measures: Mapping[str, Measure],
    findings: Sequence[Finding],
    damage: tuple[float, float, float] | None,
    symptom: Symptom,
) -> Judgement:
    fired = _fired(findings, cause)
    strong = damage is not None and evidence(damage[0], cause) >= EVIDENCE
    clearing, missing = _clearing(cause, measures)
    short = (measures["steps_logged"].number() or 0) < FEW_STEPS
    base = Judgement("cannot_tell", bool(fired) or strong, damage, "metrics", "", missing, tuple(f.rule for f in fired))
    if symptom.state == "slower" and strong:
        return replace(base, status="implicated", because=_work(fired, damage))
    if fired or strong:
        return replace(base, because=_work(fired, damage), status=_without_harm(symptom))
    if clearing and short:
        return replace(base, because=f"too few steps to exclude it ({clearing})", missing=())
    if clearing:
        return replace(base, status="cleared", because=clearing, missing=())
    return replace(base, because=_left_open(cause, measures, missing, measured=damage is not None))


def _left_open(cause: Cause, measures: Mapping[str, Measure], missing: tuple[str, ...], *, measured: bool) -> str:
    """Why a cause that is not at work is not excluded either."""
    if cause == "sync" and _censored(measures):
        return "eviction cuts off the largest lag: a replica left behind would not show in it"
    if missing and not measured:
        return UNSPLIT if LAG0_GAP in missing else "not measured"
    return "measured, and neither raised nor excluded"


def _without_harm(symptom: Symptom) -> CauseStatus:
    """A mechanism at work is cleared of harm only where the whole interval of the speed excludes a slowdown."""
    speed = symptom.per_update
    excluded = symptom.state == "not_shown" and speed is not None and speed.low >= SLOWER
    return "cleared" if excluded else "cannot_tell"


def _work(fired: Sequence[Finding], damage: tuple[float, float, float] | None) -> str:
    """What shows the mechanism: the decisive numbers of the rules that fired, else the damage alone."""
    words = "; ".join(dict.fromkeys(f.decisive[0].lower() + f.decisive[1:] for f in fired))
    return words or f"{(damage or (0.0,))[0]:.1%} of the training signal lost"


def _rank(judged: dict[Cause, Judgement], total: float) -> dict[Cause, Judgement]:
    """The largest damage stays implicated; another is contributing from a fifth of the sum, else a risk."""
    named = [c for c in CAUSES if judged[c].status == "implicated"]
    top = max(named, key=lambda c: (judged[c].damage or (0.0,))[0], default=None)
    for cause in named:
        share = (judged[cause].damage or (0.0,))[0] / total if total else 0.0
        if cause != top:
            judged[cause] = replace(judged[cause], status="contributing" if share >= CONTRIBUTES else "cannot_tell")
    return judged


# -- what excludes a cause ---------------------------------------------------------------------------------


def _clearing(cause: Cause, measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    """The measurement that excludes a cause ("" when there is none) and the signals that would decide it."""
    return {
        "mismatch": _clear_mismatch,
        "staleness": _clear_staleness,
        "eviction": _clear_eviction,
        "sync": _clear_sync,
    }[cause](measures)


def _value(measures: Mapping[str, Measure], name: str) -> float | None:
    return measures[name].number()


def _wants(measures: Mapping[str, Measure], *names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(w for name in names for w in measures[name].wants if measures[name].value is None))


GAP_FINE: Mapping[str, tuple[float, str]] = {
    "gap_prob_lag0": (0.01, "mean probability difference at lag 0"),
    "gap_logp_lag0": (0.02, "mean absolute log-prob difference at lag 0"),
    "gap_kl_lag0": (0.005, "KL at lag 0"),
}
"""Gap at lag 0 up to which two engines agree as well as bf16 pairs do.

Sources: verl FAQ .01 (bf16 .004); .011 to .02 nats in bf16 runs of several frameworks; KL .001 to .003.
"""


def _clear_mismatch(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    contradiction = _value(measures, "gauge_contradiction")
    if contradiction is not None and contradiction > 1:
        return "", (LAG0_GAP,)
    for name, (limit, words) in GAP_FINE.items():
        level, steps = _value(measures, name), measures[name].n
        if level is not None and level > limit:
            return "", _wants(measures, "gap_prob_lag0_ratio")
        if level is not None:
            enough = (steps or 0) >= FEW_LAG0 or _value(measures, "gap_after_first_sync") is not None
            found = f"{words} is {level:.4f} over {_steps(steps)}, limit {limit}"
            return (found, ()) if enough or _small_in_all(measures) else ("", (LAG0_GAP,))
    total = _value(measures, "gap_prob_mean")
    if total is not None and total <= 0.005 and _small_in_all(measures):
        return f"probability difference {total:.4f}, staleness included", ()
    return "", _wants(measures, "gap_prob_lag0") or (LAG0_GAP,)


def _small_in_all(measures: Mapping[str, Measure], cause: Cause = "mismatch") -> bool:
    """Whether signal loss, else gap, staleness included, leaves no room for a mismatch or for other weights."""
    total, loss = _value(measures, "gap_prob_mean"), _value(measures, "off_policy_loss")
    if loss is not None:  # the better gauge: a difference of probabilities hides rare tokens
        return loss < MARGIN * D0[cause]
    return total is not None and total <= GAP_FINE["gap_prob_lag0"][0]


def _steps(n: int | None) -> str:
    return "1 step" if n == 1 else f"{n} steps"


def _clear_staleness(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    furthest = next(
        (v for v in (_value(measures, n) for n in ("lag_oldest_max", "lag_newest_max", "lag_mean")) if v is not None),
        None,
    )
    if furthest == 0:
        return f"every trajectory was trained at lag 0 ({measures['lag0_steps'].number() or 0:.0f} steps)", ()
    if furthest is None and measures["is_async"].value is False:
        return f"rollouts do not overlap training (trainer {measures['trainer'].value})", ()
    most = measures["damage_staleness"].high
    if most is not None and most < MARGIN * D0["staleness"]:
        mean = _value(measures, "lag_mean")
        lag = "lag not logged" if mean is None else f"mean lag {mean:.2f} versions"
        return f"{lag}; at most {most:.1%} of the signal lost to off-policy samples", ()
    return "", _wants(measures, "lag_mean", "off_policy_loss", "damage_staleness") or (LAG0_GAP,)


def _clear_eviction(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    share = measures["evicted_share"]
    value = share.number()
    if value is not None:
        stale, failed = _count(measures, "stale_groups"), _count(measures, "failed_groups")
        lost = f"{value:.1%} of groups evicted (stale {stale}, failed {failed})"
        return (lost, ()) if value <= 0.05 else ("", ("evicted_lengths",))
    if _value(measures, "stale_groups") == 0 and _value(measures, "failed_groups") == 0:
        return "no group was evicted as stale or failed", ()
    any_stale = (_value(measures, "stale_groups") or 0) > 0
    unknown = ("groups_per_step", "evicted_lengths") if any_stale else ("groups_per_step",)
    return "", _wants(measures, "stale_groups", "failed_groups") or unknown


def _count(measures: Mapping[str, Measure], name: str) -> str:
    value = _value(measures, name)
    return "unknown" if value is None else f"{value:.0f}"


def _clear_sync(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    share, slope = _value(measures, "sync_share"), measures["lag_max_slope"]
    furthest = next(
        (v for v in (_value(measures, n) for n in ("lag_oldest_max", "lag_newest_max")) if v is not None),
        None,
    )
    follows = furthest == 0 or (slope.low is not None and slope.low <= 0.5 and not _censored(measures))
    delivered = _delivered(measures)
    if share is not None and share <= 0.1 and follows and delivered:
        return f"syncs take {share:.1%} of the time, the largest lag does not grow, {delivered}", ()
    missing = [*_wants(measures, "sync_share")] if share is None else []
    missing += [] if follows else [*_wants(measures, "lag_max_slope")] or ["replica_versions"]
    missing += [] if delivered else [*_wants(measures, "gap_after_first_sync")] or ["replica_versions"]
    return "", tuple(dict.fromkeys(missing))


def _censored(measures: Mapping[str, Measure]) -> bool:
    """Whether stale eviction cuts off the largest lag, so that a replica left behind would not show in it."""
    share = measures["stale_groups_share"]
    known = share.number() if share.number() is not None else share.low
    return known is not None and known > 0.05


def _delivered(measures: Mapping[str, Measure]) -> str:
    """Words for evidence that syncs deliver; undelivered weights make the gap grow with every update."""
    jump, trend = _value(measures, "gap_after_first_sync"), _value(measures, "gap_trend")
    growth = _value(measures, "gap_trend_lag0") if jump is not None else trend
    if growth is not None and growth > 1.5:
        return ""
    if jump is not None:
        return f"the gap after the first sync is {jump:.2f} times that before it" if jump <= 3 else ""
    if trend is not None and _small_in_all(measures, "sync"):
        return f"the rollout/trainer gap does not grow ({trend:.2f} times its early level)"
    return ""
