"""Who survived to be trained: shifts of length and reward, survival by length and by difficulty, age, truncation.

Everything here is over resolved cohorts (`cohorts`): groups of which the fate of all submitted with them is known.
Trained is compared with all generated, never with evicted, so that 0 means unbiased at any evicted share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from verl_audit.measure import clustered
from verl_audit.measure.cohorts import Cohorts
from verl_audit.measure.model import Measure
from verl_audit.measure.stats import Array, Estimate, fraction
from verl_audit.measure.trace_groups import FATE_NAMES, Codes, Groups, Mask, Sums

BINS = 6
"""Sextiles of the longest response in a group."""
KNOWN = 0.95
"""Share of resolved groups whose length (reward) must be known: at most 5 % unknown groups cannot hide a large bias."""
MIN_GROUPS = 20
"""Fewest resolved groups for a shift: at 20 the removal of the longest 10 % is found in a minority of draws."""
CURVE_BINS, CURVE_GROUPS = 24, 20
"""Most bins of the survival curve that places L50, and fewest groups in each."""


@dataclass(frozen=True)
class Bias:
    """Shift of trained against generated: as it is, within neighbouring cohorts, and what the cohorts' mix adds."""

    total: Measure
    within: Measure
    composition: Measure


@dataclass(frozen=True)
class SurvivalBin:
    """Share of groups trained whose variable lies in [low, high] (the last bin) or [low, high)."""

    low: float
    high: float
    trained: Measure


@dataclass(frozen=True)
class Survival:
    """P(trained) along a variable; no bins and `missing` where the variable is not known."""

    variable: str
    bins: tuple[SurvivalBin, ...]
    missing: str = ""


# -- shifts ------------------------------------------------------------------------------------------------


def length_bias(groups: Groups, where: Cohorts) -> Bias:
    """ln(mean response length trained / mean response length generated).

    Below 0: trained responses are shorter than generated ones. `within` weights neighbouring cohorts as generated, so
    that a change of length over training and of the evicted share over training do not add up to a bias.
    """
    return _bias("trace_length_shift", "ln ratio", groups, groups.length, where, log=True)


def reward_bias(groups: Groups, where: Cohorts) -> Bias:
    """Mean reward trained minus mean reward generated, in units of reward; parts as in `length_bias`."""
    return _bias("trace_reward_shift", "reward", groups, groups.reward, where, log=False)


def reward_by_length(groups: Groups, where: Cohorts) -> Bias:
    """The reward shift split by sextiles of length.

    `composition` is what training on other lengths explains, `within` what selection at equal length adds.
    """
    stratum = length_bins(groups.longest, where.resolved)
    return _bias("trace_reward_by_length", "reward", groups, groups.reward, where, log=False, stratum=stratum)


def _bias(
    name: str, unit: str, groups: Groups, sums: Sums, where: Cohorts, *, log: bool, stratum: Codes | None = None
) -> Bias:
    strata = where.block if stratum is None else stratum
    keep = where.resolved & (strata >= 0) & (sums.count > 0)
    why = unfit(sums, where)
    found = None if why else clustered.shift(sums.at(keep), strata[keep], log=log)
    if found is None:
        why = why or "nothing was trained, or a mean is not positive"
        total, within, composition = (Measure(name + part, None, unit, missing=why) for part in PARTS)
        return Bias(total, within, composition)
    return Bias(*(measure(name + part, unit, getattr(found, field)) for part, field in zip(PARTS, FIELDS, strict=True)))


PARTS, FIELDS = ("", "_within", "_composition"), ("total", "within", "composition")


def unfit(sums: Sums, where: Cohorts) -> str:
    """Why a quantity cannot be compared over the resolved cohorts; empty when it can."""
    resolved = int(where.resolved.sum())
    known = int((where.resolved & (sums.count > 0)).sum())
    if where.blind:
        return where.blind
    if resolved < MIN_GROUPS:
        return f"{resolved} groups in resolved cohorts, {MIN_GROUPS} needed"
    if known < KNOWN * resolved:
        return f"known for {known} of {resolved} groups in resolved cohorts"
    return ""


def measure(name: str, unit: str, found: Estimate) -> Measure:
    """An estimate under a name."""
    return Measure(name, found.value, unit, found.low, found.high, found.n)


# -- survival ----------------------------------------------------------------------------------------------


def survival_by_length(groups: Groups, where: Cohorts) -> Survival:
    """Share of groups trained, by sextile of the longest response in the group.

    The longest, because eviction by age acts on the slowest member. Wilson intervals on groups.
    """
    return _survival("longest response in the group, tokens", groups.longest, groups.trained, where)


def survival_by_difficulty(groups: Groups, where: Cohorts) -> Survival:
    """Share of groups trained, by sextile of difficulty.

    Difficulty is the mean reward of the prompt's other groups; where under half of the groups have any (one epoch),
    the group's own mean reward stands for it, which is what a reward filter acts on, and the variable says so.
    """
    score, variable = difficulty(groups)
    known = np.isfinite(score) & where.resolved
    resolved = int(where.resolved.sum())
    if known.sum() < KNOWN * resolved and variable.startswith("own"):
        return Survival(variable, (), f"reward known for {int(known.sum())} of {resolved} groups in resolved cohorts")
    return _survival(variable, score, groups.trained, where)


def difficulty(groups: Groups) -> tuple[Array, str]:
    """Mean reward of the other groups of the same prompt, else of the group itself; and which of the two."""
    total, count = groups.reward.total, groups.reward.count
    with np.errstate(invalid="ignore"):
        own = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    named = groups.prompt >= 0
    if named.any():
        key = np.where(named, groups.prompt, groups.prompt.max() + 1)
        rest_total = np.bincount(key, total)[key] - total
        rest_count = np.bincount(key, count)[key] - count
        others = np.where(named & (rest_count > 0), rest_total / np.maximum(rest_count, 1), np.nan)
        if np.isfinite(others).mean() >= 0.5:
            return others, "mean reward of the prompt's other groups"
    return own, "own mean reward of the group (no prompt is seen often enough)"


def length_bins(x: Array, keep: Mask, bins: int = BINS) -> Codes:
    """Quantile bin of each entry that `keep` selects and that is known, else -1; equal values share a bin."""
    code = np.full(len(x), -1)
    keep = keep & np.isfinite(x)
    if keep.any():
        inner = np.unique(np.quantile(x[keep], np.arange(1, bins) / bins, method="higher"))
        code[keep] = np.unique(np.searchsorted(inner, x[keep], "right"), return_inverse=True)[1]
    return code


def _survival(variable: str, x: Array, trained: Mask, where: Cohorts) -> Survival:
    if where.blind:
        return Survival(variable, (), where.blind)
    code = length_bins(x, where.resolved)
    inside = code >= 0
    if inside.sum() < MIN_GROUPS:
        return Survival(variable, (), f"known for {int(inside.sum())} groups, {MIN_GROUPS} needed")
    n, k = np.bincount(code[inside]), np.bincount(code[inside], trained[inside])
    lows = np.array([x[inside][code[inside] == b].min() for b in range(len(n))])
    highs = np.append(lows[1:], x[inside].max())
    return Survival(
        variable,
        tuple(
            SurvivalBin(float(low), float(high), measure("trace_survival", "share", share))
            for low, high, a, b in zip(lows, highs, k, n, strict=True)
            if (share := fraction(int(a), int(b))) is not None
        ),
    )


def truncation_point(groups: Groups, where: Cohorts) -> Measure:
    """L50: the length at which survival falls below half of its plateau, in tokens.

    Survival by the longest response in the group, over up to 24 bins of at least 20 groups, made monotone (falling) by
    pooling adjacent violators weighted by groups; the plateau is its first level, L50 the line between the middles of
    the bins on either side. The interval comes from the same on the bins' Wilson limits: where the low limit crosses
    and where the high limit does (none: not crossed within the lengths seen).
    """
    name, unit = "trace_length_l50", "tokens"
    known = where.resolved & np.isfinite(groups.longest)
    bins = min(CURVE_BINS, int(known.sum()) // CURVE_GROUPS)
    if bins < 3 or where.blind:
        why = where.blind or f"{int(known.sum())} groups of known length in resolved cohorts, {3 * CURVE_GROUPS} needed"
        return Measure(name, None, unit, missing=why)
    code = length_bins(groups.longest, where.resolved, bins)[known]
    x = groups.longest[known]
    n, k = np.bincount(code), np.bincount(code, groups.trained[known])
    middle = np.array([np.median(x[code == b]) for b in range(len(n))])
    limits = [fraction(int(a), int(b)) for a, b in zip(k, n, strict=True)]
    low, high = (np.array([getattr(e, side) for e in limits if e is not None]) for side in ("low", "high"))
    fit = falling(k / n, n)
    half = fit[0] / 2
    value = _crossing(middle, fit, half)
    if value is None:
        return Measure(name, None, unit, n=len(x), missing="survival never falls below half of its plateau")
    first, last = _crossing(middle, falling(low, n), half), _crossing(middle, falling(high, n), half)
    return Measure(name, value, unit, first, last, len(x))


def falling(y: Array, weight: ArrayLike) -> Array:
    """The closest sequence that never rises: weighted least squares by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, mass in zip(y, np.asarray(weight, dtype=np.float64), strict=True):
        mean, total, width = float(value), float(mass), 1
        while blocks and blocks[-1][0] < mean:
            before, heavy, wide = blocks.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, width = heavy + total, width + wide
        blocks.append((mean, total, width))
    return np.repeat([b[0] for b in blocks], [b[2] for b in blocks])


def _crossing(x: Array, y: Array, level: float) -> float | None:
    """Where a falling polyline first gets below a level; None when it does not."""
    below = np.flatnonzero(y < level)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (y[i - 1] - level) / (y[i - 1] - y[i]))


# -- evicted share, age, truncation ------------------------------------------------------------------------


def evicted_share(groups: Groups, where: Cohorts) -> Measure:
    """Share of the groups in resolved cohorts that were not trained (Wilson interval)."""
    name = "trace_evicted_share"
    if where.blind:
        return Measure(name, None, "share", missing=where.blind)
    return _share(name, ~groups.trained, where.resolved, "no cohort is resolved")


def evicted_trajectories(groups: Groups, where: Cohorts) -> Measure:
    """Share of the trajectories in resolved cohorts that were not trained, groups as clusters.

    More than the share of groups where groups are trained in part.
    """
    name, rows, trained = "trace_evicted_trajectories", groups.rows[where.resolved], groups.trained_rows[where.resolved]
    found = None if where.blind else clustered.mean(rows - trained, rows)
    if found is None:
        return Measure(name, None, "share", missing=where.blind or "no cohort is resolved")
    return measure(name, "share", clustered.interval(found))


def stale_share(groups: Groups, where: Cohorts) -> Measure:
    """Share of stale groups among all decided ones (Wilson interval); the whole record, not cohorts."""
    if where.blind:
        return Measure("trace_stale_share", None, "share", missing=where.blind)
    return _share("trace_stale_share", groups.fate == FATE_NAMES.index("stale"), ~groups.open, "no group is decided")


def prompt_age(groups: Groups) -> tuple[Measure, Measure, Measure]:
    """Prompt age in trainer steps, decided step - submission step + 1 (1: used in the step that submitted it).

    The unit of verl's `max_off_policy_threshold`: groups older than it are evicted. Mean over trained groups with a
    t interval (groups independent), oldest trained, youngest stale.
    """
    age = groups.decided_step - groups.submit_step + 1
    known = np.isfinite(age)
    trained = age[known & groups.trained]
    stale = age[known & (groups.fate == FATE_NAMES.index("stale"))]
    why = "submission or deciding steps are unknown" if not known.any() else ""
    nothing = Measure("trace_age_trained_mean", None, "steps", missing=why or "no group was trained")
    mean = nothing
    if len(trained):
        linear = clustered.mean(trained, np.ones(len(trained)))
        assert linear is not None
        mean = measure(nothing.name, "steps", clustered.interval(linear))
    return (
        mean,
        _extreme("trace_age_trained_max", trained.max(initial=0), trained, why or "no group was trained"),
        _extreme("trace_age_stale_min", stale.min(initial=np.inf), stale, why or "no group was evicted as stale"),
    )


def _extreme(name: str, value: float, of: Array, why: str) -> Measure:
    return Measure(name, float(value), "steps", n=len(of)) if len(of) else Measure(name, None, "steps", missing=why)


@dataclass(frozen=True)
class Truncation:
    """Share of trajectories that the length limit cut off, among trained and among evicted, and the difference."""

    trained: Measure
    evicted: Measure
    difference: Measure
    """Evicted minus trained."""


def truncation(groups: Groups, where: Cohorts) -> Truncation:
    """Truncated shares over resolved cohorts, groups as clusters."""
    names = ("trace_truncated_trained", "trace_truncated_evicted", "trace_truncated_difference")
    sums = groups.truncated.at(where.resolved)
    trained = clustered.mean(sums.trained_total, sums.trained_count)
    evicted = clustered.mean(sums.total - sums.trained_total, sums.count - sums.trained_count)
    ours, theirs = _level(names[0], trained, "trained"), _level(names[1], evicted, "evicted")
    if trained is None or evicted is None:
        return Truncation(ours, theirs, Measure(names[2], None, "share", missing=ours.missing or theirs.missing))
    gap = clustered.Linear(evicted.value - trained.value, evicted.influence - trained.influence)
    return Truncation(ours, theirs, measure(names[2], "share", clustered.by_class(gap, clustered.fate_class(sums))))


def _level(name: str, found: clustered.Linear | None, whose: str) -> Measure:
    if found is None:
        return Measure(name, None, "share", missing=f"truncation is not known of any {whose} trajectory")
    return measure(name, "share", clustered.interval(found))


def _share(name: str, chosen: Mask, among: Mask, why: str) -> Measure:
    found = fraction(int((chosen & among).sum()), int(among.sum()))
    return Measure(name, None, "share", missing=why) if found is None else measure(name, "share", found)
