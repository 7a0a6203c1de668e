"""What a batch says of each trajectory beside its tokens: step, versions, mini-batch, cluster, sign of the advantage;
and the pieces of each: runs of tokens that one policy version sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.measure.tokens.columns import Bool, Int, column, integers, lists_of, numbers, strings, valid
from verl_audit.measure.tokens.spec import UNKNOWN, Spec, cluster


@dataclass(frozen=True)
class Rows:
    """Scalars of the R rows of a batch; UNKNOWN where null."""

    position: Int
    """Place in the source, from 0."""
    wanted: Bool
    """Of the run asked for."""
    counted: Bool
    """Of a fate whose tokens count in cells, strata, subsets and histogram."""
    step: Int
    minibatch: Int
    train_version: Int
    version: Int
    """The version that sampled all tokens, from first and last version."""
    cluster: Int
    sign: NDArray[np.int8]
    sign_known: Bool
    segments: Segments | None


@dataclass(frozen=True)
class Segments:
    """Row i has segments offsets[i] to offsets[i + 1]."""

    offsets: Int
    version: Int
    start: Int
    length: Int


def read_rows(batch: pa.RecordBatch, spec: Spec, first: int) -> Rows:
    """The scalars of a batch; absent columns are unknown. A row's place is its `row`, else counted from `first`."""
    count, place = batch.num_rows, column(batch, "row")
    names = ("decided_step", "train_minibatch", "train_version", "first_version", "last_version")
    step, minibatch, trained, oldest, newest = (integers(column(batch, name), count) for name in names)
    sign, sign_known = _signs(column(batch, "advantage"), count)
    return Rows(
        position=np.arange(first, first + count) if place is None else integers(place, count),
        wanted=_among(column(batch, "run"), count, () if spec.run is None else (spec.run, "")),
        counted=_among(column(batch, "fate"), count, (*spec.fates, "") if "unknown" in spec.fates else spec.fates),
        step=step,
        minibatch=minibatch,
        train_version=trained,
        version=np.where(oldest == newest, oldest, UNKNOWN),
        cluster=_clusters(column(batch, "group"), count),
        sign=sign,
        sign_known=sign_known,
        segments=_segments(column(batch, "segments")),
    )


def _among(array: pa.Array | None, count: int, names: tuple[str, ...]) -> Bool:
    """Rows whose string is one of `names`; all if there is no column or no name. Null is the empty string."""
    if array is None or pa.types.is_null(array.type) or not names:
        return np.ones(count, np.bool_)
    codes, words = strings(array)
    return np.array([word in names for word in words], np.bool_)[codes] if count else np.ones(0, np.bool_)


def _clusters(array: pa.Array | None, count: int) -> Int:
    if array is None or pa.types.is_null(array.type) or not count:
        return np.zeros(count, np.int64)
    codes, words = strings(array)
    return np.array([cluster(word) for word in words], np.int64)[codes]


def _signs(array: pa.Array | None, count: int) -> tuple[NDArray[np.int8], Bool]:
    if array is None or pa.types.is_null(array.type):
        return np.zeros(count, np.int8), np.zeros(count, np.bool_)
    value = numbers(array).astype(np.float64)
    known = valid(array) & ~np.isnan(value)
    return np.where(known, np.sign(value), 0).astype(np.int8), known


def _segments(array: pa.Array | None) -> Segments | None:
    if array is None or pa.types.is_null(array.type):
        return None
    offsets, structs = lists_of(array)
    fields = [integers(structs.field(name), len(structs)) for name in ("version", "start", "length")]
    return Segments(offsets, *fields)


@dataclass(frozen=True)
class Cut:
    """Pieces of some rows in order of row and token: `of` is the place of the row among those given."""

    of: Int
    start: Int
    """First token within the row."""
    length: Int
    lag: Int
    """Version at training minus version at sampling; UNKNOWN."""
    bad_segments: int
    """Rows whose segments contradict each other or the length."""
    negative: int
    """Rows trained before the version that sampled them."""


def cut(rows: Rows, which: Int, lengths: Int) -> Cut:
    """Pieces of the rows `which`, `lengths` tokens long: every token in one piece, each row in at least one.

    Without segments a row is one piece, of known version if its first and last are the same. Tokens that no segment
    covers are of unknown version; so is a row whose segments overlap, run backwards or pass its end.
    """
    owner, start, end, version = _covered(rows.segments, which)
    bad = _contradictory(owner, start, end, lengths)
    kept = ~bad[owner] & (end > start)
    owner, start, end, version = owner[kept], start[kept], end[kept], version[kept]
    before = np.where(np.r_[True, owner[1:] != owner[:-1]][: len(owner)], 0, np.r_[0, end[:-1]][: len(owner)])
    covered = np.zeros(len(which), np.int64)
    np.maximum.at(covered, owner, end)
    whole = np.where(bad, UNKNOWN, rows.version[which])
    rest = np.where(covered > 0, UNKNOWN, whole)
    every = np.arange(len(which))
    of = np.concatenate([owner, owner, every])
    begin = np.concatenate([start, before, covered])
    length = np.concatenate([end - start, start - before, lengths - covered])
    versions = np.concatenate([version, np.full(len(owner), UNKNOWN), rest])
    tail = np.arange(len(of)) >= 2 * len(owner)
    used = np.flatnonzero((length > 0) | (tail & (lengths[of] == 0)))
    used = used[np.lexsort((begin[used], of[used]))]
    lag, negative = _lag(rows.train_version[which][of[used]], versions[used], of[used])
    return Cut(of[used], begin[used], length[used], lag, int(bad.sum()), negative)


def _covered(segments: Segments | None, which: Int) -> tuple[Int, Int, Int, Int]:
    """Owner (place among `which`), first token, end and version of every segment of these rows."""
    if segments is None:
        none = np.zeros(0, np.int64)
        return none, none, none, none
    begin, count = segments.offsets[which], segments.offsets[which + 1] - segments.offsets[which]
    owner = np.repeat(np.arange(len(which)), count)
    at = np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(len(owner))
    start = segments.start[at]
    return owner, start, start + segments.length[at], segments.version[at]


def _contradictory(owner: Int, start: Int, end: Int, lengths: Int) -> Bool:
    wrong = (start < 0) | (end < start) | (end > lengths[owner])
    wrong[1:] |= (owner[1:] == owner[:-1]) & (start[1:] < end[:-1])
    bad = np.zeros(len(lengths), np.bool_)
    bad[owner[wrong]] = True
    return bad


def _lag(trained: Int, sampled: Int, of: Int) -> tuple[Int, int]:
    known = (trained >= 0) & (sampled >= 0)
    lag = trained - sampled
    negative = known & (lag < 0)
    return np.where(known & ~negative, lag, UNKNOWN), len(np.unique(of[negative]))


def lag_of_whole(rows: Rows, which: Int) -> Int:
    """Lag of rows that one version sampled, by their segments or by first and last version; else UNKNOWN."""
    owner, start, end, version = _covered(rows.segments, which)
    owner, version = owner[end > start], version[end > start]
    low, high = np.full(len(which), np.iinfo(np.int64).max), np.full(len(which), UNKNOWN - 1)
    np.minimum.at(low, owner, version)
    np.maximum.at(high, owner, version)
    whole = np.where(high < UNKNOWN, rows.version[which], np.where(low == high, low, UNKNOWN))
    return _lag(rows.train_version[which], whole, np.arange(len(which)))[0]
