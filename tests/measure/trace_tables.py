"""A store whose trace tables are filled by hand: what the statistics over traces read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from verl_audit.store.database import open_store

RUN = "run"


def trace_store(**tables: Sequence[Mapping[str, Any]]) -> duckdb.DuckDBPyConnection:
    """A store with rows (absent keys are null) of run `RUN` in `trajectories`, `trajectory_segments`, `syncs`, ..."""
    con = open_store()
    for name, rows in tables.items():
        given = {column for column, *_ in con.execute(f"DESCRIBE {name}").fetchall()}
        filled = [{k: v for k, v in _identity(i).items() if k in given} | dict(row) for i, row in enumerate(rows)]
        names = list(dict.fromkeys(key for row in filled for key in row))
        if filled:
            columns, marks = ", ".join(f'"{n}"' for n in names), ", ".join("?" for _ in names)
            con.executemany(
                f"INSERT INTO {name} ({columns}) VALUES ({marks})", [[r.get(n) for n in names] for r in filled]
            )
    return con


def _identity(i: int) -> dict[str, Any]:
    return {"run": RUN, "trajectory_id": i, "source_id": 0, "row": i}
