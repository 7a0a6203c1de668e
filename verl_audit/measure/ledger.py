"""The ledger: generated = sum over fates, in groups, trajectories and response tokens, with what does not add up.

A group has the fate its trajectories share, or is `mixed`; trajectories and tokens are booked under their own fate.
What the rows cannot show is held against two records of others: the group size of the configuration (sessions that
left no row) and the buffer's counts (groups that were submitted and left no row).
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np

from verl_audit.measure.cohorts import AGE_QUANTILE
from verl_audit.measure.model import Measure
from verl_audit.measure.stats import Array
from verl_audit.measure.trace_groups import FATE_NAMES, Codes, Groups, Mask, Rows, without_trajectory


@dataclass(frozen=True)
class Line:
    """One fate of the ledger."""

    fate: str
    """A fate of the schema, or `mixed`, which holds groups only."""
    groups: Measure
    trajectories: Measure
    tokens: Measure
    """Response tokens; no value where the length of one is unknown (`low` is the known sum), never 0 for unknown."""


@dataclass(frozen=True)
class Ledger:
    """Lines by fate, their totals, and residuals: what other records say was generated minus what the rows hold."""

    lines: tuple[Line, ...]
    total: Line
    open_groups: Measure
    """Groups without a row that the buffer still held at the end: in flight, as far as anyone knows."""
    undelivered: Measure
    """Trajectories that failed, aborted and open groups owe to the configured group size: never finished."""
    residual_groups: Measure
    """Groups submitted (where counted) minus groups with a row minus `open_groups`."""
    residual_trajectories: Measure
    """Trajectories that the other groups owe to the configured group size."""
    residual_tokens: Measure
    lost_groups: Measure
    """Most groups that the buffer held at two successive counts and no row ever names, before the last cohorts."""
    duplicates: Measure
    """Rows that repeat group, session and turn of another."""

    @property
    def closes(self) -> bool | None:
        """Whether every residual that can be computed is 0 and nothing is mixed or repeated; None: none can be."""
        residuals = [self.residual_groups, self.residual_trajectories, self.residual_tokens, self.lost_groups]
        known = [m.value for m in residuals if m.value is not None]
        mixed = any(line.fate == "mixed" and line.groups.value for line in self.lines)
        return not (any(known) or mixed or self.duplicates.value) if known else None


@dataclass(frozen=True)
class Expected:
    """What other records say was generated; None where they do not."""

    groups: int | None = None
    """Groups submitted, those in flight included."""
    group_size: int | None = None
    """Trajectories per group, as configured."""
    tokens: int | None = None
    """Response tokens generated."""


@dataclass(frozen=True)
class Depth:
    """The buffer's counts: arrays over S counts in the order of steps; groups submitted and not decided."""

    step: Array
    groups: Array


def read_depth(con: duckdb.DuckDBPyConnection, run: str) -> Depth:
    """Last count of each step in the store's `buffer_depth`; empty where nothing was counted."""
    columns = con.execute(
        """SELECT step::DOUBLE AS step,
            (coalesce(pending, 0) + coalesce(running, 0) + coalesce(finished, 0) + coalesce(failed, 0))::DOUBLE AS depth
        FROM buffer_depth WHERE run = ? AND step IS NOT NULL
            AND coalesce(pending, running, finished, failed) IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY step ORDER BY t DESC NULLS LAST, rowid DESC) = 1 ORDER BY step""",
        [run],
    ).fetchnumpy()
    return Depth(np.asarray(columns["step"]), np.asarray(columns["depth"]))


def unseen(groups: Groups, depth: Depth) -> Array:
    """Groups in the buffer at each count that no row names: count - (submitted by then - decided by then).

    A group that is decided later has its row by the end, so the difference is 0 but for groups still open when the
    record ends, and for groups that vanished. In-flight groups that have a row count as named. A writer counts before
    the batch of the step leaves the buffer or after it: the one that leaves less over in all its counts is taken. NaN
    where a group's steps are unknown.
    """
    submitted = np.sort(groups.submit_step)
    decided = np.sort(np.where(groups.open, np.inf, groups.decided_step))
    if np.isnan(submitted).any() or np.isnan(decided).any() or not len(groups):
        return np.full(len(depth.step), np.nan)
    entered = np.searchsorted(submitted, depth.step, "right")
    after, before = (depth.groups - entered + np.searchsorted(decided, depth.step, side) for side in ("right", "left"))
    return np.asarray(before if np.abs(before).sum() < np.abs(after).sum() else after)


def ledger(data: Rows, groups: Groups, *, expected: Expected | None = None, depth: Depth | None = None) -> Ledger:
    """Book all rows of a run."""
    want = expected or Expected()
    real = ~without_trajectory(data)
    length = np.where(real, data.numbers["response_length"], np.nan)
    left = np.array([]) if depth is None else unseen(groups, depth)
    still = _open(left)
    undelivered, owed = _owed(data, real, groups, want)
    lines = tuple(
        Line(
            name,
            _count(f"trace_groups_{name}", groups.fate, code, "groups"),
            _count(f"trace_trajectories_{name}", data.fate[real], code, "trajectories"),
            _tokens(f"trace_tokens_{name}", length[data.fate == code]),
        )
        for code, name in enumerate((*FATE_NAMES, "mixed"))
    )
    total = Line(
        "generated",
        Measure("trace_groups", len(groups), "groups"),
        Measure("trace_trajectories", int(real.sum()), "trajectories"),
        _tokens("trace_tokens", length),
    )
    return Ledger(
        lines,
        total,
        still,
        undelivered,
        _residual_groups(groups, want, still),
        owed,
        _residual_tokens(total.tokens, want),
        _lost(groups, depth, left),
        Measure("trace_duplicate_rows", _duplicates(data), "rows"),
    )


def _count(name: str, codes: Codes, code: int, unit: str) -> Measure:
    return Measure(name, int((codes == code).sum()), unit)


def _tokens(name: str, length: Array) -> Measure:
    """Response tokens of rows; a group that left no trajectory (NaN here) generated an unknown number."""
    known = np.isfinite(length)
    total, unknown = int(length[known].sum()), int((~known).sum())
    if unknown:
        why = f"unknown for {unknown} of {len(length)} rows"
        return Measure(name, None, "tokens", low=total, n=len(length), missing=why)
    return Measure(name, total, "tokens", n=len(length))


def _open(left: Array) -> Measure:
    name = "trace_open_groups"
    if not len(left):
        return Measure(name, None, "groups", missing="the buffer's depth was not recorded")
    if np.isnan(left[-1]):
        return Measure(name, None, "groups", missing="submission steps are not known for every group")
    return Measure(name, max(int(left[-1]), 0), "groups")


def _residual_groups(groups: Groups, want: Expected, still: Measure) -> Measure:
    name = "trace_residual_groups"
    if want.groups is None:
        return Measure(name, None, "groups", missing="no count of submitted groups was recorded")
    return Measure(name, want.groups - len(groups) - int(still.value or 0), "groups", n=want.groups)


def _owed(data: Rows, real: Mask, groups: Groups, want: Expected) -> tuple[Measure, Measure]:
    """Sessions missing from the configured group size: in groups that never finished, and in the others."""
    names, unit = ("trace_undelivered_trajectories", "trace_residual_trajectories"), "trajectories"
    session = data.numbers["session"]
    why = "the group size is not known from the configuration" if want.group_size is None else ""
    if not why and np.isnan(session[real]).any():
        why = "some trajectories name no session"
    if why or want.group_size is None:
        return Measure(names[0], None, unit, missing=why), Measure(names[1], None, unit, missing=why)
    pair, width = _pairs(data.group[real], session[real])
    owed = want.group_size - np.bincount(_distinct(pair) // width, minlength=len(groups))
    unfinished = np.isin(groups.fate, [FATE_NAMES.index(f) for f in UNFINISHED])
    parts = (owed[unfinished], owed[~unfinished])
    a, b = (Measure(n, int(x.sum()), unit, n=want.group_size * len(x)) for n, x in zip(names, parts, strict=True))
    return a, b


UNFINISHED = ("failed", "aborted", "in_flight", "unknown")
"""Fates of groups that need not hold all of their trajectories."""


def _residual_tokens(total: Measure, want: Expected) -> Measure:
    if want.tokens is None or total.value is None:
        why = total.missing or "no other record counts the tokens generated"
        return Measure("trace_residual_tokens", None, "tokens", missing=why)
    return Measure("trace_residual_tokens", want.tokens - int(total.value), "tokens", n=want.tokens)


def _lost(groups: Groups, depth: Depth | None, left: Array) -> Measure:
    """Counts near the end are left out: their groups may be in flight. A single count may be off by a submission."""
    name = "trace_lost_groups"
    if depth is None or not len(left):
        return Measure(name, None, "groups", missing="the buffer's depth was not recorded")
    age = groups.decided_step - groups.submit_step
    age = age[np.isfinite(age)]
    end = depth.step[-1] - (np.quantile(age, AGE_QUANTILE, method="higher") if len(age) else 0)
    inside = left[(depth.step < end) & np.isfinite(left)]
    if len(inside) < 2:
        return Measure(name, None, "groups", missing="no two counts of the buffer lie before the last cohorts")
    held = np.minimum(inside[1:], inside[:-1])
    return Measure(name, max(int(held.max()), 0), "groups", n=len(inside))


def _duplicates(data: Rows) -> int:
    named = np.isfinite(data.numbers["session"])
    pair, _ = _pairs(data.group[named], data.numbers["session"][named])
    whole, _ = _pairs(pair, np.nan_to_num(data.numbers["turn"][named]))
    return len(whole) - len(_distinct(whole))


def _pairs(a: Codes, b: Array) -> tuple[Codes, int]:
    """One code per pair of a code and a number, and the width w such that code // w gives the first back."""
    values, code = np.unique(b, return_inverse=True)
    width = max(len(values), 1)
    return np.asarray(a * width + code.reshape(-1)), width


def _distinct(codes: Codes) -> Codes:
    """Sorted distinct codes, by sorting: where nearly all differ, hashing is five times slower."""
    ordered = np.sort(codes)
    return np.asarray(ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]])
