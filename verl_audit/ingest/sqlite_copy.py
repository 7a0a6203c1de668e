"""Reads SQLite files of trackers without touching them: a copy, with its write-ahead log, is opened instead.

A live database in WAL mode keeps its newest rows in the `-wal` file beside it, and opening the original would
write a `-shm` file into the run directory.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from verl_audit.ingest.model import Parsed

MAGIC = b"SQLite format 3\0"
_WAL_MODE = 2
_PARTS = ("", "-wal", "-journal")
_TRIES = 3


@contextmanager
def copied(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a copy of the database; raises OSError or sqlite3.Error."""
    with tempfile.TemporaryDirectory(prefix="verl-audit-") as directory:
        copy = Path(directory) / "copy.db"
        for _ in range(_TRIES):
            before = _state(path)
            _copy(path, copy)
            if _state(path) == before:
                break  # else the writer moved rows between the files meanwhile
        connection = sqlite3.connect(copy)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            yield connection
        finally:
            connection.close()


def read_runs(path: Path, whole: Parsed, runs: Callable[[sqlite3.Connection, Parsed], list[Parsed]]) -> list[Parsed]:
    """What `runs` finds in a copy of the database; `whole` holds what was met on the way, and stands for no run."""
    found: list[Parsed] = []
    try:
        whole.bytes_read = path.stat().st_size
        with copied(path) as connection:
            found = runs(connection, whole)
        warn_if_wal_is_missing(path, found[0] if found else whole)
    except (OSError, sqlite3.Error) as error:
        whole.note("unreadable", str(error))
    if not found:
        return [whole]
    found[0].problems.extend(whole.problems)
    found[0].bytes_read = whole.bytes_read
    return found


def _copy(path: Path, copy: Path) -> None:
    for suffix in _PARTS:
        source, target = path.with_name(path.name + suffix), copy.with_name(copy.name + suffix)
        target.unlink(missing_ok=True)
        if source.is_file() or not suffix:
            shutil.copyfile(source, target)


def _state(path: Path) -> list[tuple[int, int] | None]:
    """Size and time of change of the database and the files beside it."""
    state = []
    for suffix in _PARTS:
        part = path.with_name(path.name + suffix)
        found = part.stat() if part.is_file() else None
        state.append((found.st_size, found.st_mtime_ns) if found else None)
    return state


def tables(path: Path) -> set[str]:
    """Names of the tables; none if the file cannot be read as a database.

    A look at the file itself, which writes nothing, is enough unless the tables are still in its `-wal` file.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            if names := _names(connection):
                return names
        with copied(path) as connection:
            return _names(connection)
    except (OSError, sqlite3.Error):
        return set()


def _names(connection: sqlite3.Connection) -> set[str]:
    return {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def salvage(connection: sqlite3.Connection, table: str, columns: str, parsed: Parsed) -> list[tuple[Any, ...]]:
    """All rows of a table that can be read, by rowid: past a damaged page they are read from the end backwards."""
    rows: dict[int, tuple[Any, ...]] = {}
    for direction in ("ASC", "DESC"):
        try:
            # names of tables and columns are constants of this package
            for rowid, *row in connection.execute(f"SELECT rowid, {columns} FROM {table} ORDER BY rowid {direction}"):
                rows[rowid] = tuple(row)
            break
        except sqlite3.Error as error:
            if direction == "ASC":
                parsed.note("damaged_database", f"table {table}: {error}; rows on other pages are read")
    return [rows[rowid] for rowid in sorted(rows)]


def warn_if_wal_is_missing(path: Path, parsed: Parsed) -> None:
    """A database in WAL mode that holds no metric and lies alone was probably copied without its `-wal` file."""
    with path.open("rb") as stream:
        head = stream.read(20)
    alone = not path.with_name(path.name + "-wal").exists()
    if len(head) == 20 and head[18] == _WAL_MODE and alone and not len(parsed.metrics):
        parsed.note("wal_missing", "no metric in it, and it uses a write-ahead log: copy the -wal file along", 0)
