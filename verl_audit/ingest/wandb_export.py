"""What people export from wandb: a history as CSV, JSON or parquet, and the chart CSV of the web page.

A chart holds one metric of several runs, and it may hold a selection of the steps. The CSV of the runs table
(one row a run) is no history.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from verl_audit.ingest import jsonl, unpack
from verl_audit.ingest.model import Identity, Parsed
from verl_audit.ingest.rows import INT64, STEP_KEYS, Row, emit

RUNS_TABLE = "W&B runs table: one row a run, no history; export the run's history or give the .wandb file"
_CELL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|nan|inf|infinity)", re.IGNORECASE)
_AXES = ("global_step", "training/global_step", "train/global_step")
_BOOLS = {"true": 1.0, "false": 0.0}
_HISTORY_DEFAULT = 500
"""`run.history()` returns this many sampled rows unless told otherwise."""


def csv_header(head: bytes) -> list[str]:
    """The cells of the first line."""
    line = head.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")
    return _cells(line)


def csv_kind(header: Sequence[str]) -> str | None:
    """`chart`, `runs` (the runs table), `history`, or None for any other table."""
    names = [name for name in header if name]
    if len(names) < 2:
        return None
    if names[0] == "Name" and "State" in names:
        return "runs"
    if all(" - " in name for name in names[1:]):
        return "chart"
    return "history" if _step_column(header) is not None else None


def _step_column(header: Sequence[str]) -> int | None:
    ranked = [header.index(key) for key in ("_step", *STEP_KEYS) if key in header]
    return ranked[0] if ranked else None


def read(path: Path) -> list[Parsed]:
    """Read a history exported as CSV or JSON; never raises."""
    parsed = Parsed(path, "wandb_export")
    try:
        with unpack.opened(path, parsed.note) as stream:
            start = stream.peek(64) if hasattr(stream, "peek") else b""
            if start.lstrip(b"\xef\xbb\xbf \r\n\t\0")[:1] in (b"{", b"["):
                _json(stream, parsed)
            else:
                _history_csv(stream, parsed)
    except OSError as error:
        parsed.note("unreadable", str(error))
    _check_sampling(parsed)
    return [parsed]


def _json(stream: BinaryIO, parsed: Parsed) -> None:
    """A list of rows, columns by name (pandas' default), or a row a line."""
    text = stream.read()
    try:
        tree = jsonl.load(text)
    except (ValueError, RecursionError):
        tree = None
    parsed.bytes_read = len(text)
    if isinstance(tree, list):
        jsonl.add_objects(((i, row) for i, row in enumerate(tree) if isinstance(row, dict)), parsed)
    elif isinstance(tree, dict) and any(isinstance(v, dict) for v in tree.values()):
        jsonl.add_objects(_by_columns(tree), parsed)
    elif text.lstrip()[:1] == b"[":
        parsed.note("torn_file", "the list of rows is damaged: the whole rows before the damage are read", 0)
        jsonl.add_objects(objects_of_list(text.decode("utf-8", "replace")), parsed)
    else:
        jsonl.add_objects(jsonl.objects(io.BytesIO(text), parsed), parsed)


def is_columns(tree: object) -> bool:
    """Whether JSON is a table by columns, `{"_step": {"0": 0, ...}, ...}`."""
    return isinstance(tree, dict) and any(isinstance(tree.get(key), dict) for key in STEP_KEYS)


def _by_columns(tree: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    columns = {name: column for name, column in tree.items() if isinstance(column, dict)}
    for i, index in enumerate(dict.fromkeys(i for column in columns.values() for i in column)):
        yield i, {name: column[index] for name, column in columns.items() if index in column}


def objects_of_list(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a list of JSON, one after another, up to where it is torn."""
    decoder, pos = json.JSONDecoder(), text.index("[") + 1
    while True:
        pos += len(text[pos : pos + 99]) - len(text[pos : pos + 99].lstrip(" ,\r\n\t"))
        try:
            row, end = decoder.raw_decode(text, pos)
        except (ValueError, RecursionError):
            return
        if isinstance(row, dict):
            yield pos, row
        pos = end


def _history_csv(stream: BinaryIO, parsed: Parsed) -> None:
    lines = _lines(stream, parsed)
    _, header, _ = next(lines, (0, [], True))
    column = _step_column(header)
    if column is None:
        parsed.note("no_step", "no column holds the step", 0)
        return
    wall = header.index("_timestamp") if "_timestamp" in header else None
    columns = [(i, key) for i, key in enumerate(header) if key and i != column and not key.startswith("_")]
    blanks = [0]
    emit(_history_rows(lines, column, wall, columns, parsed, blanks), parsed.metrics)
    if header[column] == "_step" and any(key in _AXES for _, key in columns):
        parsed.step_kind = "counter"
    if blanks[0]:
        detail = "an empty cell is taken for 'not logged'; a table written by pandas leaves NaN empty as well"
        parsed.note("nan_or_missing", detail, 0, blanks[0])


def _history_rows(
    lines: Iterator[tuple[int, list[str], bool]],
    column: int,
    wall: int | None,
    columns: list[tuple[int, str]],
    parsed: Parsed,
    blanks: list[int],
) -> Iterator[Row]:
    for offset, cells, whole in lines:
        step = _step(cells[column])
        if step is None:
            parsed.note("no_step", "a row without a whole step", offset)
            continue
        row = Row(step, wall_time=_float(cells[wall]) if wall is not None else None)
        _fill(row, [(key, cells[i]) for i, key in columns], parsed, offset, whole)
        blanks[0] += sum(not cells[i] for i, _ in columns)
        yield row


def _fill(row: Row, cells: list[tuple[str, str]], parsed: Parsed, offset: int, whole: bool) -> None:
    for i, (key, cell) in enumerate(cells):
        if not cell:
            continue
        value = _float(cell)
        if not whole and i == len(cells) - 1:
            parsed.note("torn_line", "the last value of the file may be cut off", offset)
            parsed.values_lost += 1
        elif value is None:
            parsed.note("not_a_number", f"{key} holds text, which is no metric", offset)
        else:
            row.values.append((key, value, None))


def _lines(stream: BinaryIO, parsed: Parsed) -> Iterator[tuple[int, list[str], bool]]:
    """Offset, cells, and whether the last cell is surely whole, of every line with as many cells as the first."""
    offset, width = 0, 0
    for raw in stream:
        text = raw.replace(b"\0", b"").decode("utf-8", "replace").rstrip("\r\n").removeprefix("\ufeff")
        if text:
            cells = _cells(text)
            width = width or len(cells)
            if len(cells) == width and b"\0" not in raw:
                yield offset, cells, raw.endswith(b"\n") or text.endswith(('"', ","))
            else:
                kind = "bad_line" if raw.endswith(b"\n") else "torn_line"
                parsed.note(kind, f"{len(cells)} cells where the header has {width}, or NUL bytes", offset)
                parsed.values_lost += sum(map(bool, cells))
        elif b"\0" in raw:
            parsed.note("nul_bytes", "a hole of NUL bytes where lines may have been", offset)
        offset += len(raw)
    parsed.bytes_read = offset


def _cells(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _float(cell: str) -> float | None:
    """A cell as a number; `1_000` and `1,000` are none."""
    if _CELL.fullmatch(cell):
        return float(cell)
    return _BOOLS.get(cell.lower())


def _step(cell: str) -> int | None:
    value = _float(cell)
    return int(value) if value is not None and abs(value) < INT64 and value == math.floor(value) else None


def _check_sampling(parsed: Parsed) -> None:
    """A history of exactly 500 rows at uneven steps is what `run.history()` gives by default: a selection."""
    steps = sorted(set(parsed.metrics.step))
    if len(steps) == _HISTORY_DEFAULT and len({b - a for a, b in pairwise(steps)}) > 1:
        _mark_sampled(parsed, "500 rows at uneven steps: run.history() returns a selection; use run.scan_history()")


def _mark_sampled(parsed: Parsed, detail: str) -> None:
    parsed.sampled = True
    parsed.note("sampled", detail, 0)


@dataclass
class _Curve:
    """One column of a chart: a metric of a run."""

    column: int
    key: str


def read_chart(path: Path) -> list[Parsed]:
    """Read a chart export: one `Parsed` for each run in it; never raises."""
    first = Parsed(path, "wandb_chart")
    results = [first]
    try:
        with unpack.opened(path, first.note) as stream:
            results = _chart(stream, first)
    except OSError as error:
        first.note("unreadable", str(error))
    return results


def _chart(stream: BinaryIO, first: Parsed) -> list[Parsed]:
    lines = _lines(stream, first)
    _, header, _ = next(lines, (0, [], True))
    chart = _curves(header)
    if not header or "step" not in header[0].lower():
        axis = header[0] if header else ""
        first.note("not_a_step_axis", f"the chart is drawn over {axis!r}: export it with Step as x axis", 0)
        return [first]
    sources = {run: Parsed(first.path, "wandb_chart", identity=Identity(experiment=run)) for run in chart}
    rows: dict[str, list[Row]] = {run: [] for run in chart}
    for offset, cells, whole in lines:
        step = _step(cells[0])
        if step is None:
            first.note("no_step", "a row without a whole step", offset)
            continue
        for run, curves in chart.items():
            row = Row(step)
            texts = [(c.key, cells[c.column] if whole or c.column < len(cells) - 1 else "") for c in curves]
            _fill(row, texts, sources[run], offset, whole=True)
            if row.values:
                rows[run].append(row)
    for run, parsed in sources.items():
        emit(rows[run], parsed.metrics)
        _mark_sampled(parsed, "a W&B chart may show a selection of the steps, smoothed or averaged")
    found = list(sources.values()) or [first]
    found[0].bytes_read = first.bytes_read
    if found[0] is not first:
        found[0].problems.extend(first.problems)
        found[0].values_lost += first.values_lost
    return found


def _curves(header: Sequence[str]) -> dict[str, list[_Curve]]:
    """The curves of each run, from columns `run - metric`; `__MIN` and `__MAX` beside them are no metrics."""
    chart: dict[str, list[_Curve]] = {}
    names = set(header)
    for i, name in enumerate(header[1:], start=1):
        base = name.removesuffix("__MIN").removesuffix("__MAX")
        run, sep, key = name.rpartition(" - ")
        if sep and (base == name or base not in names):
            chart.setdefault(run, []).append(_Curve(i, key))
    return chart


def is_history_parquet(path: Path) -> bool:
    """Whether a parquet file holds a run's history: a whole-number `_step` and numbers beside it."""
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return False
    if "_step" not in schema.names or not pa.types.is_integer(schema.field("_step").type):
        return False
    return any(_is_number(f.type) for f in schema if f.name != "_step")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


@dataclass
class _Shard:
    """One parquet file of a history."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    logged: set[str] = field(default_factory=set)

    @property
    def steps(self) -> set[int]:
        return {row.step for row in self.rows}


def read_parquet(path: Path) -> list[Parsed]:
    """Read a history file, or all of a directory: shards that share no step are one run; never raises."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    notes = Parsed(path, "wandb_parquet")
    shards = [_shard(file, notes) for file in files]
    groups: list[list[_Shard]] = []
    for shard in sorted(shards, key=lambda s: min(s.steps, default=0)):
        home = next((g for g in groups if not any(s.steps & shard.steps for s in g)), None)
        if home is None:
            groups.append([shard])
        else:
            home.append(shard)
    results = [_joined(group, path) for group in groups] or [notes]
    results[0].problems.extend(p for p in notes.problems if results[0] is not notes)
    results[0].bytes_read = notes.bytes_read
    return results


def _joined(group: list[_Shard], path: Path) -> Parsed:
    name = group[0].path if len(group) == 1 else path
    parsed = Parsed(name, "wandb_parquet")
    emit((row for shard in group for row in shard.rows), parsed.metrics)
    if any(key in _AXES for shard in group for key in shard.logged):
        parsed.step_kind = "counter"
    return parsed


def _shard(path: Path, notes: Parsed) -> _Shard:
    shard = _Shard(path)
    try:
        notes.bytes_read += path.stat().st_size
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        notes.note("unreadable", f"{path.name}: {str(error)[:200]}")
        return shard
    with file:
        names = [f.name for f in file.schema_arrow if _is_number(f.type)]
        if "_step" not in names:
            notes.note("no_step", f"{path.name}: no column holds the step")
            return shard
        for group in range(file.num_row_groups):
            _row_group(file, group, names, shard, notes)
    return shard


def _row_group(file: pq.ParquetFile, group: int, names: list[str], shard: _Shard, notes: Parsed) -> None:
    try:
        table = file.read_row_group(group, columns=names)
    except (OSError, pa.ArrowException, ValueError) as error:
        lost = file.metadata.row_group(group).num_rows
        detail = f"{shard.path.name}, row group {group}: {lost} rows lost: {str(error)[:120]}"
        notes.note("damaged_row_group", detail)
        notes.values_lost += lost * (len(names) - 1)
    else:
        _add_rows(table, shard)


def _add_rows(table: pa.Table, shard: _Shard) -> None:
    steps = table.column("_step").to_pylist()
    walls = table.column("_timestamp").to_pylist() if "_timestamp" in table.column_names else [None] * len(steps)
    rows = [Row(s, wall_time=w) if s is not None else None for s, w in zip(steps, walls, strict=True)]
    for key in table.column_names:
        if key.startswith("_"):
            continue
        shard.logged.add(key)
        for row, value in zip(rows, table.column(key).to_pylist(), strict=True):
            if row is not None:
                row.take(key, value)
    shard.rows.extend(row for row in rows if row is not None)
