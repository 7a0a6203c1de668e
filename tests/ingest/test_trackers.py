"""Stores of other trackers: MLflow, SwanLab, trackio, ClearML."""

from __future__ import annotations

import json
import math
import sqlite3
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.writers import blob, block_log, double_field, kinds, number_field, problem_kinds, table
from verl_audit.ingest import mlflow, swanlab, trackio
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all

SWAN_HEADER = b":SWL\xd6\xe1\x02"


def found(path: Path) -> list[Parsed]:
    return read_all(discover([path]))


# MLflow (nasty input 15)


def mlflow_store(path: Path, points: Iterable[tuple[str, float, int, int, bool]], stage: str = "active") -> Path:
    """A database with one run `r1`; points are (key, value, timestamp, step, is_nan)."""
    db = sqlite3.connect(path)
    db.executescript(
        "CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name TEXT);"
        "CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, name TEXT, status TEXT, lifecycle_stage TEXT,"
        " experiment_id INTEGER, start_time BIGINT);"
        "CREATE TABLE metrics (key TEXT, value FLOAT, timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN);"
        "CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);"
        "INSERT INTO experiments VALUES (1, 'math');"
        f"INSERT INTO runs VALUES ('r1', 'first', 'RUNNING', '{stage}', 1, 1700000000000);"
        "INSERT INTO params VALUES ('trainer/total_epochs', '3', 'r1'), ('algorithm/adv_estimator', 'grpo', 'r1');"
    )
    db.executemany("INSERT INTO metrics VALUES (?, ?, ?, 'r1', ?, ?)", points)
    db.commit()
    db.close()
    return path


def test_mlflow_database(tmp_path: Path) -> None:
    path = mlflow_store(
        tmp_path / "mlruns.db",
        [
            ("actor/kl", 999.0, 3000, 2, False),
            ("actor/kl", 0.0, 1000, 1, True),
            ("actor/kl", 5.0, 2000, 2, False),
            ("actor/x", 1.7976931348623157e308, 1000, 1, False),
            ("actor/x", -1.7976931348623157e308, 2000, 2, False),
            ("val/acc/mean_at_1", 0.5, 1000, 1, False),
            ("looks_at_me", 0.25, 1000, 1, False),
        ],
    )
    (parsed,) = found(path)
    assert table(parsed)["actor/kl", 2] == 999.0
    assert kinds(parsed)["actor/kl", 1] == "nan"
    assert (table(parsed)["actor/x", 1], kinds(parsed)["actor/x", 1]) == (math.inf, "clamped")
    assert table(parsed)["actor/x", 2] == -math.inf
    assert table(parsed)["val/acc/mean@1", 1] == 0.5
    assert ("looks_at_me", 1) in table(parsed)
    assert (parsed.identity.project, parsed.identity.experiment, parsed.identity.run_id) == ("math", "first", "r1")
    assert parsed.identity.started == 1.7e9
    assert parsed.configs[0].tree == {"trainer": {"total_epochs": 3}, "algorithm": {"adv_estimator": "grpo"}}
    assert {p.kind: p.count for p in parsed.problems} == {"clamped": 2, "keys_restored": 1}


def test_mlflow_values_of_one_time_are_undecided(tmp_path: Path) -> None:
    points = [("a/b", 1.0, 1000, 1, False), ("a/b", 2.0, 1000, 1, False)]
    (parsed,) = found(mlflow_store(tmp_path / "m.db", points))
    assert problem_kinds(parsed) == ["same_time"]


def test_mlflow_resume_is_a_segment(tmp_path: Path) -> None:
    points = [("a/b", float(t), t, step, False) for t, step in enumerate([1, 2, 3, 2, 3, 4], start=1)]
    (parsed,) = found(mlflow_store(tmp_path / "m.db", points))
    assert list(parsed.metrics.segment) == [0, 0, 0, 1, 1, 1]
    assert table(parsed)["a/b", 3] == 5.0


def test_mlflow_deleted_run_is_left_out(tmp_path: Path) -> None:
    (parsed,) = mlflow.read(mlflow_store(tmp_path / "m.db", [("a/b", 1.0, 1, 1, False)], stage="deleted"))
    assert not len(parsed.metrics)
    assert problem_kinds(parsed) == ["deleted_run"]


def test_mlflow_runs_are_told_apart(tmp_path: Path) -> None:
    path = mlflow_store(tmp_path / "m.db", [("a/b", 1.0, 1, 1, False)])
    db = sqlite3.connect(path)
    db.execute("INSERT INTO runs VALUES ('r2', 'second', 'RUNNING', 'active', 1, NULL)")
    db.execute("INSERT INTO metrics VALUES ('a/b', 2.0, 1, 'r2', 1, 0)")
    db.commit()
    db.close()
    assert [(p.identity.experiment, table(p)["a/b", 1]) for p in found(path)] == [("first", 1.0), ("second", 2.0)]


def test_mlflow_file_store(tmp_path: Path) -> None:
    run = tmp_path / "mlruns/7/abc"
    files = {
        "meta.yaml": "run_id: abc\nrun_name: first\nlifecycle_stage: active\nstart_time: 1700000000000\n",
        "../meta.yaml": "name: math\n",
        "metrics/actor/kl": "1000 nan 1\n2000 inf 2\n2500 5.0 3\n3000 9.0 3\nbroken\n4000 12.7",
        "metrics/old": "1000 0.5\n",
        "metrics/acc/mean_at_8": "1000 0.25 1\n",
        "params/actor/lr": "1e-06",
    }
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    (parsed,) = found(tmp_path)
    values = table(parsed)
    assert kinds(parsed)["actor/kl", 1] == "nan"
    assert (values["actor/kl", 2], values["actor/kl", 3]) == (math.inf, 9.0)
    assert values["old", 0] == 0.5
    assert values["acc/mean@8", 1] == 0.25
    assert (parsed.identity.project, parsed.identity.experiment) == ("math", "first")
    assert parsed.configs[0].tree == {"actor": {"lr": 1e-06}}
    assert {p.kind: p.count for p in parsed.problems} == {"bad_line": 1, "torn_line": 1, "keys_restored": 1}
    assert parsed.values_lost == 2


def test_mlflow_deleted_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "run/metrics").mkdir(parents=True)
    (tmp_path / "run/metrics/a").write_text("1 0.5 1\n")
    (tmp_path / "run/meta.yaml").write_text("lifecycle_stage: deleted\n")
    (parsed,) = found(tmp_path)
    assert not len(parsed.metrics)


# trackio (nasty input 17)


def trackio_store(path: Path, rows: Iterable[tuple[int, object]], keep_open: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.executescript(
        "CREATE TABLE IF NOT EXISTS metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT, timestamp TEXT,"
        " run_name TEXT, step INTEGER, metrics TEXT);"
        "CREATE TABLE IF NOT EXISTS configs (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT, config TEXT);"
    )
    for step, item in rows:
        text = item if isinstance(item, bytes) else json.dumps(item).encode()
        db.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)",
            ("id1", "2026-11-29T14:28:21.420854+00:00", "first", step, text),
        )
    db.execute("INSERT INTO configs VALUES (1, 'id1', 'first', ?)", (b'{"trainer": {"n": 1}, "_Created": "x"}',))
    db.commit()
    return db


TRACKIO_ROWS: list[tuple[int, object]] = [
    (1, {"actor/entropy": 0.5, "score": 0.1}),
    (2, {"actor/entropy": 0.4, "score": 0.2}),
    (2, {"actor/entropy": 9.0}),
    (3, {"actor/entropy": "NaN", "nested": {"a": 1}}),
    (4, {"actor/entropy": "Infinity", "note": "x"}),
    (5, b"{torn"),
]


def test_trackio_with_rows_only_in_the_wal(tmp_path: Path) -> None:
    db = trackio_store(tmp_path / "math.db", TRACKIO_ROWS)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert "math.db-wal" in before
    (parsed,) = found(tmp_path / "math.db")
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before, "nothing is written beside the input"
    db.close()
    values = table(parsed)
    assert (values["actor/entropy", 2], values["score", 2]) == (9.0, 0.2)
    assert kinds(parsed)["actor/entropy", 3] == "nan"
    assert values["actor/entropy", 4] == math.inf
    assert values["nested/a", 3] == 1
    assert (parsed.identity.project, parsed.identity.experiment) == ("math", "first")
    assert parsed.configs[0].tree == {"trainer": {"n": 1}}
    assert {p.kind: p.count for p in parsed.problems} == {"not_a_number": 1, "bad_row": 1}


def test_trackio_without_its_wal(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    db = trackio_store(tmp_path / "live/math.db", [])
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("INSERT INTO metrics VALUES (1, 'id1', '', 'first', 1, '{\"a\": 1}')")
    db.commit()
    (tmp_path / "math.db").write_bytes((tmp_path / "live/math.db").read_bytes())
    db.close()
    (parsed,) = trackio.read(tmp_path / "math.db")
    assert problem_kinds(parsed) == ["wal_missing"]


def test_other_databases_are_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "x.db")
    db.execute("CREATE TABLE t (a)")
    db.commit()
    db.close()
    (skipped,) = discover([tmp_path]).skipped
    assert skipped.reason == "SQLite database of no known tracker"


def test_a_cut_database_is_a_problem(tmp_path: Path) -> None:
    trackio_store(tmp_path / "a.db", [(i, {"a/b": i + 0.5}) for i in range(2000)]).close()
    data = (tmp_path / "a.db").read_bytes()
    (tmp_path / "a.db").write_bytes(data[: len(data) // 2 // 4096 * 4096])
    results = trackio.read(tmp_path / "a.db")
    assert any(p.problems for p in results)
    assert all(value == step + 0.5 for p in results for (_, step), value in table(p).items())


# SwanLab


def swan_record(number: int, body: bytes) -> bytes:
    return number_field(1, 1) + blob(number, body)


def swan_scalar(key: str, step: int, value: float) -> bytes:
    stored = double_field(1, value) if value or math.copysign(1, value) < 0 else b""
    moment = number_field(1, 1_700_000_000 + step)
    return swan_record(
        13, blob(1, key.encode()) + (number_field(2, step) if step else b"") + blob(4, moment) + blob(5, stored)
    )


def swan_log(rows: Iterable[tuple[int, Mapping[str, float]]], lines: Iterable[str] = ()) -> bytes:
    start = swan_record(
        10, blob(1, b"math") + blob(4, b"first") + blob(10, b"id1") + blob(12, number_field(1, 1_700_000_000))
    )
    scalars = [swan_scalar(key, step, value) for step, row in rows for key, value in row.items()]
    return block_log([start, *scalars, *(swan_record(16, blob(1, line.encode())) for line in lines)], SWAN_HEADER)


def test_swanlab(tmp_path: Path) -> None:
    rows = [(0, {"a/b": 0.0, "a/c": 1.5}), (1, {"a/b": math.nan, "a/c": math.inf}), (2, {"a/b": -math.inf})]
    (tmp_path / "run-id1.swanlab").write_bytes(swan_log(rows, ["hello", "step:7 - a/d:0.5 - a/e:1.5"]))
    scalars, output = found(tmp_path)
    assert table(scalars)["a/b", 0] == 0.0
    assert [kinds(scalars)["a/b", s] for s in range(3)] == ["finite", "nan", "inf"]
    assert table(output) == {("a/d", 7): 0.5, ("a/e", 7): 1.5}
    assert output.format == "swanlab_output"
    assert (scalars.identity.project, scalars.identity.experiment, scalars.identity.run_id) == ("math", "first", "id1")
    assert scalars.metrics.wall_time[-1] == 1_700_000_002
    assert not scalars.problems


def test_swanlab_cuts_console_lines(tmp_path: Path) -> None:
    line = "step:7 - a/b:0.5 - " + " - ".join(f"a/k{i}:{i}.25" for i in range(200))
    path = tmp_path / "x.swanlab"
    cut = line[:1024]
    path.write_bytes(swan_log([(7, {"a/b": 0.5})], ["short", cut]))
    _, output = swanlab.read(path)
    assert all(value in (0.5, int(key[3:] or 0) + 0.25) for (key, _), value in table(output).items() if key != "a/b")
    assert len(table(output)) == cut.count(" - ") - 1, "the last value may be cut"
    assert "cut_lines" in problem_kinds(output)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b":SWL\xd6\xe1\x01" + bytes(99), "unknown_version"), (b"", "bad_header"), (b":SWL", "bad_header")],
)
def test_swanlab_headers(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "x.swanlab"
    path.write_bytes(data)
    (parsed,) = swanlab.read(path)
    assert problem_kinds(parsed) == [problem]
    assert not len(parsed.metrics)


# ClearML (nasty input 20)


def clearml_events(values: Iterable[tuple[int, float]]) -> str:
    return "".join(
        json.dumps(
            [
                {
                    "timestamp": 1_700_000_000_000 + step,
                    "type": "training_stats_scalar",
                    "task": "t",
                    "iter": step,
                    "metric": "actor",
                    "variant": "kl",
                    "value": value,
                },
                {"timestamp": 1, "type": "plot", "iter": step, "metric": "p", "variant": "q"},
            ]
        )
        + "\n"
        for step, value in values
    )


@pytest.mark.parametrize("shape", ["folder", "zip"])
def test_clearml_cannot_carry_nan(tmp_path: Path, shape: str) -> None:
    text, task = clearml_events([(1, 0.5), (2, 0.0), (3, 0.25)]) + "[{", json.dumps({"name": "first", "id": "t"})
    if shape == "zip":
        with zipfile.ZipFile(tmp_path / "offline-t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("metrics.jsonl", text)
            archive.writestr("task.json", task)
    else:
        (tmp_path / "metrics.jsonl").write_text(text)
        (tmp_path / "task.json").write_text(task)
    (parsed,) = found(tmp_path)
    assert parsed.format == "clearml"
    assert table(parsed) == {("actor/kl", 1): 0.5, ("actor/kl", 2): 0.0, ("actor/kl", 3): 0.25}
    assert kinds(parsed)["actor/kl", 2] == "clamped"
    assert parsed.identity.experiment == "first"
    assert parsed.metrics.wall_time[0] == 1_700_000_000.001
    assert {p.kind: p.count for p in parsed.problems} == {"not_a_number": 3, "torn_line": 1, "nonfinite_lost": 1}


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    (skipped,) = discover([tmp_path]).skipped
    assert skipped.reason.startswith("zip, and no ClearML")


@pytest.mark.parametrize("name", ["a.db", "a.swanlab", "a.zip", "a.parquet", "a.csv", "a.jsonl"])
@pytest.mark.parametrize(
    "magic", [b"SQLite format 3\0", b":SWL\xd6\xe1\x02", b"PK\x03\x04", b"PAR1", b'"Step","a - b"\n', b'{"']
)
def test_garbage_behind_a_signature(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(magic + bytes(range(256)) * 40)
    for parsed in read_all(discover([path])):
        assert parsed.problems
        assert not len(parsed.metrics)
        assert "reader_crashed" not in problem_kinds(parsed)


def test_unreadable_files_are_problems(tmp_path: Path) -> None:
    readers: list[Any] = [mlflow.read, trackio.read, swanlab.read]
    for read in readers:
        (parsed,) = read(tmp_path / "none")
        assert problem_kinds(parsed) == ["unreadable"]
    assert not list(tmp_path.iterdir())
