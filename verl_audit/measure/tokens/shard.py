"""One trace file to its sums: a pure function of the file, the settings and the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from verl_audit.ingest import traces
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_parquet import DAMAGE
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.measure.tokens.files import opened
from verl_audit.measure.tokens.kernel import Kernel
from verl_audit.measure.tokens.paths import PATH
from verl_audit.measure.tokens.reduce import COLUMNS, reduce_batches
from verl_audit.measure.tokens.spec import Spec
from verl_audit.measure.tokens.sums import TokenSums
from verl_audit.measure.tokens.trust import ODD, Doubtful, trusted
from verl_audit.trace.schema import BLOB, KEY_UPDATES, LOG_PROBS
from verl_audit.trace.write import ROW_GROUP_TOKENS

Source: TypeAlias = str | TraceSource
"""Path or URL of a parquet file of the trace schema; or a source as `ingest.traces` settled it, of any format."""

_SCALARS = tuple(name for name in COLUMNS if name not in (*LOG_PROBS, "loss_mask", "sums"))
_SEGMENT = (".version", ".start", ".length")
_LENGTHS = ("response_length", "loss_tokens")
_BUFFER = 1 << 20
"""Bytes read at once of a row group that is larger than the memory it may take."""


def name_of(source: Source) -> str:
    """What a source is called in results."""
    if isinstance(source, str):
        return source
    return f"{source.path}#{source.run or ''}" if source.only_run else str(source.path)


def reduce_shard(source: Source, spec: Spec | None = None, kernel: Kernel | None = None) -> TokenSums:
    """Sums of one source; row by row they depend on nothing else.

    A path is read as it is. Raises `OSError` or `pa.ArrowException` for a file that is no parquet or damaged,
    `TypeError` for a token column that holds no numbers. A settled source is read with its repairs and checks, and
    what its token lists had to be repaired of is among the `problems` of the result.
    """
    if isinstance(source, TraceSource):
        return _reduce_settled(source, spec, kernel)
    with opened(source) as file:
        updates = _updates(file)
        if _largest(file) <= 2 * ROW_GROUP_TOKENS:
            return reduce_batches(_batches(file), spec, updates_per_version=updates, source=source, kernel=kernel)
    with opened(source, buffer_size=_BUFFER) as file:
        return reduce_batches(_batches(file), spec, updates_per_version=updates, source=source, kernel=kernel)


def _reduce_settled(source: TraceSource, spec: Spec | None, kernel: Kernel | None) -> TokenSums:
    """Read without the checks first, which takes half the time; if anything looks odd, once more with them."""
    name, updates = name_of(source), source.updates_per_version
    try:
        with opened(str(source.path), buffer_size=_BUFFER if _is_large(source) else 0) as file:
            batches = trusted(source, _batches(file))
            sums = reduce_batches(batches, spec, updates_per_version=updates, source=name, kernel=kernel)
        if not any(sums.noticed[odd] for odd in ODD):
            return sums
    except (Doubtful, TypeError, *DAMAGE):
        pass
    notes = Parsed(source.path, "trace")
    batches = traces.batches(source, notes)
    sums = reduce_batches(batches, spec, updates_per_version=updates, source=name, kernel=kernel)
    return replace(sums, problems=tuple(notes.problems))


def _is_large(source: TraceSource) -> bool:
    if source.format != "parquet":
        raise Doubtful("not of the trace schema")
    with opened(str(source.path)) as file:
        return _largest(file) > 2 * ROW_GROUP_TOKENS


def _updates(file: pq.ParquetFile) -> int | None:
    text = (file.metadata.metadata or {}).get(KEY_UPDATES, b"")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Row groups in order, those of more than two million tokens in parts of about a million."""
    leaves = _leaves(file)
    for index in range(file.metadata.num_row_groups):
        size, rows = _tokens(file, index), file.metadata.row_group(index).num_rows
        if size > 2 * ROW_GROUP_TOKENS:
            at_once = max(1, rows * ROW_GROUP_TOKENS // size)
            columns = [leaf for name in COLUMNS for leaf in leaves.get(name, ())]
            yield from file.iter_batches(at_once, row_groups=[index], columns=columns, use_threads=False)
            continue
        yield from _row_group(file, index, leaves).to_batches()


def _leaves(file: pq.ParquetFile) -> dict[str, list[str]]:
    """Parquet columns to read for each column of the schema: of segments only what tells lag; blobs with their set."""
    leaves: dict[str, list[str]] = {}
    for path in (file.schema.column(i).path for i in range(len(file.schema))):
        name = path.split(".")[0]
        if name != "segments" or path.endswith(_SEGMENT):
            leaves.setdefault(name.removesuffix(BLOB), []).append(path)
    return leaves


def _row_group(file: pq.ParquetFile, index: int, leaves: Mapping[str, list[str]]) -> pa.Table:
    """A row group, without columns that it turns out not to need.

    The mask is decoded only if some response token is not a loss token: for conversations of one turn that saves a
    third of the time of decoding. Recorded sums are read only if some row lacks its lists.
    """

    def read(names: Iterable[str]) -> pa.Table:
        columns = [leaf for name in names for leaf in leaves.get(name, ())]
        return file.read_row_group(index, columns, use_threads=False)

    table = read((*_SCALARS, *_LENGTHS))
    parts = [table, lists := read(LOG_PROBS)]
    if not (_known(table, *_LENGTHS) and table[_LENGTHS[0]].equals(table[_LENGTHS[1]])):
        parts.append(read(["loss_mask"]))
    behave = (PATH[0], PATH[0] + BLOB)
    if not (any(_known(lists, name) for name in behave) and sum(_known(lists, n) for n in lists.column_names) > 1):
        parts.append(read(["sums"]))
    columns = [column for part in parts for column in part.columns]
    return pa.Table.from_arrays(columns, names=[name for part in parts for name in part.column_names])


def _known(table: pa.Table, *names: str) -> bool:
    """Whether the columns are there and without a null."""
    return all(name in table.column_names and table[name].null_count == 0 for name in names)


def _largest(file: pq.ParquetFile) -> int:
    return max((_tokens(file, index) for index in range(file.metadata.num_row_groups)), default=0)


def _tokens(file: pq.ParquetFile, index: int) -> int:
    """About the tokens of a row group: its bytes, shared among its log-prob lists of four bytes a token.

    Not read column by column: pyarrow aborts the process on a damaged footer there.
    """
    lists = sum(name.removesuffix(BLOB) in LOG_PROBS for name in file.schema_arrow.names)
    return int(file.metadata.row_group(index).total_byte_size) // (4 * max(1, lists))
