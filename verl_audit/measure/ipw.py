"""Reward of everything generated, estimated from what was trained by weighting with 1 / P(trained | length).

Valid where every length was trained now and then (lost mass near 0) and no group carries too much weight (ESS_w above
.3), measured on runs with known truth: ESS_w .40 and above recovered the generated reward to .006, ESS_w .09 missed it
by .015; and where eviction acts on length alone, which the evicted rewards show if they are recorded: lengths must
explain most of the shift. A reward filter never passes that. Elsewhere only the bounds of Manski (1990, AER 80) hold:
the unseen rewards lie anywhere in the reward's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_audit.measure import clustered
from verl_audit.measure.cohorts import Cohorts
from verl_audit.measure.model import Measure
from verl_audit.measure.survival import Bias, length_bins, measure, reward_by_length, unfit
from verl_audit.measure.trace_groups import Codes, Groups, Mask, Sums

ESS_MIN, LOST_MAX = 0.3, 0.02
UNEXPLAINED_MAX = 0.25
"""Share of the reward shift that may remain at equal length, since it is the error that the weights leave."""


@dataclass(frozen=True)
class GeneratedReward:
    """Mean reward over resolved cohorts, per trajectory."""

    trained: Measure
    generated: Measure
    """All trajectories, the evicted ones as recorded; no value where their rewards were not recorded."""
    weighted: Measure
    """Inverse-probability-weighted; where that is not valid no value, and low and high are the Manski bounds."""
    ess: Measure
    """Effective share of trained groups under the weights: (sum w)^2 / (n sum w^2)."""
    lost: Measure
    """Share of groups in bins of length in which nothing was trained."""


def generated_reward(
    groups: Groups, where: Cohorts, *, reward_range: tuple[float, float] | None = None
) -> GeneratedReward:
    """Reward of trained, of generated, and of generated as estimated from trained alone.

    `reward_range`: lowest and highest possible reward, for the bounds; the recorded extremes of group means where it
    is not given. Weights are per sextile of the longest response in the group.
    """
    stratum = length_bins(groups.longest, where.resolved)
    keep = where.resolved & (stratum >= 0)
    sums, bins = groups.reward.at(keep), stratum[keep]
    trained = clustered.mean(sums.trained_total, sums.trained_count)
    if trained is None or where.blind:
        return _nothing(where.blind or "no trained trajectory of known reward and length in resolved cohorts")
    ess, lost = _validity(groups.trained[keep], bins)
    why = _invalid(ess, lost, reward_by_length(groups, where))
    return GeneratedReward(
        measure("trace_reward_trained", "reward", clustered.interval(trained)),
        _generated(groups, where),
        _weighted(_trained_only(groups, sums, keep), bins, why, reward_range),
        Measure("trace_reward_ess", ess, "share", n=int(groups.trained[keep].sum())),
        Measure("trace_reward_lost", lost, "share", n=int(keep.sum())),
    )


def _nothing(why: str) -> GeneratedReward:
    units = ("reward", "reward", "reward", "share", "share")
    return GeneratedReward(
        *(Measure(f"trace_reward_{n}", None, u, missing=why) for n, u in zip(NAMES, units, strict=True))
    )


NAMES = ("trained", "generated", "weighted", "ess", "lost")


def _generated(groups: Groups, where: Cohorts) -> Measure:
    name, why = "trace_reward_generated", unfit(groups.reward, where)
    sums = groups.reward.at(where.resolved)
    everything = clustered.mean(sums.total, sums.count)
    if why or everything is None:
        return Measure(name, None, "reward", missing=why or "no reward is known")
    return measure(name, "reward", clustered.interval(everything))


def _validity(trained: Mask, bins: Codes) -> tuple[float, float]:
    """ESS_w over trained groups, and the share of groups in bins without any."""
    n, k = np.bincount(bins), np.bincount(bins, trained)
    weight = np.where(k > 0, n / np.maximum(k, 1), 0.0)[bins] * trained
    total = float(weight.sum())
    ess = total**2 / (float(trained.sum()) * float(weight @ weight)) if total > 0 else 0.0
    return ess, float(n[k == 0].sum()) / float(n.sum())


def _trained_only(groups: Groups, sums: Sums, keep: Mask) -> Sums:
    """Reward sums with every recorded trajectory counted as generated, whether its reward is known or not."""
    return Sums(sums.total, np.maximum(groups.rows[keep], sums.count), sums.trained_total, sums.trained_count)


def _invalid(ess: float, lost: float, by_length: Bias) -> str:
    """Why the weights do not hold; empty when they do."""
    if ess <= ESS_MIN:
        return f"ESS_w {ess:.2f}, above {ESS_MIN} needed"
    if lost >= LOST_MAX:
        return f"{lost:.1%} of groups in lengths never trained, below {LOST_MAX:.0%} needed"
    rest, total = by_length.within, by_length.total.number()
    if total is None or rest.low is None or rest.high is None or rest.low <= 0 <= rest.high:
        return ""
    if abs(float(rest.value or 0)) > UNEXPLAINED_MAX * abs(total):
        return "trained and generated rewards differ at equal length: eviction acts on more than length"
    return ""


def _weighted(sums: Sums, bins: Codes, why: str, reward_range: tuple[float, float] | None) -> Measure:
    name = "trace_reward_weighted"
    found = None if why else clustered.standardised(sums, bins)
    if found is not None:
        return measure(name, "reward", clustered.interval(found[0]))
    low, high = _manski(sums, reward_range)
    return Measure(name, None, "reward", low, high, len(bins), missing=f"{why}: bounds only")


def _manski(sums: Sums, reward_range: tuple[float, float] | None) -> tuple[float, float]:
    """Bounds on the generated mean from the trained trajectories alone."""
    if reward_range is None:
        known = sums.trained_count > 0
        means = sums.trained_total[known] / sums.trained_count[known]
        reward_range = float(means.min()), float(means.max())
    n, seen, total = (float(x.sum()) for x in (sums.count, sums.trained_count, sums.trained_total))
    low, high = ((total + (n - seen) * end) / n for end in reward_range)
    return low, high
