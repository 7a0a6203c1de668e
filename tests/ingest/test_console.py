from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.ingest.writers import PUBLIC_LOGS, REAL_RUNS, kinds, problem_kinds, table
from verl_audit.ingest import console
from verl_audit.ingest.model import Event, Parsed

RAY = "\x1b[36m(TaskRunner pid=1)\x1b[0m "
BAR = "Training Progress:  16%|█▋        | 71/435 [1:10:40<6:31:06, 64.47s/it]"

public = pytest.mark.skipif(not PUBLIC_LOGS.exists(), reason="public logs are not here")
real = pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")


def parse(text: str | bytes) -> Parsed:
    return console.read_bytes(text.encode() if isinstance(text, str) else text, Path("console.log"))


def events(parsed: Parsed, kind: str) -> list[Event]:
    return [e for e in parsed.events if e.kind == kind]


@public
@pytest.mark.parametrize(
    ("name", "records", "values"),
    [
        ("verl_logicrl_m950nfkl_output.log", 10, 433),
        ("verl_logicrl_wntzruuo_output.log", 2, 49),
        ("verl_alignx_pdb_session.log", 0, 0),
        ("verl_maze_crash_at_start.log", 0, 0),
    ],
)
def test_public_logs(name: str, records: int, values: int) -> None:
    (parsed,) = console.read(PUBLIC_LOGS / name)
    assert (parsed.metrics.records, len(parsed.metrics)) == (records, values)
    assert not parsed.problems
    assert set(kinds(parsed).values()) <= {"rounded"}


@public
def test_crash_at_start_leaves_its_config_and_its_exception() -> None:
    (parsed,) = console.read(PUBLIC_LOGS / "verl_maze_crash_at_start.log")
    assert parsed.configs[0].tree["data"]["train_batch_size"] == 256
    assert (parsed.identity.project, parsed.identity.experiment) == ("verl_examples", "gsm8k")
    (crash,) = events(parsed, "traceback")
    detail = json.loads(crash.detail)
    assert detail["exception"] == "NotImplementedError"
    assert detail["ignored"] is False
    assert detail["frames"][-1].endswith("in _default_compute_score")
    raw = (PUBLIC_LOGS / "verl_maze_crash_at_start.log").read_bytes()
    assert raw[crash.offset :].startswith(b"Traceback")


@real
@pytest.mark.parametrize(
    ("run", "records", "values", "total"),
    [
        ("sync_baseline", 61, 5497, 60),
        ("async_mild", 51, 4608, 50),
        ("async_drop_bias", 61, 5642, 60),
        ("fp8_mismatch", 41, 3669, 40),
    ],
)
def test_real_runs(run: str, records: int, values: int, total: int) -> None:
    (parsed,) = console.read(REAL_RUNS / run / "console.log")
    assert (parsed.metrics.records, len(parsed.metrics)) == (records, values)
    assert not parsed.problems
    assert set(kinds(parsed).values()) == {"finite"}
    assert (parsed.identity.project, parsed.identity.experiment) == ("toy_map", run)
    assert parsed.configs[0].tree["trainer"]["total_training_steps"] == total
    assert parsed.configs[0].tree["actor_rollout_ref"]["rollout"]["name"] == "cpu_hf"
    (progress,) = events(parsed, "progress")
    assert (progress.detail, progress.step) == (f"{total}/{total}", total)
    (ignored,) = events(parsed, "traceback")
    assert json.loads(ignored.detail)["ignored"] is True
    assert json.loads(ignored.detail)["exception"] == "ConnectionResetError: Connection lost"


@real
@pytest.mark.parametrize("run", ["sync_baseline", "async_mild", "async_drop_bias", "fp8_mismatch"])
def test_printed_validation_equals_the_step_lines(run: str) -> None:
    (parsed,) = console.read(REAL_RUNS / run / "console.log")
    values = table(parsed)
    first, last = (json.loads(e.detail) for e in events(parsed, "validation_text"))
    assert (first["when"], last["when"]) == ("Initial", "Final")
    assert len(first["metrics"]) >= 10
    assert all(values[key, 0] == value for key, value in first["metrics"].items())
    final_step = max(step for _, step in values)
    assert all(values[key, final_step] == value for key, value in last["metrics"].items())


@real
def test_crash_before_the_first_step() -> None:
    (parsed,) = console.read(REAL_RUNS / "crash_hybrid_off" / "console.log")
    assert parsed.metrics.records == 0
    (crash,) = events(parsed, "traceback")
    assert json.loads(crash.detail)["exception"].startswith("TypeError: Logger._log()")
    assert "Total training steps: 2" in [e.detail for e in events(parsed, "announce")]


@real
def test_several_runs_in_one_console_are_segments() -> None:
    (parsed,) = console.read(REAL_RUNS / "mismatch_probe" / "console.log")
    assert set(parsed.metrics.segment) == set(range(5))
    assert {"finite", "nan", "inf"} == set(kinds(parsed).values())
    announced = [e.detail for e in events(parsed, "announce")]
    assert sum(a.startswith("Creating file logger at ") for a in announced) == 5


def test_global_step_is_a_key_and_not_a_second_record() -> None:
    parsed = parse("step:71 - training/global_step:71 - training/epoch:2\n")
    assert parsed.metrics.records == 1
    assert table(parsed) == {("training/global_step", 71): 71.0, ("training/epoch", 71): 2.0}


@pytest.mark.parametrize(
    "before",
    [
        "",
        RAY,
        "\x1b[2m\x1b[36m(main_task pid=7, ip=10.0.0.2)\x1b[0m ",
        BAR,
        RAY + BAR,
        RAY + "\r" + BAR + "\r" + RAY,
        BAR + RAY,
        "(pid=2673336) ",
        "(VGNd5CWorkerDict_0:0 WorkerDict pid=65860) ",
        "0: ",
        "[default0]:",
        "[rank0]: ",
        "2025-03-10T22:25:38.529Z ",
        "2025-03-10T22:25:38.529123456Z stdout F ",
        "trainer-1  | ",
        "\0\0\0\0",
        RAY + "Dumped generations to /data/run/rollout_data/5.jsonl",
        "35/35 [00:10<00:00]".join(["Loading:  98%|██▉| ", " "]),
    ],
)
def test_known_prefixes(before: str) -> None:
    parsed = parse(f"some line\n{before}step:5 - a/b:1.0\nother\n")
    assert table(parsed) == {("a/b", 5): 1.0}
    assert not parsed.problems


def test_numbers_as_python_prints_them() -> None:
    line = "a/x:np.float64(nan) - a/y:np.float32(1e-05) - a/z:np.int64(3) - a/t:True - a/f:False - a/j:-inf"
    values = table(parse(f"step:3 - {line} - a/i:7 - a/e:-1.5e+22\n"))
    assert math.isnan(values.pop(("a/x", 3)))
    assert {k: v for (k, _), v in values.items()} == {
        "a/y": 1e-05,
        "a/z": 3.0,
        "a/t": 1.0,
        "a/f": 0.0,
        "a/j": -math.inf,
        "a/i": 7.0,
        "a/e": -1.5e22,
    }


@pytest.mark.parametrize(
    "text",
    [
        "Let me compute. step:1 - multiply:2 - add:3",
        "step:1 - multiply:2",
        "Let me see: step:1 - a/b:2",
        "step:1 - first we go over the a/b road: then - left",
        "step:1 - km/h",
        "step:99999999999999999999 - a/b:1",
        "step:1.5 - a/b:1",
        "substep:1 - a/b:1",
        "(TaskRunner pid=1) answer step:4 - a/b:1",
    ],
)
def test_model_text_is_no_metric(text: str) -> None:
    assert parse(text + "\n").metrics.records == 0


def test_last_value_of_an_open_line_is_unsure() -> None:
    parsed = parse("step:9 - a/pg:0.1 - actor/grad_norm:12")
    assert table(parsed) == {("a/pg", 9): 0.1}
    assert (parsed.values_lost, problem_kinds(parsed)) == (1, ["torn_line"])


def test_an_open_line_with_one_value_is_counted() -> None:
    parsed = parse("step:9 - a/pg:0.1")
    assert parsed.metrics.records == 0
    assert (parsed.values_lost, problem_kinds(parsed)) == (1, ["torn_line"])


def test_absurd_numbers_do_not_stop_the_reader() -> None:
    digits = "9" * 6000
    parsed = parse(f"step:{digits} - a/b:1\nTraining Progress: 1%|█| {digits}/{digits} [\nstep:1 - a/b:{digits}\n")
    assert table(parsed) == {("a/b", 1): math.inf}


def test_many_tracebacks_in_sampled_code() -> None:
    text = "".join(f"Traceback (most recent call last):\n  File 'x', line {i}\nValueError: {i}\n" for i in range(150))
    found = events(parse(text), "traceback")
    assert len(found) == 101
    assert json.loads(found[-1].detail)["exception"] == "ValueError: 149"


def test_carriage_return_ends_a_line() -> None:
    assert table(parse("step:9 - a/pg:0.1\r\n")) == {("a/pg", 9): 0.1}
    assert table(parse("step:9 - a/pg:0.1\rnext")) == {("a/pg", 9): 0.1}


def test_a_line_left_open_by_a_killed_run_and_continued_by_the_next() -> None:
    for glue in ("", RAY, BAR):
        parsed = parse(f"step:9 - a/pg:0.1 - a/g:12{glue}step:10 - a/pg:0.3\n")
        assert table(parsed) == {("a/pg", 9): 0.1, ("a/pg", 10): 0.3}, glue
        assert parsed.values_lost == 1


def test_a_line_cut_inside_a_key_and_continued() -> None:
    parsed = parse(f"step:9 - a/pg:0.1 - a/gr{RAY}step:10 - a/pg:0.3\n")
    assert table(parsed) == {("a/pg", 9): 0.1, ("a/pg", 10): 0.3}
    parsed = parse("step:9 - a/pg:0.1 - a/grstep:10 - a/pg:0.3\n")
    assert table(parsed) == {}
    assert problem_kinds(parsed) == ["doubtful_line"]


def test_progress_bar_glued_behind_a_value_makes_it_unsure() -> None:
    parsed = parse(f"step:9 - a/pg:0.1 - a/g:12{BAR}\n")
    assert table(parsed) == {("a/pg", 9): 0.1}
    assert parsed.values_lost == 1


def test_repeat_mark_and_other_prints_behind_a_line() -> None:
    repeated = "[repeated 2x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to ...)"
    lines = [
        f"step:1 - a/b:0.5 {repeated}",
        "step:2 - a/b:0.5Dumped generations to /d/2.jsonl",
        f"step:3 - a/b:0.5 {repeated[:28]}",
    ]
    text = "\n".join(lines) + "\n"
    assert table(parse(text)) == {("a/b", 1): 0.5, ("a/b", 2): 0.5, ("a/b", 3): 0.5}


def test_keys_with_colons_and_separators() -> None:
    line = "val-core/math:level5/acc/mean@1:0.5 - train/lr(1e-3):0.002 - val/set - two/acc:0.25"
    assert table(parse(f"step:1 - {line}\n")) == {
        ("val-core/math:level5/acc/mean@1", 1): 0.5,
        ("train/lr(1e-3)", 1): 0.002,
        ("val/set - two/acc", 1): 0.25,
    }


@pytest.mark.parametrize("value", ["1,234", "1_000", "2.", "np.float64(0.5", "0.5)", "0x10", "infinity", "", "1 2"])
def test_what_python_would_not_print_is_refused(value: str) -> None:
    parsed = parse(f"step:1 - a/ok:1.5 - a/b:{value} - a/c:2.5\n")
    assert table(parsed) == {("a/ok", 1): 1.5, ("a/c", 1): 2.5}
    assert (problem_kinds(parsed), parsed.values_lost) == (["unreadable_value"], 1)


def test_a_line_that_is_mostly_text_is_reported_and_not_stored() -> None:
    parsed = parse("step:1 - the a/b:2 - and then: more - of this: text - goes on: here\n")
    assert parsed.metrics.records == 0
    assert problem_kinds(parsed) == ["doubtful_line"]


def test_two_lines_of_one_step_keep_both_sets_of_keys() -> None:
    parsed = parse("step:0 - test_score/openai/gsm8k:0.521\nstep:0 - timing/gen:1.5\n")
    assert table(parsed) == {("test_score/openai/gsm8k", 0): 0.521, ("timing/gen", 0): 1.5}
    assert list(parsed.metrics.record) == [0, 1]
    assert set(parsed.metrics.segment) == {0}


def test_a_hole_of_zero_bytes_ends_what_is_believed_of_a_line() -> None:
    parsed = parse(b"step:1 - a/b:1.5 - a/c:2\0\0\0\0\0 - a/d:3.5\nstep:2 - a/b:1.0\n")
    assert table(parsed) == {("a/b", 1): 1.5, ("a/b", 2): 1.0}
    assert (problem_kinds(parsed), parsed.values_lost) == (["nul_bytes"], 2)


def test_a_falling_step_starts_a_segment() -> None:
    parsed = parse("".join(f"step:{s} - a/b:{s}.5\n" for s in (38, 39, 40, 31, 32)))
    assert list(parsed.metrics.segment) == [0, 0, 0, 1, 1]


def test_three_decimals_are_marked_rounded() -> None:
    old = parse("step:1 - actor/lr:0.000 - a/n:4127.000 - a/x:nan\n")
    assert kinds(old) == {("actor/lr", 1): "rounded", ("a/n", 1): "rounded", ("a/x", 1): "nan"}
    new = parse("step:1 - actor/lr:1e-06 - a/n:4127.0 - a/z:0.0\n")
    assert set(kinds(new).values()) == {"finite"}
    few = parse("step:1 - a/b:0.5 - a/c:1.0\n")
    assert set(kinds(few).values()) == {"finite"}


def test_progress_of_two_lives() -> None:
    bars = [f"\rTraining Progress:  1%|▏ | {n}/60 [00:06<06:50,  6.96s/it]" for n in (1, 2, 31, 0, 7)]
    found = events(parse(f"{RAY}{''.join(bars)}\n"), "progress")
    assert [(e.step, e.detail) for e in found] == [(31, "31/60"), (7, "7/60")]


def test_config_echo_with_other_lines_between() -> None:
    lines = [
        RAY + "{'actor_rollout_ref': ",
        RAY + "/opt/x.py:50: UserWarning: engine is not available: ModuleNotFoundError(\"No module '{'\")",
        RAY + '  warnings.warn(f"engine {e!r}", stacklevel=1)',
        "(WorkerDict pid=2)  'not': 'ours',",
        RAY + "{'actor': {'clip_ratio': 0.2,",
        RAY + "                                 'note': 'a { brace',",
        RAY + "                                 'limit': inf,",
        RAY + "                                 'files': ['a',",
        RAY + "                                           'b']}},",
        "step:1 - a/b:1.5",
        RAY + " 'trainer': {'experiment_name': 'e', 'project_name': 'p'}}",
        RAY + "Using dataset class: RLHFDataset",
    ]
    parsed = parse("\n".join(lines) + "\n")
    (config,) = parsed.configs
    assert config.tree["actor_rollout_ref"]["actor"] == {
        "clip_ratio": 0.2,
        "note": "a { brace",
        "limit": math.inf,
        "files": ["a", "b"],
    }
    assert (parsed.identity.project, parsed.identity.experiment) == ("p", "e")
    assert parsed.metrics.records == 1


def test_config_echo_with_another_process_glued_to_a_line() -> None:
    lines = [
        "(main_task pid=1) {'actor_rollout_ref': {'actor': 1},",
        "(main_task pid=1)  'trainer': {'experiment_name': 'e',(x_0:0 WorkerDict pid=2) Flash Attention 'x' {",
        "(main_task pid=1)              'project_name': 'p'}}",
    ]
    parsed = parse("\n".join(lines) + "\n")
    assert (parsed.identity.project, parsed.identity.experiment) == ("p", "e")


def test_config_echo_cut_off_is_a_problem() -> None:
    parsed = parse(RAY + "{'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,\n")
    assert not parsed.configs
    assert problem_kinds(parsed) == ["config_unreadable"]


def test_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    (parsed,) = console.read(tmp_path / "missing.log")
    assert problem_kinds(parsed) == ["unreadable"]


def _echo(experiment: str) -> str:
    return f"{{'actor_rollout_ref': {{}},\n 'trainer': {{'project_name': 'p', 'experiment_name': '{experiment}'}}}}\n"


def test_a_configuration_of_another_name_starts_another_run(tmp_path: Path) -> None:
    log = tmp_path / "both.log"
    first, second = "step:1 - a/b:0.25\nstep:2 - a/b:0.5\n", "step:1 - a/b:0.75\n"
    log.write_text(_echo("one") + first + _echo("two") + second)
    one, two = console.read(log)
    assert [p.identity.experiment for p in (one, two)] == ["one", "two"]
    assert [list(p.metrics.value) for p in (one, two)] == [[0.25, 0.5], [0.75]]
    assert one.bytes_read + two.bytes_read == log.stat().st_size


def test_the_same_configuration_again_is_a_restart_of_one_run(tmp_path: Path) -> None:
    log = tmp_path / "resumed.log"
    log.write_text(_echo("one") + "step:5 - a/b:0.25\n" + _echo("one") + "step:4 - a/b:0.5\n")
    (only,) = console.read(log)
    assert list(only.metrics.segment) == [0, 1]
    assert only.identity.experiment == "one"
