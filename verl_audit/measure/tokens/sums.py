"""The reducer's result: sums by key that add exactly, whatever the order, the files or the number of workers.

`TokenSums` holds integers and exact sums; `tables` turns them into Arrow tables with float64 columns. In every table
d is the total log-ratio of a loss token: the last recorded log-prob along trainer, prox, theta minus the behave
log-prob, in nats, clamped to +-20. w = e^d, k3 = e^d - 1 - d. Columns shared by the tables:

- `n`: loss tokens; `sum`, `abs_sum`, `sq_sum`, `k3_sum`, `w_sum`, `w2_sum`: of d, |d|, d^2, k3, w and w^2 over them;
  `abs_max`: largest |d|.
- `listed`: those of the `n` tokens that come from lists, not from a row's `sums`; `tail_ln2`, `tail_1`: listed tokens
  with |d| > ln 2 and > 1.
- `clip_n`: listed tokens of known advantage; `clip_low`, `clip_high`: those that a clipped loss gives no gradient
  (advantage < 0 and w < 1 - eps_low; advantage > 0 and w > 1 + eps_high).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.ingest.model import Problem
from verl_audit.measure.tokens import exact
from verl_audit.measure.tokens.spec import BINS, BUCKETS

Int = NDArray[np.int64]
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Columns of a grouped table: integer keys, counts, exact sums and maxima."""

    keys: tuple[str, ...]
    counts: tuple[str, ...]
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    spread: tuple[str, int] | None = None
    """Key that is an axis of counts and sums instead of a column, and its length."""

    @property
    def width(self) -> int:
        """Length of the spread axis."""
        return self.spread[1] if self.spread else 1


COUNTS = ("n", "listed", "clip_n", "clip_low", "clip_high", "tail_ln2", "tail_1")
SUMS = ("sum", "abs_sum", "sq_sum", "k3_sum", "w_sum", "w2_sum")

LAYOUTS: Mapping[str, Layout] = {
    "cells": Layout(("step", "lag", "minibatch", "lag_updates"), COUNTS, SUMS, ("abs_max",)),
    "strata": Layout(
        ("cluster", "lag", "minibatch", "lag_updates"), ("n",), ("abs_sum", "sq_sum"), spread=("bin", BINS)
    ),
    "subsets": Layout(("cluster", "subset"), ("n", "clip_n", "clip_low", "clip_high"), SUMS),
    "histogram": Layout(("lag",), ("count",), spread=("bucket", BUCKETS)),
}
"""`lag` is in versions, `lag_updates` in optimizer updates: updates per version * lag + mini-batch; both -1 if unknown.
Strata are of prox - behave where prox was recorded, else of d."""


@dataclass(frozen=True)
class Grouped:
    """Rows with distinct keys, sorted by them.

    keys (rows, K), counts (rows, C, width), limbs (rows, S, width, LIMBS) of canonical exact sums, maxima (rows, M).
    """

    layout: Layout
    keys: Int
    counts: Int
    limbs: Int
    maxima: Float

    def table(self) -> pa.Table:
        """Keys, counts and sums in columns; rows of a spread axis that count nothing are left out."""
        layout, width = self.layout, self.layout.width
        columns = {name: np.repeat(self.keys[:, i], width) for i, name in enumerate(layout.keys)}
        if layout.spread:
            columns[layout.spread[0]] = np.tile(np.arange(width), len(self.keys))
        columns |= {name: self.counts[:, i].ravel() for i, name in enumerate(layout.counts)}
        sums = exact.joined(self.limbs)
        floats = {name: sums[:, i].ravel() for i, name in enumerate(layout.sums)}
        floats |= {name: self.maxima[:, i] for i, name in enumerate(layout.maxima)}
        kept = columns[layout.counts[0]] > 0
        return pa.table({name: pa.array(values[kept]) for name, values in (columns | floats).items()})


def group(layout: Layout, keys: Int, counts: Int, sums: Float, maxima: Float) -> Grouped:
    """Rows of equal keys added: counts and sums, the largest of each maximum kept. At most `exact.MOST_ROWS` rows."""
    order, first = _order(keys)
    return Grouped(
        layout,
        keys[order][first],
        np.add.reduceat(counts[order], first),
        exact.sums(sums[order], first),
        np.maximum.reduceat(maxima[order], first),
    )


def _order(keys: Int) -> tuple[Int, Int]:
    """Order of the rows by key, and the place of each key's first row in it. There is at least one row."""
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    return order, np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])


def empty(layout: Layout) -> Grouped:
    """No rows."""
    return Grouped(
        layout,
        np.zeros((0, len(layout.keys)), np.int64),
        np.zeros((0, len(layout.counts), layout.width), np.int64),
        np.zeros((0, len(layout.sums), layout.width, exact.LIMBS), np.int64),
        np.zeros((0, len(layout.maxima))),
    )


def add(parts: Sequence[Grouped], layout: Layout) -> Grouped:
    """All rows of the parts, those of equal keys added."""
    parts = [part for part in parts if len(part.keys)]
    if len(parts) < 2:
        return parts[0] if parts else empty(layout)
    keys = np.concatenate([p.keys for p in parts])
    order, first = _order(keys)
    return Grouped(
        layout,
        keys[order][first],
        np.add.reduceat(np.concatenate([p.counts for p in parts])[order], first),
        exact.carried(np.add.reduceat(np.concatenate([p.limbs for p in parts])[order], first)),
        np.maximum.reduceat(np.concatenate([p.maxima for p in parts])[order], first),
    )


_GROUP_AT = exact.MOST_ROWS // 2
"""Rows that wait before they are grouped: enough that the cost of a call is small, few enough for a small memory."""


class Pending:
    """Rows on their way into a table."""

    def __init__(self, layout: Layout) -> None:
        """None yet."""
        self.layout = layout
        self._rows: list[tuple[Int, Int, Float, Float]] = []
        self._waiting = 0
        self._grouped: list[Grouped] = []

    def put(self, keys: Int, counts: Int, sums: Float, maxima: Float | None = None) -> None:
        """Add rows: keys (rows, K), counts (rows, C, width), sums (rows, S, width), maxima (rows, M)."""
        most = np.zeros((len(keys), 0)) if maxima is None else maxima
        for at in range(0, len(keys), _GROUP_AT):
            some = slice(at, at + _GROUP_AT)
            self._rows.append((keys[some], counts[some], sums[some], most[some]))
            self._waiting += len(keys[some])
            if self._waiting >= _GROUP_AT:
                self._group()

    def all(self) -> Grouped:
        """Everything that was put."""
        if self._waiting:
            self._group()
        return add(self._grouped, self.layout)

    def _group(self) -> None:
        keys, counts, sums, maxima = (np.concatenate(columns) for columns in zip(*self._rows, strict=True))
        new = group(self.layout, keys, counts, sums, maxima)
        self._grouped = [add([*self._grouped, new], self.layout)]
        self._rows, self._waiting = [], 0


TRAJECTORY_COUNTS = (*COUNTS, "nan")
TRAJECTORIES = pa.schema(
    [
        pa.field("row", pa.int64()),
        *(pa.field(name, pa.int32()) for name in TRAJECTORY_COUNTS),
        *(pa.field(name, pa.float64()) for name in (*SUMS, "abs_max")),
    ]
)
"""One row for each trajectory that has a total log-ratio: `row` is its position in the source, from 0; `nan` its loss
tokens without a number, which count nowhere else."""

NOTICED: Mapping[str, str] = {
    "rows": "rows read",
    "rows_reduced": "rows with a total log-ratio",
    "rows_unequal": "rows whose lists differ in length: left out",
    "rows_bad_segments": "rows whose segments overlap or pass the end of the response: lag unknown",
    "rows_negative_lag": "rows trained before the version that sampled them: lag unknown",
    "nan_tokens": "loss tokens whose log-ratio is not a number: left out",
    "clamped_tokens": "loss tokens whose |d| was clamped to 20",
}
"""What was counted on the way."""


@dataclass(frozen=True)
class TokenSums:
    """Sums of any number of sources that add exactly; `trajectories` maps a source to its per-trajectory table."""

    groups: Mapping[str, Grouped]
    trajectories: Mapping[str, pa.Table] = field(default_factory=dict)
    noticed: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What token lists had to be repaired of, where the source is checked while it is read."""

    def tables(self) -> dict[str, pa.Table]:
        """`cells`, `strata`, `subsets` and `histogram` as Arrow tables with int64 and float64 columns."""
        return {name: part.table() for name, part in self.groups.items()}

    @property
    def cells(self) -> pa.Table:
        """Sums by step, lag and mini-batch."""
        return self.groups["cells"].table()

    @property
    def strata(self) -> pa.Table:
        """Sums by cluster, lag, mini-batch and bin of the behave log-prob."""
        return self.groups["strata"].table()

    @property
    def subsets(self) -> pa.Table:
        """Sums by cluster and subset of the parts of d: bit 1 theta - prox, 2 prox - trainer, 4 trainer - behave."""
        return self.groups["subsets"].table()

    @property
    def histogram(self) -> pa.Table:
        """Tokens by lag and bucket of |d|."""
        return self.groups["histogram"].table()


def merge(parts: Iterable[TokenSums]) -> TokenSums:
    """The sums of all parts; equal to the bit in any order and any grouping.

    Raises `ValueError` if two parts hold the same source, whose tokens would count twice.
    """
    parts = list(parts)
    trajectories: dict[str, pa.Table] = {}
    noticed = dict.fromkeys(NOTICED, 0)
    for part in parts:
        if twice := trajectories.keys() & part.trajectories.keys():
            raise ValueError(f"reduced twice: {', '.join(sorted(twice))}")
        trajectories |= part.trajectories
        for name, count in part.noticed.items():
            noticed[name] += count
    groups = {name: add([part.groups[name] for part in parts], layout) for name, layout in LAYOUTS.items()}
    problems = sorted((problem for part in parts for problem in part.problems), key=_place)
    return TokenSums(groups, dict(sorted(trajectories.items())), noticed, tuple(problems))


def _place(problem: Problem) -> tuple[str, str, str]:
    """What problems are sorted by."""
    return problem.file, problem.kind, problem.detail
