"""The DuckDB that holds one audit: opened in memory or in a file, never in the run directory."""

from __future__ import annotations

import os
import tempfile
from importlib.resources import files
from pathlib import Path
from uuid import uuid4

import duckdb

from verl_audit._version import __version__

SCHEMA_VERSION = 2


MEMORY = "700MB"
"""What the store takes of the machine's memory; beyond it, tables go to temporary files that end with the process."""


def open_store() -> duckdb.DuckDBPyConnection:
    """A fresh in-memory store with all tables; it reaches no file and no network."""
    spill = Path(tempfile.gettempdir()) / f"verl-audit-{os.getpid()}-{uuid4().hex}"  # made when it is needed
    con = duckdb.connect(":memory:", config={"memory_limit": MEMORY, "temp_directory": str(spill)})
    con.execute(files("verl_audit.store").joinpath("schema.sql").read_text(encoding="utf-8"))
    con.execute("INSERT INTO meta VALUES (?, ?)", [SCHEMA_VERSION, __version__])
    return con


def count(con: duckdb.DuckDBPyConnection, table: str, run: str) -> int:
    """Rows that a table of the store holds for a run."""
    row = con.execute(f"SELECT count(*) FROM {table} WHERE run = ?", [run]).fetchone()
    return int(row[0]) if row else 0


def publish(con: duckdb.DuckDBPyConnection, target: Path) -> None:
    """Write the store to `target`: beside it first, then renamed, so that a reader never meets a half-written file."""
    aside = target.with_name(f".{target.name}.writing")
    for leftover in (aside, aside.with_name(f"{aside.name}.wal")):
        leftover.unlink(missing_ok=True)
    con.execute(f"ATTACH '{_quoted(aside)}' AS published")
    con.execute("COPY FROM DATABASE memory TO published")
    con.execute("DETACH published")
    aside.replace(target)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def lock_down(con: duckdb.DuckDBPyConnection) -> None:
    """Forbid file and network access from SQL that rules and users bring."""
    con.execute("SET enable_external_access = false")
    con.execute("SET lock_configuration = true")
