"""Junk gives exit 2 or 3 with a sentence that helps, never 0."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_audit.cli import main


def an_unrelated_json(folder: Path) -> None:
    (folder / "package.json").write_text(
        json.dumps({"name": "left-pad", "version": "1.0.0", "scripts": {"test": "true"}})
    )


def a_json_lines_file_of_something_else(folder: Path) -> None:
    rows = [{"id": i, "text": "a question", "answer": i * 2, "step": i} for i in range(50)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def nothing(folder: Path) -> None:
    assert folder.is_dir()


def empty_files(folder: Path) -> None:
    for name in ("console.log", "run.jsonl", "run-qe0uj2az.wandb", "events.out.tfevents.1.host.1.0", "output.log"):
        (folder / name).touch()


def a_random_binary(folder: Path) -> None:
    data = random.Random(7).randbytes(200_000)
    for name in ("core", "run-abc.wandb", "events.out.tfevents.2.host.2.0", "console.log"):
        (folder / name).write_bytes(data)


def a_pickle(folder: Path) -> None:
    (folder / "metrics.pkl").write_bytes(pickle.dumps({"step": 1, "data": {"actor/grad_norm": 1.0}}))
    (folder / "model.pt").write_bytes(pickle.dumps([1, 2, 3]))


def python_source(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "loop.py").write_text(
        "for step in range(10):\n    print(f'step:{step} - loss:{1 / (step + 1)}')\n"
    )
    (folder / "README.md").write_text("# A loop\n")


def a_text_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("step 1: buy milk\nstep 2: reward myself\n" * 40)


JUNK = (
    an_unrelated_json,
    a_json_lines_file_of_something_else,
    nothing,
    empty_files,
    a_random_binary,
    a_pickle,
    python_source,
    a_text_file,
)


def diagnose(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["diagnose", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("make", JUNK, ids=lambda make: make.__name__)
def test_a_folder_of_junk(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    code, output = diagnose(str(tmp_path))
    assert code in (2, 3)
    assert len(output.split()) > 8
    assert "Traceback" not in output
    assert "No cause" not in output


@pytest.mark.parametrize("make", [m for m in JUNK if m is not nothing], ids=lambda make: make.__name__)
def test_junk_given_as_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        code, output = diagnose(str(path))
        assert code in (2, 3), path.name
        assert path.name in output or path.stem in output
        assert "Traceback" not in output


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    code, output = diagnose(str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere" in output


def test_nothing_is_written_into_the_run_directory(tmp_path: Path) -> None:
    an_unrelated_json(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    diagnose(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
