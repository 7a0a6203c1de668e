"""MLflow stores: the SQLite database and the older folder of text files.

verl's default is a database `mlruns.db` in the temporary directory, which all runs of a machine share. The
database writes NaN as 0 with a flag and clamps infinities to the largest double; the folder writes both. verl
writes `@` as `_at_` in metric names, which is undone.
"""

from __future__ import annotations

import ast
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from verl_audit.ingest import sqlite_copy
from verl_audit.ingest.model import ConfigFound, Identity, Parsed, ValueKind
from verl_audit.ingest.rows import INT64, Row, emit

_LARGEST = 1.7976931348623157e308
_AT = re.compile(r"_at_(?=\d)")
_LINE = re.compile(rb"(\d{1,16}) ([+-]?(?:nan|inf|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))(?: (-?\d{1,19}))?")
_LONGEST_FILE = 1 << 30


Point = tuple[int, int, str, float, ValueKind | None]
"""A metric point as stored: milliseconds, step, key, value, kind."""


def _emit(points: Iterable[Point], parsed: Parsed) -> None:
    """Points in the order of their times: one record for each time and step, so that of two values at one step the
    later counts."""
    renamed: set[str] = set()
    emit(_rows(points, parsed, renamed), parsed.metrics)
    if renamed:
        parsed.note("keys_restored", "_at_ in metric names is read as @, which verl wrote", count=len(renamed))


def _rows(points: Iterable[Point], parsed: Parsed, renamed: set[str]) -> Iterator[Row]:
    for (time, step), group in groupby(points, key=lambda p: p[:2]):
        row, seen = Row(step, wall_time=time / 1000), dict[str, float]()
        for _, _, key, value, kind in group:
            plain = _AT.sub("@", key).replace("//", "/")
            if plain != key:
                renamed.add(key)
            before = seen.setdefault(plain, value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                parsed.note("same_time", f"{plain} has two values at step {step} and one time: the later is not known")
            row.values.append((plain, value, kind))
        yield row


def read(path: Path) -> list[Parsed]:
    """Read a database: one `Parsed` for each run that was not deleted; never raises."""
    return sqlite_copy.read_runs(path, Parsed(path, "mlflow"), _database)


def _database(connection: sqlite3.Connection, whole: Parsed) -> list[Parsed]:
    columns = "run_uuid, name, lifecycle_stage, experiment_id, start_time"
    runs = sqlite_copy.salvage(connection, "runs", columns, whole)
    experiments = dict(sqlite_copy.salvage(connection, "experiments", "experiment_id, name", whole))
    metrics = _sorted_metrics(connection, whole)
    params: dict[str, dict[str, str]] = {}
    for run_id, key, value in sqlite_copy.salvage(connection, "params", "run_uuid, key, value", whole):
        params.setdefault(run_id, {})[key] = value
    found = []
    for run_id, name, stage, experiment, started in runs:
        if stage == "deleted":
            whole.note("deleted_run", "a run that was deleted in MLflow is left out")
            continue
        identity = Identity(experiments.get(experiment), name, run_id, started / 1000 if started else None)
        parsed = Parsed(whole.path, "mlflow", identity=identity)
        _emit(_stored(metrics(run_id), parsed), parsed)
        _configure(params.get(run_id, {}), parsed)
        found.append(parsed)
    return found


def _sorted_metrics(connection: sqlite3.Connection, whole: Parsed) -> Callable[[str], Iterable[tuple[Any, ...]]]:
    """A way to the metrics of one run in the order of their times, through the database or, if damaged, around it."""
    columns = "run_uuid, timestamp, step, key, value, is_nan"
    try:
        for _ in connection.execute(f"SELECT {columns} FROM metrics"):
            pass
    except sqlite3.Error:
        rows = sqlite_copy.salvage(connection, "metrics", columns, whole)
        rows.sort(key=lambda row: tuple(v if isinstance(v, int) else 0 for v in row[1:3]))
        return lambda run_id: (row[1:] for row in rows if row[0] == run_id)
    # the plus keeps SQLite to the table it has just read through, away from an index that may be damaged
    query = (
        "SELECT timestamp, step, key, value, is_nan FROM metrics WHERE +run_uuid = ? ORDER BY timestamp, step, rowid"
    )
    return lambda run_id: connection.execute(query, [run_id])


def _stored(points: Iterable[tuple[Any, ...]], parsed: Parsed) -> Iterator[Point]:
    for time, step, key, value, is_nan in points:
        whole = isinstance(time, int) and isinstance(step, int) and isinstance(key, str)
        if not whole or not isinstance(value, (int, float)) or abs(step) >= INT64:
            parsed.note("bad_row", "a metric row without a number, time, step or name")
            parsed.values_lost += 1
        elif is_nan:
            yield time, step, key, math.nan, None
        elif abs(value) >= _LARGEST:
            parsed.note("clamped", "MLflow stores infinities as 1.797e308: taken for infinite")
            yield time, step, key, math.copysign(math.inf, value), "clamped"
        else:
            yield time, step, key, float(value), None


def _configure(params: dict[str, str], parsed: Parsed) -> None:
    """Parameters as a tree: verl flattens its configuration with `/` (older versions with `.`)."""
    tree: dict[str, Any] = {}
    for key, value in sorted(params.items()):
        *path, leaf = re.split(r"[/.]", key)
        branch: Any = tree
        for part in path:
            branch = branch.setdefault(part, {}) if isinstance(branch, dict) else None
        if isinstance(branch, dict):
            branch[leaf] = _literal(value)
    if tree:
        parsed.configs.append(ConfigFound(tree, "tracker"))


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def is_run(path: Path) -> bool:
    """Whether a directory is a run of a file store."""
    return (path / "meta.yaml").is_file() and (path / "metrics").is_dir()


def read_files(path: Path) -> list[Parsed]:
    """Read one run of a file store; never raises."""
    parsed = Parsed(path, "mlflow_files")
    meta = _yaml(path / "meta.yaml", parsed)
    experiment = _yaml(path.parent / "meta.yaml", parsed) if (path.parent / "meta.yaml").is_file() else {}
    started = meta.get("start_time")
    parsed.identity = Identity(
        project=_text(experiment.get("name")),
        experiment=_text(meta.get("run_name")) or _tag(path),
        run_id=_text(meta.get("run_id") or meta.get("run_uuid")) or path.name,
        started=started / 1000 if isinstance(started, (int, float)) else None,
    )
    if meta.get("lifecycle_stage") == "deleted":
        parsed.note("deleted_run", "a run that was deleted in MLflow is left out")
        return [parsed]
    points: list[Point] = []
    for file in _files(path / "metrics"):
        points.extend(_metric_file(file, file.relative_to(path / "metrics").as_posix(), parsed))
    _emit(sorted(points, key=lambda p: p[:2]), parsed)
    params = {f.relative_to(path / "params").as_posix(): f for f in _files(path / "params")}
    _configure({key: _content(file, parsed).decode("utf-8", "replace") for key, file in params.items()}, parsed)
    return [parsed]


def _files(folder: Path) -> Iterable[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _metric_file(file: Path, key: str, parsed: Parsed) -> Iterator[Point]:
    offset = 0
    for line in _content(file, parsed).splitlines(keepends=True):
        match = _LINE.fullmatch(line.strip())
        torn = not line.endswith(b"\n")
        step = int(match[3] or 0) if match else 0
        if match and not torn and abs(step) < INT64:
            yield int(match[1]), step, key, float(match[2]), None
        elif line.strip(b"\0 \r\n"):
            detail = f"metrics/{key}: not 'time value step'" + (", or cut off" if torn else "")
            parsed.note("torn_line" if torn else "bad_line", detail, offset)
            parsed.values_lost += 1
        offset += len(line)


def _content(file: Path, parsed: Parsed) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(_LONGEST_FILE)
    except OSError as error:
        parsed.note("unreadable", str(error))
        return b""
    parsed.bytes_read += len(data)
    return data


def _yaml(file: Path, parsed: Parsed) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(_content(file, parsed))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        parsed.note("bad_meta", f"{file.name}: {str(error)[:100]}")
        return {}
    return tree if isinstance(tree, dict) else {}


def _text(value: object) -> str | None:
    return str(value) if value not in (None, "") else None


def _tag(path: Path) -> str | None:
    tag = path / "tags" / "mlflow.runName"
    try:
        return tag.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
