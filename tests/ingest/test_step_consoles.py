"""Consoles of TRL, slime, OpenRLHF and AReaL, and TRL's trainer state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.ingest.writers import SHARED, block_log, kinds, problem_kinds, run_record, table, wandb_row
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all
from verl_audit.ingest.runs import group_runs

CASES = SHARED / "cases"


def found(path: Path) -> list[Parsed]:
    return read_all(discover([path]))


def one(path: Path, text: str | bytes) -> Parsed:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (parsed,) = found(path)
    return parsed


# TRL's console


def test_trl_lines_are_counted(tmp_path: Path) -> None:
    text = (
        "Loading\n"
        "{'loss': 0.5, 'grad_norm': nan, 'sampling/x': -inf, 'num_tokens': 12.0, 'epoch': 0.5}\n"
        " 20%|██        | 2/10 [00:02<00:08,  1.0it/s]\r{'loss': 0.25, 'grad_norm': 1e-05, 'epoch': 1.0}\n"
        "{'eval_loss': 0.125, 'epoch': 1.0}\n"
        "{'loss': 0.75, 'name': 'x', 'none': None, 'list': [1, {'a': 2}], 'ok': True, 'epoch': 1.5}\n"
        "{'train_runtime': 26.87, 'train_loss': 0.5, 'epoch': 1.5}\n"
        "{'loss': 0.5, 'grad_norm': 12"
    )
    parsed = one(tmp_path / "console.log", text)
    assert parsed.format == "dict_console"
    values = table(parsed)
    assert kinds(parsed)["grad_norm", 1] == "nan"
    assert values["sampling/x", 1] == -math.inf
    assert values["grad_norm", 2] == 1e-05
    assert values["eval_loss", 2] == 0.125
    assert (values["ok", 3], values["train_runtime", 3]) == (1.0, 26.87)
    assert values["loss", 4] == 0.5
    assert ("grad_norm", 4) not in values
    assert parsed.step_kind == "counter"
    assert {p.kind: p.count for p in parsed.problems} == {"steps_counted": 6, "not_a_number": 3, "torn_line": 1}


def test_trl_resume_goes_back_to_the_epoch(tmp_path: Path) -> None:
    epochs = [0.1, 0.2, 0.3, 0.4, 0.3, 0.4, 0.5]
    text = "".join(f"{{'loss': {i}.5, 'epoch': {e}}}\n" for i, e in enumerate(epochs))
    parsed = one(tmp_path / "console.log", text)
    assert list(dict.fromkeys(zip(parsed.metrics.segment, parsed.metrics.step, strict=True))) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
        (1, 5),
    ]
    assert table(parsed)["loss", 3] == 4.5


def test_trl_with_a_step_and_numbers_as_text(tmp_path: Path) -> None:
    text = "{'loss': '0.5', 'reward': 'nan', 'step': 7, 'epoch': '0.1'}\n"
    parsed = one(tmp_path / "console.log", text)
    assert parsed.step_kind == "logged"
    assert table(parsed)["loss", 7] == 0.5
    assert kinds(parsed)["loss", 7] == "rounded"
    assert kinds(parsed)["reward", 7] == "nan"


def test_a_step_that_is_no_number_is_counted(tmp_path: Path) -> None:
    parsed = one(tmp_path / "console.log", "{'loss': 0.5, 'step': nan, 'epoch': nan}\n{'loss': 1.5, 'epoch': 1.0}\n")
    assert [table(parsed)["loss", s] for s in (1, 2)] == [0.5, 1.5]


@pytest.mark.parametrize(
    "line",
    [
        "the answer is {'loss': 0.5, 'epoch': 1.0}",
        "{'question': 'what', 'answer': 'that', 'epoch': 1.0}",
        "{'a': 1, 'b': 2}",
        "{'epoch': 1.0}",
        "rollout 3: {'answer': 7}",
    ],
)
def test_other_dicts_are_no_metrics(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.log").write_text(line + "\n")
    assert not discover([tmp_path]).files


@pytest.mark.skipif(not CASES.exists(), reason="cases are not here")
def test_real_trl_line() -> None:
    parsed = found(CASES / "trl-5312-original-log" / "console.log")[0]
    assert parsed.step_kind == "counter"
    assert table(parsed)["sampling/sampling_logp_difference/mean", 1] == 0.8090547323226929
    assert table(parsed)["train_runtime", 1] == 26.87
    assert len(parsed.metrics) == 34


def test_equal_values_give_counted_lines_their_steps(tmp_path: Path) -> None:
    rows = [
        {"step": 10 * i, "loss": i / 7, "grad_norm": i / 3.1, "reward": i / 11, "epoch": i / 2.2} for i in range(1, 9)
    ]
    state = {"global_step": 80, "log_history": rows}
    (tmp_path / "checkpoint-80").mkdir()
    (tmp_path / "checkpoint-80/trainer_state.json").write_text(json.dumps(state))
    lines = [{k: v for k, v in row.items() if k != "step"} for row in rows]
    (tmp_path / "console.log").write_text("".join(f"{line}\n" for line in lines))
    state_file, console = sorted(found(tmp_path), key=lambda p: p.format, reverse=True)
    assert console.step_kind == "logged"
    assert table(console) == table(state_file)
    assert problem_kinds(console) == ["steps_aligned"]
    assert len(group_runs([state_file, console], tmp_path)) == 1


def test_a_console_joins_the_wandb_history_of_its_run(tmp_path: Path) -> None:
    rows = [{"loss": i / 7, "grad_norm": i / 3.1, "reward": i / 11, "epoch": i / 2.2} for i in range(1, 9)]
    history = [
        wandb_row(i, {**{f"train/{k}": v for k, v in row.items()}, "train/global_step": 10 * (i + 1)})
        for i, row in enumerate(rows)
    ]
    run = tmp_path / "wandb/run-20260101_000000-id1"
    (run / "files").mkdir(parents=True)
    (run / "run-id1.wandb").write_bytes(block_log([run_record("id1", "math", "first", {}), *history]))
    (run / "files/output.log").write_text("".join(f"{row}\n" for row in rows))
    parsed = found(tmp_path)
    console = next(p for p in parsed if p.format == "dict_console")
    assert sorted(set(console.metrics.step)) == list(range(10, 90, 10))
    assert [run.name for run in group_runs(parsed, tmp_path)] == ["first"]


def test_counted_steps_are_not_mixed_with_logged_ones(tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text("".join(f"{{'loss': {i}.5, 'epoch': {i}.0}}\n" for i in range(5)))
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"step": i, "other": i / 7}) + "\n" for i in range(5)))
    assert len(group_runs(found(tmp_path), tmp_path)) == 2


# trainer_state.json


def state(steps: int, **first: Any) -> str:
    rows = [{"step": s, "loss": s + 0.5, "epoch": s / 10} for s in range(1, steps + 1)]
    rows[0].update(first)
    return json.dumps({"best_metric": None, "global_step": steps, "log_history": rows, "max_steps": 99}, indent=2)


def test_the_furthest_checkpoint_tells_the_history(tmp_path: Path) -> None:
    for steps in (5, 10, 9):
        (tmp_path / f"out/checkpoint-{steps}").mkdir(parents=True)
        (tmp_path / f"out/checkpoint-{steps}/trainer_state.json").write_text(state(steps))
    (tmp_path / "other/checkpoint-2").mkdir(parents=True)
    (tmp_path / "other/checkpoint-2/trainer_state.json").write_text(state(2))
    result = discover([tmp_path])
    assert {str(f.path.parent.relative_to(tmp_path)) for f in result.files} == {
        "out/checkpoint-10",
        "other/checkpoint-2",
    }
    assert [s.reason for s in result.skipped] == ["the history in checkpoint-10/trainer_state.json goes further"] * 2
    parsed = next(p for p in read_all(result) if "out" in str(p.path))
    assert table(parsed)["loss", 10] == 10.5
    assert parsed.identity.experiment == "out"


def test_state_with_nan_and_odd_entries(tmp_path: Path) -> None:
    text = state(3, grad_norm=math.nan, reward=math.inf, note="x").replace('"step": 2', '"step": "2"')
    parsed = one(tmp_path / "trainer_state.json", text)
    assert kinds(parsed)["grad_norm", 1] == "nan"
    assert kinds(parsed)["reward", 1] == "inf"
    assert ("loss", 2) not in table(parsed)
    assert sorted(problem_kinds(parsed)) == ["no_step", "not_a_number"]


def test_a_torn_state_keeps_its_whole_entries(tmp_path: Path) -> None:
    text = state(20)
    parsed = one(tmp_path / "trainer_state.json", text[: text.index('"step": 15') + 30])
    assert set(table(parsed)) == {(k, s) for s in range(1, 15) for k in ("loss", "epoch")}
    assert problem_kinds(parsed) == ["torn_file"]


# slime


def test_slime_rows_of_two_processes(tmp_path: Path) -> None:
    rollout = "\x1b[36m(RolloutManager pid=5)\x1b[0m [2026-04-15 07:57:53] rollout.py:1193 - "
    train = "(MegatronTrainRayActor pid=6, ip=10.0.0.1) [2026-04-15 07:57:53] model.py:7 - "
    text = ""
    for i in range(6):
        text += f"{rollout}rollout {i + 2}: {{'rollout/raw_reward': {i}.5, 'rollout/x': np.float64(nan)}}\n"
        text += f"{rollout}perf {i + 2}: {{'perf/rollout_time': {i}.25}}\n"
        text += f"{train}step {i}: {{'train/loss': {i}.125, 'train/step': {i}}}\n"
    parsed = one(tmp_path / "job.log", text + rollout + "rollout 9: {'rollout/raw_reward': 1.5, 'rollout/x': 1")
    assert parsed.format == "dict_console"
    assert set(parsed.metrics.segment) == {0}, "generation runs ahead of training: no restart"
    assert table(parsed)["train/loss", 5] == 5.125
    assert table(parsed)["rollout/raw_reward", 7] == 5.5
    assert kinds(parsed)["rollout/x", 7] == "nan"
    assert table(parsed)["rollout/raw_reward", 9] == 1.5
    assert ("rollout/x", 9) not in table(parsed)
    assert problem_kinds(parsed) == ["torn_line"]


def test_slime_axes_that_drift_apart_are_told(tmp_path: Path) -> None:
    text = "".join(f"rollout {i}: {{'rollout/r': 0.5}}\nstep {4 * i}: {{'train/l': 0.5}}\n" for i in range(9))
    assert problem_kinds(one(tmp_path / "job.log", text)) == ["two_step_axes"]


def test_openrlhf_line(tmp_path: Path) -> None:
    parsed = one(
        tmp_path / "job.log", "(PPORayActorGroup pid=1) Global step 12: {'policy_loss': 0.5, 'kl': tensor(0.25)}\n"
    )
    assert table(parsed) == {("policy_loss", 12): 0.5, ("kl", 12): 0.25}


@pytest.mark.skipif(not CASES.exists(), reason="cases are not here")
def test_real_slime_line() -> None:
    parsed = found(CASES / "slime-1837-zero-std-line" / "console.log")[0]
    assert table(parsed)["rollout/zero_std/count_1", 0] == 14
    assert table(parsed)["rollout/truncated_ratio", 0] == 0.46484375
    assert len(parsed.metrics) == 13
    assert not parsed.problems


# AReaL

HEAD = "\x1b[37m(AReaL)\x1b[0m 20260814-01:00:00.000 StatsLogger INFO: "


def areal_table(pairs: dict[str, float], columns: int = 4) -> str:
    cells = [f" {key} │ {value:.4e} " for key, value in pairs.items()]
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    rows[-1] += ["  │  "] * (columns - len(rows[-1]))
    body = "├───┼───┤\n".join("│" + "│".join(row) + "│\n" for row in rows)
    return "╒═══╤═══╕\n" + body + "╘═══╧═══╛\n"


def areal_step(step: int, *tables: dict[str, float]) -> str:
    text = f"{HEAD}Epoch 1/2 Step {step}/23 Train step {step}/46 done.\n"
    for i, pairs in enumerate(tables):
        text += f"{HEAD}Stats ({i + 1}/{len(tables)}):\n{HEAD}\n{areal_table(pairs)}"
    return text


def pairs(step: int, n: int = 10) -> dict[str, float]:
    return {f"ppo_actor/k{i}/avg": step + i / 8 for i in range(n)}


def test_areal_tables(tmp_path: Path) -> None:
    text = areal_table({"rollout/before": 9}) + "".join(areal_step(s, pairs(s)) for s in range(1, 5))
    text += areal_table({"rollout/eval": 9}) + areal_step(5, {"a/nan": math.nan, "a/inf": math.inf})
    parsed = one(tmp_path / "main.log", text)
    assert parsed.format == "areal_console"
    values = table(parsed)
    assert {(k, s): values[k, s] for k, s in values if k[0] == "p"} == {
        (k, s - 1): v for s in range(1, 5) for k, v in pairs(s).items()
    }
    assert (kinds(parsed)["a/nan", 4], values["a/inf", 4]) == ("nan", math.inf)
    assert not any(key.startswith("rollout/") for key, _ in values)
    assert kinds(parsed)["ppo_actor/k0/avg", 0] == "rounded"
    assert problem_kinds(parsed) == ["few_digits"]


def test_areal_tables_of_one_step_are_tracker_steps(tmp_path: Path) -> None:
    text = areal_step(1, {"a/x": 1}, {"a/x": 2}) + areal_step(2, {"a/x": 3}) + areal_step(1, {"a/x": 4})
    parsed = one(tmp_path / "main.log", text)
    assert list(zip(parsed.metrics.segment, parsed.metrics.step, parsed.metrics.value, strict=True)) == [
        (0, 0, 1.0),
        (0, 1, 2.0),
        (0, 2, 3.0),
        (1, 0, 4.0),
    ]


def test_areal_torn_and_unplaced(tmp_path: Path) -> None:
    lost = areal_step(2, {"a/x": 2}).split("\n", 1)[1]
    text = areal_step(1, {"a/x": 1}) + lost + areal_step(3, {"a/x": 3, "a/y": 4})
    text = text[: text.rindex("4.0000e+00") + 3]
    parsed = one(tmp_path / "main.log", text)
    assert table(parsed) == {("a/x", 0): 1.0, ("a/x", 2): 3.0}
    assert sorted(problem_kinds(parsed)) == ["few_digits", "torn_line", "unplaced_table"]


def test_areal_rows_of_a_table_without_its_head(tmp_path: Path) -> None:
    text = areal_step(1, {"a/x": 1, "a/y": 2}).rsplit("╘", 1)[0] + "│ a/x │ 7.0000e+00 │ a/z │ 8.0000e+00 │\n"
    parsed = one(tmp_path / "main.log", text)
    assert table(parsed) == {("a/x", 0): 1.0, ("a/y", 0): 2.0}
    assert "doubtful_table" in problem_kinds(parsed)
