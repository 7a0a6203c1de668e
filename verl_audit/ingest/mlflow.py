"""MLflow stores: the SQLite database (verl's default is /tmp/mlruns.db) and the older folder of text files.

The database writes NaN as 0 with a flag and clamps infinities to the largest double; the folder writes both.
verl writes `@` as `_at_` in metric names, which is undone.
"""

from __future__ import annotations

import ast
import math
import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class _Points:
    """Metric points of one run as stored: (milliseconds, step, key, value, kind), in file order."""

    points: list[tuple[int, int, str, float, ValueKind | None]] = field(default_factory=list)

    def add(self, time: int, step: int, key: str, value: float, kind: ValueKind | None = None) -> None:
        self.points.append((time, step, key, value, kind))

    def emit(self, parsed: Parsed) -> None:
        """One record for each time and step; the later of two values at one step comes last."""
        rows: dict[tuple[int, int], Row] = {}
        seen: dict[tuple[int, int, str], float] = {}
        renamed = set()
        for time, step, key, value, kind in sorted(self.points, key=lambda p: p[:2]):
            plain = _AT.sub("@", key).replace("//", "/")
            renamed |= {key} if plain != key else set()
            before = seen.setdefault((time, step, plain), value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                parsed.note(
                    "same_time", f"{plain} has two values at step {step} and one time: which is later is unknown"
                )
            rows.setdefault((time, step), Row(step, wall_time=time / 1000)).values.append((plain, value, kind))
        emit(rows.values(), parsed.metrics)
        if renamed:
            parsed.note("keys_restored", "_at_ in metric names is read as @, which verl wrote", count=len(renamed))


def read(path: Path) -> list[Parsed]:
    """Read a database: one `Parsed` for each run that was not deleted; never raises."""
    whole = Parsed(path, "mlflow")
    try:
        whole.bytes_read = path.stat().st_size
        with sqlite_copy.copied(path) as connection:
            found = _database(connection, whole)
        sqlite_copy.warn_if_wal_is_missing(path, found[0] if found else whole)
    except (OSError, sqlite3.Error) as error:
        whole.note("unreadable", str(error))
        found = []
    if not found:
        return [whole]
    found[0].problems.extend(whole.problems)
    found[0].bytes_read = whole.bytes_read
    return found


def _database(connection: sqlite3.Connection, whole: Parsed) -> list[Parsed]:
    columns = "run_uuid, name, lifecycle_stage, experiment_id, start_time"
    runs = sqlite_copy.salvage(connection, "runs", columns, whole)
    experiments = dict(sqlite_copy.salvage(connection, "experiments", "experiment_id, name", whole))
    points: dict[str, list[tuple[Any, ...]]] = {}
    for run_id, *point in sqlite_copy.salvage(
        connection, "metrics", "run_uuid, timestamp, step, key, value, is_nan", whole
    ):
        points.setdefault(run_id, []).append(tuple(point))
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
        _stored(points.pop(run_id, []), parsed)
        _configure(params.get(run_id, {}), parsed)
        found.append(parsed)
    return found


def _stored(points: Sequence[tuple[Any, ...]], parsed: Parsed) -> None:
    collected = _Points()
    for time, step, key, value, is_nan in points:
        if not isinstance(value, (int, float)) or not isinstance(step, int) or not isinstance(key, str):
            parsed.note("bad_row", "a metric row without a number, step or name")
            parsed.values_lost += 1
        elif is_nan:
            collected.add(time, step, key, math.nan)
        elif abs(value) >= _LARGEST:
            collected.add(time, step, key, math.copysign(math.inf, value), "clamped")
            parsed.note("clamped", "MLflow stores infinities as 1.797e308: taken for infinite")
        else:
            collected.add(time, step, key, float(value))
    collected.emit(parsed)


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
    collected = _Points()
    for file in _files(path / "metrics"):
        _metric_file(file, file.relative_to(path / "metrics").as_posix(), collected, parsed)
    collected.emit(parsed)
    params = {f.relative_to(path / "params").as_posix(): f for f in _files(path / "params")}
    _configure({key: _content(file, parsed).decode("utf-8", "replace") for key, file in params.items()}, parsed)
    return [parsed]


def _files(folder: Path) -> Iterable[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _metric_file(file: Path, key: str, collected: _Points, parsed: Parsed) -> None:
    offset = 0
    for line in _content(file, parsed).splitlines(keepends=True):
        match = _LINE.fullmatch(line.strip())
        torn = not line.endswith(b"\n")
        step = int(match[3] or 0) if match else 0
        if match and not torn and abs(step) < INT64:
            collected.add(int(match[1]), step, key, float(match[2]))
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
