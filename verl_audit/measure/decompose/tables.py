"""Columns of the kernel's tables as numpy arrays, and intervals from sums by cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from verl_audit.measure.stats import Array, Estimate, t_quantile
from verl_audit.measure.tokens.spec import UNKNOWN

Table: TypeAlias = pa.Table | Mapping[str, ArrayLike]
Keys = NDArray[np.int64]

MIN_CLUSTERS = 8
"""Fewest clusters for an interval: below it a variance between clusters is noise."""


@dataclass(frozen=True)
class Refused:
    """No answer, why, and what would give one."""

    reason: str
    wants: str = ""


def numbers(table: Table, name: str) -> NDArray[np.float64]:
    """A column as float64, null as NaN.  Raises KeyError when it is not there."""
    found = table[name]
    if isinstance(found, pa.ChunkedArray):
        filled = pc.fill_null(found.cast(pa.float64()), math.nan).combine_chunks()
        return np.array(np.from_dlpack(filled)) if len(filled) else np.empty(0)
    return np.asarray(found, dtype=np.float64)


def keys(table: Table, name: str) -> Keys:
    """A column of non-negative integers; null, NaN and anything negative become UNKNOWN."""
    values = numbers(table, name)
    known = np.isfinite(values) & (values >= 0)
    return np.where(known, values, UNKNOWN).astype(np.int64)


def column_names(table: Table) -> Sequence[str]:
    """Names of the columns."""
    return list(table.column_names if isinstance(table, pa.Table) else table)


def grouped(labels: Sequence[NDArray[Any]], values: Array) -> tuple[list[NDArray[Any]], Array]:
    """Sums of `values` (rows, columns) over equal label tuples, and the sorted distinct values of each label.

    Shape of the sums: one axis per label, then the columns.
    """
    levels, codes = [], []
    for label in labels:
        distinct, code = np.unique(label, return_inverse=True)
        levels.append(distinct)
        codes.append(code.ravel())
    shape = tuple(len(level) for level in levels)
    flat = np.ravel_multi_index(tuple(codes), shape) if len(values) else np.empty(0, dtype=np.int64)
    size = math.prod(shape)
    sums = np.empty((size, values.shape[1]))
    for i, column in enumerate(values.T):
        sums[:, i] = np.bincount(flat, weights=column, minlength=size)
    return levels, sums.reshape(*shape, values.shape[1])


def jackknife(
    sums: Array,
    statistic: Callable[[Array], Array],
    count: int,
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    level: float = 0.95,
) -> list[Estimate]:
    """Statistics of the totals of `sums` (clusters first) with delete-one-cluster intervals.

    `statistic` maps totals with a leading batch axis to (batch, statistics). se^2 = (G - 1)/G sum (t_-g - mean)^2,
    t interval with G - 1 degrees of freedom, cut to `bounds`; NaN bounds with fewer than 8 clusters.
    Source: Efron and Stein 1981; for smooth functions of sums it is the linearised cluster variance.
    """
    total, clusters = sums.sum(axis=0), len(sums)
    values = statistic(total[None])[0]
    if clusters < MIN_CLUSTERS:
        return [Estimate(float(v), math.nan, math.nan, count, math.nan) for v in values]
    without = statistic(total[None] - sums)
    spread = without - without.mean(axis=0)
    se = np.sqrt((clusters - 1) / clusters * (spread**2).sum(axis=0))
    half = t_quantile(0.5 + level / 2, clusters - 1) * se
    low, high = np.maximum(values - half, bounds[0]), np.minimum(values + half, bounds[1])
    return [
        Estimate(float(v), float(lo), float(hi), count, float(s))
        for v, lo, hi, s in zip(values, low, high, se, strict=True)
    ]


def resampled(sums: Array, draws: int, seed: int = 0) -> Array:
    """Totals of `draws` resamples of whole clusters, with replacement; shape (draws, rest of `sums`)."""
    clusters = len(sums)
    weights = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=draws)
    totals: Array = (weights @ sums.reshape(clusters, -1)).reshape(draws, *sums.shape[1:])
    return totals


def ratio(top: Array, bottom: Array) -> Array:
    """top / bottom, NaN where bottom is 0."""
    out: Array = np.full(np.broadcast_shapes(top.shape, bottom.shape), np.nan)
    return np.divide(top, bottom, out=out, where=bottom != 0)
