from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from tests.measure.tokens.files import table, write_run
from verl_audit.ingest import traces
from verl_audit.measure.tokens import TokenSums, reduce_batches, reduce_shard
from verl_audit.trace.write import to_table, write

SQL = """
    WITH lists AS (
        SELECT file_row_number AS row, decided_step AS step, train_minibatch AS minibatch, train_version, segments,
               advantage, unnest(behave_logp) AS b, unnest(theta_logp) AS q, unnest(loss_mask) AS counts,
               unnest(range(len(behave_logp))) AS i
        FROM read_parquet(?, file_row_number = true)
    ), tokens AS (
        SELECT *, (q - b)::FLOAT::DOUBLE AS d,
               train_version - list_filter(segments, lambda s: i >= s.start AND i < s.start + s.length)[1]
                               .version AS lag
        FROM lists WHERE counts
    )
    SELECT step, lag, minibatch, count(*) AS n, sum(d) AS sum, sum(abs(d)) AS abs_sum, sum(d * d) AS sq_sum,
           sum(exp(d) - 1 - d) AS k3_sum, sum(exp(d)) AS w_sum, sum(exp(2 * d)) AS w2_sum, max(abs(d)) AS abs_max,
           count(*) FILTER (advantage < 0 AND exp(d) < 0.8) AS clip_low,
           count(*) FILTER (advantage > 0 AND exp(d) > 1.2) AS clip_high,
           count(*) FILTER (abs(d) > ln(2)) AS tail_ln2, count(*) FILTER (abs(d) > 1) AS tail_1
    FROM tokens GROUP BY ALL ORDER BY step, lag, minibatch
"""


def test_sql_over_the_same_file_finds_the_same_cells(tmp_path: Path) -> None:
    (path, *_) = write_run(tmp_path)
    relation = duckdb.execute(SQL, [path])
    names = [column[0] for column in relation.description or ()]
    theirs = [dict(zip(names, row, strict=True)) for row in relation.fetchall()]
    mine = reduce_shard(path).cells.to_pylist()
    assert len(theirs) == len(mine) == 4
    for a, b in zip(mine, theirs, strict=True):
        assert {name: a[name] for name in b} == pytest.approx(b, rel=2e-6)


def test_row_groups_of_any_size_and_giant_ones_cut_in_parts_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, *_) = write_run(tmp_path)
    whole = reduce_shard(path)
    again = tmp_path / "again.parquet"
    pq.write_table(pq.read_table(path), again, row_group_size=3)
    small = reduce_shard(str(again))
    monkeypatch.setattr("verl_audit.measure.tokens.shard.ROW_GROUP_TOKENS", 16)
    parts = reduce_shard(path)
    for other in (small, parts):
        assert all(other.tables()[name].equals(t) for name, t in whole.tables().items())
        assert list(other.trajectories.values()) == list(whole.trajectories.values())


def settled(folder: Path) -> traces.TraceSource:
    (parsed,) = traces.read(folder)
    (source,) = parsed.traces
    return source


def same(a: TokenSums, b: TokenSums) -> bool:
    return list(a.trajectories.values()) == list(b.trajectories.values()) and all(
        a.tables()[name].equals(b.tables()[name]) for name in a.tables()
    )


def test_a_settled_source_gives_the_sums_of_its_file_and_is_read_without_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(table(1), tmp_path / "part-1.parquet")
    source = settled(tmp_path)
    checked = reduce_batches(traces.batches(source), updates_per_version=2)
    monkeypatch.delattr(traces, "batches")
    mine = reduce_shard(source)
    assert same(mine, checked)
    assert same(mine, reduce_shard(str(source.path)))


def test_the_repairs_of_a_settled_source_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table(1), tmp_path / "part-1.parquet")
    source = replace(settled(tmp_path), version_offset=1, dropped=frozenset({1, 8}))
    checked = reduce_batches(traces.batches(source), updates_per_version=2)
    monkeypatch.delattr(traces, "batches")
    mine = reduce_shard(source)
    assert same(mine, checked)
    assert sorted(set(mine.cells["lag"].to_pylist())) == [0, 1]
    assert not {1, 8} & set(mine.trajectories[str(source.path)]["row"].to_pylist())


DAMAGE: dict[str, tuple[str, Any]] = {
    "a log-prob above 0": ("behave_logp", lambda row: [3.0] * row["response_length"]),
    "a list too short": ("theta_logp", lambda row: row["theta_logp"][1:]),
    "a mask too long": ("loss_mask", lambda row: [*row["loss_mask"], True]),
    "not a number": ("theta_logp", lambda row: [float("nan")] * row["response_length"]),
    "a negative lag": ("train_version", lambda row: 0),
    "segments past the end": ("segments", lambda row: [{"version": 1, "start": 0, "length": 999}]),
    "a fate of its own": ("fate", lambda row: "lost"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_looks_odd_is_read_again_with_the_checks(damage: str, tmp_path: Path) -> None:
    name, change = DAMAGE[damage]
    rows = table(1).to_pylist()
    rows[3][name] = change(rows[3])
    for row in rows:
        row["reward_parts"] = None
    write(to_table(rows), tmp_path / "part-1.parquet")
    source = settled(tmp_path)
    mine = reduce_shard(source)
    assert same(mine, reduce_batches(traces.batches(source)))
    kinds = {problem.kind for problem in mine.problems}
    assert bool(kinds) == (name in ("behave_logp", "theta_logp", "loss_mask"))


def test_updates_per_version_comes_from_the_file(tmp_path: Path) -> None:
    (path, *_) = write_run(tmp_path)
    cells = reduce_shard(path).cells.to_pylist()
    assert {(c["lag"], c["minibatch"]): c["lag_updates"] for c in cells} == {(1, 0): 2, (1, 1): 3, (2, 0): 4, (2, 1): 5}


def test_an_object_store_is_read_by_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    (path, *_) = write_run(tmp_path)
    fsspec.filesystem("memory").pipe("/run/part.parquet", Path(path).read_bytes())
    url = "memory://run/part.parquet"
    assert reduce_shard(url).cells.equals(reduce_shard(path).cells)
