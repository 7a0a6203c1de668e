from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.writers import REAL_RUNS, problem_kinds
from verl_audit.ingest import dumps


def write(directory: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"{step}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_runs() -> None:
    (train,) = dumps.read(REAL_RUNS / "sync_baseline/rollout_data")
    assert len(train.samples) == 864
    assert {s.step for s in train.samples} == {1, 2, 3, 10, 20, 30, 40, 50, 60}
    assert {s.split for s in train.samples} == {"train"}
    first = train.samples[0]
    assert (first.input_chars, first.output_chars, first.score) == (8, 8, 0.08571428805589676)
    (validation,) = dumps.read(REAL_RUNS / "sync_baseline/val_data")
    assert {s.split for s in validation.samples} == {"validation"}
    assert len(validation.samples) == 448
    assert not train.problems


def test_files_are_read_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        write(tmp_path / "rollout_data", step, [{"input": "a", "output": "b", "score": step}])
    (tmp_path / "rollout_data" / "notes.txt").write_text("x")
    (parsed,) = dumps.read(tmp_path / "rollout_data")
    assert [s.step for s in parsed.samples] == [1, 2, 10]


def test_rows_of_all_versions(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input": "äß", "output": "xyz", "score": "0.5", "step": 7, "uid": "pad_0_0", "data_source": "gsm8k"},
        {"input": ["image"], "output": None, "score": None},
        {"input": "q", "output": "a", "score": math.nan, "uid": 5},
        {"input": "q", "output": "a", "score": "good"},
    ]
    (parsed,) = dumps.read(write(tmp_path / "rollout_data", 3, rows))
    first, second, third, fourth = parsed.samples
    assert (first.input_chars, first.output_chars, first.score, first.step) == (2, 3, 0.5, 7)
    assert (first.padding, first.data_source, first.uid) == (True, "gsm8k", "pad_0_0")
    assert (second.input_chars, second.output_chars, second.score, second.step) == (None, None, None, 3)
    assert third.score is not None
    assert math.isnan(third.score)
    assert (third.uid, third.padding) == ("5", False)
    assert fourth.score is None


@pytest.mark.parametrize(
    ("name", "reward", "split"),
    [
        ("rollout_data", True, "train"),
        ("val_data", False, "validation"),
        ("validation-2", False, "validation"),
        ("retrieval_rollouts", True, "train"),
        ("out", True, "validation"),
        ("out", False, "train"),
        ("val_rollouts", True, "validation"),
    ],
)
def test_split(tmp_path: Path, name: str, reward: bool, split: str) -> None:
    row = {"input": "a", "output": "b"} | ({"reward": 1.0} if reward else {})
    write(tmp_path / name, 1, [row])
    (parsed,) = dumps.read(tmp_path / name)
    assert [s.split for s in parsed.samples] == [split]


def test_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "rollout_data", 1, [{"input": "a", "output": "b"}])
    path.write_bytes(bytes(16) + path.read_bytes() + b'[1]\n{"step": 1}\n\xff\xfe\n{"input": "cut')
    (parsed,) = dumps.read(path.parent)
    assert len(parsed.samples) == 1
    assert {p.kind: p.count for p in parsed.problems} == {"bad_line": 3, "torn_line": 1}
    assert problem_kinds(dumps.read(tmp_path / "none")[0]) == ["unreadable"]
