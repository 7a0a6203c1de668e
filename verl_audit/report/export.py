"""The per-trajectory table of an audit as parquet, for tools that read tables and no DuckDB."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from verl_audit.errors import AuditError

_KEY = b"verl_audit.export"
_TABLE = """
SELECT t.* EXCLUDE (run, source_id, row), s.path AS source, t.row, k.* EXCLUDE (run, source_id, row)
FROM trajectories t JOIN runs r ON r.run = t.run AND r.role = 'run'
LEFT JOIN trace_sources s ON s.run = t.run AND s.source_id = t.source_id
LEFT JOIN token_trajectories k ON k.run = t.run AND k.source_id = t.source_id AND k.row = t.row
ORDER BY t.trajectory_id
"""


def check_export(target: Path) -> None:
    """Refuse to write over a file that is not an earlier export."""
    if not target.exists():
        return
    try:
        ours = _KEY in (pq.read_schema(target).metadata or {})
    except (OSError, pa.ArrowException):
        ours = False
    if not ours:
        raise AuditError(f"{target}: it exists and is no export of verl-audit; give another name or remove it")


def export_trajectories(store: duckdb.DuckDBPyConnection, target: Path) -> None:
    """One row a trajectory of the audited run: fate, times, versions, lags, lengths, reward, sums of its log-ratios."""
    table = store.cursor().sql(_TABLE).to_arrow_table()
    aside = target.with_name(target.name + ".tmp")
    try:
        pq.write_table(table.replace_schema_metadata({_KEY: b"trajectories"}), aside, compression="zstd")
        aside.replace(target)
    except OSError as error:
        raise AuditError(f"{target}: {error.strerror or error}") from None
