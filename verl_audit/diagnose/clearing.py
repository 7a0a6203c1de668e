"""What excludes a cause: a measurement, never the absence of one."""

from __future__ import annotations

from collections.abc import Mapping

from verl_audit.diagnose.damage import CLEARLY_BELOW, D0
from verl_audit.diagnose.readings import (
    GAP_FINE,
    LONG_SYNC,
    delivery,
    furthest_lag,
    gap_in_words,
    lag_in_words,
    level_lag,
    number_of,
    overlap_free,
    small_in_all,
    steps_in_words,
    wants,
)
from verl_audit.diagnose.rules import Cause
from verl_audit.measure.model import Measure

FEW_LAG0 = 8
"""Lag-0 steps below which one must come after the first sync: in most asynchronous runs only step 1 has lag 0, whose
samples come from the initial weights and say nothing of what the syncs delivered."""
FEW_TOKENS = 3000
"""Traced lag-0 tokens below which the same holds: about those of 128 short trajectories, from which a mean squared gap
is known to 5 %."""
LAG0_GAP = "gap_at_lag0"
EVEN_LENGTH = 0.05
"""ln length ratio within which trained and generated are alike: random eviction of 20 % stays within it in more than
99 of 100 draws at 50 groups (benchmarks/eviction.py)."""


def excluded_by(cause: Cause, measures: Mapping[str, Measure], *, hours: bool) -> tuple[str, tuple[str, ...]]:
    """The measurement that excludes a cause ("" when there is none) and the signals that would decide it.

    `hours`: whether what only costs hours counts, so that a long sync is not cleared.
    """
    if cause == "sync":
        return _clear_sync(measures, hours=hours)
    return {"mismatch": _clear_mismatch, "staleness": _clear_staleness, "eviction": _clear_eviction}[cause](measures)


def _clear_mismatch(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    contradiction = number_of(measures, "gauge_contradiction")
    if contradiction is not None and contradiction > 1:
        return "", (LAG0_GAP,)
    bounded = _bounded_by_traces(measures, "mismatch")
    if bounded:
        return bounded, ()
    gauge = next((name for name in GAP_FINE if number_of(measures, name) is not None), None)
    if gauge is not None:
        return _clear_at_lag0(measures, gauge)
    total = number_of(measures, "gap_prob_mean")
    if total is not None and total <= 0.005 and small_in_all(measures):
        return f"probability difference {total:.4f}, staleness included", ()
    return "", wants(measures, "lag0_steps" if gap_in_words(measures) else "gap_prob_lag0") or (LAG0_GAP,)


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
        return "", wants(measures, "gap_prob_lag0_ratio")
    traced = measures[gauge].level == "traces"
    if steps >= (FEW_TOKENS if traced else FEW_LAG0) or number_of(measures, "gap_after_first_sync") is not None:
        where = _tokens(steps) if traced else steps_in_words(steps)
        return f"{words} is {level:.4f} over {where}, limit {limit}", ()
    if small_in_all(measures):
        where = "the one lag-0 step" if steps == 1 else f"the {steps} lag-0 steps"
        return f"{_small_words(measures)}; {words.partition(' at ')[0]} {level:.4f} at {where}", ()
    return "", (LAG0_GAP,)


def _small_words(measures: Mapping[str, Measure]) -> str:
    """What `small_in_all` rests on."""
    loss, total = number_of(measures, "off_policy_loss"), number_of(measures, "gap_prob_mean")
    if loss is not None:
        return f"at most {loss:.1%} of the signal lost, staleness included"
    return f"probability difference {total or 0:.4f} in all, staleness included"


def _clear_staleness(measures: Mapping[str, Measure]) -> tuple[str, tuple[str, ...]]:
    if overlap_free(measures):
        trainer = measures["trainer"].value
        return "rollouts do not overlap training" + (f" (trainer {trainer})" if trainer else ""), ()
    if furthest_lag(measures) == 0:
        steps = steps_in_words(round(number_of(measures, "lag0_steps") or 0))
        return f"every trajectory was trained at lag 0 ({steps})", ()
    most = measures["damage_staleness"].high
    if most is not None and most <= CLEARLY_BELOW * D0["staleness"]:
        return f"{lag_in_words(measures)}; at most {most:.1%} of the signal lost to off-policy samples", ()
    return "", wants(measures, "lag_mean", "off_policy_loss", "damage_staleness") or (LAG0_GAP,)


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
    if number_of(measures, "stale_groups") == 0 and number_of(measures, "failed_groups") == 0:
        return "no group was evicted as stale or failed", ()
    any_stale = (number_of(measures, "stale_groups") or 0) > 0
    unknown = ("groups_per_step", "evicted_lengths") if any_stale else ("groups_per_step",)
    return "", wants(measures, "stale_groups", "failed_groups") or unknown


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
    value = number_of(measures, name)
    return "unknown" if value is None else f"{value:.0f}"


def _clear_sync(measures: Mapping[str, Measure], *, hours: bool) -> tuple[str, tuple[str, ...]]:
    share, delivered = number_of(measures, "sync_share"), delivery(measures)
    follows = overlap_free(measures) or level_lag(measures)
    if share is not None and (share <= LONG_SYNC or not hours) and follows and delivered:
        long = ", which costs hours and no update" if share > LONG_SYNC else ""
        words = [
            f"syncs take {share:.1%} of the time{long}",
            "" if overlap_free(measures) else level_lag(measures),
            delivered,
        ]
        return ", ".join(w for w in words if w), ()
    missing = [*wants(measures, "sync_share")] if share is None else []
    missing += [] if follows else [*wants(measures, "lag_max_slope")] or ["replica_versions"]
    missing += [] if delivered else [*wants(measures, "gap_after_first_sync")] or ["replica_versions"]
    return "", tuple(dict.fromkeys(missing))
