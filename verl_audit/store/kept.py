"""What a kept store remembers of every source, so that the next reading parses only what is new or changed."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from verl_audit._version import __version__
from verl_audit.ingest.discover import Found
from verl_audit.ingest.model import ConfigFound, Event, Identity, MetricBuffer, Parsed, Problem, Sample
from verl_audit.ingest.stamp import place, stamp
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.store.database import SCHEMA_VERSION

_PLAIN = ("format", "step_kind", "float32", "sampled", "bytes_read", "values_lost")
_LISTS = {"events": Event, "samples": Sample, "problems": Problem}
_UNSURE = {"unreadable", "reader_crashed", "cannot_unpack"}
"""Problems that another try may not meet."""


@dataclass
class Reading:
    """How much of the input was parsed, and how much was taken from the store of an earlier call."""

    sources_read: int = 0
    bytes_read: int = 0
    sources_kept: int = 0
    bytes_kept: int = 0


@dataclass(frozen=True)
class _Entry:
    """A source as the next call may find it again."""

    place: str
    stamp: str
    parts: int
    state: bytes


@dataclass
class Memory:
    """Recalls unchanged sources from an older store, and collects what the new one shall remember of each."""

    old: duckdb.DuckDBPyConnection | None = None
    reading: Reading = field(default_factory=Reading)
    _stamps: dict[str, str] = field(default_factory=dict)
    _recalled: set[str] = field(default_factory=set)
    _pending: list[_Entry | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Let go of a store that another version wrote."""
        if self.old is not None and not _is_ours(self.old):
            self.close()

    def recall(self, found: Found) -> list[Parsed] | None:
        """What an earlier call read from this source, if nothing of it has changed; the stamp is taken here, first."""
        where = place(found)
        try:
            self._stamps[where] = stamp(found)
        except OSError:
            return None
        if self.old is None:
            return None
        try:
            parsed = self._kept(self.old, where, found.path)
        except (ValueError, LookupError, TypeError, zlib.error, duckdb.Error):  # a damaged store is no authority
            return None
        if not parsed:
            return None
        self._recalled.add(where)
        return parsed

    def _kept(self, old: duckdb.DuckDBPyConnection, where: str, path: Path) -> list[Parsed]:
        rows = old.execute(
            "SELECT parts, source_id, state FROM kept_sources WHERE place = ? AND stamp = ? ORDER BY source_id",
            [where, self._stamps[where]],
        ).fetchall()
        rows = rows[: rows[0][0]] if rows else []  # more where one source was given as run and as baseline
        if not rows or len(rows) < rows[0][0]:
            return []
        return [_restored(old, source_id, state, path) for _, source_id, state in rows]

    def remember(self, found: Found, parsed: Sequence[Parsed]) -> None:
        """Take down what was read or recalled, before steps are aligned or rows let go."""
        where = place(found)
        kept = where in self._recalled
        self.reading.sources_kept += kept
        self.reading.sources_read += not kept
        size = sum(p.bytes_read for p in parsed)
        self.reading.bytes_kept += size if kept else 0
        self.reading.bytes_read += 0 if kept else size
        states = [_state(p, found.path) for p in parsed]
        known, sure = self._stamps.get(where), [state for state in states if state is not None]
        if known is None or len(sure) < len(parsed):
            self._pending.extend([None] * len(parsed))
        else:
            self._pending.extend(_Entry(where, known, len(parsed), state) for state in sure)

    def save(self, con: duckdb.DuckDBPyConnection, base: int) -> None:
        """Write what was collected; the sources are numbered from `base` in the order they were read in."""
        rows = [
            [entry.place, entry.stamp, entry.parts, base + i, entry.state]
            for i, entry in enumerate(self._pending)
            if entry is not None
        ]
        if rows:
            con.executemany("INSERT INTO kept_sources VALUES (?, ?, ?, ?, ?)", rows)
        self._pending.clear()

    def close(self) -> None:
        """Close the older store, which may then be replaced."""
        if self.old is not None:
            self.old.close()
            self.old = None


def _is_ours(con: duckdb.DuckDBPyConnection) -> bool:
    try:
        return con.execute("SELECT schema_version, tool_version FROM meta").fetchall() == [
            (SCHEMA_VERSION, __version__)
        ]
    except duckdb.Error:
        return False


def _state(parsed: Parsed, root: Path) -> bytes | None:
    """All of a `Parsed` but its rows, as compressed JSON; None if it is not worth trusting or JSON would change it.

    Of traces only what names them: their rows are read again, and the sums of their tokens have a cache of their own.
    """
    if any(p.kind in _UNSURE for p in parsed.problems) or any(t.problems or t.dropped for t in parsed.traces):
        return None
    tree = {
        **{name: getattr(parsed, name) for name in _PLAIN},
        **{name: [list(vars(item).values()) for item in getattr(parsed, name)] for name in _LISTS},
        "path": os.path.relpath(parsed.path, root),
        "identity": list(asdict(parsed.identity).values()),
        "traces": [_named(trace, root) for trace in parsed.traces],
        "configs": [[c.tree, c.origin, list(c.overrides)] for c in parsed.configs],
        "keys": parsed.metrics.keys,
        "records": parsed.metrics.records,
    }
    try:
        text = json.dumps(tree)
    except (TypeError, ValueError, RecursionError):
        return None
    same = repr(json.loads(text)) == repr(tree)
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1) if same else None


def _restored(con: duckdb.DuckDBPyConnection, source_id: int, state: bytes, root: Path) -> Parsed:
    tree: dict[str, Any] = json.loads(zlib.decompress(state).decode("utf-8", "surrogatepass"))
    path = root if tree["path"] == "." else root / tree["path"]
    parsed = Parsed(path, **{name: tree[name] for name in _PLAIN})
    parsed.identity = Identity(*tree["identity"])
    parsed.configs = [ConfigFound(found, origin, tuple(given)) for found, origin, given in tree["configs"]]
    for name, kind in _LISTS.items():
        setattr(parsed, name, [kind(*item) for item in tree[name]])
    parsed.traces = [_trace(named, root) for named in tree["traces"]]
    parsed.metrics = _rows(con, source_id, tree["keys"], tree["records"])
    return parsed


_OF_TRACE = ("format", "table", "updates_per_version", "run", "only_run", "rows", "version_offset")


def _named(trace: TraceSource, root: Path) -> dict[str, Any]:
    return {
        **{name: getattr(trace, name) for name in _OF_TRACE},
        "path": os.path.relpath(trace.path, root),
        "has_log_probs": list(trace.has_log_probs),
        "fates": None if trace.fates is None else list(trace.fates),
    }


def _trace(named: dict[str, Any], root: Path) -> TraceSource:
    path = root if named["path"] == "." else root / named["path"]
    fates = None if named["fates"] is None else tuple(named["fates"])
    plain = {name: named[name] for name in _OF_TRACE}
    return TraceSource(path, **plain, has_log_probs=tuple(named["has_log_probs"]), fates=fates)


_COLUMNS = {
    "key_id": "key_id",
    "record": "record",
    "segment": "segment",
    "step": "step",
    "value": "value",
    "kind_id": "enum_code(kind)::TINYINT",
    "wall_time": "coalesce(wall_time, 'nan'::DOUBLE)",
}


def _rows(con: duckdb.DuckDBPyConnection, source_id: int, keys: list[str], records: int) -> MetricBuffer:
    """The rows of a source in the order they were read in."""
    listed = ", ".join(f"{column} AS {name}" for name, column in _COLUMNS.items())
    found = con.execute(f"SELECT {listed} FROM raw_values WHERE source_id = ? ORDER BY rowid", [source_id]).fetchnumpy()
    buffer = MetricBuffer(keys)
    ids = {key: index for index, key in con.execute("SELECT key_id, key FROM keys").fetchall()}
    own = np.zeros(max(ids.values(), default=0) + 1, dtype=np.int32)
    own[[ids[key] for key in keys]] = np.arange(len(keys), dtype=np.int32)
    columns = {name: np.asarray(column) for name, column in found.items()} | {"key_id": own[found["key_id"]]}
    for part in fields(MetricBuffer):
        if part.name in columns:
            target: array[Any] = getattr(buffer, part.name)
            target.frombytes(columns[part.name].astype(target.typecode).tobytes())
    buffer.resume(records)
    return buffer
