"""Step 2 measures: lag in versions and updates, and the share of the training signal that off-policy samples cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from verl_audit.measure.gap import GAPS, TRENDING, at_lag0, ess_series, first_step, is_on_policy
from verl_audit.measure.model import Measure
from verl_audit.measure.run import EMPTY, RunData, Series, aligned, grown, mean_measure, measured
from verl_audit.measure.stats import MIN_POINTS, Array, Estimate, ar1_mean, correlation_of_changes, slope

Number = TypeVar("Number", float, Array)
LAG_MOVES = 0.05
"""Standard deviation of step-to-step changes of the mean lag (versions) below which it says nothing about the gap."""


def mean_lag(run: RunData) -> Series:
    """Middle of newest- and oldest-token mean lag, else the one average there is. Versions."""
    newest, oldest = run.get("lag_newest_mean"), run.get("lag_oldest_mean")
    if len(newest) and len(oldest):
        common, young, old = aligned(newest, oldest)
        return Series(common, (young + old) / 2)
    return run.get("lag_newest_mean", "lag_oldest_mean", "lag_mean")


def in_updates(lag: Number, updates_per_version: Number) -> Number:
    """Lag in optimizer updates: k versions' worth, plus (k - 1)/2 for the mini-batches inside the cycle."""
    return updates_per_version * lag + (updates_per_version - 1) / 2


def lag_measures(run: RunData) -> Iterator[Measure]:
    """Levels, trend and self-checks of the lag."""
    for name in ("lag_newest_mean", "lag_oldest_mean", "span_mean", "partial_share"):
        yield mean_measure(name, run.get(name).value)
    for name in ("lag_newest_max", "lag_oldest_max", "span_max"):
        series = run.get(name)
        yield measured(name, float(series.value.max()) if len(series) else None, n=len(series))
    lag, k = mean_lag(run), run.number("updates_per_version")
    middle = mean_measure("lag_mean", lag.value)
    yield middle
    yield _updates(middle, k)
    lowest = run.get("lag_newest_min", "lag_newest_mean", "lag_mean")
    yield measured("lag_min", float(lowest.value.min()) if len(lowest) else None, n=len(lowest))
    first = lowest.at(lambda s: s <= 1)
    yield measured("lag_first_step", float(first.value[0]) if len(first) else None)
    trend = slope(lag.step, lag.value)
    yield measured(
        "lag_trend",
        None if trend is None else replace(trend, value=100 * trend.value, low=100 * trend.low, high=100 * trend.high),
    )
    yield _lag_against_gap(run, lag)
    yield _stale_share(run)


def _updates(lag: Measure, k: float | None) -> Measure:
    if k is None:
        return replace(
            measured("lag_updates", None), missing="updates per version are not known from the configuration"
        )
    value, low, high = (None if v is None else in_updates(v, k) for v in (lag.number(), lag.low, lag.high))
    return measured("lag_updates", value, n=lag.n, low=low, high=high)


def _lag_against_gap(run: RunData, lag: Series) -> Measure:
    _, x, y = aligned(lag, run.get(*TRENDING))
    if len(x) < 3 or np.diff(x).std() < LAG_MOVES:
        return measured("lag_gap_correlation", None)
    return measured("lag_gap_correlation", correlation_of_changes(x, y))


def _stale_share(run: RunData) -> Measure:
    """fully_async counts trained rows with lag >= 1 cumulatively."""
    total, per_step = run.get("stale_trajectories_total"), run.number("samples_per_step")
    if len(total) < 2 or not per_step:
        return measured("stale_share", None)
    stale = grown(total.value) - float(total.value[0])
    trained = per_step * float(total.step[-1] - total.step[0])
    return measured("stale_share", min(stale / trained, 1.0) if trained > 0 else None, n=len(total))


def damage_measures(run: RunData, baselines: Sequence[RunData]) -> Iterator[Measure]:
    """Signal lost to off-policy samples, and how it splits into mismatch and staleness (method: one unit, shares)."""
    clip = _active_clip(run)
    yield mean_measure("clip_share", clip)
    base_clip = [c for c in (_active_clip(b) for b in baselines) if len(c)]
    excess = None if not len(clip) else float(clip.mean() - (np.concatenate(base_clip).mean() if base_clip else 0.0))
    yield measured("clip_excess", excess, n=len(clip))
    loss = off_policy_loss(run, excess)
    yield measured("off_policy_loss", loss)
    share = mismatch_share(run, baselines)
    yield share
    by_clip = excess is not None and loss is not None and loss <= excess
    yield _first_loss(run, baselines)
    parts = _split(run, baselines, loss, share, by_clip=by_clip)
    for name, (value, low, high) in zip(("damage_mismatch", "damage_staleness"), parts, strict=True):
        yield measured(name, value, low=low, high=high)


def _clip_series(run: RunData) -> Series:
    """clip_share where it is known to compare with the rollout policy; elsewhere 0 would prove nothing."""
    if "clip_share" in run.inert or run.facts.get("log_prob_mode") != "bypass":
        return EMPTY
    return run.get("clip_share")


def _active_clip(run: RunData) -> Array:
    return _clip_series(run).value


@dataclass(frozen=True)
class _AtLag0:
    """Loss of the lag-0 steps, and the same gauge over the whole run, from which its noise is taken."""

    fresh: Series
    whole: Array

    def level(self) -> Estimate | None:
        """Mean of what may be a few steps."""
        n = len(self.fresh)
        if not n or len(self.whole) < MIN_POINTS:
            return None
        mean, se = float(self.fresh.value.mean()), float(np.diff(self.whole).std() / np.sqrt(2 * n))
        return Estimate(mean, max(mean - 1.96 * se, 0.0), mean + 1.96 * se, n, se)

    def at_step(self, step: float | None) -> _AtLag0:
        """The same with one step left."""
        return replace(self, fresh=self.fresh.at(lambda s: s == step))


def _clip_loss(run: RunData, baselines: Sequence[RunData]) -> _AtLag0:
    """Clip fraction beyond that of on-policy baselines, in a run with one update a step.

    In bypass mode it compares with the rollout, so at lag 0 it shows what the engines disagree on. With several
    updates a step it mixes in what the earlier ones moved.
    """
    clip = _clip_series(run) if run.number("updates_per_version") == 1 else EMPTY
    theirs = [c for c in (_active_clip(b) for b in baselines if is_on_policy(b)) if len(c)]
    usual = float(np.concatenate(theirs).mean()) if theirs else 0.0
    fresh = at_lag0(run, clip)
    return _AtLag0(Series(fresh.step, np.maximum(fresh.value - usual, 0.0)), clip.value)


def _ess_loss(run: RunData, baselines: Sequence[RunData]) -> _AtLag0:
    """(1 - ESS) / 2 beyond that of on-policy baselines."""
    ess = ess_series(run)
    fresh = at_lag0(run, ess)
    lost = np.maximum((1 - fresh.value) / 2 - on_policy_loss(baselines), 0.0)
    return _AtLag0(Series(fresh.step, lost), (1 - ess.value) / 2)


def _first_loss(run: RunData, baselines: Sequence[RunData]) -> Measure:
    """Loss of the first step alone, by the clip fraction where it can be read so, else by ESS."""
    by_clip = _clip_loss(run, baselines)
    found = by_clip if len(by_clip.fresh) else _ess_loss(run, baselines)
    return measured("loss_first_step", found.at_step(first_step(run)).level())


def off_policy_loss(run: RunData, clip_excess: float | None) -> float | None:
    """max(clip excess, (1 - ESS)/2): share of the signal lost; None when neither gauge was logged."""
    ess = ess_series(run)
    parts = [max(0.0, (1 - float(ess.value.mean())) / 2)] if len(ess) else []
    parts += [] if clip_excess is None else [max(0.0, clip_excess)]
    return max(parts, default=None)


def mismatch_share(run: RunData, baselines: Sequence[RunData]) -> Measure:
    """Bracket [r^2, r] of the share there at lag 0; r from lag-0 steps, else from a baseline of equal numerics."""
    if is_on_policy(run):
        return measured("mismatch_share", 1.0 if len(run.train_steps) else None, low=1.0, high=1.0)
    gauge = next((g for g in GAPS if run.has(g)), None)
    level = None if gauge is None else _lag0_level(run, baselines, gauge)
    total = float(run.get(gauge).value.mean()) if gauge else 0.0
    if level is None or total <= 0:
        return measured("mismatch_share", None)
    r = float(np.clip(level / total, 0, 1))
    return measured("mismatch_share", (r + r * r) / 2, low=r * r, high=r)


def _alike(run: RunData, baselines: Sequence[RunData]) -> list[RunData]:
    """Baselines known to have the run's numerics, so that its mismatch is theirs."""
    numerics = ("rollout_quantization", "rollout_dtype", "trainer_dtype")
    return [
        b
        for b in baselines
        if all(run.facts.get(f) is not None and run.facts.get(f) == b.facts.get(f) for f in numerics)
    ]


def _lag0_level(run: RunData, baselines: Sequence[RunData], gauge: str) -> float | None:
    own = at_lag0(run, run.get(gauge)).value
    if len(own):
        return float(own.mean())
    alike = _alike(run, baselines)
    theirs = [at_lag0(b, b.get(gauge)).value for b in alike]
    found = np.concatenate(theirs) if theirs else np.array([])
    return float(found.mean()) if len(found) else None


Range = tuple[float | None, float | None, float | None]
"""Value, low and high."""


def _split(
    run: RunData, baselines: Sequence[RunData], loss: float | None, share: Measure, *, by_clip: bool
) -> tuple[Range, Range]:
    """Damage of mismatch and of staleness.

    Directly from ESS at lag-0 steps where there are enough of them, else by the mismatch share: its bracket from the
    run's own lag-0 level, or the baseline's level taken as the run's mismatch. What an on-policy baseline loses as
    well (`floor`) is nobody's damage; a clip excess has its baseline subtracted already.
    """
    base = [] if by_clip else _on_policy_losses(baselines)
    floor = float(np.mean(base)) if base else 0.0
    if is_on_policy(run):
        rest = None if loss is None else max(0.0, loss - floor)
        return (rest, rest, rest), (0.0, 0.0, 0.0)
    if loss is None:
        return (None, None, None), (None, None, None)
    at0 = _clip_at_lag0(run, baselines, loss) if by_clip else _ess_at_lag0(run, loss)
    if at0 is not None:
        return _ranges([max(0.0, x - floor) for x in at0], [loss - x for x in at0])
    if share.low is None or share.high is None:
        return _by_baseline(run, baselines, loss)
    if base and not len(_own_level(run)):
        beyond = max(0.0, loss - floor)
        worst = max(0.0, share.high * loss - floor)
        stale = (beyond, min(beyond, (1 - share.high) * loss), max(beyond, (1 - share.low) * loss))
        return (0.0, 0.0, worst), stale
    parts = ((share.low + share.high) / 2, share.low, share.high)
    return _ranges([max(0.0, x * loss - floor) for x in parts], [(1 - x) * loss for x in parts])


def _ess_at_lag0(run: RunData, loss: float) -> list[float] | None:
    """Loss at lag 0 with its bounds, from ESS; None where there are too few such steps."""
    found = ar1_mean(at_lag0(run, ess_series(run)).value)
    return None if found is None else [min(loss, max(0.0, (1 - e) / 2)) for e in (found.value, found.high, found.low)]


def _clip_at_lag0(run: RunData, baselines: Sequence[RunData], loss: float) -> list[float] | None:
    """The same from the clip fraction, of which one step is enough: it is a share of thousands of tokens."""
    found = _clip_loss(run, baselines).level()
    return None if found is None else [min(loss, x) for x in (found.value, found.low, found.high)]


def _on_policy_losses(baselines: Sequence[RunData]) -> list[float]:
    losses = (off_policy_loss(b, None) for b in baselines if is_on_policy(b))
    return [loss for loss in losses if loss is not None]


def on_policy_loss(baselines: Sequence[RunData]) -> float:
    """Mean (1 - ESS)/2 of the on-policy baselines: what trainer and engine lose without any lag; 0 if not known."""
    base = _on_policy_losses(baselines)
    return float(np.mean(base)) if base else 0.0


def _by_baseline(run: RunData, baselines: Sequence[RunData], loss: float) -> tuple[Range, Range]:
    """Without a gap (bypass mode): what on-policy baselines of equal numerics lose may be mismatch, the rest is not."""
    theirs = [x for b in _alike(run, baselines) if is_on_policy(b) and (x := _loss_of(b)) is not None]
    if not theirs:
        return (None, 0.0, loss), (None, 0.0, loss)
    most = max(theirs)
    rest = max(0.0, loss - most)
    return (0.0, 0.0, min(most, loss)), (rest, rest, rest)


def _loss_of(base: RunData) -> float | None:
    """Off-policy loss of an on-policy run; 0 where its clip, taken against the rollout, is 0."""
    clip = _active_clip(base)
    return off_policy_loss(base, float(clip.mean()) if len(clip) else None)


def _ranges(mismatch: Sequence[float], staleness: Sequence[float]) -> tuple[Range, Range]:
    """Both as (value, low, high); where mismatch is low, staleness is high."""
    return (mismatch[0], mismatch[1], mismatch[2]), (staleness[0], staleness[2], staleness[1])


def _own_level(run: RunData) -> Array:
    return at_lag0(run, run.get(*GAPS)).value
