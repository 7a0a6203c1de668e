"""Why a cause that is not at work is not excluded either, and what it would take to name one that is."""

from __future__ import annotations

from collections.abc import Mapping

from verl_audit.diagnose.clearing import LAG0_GAP
from verl_audit.diagnose.damage import CLEARLY_BELOW, D0
from verl_audit.diagnose.readings import (
    ADVANTAGE,
    GROWTH,
    LONG_SYNC,
    OLD,
    delivery,
    gap_growth,
    gap_in_words,
    lag_censored,
    lag_in_words,
    level_lag,
    number_of,
    overlap_free,
    steps_in_words,
    too_fresh,
    wants,
)
from verl_audit.diagnose.rules import Cause
from verl_audit.measure.model import Measure

UNSPLIT_RULE = "mismatch-or-staleness-unsplit"
"""Reports a raised gap with unknown lag; while it does, a bound on the loss alone does not clear staleness."""


def age_wanted(measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """Signals without which the age of the tokens is not known, so that it cannot be what slows the run.

    A version is one optimizer update or more, so an old version is old however many.
    """
    if measures["lag_updates"].value is not None:
        return ()
    versions = number_of(measures, "lag_mean")
    if versions is None:
        return wants(measures, "lag_mean") or ("lag_mean",)
    return () if versions >= OLD else ("updates_per_version",)


def unless_unsplit(
    measures: Mapping[str, Measure], clearing: str, missing: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """While a raised gap is split between mismatch and staleness by nothing, only the lag itself clears staleness."""
    if not clearing or overlap_free(measures) or number_of(measures, "lag0_steps") is not None:
        return clearing, missing
    return "", wants(measures, "lag_mean") or (LAG0_GAP,)


def unseen_clips(measures: Mapping[str, Measure]) -> tuple[str, ...]:
    """Signals without which the loss of a run in bypass mode rests on importance weights, which see less than clips.

    That traces lack the advantage shows where the log counts clipped tokens that they do not.
    """
    if measures["log_prob_mode"].value != "bypass":
        return ()
    excess, loss = number_of(measures, "clip_excess"), number_of(measures, "off_policy_loss")
    if excess is None:
        return wants(measures, "clip_excess")
    split = any(measures[f"clip_share_{part}"].value is not None for part in ("mismatch", "staleness", "update"))
    return () if split or loss is None or loss >= excess else (ADVANTAGE,)


def why_open(cause: Cause, measures: Mapping[str, Measure], missing: tuple[str, ...], *, measured: bool) -> str:
    """Why a cause that is not at work is not excluded either."""
    known = {"mismatch": _open_mismatch, "staleness": _open_staleness, "sync": _open_sync}.get(cause)
    return (known(measures) if known else "") or (
        "not measured" if missing and not measured else "measured, and neither raised nor excluded"
    )


def _open_mismatch(measures: Mapping[str, Measure]) -> str:
    gap = gap_in_words(measures)
    if not gap or number_of(measures, "damage_mismatch") is not None:
        return ""
    steps = number_of(measures, "lag0_steps")
    why = "lag unknown" if steps is None else f"{steps_in_words(round(steps))} at lag 0"
    return f"the gap is {gap}, {why}: mismatch or staleness"


def _open_staleness(measures: Mapping[str, Measure]) -> str:
    most = measures["damage_staleness"].high
    if most is None:
        return ""
    if too_fresh(measures) and most > D0["staleness"]:
        return (
            f"{lag_in_words(measures)}: too little for a loss of up to {most:.1%}, which a learning rate too high, "
            "a mismatch or weights that were not delivered would explain"
        )
    limit = CLEARLY_BELOW * D0["staleness"]
    if most <= limit:
        return f"at most {most:.1%} of the signal lost, but the gap is raised and the lag not known"
    return f"{lag_in_words(measures)}; up to {most:.1%} of the signal may be lost, {limit:.1%} would exclude it"


def _open_sync(measures: Mapping[str, Measure]) -> str:
    if lag_censored(measures):
        return "eviction cuts off the largest lag: a replica left behind would not show in it"
    slope = measures["lag_max_slope"]
    value, low, high = slope.number(), slope.low, slope.high
    if value is None or low is None or high is None or overlap_free(measures) or level_lag(measures):
        return _open_without_climb(measures)
    if low > 0:
        return f"the largest lag climbs {value:.2f} versions per version over {steps_in_words(slope.n)}"
    return f"the slope of the largest lag is only known to lie within {low:.2f} and {high:.2f} versions per version"


def _open_without_climb(measures: Mapping[str, Measure]) -> str:
    """What was seen of the sync where it shows no fault and does not exclude one either."""
    share, delivered = number_of(measures, "sync_share"), delivery(measures)
    seen = [f"syncs take {share:.1%} of the time" if share is not None else "", level_lag(measures), delivered]
    words = ", ".join(w for w in seen if w)
    if share is not None and share > LONG_SYNC:
        return f"{words}: it costs hours; whether every sync arrived is not shown" if not delivered else f"{words}"
    growth = gap_growth(measures)
    if growth is not None and growth > GROWTH:
        return f"the rollout/trainer gap ends at {growth:.2f} times its early level"
    return f"no fault in what was logged ({words}), and the rest would be needed to exclude one" if words else ""
