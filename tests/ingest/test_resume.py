"""A run that was resumed, in every tracker: later values win, and what they overwrote is listed (nasty input 16)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ingest.test_trackers import clearml_events, mlflow_store, swan_log, trackio_store
from tests.ingest.writers import block_log, output_raw, run_record, table, tf_scalar, wandb_row
from verl_audit.ingest import wandb
from verl_audit.ingest.discover import discover
from verl_audit.ingest.read import read_all
from verl_audit.ingest.runs import group_runs
from verl_audit.store.database import open_store
from verl_audit.store.load import RunInput, finish, load_run, load_sources

FIRST, SECOND = range(10), range(6, 16)


def value(life: int, step: int) -> float:
    return step + 0.25 + life / 8


def tensorboard(root: Path) -> None:
    directory = root / "tensorboard_log/math/first"
    directory.mkdir(parents=True)
    for life, steps in enumerate((FIRST, SECOND)):
        data = b"".join(tf_scalar("a/b", value(life, s), s, 1000.0 + s) for s in steps)
        (directory / f"events.out.tfevents.170000{life}000.host").write_bytes(data)


def wandb_dirs(root: Path) -> None:
    for life, steps in enumerate((FIRST, SECOND)):
        run = root / f"wandb/run-2026010{life + 1}_000000-id1"
        run.mkdir(parents=True)
        rows = [wandb_row(s, {"a/b": value(life, s)}) for s in steps]
        (run / "run-id1.wandb").write_bytes(block_log([run_record("id1", "math", "first", {}), *rows]))


def trackio(root: Path) -> None:
    rows = [(s, {"a/b": value(life, s)}) for life, steps in enumerate((FIRST, SECOND)) for s in steps]
    trackio_store(root / "math.db", rows).close()


def mlflow(root: Path) -> None:
    lives = enumerate((FIRST, SECOND))
    mlflow_store(
        root / "m.db", [("a/b", value(n, s), 1000 * (100 * n + s), s, False) for n, steps in lives for s in steps]
    )


def swanlab(root: Path) -> None:
    rows = [(s, {"a/b": value(life, s)}) for life, steps in enumerate((FIRST, SECOND)) for s in steps]
    (root / "run.swanlab").write_bytes(swan_log(rows))


def jsonl(root: Path) -> None:
    lives = enumerate((FIRST, SECOND))
    text = "".join(f'{{"step": {s}, "a/b": {value(n, s)}}}\n' for n, steps in lives for s in steps)
    (root / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize("write", [tensorboard, wandb_dirs, trackio, mlflow, swanlab, jsonl])
def test_the_later_life_wins(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    parsed = read_all(discover([tmp_path]))
    (run,) = group_runs(parsed, tmp_path)
    con = open_store()
    load_sources(con, parsed, [p.path.name for p in parsed])
    load_run(con, RunInput("r", "run", run.name, run.units), parsed, [p.path.name for p in parsed])
    finish(con, {})
    rows = con.execute("SELECT step, value FROM metrics ORDER BY step").fetchall()
    assert rows == [(s, value(int(s >= 6), s)) for s in range(16)]
    rewritten = con.execute("SELECT step, earlier, later FROM rewritten ORDER BY step").fetchall()
    assert rewritten == [(s, value(0, s), value(1, s)) for s in range(6, 10)]


def test_rows_still_in_the_log_of_a_live_database(tmp_path: Path) -> None:
    db: sqlite3.Connection = trackio_store(tmp_path / "math.db", [(1, {"a/b": 1.5})])
    before = table(read_all(discover([tmp_path]))[0])
    db.execute(
        "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('id1', '', 'first', 2, ?)",
        ('{"a/b": 2.5}',),
    )
    db.commit()
    assert table(read_all(discover([tmp_path]))[0]) == {**before, ("a/b", 2): 2.5}
    db.close()


def test_recorded_text_of_other_frameworks(tmp_path: Path) -> None:
    text = "rollout 3: {'rollout/raw_reward': 0.5}\n"
    (tmp_path / "run.wandb").write_bytes(block_log([output_raw(text), wandb_row(0, {"a/b": 1})]))
    _, output = wandb.read(tmp_path / "run.wandb")
    assert table(output) == {("rollout/raw_reward", 3): 0.5}
    (tmp_path / "trl.wandb").write_bytes(block_log([output_raw("{'loss': 0.5, 'epoch': 1.0}\n")]))
    assert [len(p.metrics) for p in wandb.read(tmp_path / "trl.wandb")] == [0]


def console(steps: range) -> str:
    return "".join(f"step:{s} - a/b:{s}.75\n" for s in steps)


def test_a_file_of_several_runs_is_not_joined_by_where_it_lies(tmp_path: Path) -> None:
    db = trackio_store(tmp_path / "math.db", [(s, {"a/b": s + 0.5}) for s in range(3)])
    db.execute(
        "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('id2', '', 'second', 1, ?)",
        ('{"a/b": 7.5}',),
    )
    db.commit()
    db.close()
    (tmp_path / "run.log").write_text(console(range(3)))
    parsed = read_all(discover([tmp_path]))
    assert sorted(run.name for run in group_runs(parsed, tmp_path))[:2] == ["first", "run"]
    assert len(group_runs(parsed, tmp_path)) == 3


def test_equal_values_find_their_run_in_a_shared_database(tmp_path: Path) -> None:
    db = trackio_store(tmp_path / "math.db", [(s, {"a/b": s + 0.75}) for s in range(20)])
    db.execute(
        "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('id2', '', 'second', 1, ?)",
        ('{"a/b": 7.5}',),
    )
    db.commit()
    db.close()
    (tmp_path / "run.log").write_text(console(range(20)))
    parsed = read_all(discover([tmp_path]))
    runs = {run.name: {parsed[i].format for i, _ in run.units} for run in group_runs(parsed, tmp_path)}
    assert runs == {"first": {"trackio", "verl_console"}, "second": {"trackio"}}


def test_nameless_rows_belong_to_the_only_run_they_lie_with(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/run.log").write_text(console(range(20)))
    (tmp_path / "side.jsonl").write_text("".join(f'{{"step": {s}, "other": {s}.5}}\n' for s in range(20)))
    parsed = read_all(discover([tmp_path]))
    assert len(group_runs(parsed, tmp_path)) == 1
    (tmp_path / "logs/run2.log").write_text(console(range(30, 50)))
    parsed = read_all(discover([tmp_path]))
    assert len(group_runs(parsed, tmp_path)) == 3


def test_rows_that_contradict_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/run.log").write_text(console(range(20)))
    (tmp_path / "side.jsonl").write_text("".join(f'{{"step": {s}, "a/b": {s}.5}}\n' for s in range(20)))
    assert len(group_runs(read_all(discover([tmp_path])), tmp_path)) == 2


def test_an_exact_source_counts_before_one_that_cannot_say_nan(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text(clearml_events([(1, 0.0), (2, 0.5)]))
    (tmp_path / "run.log").write_text("step:1 - actor/kl:nan - actor/x:1\nstep:2 - actor/kl:0.5\n")
    parsed = read_all(discover([tmp_path]))
    names = [p.path.name for p in parsed]
    con = open_store()
    load_sources(con, parsed, names)
    load_run(con, RunInput("r", "run", "r", tuple((i, 0) for i in range(len(parsed)))), parsed, names)
    finish(con, {})
    (kind,) = con.execute("SELECT kind FROM metrics WHERE key = 'actor/kl' AND step = 1").fetchall()
    assert kind == ("nan",)
    assert con.execute("SELECT count(*) FROM differences").fetchall() == [(0,)]
