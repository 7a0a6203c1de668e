"""Lag of the trained trajectories, counted from their own versions: in versions, in optimizer updates, and in parts.

newest = training version - version of the last token, oldest = training version - version of the first, mean over
tokens. In updates: k (training version - v) + mini-batch, k updates between versions; damage follows updates (5.8
versions at k = 4 clipped as much as 22.4 at k = 1). Parts: versions published while it was generated (in flight:
partial rollout, slow requests) and between its end and training (in queue: too much work outstanding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import duckdb
import numpy as np

from verl_audit.measure.model import Measure
from verl_audit.measure.stats import Array, ar1_mean

KINDS: Mapping[str, tuple[str, str]] = {
    "newest": ("lag_newest", "versions"),
    "oldest": ("lag_oldest", "versions"),
    "token_mean": ("lag_mean", "versions"),
    "updates": ("lag_updates", "updates"),
    "in_flight": ("lag_in_flight", "versions"),
    "in_queue": ("lag_in_queue", "versions"),
    "span": ("span", "versions"),
}
"""Kind of lag to its column in the store's `trajectories` and its unit."""
QUANTILES = (0.5, 0.9, 0.99)
_TOKEN_WEIGHTED = ("token_mean", "updates")


@dataclass(frozen=True)
class LagKind:
    """One kind of lag over trained trajectories, and step by step (arrays over S steps)."""

    kind: str
    mean: Measure
    """Over trajectories; over tokens for `token_mean` and `updates`. Interval of the step means as an AR(1) series."""
    quantiles: Mapping[float, Measure]
    """Over trajectories."""
    largest: Measure
    step: Array
    step_mean: Array
    step_max: Array


def lag_kinds(con: duckdb.DuckDBPyConnection, run: str) -> dict[str, LagKind]:
    """Every kind of lag in `KINDS` of a run."""
    return {kind: _kind(con, run, kind, column, unit) for kind, (column, unit) in KINDS.items()}


def _kind(con: duckdb.DuckDBPyConnection, run: str, kind: str, column: str, unit: str) -> LagKind:
    weight = "coalesce(loss_tokens, response_length)" if kind in _TOKEN_WEIGHTED else "1"
    table = con.execute(
        f"""SELECT coalesce(decided_step::DOUBLE, 'nan'::DOUBLE) AS step, sum({column} * {weight})::DOUBLE AS total,
            (sum({weight}) FILTER ({column} IS NOT NULL))::DOUBLE AS weight, max({column})::DOUBLE AS largest,
            count({column}) AS n
        FROM trajectories WHERE run = ? AND fate = 'trained'
        GROUP BY decided_step HAVING sum({weight}) FILTER ({column} IS NOT NULL) > 0 ORDER BY step""",
        [run],
    ).fetchnumpy()
    step, total, weights, largest, n = (np.asarray(table[c]) for c in ("step", "total", "weight", "largest", "n"))
    name = f"trace_lag_{kind}"
    if not len(n):
        why = f"{column} is not known of any trained trajectory"
        blank = {q: Measure(f"{name}_p{q * 100:.0f}", None, unit, missing=why) for q in QUANTILES}
        empty = np.array([])
        top = Measure(f"{name}_max", None, unit, missing=why)
        return LagKind(kind, Measure(f"{name}_mean", None, unit, missing=why), blank, top, empty, empty, empty)
    count, step_mean = int(n.sum()), total / weights
    marks = _quantiles(con, run, column)
    return LagKind(
        kind,
        _mean(f"{name}_mean", unit, float(total.sum() / weights.sum()), step_mean, count),
        {q: Measure(f"{name}_p{q * 100:.0f}", mark, unit, n=count) for q, mark in zip(QUANTILES, marks, strict=True)},
        Measure(f"{name}_max", float(largest.max()), unit, n=count),
        step,
        step_mean,
        largest,
    )


def _mean(name: str, unit: str, value: float, step_mean: Array, n: int) -> Measure:
    """The mean with the half width of the AR(1) interval of the step means; none below 8 steps."""
    series = ar1_mean(step_mean)
    if series is None:
        return Measure(name, value, unit, n=n)
    half = series.high - series.value
    return Measure(name, value, unit, max(value - half, 0.0), value + half, n)


def _quantiles(con: duckdb.DuckDBPyConnection, run: str, column: str) -> tuple[float, ...]:
    row = con.execute(
        f"SELECT quantile_cont({column}::DOUBLE, {list(QUANTILES)}) FROM trajectories "
        f"WHERE run = ? AND fate = 'trained' AND {column} IS NOT NULL",
        [run],
    ).fetchone()
    assert row is not None
    return tuple(float(x) for x in row[0])


@dataclass(frozen=True)
class LagCounts:
    """Trained trajectories and response tokens by step and lag, whole versions or updates (arrays over cells)."""

    step: Array
    lag: Array
    trajectories: Array
    tokens: Array
    """NaN where the length of one is unknown."""


def lag_counts(con: duckdb.DuckDBPyConnection, run: str, kind: str = "newest") -> LagCounts:
    """Distribution of one kind of lag at each step; a fraction of a version counts to the version below."""
    column = KINDS[kind][0]
    table = con.execute(
        f"""SELECT decided_step::DOUBLE AS step, floor({column}::DOUBLE) AS lag, count(*)::DOUBLE AS trajectories,
            CASE WHEN count(response_length) = count(*) THEN sum(response_length)::DOUBLE ELSE 'nan' END AS tokens
        FROM trajectories WHERE run = ? AND fate = 'trained' AND {column} IS NOT NULL AND decided_step IS NOT NULL
        GROUP BY ALL ORDER BY ALL""",
        [run],
    ).fetchnumpy()
    return LagCounts(*(np.asarray(table[c], dtype=np.float64) for c in ("step", "lag", "trajectories", "tokens")))


def queue_share(kinds: Mapping[str, LagKind]) -> Measure:
    """In-queue part over in-queue plus in-flight part of the mean lag: which of the two a remedy should shorten."""
    name = "trace_lag_queue_share"
    queue, flight = kinds["in_queue"].mean, kinds["in_flight"].mean
    if queue.value is None or flight.value is None:
        return Measure(name, None, "share", missing=queue.missing or flight.missing)
    total = float(queue.value) + float(flight.value)
    if total <= 0:
        return Measure(name, None, "share", missing="the lag is 0: there is nothing to split")
    return Measure(name, float(queue.value) / total, "share", n=queue.n)


def updates_lag(train_version: Array, version: Array, minibatch: Array, updates_per_version: float) -> Array:
    """Lag in optimizer updates of tokens sampled at `version`: k (train_version - version) + minibatch."""
    return np.asarray(updates_per_version * (train_version - version) + minibatch)
