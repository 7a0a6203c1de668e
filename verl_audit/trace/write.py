"""Writing trace files: encodings and row groups that make them fast to read, and names that are only ever whole.

List decoding bounds the speed of every later pass, so log-prob lists are written PLAIN, without dictionary,
statistics or compression, in row groups of about a million tokens (docs/trace-schema.md gives the measured effect).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_audit.trace.schema import BLOB, COLUMNS, LOG_PROBS, Table, schema

ROW_GROUP_TOKENS = 1 << 20
_TOKEN_COLUMNS = frozenset(c.name for c in COLUMNS["trajectories"] if c.tokens)


def to_table(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    table: Table = "trajectories",
    **metadata: Any,
) -> pa.Table:
    """Rows (dicts, absent keys are null) or columns (name to values) as an Arrow table of the schema.

    `metadata` is handed to `schema`. Raises `ValueError` for a column the schema does not have.
    """
    target = schema(table, **metadata)
    names = set(rows) if isinstance(rows, Mapping) else {name for row in rows for name in row}
    if unknown := sorted(names - set(target.names)):
        raise ValueError(f"{table}: no such column: {', '.join(unknown)}")
    if not isinstance(rows, Mapping):
        return pa.Table.from_pylist(list(rows), target)
    length = len(next(iter(rows.values()))) if rows else 0
    arrays = [
        pa.array(rows[field.name], field.type) if field.name in rows else pa.nulls(length, field.type)
        for field in target
    ]
    return pa.Table.from_arrays(arrays, schema=target)


def write(table: pa.Table, path: Path) -> None:
    """Write one trace file whole or not at all: aside under a `.tmp` name, then renamed."""
    aside = path.with_name(path.name + ".tmp")
    tokens = [name for name in table.column_names if name.removesuffix(BLOB) in _TOKEN_COLUMNS]
    floats = [n for n in tokens if n.removesuffix(BLOB) in LOG_PROBS]
    lists = [f"{n}.list.element" if not n.endswith(BLOB) else n for n in floats]
    others = [leaf for leaf in leaves(table.schema) if leaf not in set(lists)]
    with pq.ParquetWriter(
        aside,
        table.schema,
        compression={**dict.fromkeys(lists, "none"), **dict.fromkeys(others, "zstd")},
        use_dictionary=[n for n in others if not n.startswith(tuple(f"{t}.list" for t in tokens))],
        column_encoding={"loss_mask.list.element": "RLE"} if "loss_mask" in table.column_names else None,
        write_statistics=[n for n in others if "." not in n],
        write_page_checksum=True,
    ) as writer:
        for group in row_groups(table):
            writer.write_table(group, row_group_size=max(1, len(group)))
    aside.replace(path)


def row_groups(table: pa.Table, tokens: int = ROW_GROUP_TOKENS) -> Iterable[pa.Table]:
    """The table in slices of about `tokens` response tokens, at least one row each; an empty table is one slice."""
    if "response_length" not in table.column_names or not len(table):
        yield table
        return
    start = total = 0
    for i, length in enumerate(table["response_length"].to_pylist()):
        if total and total + length > tokens:
            yield table.slice(start, i - start)
            start, total = i, 0
        total += length or 0
    yield table.slice(start)


def leaves(target: pa.Schema) -> list[str]:
    """Parquet column paths of a schema, as the writer's options name them."""
    return [path for field in target for path in _paths(field.name, field.type)]


def _paths(name: str, kind: pa.DataType) -> list[str]:
    if pa.types.is_map(kind):
        return [f"{name}.key_value.key", *_paths(f"{name}.key_value.value", kind.item_type)]
    if pa.types.is_list(kind):
        return _paths(f"{name}.list.element", kind.value_type)
    if pa.types.is_struct(kind):
        return [path for field in kind for path in _paths(f"{name}.{field.name}", field.type)]
    return [name]
