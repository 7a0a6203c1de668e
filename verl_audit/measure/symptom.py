"""Did reward slow down?  Learning speed against a baseline, the gap at the end, its onset, or one run alone.

The effect size is the speed ratio a: the run at update t stands where the baseline stood at update a t.  A
slope of the difference will not do: it is near 0 for a saturating curve that learns half as fast.  All
functions take plain curves, are deterministic (fixed seed), and answer `Untestable` with the reason rather
than make a number up.  Scores are such that more is better.  x is the clock, normally optimizer updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_audit.measure.stats import (
    Array,
    ar1_phi,
    block_bootstrap,
    inflation,
    least_squares,
    normal_quantile,
    slope,
    t_below,
    t_quantile,
    whiten,
)

MARGIN = 0.8
"""A run is slower only below this speed ratio; milder slowing is not called harm."""
RUN_SD = 0.15
"""Default run-to-run sd of ln a, from repeats of one configuration that differ by seed only (.1 to .2)."""
RUN_SD_WEIGHT = 4
"""Degrees of freedom the default sd is worth when three or more baselines measure it (see `_run_to_run`)."""
LEVEL = 0.95
"""One-sided level of the harm test; `low` to `high` is the two-sided 90 % interval."""
DRAWS = 200
"""Bootstrap draws for the standard error of ln a."""
SPEED_LOW, SPEED_HIGH = 0.05, 5.0
GAP_FLOOR = 0.035
"""Smallest gap at the end that counts as harm, as a share of what the baseline gained."""
CANNOT_TELL = "a single run cannot tell natural saturation from slowing; give a baseline"


@dataclass(frozen=True)
class Curve:
    """A score y against a clock x (optimizer updates); any order, non-finite points are left out."""

    x: Array
    y: Array


@dataclass(frozen=True)
class Untestable:
    """No answer, and why.

    `flaw` is set where the baseline is the obstacle: it rises too little ("flat") or it falls.
    """

    reason: str
    flaw: Literal["", "flat", "falls"] = ""


@dataclass(frozen=True)
class Speed:
    """The speed ratio of a run to its baseline, with its two-sided 90 % interval.

    `se_within` is the bootstrap standard error of ln a, `se_log` adds run-to-run variation, `z` is
    ln a / se_log and `critical` the quantile it is held against.
    `at_bound`: the best ratio is at the edge of [.05, 5].
    `smallest_detectable`: the slowing needed, as the largest true ratio that these runs would have shown as
    slower with probability .8.  `start_shift`: score of the run minus the baseline at the start, when it
    differs and was allowed for.
    """

    value: float
    low: float
    high: float
    se_log: float
    se_within: float
    z: float
    critical: float
    n_run: int
    n_base: int
    run_sd_used: float
    slower: bool
    no_slowdown: bool
    at_bound: bool
    few_points: bool
    smallest_detectable: float
    start_shift: float | None


@dataclass(frozen=True)
class Gap:
    """Score of the baseline minus the run over the last part; positive means the run is behind.

    `value`, `low`, `high` (two-sided 95 %), `se` in score units; `relative` is value / `baseline_gain`;
    `threshold` is what `relative` had to exceed to be `harm`.
    """

    value: float
    low: float
    high: float
    se: float
    n: int
    baseline_gain: float
    relative: float
    threshold: float
    harm: bool
    paired: bool


@dataclass(frozen=True)
class SingleRun:
    """Whether one run slowed at a known switch; p values are one-sided, None marks what was not computed."""

    slowed: bool
    p_extrapolation: float | None
    p_concave: float | None
    p_kink: float | None
    p_falling: float | None
    slope_ratio: float | None
    concave_share: float | None
    n_pre: int
    n_post: int
    reason: str


# -- the saturating curve ----------------------------------------------------------------------------------
#
# Time u is scaled to [0, 1].  S(u) = A - B exp(-r u); r is on a logarithmic grid and so is a, with the same
# spacing, so S(a u) needs no new exponentials: its rate a r is on the grid as well.

_SHIFT = 150  # position of a = 1 on the speed grid; position 0 is SPEED_LOW
_STEP = -math.log(SPEED_LOW) / _SHIFT  # 2 %
_LOWEST, _HIGHEST = 0.01, 50.0  # r: nearly straight, and over in a fiftieth of the range
_N_RATES = round(math.log(_HIGHEST / _LOWEST) / _STEP) + 1
_N_SPEEDS = _SHIFT + int(math.log(SPEED_HIGH) / _STEP) + 1
_RATES = _LOWEST * SPEED_LOW * np.exp(_STEP * np.arange(_N_RATES + _N_SPEEDS - 1))


@dataclass(frozen=True)
class _Fits:
    """Saturating curves, one an entry: S(u) = level - drop exp(-rate[k] u)."""

    level: Array
    drop: Array
    k: np.ndarray[tuple[int, ...], np.dtype[np.intp]]

    def at(self, u: Array, log_speed: float = 0.0, entry: int = 0) -> Array:
        rate = _RATES[self.k[entry] + _SHIFT] * math.exp(log_speed)
        curve: Array = self.level[entry] - self.drop[entry] * np.exp(-rate * u)
        return curve

    def gain(self, entry: int = 0) -> float:
        """Rise of the curve over u in [0, 1]."""
        ends = self.at(np.array([0.0, 1.0]), entry=entry)
        return float(ends[1] - ends[0])


def _exponentials(u: Array) -> Array:
    return np.exp(-np.outer(u, _RATES))


def _fit(basis: Array, ys: Array) -> _Fits:
    """Least-squares saturating curve for each row of ys: A and B in closed form, best rate of the grid."""
    basis = basis[:, _SHIFT : _SHIFT + _N_RATES]
    mean = basis.mean(axis=0)
    centred = basis - mean
    power = (centred**2).sum(axis=0)
    products = ys @ centred
    k = np.argmax(products**2 / power, axis=1)
    drop = -np.take_along_axis(products, k[:, None], axis=1)[:, 0] / power[k]
    return _Fits(ys.mean(axis=1) + drop * mean[k], drop, k)


def _log_speeds(basis: Array, ys: Array, fits: _Fits, *, free_level: bool) -> tuple[Array, Array]:
    """For each row of ys the ln a that minimises sum (y(u) - S(a u))^2, and the level shift when free."""
    level = fits.level[:, None]
    columns = fits.k[:, None] + np.arange(_N_SPEEDS)
    mean_y, mean_e = ys.mean(axis=1, keepdims=True), basis.mean(axis=0)
    cross = np.take_along_axis((ys - mean_y) @ (basis - mean_e), columns, axis=1)
    power, mean = ((basis - mean_e) ** 2).sum(axis=0)[columns], mean_e[columns]
    drop = fits.drop[:, None]
    shift = mean_y - (level - drop * mean)
    misfit = 2 * drop * cross + drop**2 * power + (0 if free_level else len(basis)) * shift**2
    best = np.argmin(misfit, axis=1)
    fine = best + _vertex(misfit, best)
    shifts = np.take_along_axis(shift, best[:, None], axis=1)[:, 0]
    return _STEP * (fine - _SHIFT), shifts if free_level else np.zeros(len(ys))


def _vertex(values: Array, best: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> Array:
    """Offset of the parabola's minimum through the best grid point and its neighbours; 0 at the edges."""
    inner = np.clip(best, 1, values.shape[1] - 2)[:, None]
    left, here, right = (np.take_along_axis(values, inner + d, axis=1)[:, 0] for d in (-1, 0, 1))
    bend = left - 2 * here + right
    offset = np.where(bend > 0, 0.5 * (left - right) / np.where(bend > 0, bend, 1.0), 0.0)
    return np.where(best == inner[:, 0], np.clip(offset, -0.5, 0.5), 0.0)


# -- bringing curves to one clock --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Aligned:
    """Cleaned points on the scaled clock u = (x - origin) / span, over the range all curves cover."""

    run: Curve
    baselines: tuple[Curve, ...]
    origin: float
    span: float


def _clean(curve: Curve) -> Curve:
    """Finite points in order of x, repeated x averaged (resumed runs log a step twice)."""
    x, y = np.asarray(curve.x, dtype=np.float64).ravel(), np.asarray(curve.y, dtype=np.float64).ravel()
    if len(x) != len(y):
        raise ValueError(f"a curve has {len(x)} x and {len(y)} y")
    keep = np.isfinite(x) & np.isfinite(y)
    order = np.lexsort((y[keep], x[keep]))
    x, y = x[keep][order], y[keep][order]
    unique, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    return Curve(unique, np.bincount(index, weights=y, minlength=len(unique)) / np.maximum(counts, 1))


def _origin(curve: Curve) -> float:
    """Where the clock of a curve starts: 0 when the first point is within two spacings of 0, else there."""
    first = float(curve.x[0])
    near = 2 * float(np.median(np.diff(curve.x)))
    return 0.0 if 0 <= first <= near else first


def _align(run: Curve, baselines: Sequence[Curve], min_points: int) -> _Aligned | Untestable:
    run, cleaned = _clean(run), [_clean(b) for b in baselines]
    if not cleaned:
        return Untestable("no baseline run was given")
    shortest = min(len(c.x) for c in (run, *cleaned))
    if shortest < max(min_points, 4):
        return Untestable(f"a curve has {shortest} points, {min_points} are needed")
    origin, end = _origin(run), min(float(c.x[-1]) for c in (run, *cleaned))
    if not end > origin:
        return Untestable("the run and its baseline cover no common range of updates")
    scaled = [_scale(c, origin, end) for c in (run, *cleaned)]
    shortest = min(len(c.x) for c in scaled)
    if shortest < max(min_points, 4):
        return Untestable(f"a curve has {shortest} points in the common range, {min_points} are needed")
    return _Aligned(scaled[0], tuple(scaled[1:]), origin, end - origin)


def _scale(curve: Curve, origin: float, end: float) -> Curve:
    keep = (curve.x >= origin) & (curve.x <= end)
    return Curve((curve.x[keep] - origin) / (end - origin), curve.y[keep])


def common_range(run: Curve, baselines: Sequence[Curve]) -> tuple[float, float, int]:
    """First and last x of the range that all curves cover, and the fewest points a curve has in it.

    As `learning_speed` sees them; without a range 0 points.
    """
    aligned = _align(run, baselines, 0)
    if isinstance(aligned, Untestable):
        cleaned = [_clean(c) for c in (run, *baselines)]
        return math.nan, math.nan, min(len(_shared(c, cleaned)) for c in cleaned)
    points = min(len(c.x) for c in (aligned.run, *aligned.baselines))
    return aligned.origin, aligned.origin + aligned.span, points


def _shared(curve: Curve, curves: Sequence[Curve]) -> Array:
    """The x of a curve up to where the shortest ends."""
    end = min(float(c.x[-1]) if len(c.x) else -math.inf for c in curves)
    kept: Array = curve.x[curve.x <= end]
    return kept


def _concatenate(curves: Sequence[Curve]) -> Curve:
    return Curve(np.concatenate([c.x for c in curves]), np.concatenate([c.y for c in curves]))


def _long_run_variance(residual: Array, parameters: int) -> float:
    """Residual variance times the AR(1) inflation: n times the variance of the mean of such noise.

    phi is held to (n - 5) / (n + 5), an effective n of 5: the corrected phi of ten points can be anything.
    """
    n = len(residual)
    phi = min(ar1_phi(residual), max(n - 5, 0) / (n + 5))
    return float(residual @ residual) / max(n - parameters, 1) * inflation(phi)


def _learns(curve: Curve, basis: Array, fits: _Fits) -> Untestable | None:
    """Why a baseline does not show learning, or None when it does: the rise must be 3 standard errors."""
    residual = curve.y - fits.at(curve.x)
    column = basis[:, fits.k[0] + _SHIFT]
    power = float(((column - column.mean()) ** 2).sum())
    noise = math.sqrt(_long_run_variance(residual, 3) / power)
    drop = float(fits.drop[0])
    if abs(drop) <= max(3 * noise, 1e-9 * float(np.max(np.abs(curve.y)))):
        return Untestable("the baseline rises too little over the common range to measure a speed", "flat")
    return None if drop > 0 else Untestable("the score of the baseline falls over the common range", "falls")


# -- learning speed ----------------------------------------------------------------------------------------


def learning_speed(
    run: Curve,
    baselines: Sequence[Curve],
    *,
    run_sd: float = RUN_SD,
    min_points: int = 40,
    seed: int = 0,
) -> Speed | Untestable:
    """Speed ratio a of a run to its baselines.

    S(t) = A - B exp(-t / tau) is fitted to the baselines; a in [.05, 5] minimises sum (y(t) - S(a t))^2.  The
    clock starts at 0, or at the first point of a run resumed later; only the range all curves cover is used.
    ln a has se_within from a residual block bootstrap of all curves and se_log^2 = se_within^2 +
    run_sd^2 (1 + 1 / baselines).  With 3 or more baselines `run_sd` gives way to what they measure
    (`_run_to_run`); that sd holds the noise within a run too, which errs towards caution.
    slower iff a < .8 and z < -1.645 (or the t quantile).  When the run starts at another score (3 standard
    errors and 10 % of the gain), a constant shift is fitted along.  Use min_points = 8 for validation curves;
    at 8 to 20 points with strongly autocorrelated noise (phi .5) false alarms reach .12 of nominal .05.
    """
    aligned = _align(run, baselines, min_points)
    if isinstance(aligned, Untestable):
        return aligned
    pooled = _concatenate(aligned.baselines)
    basis = _exponentials(pooled.x)
    fits = _fit(basis, pooled.y[None])
    problem = _learns(pooled, basis, fits)
    if problem is not None:
        return problem
    shifted = _starts_apart(aligned.run, pooled, fits)
    log_a, shift = _log_speeds(_exponentials(aligned.run.x), aligned.run.y[None], fits, free_level=shifted)
    point, offset = float(log_a[0]), float(shift[0])
    se = _bootstrap_se(aligned, fits, point, offset, free_level=shifted, seed=seed)
    sd, critical = _run_to_run(aligned.baselines, fits, run_sd)
    fewest = min(len(c.x) for c in (aligned.run, *aligned.baselines))
    draft = Speed(
        value=math.nan,
        low=math.nan,
        high=math.nan,
        se_log=math.sqrt(se**2 + sd**2 * (1 + 1 / len(aligned.baselines))),
        se_within=se,
        z=math.nan,
        critical=critical,
        n_run=len(aligned.run.x),
        n_base=len(pooled.x),
        run_sd_used=sd,
        slower=False,
        no_slowdown=False,
        at_bound=min(point - math.log(SPEED_LOW), math.log(SPEED_HIGH) - point) < 1.5 * _STEP,
        few_points=fewest < 2.5 * min_points,
        smallest_detectable=math.nan,
        start_shift=offset if shifted else None,
    )
    return _judge(draft, point)


def _judge(speed: Speed, log_a: float) -> Speed:
    """The same evidence read at ln a: interval, z and verdict.

    Power: ln a_hat must fall below both ln .8 and -critical se, so the ratio shown with probability .8 is
    exp(min(ln .8, -critical se) - .84 se).
    """
    se, half = speed.se_log, speed.critical * speed.se_log
    return replace(
        speed,
        value=math.exp(log_a),
        low=math.exp(log_a - half),
        high=math.exp(log_a + half),
        z=log_a / se if se > 0 else math.copysign(math.inf, log_a) if log_a else 0.0,
        slower=log_a < math.log(MARGIN) and log_a < -half,
        no_slowdown=log_a >= math.log(MARGIN),
        smallest_detectable=math.exp(min(math.log(MARGIN), -half) - normal_quantile(0.8) * se),
    )


def _starts_apart(run: Curve, pooled: Curve, fits: _Fits) -> bool:
    """Whether the run starts at another score than the baseline: the fitted values at u = 0 differ."""
    if len(run.x) < 20:
        return False
    (start, variance), (base, base_variance) = _start(run), _start(pooled)
    difference = abs(start - base)
    return difference > max(3 * math.sqrt(variance + base_variance), 0.1 * abs(fits.gain()))


def _start(curve: Curve) -> tuple[float, float]:
    """Fitted value at u = 0 and its variance v g' (J'J)^-1 g, v the long-run residual variance."""
    fits = _fit(_exponentials(curve.x), curve.y[None])
    residual = curve.y - fits.at(curve.x)
    _, _, inverse = least_squares(_gradient(fits, curve.x), residual)
    ahead = _gradient(fits, np.zeros(1))[0]
    return float(fits.at(np.zeros(1))[0]), _long_run_variance(residual, 3) * float(ahead @ inverse @ ahead)


def _bootstrap_se(aligned: _Aligned, fits: _Fits, log_a: float, offset: float, *, free_level: bool, seed: int) -> float:
    """Sd of ln a over block-bootstrap copies of the run about S(a u) and of each baseline about S(u)."""
    rng = np.random.default_rng(seed)
    run_copies = _copies(aligned.run, fits.at(aligned.run.x, log_a) + offset, rng, 2 if free_level else 1)
    base_copies = [_copies(b, fits.at(b.x), rng, 3) for b in aligned.baselines]
    pooled = _concatenate(aligned.baselines)
    refits = _fit(_exponentials(pooled.x), np.concatenate(base_copies, axis=1))
    log_as, _ = _log_speeds(_exponentials(aligned.run.x), run_copies, refits, free_level=free_level)
    return float(log_as.std(ddof=1))


def _copies(curve: Curve, fitted: Array, rng: np.random.Generator, parameters: int) -> Array:
    n = len(curve.x)
    residual = (curve.y - fitted) * math.sqrt(n / max(n - parameters, 1))
    return fitted + block_bootstrap(residual, rng, DRAWS)


def _run_to_run(baselines: Sequence[Curve], fits: _Fits, run_sd: float) -> tuple[float, float]:
    """Sd of ln a between runs, and the quantile to hold z against.

    Below 3 baselines the default and the normal quantile.  From 3 on the default is pooled with the measured
    ln a_i of the m baselines against their common fit, sd^2 = (4 run_sd^2 + sum (ln a_i - mean)^2) / (3 + m),
    with Student's t at 3 + m degrees of freedom (the scaled inverse chi-square prior of a normal variance).
    The measured sd alone would need t = 2.92 at 3 baselines, and three would then show less than one.
    """
    m = len(baselines)
    if m < 3:
        return run_sd, normal_quantile(LEVEL)
    own = [_log_speeds(_exponentials(b.x), b.y[None], fits, free_level=False)[0][0] for b in baselines]
    df = RUN_SD_WEIGHT + m - 1
    return math.sqrt((RUN_SD_WEIGHT * run_sd**2 + (m - 1) * float(np.var(own, ddof=1))) / df), t_quantile(LEVEL, df)


def per_sample(speed: Speed, samples_per_update_run: float, samples_per_update_base: float) -> Speed:
    """The speed ratio with samples as the clock: a (base samples per update) / (run samples per update)."""
    return _on_clock(speed, samples_per_update_base, samples_per_update_run)


def per_hour(speed: Speed, updates_per_hour_run: float, updates_per_hour_base: float) -> Speed:
    """The speed ratio with wall time as the clock: a (run updates per hour) / (base updates per hour)."""
    return _on_clock(speed, updates_per_hour_run, updates_per_hour_base)


def _on_clock(speed: Speed, numerator: float, denominator: float) -> Speed:
    if not (numerator > 0 and denominator > 0 and math.isfinite(numerator / denominator)):
        raise ValueError(f"rates must be positive and finite: {numerator}, {denominator}")
    return _judge(speed, math.log(speed.value) + math.log(numerator) - math.log(denominator))


# -- the gap at the end ------------------------------------------------------------------------------------


def end_gap(
    run: Curve,
    baseline: Curve,
    share: float = 0.5,
    *,
    min_points: int = 8,
    run_sd: float = RUN_SD,
    sd_baseline: float | None = None,
) -> Gap | Untestable:
    """How far the run is behind over the last `share` of the common range, in score units.

    Mean of baseline - run over common x, else of the baseline's fitted curve - run over the run's x.
    se^2 = se_run^2 + se_base^2 + 2 sd_run^2, the first two from the residuals about each curve's own fit with
    AR(1) inflation, and sd_run = run_sd mean(u S'(u)): what a run-to-run sd of ln a does to the score.  Give
    `sd_baseline` (score units) when repeats measured the sd of that mean over seeds: se = sqrt 2 sd_baseline.
    harm iff gap > max(.035 gain, 2 se), where gain is the rise of the baseline's fitted curve, which must be
    measurable; with `sd_baseline` 2 se is 2 sqrt 2 sd_baseline.
    """
    aligned = _align(run, [baseline], min_points)
    if isinstance(aligned, Untestable):
        return aligned
    own, base = aligned.run, aligned.baselines[0]
    basis = _exponentials(base.x)
    fits = _fit(basis, base.y[None])
    problem = _learns(base, basis, fits)
    if problem is not None:
        return problem
    _, difference, paired = _differences(own, base, fits, 1 - share)
    if len(difference) < 4:
        return Untestable(f"the run has {len(difference)} points in the last part, 4 are needed")
    noise = sum(_mean_variance(c, len(difference)) for c in (own, base))
    between = 2 * (run_sd * _sensitivity(fits, 1 - share)) ** 2
    se = math.sqrt(noise + between) if sd_baseline is None else math.sqrt(2) * sd_baseline
    return _judge_gap(float(difference.mean()), se, fits.gain(), len(difference), paired=paired)


def _judge_gap(value: float, se: float, gain: float, n: int, *, paired: bool) -> Gap:
    half, threshold = normal_quantile(0.975) * se, max(GAP_FLOOR, 2 * se / gain)
    return Gap(
        value=value,
        low=value - half,
        high=value + half,
        se=se,
        n=n,
        baseline_gain=gain,
        relative=value / gain,
        threshold=threshold,
        harm=value / gain > threshold,
        paired=paired,
    )


def _differences(run: Curve, base: Curve, fits: _Fits, start: float) -> tuple[Array, Array, bool]:
    """u and baseline minus run for u >= start; paired when half of the run's points have a partner."""
    keep = run.x >= start
    x, y = run.x[keep], run.y[keep]
    common, mine, theirs = np.intersect1d(np.round(x, 9), np.round(base.x, 9), return_indices=True)
    if 2 * len(common) >= len(x) > 0:
        return common, base.y[theirs] - y[mine], True
    return x, fits.at(x) - y, False


def _mean_variance(curve: Curve, n: int) -> float:
    """Variance of the mean of n points of a curve: noise about its own smooth fit, AR(1) inflated."""
    fits = _fit(_exponentials(curve.x), curve.y[None])
    return _long_run_variance(curve.y - fits.at(curve.x), 3) / n


def _sensitivity(fits: _Fits, start: float) -> float:
    """Mean of u S'(u) over u in [start, 1]: change of the mean score per unit of ln a."""
    u = np.linspace(start, 1, 101)
    return float(np.mean(_clock_gradient(fits, u)))


# -- when it began -----------------------------------------------------------------------------------------


def onset(run: Curve, baseline: Curve, *, min_points: int = 40, run_sd: float = RUN_SD) -> tuple[float, float] | None:
    """Interval (in x) that holds the update t0 at which the run began to fall behind in 9 of 10 runs found slower.

    Its high end is where the run had begun to fall behind at the latest; its low end is 0 unless a stretch without
    a fall is shown.  d(t) = run - baseline is modelled as r t S'(t) - c h(t), c >= 0, with AR(1) errors: r, of sd
    sqrt 2 run_sd, is how much faster equal runs of the two seeds would differ in ln clock.  The fall h is m - m(t0)
    or its square after t0, on the clock m of time or of the baseline's own progress S(t): a gap grows with the
    progress missed, a collapse with time, and a harm that builds up as the square.  t0 is kept while the best of
    the four fits it to within t^2 (95 %, as the shapes are approximate) of the best of all.  As a gap may close
    again, only the points up to the widest smoothed gap (at least 40 %) are used.  The ends are points of the run
    or the start: nothing is known between two points.
    None when no fall is shown: never to fall must fit worse by 10, which pays for the search over t0 and h.
    Ask only of a run found slower: some healthy pairs still get an interval.
    """
    aligned = _align(run, [baseline], min_points)
    if isinstance(aligned, Untestable):
        return None
    own, base = aligned.run, aligned.baselines[0]
    fits = _fit(_exponentials(base.x), base.y[None])
    u, gap, _ = _differences(own, base, fits, 0.0)
    stop = _widest(gap)
    u, fall = u[:stop], -gap[:stop]
    starts = np.linspace(0, 0.95 * float(u[-1]), 100)
    ramps = [np.maximum(0.0, m(u)[:, None] - m(starts)) for m in (np.asarray, fits.at)]
    falls = np.concatenate([*ramps, *(ramp**2 for ramp in ramps)], axis=1)
    misfit, never = _fall_misfits(falls, fall, _clock_gradient(fits, u), math.sqrt(2) * run_sd)
    misfit = misfit.reshape(4, -1).min(axis=0)
    best = float(misfit.min())
    if not never - best > 10:
        return None
    kept = starts[misfit <= best + t_quantile(0.975, max(len(u) - 4, 1)) ** 2]
    ends = np.concatenate([[0.0], u])
    low = ends[np.searchsorted(ends, max(0.0, kept[0] - starts[1]), side="right") - 1]
    high = ends[np.searchsorted(ends, min(float(u[-1]), kept[-1] + starts[1]))]
    return round(aligned.origin + aligned.span * low, 9), round(aligned.origin + aligned.span * high, 9)


def _clock_gradient(fits: _Fits, u: Array) -> Array:
    """u S'(u): change of the score per unit of ln a."""
    rate = float(_RATES[fits.k[0] + _SHIFT])
    gradient: Array = fits.drop[0] * rate * u * np.exp(-rate * u)
    return gradient


def _widest(gap: Array) -> int:
    """Number of points up to the peak of the gap's running mean (window n / 5), at least 40 % of them."""
    n = len(gap)
    window = max(3, n // 5)
    smooth = np.convolve(gap, np.ones(window) / window, mode="valid")
    return max(int(np.argmax(smooth)) + window, math.ceil(0.4 * n))


def _fall_misfits(falls: Array, y: Array, clock: Array, clock_sd: float) -> tuple[Array, float]:
    """-2 ln likelihood, but for a constant, of each fall (coefficient <= 0) beside r clock, and without any fall.

    phi and the noise are those of the best fall beside a free r; then r has its sd, which is a point more: 0 = r.
    """
    rest = _beside(falls, y, clock, 0.0, 0.0)
    best = rest[:, np.argmin((rest**2).sum(axis=0))]
    phi = ar1_phi(best[:-1])
    rest = _beside(falls, y, clock, phi, 0.0)
    noise = math.sqrt(float((rest**2).sum(axis=0).min()) / max(len(y) - 4, 1))
    if not noise > 0:
        return np.zeros(falls.shape[1]), 0.0
    squares = (_beside(falls, y, clock, phi, noise / clock_sd) / noise) ** 2
    misfit: Array = squares.sum(axis=0)
    return misfit[:-1], float(misfit[-1])


def _beside(falls: Array, y: Array, clock: Array, phi: float, weight: float) -> Array:
    """Whitened residuals of y, a column for each fall beside r clock and a last one for r clock alone.

    The last row is that of 0 = weight r.
    """
    rows = np.concatenate([whiten(np.column_stack([falls, 0 * y, y, clock]), phi), np.zeros((1, falls.shape[1] + 3))])
    rows[-1, -1] = weight
    along = rows[:, -1] / np.linalg.norm(rows[:, -1])
    rows = rows[:, :-1] - np.outer(along, along @ rows[:, :-1])
    residuals: Array = rows[:, -1:] - rows[:, :-1] * _slopes_down(rows[:, :-1], rows[:, -1])
    return residuals


def _slopes_down(rows: Array, y: Array) -> Array:
    """Least-squares coefficient of each column alone, 0 where it would be positive."""
    power = (rows**2).sum(axis=0)
    slopes: Array = np.minimum(rows.T @ y / np.where(power > 0, power, 1.0), 0.0)
    return slopes


# -- one run only ------------------------------------------------------------------------------------------


def single_run(curve: Curve, switch_x: float) -> SingleRun:
    """Whether learning slowed at a known switch, without a baseline: four conditions, else "cannot tell".

    (1) the points after lie below the extrapolated saturating fit of the points before, (2) a cubic with a
    kink at the switch and AR(1) errors bends down there, each at one-sided 5 %; (3) the slope after is under
    half the slope before; (4) no sigmoid explains it: either the score falls afterwards (one-sided 5 %),
    which no natural saturation does, or 40 % of the rise before came where the curve was already concave and
    (1) holds for that concave part alone.  A segmented straight-line fit calls nearly every saturating curve
    slowed; this rule has false alarms of 0 to .05 on exponential, power and sigmoid curves.  It finds
    most reversals of a curve still rising (.5 to 1 at phi .3), and neither a full stop (0 to .1) nor a
    halving of speed.  Needs 20 points on each side.
    """
    curve = _clean(curve)
    before = curve.x < switch_x
    n_pre, n_post = int(before.sum()), int((~before).sum())
    if min(n_pre, n_post) < 20:
        reason = f"{n_pre} points before and {n_post} after the switch, 20 are needed on each side"
        return SingleRun(False, None, None, None, None, None, None, n_pre, n_post, reason)
    pre, post = Curve(curve.x[before], curve.y[before]), Curve(curve.x[~before], curve.y[~before])
    concave, bend = _concave_share(pre)
    late = Curve(pre.x[pre.x >= bend], pre.y[pre.x >= bend])
    draft = SingleRun(
        slowed=False,
        p_extrapolation=_extrapolation_p(pre, post),
        p_concave=_extrapolation_p(late, post) if len(late.x) >= 20 else None,
        p_kink=_kink_p(curve, switch_x),
        slope_ratio=_slope_ratio(pre, post),
        concave_share=concave,
        p_falling=_falling_p(post),
        n_pre=n_pre,
        n_post=n_post,
        reason="",
    )
    obstacle = _why_not_slowed(draft)
    return replace(draft, slowed=obstacle is None, reason=obstacle or "learning slowed at the switch")


def _why_not_slowed(run: SingleRun) -> str | None:
    """The first condition that fails, or None when all hold."""
    if run.slope_ratio is None:
        return "no learning before the switch to compare with"
    if not (_below(run.p_extrapolation) and _below(run.p_kink) and run.slope_ratio < 0.5):
        return CANNOT_TELL
    concave = run.concave_share is not None and run.concave_share >= 0.4 and _below(run.p_concave)
    if not (concave or _below(run.p_falling)):
        return "the curve may be a sigmoid past its inflexion; " + CANNOT_TELL
    return None


def _below(p: float | None) -> bool:
    return p is not None and p < 0.05


def _falling_p(post: Curve) -> float | None:
    """One-sided p for a negative AR(1) slope after the switch."""
    trend = slope(post.x, post.y)
    if trend is None or not trend.se > 0:
        return None
    return t_below(trend.value / trend.se, trend.n - 3)


def _extrapolation_p(pre: Curve, post: Curve) -> float:
    """One-sided p that the mean after the switch is below the saturating curve fitted before it.

    z = mean(y - S) / sqrt(v / n_post + j' C j), v the long-run residual variance, C = v (J'J)^-1 that of
    (A, B, ln tau), j the mean gradient over the points after.
    """
    origin, span = float(pre.x[0]), float(pre.x[-1] - pre.x[0])
    u, later = (pre.x - origin) / span, (post.x - origin) / span
    fits = _fit(_exponentials(u), pre.y[None])
    residual = pre.y - fits.at(u)
    variance = _long_run_variance(residual, 3)
    _, _, inverse = least_squares(_gradient(fits, u), residual)
    ahead = _gradient(fits, later).mean(axis=0)
    se = math.sqrt(variance * (1 / len(later) + float(ahead @ inverse @ ahead)))
    miss = float(np.mean(post.y - fits.at(later)))
    return t_below(miss / se, len(u) - 3) if se > 0 else float(miss >= 0)


def _gradient(fits: _Fits, u: Array) -> Array:
    """Derivatives of A - B exp(-r u) by A, B and ln r."""
    rate, drop = float(_RATES[fits.k[0] + _SHIFT]), float(fits.drop[0])
    decay = np.exp(-rate * u)
    return np.column_stack([np.ones_like(u), -decay, drop * rate * u * decay])


def _kink_p(curve: Curve, switch_x: float) -> float:
    """One-sided p for k < 0 in cubic(t) + k max(0, t - switch) with AR(1) errors."""
    centre, half = (curve.x[0] + curve.x[-1]) / 2, (curve.x[-1] - curve.x[0]) / 2
    v = (curve.x - centre) / half
    design = np.column_stack([np.ones_like(v), v, v**2, v**3, np.maximum(0.0, v - (switch_x - centre) / half)])
    _, residual, _ = least_squares(design, curve.y)
    phi = ar1_phi(residual)
    coefficients, residual, inverse = least_squares(whiten(design, phi), whiten(curve.y, phi))
    df = len(v) - 6
    se = math.sqrt(float(residual @ residual) / df * float(inverse[4, 4]))
    return t_below(float(coefficients[4]) / se, df) if se > 0 else 1.0


def _slope_ratio(pre: Curve, post: Curve) -> float | None:
    """Straight-line slope after over before; None when the score did not rise before."""
    before, after = (float(np.polyfit(c.x - c.x.mean(), c.y, 1)[0]) for c in (pre, post))
    return after / before if before > 0 else None


def _concave_share(pre: Curve) -> tuple[float | None, float]:
    """Share of the rise before the switch where a cubic is concave (None without a rise), and the last bend.

    The bend is the x after which the cubic stays concave; the last x when it is not concave at the end.
    """
    first, span = float(pre.x[0]), float(pre.x[-1] - pre.x[0])
    cubic = np.polynomial.Polynomial.fit((pre.x - first) / span, pre.y, 3)
    grid = np.linspace(0, 1, 201)
    rises = np.diff(cubic(grid))
    convex = cubic.deriv(2)((grid[1:] + grid[:-1]) / 2) >= 0
    bend = first + span * float(np.max(grid[1:][convex], initial=0.0))
    total = float(rises.sum())
    return (float(np.clip(rises[~convex].sum() / total, 0, 1)) if total > 0 else None), bend
