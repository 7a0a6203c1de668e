"""Series to draw: what a run logged over its steps, thinned to a bounded number of points, on three clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_audit.measure.eviction import REASONS
from verl_audit.measure.gap import GAPS, ess_series, largest_lag
from verl_audit.measure.lag import mean_lag
from verl_audit.measure.run import EMPTY, RunData, Series
from verl_audit.measure.speed import Evidence, Symptom, shared_validation, updates_per_step
from verl_audit.measure.stats import Array
from verl_audit.measure.symptom import Curve, common_range

MAX_POINTS = 120
"""Points of a drawn line; a page 900 pixels wide shows no more of a noisy curve."""
MAX_BASELINES = 4
"""Baselines whose reward is drawn; further ones count in the statistics and would only crowd a figure."""
DIGITS = 5
"""Significant digits of a drawn value."""
Clock = Literal["update", "sample", "hour"]
CLOCKS: tuple[Clock, ...] = ("update", "sample", "hour")
OWN = (
    "lag_newest_mean", "lag_oldest_mean", "lag_mean", "lag_oldest_max", "clip_share", *REASONS,
    "time_gen", "wait_seconds", "time_update_actor", "time_old_log_prob", "time_update_weights",
    "trainer_idle_share", "rollout_idle_share",
)  # fmt: skip
"""Signals drawn of the audited run alone."""
COMPARED = (
    *GAPS, "ess", "time_step", "response_length_mean", "prompt_length_mean", "entropy", "grad_norm",
)  # fmt: skip
"""Signals drawn beside the first baseline's."""


@dataclass(frozen=True)
class Line:
    """One drawn line. `low` and `high` are the extremes of the points that a drawn point stands for.

    `clocks` gives its points on each clock, None where the run does not tell it.
    """

    run: str
    points: int
    step: Array
    value: Array
    low: Array | None = None
    high: Array | None = None
    clocks: Mapping[str, Array | None] | None = None


@dataclass(frozen=True)
class Quantity:
    """Lines of one quantity, the audited run's first."""

    name: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Drawn:
    """Everything a report draws of a run beside its baselines."""

    reward: tuple[Quantity, ...]
    """`validation` and `trained_reward`, each where the run has it."""
    signals: tuple[Quantity, ...]
    window: Mapping[str, tuple[float, float] | None]
    """The range over which learning speed was compared, in steps and on each clock; empty when it was not."""
    onset: Mapping[str, tuple[float, float] | None]
    """The onset of the symptom, likewise."""
    began: Mapping[str, int]
    """First step at which a cause's mechanism shows: a lag above 0, an evicted group."""


def draw(run: RunData, baselines: Sequence[RunData], found: Symptom) -> Drawn:
    """Thin everything worth drawing; deterministic, and bounded by `MAX_POINTS` a line."""
    with np.errstate(all="ignore"):  # values near the end of the float range overflow; such a point is left out
        return _draw(run, baselines, found)


def _draw(run: RunData, baselines: Sequence[RunData], found: Symptom) -> Drawn:
    reward = dict(_reward(run, baselines))
    judged = _judged(run, baselines, found)
    return Drawn(
        reward=tuple(_quantity(name, (run, *baselines), lines) for name, lines in reward.items()),
        signals=tuple(_signals(run, baselines)),
        window=_on_clocks(run, judged),
        onset=_on_clocks(run, found.onset),
        began=_began(run),
    )


def thinned(series: Series, limit: int = MAX_POINTS) -> tuple[Array, Array, Array | None, Array | None]:
    """Step, value, low and high: beyond `limit` points, means and extremes of `limit` runs of neighbours."""
    if len(series) <= limit:
        return series.step, series.value, None, None
    starts = np.linspace(0, len(series), limit + 1).astype(int)[:-1]
    size = np.diff(np.append(starts, len(series)))
    step, value = (np.add.reduceat(a, starts) / size for a in (series.step, series.value))
    return step, value, np.minimum.reduceat(series.value, starts), np.maximum.reduceat(series.value, starts)


def on_clock(run: RunData, step: Array, clock: str) -> Array | None:
    """Steps on another clock: optimizer updates, trained samples, hours; None when the run does not tell it.

    Hours add up the time of each step; steps whose time was not logged count as the next one that was.
    """
    if clock == "hour":
        return _hours(run, step)
    rate = run.number("updates_per_version" if clock == "update" else "samples_per_step")
    return None if not rate else step * rate


def _hours(run: RunData, step: Array) -> Array | None:
    taken = run.get("time_step")
    taken = taken.at(lambda s: s > 0)
    if not len(taken) or not 0 < float(taken.value.mean()) < np.inf:
        return None
    seconds = np.cumsum(taken.value * np.diff(taken.step, prepend=0.0))
    hours: Array = np.interp(step, np.append(0.0, taken.step), np.append(0.0, seconds)) / 3600
    return hours


def _reward(run: RunData, baselines: Sequence[RunData]) -> Iterator[tuple[Evidence, list[Series]]]:
    validation = shared_validation(run, baselines)
    own = validation if len(validation[0]) else [r.get("validation") for r in (run, *baselines)]
    if any(map(len, own)):
        yield "validation", own
    trained = [r.get("score_trained", "reward_trained") for r in (run, *baselines)]
    if len(trained[0]):
        yield "trained_reward", trained


def _quantity(name: str, runs: Sequence[RunData], series: Sequence[Series]) -> Quantity:
    pairs = list(zip(runs, series, strict=True))[: MAX_BASELINES + 1]
    shared = bool(updates_per_step(runs[0], runs[1:]))
    return Quantity(name, tuple(_line(r, s, updates=shared) for r, s in pairs if len(s)))


def _line(run: RunData, series: Series, *, updates: bool) -> Line:
    step, value, low, high = thinned(series)
    clocks: dict[str, Array | None] = {clock: on_clock(run, step, clock) for clock in CLOCKS}
    if not updates:  # as the statistics do where some run's updates are not known: step by step
        clocks["update"] = step
    return Line(run.name, len(series), step, value, low, high, clocks)


def _signals(run: RunData, baselines: Sequence[RunData]) -> Iterator[Quantity]:
    for name in (*OWN, *COMPARED):
        runs = (run, *baselines[:1]) if name in COMPARED else (run,)
        series = [signal_of(r, name) for r in runs]
        if not len(series[0]):
            continue
        yield Quantity(name, tuple(_plain(r, s) for r, s in zip(runs, series, strict=True) if len(s)))


def _plain(run: RunData, series: Series) -> Line:
    return Line(run.name, len(series), *thinned(series))


def _judged(run: RunData, baselines: Sequence[RunData], found: Symptom) -> tuple[float, float] | None:
    """First and last step that the compared curves share, in the run's own steps."""
    if found.per_update is None:
        return None
    series = dict(_reward(run, baselines)).get("validation" if found.evidence == "validation" else "trained_reward")
    if series is None:
        return None
    factors = updates_per_step(run, baselines) or [1.0] * len(series)
    curves = [Curve(s.step * f, s.value) for s, f in zip(series, factors, strict=True) if len(s)]
    first, last, _ = common_range(curves[0], curves[1:])
    return (first / factors[0], last / factors[0]) if np.isfinite(first) else None


def _on_clocks(run: RunData, interval: tuple[float, float] | None) -> dict[str, tuple[float, float] | None]:
    if interval is None:
        return {}
    ends = np.array(interval)
    on: dict[str, Array | None] = {"step": ends, **{clock: on_clock(run, ends, clock) for clock in CLOCKS}}
    on["update"] = ends if on["update"] is None else on["update"]
    return {clock: None if at is None else (float(at[0]), float(at[1])) for clock, at in on.items()}


def _began(run: RunData) -> dict[str, int]:
    lag = largest_lag(run)
    evicted = [run.get(reason) for reason in REASONS]
    first = {
        "staleness": lag.step[lag.value > 0],
        "eviction": np.sort(np.concatenate([s.step[s.value > 0] for s in evicted])),
    }
    return {cause: int(steps[0]) for cause, steps in first.items() if len(steps)}


def side_by_side(runs: Sequence[RunData], names: Sequence[str]) -> tuple[Quantity, ...]:
    """The named signals of several runs, a line for each run that has one, on every clock."""
    with np.errstate(all="ignore"):
        shared = bool(updates_per_step(runs[0], runs[1:]))
        found = [(name, [(r, signal_of(r, name)) for r in runs if len(signal_of(r, name))]) for name in names]
        return tuple(
            Quantity(name, tuple(_line(r, s, updates=shared) for r, s in having)) for name, having in found if having
        )


def rewards(runs: Sequence[RunData]) -> tuple[tuple[Evidence, tuple[Series, ...]], ...]:
    """Validation and trained reward of several runs, the validation over the metrics that all of them logged."""
    return tuple((name, tuple(series)) for name, series in _reward(runs[0], runs[1:]))


def reward_lines(runs: Sequence[RunData]) -> tuple[Quantity, ...]:
    """As `rewards`, thinned and on every clock."""
    shared = bool(updates_per_step(runs[0], runs[1:]))
    return tuple(
        Quantity(name, tuple(_line(r, s, updates=shared) for r, s in zip(runs, series, strict=True) if len(s)))
        for name, series in rewards(runs)
    )


def signal_of(run: RunData, name: str) -> Series:
    """A signal as it is drawn: the effective sample size also from chi-square, and none that cannot move."""
    if run.blind(name):
        return EMPTY
    return ess_series(run) if name == "ess" else mean_lag(run) if name == "lag" else run.get(name)
