"""Weigh the four causes in the order of the diagnosis: damage in one unit, harm gate, two tiers.

A cause is *implicated* only when harm is shown and its damage proxy reaches the evidence level; a mechanism that
works without shown harm is a *risk*; *cleared* needs a measurement that excludes it, never the absence of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import CAUSES, SEVERITIES, Cause, Severity
from verl_audit.measure.model import Level, Measure
from verl_audit.measure.speed import Symptom
from verl_audit.measure.symptom import MARGIN

CauseStatus = Literal["implicated", "contributing", "cleared", "cannot_tell"]
D0: Mapping[Cause, float] = {"mismatch": 0.015, "staleness": 0.03, "eviction": 0.10, "sync": 0.03}
"""Damage at which the evidence for a cause is even, share of the training signal (method note 4.2)."""
EVIDENCE = 0.6
"""Evidence from which a damage explains a slowdown; reached at 1.18 D0."""
CONTRIBUTES = 0.1
"""Share of the summed damage, in units of even evidence, from which a second cause is named."""
UNCOUNTED = frozenset({"eviction-truncated-at-sync", "eviction-short-responses-lost"})
"""Rules for harm that the damage of their cause leaves out: that of eviction is the loss of long responses."""
FEW_STEPS = 10
"""Training steps below which nothing is said about a run but that it is short."""
FEW_LAG0 = 8
"""Lag-0 steps below which one must come after the first sync: in most asynchronous runs only step 1 has lag 0, whose
samples come from the initial weights and say nothing of what the syncs delivered."""
FEW_TOKENS = 3000
"""Traced lag-0 tokens below which the same holds: about those of 128 short trajectories, from which a mean squared gap
is known to 5 % (method note 1.4)."""
LAG0_GAP = "gap_at_lag0"
FIRST_LOSS = "loss_first_step"
LATER_RULE = "sync-gap-appears-later"
"""Reports a gap that is not of the lag and was not there at step 1: numerics that changed, or a sync that delivers a
part; while it does, neither is named."""
UNSPLIT_RULE = "mismatch-or-staleness-unsplit"
"""Reports a raised gap with unknown lag; while it does, a bound on the loss alone does not clear staleness."""
CLEARLY_BELOW = 0.5
"""Share of D0 up to which a bound on the damage excludes a cause: the evidence is then at most 0.15."""
OLD = 4.0
"""Mean lag in optimizer updates below which staleness alone did not slow a run: harmless ones had 2.6 to 3.5, harmful
ones 22 (method note 8)."""
EVEN_LENGTH = 0.05
"""ln length ratio within which trained and generated are alike: random eviction of 20 % stays within it in more than
99 of 100 draws at 50 groups (benchmarks/eviction.py)."""
LONG_SYNC = 0.1
"""Share of the time that syncs may take; above it a rule reports it."""
DELIVERED = 0.9
"""Versions sampled with per version trained, from which weights are taken to arrive (0.98 to 1.0 in real runs)."""
GROWTH = 1.5
"""Late over early gap above which weights may not have been delivered."""
SLOPE_FLAT, SLOPE_FROZEN = 0.1, 0.5
"""Slopes of the largest lag (versions per version): up to the first nothing is left behind, above the second a rule
says that something is."""


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


def evidence(damage: float, cause: Cause) -> float:
    """sigmoid(2.5 ln(D / D0)): 0.5 at D0, 0.6 at 1.18 D0, 0.85 at 2 D0."""
    if damage <= 0:
        return 0.0
    return float(1 / (1 + (D0[cause] / damage) ** 2.5))


def weigh(measures: Mapping[str, Measure], findings: Sequence[Finding], symptom: Symptom) -> dict[Cause, Judgement]:
    """Judge each cause, in step order."""
    if symptom.state == "slower":  # per update: what costs hours only does not explain that
        findings = [f for f in findings if f.clock != "hour"]
    damages = {cause: _damage(measures, findings, cause) for cause in CAUSES}
    total = sum(_levels(d, cause) for cause, d in damages.items())
    draft = {cause: _judge(cause, measures, findings, damages[cause], symptom) for cause in CAUSES}
    if (last := _last_left(draft, measures, findings, symptom)) is not None:
        draft[last] = replace(draft[last], status="implicated", eliminated=True)
    nameable = {cause for cause in CAUSES if not _wanted_to_name(cause, measures, findings)}
    return _rank(draft, total, nameable, first_known=_value(measures, FIRST_LOSS) is not None)


def _last_left(
    judged: Mapping[Cause, Judgement], measures: Mapping[str, Measure], findings: Sequence[Finding], symptom: Symptom
) -> Cause | None:
    """The one cause at work, where everything else that could slow the run is excluded by a measurement.

    Else must be: the other three, the recipe, and every health event that is not a consequence of this cause; and the
    slowdown must be beyond the margin, since the damage itself is too little to be evidence.
    """
    working = [c for c in CAUSES if judged[c].risk]
    if len(working) != 1 or any(j.status == "implicated" for j in judged.values()) or not _clearly_slower(symptom):
        return None
    (last,) = working
    if measures["recipe_differences"].number() != 0 or steps_at_least(measures) < FEW_STEPS:
        return None
    events = (f for f in findings if f.cause == "health" and f.status == "fired" and f.severity in ("high", "critical"))
    if any(last not in event.follows for event in events):
        return None
    excluded = all(_excluded(judged[c], c) for c in CAUSES if c != last)
    return last if excluded and _may_explain(judged[last], last) else None


def _clearly_slower(symptom: Symptom) -> bool:
    """Whether validation shows the run to be slower than the margin, with the whole of the interval."""
    speed = symptom.per_update
    return symptom.state == "slower" and symptom.evidence == "validation" and speed is not None and speed.high < MARGIN


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


def _levels(damage: tuple[float, float, float] | None, cause: Cause) -> float:
    """A damage in units of what is even evidence for its cause, so that causes compare."""
    return 0.0 if damage is None else damage[0] / D0[cause]


def _fired(findings: Sequence[Finding], cause: str, least: Severity = "medium") -> list[Finding]:
    bar = SEVERITIES.index(least)
    return [f for f in findings if f.cause == cause and f.status == "fired" and SEVERITIES.index(f.severity) >= bar]


def _damage(
    measures: Mapping[str, Measure], findings: Sequence[Finding], cause: Cause
) -> tuple[float, float, float] | None:
    """Damage of one cause. A sync fault explains the off-policy loss it makes: the other two keep a fifth of theirs,
    or of a mismatch what was there before the first sync."""
    broken = bool(_fired(findings, "sync", "high"))
    if cause == "sync":
        return _sync_damage(measures, broken=broken)
    found = measures[f"damage_{cause}"]
    if broken and cause == "mismatch" and _value(measures, FIRST_LOSS) is not None:
        found = measures[FIRST_LOSS]
        broken = False
    value = found.number()
    if value is None:
        return None
    keep = 0.2 if broken and cause in ("mismatch", "staleness") else 1.0
    low, high = (value if bound is None else bound for bound in (found.low, found.high))
    return keep * value, keep * low, keep * high


def _sync_damage(measures: Mapping[str, Measure], *, broken: bool) -> tuple[float, float, float] | None:
    """Without a fault 0, if anything that could have shown one was measured."""
    loss = _value(measures, "off_policy_loss")
    if broken:
        return None if loss is None else (loss, 0.0, loss)
    seen = any(_value(measures, name) is not None for name in ("sync_share", "lag_max_slope", "gap_after_first_sync"))
    return (0.0, 0.0, 0.0) if seen else None


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
    fired = _fired(findings, cause)
    strong = damage is not None and evidence(damage[0], cause) >= EVIDENCE
    if strong and cause == "staleness" and _too_fresh(measures):
        fired, strong = [], False  # something else made these samples off-policy
    clearing, missing = _clearing(cause, measures, hours=symptom.state != "slower")
    if cause == "staleness" and any(f.rule == UNSPLIT_RULE and f.status == "fired" for f in findings):
        clearing, missing = _unless_unsplit(measures, clearing, missing)
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
    return replace(base, because=_left_open(cause, measures, missing, measured=damage is not None))


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


def _too_fresh(measures: Mapping[str, Measure]) -> bool:
    """Whether the tokens are too young, by their labels, for a loss that would be evidence of staleness."""
    lag = measures["lag_updates"]
    oldest = lag.high if lag.high is not None else lag.number()
    return oldest is not None and oldest < OLD


def _wanted_to_name(cause: Cause, measures: Mapping[str, Measure], findings: Sequence[Finding]) -> tuple[str, ...]:
    """Signals without which a cause is not named whatever its damage, since something else would explain that."""
    if cause == "mismatch":
        return ("replica_versions",) if any(f.rule == LATER_RULE and f.status == "fired" for f in findings) else ()
    return _age_wanted(measures) if cause == "staleness" else ()


def _age_wanted(measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """Signals without which the age of the tokens is not known, so that it cannot be what slows the run.

    A version is one optimizer update or more, so an old version is old however many.
    """
    if measures["lag_updates"].value is not None:
        return ()
    versions = _value(measures, "lag_mean")
    if versions is None:
        return _wants(measures, "lag_mean") or ("lag_mean",)
    return () if versions >= OLD else ("updates_per_version",)


def _unless_unsplit(
    measures: Mapping[str, Measure], clearing: str, missing: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """While a raised gap is split between mismatch and staleness by nothing, only the lag itself clears staleness."""
    if not clearing or _overlap_free(measures) or _value(measures, "lag0_steps") is not None:
        return clearing, missing
    return "", _wants(measures, "lag_mean") or (LAG0_GAP,)


def _left_open(cause: Cause, measures: Mapping[str, Measure], missing: tuple[str, ...], *, measured: bool) -> str:
    """Why a cause that is not at work is not excluded either."""
    known = {"mismatch": _open_mismatch, "staleness": _open_staleness, "sync": _open_sync}.get(cause)
    return (known(measures) if known else "") or (
        "not measured" if missing and not measured else "measured, and neither raised nor excluded"
    )


def _open_mismatch(measures: Mapping[str, Measure]) -> str:
    gap = _gap_in_words(measures)
    if not gap or _value(measures, "damage_mismatch") is not None:
        return ""
    steps = _value(measures, "lag0_steps")
    why = "lag unknown" if steps is None else f"{_steps(round(steps))} at lag 0"
    return f"the gap is {gap}, {why}: mismatch or staleness"


def _gap_in_words(measures: Mapping[str, Measure]) -> str:
    """The gap whatever the lag, in every unit that was logged."""
    units = {"gap_prob_mean": "{:.3f} in probability", "gap_logp_mean": "{:.3f} nats", "gap_kl_mean": "KL {:.4f} nats"}
    values = {name: _value(measures, name) for name in units}
    return ", ".join(units[name].format(value) for name, value in values.items() if value is not None)


def _open_staleness(measures: Mapping[str, Measure]) -> str:
    most = measures["damage_staleness"].high
    if most is None:
        return ""
    if _too_fresh(measures) and most > D0["staleness"]:
        return (
            f"{_lag_in_words(measures)}: too little for a loss of up to {most:.1%}, which a learning rate too high, "
            "a mismatch or weights that were not delivered would explain"
        )
    limit = CLEARLY_BELOW * D0["staleness"]
    if most <= limit:
        return f"at most {most:.1%} of the signal lost, but the gap is raised and the lag not known"
    return f"{_lag_in_words(measures)}; up to {most:.1%} of the signal may be lost, {limit:.1%} would exclude it"


def _open_sync(measures: Mapping[str, Measure]) -> str:
    if _censored(measures):
        return "eviction cuts off the largest lag: a replica left behind would not show in it"
    slope = measures["lag_max_slope"]
    value, low, high = slope.number(), slope.low, slope.high
    if value is None or low is None or high is None or _overlap_free(measures) or _flat(measures):
        return _open_without_climb(measures)
    if low > 0:
        return f"the largest lag climbs {value:.2f} versions per version over {_steps(slope.n)}"
    return f"the slope of the largest lag is only known to lie within {low:.2f} and {high:.2f} versions per version"


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
    top = max(proven, key=lambda c: _levels(judged[c].damage, c), default=None)
    if top is None:
        return judged
    by_labels = {"staleness"} if first_known else {"mismatch", "staleness"}
    explained = by_labels if "sync" in proven else set()  # a broken sync falsifies the labels that split these two
    for cause in CAUSES:
        level = _levels(judged[cause].damage, cause)
        enough = cause in proven or (level >= 1 and cause in nameable and bool(judged[cause].at_work))
        if cause != top and enough:
            contributes = cause not in explained and total > 0 and level / total >= CONTRIBUTES
            judged[cause] = replace(judged[cause], status="contributing" if contributes else "cannot_tell")
    return judged


def _open_without_climb(measures: Mapping[str, Measure]) -> str:
    """What was seen of the sync where it shows no fault and does not exclude one either."""
    share, delivered = _value(measures, "sync_share"), _delivered(measures)
    seen = [f"syncs take {share:.1%} of the time" if share is not None else "", _flat(measures), delivered]
    words = ", ".join(w for w in seen if w)
    if share is not None and share > LONG_SYNC:
        return f"{words}: it costs hours; whether every sync arrived is not shown" if not delivered else f"{words}"
    growth = _growth(measures)
    if growth is not None and growth > GROWTH:
        return f"the rollout/trainer gap ends at {growth:.2f} times its early level"
    return f"no fault in what was logged ({words}), and the rest would be needed to exclude one" if words else ""


# -- what excludes a cause ---------------------------------------------------------------------------------


def _clearing(cause: Cause, measures: Mapping[str, Measure], *, hours: bool) -> tuple[str, tuple[str, ...]]:
    """The measurement that excludes a cause ("" when there is none) and the signals that would decide it.

    `hours`: whether what only costs hours counts, so that a long sync is not cleared.
    """
    if cause == "sync":
        return _clear_sync(measures, hours=hours)
    return {"mismatch": _clear_mismatch, "staleness": _clear_staleness, "eviction": _clear_eviction}[cause](measures)


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
    bounded = _bounded_by_traces(measures, "mismatch")
    if bounded:
        return bounded, ()
    gauge = next((name for name in GAP_FINE if _value(measures, name) is not None), None)
    if gauge is not None:
        return _clear_at_lag0(measures, gauge)
    total = _value(measures, "gap_prob_mean")
    if total is not None and total <= 0.005 and _small_in_all(measures):
        return f"probability difference {total:.4f}, staleness included", ()
    return "", _wants(measures, "lag0_steps" if _gap_in_words(measures) else "gap_prob_lag0") or (LAG0_GAP,)


def _bounded_by_traces(measures: Mapping[str, Measure], cause: Cause) -> str:
    """Words for a damage that traced tokens bound far below what would be evidence; "" without it."""
    found = measures[f"damage_{cause}"]
    if found.level != "traces" or found.high is None or found.high > CLEARLY_BELOW * D0[cause]:
        return ""
    return f"at most {found.high:.1%} of the signal lost to it, from {_tokens(found.n)}"


def _tokens(n: int | None) -> str:
    return f"{n or 0:,} traced tokens"


def _clear_at_lag0(measures: Mapping[str, Measure], gauge: str) -> tuple[str, tuple[str, ...]]:
    """By the level at lag 0 where it rests on enough steps, else by the loss in all; words name what decided."""
    (limit, words), level, steps = GAP_FINE[gauge], measures[gauge].number() or 0.0, measures[gauge].n or 0
    if level > limit:
        return "", _wants(measures, "gap_prob_lag0_ratio")
    traced = measures[gauge].level == "traces"
    if steps >= (FEW_TOKENS if traced else FEW_LAG0) or _value(measures, "gap_after_first_sync") is not None:
        where = _tokens(steps) if traced else _steps(steps)
        return f"{words} is {level:.4f} over {where}, limit {limit}", ()
    if _small_in_all(measures):
        where = "the one lag-0 step" if steps == 1 else f"the {steps} lag-0 steps"
        return f"{_small_words(measures)}; {words.partition(' at ')[0]} {level:.4f} at {where}", ()
    return "", (LAG0_GAP,)


def _small_words(measures: Mapping[str, Measure]) -> str:
    """What `_small_in_all` rests on."""
    loss, total = _value(measures, "off_policy_loss"), _value(measures, "gap_prob_mean")
    if loss is not None:
        return f"at most {loss:.1%} of the signal lost, staleness included"
    return f"probability difference {total or 0:.4f} in all, staleness included"


def _small_in_all(measures: Mapping[str, Measure], cause: Cause = "mismatch") -> bool:
    """Whether signal loss, else gap, staleness included, leaves no room for a mismatch or for other weights."""
    total, loss = _value(measures, "gap_prob_mean"), _value(measures, "off_policy_loss")
    if loss is not None:  # the better gauge: a difference of probabilities hides rare tokens
        return loss <= CLEARLY_BELOW * D0[cause]
    return total is not None and total <= GAP_FINE["gap_prob_lag0"][0]


def _steps(n: int | None) -> str:
    return "1 step" if n == 1 else f"{n} steps"


def _furthest(measures: Mapping[str, Measure]) -> float | None:
    """Largest lag of the run as far as it is logged; of a mean only 0 says anything of the largest."""
    largest = (_value(measures, n) for n in ("lag_oldest_max", "lag_newest_max", "lag_mean"))
    return next((v for v in largest if v is not None), None)


def _overlap_free(measures: Mapping[str, Measure]) -> bool:
    """Whether rollouts do not overlap training, so that a lag cannot arise; a logged one contradicts that."""
    return measures["is_async"].value is False and not _furthest(measures)


def _clear_staleness(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    if _overlap_free(measures):
        trainer = measures["trainer"].value
        return "rollouts do not overlap training" + (f" (trainer {trainer})" if trainer else ""), ()
    if _furthest(measures) == 0:
        return f"every trajectory was trained at lag 0 ({_steps(round(_value(measures, 'lag0_steps') or 0))})", ()
    most = measures["damage_staleness"].high
    if most is not None and most <= CLEARLY_BELOW * D0["staleness"]:
        return f"{_lag_in_words(measures)}; at most {most:.1%} of the signal lost to off-policy samples", ()
    return "", _wants(measures, "lag_mean", "off_policy_loss", "damage_staleness") or (LAG0_GAP,)


def _lag_in_words(measures: Mapping[str, Measure]) -> str:
    """The mean lag of the newest and of the oldest token of a trajectory, or the one average there is."""
    newest, oldest, mean = (_value(measures, n) for n in ("lag_newest_mean", "lag_oldest_mean", "lag_mean"))
    if newest is not None and oldest is not None:
        return f"mean lag {newest:.2f} versions (newest token) to {oldest:.2f} (oldest)"
    return "lag not logged" if mean is None else f"mean lag {mean:.2f} versions"


def _clear_eviction(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    share = measures["evicted_share"]
    value = share.number()
    if value is not None:
        stale, failed = _count(measures, "stale_groups"), _count(measures, "failed_groups")
        lost = f"{value:.1%} of groups evicted (stale {stale}, failed {failed})"
        if value <= 0.05:
            return lost, ()
        even = _even_selection(measures)
        return (f"{lost}, {even}", ()) if even else ("", _not_traced(measures, "evicted_lengths"))
    if _value(measures, "stale_groups") == 0 and _value(measures, "failed_groups") == 0:
        return "no group was evicted as stale or failed", ()
    any_stale = (_value(measures, "stale_groups") or 0) > 0
    unknown = ("groups_per_step", "evicted_lengths") if any_stale else ("groups_per_step",)
    return "", _wants(measures, "stale_groups", "failed_groups") or unknown


def _even_selection(measures: Mapping[str, Measure]) -> str:
    """Words for traces in which what was lost is like what was trained; "" without them."""
    length, reward = measures["trace_kept_length_shift"], measures["trace_reward_shift_within"]
    if length.low is None or length.high is None or length.low < -EVEN_LENGTH or length.high > EVEN_LENGTH:
        return ""
    if reward.low is not None and reward.high is not None and (reward.low > 0 or reward.high < 0):
        return ""
    return f"and trained responses are as long as generated ones (ln ratio {length.low:.3f} to {length.high:.3f})"


def _not_traced(measures: Mapping[str, Measure], name: str) -> tuple[str, ...]:
    return () if measures["trace_kept_length_shift"].value is not None else (name,)


def _count(measures: Mapping[str, Measure], name: str) -> str:
    value = _value(measures, name)
    return "unknown" if value is None else f"{value:.0f}"


def _clear_sync(measures: Mapping[str, Measure], *, hours: bool) -> tuple[str, tuple[str, ...]]:
    share, delivered = _value(measures, "sync_share"), _delivered(measures)
    follows = _overlap_free(measures) or _flat(measures)
    if share is not None and (share <= LONG_SYNC or not hours) and follows and delivered:
        long = ", which costs hours and no update" if share > LONG_SYNC else ""
        words = [
            f"syncs take {share:.1%} of the time{long}",
            "" if _overlap_free(measures) else _flat(measures),
            delivered,
        ]
        return ", ".join(w for w in words if w), ()
    missing = [*_wants(measures, "sync_share")] if share is None else []
    missing += [] if follows else [*_wants(measures, "lag_max_slope")] or ["replica_versions"]
    missing += [] if delivered else [*_wants(measures, "gap_after_first_sync")] or ["replica_versions"]
    return "", tuple(dict.fromkeys(missing))


def _flat(measures: Mapping[str, Measure]) -> str:
    """Words for evidence that no replica is left behind: the largest lag does not climb; "" without it.

    Nothing is said where rollouts do not overlap training: the lag is 0 by construction there.
    """
    level = _replicas_level(measures)
    if level or _overlap_free(measures) or _censored(measures):
        return level
    if _furthest(measures) == 0:
        return f"the largest lag is 0 in all {_steps(round(_value(measures, 'lag0_steps') or 0))}"
    slope = measures["lag_max_slope"]
    value, high, steps = slope.number(), slope.high, slope.n or 0
    if value is None or high is None:
        return ""
    negligible = abs(value) * steps <= 1 and high <= SLOPE_FROZEN
    if high > SLOPE_FLAT and not negligible:
        return ""
    return f"the largest lag has a slope of {value:.2f} versions per version over {_steps(steps)}"


def _replicas_level(measures: Mapping[str, Measure]) -> str:
    """Words for traces in which every replica keeps up; "" without them."""
    behind, frozen = measures["trace_replicas_behind"], _value(measures, "trace_replicas_frozen")
    if behind.value != 0 or frozen not in (0, None):
        return ""
    return f"none of {behind.n} replicas is left behind"


def _censored(measures: Mapping[str, Measure]) -> bool:
    """Whether stale eviction cuts off the largest lag, so that a replica left behind would not show in it."""
    share = measures["stale_groups_share"]
    known = share.number() if share.number() is not None else share.low
    return known is not None and known > 0.05


def _delivered(measures: Mapping[str, Measure]) -> str:
    """Words for evidence that syncs deliver; undelivered weights make the gap grow with every update."""
    arrived = measures["trace_versions_delivered"]
    if arrived.value is not None and (arrived.number() or 0) >= DELIVERED:
        return f"sampled versions advance {arrived.number():.2f} per version of the trainer over {arrived.n} versions"
    jump, trend, growth = _value(measures, "gap_after_first_sync"), _value(measures, "gap_trend"), _growth(measures)
    if growth is not None and growth > GROWTH:
        return ""
    if jump is not None:
        return f"the gap after the first sync is {jump:.2f} times that before it" if jump <= 3 else ""
    if trend is not None and _small_in_all(measures, "sync"):
        return f"the rollout/trainer gap ends at {trend:.2f} times its early level (limit {GROWTH})"
    return ""


def _growth(measures: Mapping[str, Measure]) -> float | None:
    """Late over early gap, at lag 0 where that can be read after the first sync."""
    return _value(measures, "gap_trend_lag0" if _value(measures, "gap_after_first_sync") is not None else "gap_trend")
