"""What a hidden family takes out of a log and out of traces, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_audit.diagnose.coverage import NEEDS, UNASKED
from verl_audit.errors import AuditError
from verl_audit.ingest.adapters import load_signals
from verl_audit.reference import TraceOptions, simulate
from verl_audit.selftest.hide import Family, families, family, kept, poorer
from verl_audit.trace.schema import COLUMNS, SEGMENT

TABLES = ("trajectories", "syncs", "buffer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that evicts."""
    out = tmp_path_factory.mktemp("hide") / "run"
    return simulate("drop", "small", 0, out, logs=("file",), traces=TraceOptions(lists=0.5), updates=12)


def rows(run: Path) -> list[dict[str, Any]]:
    (log,) = run.glob("*/*.jsonl")
    return [orjson.loads(line) for line in log.read_bytes().splitlines()]


def without(run: Path, tmp_path: Path, name: str) -> Path:
    return poorer(run, tmp_path / "out", family(name))


def test_every_signal_and_every_need_of_a_verdict_is_in_a_family() -> None:
    needed = {signal for needs in NEEDS.values() for alternatives in needs for signal in alternatives}
    assert [
        s for s in {*load_signals(), *needed, *UNASKED} - {*kept()} if not any(f.has(s) for f in families().values())
    ] == []


def test_families_name_columns_that_the_schema_has_and_may_leave_out() -> None:
    may_be_null = {f"{table}.{c.name}" for table in TABLES for c in COLUMNS[table] if not c.required}  # type: ignore[index]
    may_be_null |= {f"trajectories.segments.{f.name}" for f in SEGMENT if f.nullable}
    assert {column for f in families().values() for column in f.columns} <= may_be_null


@pytest.mark.parametrize("name", families())
def test_what_is_left_is_as_it_was(run: Path, tmp_path: Path, name: str) -> None:
    hidden, left = family(name), without(run, tmp_path, name)
    before = {row["step"]: row["data"] for row in rows(run)}
    for row in rows(left):
        assert row["data"].items() <= before[row["step"]].items()
        assert {k for k in before[row["step"]] if k not in row["data"]} == set(
            filter(hidden.hides, before[row["step"]])
        )
    for table in TABLES:
        path = left / "traces" / f"{table}.parquet"
        if path.exists():
            same_but(hidden, table, pq.read_table(run / "traces" / path.name), pq.read_table(path))
    assert (left / ".hydra" / "config.yaml").exists() == (name != "config")


def same_but(hidden: Family, table: str, old: pa.Table, new: pa.Table) -> None:
    assert new.schema.equals(old.schema, check_metadata=True)
    if hidden.only and table == "trajectories":
        assert set(new["fate"].to_pylist()) == set(hidden.only)
        return
    gone = {column.partition(".")[0] for column in hidden.in_table(table)}
    for name in old.column_names:
        assert name in gone or new[name].equals(old[name])
    for column in hidden.in_table(table):
        assert "." in column or new[column].null_count == len(new)


def test_a_field_of_the_segments_is_hidden_and_the_others_stay(run: Path, tmp_path: Path) -> None:
    left = pq.read_table(without(run, tmp_path, "lag") / "traces" / "trajectories.parquet")["segments"].to_pylist()
    whole = pq.read_table(run / "traces" / "trajectories.parquet")["segments"].to_pylist()
    assert any(whole)
    assert left == [None if row is None else [{**part, "version": None} for part in row] for row in whole]


def test_evicted_rows_and_counts_are_gone_together(run: Path, tmp_path: Path) -> None:
    assert Counter(pq.read_table(run / "traces" / "trajectories.parquet")["fate"].to_pylist())["stale"]
    assert any("training/off_policy/evicted_samples" in row["data"] for row in rows(run))
    left = without(run, tmp_path, "eviction")
    assert not [key for row in rows(left) for key in row["data"] if "evicted" in key]


def test_a_row_left_empty_is_not_written(run: Path, tmp_path: Path) -> None:
    left = without(run, tmp_path, "validation")
    assert len(rows(left)) == len(rows(run)) - 1  # the validation before training is a row of its own


def test_an_unknown_family_is_told() -> None:
    with pytest.raises(AuditError, match="no family of signals 'nope'; one of gap, lag"):
        family("nope")
