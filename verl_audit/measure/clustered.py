"""Means of trained and of generated trajectories, with intervals that take the group as the unit.

Linearisation (Taylor series, delta method): each estimator is written as a function of sums over groups, its influence
z_g is the derivative along group g, and the variance is a sum of squares of z_g. It needs no draws, so it is the same
on every machine and linear in the number of groups. Source: Woodruff 1971, JASA 66; Demnati and Rao 2004, Survey
Methodology 30. Differences between trained and generated are conditional on how many groups were trained, which is
known and not a draw: z_g is centred within the trained, the evicted and the mixed groups, as in a two-sample t test,
with the degrees of freedom of Welch and Satterthwaite (1946, Biometrics 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_audit.measure.stats import Array, Estimate, t_quantile
from verl_audit.measure.trace_groups import Codes, Sums


@dataclass(frozen=True)
class Linear:
    """An estimate and its influence values, one per group."""

    value: float
    influence: Array


@dataclass(frozen=True)
class Shift:
    """Trained against generated, split by strata; total = within + composition (Kitagawa 1955, JASA 50).

    `within` compares inside strata, weighted by the generated mix; `composition` is what the strata's mix adds. Strata
    in which nothing was trained have no trained mean: `within` leaves them out, `lost` is their share of trajectories.
    """

    total: Estimate
    within: Estimate
    composition: Estimate
    lost: float


def mean(total: Array, count: Array) -> Linear | None:
    """Sum over sum: the mean over trajectories; None when there are none."""
    weight = float(count.sum())
    if weight <= 0:
        return None
    value = float(total.sum()) / weight
    return Linear(value, (total - value * count) / weight)


def standardised(sums: Sums, stratum: Codes) -> tuple[Linear, Linear, float] | None:
    """Trained mean at the generated mix of strata, generated mean over the same strata, and the share left out.

    m = sum_b f_b m_b, f_b = n_b / n over strata with trained trajectories, m_b the trained mean of stratum b. This is
    also the inverse-probability-weighted mean with P(trained) estimated per stratum. None when nothing was trained.
    """
    strata = int(stratum.max()) + 1 if len(stratum) else 0
    n, x = np.bincount(stratum, sums.count, strata), np.bincount(stratum, sums.total, strata)
    nt, xt = np.bincount(stratum, sums.trained_count, strata), np.bincount(stratum, sums.trained_total, strata)
    keep = nt > 0
    weight = float(n[keep].sum())
    if weight <= 0:
        return None
    own = np.where(keep, xt / np.where(keep, nt, 1), 0.0)
    trained = float((n * own)[keep].sum()) / weight
    everything = float(x[keep].sum()) / weight
    here, level, share = keep[stratum], own[stratum], np.where(keep, n / np.where(keep, nt, 1), 0.0)[stratum]
    influence = sums.count * (level - trained) + share * (sums.trained_total - level * sums.trained_count)
    both = here * (sums.total - everything * sums.count)
    return (
        Linear(trained, here * influence / weight),
        Linear(everything, both / weight),
        1 - weight / float(n.sum()),
    )


def shift(sums: Sums, stratum: Codes, *, log: bool = False) -> Shift | None:
    """Mean over trained minus mean over all generated trajectories; with `log`, of the logarithms of the means.

    None when either is empty, or not positive where a logarithm is asked for.
    """
    trained, everything = mean(sums.trained_total, sums.trained_count), mean(sums.total, sums.count)
    inside = standardised(sums, stratum)
    if trained is None or everything is None or inside is None:
        return None
    if np.array_equal(sums.trained_count, sums.count):
        none = Estimate(0.0, 0.0, 0.0, len(sums.count), 0.0)
        return Shift(none, none, none, 0.0)
    at_mix, same, lost = inside
    parts = (trained, everything, at_mix, same)
    if log and min(p.value for p in parts) <= 0:
        return None
    a, b, c, d = (_log(p) if log else p for p in parts)
    total, within = _minus(a, b), _minus(c, d)
    fate = fate_class(sums)
    return Shift(by_class(total, fate), by_class(within, fate), by_class(_minus(total, within), fate), lost)


def fate_class(sums: Sums) -> Codes:
    """0: no trajectory of the group was trained, 2: all were, 1: some."""
    some, every = sums.trained_count > 0, sums.trained_count == sums.count
    return np.where(some, np.where(every, 2, 1), 0)


def by_class(linear: Linear, fate: Codes, *, level: float = 0.95) -> Estimate:
    """Estimate with a t interval, conditional on the size of each class.

    v = sum_c G_c / (G_c - 1) sum_(g in c) (z_g - mean_c)^2, df = v^2 / sum_c v_c^2 / (G_c - 1). A class of one group
    has no spread: its own z^2 stands for v_c, with one degree of freedom.
    """
    z, size = linear.influence, np.bincount(fate)
    present = size > 0
    centre = np.where(size > 1, np.bincount(fate, z) / np.maximum(size, 1), 0.0)
    spread = np.bincount(fate, (z - centre[fate]) ** 2)[present]
    free = np.maximum(size[present] - 1, 1)
    parts = spread * np.where(size[present] > 1, size[present] / free, 1.0)
    v = float(parts.sum())
    df = v * v / float((parts**2 / free).sum()) if v > 0 else 1.0
    return _estimate(linear, math.sqrt(v), max(df, 1.0), level)


def interval(linear: Linear, *, level: float = 0.95) -> Estimate:
    """Estimate with a t interval, groups as independent: se^2 = G / (G - 1) sum z^2, df = groups that count - 1."""
    n, used = len(linear.influence), int((linear.influence != 0).sum())
    se = math.sqrt(n / max(n - 1, 1) * float(linear.influence @ linear.influence))
    return _estimate(linear, se, max(used - 1, 1), level)


def _estimate(linear: Linear, se: float, df: float, level: float) -> Estimate:
    half = t_quantile(0.5 + level / 2, df) * se
    return Estimate(linear.value, linear.value - half, linear.value + half, len(linear.influence), se)


def _log(x: Linear) -> Linear:
    return Linear(math.log(x.value), x.influence / x.value)


def _minus(a: Linear, b: Linear) -> Linear:
    return Linear(a.value - b.value, a.influence - b.influence)
