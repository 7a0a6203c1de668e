"""What people export from wandb, and JSON rows of other frameworks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.ingest.writers import PUBLIC_LOGS, kinds, problem_kinds, table
from verl_audit.ingest import jsonl, wandb_export
from verl_audit.ingest.discover import Found, discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def found(path: Path) -> list[Parsed]:
    """Everything discovery finds under a path, read."""
    return read_all(discover([path]))


def reason(path: Path) -> str:
    (skipped,) = discover([path]).skipped
    return skipped.reason


# chart CSV (nasty input 18)


def test_chart_holds_one_series_a_run(tmp_path: Path) -> None:
    text = (
        '"Step","run - a - actor/pg_loss","run - a - actor/pg_loss__MIN","run - a - actor/pg_loss__MAX",'
        '"b - actor/pg_loss"\n'
        '"0","Infinity","1","2",""\n'
        '"1","0.5","0.4","0.6","-0.25"\n'
        '"2","NaN","","",""'
    )
    first, second = found(write(tmp_path / "wandb_export_2026.csv", text))
    assert [p.identity.experiment for p in (first, second)] == ["run - a", "b"]
    assert table(second) == {("actor/pg_loss", 1): -0.25}
    assert kinds(first) == {
        ("actor/pg_loss", 0): "inf",
        ("actor/pg_loss", 1): "finite",
        ("actor/pg_loss", 2): "nan",
    }
    assert first.sampled and second.sampled
    assert problem_kinds(first) == ["sampled"]


def test_envelope_without_its_curve_is_a_metric(tmp_path: Path) -> None:
    (parsed,) = found(write(tmp_path / "chart.csv", '"Step","r - loss__MIN"\n"1","0.5"\n'))
    assert table(parsed) == {("loss__MIN", 1): 0.5}


def test_chart_over_time_is_refused(tmp_path: Path) -> None:
    (parsed,) = found(write(tmp_path / "chart.csv", '"Relative Time (Process)","r - loss"\n"1.5","0.5"\n'))
    assert not len(parsed.metrics)
    assert problem_kinds(parsed) == ["not_a_step_axis"]


@pytest.mark.skipif(not PUBLIC_LOGS.exists(), reason="public logs are not here")
def test_real_chart() -> None:
    parsed = found(PUBLIC_LOGS / "wandb_ui_export_chart.csv")
    assert len(parsed) == 8
    assert {key for p in parsed for key in p.metrics.keys} == {"train/loss"}
    longest = next(p for p in parsed if p.identity.experiment == "gpt2")
    assert len(longest.metrics) == 386
    assert table(longest)["train/loss", 385] == 3.2849113941192627


def test_runs_table_is_no_history(tmp_path: Path) -> None:
    path = write(tmp_path / "wandb_export.csv", '"Name","State","Notes","lr"\n"run-1","finished","-","0.001"\n')
    assert reason(path) == wandb_export.RUNS_TABLE


def test_other_tables_are_refused(tmp_path: Path) -> None:
    assert reason(write(tmp_path / "x.csv", "name,score\na,1\n")) == "CSV without a column for the step"


# history CSV and JSON


def test_history_csv(tmp_path: Path) -> None:
    text = (
        ",_step,_timestamp,actor/kl,actor/lr,note,training/global_step\n"
        "0,0,1700000000.5,NaN,1e-06,hello,10\n"
        "1,1,1700000001.5,Infinity,,,20\n"
        "2,2,1700000002.5,1_000,-Infinity,,30\n"
        "3,3,too,short\n"
        "4,5,1700000002.5,0.5,12,,4"
    )
    (parsed,) = found(write(tmp_path / "history.csv", text))
    values = table(parsed)
    assert math.isnan(values["actor/kl", 0])
    assert values["actor/kl", 1] == math.inf
    assert values["actor/lr", 2] == -math.inf
    assert ("actor/lr", 1) not in values
    assert ("actor/kl", 2) not in values
    assert ("training/global_step", 5) not in values, "40 may have been cut to 4"
    assert values["actor/lr", 5] == 12
    assert parsed.metrics.wall_time[0] == 1700000000.5
    assert parsed.step_kind == "counter"
    assert set(problem_kinds(parsed)) == {"bad_line", "not_a_number", "torn_line", "nan_or_missing"}
    assert {p.kind: p.count for p in parsed.problems}["not_a_number"] == 2
    assert parsed.values_lost == 5


def test_a_sampled_history_is_marked(tmp_path: Path) -> None:
    steps = [int(i * 7.3) for i in range(500)]
    text = "_step,actor/kl\n" + "".join(f"{s},{s}.5\n" for s in steps)
    (parsed,) = found(write(tmp_path / "history.csv", text))
    assert parsed.sampled
    text = "_step,actor/kl\n" + "".join(f"{s},{s}.5\n" for s in range(500))
    (parsed,) = found(write(tmp_path / "all" / "history.csv", text))
    assert not parsed.sampled


ROWS: list[dict[str, Any]] = [
    {"_step": 0, "actor/kl": 0.5, "actor/lr": "NaN"},
    {"_step": 1, "actor/kl": "Infinity", "actor/nested": {"mean": 2}},
    {"_step": 2, "actor/kl": 0.25, "table": {"_type": "table-file", "size": 9}},
]
VALUES = {("actor/kl", 0): 0.5, ("actor/kl", 1): math.inf, ("actor/kl", 2): 0.25, ("actor/nested/mean", 1): 2.0}


@pytest.mark.parametrize("shape", ["list", "lines", "columns"])
def test_history_json(tmp_path: Path, shape: str) -> None:
    keys = list(dict.fromkeys(key for row in ROWS for key in row))
    text = {
        "list": json.dumps(ROWS, indent=1),
        "lines": "".join(json.dumps(row) + "\n" for row in ROWS),
        "columns": json.dumps({k: {str(i): row[k] for i, row in enumerate(ROWS) if k in row} for k in keys}),
    }[shape]
    path = write(tmp_path / "history.json", text)
    (parsed,) = found(path)
    assert parsed.format == "wandb_export"
    values = table(parsed)
    assert math.isnan(values.pop(("actor/lr", 0)))
    assert values == VALUES


def test_a_torn_list_keeps_its_whole_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "history.json", json.dumps([{"_step": i, "a/b": i + 0.5} for i in range(9)])[:-15])
    (parsed,) = found(path)
    assert table(parsed) == {("a/b", i): i + 0.5 for i in range(8)}
    assert problem_kinds(parsed) == ["torn_file"]


# parquet (nasty input 19)


def history_file(path: Path, steps: range, **columns: list[Any]) -> Path:
    data = {"_step": list(steps), "_timestamp": [1e9 + s for s in steps], "a/b": [s + 0.5 for s in steps], **columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(data), path, row_group_size=10, write_page_checksum=True, use_dictionary=False, compression="NONE"
    )
    return path


def test_shards_are_united_by_name(tmp_path: Path) -> None:
    history_file(tmp_path / "1.parquet", range(20, 30), extra=[math.nan] * 10)
    history_file(tmp_path / "0.parquet", range(20))
    (parsed,) = found(tmp_path)
    values = table(parsed)
    assert {s for key, s in values if key == "a/b"} == set(range(30))
    assert all(math.isnan(values["extra", s]) for s in range(20, 30))
    assert list(parsed.metrics.step) == sorted(parsed.metrics.step)
    assert set(parsed.metrics.segment) == {0}


def test_shards_of_two_runs_stay_apart(tmp_path: Path) -> None:
    history_file(tmp_path / "a.parquet", range(20))
    history_file(tmp_path / "b.parquet", range(5, 20))
    assert [len(p.metrics) for p in found(tmp_path)] == [20, 15]


def test_damage_in_one_row_group_loses_that_group(tmp_path: Path) -> None:
    history_file(tmp_path / "good.parquet", range(100, 140))
    bad = bytearray(history_file(tmp_path / "flipped.parquet", range(40)).read_bytes())
    hit = bad.index(pa.array([15.5]).buffers()[1].to_pybytes()[:8])
    bad[hit] ^= 0xFF
    write(tmp_path / "flipped.parquet", bytes(bad))
    write(tmp_path / "cut.parquet", bytes(bad[: len(bad) // 2]))
    write(tmp_path / "empty.parquet", b"")
    result = discover([tmp_path])
    assert result.files == (Found(tmp_path, "wandb_parquet"),)
    (parsed,) = read_all(result)
    assert {s for _, s in table(parsed)} == {*range(10), *range(20, 40), *range(100, 140)}
    assert {p.kind: p.count for p in parsed.problems} == {"damaged_row_group": 1, "unreadable": 2}


def test_parquet_of_text_is_no_history(tmp_path: Path) -> None:
    pq.write_table(pa.table({"step": [1], "completion": ["x"]}), tmp_path / "completions.parquet")
    assert reason(tmp_path).startswith("parquet: no metric history")


# rows of other frameworks


def test_rows_of_two_writers(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(6):
        rows.append(
            {"step": step + 2, "time": 1.7e9 + step, "time/wait_for_policy": 0.5, "reward": {"mean": step + 0.25}}
        )
        rows.append({"step": step, "time": 1.7e9 + step, "time/wait_for_batch": 0.5, "loss": step + 0.5})
    (parsed,) = found(write(tmp_path / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows)))
    assert parsed.format == "jsonl"
    assert set(parsed.metrics.segment) == {0}, "two writers at different steps are no restart"
    assert table(parsed)["reward/mean", 7] == 5.25
    assert table(parsed)["loss", 5] == 5.5
    assert "nonfinite_dropped" in problem_kinds(parsed)


def test_a_restart_is_a_segment(tmp_path: Path) -> None:
    steps = [0, 1, 2, 3, 2, 3, 4]
    text = "".join(json.dumps({"train/step": s, "loss": i + 0.5}) + "\n" for i, s in enumerate(steps))
    (parsed,) = found(write(tmp_path / "metrics.jsonl", text))
    assert list(parsed.metrics.segment) == [0, 0, 0, 0, 1, 1, 1]
    assert table(parsed)["loss", 2] == 4.5


def test_null_is_a_value_where_rows_are_ragged(tmp_path: Path) -> None:
    ragged = '{"step":1,"a":0.5,"b":1.5}\n{"step":2,"a":null}\n{"step":3,"a":NaN,"c":1}\n'
    (parsed,) = found(write(tmp_path / "a.jsonl", ragged))
    assert kinds(parsed)["a", 2] == "nonfinite_unknown"
    assert kinds(parsed)["a", 3] == "nan"
    square = '{"step":1,"a":0.5}\n{"step":2,"a":null}\n'
    (parsed,) = found(write(tmp_path / "b" / "b.jsonl", square))
    assert ("a", 2) not in table(parsed)
    assert problem_kinds(parsed) == ["null_value"]


def test_damaged_lines_cost_themselves(tmp_path: Path) -> None:
    text = (
        b'{"step":1,"a/b":1.5}\n'
        + bytes(50)
        + b'{"step":2,"a/b":2.5}\n{"step":3,"a/b"\n[1]\n{"a/b":1}\n{"step":4,"a/b":4'
    )
    (parsed,) = found(write(tmp_path / "m.jsonl", text))
    assert table(parsed) == {("a/b", 1): 1.5, ("a/b", 2): 2.5}
    assert sorted(problem_kinds(parsed)) == ["bad_line", "no_step", "nul_bytes", "torn_line"]


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "prompt": "a", "score": 1.0},
        {"step": 1, "note": "x" * 300, "score": 1.0},
        {"step": 1, "token_ids": [1, 2], "score": 1.0},
        {"step": 1, "logprobs": [0.5], "score": 1.0},
        {"event": "sample", "step": 1, "score": 1.0},
        {"step": 1, "name": "x"},
        {"step": 1.5, "loss": 1.0},
        {"loss": 1.0},
    ],
)
def test_samples_and_traces_are_no_metrics(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "x.jsonl", json.dumps(row) + "\n")
    assert not discover([path]).files


def test_many_rows_of_a_step_are_samples(tmp_path: Path) -> None:
    text = "".join(json.dumps({"step": 1, "score": i / 7}) + "\n" for i in range(20))
    assert "samples" in reason(write(tmp_path / "scores.jsonl", text))


def test_envelopes_add_no_prefix(tmp_path: Path) -> None:
    parsed = jsonl.read(
        write(tmp_path / "x.jsonl", '{"step":1,"metrics":{"actor/kl":0.5},"eval":{"acc":{"math":1}}}\n')
    )[0]
    assert table(parsed) == {("actor/kl", 1): 0.5, ("eval/acc/math", 1): 1.0}
