"""Parquet files of the trace schema: each footer is opened alone, each row group read alone, page checksums verified.

A file without a readable footer, a row group or a column that does not decode is a counted problem; the rest of the
file is read. Only data pages carry checksums: damage in a page means a loss, never another value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_columns import convert
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.schema import (
    BLOB,
    COLUMNS,
    KEY_RUN,
    KEY_TABLE,
    KEY_UPDATES,
    KEY_VERSION,
    LOG_PROBS,
    TABLES,
    VERSION,
    Table,
)

DAMAGE = (OSError, ValueError, pa.ArrowException, MemoryError, OverflowError, IndexError, KeyError)
"""What pyarrow raises on bytes that are no parquet; `ArrowInvalid` is a ValueError."""
_BUFFER, _FEW = 1 << 20, 64
_LARGE = 64 << 20
"""Bytes of a row group, unpacked, above which it is read in pieces: four lists of a million tokens take a quarter."""
_HIVE = re.compile(r"([^=/]+)=([^=/]*)")
_FOLDERS: Mapping[Table, Mapping[str, str]] = {
    "trajectories": {"step": "decided_step", "decided_step": "decided_step", "run": "run"},
    "syncs": {"step": "step", "run": "run"},
    "buffer": {"step": "step", "run": "run"},
}
"""Keys of `key=value` folders and the column that each stands for."""
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Footer:
    """What the end of a file says about it."""

    table: Table
    names: tuple[str, ...]
    metadata: Mapping[bytes, bytes]
    rows: int


def read_footer(path: Path) -> Footer | None:
    """The footer of a trace file; None if the file is parquet of something else. Raises one of `DAMAGE`."""
    with _opened(path) as file:
        metadata = dict(file.metadata.metadata or {})
        names = tuple(file.schema_arrow.names)
        if len(set(names)) != len(names):
            raise ValueError("two columns of one name")
        table = _table_of(metadata, names)
        if table is None:
            return None
        return Footer(table, names, metadata, file.metadata.num_rows)


@contextmanager
def _opened(path: Path, buffer: int = 0) -> Iterator[pq.ParquetFile]:
    file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=buffer)
    try:
        yield file
    finally:
        file.close()


def _table_of(metadata: Mapping[bytes, bytes], names: Iterable[str]) -> Table | None:
    """By the file's own word, else (rewritten by another tool) by the columns only trajectories have."""
    if KEY_VERSION in metadata:
        told = metadata.get(KEY_TABLE, b"trajectories")
        return next((t for t in TABLES if t.encode() == told), None)
    return "trajectories" if {"group", "fate"} <= set(names) else None


def is_trace(path: Path) -> bool:
    """Whether a parquet file is one of a trace; never raises."""
    try:
        return read_footer(path) is not None
    except DAMAGE:
        return False


def home(path: Path) -> Path:
    """The directory a trace is kept in: above any `key=value` folders."""
    directory = path.parent
    while _HIVE.fullmatch(directory.name):
        directory = directory.parent
    return directory


def files_of(path: Path) -> list[Path]:
    """The parquet files of a trace directory and its `key=value` folders, in order of the numbers in their names."""
    if path.is_file():
        return [path]
    found = [p for p in path.glob("*.parquet") if p.is_file()]
    found += [p for p in path.glob("*=*/**/*.parquet") if p.is_file()]
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    pieces = re.split(r"(\d{1,18})", path.as_posix())
    return [(int(p), "") if p.isdigit() and p.isascii() else (-1, p) for p in pieces]


def sources(path: Path, notes: Parsed) -> list[TraceSource]:
    """The sources in one file: one, or one for each run whose rows it holds. Never raises."""
    try:
        if path.stat().st_size == 0:
            notes.note("trace_unreadable", f"{path.name}: empty")
            return []
        footer = read_footer(path)
    except DAMAGE as error:
        notes.note("trace_unreadable", f"{path.name}: {_short(error)}")
        return []
    if footer is None:
        return []
    _check_footer(footer, path, notes)
    lists = [n for n in LOG_PROBS if any(_holds(path, name) for name in (n, n + BLOB) if name in footer.names)]
    told = _text(footer.metadata.get(KEY_RUN)) or _folders(path, footer.table).get("run")
    runs = _runs(path, footer, notes)
    return [
        TraceSource(
            path,
            "parquet",
            footer.table,
            _positive(footer.metadata.get(KEY_UPDATES)),
            run if len(runs) > 1 else run or told,
            only_run=len(runs) > 1,
            has_log_probs=tuple(lists),
            rows=footer.rows,
        )
        for run in runs or [told]
    ]


def _check_footer(footer: Footer, path: Path, notes: Parsed) -> None:
    version = _positive(footer.metadata.get(KEY_VERSION))
    if version is not None and version > VERSION:
        notes.note("trace_version", f"{path.name}: schema version {version}, of which only {VERSION} is known")
    known = {c.name for c in COLUMNS[footer.table]} | {n + BLOB for n in LOG_PROBS}
    if extra := [n for n in footer.names if n not in known]:
        listed = ", ".join(e[:40] for e in extra[:5])
        notes.note(
            "trace_column_extra", f"{path.name}: not in the schema, left where they are: {listed}", count=len(extra)
        )
    for column in COLUMNS[footer.table]:
        if column.required and column.name not in footer.names:
            notes.note("trace_column_missing", f"{path.name}: no column {column.name}")


def _holds(path: Path, name: str) -> bool:
    """Whether a list column holds any list: writers leave whole columns null for what they do not record."""
    try:
        with _opened(path, _BUFFER) as file:
            batches = file.iter_batches(_FEW, columns=[name], use_threads=False)
            return any(batch.column(0).null_count < len(batch) for batch in batches)
    except DAMAGE:
        return True  # damage is told when the lists are read


def _runs(path: Path, footer: Footer, notes: Parsed) -> list[str | None]:
    """Runs named in the rows, None among them for rows that name none while others do."""
    if "run" not in footer.names:
        return []
    found: set[str | None] = set()
    hush = Parsed(path, notes.format)  # damage is told when the rows are read
    for part in _read(path, {"run": hush}, hush):
        if "run" in part.column_names:
            text, _ = convert(_array(part["run"]), pa.string())
            found.update(text.unique().to_pylist())
    return sorted(found, key=lambda run: (run is not None, run or ""))


def parts(
    source: TraceSource, notes: Parsed, *, tokens: bool, only: Collection[str] | None = None
) -> Iterator[pa.Table]:
    """Pieces of a file in order, with columns as written and `row`, the position in the file.

    `only` are the columns to read, else all. With `tokens` only problems of the token columns are told: the others are
    when the scalars are read.
    """
    told = Parsed(source.path, notes.format) if tokens else notes
    with_tokens = {c.name for c in COLUMNS[source.table] if c.tokens}
    try:
        footer = read_footer(source.path)
    except DAMAGE as error:
        told.note("trace_unreadable", f"{source.path.name}: {_short(error)}")
        return
    if footer is None:
        return
    known = {c.name for c in COLUMNS[source.table]} | {n + BLOB for n in LOG_PROBS}
    wanted = [n for n in footer.names if n in known and (tokens or n.removesuffix(BLOB) not in with_tokens)]
    if only is not None:
        wanted = [n for n in wanted if n.removesuffix(BLOB) in only]
    folders = _folders(source.path, source.table)
    by_column = {n: notes if n.removesuffix(BLOB) in with_tokens else told for n in wanted}
    for part in _read(source.path, by_column, told):
        yield _with_folders(part, folders, told)


def _read(path: Path, columns: Mapping[str, Parsed], notes: Parsed) -> Iterator[pa.Table]:
    """Pieces of a file with `row`; `columns` are to be read, each with the place for its own problems."""
    try:
        with _opened(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            largest = max((file.metadata.row_group(i).total_byte_size for i in range(len(sizes))), default=0)
        # A streamed buffer costs time and saves memory only where a row group is large.
        with _opened(path, _BUFFER if largest > _LARGE else 0) as file:
            start = 0
            for index, size in enumerate(sizes):
                for first, part in _row_group(file, index, columns, notes):
                    rows = pa.array(range(start + first, start + first + len(part)), pa.int64())
                    yield part.append_column("row", rows)
                start += size
    except DAMAGE as error:
        notes.note("trace_unreadable", f"{path.name}: {_short(error)}")


def _row_group(
    file: pq.ParquetFile, index: int, columns: Mapping[str, Parsed], notes: Parsed
) -> Iterator[tuple[int, pa.Table]]:
    """Pieces of a row group with the position of their first row in it; a large group comes in several."""
    # Sizes of single columns are not asked for: on a damaged footer that call ends the process.
    group, done = file.metadata.row_group(index), 0
    size, volume = group.num_rows, max(1, group.total_byte_size)
    try:
        if volume <= _LARGE:
            yield 0, _sized(file.read_row_group(index, list(columns), use_threads=False), size)
            return
        at_once = max(1, size * (_LARGE // 4) // volume)
        for batch in file.iter_batches(at_once, row_groups=[index], columns=list(columns), use_threads=False):
            yield done, pa.Table.from_batches([batch])
            done += len(batch)
        if done == size:
            return
    except DAMAGE:
        pass
    saved = _column_by_column(file, index, columns, notes)
    if saved is not None:
        yield done, saved.slice(done)


def _sized(table: pa.Table, size: int) -> pa.Table:
    if len(table) != size:
        raise ValueError(f"{len(table)} rows of {size}")
    return table


def _column_by_column(
    file: pq.ParquetFile, index: int, columns: Mapping[str, Parsed], notes: Parsed
) -> pa.Table | None:
    """What can be read of a damaged row group: the rows are lost if their group or fate is."""
    size = file.metadata.row_group(index).num_rows
    saved = {n: column for n, told in columns.items() if (column := _column(file, index, n, told)) is not None}
    if saved and saved.keys() >= {"group", "fate"} & set(columns):
        return pa.table(saved)
    notes.note("trace_row_group", f"row group {index}: all its rows are lost", count=max(size, 1))
    return None


def _column(file: pq.ParquetFile, index: int, name: str, notes: Parsed) -> pa.ChunkedArray | None:
    size = file.metadata.row_group(index).num_rows
    try:
        return _sized(file.read_row_group(index, [name], use_threads=False), size)[name]
    except DAMAGE as error:
        notes.note("trace_damaged", f"row group {index}, column {name}: {_short(error)}", count=max(size, 1))
        return None


def _folders(path: Path, table: Table) -> dict[str, str]:
    """Columns told by the names of the `key=value` folders above a file."""
    columns, told = _FOLDERS[table], dict[str, str]()
    for directory in path.parents:
        match = _HIVE.fullmatch(directory.name)
        if not match:
            break
        if (column := columns.get(match[1])) and match[2] != _NULL_FOLDER:
            told.setdefault(column, match[2])
    return told


def _with_folders(part: pa.Table, folders: Mapping[str, str], notes: Parsed) -> pa.Table:
    """Columns that only the folder's name tells; where the file tells too, the file is right."""
    for name, text in folders.items():
        told = pa.scalar(text, pa.string()) if name == "run" else pa.scalar(_whole(text), pa.int32())
        if name not in part.column_names:
            part = part.append_column(name, pa.repeat(told, len(part)))
            continue
        have, _ = convert(_array(part[name]), told.type)
        differ = pc.sum(pc.not_equal(have, told)).as_py() or 0
        if differ:
            detail = f"the folder says {name} {text[:40]}, the file another: the file is taken"
            notes.note("trace_folder", detail, count=differ)
    return part


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def _array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _text(value: bytes | None) -> str | None:
    return value.decode("utf-8", "replace") if value else None


def _positive(value: bytes | None) -> int | None:
    number = _whole(_text(value) or "")
    return number or None


def _short(error: BaseException) -> str:
    return f"{error}".splitlines()[0][:120] if str(error) else type(error).__name__
