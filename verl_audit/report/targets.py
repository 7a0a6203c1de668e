"""Files that a command is about to write: never over something that is not its own."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb

from verl_audit.errors import AuditError

_OURS = re.compile(rb'\s*\{\s*"schema_version":\s*"[^"]*",\s*"tool":\s*\{\s*"name":\s*"verl-audit"')
_DUCKDB = b"DUCK"


def check_json(target: Path) -> None:
    """Refuse to write over a file that is not an `audit.json`; a device such as /dev/null takes anything."""
    if target.is_file() and not _OURS.match(_head(target)):
        raise AuditError(f"{target}: it exists and is no audit.json of verl-audit; give another name or remove it")


def check_db(target: Path) -> None:
    """Refuse to write over a file that is not a store of ours, to a device and to standard output."""
    if str(target) == "-":
        raise AuditError("--db -: a store cannot be printed; give a file name")
    if target.exists() and not is_store(target):
        raise AuditError(f"{target}: it exists and is no store of verl-audit; give another name or remove it")


def is_store(path: Path) -> bool:
    """Whether a file is a DuckDB store that `--db` wrote."""
    if not path.is_file() or _head(path)[8:12] != _DUCKDB:
        return False
    try:
        with open_kept(path) as con:
            return con.execute("SELECT count(*) FROM meta").fetchone() is not None and bool(
                con.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'segments'").fetchone()
            )
    except duckdb.Error:
        return False


def open_kept(path: Path) -> duckdb.DuckDBPyConnection:
    """A store that was written before, opened to be read; it reaches no other file and no network."""
    return duckdb.connect(
        str(path), read_only=True, config={"enable_external_access": False, "lock_configuration": True}
    )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(512)
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
