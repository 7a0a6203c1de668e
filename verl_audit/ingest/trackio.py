"""trackio's database, one for a project: JSON objects of metrics, one row for each log call.

NaN and infinities are written as strings. A second row at a step holds only the keys logged then.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_audit.ingest import jsonl, sqlite_copy
from verl_audit.ingest.model import ConfigFound, Identity, Parsed
from verl_audit.ingest.rows import INT64, Row, emit, flatten


def read(path: Path) -> list[Parsed]:
    """Read a database: one `Parsed` for each run; never raises."""
    whole = Parsed(path, "trackio", identity=Identity(project=path.stem))
    return sqlite_copy.read_runs(path, whole, _database)


def _database(connection: sqlite3.Connection, whole: Parsed) -> list[Parsed]:
    has_id = any(row[1] == "run_id" for row in connection.execute("PRAGMA table_info(metrics)"))
    columns = f"{'run_id' if has_id else 'run_name'}, run_name, timestamp, step, metrics"
    runs: dict[str, list[tuple[Any, ...]]] = {}
    for run_id, *row in sqlite_copy.salvage(connection, "metrics", columns, whole):
        runs.setdefault(str(run_id), []).append(tuple(row))
    configs = _configs(connection, whole) if has_id else {}
    found = []
    for run_id, rows in runs.items():
        identity = Identity(whole.path.stem, str(rows[0][0]), run_id if has_id else None, _time(rows[0][1]))
        parsed = Parsed(whole.path, "trackio", identity=identity)
        emit(_rows(rows, parsed), parsed.metrics)
        if run_id in configs:
            parsed.configs.append(ConfigFound(configs[run_id], "tracker"))
        found.append(parsed)
    return found


def _configs(connection: sqlite3.Connection, whole: Parsed) -> dict[str, dict[str, Any]]:
    configs = {}
    for run_id, text in sqlite_copy.salvage(connection, "configs", "run_id, config", whole):
        tree = _object(text)
        if tree:
            configs[str(run_id)] = {key: value for key, value in tree.items() if not key.startswith("_")}
    return configs


def _rows(stored: Sequence[tuple[Any, ...]], parsed: Parsed) -> Iterator[Row]:
    for index, (_, timestamp, step, text) in enumerate(stored):
        item = _object(text)
        if item is None or not isinstance(step, int) or abs(step) >= INT64:
            parsed.note("bad_row", f"log call {index}: not a JSON object, or no step", index)
            continue
        row = Row(step, wall_time=_time(timestamp))
        for key, value in flatten(item):
            if not row.take(key, value):
                parsed.note("not_a_number", f"{key} holds text, a list or a table, which is no metric", index)
        yield row


def _object(text: object) -> dict[str, Any] | None:
    try:
        tree = jsonl.load(text if isinstance(text, bytes) else str(text).encode())
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def _time(text: object) -> float | None:
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
