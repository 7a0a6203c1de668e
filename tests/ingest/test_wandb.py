from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.ingest.writers import (
    BLOCK,
    PUBLIC_LOGS,
    REAL_RUNS,
    blob,
    block_log,
    double_field,
    history,
    item,
    kinds,
    number_field,
    output_raw,
    problem_kinds,
    run_record,
    table,
    varint,
    wandb_row,
)
from verl_audit.ingest import console, tfevents, verl_jsonl, wandb
from verl_audit.ingest.model import Parsed

public = pytest.mark.skipif(not PUBLIC_LOGS.exists(), reason="public logs are not here")
real = pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")


def parse(tmp_path: Path, content: bytes) -> list[Parsed]:
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(content)
    return wandb.read(path)


@public
def test_complete_run_of_the_old_writer() -> None:
    history_of = wandb.read(PUBLIC_LOGS / "ppo_starpilot_lcoremr1.wandb")[0]
    assert history_of.metrics.records == 763
    assert len(history_of.metrics) == 9_919 - 3 * 763  # _step, _runtime and _timestamp are no metrics
    assert history_of.step_kind == "counter"
    assert [min(history_of.metrics.step), max(history_of.metrics.step)] == [0, 762]
    axis = [v for (k, _), v in table(history_of).items() if k == "global_step"]
    assert (min(axis), max(axis)) == (32_768, 25_001_984)
    assert history_of.identity.run_id == "lcoremr1"
    assert history_of.metrics.wall_time[0] == pytest.approx(1690024198.143)


@public
def test_event_file_of_the_same_run_agrees() -> None:
    history_of = wandb.read(PUBLIC_LOGS / "ppo_starpilot_lcoremr1.wandb")[0]
    (events,) = tfevents.read(PUBLIC_LOGS / "events.out.tfevents.1690024186.HOST.5294.0")
    m = history_of.metrics
    by_record: dict[int, dict[str, float]] = {}
    for key, record, value in zip(m.key_id, m.record, m.value, strict=True):
        by_record.setdefault(record, {})[m.keys[key]] = value
    ours = {int(row["global_step"]): row for row in by_record.values()}
    theirs = table(events)
    for tag in ("Loss/pi", "Rewards/mean_episodes"):
        points = {step: value for (key, step), value in theirs.items() if key == tag}
        assert len(points) == 763
        assert all(ours[step][tag] == value for step, value in points.items())


@public
def test_killed_run_has_no_history_but_a_config_and_a_printed_step() -> None:
    history_of, output = wandb.read(PUBLIC_LOGS / "verl_logicrl_wntzruuo_killed.wandb")
    assert history_of.metrics.records == 0
    assert problem_kinds(history_of) == ["torn_record"]
    assert history_of.identity.project == "meta-reasoning"
    assert history_of.configs[0].tree["data"]["train_files"] == "./data/kk/1/train.parquet"
    assert output.format == "wandb_output"
    assert output.identity == history_of.identity
    assert table(output) == {("val/test_score/logic_assignment", 0): 0.42}
    assert set(kinds(output).values()) == {"rounded"}


@public
def test_one_block_and_no_history() -> None:
    one = wandb.read(PUBLIC_LOGS / "verl_logicrl_68ph1l4m_one_block.wandb")
    assert [p.metrics.records for p in one] == [0]
    assert one[0].configs[0].tree["data"]["prompt_key"]
    complete = wandb.read(PUBLIC_LOGS / "nanogpt_18kjtmnl_no_history.wandb")
    assert complete[0].metrics.records == 0
    assert not complete[0].problems


@real
@pytest.mark.parametrize("run", ["sync_baseline", "async_drop_bias"])
def test_all_copies_of_a_run_agree(run: str) -> None:
    base = REAL_RUNS / run
    logged = table(verl_jsonl.read(next(base.glob("file_logger/*/*.jsonl")))[0])
    history_of, output = wandb.read(next(base.glob("wandb/*/*.wandb")))
    assert history_of.step_kind == "logged"
    assert table(history_of) == logged
    assert table(output) == logged
    assert table(console.read(base / "console.log")[0]) == logged
    points = table(tfevents.read(next(base.glob("tensorboard/*")))[0])
    assert points.keys() == logged.keys()
    assert all(math.isclose(points[key], logged[key], rel_tol=1e-6, abs_tol=1e-37) for key in logged)


@real
def test_non_finite_values_keep_their_kind() -> None:
    path = next((REAL_RUNS / "mismatch_probe/wandb").glob("*-kjhfisr2/*.wandb"))
    history_of = wandb.read(path)[0]
    assert {"nan", "inf", "finite"} == set(kinds(history_of).values())


def test_three_encodings_of_an_item(tmp_path: Path) -> None:
    typed = blob(2, b"a/x") + number_field(5, 5)  # sint64: zig-zag 5 is -3
    log = block_log(
        [
            history(1, [item("a/x", "-3", nested=False)]),
            history(2, [item("a/x", "-3")]),
            history(3, [typed]),
            history(4, [blob(2, b"a/x") + double_field(6, -3.0), blob(2, b"a/b") + number_field(4, 1)]),
            history(5, [item("n\0x", "2"), item("m", '{"y": 3, "z": {"w": 4.5}}', nested=False)]),
        ]
    )
    parsed = parse(tmp_path, log)[0]
    values = table(parsed)
    assert {step: v for (k, step), v in values.items() if k == "a/x"} == dict.fromkeys((1, 2, 3, 4), -3.0)
    assert values["a/b", 4] == 1.0
    assert (values["n.x", 5], values["m.y", 5], values["m.z.w", 5]) == (2.0, 3.0, 4.5)


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    items = [
        item("a/n", "NaN"),
        item("a/i", "-Infinity"),
        item("a/s", '"text"'),
        item("a/null", "null"),
        item("a/true", "true"),
        item("h\0_type", '"histogram"'),
        item("h\0bins", "[1, 2]"),
        item("h\0count", "3"),
        item("t", '{"_type": "table-file", "nrows": 3}', nested=False),
        item("_runtime", "3.5"),
        item("long/" + "k" * 200, "1" + "0" * 150),
    ]
    parsed = parse(tmp_path, block_log([history(7, items, timestamp=123.5)]))[0]
    assert set(table(parsed)) == {("a/n", 7), ("a/i", 7), ("a/true", 7), ("long/" + "k" * 200, 7)}
    assert math.isnan(table(parsed)["a/n", 7])
    assert table(parsed)["a/i", 7] == -math.inf
    assert set(parsed.metrics.wall_time) == {123.5}


def test_an_absent_step_is_zero(tmp_path: Path) -> None:
    parsed = parse(tmp_path, block_log([history(None, [item("a/x", "1")])]))[0]
    assert table(parsed) == {("a/x", 0): 1.0}


def test_config_and_identity(tmp_path: Path) -> None:
    config = {"trainer": {"n": 1}, "_wandb": {}, "lr": 1e-6}
    update = blob(5, blob(1, item("trainer\0extra", '"x"')))
    parsed = parse(tmp_path, block_log([run_record("abc", "proj", "exp", config), update]))[0]
    assert parsed.configs[0].tree == {"trainer": {"n": 1, "extra": "x"}, "lr": 1e-6}
    assert parsed.configs[0].origin == "wandb"
    identity = parsed.identity
    assert (identity.run_id, identity.project, identity.experiment) == ("abc", "proj", "exp")
    assert identity.started == 1_700_000_000.5


def test_another_step_axis_makes_the_step_a_counter(tmp_path: Path) -> None:
    same = parse(tmp_path, block_log([wandb_row(3, {"training/global_step": 3})]))[0]
    other = parse(tmp_path, block_log([wandb_row(3, {"global_step": 4096})]))[0]
    assert (same.step_kind, other.step_kind) == ("logged", "counter")


def test_console_text_arrives_in_pieces_of_two_streams(tmp_path: Path) -> None:
    pieces = ["step:1 - a/b:0.", "5 - a/c:1.5", "\nstep:2 - a/b:0.75 - a/c:2"]
    records = [output_raw(pieces[0]), output_raw("\rTraining Progress: ", stderr=True), output_raw(pieces[1])]
    parsed = parse(tmp_path, block_log([*records, output_raw(pieces[2])]))
    assert table(parsed[1]) == {("a/b", 1): 0.5, ("a/c", 1): 1.5, ("a/b", 2): 0.75}
    assert parsed[1].values_lost == 1


def test_console_text_across_a_gap_is_not_joined(tmp_path: Path) -> None:
    text = ["step:1 - a/b:0.5 - a/c:1", "2.5\nstep:2 - x/y:1.25 - a/b:3", "4.5 - a/c:7.5\nstep:3 - a/b:8.5\n"]
    log = bytearray(block_log([output_raw(t) for t in text]))
    log[log.index(b"x/y")] ^= 1
    parsed = parse(tmp_path, bytes(log))
    assert table(parsed[1]) == {("a/b", 1): 0.5, ("a/b", 3): 8.5}


def long_log(rows: int = 300) -> tuple[bytes, list[dict[str, float]]]:
    written = [{f"a/key_{k}": step + k / 128 for k in range(40)} for step in range(rows)]
    return block_log(wandb_row(step, row) for step, row in enumerate(written)), written


def rows_of(parsed: Parsed) -> set[int]:
    return set(parsed.metrics.step)


def test_one_flipped_byte_costs_one_row(tmp_path: Path) -> None:
    log, written = long_log()
    assert len(log) > 8 * BLOCK
    damaged = bytearray(log)
    damaged[len(log) // 2] ^= 0x10
    parsed = parse(tmp_path, bytes(damaged))[0]
    assert len(rows_of(parsed)) == len(written) - 1
    assert problem_kinds(parsed) == ["damaged_block"]
    assert all(written[step][key] == value for (key, step), value in table(parsed).items())


def test_a_hole_of_zeros_costs_its_blocks(tmp_path: Path) -> None:
    log, written = long_log()
    damaged = bytearray(log)
    start = 3 * BLOCK + 100
    damaged[start : start + 2 * BLOCK] = bytes(2 * BLOCK)
    parsed = parse(tmp_path, bytes(damaged))[0]
    per_block = len(written) * BLOCK / len(log)
    assert len(rows_of(parsed)) >= len(written) - 3 * per_block - 2
    assert "zeros" in problem_kinds(parsed) or "damaged_block" in problem_kinds(parsed)


@pytest.mark.parametrize("cut", [BLOCK, BLOCK + 3, 2 * BLOCK - 1, 3 * BLOCK + 500])
def test_cut_files_keep_what_is_whole(tmp_path: Path, cut: int) -> None:
    log, written = long_log()
    parsed = parse(tmp_path, log[:cut])[0]
    assert rows_of(parsed) == set(range(len(rows_of(parsed))))
    assert len(parsed.metrics) == 40 * len(rows_of(parsed))
    assert len(rows_of(parsed)) >= cut * len(written) // len(log) - 2
    assert problem_kinds(parsed) == ["torn_record"]


def test_zero_tail(tmp_path: Path) -> None:
    log, written = long_log()
    parsed = parse(tmp_path, log + bytes(100_000))[0]
    assert len(rows_of(parsed)) == len(written)
    assert problem_kinds(parsed) == ["zeros"]


@pytest.mark.parametrize(("content", "problems"), [(b"", 1), (b":W&B\xe1", 1), (b":W&B\xe1\xbe\x00", 0)])
def test_files_without_records(tmp_path: Path, content: bytes, problems: int) -> None:
    (parsed,) = parse(tmp_path, content)
    assert parsed.metrics.records == 0
    assert len(parsed.problems) == problems


def test_two_files_glued_together(tmp_path: Path) -> None:
    log, written = long_log(60)
    parsed = parse(tmp_path, log + log)[0]
    assert len(rows_of(parsed)) == len(written)
    assert parsed.problems


def test_a_record_that_is_no_protobuf_is_a_problem(tmp_path: Path) -> None:
    bad = varint(2 << 3 | 2) + varint(1000) + b"short"
    log = block_log([wandb_row(1, {"a/x": 1}), bad, wandb_row(2, {"a/x": 2})])
    parsed = parse(tmp_path, log)[0]
    assert table(parsed) == {("a/x", 1): 1.0, ("a/x", 2): 2.0}
    assert problem_kinds(parsed) == ["bad_record"]


def test_missing_file(tmp_path: Path) -> None:
    assert problem_kinds(wandb.read(tmp_path / "none.wandb")[0]) == ["unreadable"]
