"""What the measures say of lag, gap, delivery and replicas, as numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping

from verl_audit.diagnose.damage import CLEARLY_BELOW, D0
from verl_audit.diagnose.rules import Cause
from verl_audit.measure.model import Measure

OLD = 4.0
"""Mean lag in optimizer updates below which staleness alone did not slow a run: harmless ones had 2.6 to 3.5, harmful
ones 22 (reference loop)."""
LONG_SYNC = 0.1
"""Share of the time that syncs may take; above it a rule reports it."""
DELIVERED = 0.9
"""Versions sampled with per version trained, from which weights are taken to arrive (0.98 to 1.0 in real runs)."""
GROWTH = 1.5
"""Late over early gap above which weights may not have been delivered."""
SLOPE_FLAT, SLOPE_FROZEN = 0.1, 0.5
"""Slopes of the largest lag (versions per version): up to the first nothing is left behind, above the second a rule
says that something is."""
CONFIGURATION = "configuration"
"""Missing where run or baseline has none that tells the recipe, or what the clip fraction compares with."""
BY_CLIP = ("clip_excess", "off_policy_loss")
"""Measures to which a clip fraction gives a value where its mode is known."""
ADVANTAGE = "advantage"
"""Missing where traces have log-probs, and no advantage by which to tell which tokens the loss clips."""
GAP_FINE: Mapping[str, tuple[float, str]] = {
    "gap_prob_lag0": (0.01, "mean probability difference at lag 0"),
    "gap_logp_lag0": (0.02, "mean absolute log-prob difference at lag 0"),
    "gap_kl_lag0": (0.005, "KL at lag 0"),
}
"""Gap at lag 0 up to which two engines agree as well as bf16 pairs do.

Sources: verl FAQ .01 (bf16 .004); .011 to .02 nats in bf16 runs of several frameworks; KL .001 to .003.
"""


def too_fresh(measures: Mapping[str, Measure]) -> bool:
    """Whether the tokens are too young, by their labels, for a loss that would be evidence of staleness."""
    lag = measures["lag_updates"]
    oldest = lag.high if lag.high is not None else lag.number()
    return oldest is not None and oldest < OLD


def gap_in_words(measures: Mapping[str, Measure]) -> str:
    """The gap whatever the lag, in every unit that was logged."""
    units = {"gap_prob_mean": "{:.3f} in probability", "gap_logp_mean": "{:.3f} nats", "gap_kl_mean": "KL {:.4f} nats"}
    values = {name: number_of(measures, name) for name in units}
    return ", ".join(units[name].format(value) for name, value in values.items() if value is not None)


def number_of(measures: Mapping[str, Measure], name: str) -> float | None:
    """A measure as a number; None where it has none."""
    return measures[name].number()


def wants(measures: Mapping[str, Measure], *names: str) -> tuple[str, ...]:
    """Signals that would give these measures a value, of those that have none."""
    return tuple(dict.fromkeys(w for name in names for w in _wanted(measures, name)))


def _wanted(measures: Mapping[str, Measure], name: str) -> tuple[str, ...]:
    """Of one measure. Bypass mode logs no importance weights, so there the clip fraction tells what they would."""
    if measures[name].value is not None:
        return ()
    mode, found = measures["log_prob_mode"].value, measures[name].wants
    if name == "recipe_differences" or (name in BY_CLIP and mode is None):
        return found or (CONFIGURATION,)
    return tuple("clip_share" if mode == "bypass" and w == "ess" else w for w in found)


def small_in_all(measures: Mapping[str, Measure], cause: Cause = "mismatch") -> bool:
    """Whether signal loss, else gap, staleness included, leaves no room for a mismatch or for other weights."""
    total, loss = number_of(measures, "gap_prob_mean"), number_of(measures, "off_policy_loss")
    if loss is not None:  # the better gauge: a difference of probabilities hides rare tokens
        return loss <= CLEARLY_BELOW * D0[cause]
    return total is not None and total <= GAP_FINE["gap_prob_lag0"][0]


def steps_in_words(n: int | None) -> str:
    """A count of steps."""
    return "1 step" if n == 1 else f"{n} steps"


def furthest_lag(measures: Mapping[str, Measure]) -> float | None:
    """Largest lag of the run as far as it is logged; of a mean only 0 says anything of the largest."""
    largest = (number_of(measures, n) for n in ("lag_oldest_max", "lag_newest_max", "lag_mean"))
    return next((v for v in largest if v is not None), None)


def overlap_free(measures: Mapping[str, Measure]) -> bool:
    """Whether rollouts do not overlap training, so that a lag cannot arise; a logged one contradicts that."""
    return measures["is_async"].value is False and not furthest_lag(measures)


def lag_in_words(measures: Mapping[str, Measure]) -> str:
    """The mean lag of the newest and of the oldest token of a trajectory, or the one average there is."""
    newest, oldest, mean = (number_of(measures, n) for n in ("lag_newest_mean", "lag_oldest_mean", "lag_mean"))
    if newest is not None and oldest is not None:
        return f"mean lag {newest:.2f} versions (newest token) to {oldest:.2f} (oldest)"
    return "lag not logged" if mean is None else f"mean lag {mean:.2f} versions"


def level_lag(measures: Mapping[str, Measure]) -> str:
    """Words for evidence that no replica is left behind: the largest lag does not climb; "" without it.

    Nothing is said where rollouts do not overlap training: the lag is 0 by construction there.
    """
    level = _replicas_level(measures)
    if level or overlap_free(measures) or lag_censored(measures):
        return level
    if furthest_lag(measures) == 0:
        return f"the largest lag is 0 in all {steps_in_words(round(number_of(measures, 'lag0_steps') or 0))}"
    slope = measures["lag_max_slope"]
    value, high, steps = slope.number(), slope.high, slope.n or 0
    if value is None or high is None:
        return ""
    negligible = abs(value) * steps <= 1 and high <= SLOPE_FROZEN
    if high > SLOPE_FLAT and not negligible:
        return ""
    return f"the largest lag has a slope of {value:.2f} versions per version over {steps_in_words(steps)}"


def _replicas_level(measures: Mapping[str, Measure]) -> str:
    """Words for traces in which every replica keeps up; "" without them."""
    behind, frozen = measures["trace_replicas_behind"], number_of(measures, "trace_replicas_frozen")
    if behind.value != 0 or frozen not in (0, None):
        return ""
    return f"none of {behind.n} replicas is left behind"


def lag_censored(measures: Mapping[str, Measure]) -> bool:
    """Whether stale eviction cuts off the largest lag, so that a replica left behind would not show in it."""
    share = measures["stale_groups_share"]
    known = share.number() if share.number() is not None else share.low
    return known is not None and known > 0.05


def delivery(measures: Mapping[str, Measure]) -> str:
    """Words for evidence that syncs deliver; undelivered weights make the gap grow with every update."""
    arrived = measures["trace_versions_delivered"]
    if DELIVERED <= (arrived.number() or 0) <= 2 - DELIVERED:  # above: they catch up with what had not arrived
        return f"sampled versions advance {arrived.number():.2f} per version of the trainer over {arrived.n} versions"
    jump, trend = number_of(measures, "gap_after_first_sync"), number_of(measures, "gap_trend")
    growth = gap_growth(measures)
    if growth is not None and growth > GROWTH:
        return ""
    if jump is not None:
        return f"the gap after the first sync is {jump:.2f} times that before it" if jump <= 3 else ""
    if trend is not None and small_in_all(measures, "sync"):
        return f"the rollout/trainer gap ends at {trend:.2f} times its early level (limit {GROWTH})"
    return ""


def gap_growth(measures: Mapping[str, Measure]) -> float | None:
    """Late over early gap, at lag 0 where that can be read after the first sync."""
    later = number_of(measures, "gap_after_first_sync") is not None
    return number_of(measures, "gap_trend_lag0" if later else "gap_trend")
