"""Order inside the sync cycle: do mini-batches late in a cycle hold longer responses than early ones?

A queue that hands out what finished first trains short responses just after a sync and long ones just before the next.
Known period k (updates per version): each cycle is centred, and the sum of squared phase means is compared with
permutations of the mini-batches inside each cycle. Trend and slow noise cancel, since they are shared by a cycle.
Unknown period: Fisher's g on the periodogram over its AR(1) spectrum. Against white noise the same test would call
half of all AR(1) series with phi = .4 periodic.
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import ArrayLike

from verl_audit.measure.model import Measure
from verl_audit.measure.stats import PHI_MAX, Array, ar1_phi, least_squares

PERMUTATIONS = 1999
SEED = 0
MIN_CYCLES = 10
MIN_POINTS = 40


@dataclass(frozen=True)
class Phase:
    """Periodicity of a series within the sync cycle."""

    p: Measure
    """p value of no order inside the cycle."""
    amplitude: Measure
    """Half of the largest minus smallest phase mean, over the mean of the series."""
    means: tuple[float, ...]
    """Mean deviation from its cycle, by position in the cycle; empty for an unknown period."""
    period: Measure
    """Mini-batches: as given, or the strongest one found."""


def read_series(con: duckdb.DuckDBPyConnection, run: str, value: str = "response_length") -> tuple[Array, int | None]:
    """Mean over trained trajectories per mini-batch, in order, and mini-batches per step where each step has as many.

    `value`: a numeric column of the store's `trajectories`. Only steps with the usual number of mini-batches are kept
    when they differ; the period is None where mini-batches were not recorded.
    """
    if value not in {"response_length", "reward", "prompt_length", "lag_mean"}:
        raise ValueError(f"no series of {value}")
    columns = con.execute(
        f"""SELECT decided_step::DOUBLE AS step, coalesce(train_minibatch, 0)::DOUBLE AS minibatch,
            avg({value})::DOUBLE AS mean, count(train_minibatch) AS known
        FROM trajectories WHERE run = ? AND fate = 'trained' AND decided_step IS NOT NULL
        GROUP BY ALL HAVING avg({value}) IS NOT NULL ORDER BY ALL""",
        [run],
    ).fetchnumpy()
    step, mean = np.asarray(columns["step"]), np.asarray(columns["mean"])
    if not len(step) or not np.asarray(columns["known"]).all():
        return mean, None
    size = np.unique(step, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(size)
    usual = int(np.bincount(counts).argmax())
    return mean[(counts == usual)[size]], usual


def phase(x: ArrayLike, period: int | None = None) -> Phase:
    """Test a series of mini-batch means; `period` in mini-batches, None or 1 where it is not known."""
    values = np.asarray(x, dtype=np.float64)
    if not np.isfinite(values).all():
        return _untold("the series has gaps")
    return known_period(values, period) if period is not None and period > 1 else unknown_period(values)


def known_period(x: Array, period: int) -> Phase:
    """Permutation test inside cycles; an incomplete last cycle is left out. p = (1 + as extreme) / (1 + 1999)."""
    cycles = len(x) // period
    if cycles < MIN_CYCLES:
        return _untold(f"{cycles} cycles of {period} mini-batches, {MIN_CYCLES} needed")
    table = x[: cycles * period].reshape(cycles, period)
    centred = table - table.mean(axis=1, keepdims=True)
    means = centred.mean(axis=0)
    observed, rng = float(means @ means), np.random.default_rng(SEED)
    sums = np.zeros((PERMUTATIONS, period))
    for row in centred:
        sums += row[np.argsort(rng.random((PERMUTATIONS, period)), axis=1)]
    drawn = ((sums / cycles) ** 2).sum(axis=1)
    p = (1 + int((drawn >= observed * (1 - 1e-12)).sum())) / (1 + PERMUTATIONS)
    return Phase(
        Measure("trace_order_p", p, "probability", n=cycles),
        _amplitude(float(np.ptp(means)) / 2, x),
        tuple(float(m) for m in means),
        Measure("trace_order_period", period, "mini-batches"),
    )


def unknown_period(x: Array) -> Phase:
    """Fisher's g on the periodogram over the AR(1) spectrum, a straight trend removed.

    g = largest of m ordinates over their sum; P(g > z) <= m (1 - z)^(m - 1), exact to second order at small p.
    AR(1) spectrum: 1 / (1 + phi^2 - 2 phi cos w), phi bias-corrected. Source: Fisher 1929, Proc. R. Soc. A 125.
    """
    n = len(x)
    if n < MIN_POINTS:
        return _untold(f"{n} points, {MIN_POINTS} needed where the period is unknown")
    design = np.column_stack([np.ones(n), np.linspace(-1, 1, n)])
    _, residual, _ = least_squares(design, x)
    phi = ar1_phi(residual, floor=-PHI_MAX)
    wave = np.abs(np.fft.rfft(residual)) ** 2
    index = np.arange(1, (n - 1) // 2 + 1)
    whitened = wave[index] * (1 + phi**2 - 2 * phi * np.cos(2 * np.pi * index / n))
    if not float(whitened.sum()) > 1e-24 * n * float(np.abs(x).max()) ** 2:
        return _untold("the series does not vary")
    m, g = len(index), float(whitened.max() / whitened.sum())
    best = int(index[int(whitened.argmax())])
    return Phase(
        Measure("trace_order_p", min(1.0, m * (1 - g) ** (m - 1)), "probability", n=n),
        _amplitude(2 * float(np.sqrt(wave[best])) / n, x),
        (),
        Measure("trace_order_period", n / best, "mini-batches"),
    )


def _amplitude(half: float, x: Array) -> Measure:
    level = abs(float(x.mean()))
    if level == 0:
        return Measure("trace_order_amplitude", None, "share", missing="the mean of the series is 0")
    return Measure("trace_order_amplitude", half / level, "share", n=len(x))


def _untold(why: str) -> Phase:
    return Phase(
        Measure("trace_order_p", None, "probability", missing=why),
        Measure("trace_order_amplitude", None, "share", missing=why),
        (),
        Measure("trace_order_period", None, "mini-batches", missing=why),
    )
