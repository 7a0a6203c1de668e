"""Long tails: what the slowest trajectories add when a pool has to run empty.

Durations are relative: a sample of mean 1, sorted. N trajectories on n slots take about N m / n while every slot is
busy, and then the pool drains: the time until the last of n running trajectories ends, each caught at a random
moment of its life. That is an order statistic of the residual life, whose distribution is
F_e(x) = int_0^x (1 - F(y)) dy / m  (the equilibrium distribution of renewal theory).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from verl_audit.measure.stats import Array, normal_quantile

POINTS = 2048
"""Quantiles that stand for a fitted distribution, and steps of the grid its integrals are taken on."""
KNOTS = 48
"""Counts at which an order statistic is computed when more are asked for: between them it is near linear in the log."""


@dataclass(frozen=True)
class Durations:
    """Relative durations of trajectories: sorted, mean 1. `source` says whether they were measured or assumed."""

    sample: tuple[float, ...]
    source: str
    groups: tuple[tuple[float, ...], ...] = ()
    """Whole groups of one size, in the unit of the sample, where they were measured together: answers to one prompt are
    alike, so that a group's longest is far shorter than that of as many strangers. Empty: taken as independent."""

    @cached_property
    def values(self) -> Array:
        """The sample as an array, shape (points,)."""
        return np.array(self.sample)

    @cached_property
    def grid(self) -> Array:
        """Durations at which `residual_below` has its kinks, and enough between them. Shape (grid points,)."""
        even = np.linspace(0, self.values[-1], POINTS + 1)
        return np.unique(np.concatenate([[0.0], self.values, even]))

    @cached_property
    def residual_below(self) -> Array:
        """F_e on `grid`: the share of residual lives that end within each duration."""
        surviving = 1 - np.searchsorted(self.values, self.grid[:-1], side="right") / len(self.values)
        rising = np.concatenate([[0.0], np.cumsum(surviving * np.diff(self.grid))])
        return floats(rising / rising[-1])

    @cached_property
    def _spent(self) -> Array:
        """E[min(residual, x)] on `grid`."""
        return _integral(self.grid, 1 - self.residual_below)

    @property
    def residual_mean(self) -> float:
        """Mean residual life, E[X^2] / 2 for a mean of 1."""
        return float(self._spent[-1])

    def spent(self, within: ArrayLike) -> Array:
        """Mean time that a running trajectory still uses of the next `within`: E[min(residual, within)]."""
        return floats(np.interp(floats(within), self.grid, self._spent))

    def residual_quantile(self, share: ArrayLike) -> Array:
        """The time within which this share of running trajectories has ended."""
        return floats(np.interp(floats(share), self.residual_below, self.grid))

    def last_of(self, running: ArrayLike) -> Array:
        """Expected time until the last of `running` trajectories ends, E[max of n residual lives]."""
        return _of_each(running, lambda n: float(_integral(self.grid, 1 - self.residual_below**n)[-1]))

    def longest_of(self, started: ArrayLike) -> Array:
        """Expected duration of the longest of `started` trajectories, E[max_N]."""
        share = np.arange(len(self.values) + 1) / len(self.values)
        return _of_each(started, lambda n: float(self.values @ np.diff(share**n)))

    def until_finished(self, ended: ArrayLike, scale: float = 1.0) -> Array:
        """When a pool that begins empty has ended `ended` groups for each it can hold at first, in mean durations.

        Full at time 0, it replaces what ends at a rate of `scale` a mean duration: F(y) + scale (y - F_e(y)) have
        ended after y (one step of the renewal equation from its long-run rate). `scale` is E[max_G] for groups of
        G, whose places free one by one, and 1 for single trajectories.
        """
        below = np.searchsorted(self.values, self.grid, side="right") / len(self.values)
        count = below + scale * (self.grid - self.residual_below)
        wanted = floats(ended)
        return np.where(wanted <= count[-1], floats(np.interp(wanted, count, self.grid)), wanted / scale)

    def quantile(self, share: ArrayLike) -> Array:
        """The duration within which this share of trajectories ends, from their start."""
        return floats(np.quantile(self.values, floats(share), method="inverted_cdf"))

    def of_groups(self, size: float) -> tuple[Durations, float]:
        """Durations of whole groups, which last as long as their longest trajectory, and their mean E[max].

        From the groups measured where they are of this size, else F^size, as if members were independent.
        """
        return (self, 1.0) if size <= 1 else _of_groups(self, size)

    def drawable(self, size: float) -> Array:
        """What a simulation draws from: whole groups (groups, size) where measured at this size, else (points,)."""
        return np.array(self.groups) if self.measured_in(size) else self.values

    def measured_in(self, size: float) -> bool:
        """Whether groups of this size were measured."""
        return bool(self.groups) and len(self.groups[0]) == round(size)


@lru_cache(maxsize=64)
def _of_groups(single: Durations, size: float) -> tuple[Durations, float]:
    if single.measured_in(size):
        longest = single.drawable(size).max(axis=1)
        return from_sample(longest, f"groups of {size:g}, {single.source}"), float(longest.mean())
    longest = single.quantile(((np.arange(POINTS) + 0.5) / POINTS) ** (1 / size))
    return from_sample(longest, f"groups of {size:g}, {single.source}"), float(longest.mean())


def floats(value: ArrayLike) -> Array:
    """Any numbers as an array of floats."""
    return np.asarray(value, dtype=np.float64)


def _of_each(counts: ArrayLike, found: Callable[[float], float]) -> Array:
    """A smooth function of one count applied to many: each distinct count once, many of them by interpolation."""
    flat = np.maximum(floats(counts), 1.0)
    distinct, where = np.unique(flat, return_inverse=True)
    if len(distinct) > KNOTS:
        knots = np.geomspace(distinct[0], distinct[-1], KNOTS)
        values = floats(np.interp(np.log(distinct), np.log(knots), [found(n) for n in knots]))
    else:
        values = np.array([found(n) for n in distinct])
    return values[where].reshape(flat.shape)


def _integral(x: Array, y: Array) -> Array:
    """Running integral by trapezoids, 0 at the first x."""
    return np.concatenate([[0.0], np.cumsum(np.diff(x) * (y[1:] + y[:-1]) / 2)])


def lognormal(sigma: float, cap: float = math.inf) -> Durations:
    """Log-normal durations of log-sd `sigma`, cut at `cap` times their mean before the cut; then scaled to mean 1.

    2,048 quantiles stand for it: uncut, the longest of more trajectories than that comes out too short.
    """
    shares = (np.arange(POINTS) + 0.5) / POINTS
    raw = np.exp(sigma * np.array([normal_quantile(p) for p in shares]) - sigma**2 / 2)
    return from_sample(
        np.minimum(raw, cap), f"log-normal, sigma {sigma:.3g}" + (f", cut at {cap:.3g} x mean" * (cap < 1e9))
    )


def from_sample(lengths: ArrayLike, source: str) -> Durations:
    """Durations taken as proportional to the given lengths (tokens, characters, seconds); ValueError if none is > 0."""
    values = np.sort(np.asarray(lengths, dtype=float).ravel())
    if not len(values) or not np.isfinite(values).all() or values[0] < 0 or values[-1] <= 0:
        raise ValueError("lengths must be finite, not negative, and not all 0")
    return Durations(tuple((values / values.mean()).tolist()), source)


def from_groups(lengths: ArrayLike, source: str) -> Durations:
    """Durations of groups measured together, shape (groups, size); of many, `POINTS` evenly chosen ones are kept.

    ValueError as for `from_sample`.
    """
    table = np.asarray(lengths, dtype=float)
    single = from_sample(table, source)
    kept = table[np.linspace(0, len(table) - 1, min(len(table), POINTS)).round().astype(int)]
    return replace(single, groups=tuple(map(tuple, (kept / kept.mean()).tolist())))


def drain(durations: Durations, slots: ArrayLike) -> Array:
    """rho(n) = E[last of n residual lives] - E[residual life]: what draining n busy slots adds, in mean durations."""
    return durations.last_of(slots) - durations.residual_mean


def makespan(durations: Durations, trajectories: ArrayLike, slots: ArrayLike) -> Array:
    """Time to finish N trajectories on n slots, in mean durations: max(E[max_N], N / n + rho(n))."""
    count, n = np.broadcast_arrays(np.asarray(trajectories, float), np.asarray(slots, float))
    return floats(np.maximum(durations.longest_of(count), count / n + drain(durations, np.minimum(n, count))))


def sigma_of(largest: float, count: float) -> float:
    """Log-sd, within [0, 3], of an uncut log-normal whose expected largest of `count` draws is `largest` x its mean."""
    shares = ((np.arange(256) + 0.5) / 256) ** (1 / max(count, 1.0))  # quantiles of the largest
    normal = np.array([normal_quantile(min(p, 1 - 1e-15)) for p in shares])
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        expected = float(np.exp(middle * normal - middle**2 / 2).mean())
        low, high = (middle, high) if expected < largest else (low, middle)
    return (low + high) / 2
