"""Traces in the store: dense ids, derived lags, and what was wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from tests.ingest.writers import REAL_RUNS
from verl_audit.ingest.traces import TraceSource, read
from verl_audit.pipeline import load_all
from verl_audit.store.database import open_store
from verl_audit.store.traces import load_traces
from verl_audit.trace.schema import schema
from verl_audit.trace.write import to_table, write

Rows = list[dict[str, Any]]
FIXTURE = Path(__file__).parents[2] / "fixtures/traces/async_drop_bias"


def stored(directory: Path, rows: Rows, **metadata: Any) -> duckdb.DuckDBPyConnection:
    """A store with a run `r` of these trajectories."""
    directory.mkdir(exist_ok=True)
    write(
        to_table([{"fate": "trained", "response_length": 4} | row for row in rows], **metadata), directory / "t.parquet"
    )
    return loaded(directory)


def loaded(directory: Path) -> duckdb.DuckDBPyConnection:
    con = open_store()
    load_traces(con, "r", sources(directory), lambda path: path.name)
    return con


def sources(directory: Path) -> list[TraceSource]:
    return [source for parsed in read(directory) for source in parsed.traces]


def segment(version: int | None, start: int, length: int, **more: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "length": length, **more}


LAG = "lag_newest, lag_oldest, lag_mean, lag_updates, span, lag_in_flight, lag_in_queue"
LAGS: list[tuple[dict[str, Any], tuple[float | None, ...]]] = [
    # Token-mean over segments: (2 x 3 + 2 x 1) / 4 versions.
    ({"train_version": 5, "segments": [segment(2, 0, 2), segment(4, 2, 2)]}, (1, 3, 2.0, None, 3, 2, 1)),
    (
        {"train_version": 5, "train_minibatch": 1, "segments": [segment(2, 0, 3), segment(4, 3, 1)]},
        (1, 3, 2.5, 6.0, 3, 2, 1),
    ),
    # A call that gave no token is of no account.
    ({"train_version": 5, "segments": [segment(0, 0, 0), segment(4, 0, 4)]}, (1, 1, 1.0, None, 1, 0, 1)),
    # A token without a version leaves the mean unknown.
    ({"train_version": 5, "segments": [segment(4, 0, 3)]}, (1, 1, None, None, 1, 0, 1)),
    ({"train_version": 5, "segments": [segment(4, 0, 3), segment(None, 3, 1)]}, (1, 1, None, None, 1, 0, 1)),
    # First and last version tell the mean only where they are one.
    ({"train_version": 5, "first_version": 2, "last_version": 4}, (1, 3, None, None, 3, 2, 1)),
    ({"train_version": 5, "train_minibatch": 0, "first_version": 4, "last_version": 4}, (1, 1, 1.0, 2.0, 1, 0, 1)),
    ({"train_version": 5, "last_version": 4}, (1, None, None, None, None, None, 1)),
    ({"train_version": 5}, (None,) * 7),
    ({"fate": "stale", "first_version": 2, "last_version": 3}, (None, None, None, None, 2, None, None)),
]


@pytest.mark.parametrize(("values", "lags"), LAGS)
def test_lags_are_derived_from_the_versions_of_the_tokens(
    tmp_path: Path, values: dict[str, Any], lags: tuple[float | None, ...]
) -> None:
    con = stored(tmp_path, [{"group": "a", "session": 0, "decided_step": 9} | values], updates_per_version=2)
    assert con.execute(f"SELECT {LAG} FROM trajectories").fetchall() == [lags]


def test_with_one_update_a_version_there_is_one_minibatch(tmp_path: Path) -> None:
    row = {"group": "a", "decided_step": 9, "train_version": 5, "first_version": 2, "last_version": 2}
    assert stored(tmp_path, [row], updates_per_version=1).execute(
        "SELECT lag_updates FROM trajectories"
    ).fetchall() == [(3,)]
    assert stored(tmp_path, [row]).execute("SELECT lag_updates FROM trajectories").fetchall() == [(None,)]


def test_ids_are_dense_and_places_are_kept(tmp_path: Path) -> None:
    again = {"group": "a", "session": 0, "t_decided": 9}
    write(
        to_table(
            [
                again | {"fate": "stale", "t_decided": 1, "response_length": 1},
                {"group": "b", "session": 0, "fate": "stale", "response_length": 1},
            ]
        ),
        tmp_path / "1.parquet",
    )
    write(to_table([again | {"fate": "trained", "response_length": 1}]), tmp_path / "2.parquet")
    write(to_table([{"version": 1, "t0": 1_500_000, "aborted": 2}], "syncs"), tmp_path / "s.parquet")
    write(to_table([{"step": 1, "pending": 2}], "buffer"), tmp_path / "z.parquet")
    con = loaded(tmp_path)
    rows = con.execute('SELECT trajectory_id, source_id, "row", "group", fate FROM trajectories').fetchall()
    assert rows == [(0, 0, 1, "b", "stale"), (1, 1, 0, "a", "trained")]
    assert con.execute("SELECT version, t0, aborted FROM syncs").fetchall() == [(1, 1.5, 2)]
    assert con.execute("SELECT step, pending, running FROM buffer_depth").fetchall() == [(1, 2, None)]
    listed = con.execute('SELECT source_id, path, "table", rows, repeated, fates FROM trace_sources').fetchall()
    assert listed == [
        (0, "1.parquet", "trajectories", 1, 1, None),
        (1, "2.parquet", "trajectories", 1, 0, None),
        (2, "s.parquet", "syncs", 1, 0, None),
        (3, "z.parquet", "buffer", 1, 0, None),
    ]
    assert con.execute("SELECT path, kind, count FROM problems").fetchall() == [("1.parquet", "trace_repeated", 1)]


def test_segments_and_times_are_stored(tmp_path: Path) -> None:
    calls = [segment(1, 0, 1, server="s", t0=1_000_000, t1=2_500_000, prefill=7, stop="abort"), segment(2, 1, 3)]
    row = {"group": "a", "segments": calls, "t_submit": 500_000, "reward_parts": {"x": 1.0}, "reasons": ["trained"]}
    con = stored(tmp_path, [{"group": "b"}, row])
    rows = con.execute("SELECT * EXCLUDE (run) FROM trajectory_segments").fetchall()
    assert rows == [
        (1, 0, 1, 0, 1, "s", 1.0, 2.5, 7, "abort"),
        (1, 1, 2, 1, 3, None, None, None, None, None),
    ]
    got = con.execute("SELECT t_submit, t_done, reward_parts['x'], reasons FROM trajectories ORDER BY ALL").fetchall()
    assert got == [(0.5, None, 1.0, ["trained"]), (None, None, None, None)]


def test_a_run_without_a_trace_has_none() -> None:
    con = open_store()
    assert load_traces(con, "r", []) == ()
    assert con.execute("SELECT count(*) FROM trajectories").fetchone() == (0,)


def test_a_source_is_a_fixture_of_events() -> None:
    loaded_run = load_all(FIXTURE)
    rows = loaded_run.store.execute(
        'SELECT fate, count(*), count(DISTINCT "group"), min(lag_oldest) FROM trajectories GROUP BY fate ORDER BY fate'
    ).fetchall()
    assert rows == [("stale", 32, 8, None), ("trained", 320, 80, 0)]
    assert [s.table for s in loaded_run.traces[loaded_run.run.run]] == ["trajectories", "buffer"]


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_lags_of_a_real_run_are_those_that_verl_logged() -> None:
    """Trained rows against `training/off_policy/trajectory_{staleness,staleness_worst,spans}/mean`, step by step."""
    con = load_all(REAL_RUNS / "async_drop_bias").store
    rows = con.execute(
        """
        WITH ours AS (SELECT decided_step AS step,
                             avg(lag_newest) AS newest, avg(lag_oldest) AS oldest, avg(span) AS span
                      FROM trajectories WHERE fate = 'trained' GROUP BY ALL),
             theirs AS (SELECT step, max(value) FILTER (key LIKE '%/trajectory_staleness/mean') AS newest,
                               max(value) FILTER (key LIKE '%/trajectory_staleness_worst/mean') AS oldest,
                               max(value) FILTER (key LIKE '%/trajectory_spans/mean') AS span
                        FROM metrics GROUP BY ALL)
        SELECT abs(o.newest - t.newest), abs(o.oldest - t.oldest), abs(o.span - t.span)
        FROM ours o JOIN theirs t USING (step) WHERE t.newest IS NOT NULL
        """
    ).fetchall()
    assert len(rows) == 60
    assert max(max(row) for row in rows) < 1e-3  # the console prints three decimals


def test_many_trajectories_are_loaded_at_once(tmp_path: Path) -> None:
    con = loaded(synthetic(tmp_path / "trace", 100_000))
    counted = con.execute("SELECT count(*), max(trajectory_id), count(lag_mean) FROM trajectories").fetchone()
    assert counted == (100_000, 99_999, 100_000)


def synthetic(directory: Path, size: int) -> Path:
    directory.mkdir()
    numbers = np.arange(size)
    segments = pa.array([[segment(int(v), 0, 4)] for v in numbers[:1000] % 50], schema().field("segments").type)
    columns = {
        "group": [str(v) for v in numbers // 8],
        "session": numbers % 8,
        "fate": ["trained"] * size,
        "response_length": np.full(size, 4),
        "train_version": np.full(size, 60),
        "segments": pa.concat_arrays([segments] * (size // 1000)),
    }
    write(to_table(columns), directory / "t.parquet")
    return directory
