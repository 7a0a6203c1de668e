"""Loads the traces of a run: scalars in, lags derived in SQL; token lists stay in their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.traces import Settled, TraceSource, settled
from verl_audit.store.load import load_problems
from verl_audit.trace.schema import COLUMNS, Table

_TIMES = frozenset({"t_submit", "t_first_token", "t_done", "t_enqueue", "t_decided", "t0", "t1", "t"})
_TABLES: dict[Table, str] = {"syncs": "syncs", "buffer": "buffer_depth"}

_SEGMENTS = """
INSERT INTO trajectory_segments
SELECT $run, trajectory_id, position - 1, s.version, s.start, s.length, s.server,
       epoch_us(s.t0) / 1e6, epoch_us(s.t1) / 1e6, s.prefill, s.stop
FROM (SELECT trajectory_id, unnest(segments) AS s, generate_subscripts(segments, 1) AS position
      FROM traced WHERE len(segments) > 0)
ORDER BY trajectory_id, position
"""
# Versions over the tokens of a trajectory. Segments tell them token by token, if together they cover the response;
# first and last version tell the mean only where they are equal.
_VERSIONS = """
CREATE TEMP TABLE token_versions AS
WITH by_segment AS (
    SELECT trajectory_id, min(version) AS oldest, max(version) AS newest, sum(length) AS tokens,
           sum(version::DOUBLE * length) / sum(length) AS mean, count(*) = count(version) AS known
    FROM trajectory_segments WHERE run = $run AND length > 0 GROUP BY trajectory_id)
SELECT t.trajectory_id,
       coalesce(s.oldest, t.first_version) AS oldest, coalesce(s.newest, t.last_version) AS newest,
       CASE WHEN s.known AND s.tokens = t.response_length THEN s.mean
            WHEN s.trajectory_id IS NULL AND t.first_version = t.last_version THEN t.first_version END AS mean
FROM traced t LEFT JOIN by_segment s USING (trajectory_id)
"""
_TRAJECTORIES = """
INSERT INTO trajectories
SELECT $run, trajectory_id, source_id, "row", "group", session, turn, fate, reasons, submit_step, decided_step,
       {times}, submit_version, first_version, last_version, train_version, train_minibatch,
       prompt_length, response_length, loss_tokens, rejected_tokens, truncated, turns,
       reward, reward_parts, advantage, prompt_key,
       train_version - newest, train_version - oldest, train_version - mean,
       (train_version - mean) * updates_per_version
           + coalesce(train_minibatch, CASE WHEN updates_per_version = 1 THEN 0 END),
       newest - oldest + 1, CASE WHEN train_version IS NOT NULL THEN newest - oldest END, train_version - newest,
       updates_per_version
FROM traced JOIN token_versions USING (trajectory_id)
ORDER BY trajectory_id
"""


def load_traces(
    con: duckdb.DuckDBPyConnection,
    run: str,
    sources: Sequence[TraceSource],
    shown: Callable[[Path], str] = str,
) -> tuple[TraceSource, ...]:
    """Insert the trace of a run, with what was wrong in it.

    `shown` gives the path a report shows. Returns the sources that were taken, in the order of their `source_id`,
    with the repairs that `batches` then makes too.
    """
    notes: dict[Path, Parsed] = {}
    parts = settled(sources, lambda source: notes.setdefault(source.path, Parsed(source.path, "trace")))
    rows: list[pa.Table] = []
    (base,) = con.execute("SELECT count(*) FROM trace_sources").fetchone() or (0,)
    for source_id, part in enumerate(parts, base):
        _source(con, run, source_id, part, shown)
        marked = _marked(part, source_id)
        if part.source.table == "trajectories":
            rows.append(marked)
        else:
            _small(con, run, part.source.table, marked)
    if rows:
        _trajectories(con, run, pa.concat_tables(rows))
    for path, found in sorted(notes.items()):
        load_problems(con, found.problems, shown(path))
    return tuple(part.source for part in parts)


def _source(
    con: duckdb.DuckDBPyConnection, run: str, source_id: int, part: Settled, shown: Callable[[Path], str]
) -> None:
    source = part.source
    fates = None if source.fates is None else list(source.fates)
    con.execute(
        "INSERT INTO trace_sources VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            run,
            source_id,
            shown(source.path),
            source.format,
            source.table,
            len(part.table),
            source.updates_per_version,
            list(source.has_log_probs),
            fates,
            source.version_offset,
            len(source.dropped),
        ],
    )


def _marked(part: Settled, source_id: int) -> pa.Table:
    """The rows with their source; dictionaries as text, so that tables of several files fit together."""
    table = part.table
    if "fate" in table.column_names:
        table = table.set_column(table.schema.get_field_index("fate"), "fate", table["fate"].cast(pa.string()))
    size = len(table)
    updates = pa.array([part.source.updates_per_version] * size, pa.int32())
    table = table.append_column("source_id", pa.array(np.full(size, source_id), pa.int32()))
    return table.append_column("updates_per_version", updates)


def _trajectories(con: duckdb.DuckDBPyConnection, run: str, table: pa.Table) -> None:
    con.register("traced", table.append_column("trajectory_id", pa.array(np.arange(len(table)), pa.int32())))
    times = ", ".join(f"epoch_us({c.name}) / 1e6" for c in COLUMNS["trajectories"] if c.name in _TIMES)
    con.execute(_SEGMENTS, {"run": run})
    con.execute(_VERSIONS, {"run": run})
    con.execute(_TRAJECTORIES.format(times=times), {"run": run})
    con.execute("DROP TABLE token_versions")
    con.unregister("traced")


def _small(con: duckdb.DuckDBPyConnection, run: str, table: Table, rows: pa.Table) -> None:
    columns = [c.name for c in COLUMNS[table] if c.name != "run"]
    listed = ", ".join(f"epoch_us({c}) / 1e6" if c in _TIMES else c for c in columns)
    con.register("traced", rows)
    con.execute(f'INSERT INTO {_TABLES[table]} SELECT ?, source_id, {listed} FROM traced ORDER BY "row"', [run])
    con.unregister("traced")
