"""Whether a trace file needs the checks of `ingest.traces` at all: a quick look at each batch, on the safe side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_audit.ingest.trace_check import POSITIVE
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.measure.tokens.columns import column, integers, mask_lists, numbers, strings, token_lists, valid
from verl_audit.trace.schema import COLUMNS, FATES, LOG_PROBS

ODD = ("rows_unequal", "rows_bad_segments", "rows_negative_lag", "nan_tokens")
"""Counts of a reduction that call for the checks."""
_WHOLE = ("decided_step", "train_version", "train_minibatch", "first_version", "last_version")
_TYPES = {c.name: c.type for c in COLUMNS["trajectories"]}


class Doubtful(Exception):
    """Something that the checks may have to repair."""


def trusted(source: TraceSource, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches with the repairs that the source carries and each row's place. Raises `Doubtful`."""
    if any("=" in folder.name for folder in source.path.parents):
        raise Doubtful("folders may tell columns")
    first = 0
    for batch in batches:
        _look(batch)
        rows = np.arange(first, first + batch.num_rows)
        first += batch.num_rows
        yield _repaired(source, batch.append_column("row", pa.array(rows)), rows)
        del batch


def _repaired(source: TraceSource, batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    if source.version_offset and (trained := column(batch, "train_version")) is not None:
        moved = pc.subtract(trained, pa.scalar(source.version_offset, trained.type))
        batch = batch.set_column(batch.schema.get_field_index("train_version"), "train_version", moved)
    if source.dropped and (gone := np.isin(rows, np.fromiter(source.dropped, np.int64))).any():
        batch = batch.filter(pa.array(~gone))
    if source.only_run:
        run = batch.column("run").cast(pa.string())
        own = pc.is_null(run) if source.run is None else pc.fill_null(pc.equal(run, source.run), False)
        batch = batch.filter(own)
    return batch


def _look(batch: pa.RecordBatch) -> None:
    for name in (*_WHOLE, "group", "fate", "advantage", "response_length"):
        found = column(batch, name)
        if found is None or found.type != _TYPES[name]:
            raise Doubtful(f"{name} is not of the schema")
    if batch.column("group").null_count or batch.column("response_length").null_count:
        raise Doubtful("a row without group or length")
    fate = batch.column("fate")
    if fate.null_count or not set(strings(fate)[1]) <= {*FATES, ""}:
        raise Doubtful("an unknown fate")
    advantage = batch.column("advantage")
    if not np.isfinite(numbers(advantage)[valid(advantage)]).all():
        raise Doubtful("an advantage that is no number")
    _look_at_versions(batch)
    _look_at_lists(batch)


def _look_at_versions(batch: pa.RecordBatch) -> None:
    known = {name: integers(batch.column(name), batch.num_rows) for name in _WHOLE}
    if any((values[valid(batch.column(name))] < 0).any() for name, values in known.items()):
        raise Doubtful("a number below 0")
    trained = known["train_version"]
    for name in ("first_version", "last_version"):
        if ((trained >= 0) & (known[name] > trained)).any():
            raise Doubtful("a negative lag")


def _look_at_lists(batch: pa.RecordBatch) -> None:
    length = integers(batch.column("response_length"), batch.num_rows)
    for lists in (*(token_lists(batch, name) for name in LOG_PROBS), mask_lists(batch)):
        if lists is not None and (lists.valid & (lists.lengths != length)).any():
            raise Doubtful("a list of another length than the response")
        if lists is None or lists.values.dtype != np.float32 or not len(lists.values):
            continue
        low, high = lists.values.min(), lists.values.max()  # NaN passes through both
        if not (np.isfinite(low) and high <= POSITIVE):
            raise Doubtful("what no log-prob can be")
