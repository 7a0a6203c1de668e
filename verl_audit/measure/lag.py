"""Step 2 measures: lag in versions and updates, and the share of the training signal that off-policy samples cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from verl_audit.measure.gap import GAPS, at_lag0, ess_series, lag0_steps
from verl_audit.measure.model import Measure
from verl_audit.measure.run import Array, RunData, Series, mean_measure, measured
from verl_audit.measure.stats import correlation_of_changes, slope

LAG_MOVES = 0.05
"""Standard deviation of step-to-step changes of the mean lag (versions) below which it says nothing about the gap."""
MAX_LAG = ("lag_oldest_max", "lag_newest_max")


def mean_lag(run: RunData) -> Series:
    """Middle of newest- and oldest-token mean lag, else the one average there is. Versions."""
    newest, oldest = run.get("lag_newest_mean"), run.get("lag_oldest_mean")
    if len(newest) and len(oldest):
        common = np.intersect1d(newest.step, oldest.step)
        middle = (newest.value[np.isin(newest.step, common)] + oldest.value[np.isin(oldest.step, common)]) / 2
        return Series(common, middle)
    return run.get("lag_newest_mean", "lag_oldest_mean", "lag_mean")


def in_updates(lag: float, updates_per_version: float) -> float:
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
    gauge = run.get(*GAPS)
    common = np.intersect1d(lag.step, gauge.step)
    x, y = lag.value[np.isin(lag.step, common)], gauge.value[np.isin(gauge.step, common)]
    if len(x) < 3 or np.diff(x).std() < LAG_MOVES:
        return measured("lag_gap_correlation", None)
    return measured("lag_gap_correlation", correlation_of_changes(x, y))


def _stale_share(run: RunData) -> Measure:
    """fully_async counts trained rows with lag >= 1 cumulatively; a restart sets the count back to 0."""
    total, per_step = run.get("stale_trajectories_total"), run.number("samples_per_step")
    if len(total) < 2 or not per_step:
        return measured("stale_share", None)
    grown = np.diff(total.value)
    stale = float(np.where(grown < 0, total.value[1:], grown).sum())
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
    yield from _split(run, baselines, loss, share)


def _active_clip(run: RunData) -> Array:
    """clip_share where it is known to compare with the rollout policy; elsewhere 0 would prove nothing."""
    if "clip_share" in run.inert or run.facts.get("log_prob_mode") != "bypass":
        return np.array([])
    return run.get("clip_share").value


def off_policy_loss(run: RunData, clip_excess: float | None) -> float | None:
    """max(clip excess, (1 - ESS)/2): share of the signal lost; None when neither gauge was logged."""
    ess = ess_series(run)
    parts = [max(0.0, (1 - float(ess.value.mean())) / 2)] if len(ess) else []
    parts += [] if clip_excess is None else [max(0.0, clip_excess)]
    return max(parts, default=None)


def mismatch_share(run: RunData, baselines: Sequence[RunData]) -> Measure:
    """Bracket [r^2, r] of the share there at lag 0; r from lag-0 steps, else from a baseline of equal numerics."""
    lag = run.get(*MAX_LAG, "lag_mean")
    steps = lag0_steps(run)
    if steps is not None and (len(lag) == 0 or not np.any(lag.value > 0)):
        return measured("mismatch_share", 1.0 if len(run.train_steps) else None, low=1.0, high=1.0)
    gauge = next((g for g in GAPS if run.has(g)), None)
    level = None if gauge is None else _lag0_level(run, baselines, gauge)
    total = float(run.get(gauge).value.mean()) if gauge else 0.0
    if level is None or total <= 0:
        return measured("mismatch_share", None)
    r = float(np.clip(level / total, 0, 1))
    return measured("mismatch_share", (r + r * r) / 2, low=r * r, high=r)


def _lag0_level(run: RunData, baselines: Sequence[RunData], gauge: str) -> float | None:
    own = at_lag0(run, run.get(gauge)).value
    if len(own):
        return float(own.mean())
    numerics = ("rollout_quantization", "rollout_dtype", "trainer_dtype")
    alike = [
        b
        for b in baselines
        if all(run.facts.get(f) is not None and run.facts.get(f) == b.facts.get(f) for f in numerics)
    ]
    theirs = [at_lag0(b, b.get(gauge)).value for b in alike]
    found = np.concatenate(theirs) if theirs else np.array([])
    return float(found.mean()) if len(found) else None


def _split(run: RunData, baselines: Sequence[RunData], loss: float | None, share: Measure) -> Iterator[Measure]:
    lag = run.get(*MAX_LAG, "lag_mean")
    on_policy = lag0_steps(run) is not None and (len(lag) == 0 or not np.any(lag.value > 0))
    part = share.number()
    base = [x for x in (off_policy_loss(b, None) for b in baselines if _is_on_policy(b)) if x is not None]
    floor = float(np.mean(base)) if base else 0.0
    if loss is not None and part is not None and base and not on_policy and not len(_own_level(run)):
        yield from _split_by_baseline(loss, share, floor)
        return
    if loss is None or part is None:
        yield measured("damage_mismatch", None, low=0.0 if loss is not None else None, high=loss)
    else:
        low, high = ((share.low or 0.0) * loss - floor, (share.high or 0.0) * loss - floor)
        yield measured("damage_mismatch", max(0.0, part * loss - floor), low=max(0.0, low), high=max(0.0, high))
    if on_policy:
        yield measured("damage_staleness", 0.0, low=0.0, high=0.0)
    elif loss is None or part is None:
        yield measured("damage_staleness", None, low=0.0 if loss is not None else None, high=loss)
    else:
        yield measured(
            "damage_staleness",
            (1 - part) * loss,
            low=(1 - (share.high or 0)) * loss,
            high=(1 - (share.low or 0)) * loss,
        )


def _split_by_baseline(loss: float, share: Measure, floor: float) -> Iterator[Measure]:
    """Without a lag-0 step of its own a run is taken to have its baseline's mismatch; the rest is staleness."""
    low, high = share.low or 0.0, share.high or 0.0
    yield measured("damage_mismatch", 0.0, low=0.0, high=max(0.0, high * loss - floor))
    beyond = max(0.0, loss - floor)
    yield measured("damage_staleness", beyond, low=min(beyond, (1 - high) * loss), high=max(beyond, (1 - low) * loss))


def _own_level(run: RunData) -> Array:
    return at_lag0(run, run.get(*GAPS)).value


def _is_on_policy(run: RunData) -> bool:
    lag = run.get(*MAX_LAG, "lag_mean")
    return lag0_steps(run) is not None and (len(lag) == 0 or not np.any(lag.value > 0))
