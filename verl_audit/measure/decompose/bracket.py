"""How much of the rollout/trainer gap is mismatch, when mismatch and staleness were recorded as one difference.

Inside one bin of the rollout's log-prob (|d log pi| scales with 1 - pi, so this is the stratum to control),

    E[d^2 | bin, s] = m + c h(s),    m >= 0, c >= 0,    s = staleness in optimizer updates

where h(s) = s if the weights drift like a random walk and h(s) = s^2 if they move straight on. The truth lies between,
so the powers from one to the other are fitted, those that explain clearly less than the best are left out, and the
answer is the bracket of the shares sum n m / sum d^2, never a number. |d| is not
regressed: its mean is convex in s even when both parts are Gaussian. Tokens at s = 0 are no random sample (late
segments, short prompts), and with heavy-tailed mismatch their mean was found at .08 of the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.decompose.identity import Later
from verl_audit.measure.decompose.tables import (
    MIN_CLUSTERS,
    Keys,
    Refused,
    Table,
    grouped,
    jackknife,
    keys,
    numbers,
    ratio,
    resampled,
)
from verl_audit.measure.stats import Array, Estimate
from verl_audit.measure.tokens.spec import UNKNOWN

MODEL_ERROR = 0.15
"""Error of the model beyond the bracket, share: estimates were .79 to .97 of the truth over six loops whose true
share was known, and .16 was found where it was 0."""
DOMINATES, MINOR = 0.6, 0.35
"""Lower bound above which mismatch dominates, upper bound below which staleness does."""
MIN_TRAJECTORIES, MIN_HEAVY = 128, 1000
"""Trajectories needed: sd of the share .02 to .05 with 128; with heavy tails (MoE) still .15 to .23 with 512."""
MIN_STALENESS = 3
VALUE_SHARE = 0.01
"""Share of the tokens from which a staleness value counts as covered."""
BIN_SHARE = 0.05
"""Share of the tokens below which a log-prob bin is joined with the next: about deciles, which is what was tested."""
EXPONENTS = (0.5, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Of h(s) = s^e. The first is a drift slower than a random walk, which only clear evidence lets in."""
WALK, STRAIGHT = 1.0, 2.0
REJECT = 0.975
"""Share of the draws in which another exponent must explain more for one to be left out."""
DRAWS = 400

Verdict = Literal["mismatch dominates", "staleness dominates", "mixed"]


@dataclass(frozen=True)
class Lag0:
    """The gap of tokens at staleness 0. Not a random sample of the run: shown beside the bracket, never instead."""

    tokens: int
    mean_abs: Estimate
    """Mean |d|, nats."""
    share: Estimate
    """E[d^2] of these tokens, reweighted to the run's log-prob bins, over the E[d^2] of all."""


@dataclass(frozen=True)
class Bracket:
    """Share of E[d^2] that is there at staleness 0."""

    low: float
    high: float
    """`fit_low` and `fit_high` widened by model error and sampling error, added in squares; cut to [0, 1]."""
    fit_low: float
    fit_high: float
    """Smallest and largest share over the exponents kept."""
    random_walk: float
    """Share fitted with h(s) = s."""
    ballistic: float
    """Share fitted with h(s) = s^2."""
    exponents: tuple[float, ...]
    """Exponents of h(s) = s^e that the data do not reject."""
    sampling_low: float
    sampling_high: float
    """2.5 % point of the smallest kept fit and 97.5 % point of the largest over resampled clusters: sampling error."""
    verdict: Verdict
    second: Estimate
    """E[d^2], nats^2."""
    tokens: int
    trajectories: int
    staleness_values: int
    lag0: Lag0 | None

    @property
    def value(self) -> float:
        """Middle of the fits."""
        return (self.fit_low + self.fit_high) / 2


@dataclass(frozen=True)
class Growth:
    """Straight line of E[d^2] on staleness inside log-prob bins, without constraints so that either may be 0."""

    intercept: Estimate
    """nats^2 at staleness 0: mismatch is at work if its low bound is above 0 and the drift no slower than a walk."""
    intercept_slow: Estimate
    """The same on the square root of staleness, a drift slower than any expected: above 0 it is beyond doubt."""
    slope: Estimate
    """nats^2 per optimizer update: staleness is at work if its low bound is above 0."""
    bends_down: bool
    """The drift is clearly slower than a random walk: the intercept is then too high and shows no mismatch."""


@dataclass(frozen=True)
class _Strata:
    """Rows of the strata table with known staleness: labels and sums."""

    cluster: Keys
    bin: Keys
    s: Array
    n: Array
    abs_sum: Array
    sq_sum: Array


def mismatch_bracket(
    strata: Table,
    *,
    later: Later,
    trajectories: int,
    updates_per_version: int | None,
    heavy_tailed: bool = False,
    baseline_intercept: float | None = None,
) -> Bracket | Refused:
    """Bracket of the mismatch share of d = `later` - behave.

    `strata`: cluster, lag (versions), minibatch, bin, n, abs_sum, sq_sum. With `prox_logp` d = S + M and s = k lag;
    with `theta_logp` d = U + S + M and s = k lag + mini-batch. In the second case with k > 1 the drift inside a cycle
    also shows at lag 0: `baseline_intercept` (nats^2; `growth(...).intercept` of a run with equal k whose rollout
    numerics are the trainer's) is then subtracted, and without one there is no answer.
    """
    rows = _rows(strata, later, updates_per_version)
    if isinstance(rows, Refused):
        return rows
    if np.ptp(rows.s) == 0 and rows.s[0] == 0:
        return _all_at_zero(rows, trajectories)
    k = updates_per_version or 1
    if later == "theta_logp" and k > 1 and baseline_intercept is None:
        return Refused(
            f"{k} updates per version: the drift inside a cycle looks like mismatch, "
            "and no baseline says how much of it there is",
            "a baseline run of equal updates per version, or prox_logp",
        )
    values, enough = _staleness_values(rows), MIN_HEAVY if heavy_tailed else MIN_TRAJECTORIES
    if values < MIN_STALENESS:
        return Refused(f"{values} staleness values, {MIN_STALENESS} needed", "a run whose lag varies, or trainer_logp")
    if trajectories < enough:
        kind = " with heavy tails" if heavy_tailed else ""
        return Refused(f"{trajectories} trajectories, {enough} needed{kind}", "more traced trajectories")
    return _bracket(rows, trajectories, values, baseline_intercept or 0.0)


def growth(strata: Table, *, later: Later, updates_per_version: int | None) -> Growth | Refused:
    """E[d^2] at staleness 0 and per update, with clustered 95 % intervals.

    Least squares inside log-prob bins, weights n, then averaged by tokens. A drift that is straighter than a random
    walk bends the curve upward, and the intercept is then too low; for the opposite see `bends_down`.
    """
    rows = _rows(strata, later, updates_per_version)
    if isinstance(rows, Refused):
        return rows
    if np.ptp(rows.s) == 0:
        return Refused("one staleness value only", "a run whose lag varies")
    (intercept, slope), (slow, _) = (
        jackknife(_moments(rows, h), _mean_line, int(rows.n.sum())) for h in (rows.s, np.sqrt(rows.s))
    )
    return Growth(intercept, slow, slope, _bends_down(rows))


def staleness(lag: Keys, minibatch: Keys, *, later: Later, updates_per_version: int) -> Array:
    """Optimizer updates between sampling and `later`: k lag, plus the mini-batch's index for theta_logp.

    An unknown mini-batch counts as the middle of the cycle, (k - 1)/2.
    """
    s = updates_per_version * lag.astype(np.float64)
    if later == "prox_logp":
        return s
    return s + np.where(minibatch == UNKNOWN, (updates_per_version - 1) / 2, minibatch)


def _rows(strata: Table, later: Later, k: int | None) -> _Strata | Refused:
    if k is None and later == "theta_logp":
        return Refused("updates per version are not known", "updates_per_version in the trace or the configuration")
    lag, n = keys(strata, "lag"), numbers(strata, "n")
    known = (lag != UNKNOWN) & (n > 0)
    if not known.any():
        return Refused("no token's version is known", "segments with their versions, and train_version")
    s = staleness(lag, keys(strata, "minibatch"), later=later, updates_per_version=k or 1)
    found = _Strata(
        keys(strata, "cluster")[known],
        keys(strata, "bin")[known],
        s[known],
        *(numbers(strata, name)[known] for name in ("n", "abs_sum", "sq_sum")),
    )
    if not found.sq_sum.sum() > 0:
        return Refused("the log-probs are equal: there is no gap to split")
    if len(np.unique(found.cluster)) < MIN_CLUSTERS:
        return Refused(f"fewer than {MIN_CLUSTERS} clusters of prompt groups", "traces of more prompt groups")
    return _Strata(found.cluster, _joined_bins(found.bin, found.n), found.s, found.n, found.abs_sum, found.sq_sum)


def _joined_bins(bins: Keys, n: Array) -> Keys:
    """Bin labels after joining neighbours until each holds BIN_SHARE of the tokens; a rest goes to the last."""
    distinct, code = np.unique(bins, return_inverse=True)
    share = np.bincount(code.ravel(), weights=n) / n.sum()
    labels, label, held = np.zeros(len(distinct), dtype=np.int64), 0, 0.0
    for i, part in enumerate(share):
        labels[i] = label
        held += part
        if held >= BIN_SHARE:
            label, held = label + 1, 0.0
    last = max(label - 1, 0)
    joined: Keys = np.minimum(labels, last)[code.ravel()]
    return joined


def _staleness_values(rows: _Strata) -> int:
    _, code = np.unique(rows.s, return_inverse=True)
    return int((np.bincount(code.ravel(), weights=rows.n) >= VALUE_SHARE * rows.n.sum()).sum())


def _moments(rows: _Strata, h: Array) -> Array:
    """Sums of 1, h, h^2, y and h y over tokens, shape (cluster, bin, 5)."""
    columns = np.column_stack([rows.n, rows.n * h, rows.n * h * h, rows.sq_sum, h * rows.sq_sum])
    return grouped([rows.cluster, rows.bin], columns)[1]


def _line(moments: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Intercept and slope of least squares from moments (..., 5), and where h varies enough to have them."""
    n, h, hh, y, hy = np.moveaxis(moments, -1, 0)
    spread = n * hh - h * h
    known = spread > 1e-9 * n * hh
    safe = np.where(known, spread, 1.0)
    return (hh * y - h * hy) / safe, (n * hy - h * y) / safe, known


def _mean_line(totals: Array) -> Array:
    """Intercept and slope averaged over bins by tokens, from moments (batch, bin, 5)."""
    n = totals[..., 0]
    level, rise, known = _line(totals)
    weight = np.where(known, n, 0).sum(axis=-1)
    return np.stack([ratio((n * x * known).sum(axis=-1), weight) for x in (level, rise)], axis=-1)


def _fit(moments: Array, baseline: float) -> tuple[Array, Array]:
    """Share (sum n m - baseline sum n) / sum y of the non-negative fit, and what the fit explains of sum y^2.

    Two unknowns a bin, so the constrained optimum is at hand: where the free intercept is negative it is 0, where the
    free slope is negative the intercept is the mean; both cannot be, since y >= 0 and h >= 0. Bins where h does not
    vary say nothing and are left out.
    """
    n, h, hh, y, hy = np.moveaxis(moments, -1, 0)
    free, slope, known = _line(moments)
    m = np.where(slope < 0, ratio(y, n), np.maximum(free, 0.0))
    c = np.where(slope < 0, 0.0, np.where(free < 0, ratio(hy, hh), slope))
    explained = 2 * (m * y + c * hy) - (m * m * n + 2 * m * c * h + c * c * hh)
    level, whole = (np.where(known, x, 0.0).sum(axis=-1) for x in ((m - baseline) * n, y))
    return np.clip(ratio(level, whole), 0, 1), np.where(known, explained, 0.0).sum(axis=-1)


def _bracket(rows: _Strata, trajectories: int, values: int, baseline: float) -> Bracket | Refused:
    scaled = rows.s / rows.s.max()
    moments = [_moments(rows, scaled**e) for e in EXPONENTS]
    shares, explained = (np.array(x) for x in zip(*(_fit(m.sum(axis=0), baseline) for m in moments), strict=True))
    if np.isnan(shares).any():
        return Refused("staleness does not vary inside any bin of the log-prob", "a run whose lag varies")
    drawn = [_fit(resampled(m, DRAWS), baseline) for m in moments]
    kept = _kept(explained, np.stack([d[1] for d in drawn]))
    low, high = float(shares[kept].min()), float(shares[kept].max())
    resampled_shares = np.stack([d[0] for d in drawn])[kept]
    down = float(np.nanquantile(resampled_shares.min(axis=0), 0.025))
    up = float(np.nanquantile(resampled_shares.max(axis=0), 0.975))
    bound_low = max(0.0, low - math.hypot(MODEL_ERROR, max(0.0, low - down)))
    bound_high = min(1.0, high + math.hypot(MODEL_ERROR, max(0.0, up - high)))
    return Bracket(
        low=bound_low,
        high=bound_high,
        fit_low=low,
        fit_high=high,
        random_walk=float(shares[EXPONENTS.index(WALK)]),
        ballistic=float(shares[EXPONENTS.index(STRAIGHT)]),
        exponents=tuple(e for e, keep in zip(EXPONENTS, kept, strict=True) if keep),
        sampling_low=down,
        sampling_high=up,
        verdict=verdict_of(bound_low, bound_high),
        second=_second(rows),
        tokens=int(rows.n.sum()),
        trajectories=trajectories,
        staleness_values=values,
        lag0=_lag0(rows),
    )


def _clearly_more(drawn: Array, other: Array) -> NDArray[np.bool_]:
    return np.asarray((drawn > other).mean(axis=-1) >= REJECT)


def _bends_down(rows: _Strata) -> bool:
    scaled = rows.s / rows.s.max()
    slower, walk = (_fit(resampled(_moments(rows, scaled**e), DRAWS), 0.0)[1] for e in (EXPONENTS[0], WALK))
    return bool(_clearly_more(slower, walk))


def _kept(explained: Array, drawn: Array) -> NDArray[np.bool_]:
    """Exponents that the data do not reject: fits of equal freedom, compared over resampled clusters.

    One is left out when the best from WALK to STRAIGHT explains more in 97.5 % of the draws. A slower drift than a
    walk is let in only when it explains more than the walk in as many.
    """
    usual = np.array([e >= WALK for e in EXPONENTS])
    best = int(np.argmax(np.where(usual, explained, -np.inf)))
    kept = usual & ((drawn < drawn[best]).mean(axis=1) < REJECT)
    slower = _clearly_more(drawn, drawn[EXPONENTS.index(WALK)])
    found: NDArray[np.bool_] = kept | (~usual & slower)
    return found


def verdict_of(low: float, high: float) -> Verdict:
    """What the bounds of a mismatch share decide."""
    if low > DOMINATES:
        return "mismatch dominates"
    return "staleness dominates" if high < MINOR else "mixed"


def _all_at_zero(rows: _Strata, trajectories: int) -> Bracket:
    """Nothing was stale: all of the gap is mismatch, by definition and not by a fit."""
    fits = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    tokens = int(rows.n.sum())
    return Bracket(*fits, (), 1.0, 1.0, "mismatch dominates", _second(rows), tokens, trajectories, 1, _lag0(rows))


def _second(rows: _Strata) -> Estimate:
    _, sums = grouped([rows.cluster], np.column_stack([rows.n, rows.sq_sum]))
    return jackknife(sums, lambda t: ratio(t[:, 1], t[:, 0])[:, None], int(rows.n.sum()), bounds=(0, math.inf))[0]


def _lag0(rows: _Strata) -> Lag0 | None:
    zero = rows.s == 0
    if not zero.any():
        return None
    columns = np.column_stack([rows.n, rows.sq_sum, rows.n * zero, rows.abs_sum * zero, rows.sq_sum * zero])
    _, sums = grouped([rows.cluster, rows.bin], columns)

    def statistic(totals: Array) -> Array:
        n, y, n0, a0, y0 = np.moveaxis(totals, -1, 0)
        mean_abs = ratio(a0.sum(axis=-1), n0.sum(axis=-1))
        seen = n0 > 0
        level = ratio(np.where(seen, n * ratio(y0, n0), 0).sum(axis=-1), np.where(seen, y, 0).sum(axis=-1))
        return np.stack([mean_abs, level], axis=-1)

    mean_abs, share = jackknife(sums, statistic, int(rows.n[zero].sum()), bounds=(0, math.inf))
    return Lag0(int(rows.n[zero].sum()), mean_abs, share)
