from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.ingest.writers import PUBLIC_LOGS, REAL_RUNS, block_log, tf_scalar, wandb_row
from verl_audit.ingest import console
from verl_audit.ingest.discover import Discovery, discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all

STEP = "step:1 - a/b:1.5\n"
LOGGER = '{"step":1,"data":{"a/b":1}}\n'
DUMP = '{"input": "a", "output": "b", "score": 1.0, "step": 1}\n'


def make(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def found(result: Discovery, root: Path) -> dict[str, str]:
    return {str(f.path.relative_to(root)): f.format for f in result.files}


def skipped(result: Discovery, root: Path) -> dict[str, str]:
    return {str(s.path.relative_to(root)): s.reason for s in result.skipped}


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_run() -> None:
    root = REAL_RUNS / "sync_baseline"
    assert found(discover([root]), root) == {
        "console.log": "verl_console",
        "file_logger/toy_map/sync_baseline.jsonl": "verl_jsonl",
        "hydra/.hydra/config.yaml": "hydra",
        "rollout_data": "dump",
        "tensorboard/events.out.tfevents.1795962303.node0.2481.0": "tensorboard",
        "val_data": "dump",
        "wandb/offline-run-20261129_142443-3tzozbmq/run-3tzozbmq.wandb": "wandb",
    }


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_every_tracker_of_a_run_is_found() -> None:
    root = REAL_RUNS / "mismatch_probe"
    formats = Counter(f.format for f in discover([root]).files)
    assert formats == {
        "verl_console": 1,
        "verl_jsonl": 5,
        "tensorboard": 5,
        "wandb": 2,
        "swanlab": 2,
        "mlflow_files": 1,
        "trackio": 1,
    }
    traces = found(discover([REAL_RUNS / "rb_drop"]), REAL_RUNS / "rb_drop")
    assert traces["trajectory_trace.jsonl"] == "trace_recorder"


@pytest.mark.skipif(not PUBLIC_LOGS.exists(), reason="public logs are not here")
def test_public_logs() -> None:
    result = discover([PUBLIC_LOGS])
    formats = found(result, PUBLIC_LOGS)
    assert sum(f == "verl_console" for f in formats.values()) == 4
    assert sum(f == "wandb" for f in formats.values()) == 4
    reasons = skipped(result, PUBLIC_LOGS)
    assert formats["wandb_ui_export_chart.csv"] == "wandb_chart"
    assert reasons["SOURCES.md"] == "not a log"
    assert not result.problems


def test_content_decides_and_names_do_not(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            "12:30:01.txt": "x" * 5_000_000 + "\n" + STEP,
            "config_first.log": '{\n  "a": 1\n}\n' + STEP,
            "json_first": '{"a": 1}\n{"b": 2}\n' + STEP,
            "plain_json": '{"a": 1}\n',
            "nohup.out": "\x1b[36m(TaskRunner pid=1)\x1b[0m hello\n",
            "nul.log": bytes(300_000) + STEP.encode(),
            "crash.err": "Traceback (most recent call last):\n",
            "noise.log": "nothing of interest\n",
            "oddly_named": block_log([wandb_row(1, {"a/b": 1})]),
            "broken.wandb": b"xx",
            "metrics.json": bytes(4) + LOGGER.encode(),
            "torn.jsonl": LOGGER[:-5] + "\n",
            "late.jsonl": "torn\n" + LOGGER,
            "long.jsonl": '{"step": 1, "data": {"a/b": ' + "1" * 400_000 + "}}\n",
            "other.jsonl": '{"loss": 1}\n',
            "train.py": f'"""{STEP}"""\n',
            "config.yaml": "actor_rollout_ref:\n  x: 1\n",
            "other.yaml": "name: x\n",
            "x.tfevents.1": tf_scalar("a/b", 1, 1),
            "table.csv": "a,b\n",
            "chart.csv": '"Step","run - a/b"\n',
            "old.log.gz": b"\x1f\x8b\x08\x00",
            "empty.log": b"",
            "blob": bytes(range(1, 32)) * 100,
            "optim.pt": STEP,
            "model.safetensors": STEP,
        },
    )
    result = discover([tmp_path])
    assert found(result, tmp_path) == {
        "12:30:01.txt": "verl_console",
        "config_first.log": "verl_console",
        "json_first": "verl_console",
        "nohup.out": "verl_console",
        "nul.log": "verl_console",
        "crash.err": "verl_console",
        "oddly_named": "wandb",
        "broken.wandb": "wandb",
        "metrics.json": "verl_jsonl",
        "torn.jsonl": "verl_jsonl",
        "late.jsonl": "verl_jsonl",
        "long.jsonl": "verl_jsonl",
        "config.yaml": "hydra",
        "x.tfevents.1": "tensorboard",
        "chart.csv": "wandb_chart",
    }
    reasons = skipped(result, tmp_path)
    assert reasons["empty.log"] == "empty"
    assert reasons["optim.pt"] == "pickle: never opened"
    assert reasons["old.log.gz"].startswith("compressed")
    assert reasons["blob"] == reasons["train.py"] == "not a log"
    assert len(reasons) + len(result.files) == 26


def test_directories_that_are_not_entered(tmp_path: Path) -> None:
    make(
        tmp_path,
        {f"{d}/x.log": STEP for d in ("global_step_10", ".git", "mlruns/.trash", "run/global_step_2", "ok")},
    )
    result = discover([tmp_path])
    assert found(result, tmp_path) == {"ok/x.log": "verl_console"}
    assert skipped(result, tmp_path)["run/global_step_2"] == "checkpoint"


def test_wandb_directory(tmp_path: Path) -> None:
    log = block_log([wandb_row(1, {"a/b": 1})])
    run = "wandb/run-20250101_000000-abc"
    make(
        tmp_path,
        {
            f"{run}/run-abc.wandb": log,
            f"{run}/run-abc.wandb.synced": b"",
            f"{run}/files/output.log": STEP,
            f"{run}/files/config.yaml": "actor_rollout_ref:\n  value: {x: 1}\n",
            f"{run}/files/wandb-summary.json": "{}",
            f"{run}/logs/debug.log": "Traceback (most recent call last):\n",
        },
    )
    (tmp_path / "wandb/latest-run").symlink_to(tmp_path / run, target_is_directory=True)
    assert found(discover([tmp_path]), tmp_path) == {
        f"{run}/run-abc.wandb": "wandb",
        f"{run}/files/output.log": "verl_console",
        f"{run}/files/config.yaml": "hydra",
    }


def test_links(tmp_path: Path) -> None:
    make(tmp_path, {"run/sub/a.log": STEP, "elsewhere/b.log": STEP})
    run = tmp_path / "run"
    (run / "0-loop").symlink_to(run, target_is_directory=True)
    (run / "0-up").symlink_to(tmp_path, target_is_directory=True)
    (run / "0-same").symlink_to(run / "sub" / "a.log")
    (run / "0-away").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (run / "0-broken").symlink_to(tmp_path / "none")
    result = discover([run])
    assert found(result, run) == {"sub/a.log": "verl_console", "0-away/b.log": "verl_console"}
    assert skipped(result, run) == {
        "0-loop": "link to a directory that contains this one",
        "0-up": "link to a directory that contains this one",
        "0-broken": "broken link",
    }


def test_paths_that_overlap_are_visited_once(tmp_path: Path) -> None:
    make(tmp_path, {"run/a.log": STEP})
    assert len(discover([tmp_path / "run", tmp_path, tmp_path / "run/a.log"]).files) == 1


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    assert skipped(discover([tmp_path]), tmp_path) == {"pipe.log": "not a regular file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_a_problem(tmp_path: Path) -> None:
    make(tmp_path, {"a.log": STEP})
    (tmp_path / "a.log").chmod(0)
    assert [p.kind for p in discover([tmp_path]).problems] == ["unreadable"]


def test_single_files_and_missing_paths(tmp_path: Path) -> None:
    make(tmp_path, {"a.log": STEP, "rollout_data/1.jsonl": DUMP, "rollout_data/2.jsonl": DUMP})
    assert [f.format for f in discover([tmp_path / "a.log"]).files] == ["verl_console"]
    one = discover([tmp_path / "rollout_data/2.jsonl"])
    assert [(f.path.name, f.format) for f in one.files] == [("2.jsonl", "dump")]
    both = discover([tmp_path / "rollout_data"])
    assert [(f.path.name, f.format) for f in both.files] == [("rollout_data", "dump")]
    with pytest.raises(FileNotFoundError):
        discover([tmp_path / "none"])


def test_read_all_goes_on_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a.log": STEP, "b.jsonl": LOGGER, "rollout_data/1.jsonl": DUMP})
    make(tmp_path, {"c.wandb": block_log([wandb_row(1, {"a/b": 1})]), "d.tfevents": tf_scalar("a/b", 1, 1)})
    make(tmp_path, {".hydra/config.yaml": "trainer: {}\n"})

    def crash(path: Path) -> list[Parsed]:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(console, "read", crash)
    heard: list[tuple[str, int]] = []
    parsed = read_all(discover([tmp_path]), lambda path, size: heard.append((path.name, size)))
    by_format = {p.format: p for p in parsed}
    assert set(by_format) == {"verl_console", "verl_jsonl", "wandb", "tensorboard", "hydra", "dump"}
    assert [(p.kind, p.detail) for p in by_format["verl_console"].problems] == [
        ("reader_crashed", "RuntimeError: unexpected")
    ]
    assert by_format["verl_jsonl"].metrics.records == 1
    assert ("b.jsonl", len(LOGGER)) in heard
    assert len(heard) == 6


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    event = (tmp_path / "events.out.tfevents.1.h.1.0", tmp_path / "tb.log")
    event[0].write_bytes(b"\x18" + bytes(7) + b'\xa3\x7fK"' + b"\x09" + bytes(8) + b"\x1a\rbrain.Event:2" + bytes(4))
    event[0].rename(event[1])
    make(tmp_path, {"console.bin": STEP, "logger.dat": LOGGER, "model.bin": b"\x80\x02}q\0" + bytes(range(256)) * 9})
    result = discover([tmp_path])
    assert found(result, tmp_path) == {
        "console.bin": "verl_console",
        "logger.dat": "verl_jsonl",
        "tb.log": "tensorboard",
    }
    assert skipped(result, tmp_path) == {"model.bin": "pickle: never opened"}


def test_what_may_never_be_opened_is_not(tmp_path: Path) -> None:
    make(tmp_path, {f"x{suffix}": STEP for suffix in (".pt", ".pkl", ".pth", ".safetensors", ".gguf")})
    assert discover([tmp_path]).files == ()


SLIME = "(RolloutManager pid=9) [2026-04-15 07:57:53] rollout.py:1193 - perf 0: {'rollout/response_len/mean': 27.5}\n"
TRAINER = "{'loss': 0.5, 'reward': 0.25, 'epoch': 1.0}\n"
TRL = "{'loss': 0.0, 'grad_norm': 4.9e-06, 'reward': 0.5}\n"


def test_logs_with_a_dict_a_line_are_told_by_their_framework(tmp_path: Path) -> None:
    make(tmp_path, {"s.log": SLIME * 3, "t.log": "Traceback (most recent call last):\n" + TRAINER, "v.log": TRL + STEP})
    result = discover([tmp_path])
    assert found(result, tmp_path) == {"s.log": "dict_console", "t.log": "dict_console", "v.log": "verl_console"}


def test_only_what_may_hold_the_run_is_worth_telling(tmp_path: Path) -> None:
    make(tmp_path, {"console.log.gz": b"\x1f\x8b\x08", "run.wandb": "", "events.out.tfevents.1.h": ""})
    make(
        tmp_path, {"trace.jsonl": '{"event": "lunch"}\n', "__init__.py": "", "a.py": "x = 1\n", "logo.png": b"\x89PNG"}
    )
    told = {s.path.name for s in discover([tmp_path]).skipped if s.notable}
    assert told == {"console.log.gz", "run.wandb", "events.out.tfevents.1.h", "trace.jsonl"}
