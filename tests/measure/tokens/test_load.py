from __future__ import annotations

from pathlib import Path

from tests.measure.tokens.files import table, write_run
from verl_audit.ingest import traces
from verl_audit.measure.tokens import Failure, reduce_all, shards
from verl_audit.measure.tokens.load import load
from verl_audit.measure.tokens.shard import name_of
from verl_audit.store.database import open_store
from verl_audit.trace.write import to_table, write


def test_sql_sees_the_sums_with_null_for_unknown_and_edges_for_bins(tmp_path: Path) -> None:
    paths = write_run(tmp_path, 2)
    con = open_store()
    failures = load(
        con, "r", shards([*paths, str(tmp_path / "gone.parquet")]), {path: i for i, path in enumerate(paths)}
    )
    assert [type(f) for f in failures] == [Failure]
    cells = con.execute("SELECT run, count(*), sum(n) FROM token_cells GROUP BY run").fetchall()
    rows = con.execute("SELECT count(*), sum(n)::INTEGER, count(DISTINCT source_id) FROM token_trajectories").fetchone()
    binned = con.execute("SELECT sum(n) FROM token_strata WHERE low < high").fetchone()
    assert rows is not None
    assert cells == [("r", 8, rows[1])]
    assert rows == (80, reduce_all(paths).sums.cells["n"].to_numpy().sum(), 2)
    assert binned == (rows[1],)
    widths = con.execute("SELECT max(high / low) FROM token_histogram WHERE low > 1e-30").fetchone()
    assert widths is not None
    assert 1 < widths[0] <= 1.25


def test_unknown_lag_is_null(tmp_path: Path) -> None:
    import pyarrow as pa

    from verl_audit.measure.tokens import reduce_batches

    sums = reduce_batches([pa.RecordBatch.from_pydict({"behave_logp": [[-1.0]], "theta_logp": [[-1.0]]})])
    con = open_store()
    load(con, "r", [sums], {"": 0})
    for name in ("cells", "strata", "histogram"):
        assert con.execute(f"SELECT count(*), count(lag) FROM token_{name}").fetchone() == (1, 0)


def test_lists_that_had_to_be_left_out_are_told(tmp_path: Path) -> None:
    rows = table(1).to_pylist()
    rows[3]["behave_logp"] = [3.0] * rows[3]["response_length"]
    write(to_table([{**row, "reward_parts": None} for row in rows]), tmp_path / "part-1.parquet")
    (parsed,) = traces.read(tmp_path)
    for _ in range(2):
        found = shards(parsed.traces, cache=tmp_path.with_name("cache"))
        told = load(open_store(), "r", found, {name_of(t): i for i, t in enumerate(parsed.traces)})
        assert [(t.kind, t.count) for t in told] == [("trace_log_prob", 1)]


def test_two_runs_lie_side_by_side(tmp_path: Path) -> None:
    con = open_store()
    for run in ("a", "b"):
        paths = write_run(tmp_path / run, 1)
        load(con, run, shards(paths), {path: i for i, path in enumerate(paths)})
    assert con.execute("SELECT count(DISTINCT run) FROM token_subsets").fetchone() == (2,)
