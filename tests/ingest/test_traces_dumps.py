"""Dumps of other tools, mapped onto the trace schema."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ingest.writers import REAL_RUNS
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all
from verl_audit.ingest.traces import TraceSource, batches, scalars, settled

FIXTURE = Path(__file__).parents[2] / "fixtures/traces/async_drop_bias/trajectory_trace.jsonl"
Rows = list[dict[str, Any]]


def found(root: Path) -> tuple[list[TraceSource], dict[str, int]]:
    """The trace sources below a path, and the problems of their readers."""
    parsed = [p for p in read_all(discover([root])) if p.traces]
    return [t for p in parsed for t in p.traces], {q.kind: q.count for p in parsed for q in p.problems}


def rows_of(source: TraceSource) -> Rows:
    """Scalars of a source; its batches hold the same rows, and the lists."""
    rows: Rows = scalars(source).to_pylist()
    tokens = [row for batch in batches(source) for row in batch.to_pylist()]
    assert [{k: t[k] for k in r} for t, r in zip(tokens, rows, strict=True)] == rows
    return tokens


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- events of the recording replay buffer -------------------------------------------------------------------------


def fates(table: pa.Table) -> dict[str, tuple[int, int, float | None]]:
    """Per fate: trajectories, groups, mean response length."""
    rows, made = table.to_pylist(), {}
    for fate in {r["fate"] for r in rows}:
        own = [r for r in rows if r["fate"] == fate]
        lengths = [r["response_length"] for r in own if r["response_length"] is not None]
        known = sum(r["session"] is not None for r in own)
        made[fate] = (known, len({r["group"] for r in own}), sum(lengths) / len(lengths) if lengths else None)
    return made


REAL: dict[str, dict[str, tuple[int, int, float | None]]] = {
    "async_drop_bias": {"trained": (3840, 960, 10.9135), "stale": (560, 140, 17.7214)},
    "rb_drop": {"trained": (1920, 480, 67.2406), "stale": (924, 231, 97.5422), "failed": (0, 13, None)},
    "rb_wait": {"trained": (1920, 480, 76.7615)},
    "rb_dapo": {"trained": (960, 240, 71.3490), "filtered": (604, 151, 52.6987), "failed": (0, 5, None)},
}


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
@pytest.mark.parametrize("name", REAL)
def test_real_runs_keep_their_count(name: str) -> None:
    sources, problems = found(REAL_RUNS / name)
    notes = Parsed(REAL_RUNS / name, "trace")
    parts = settled(sources, lambda source: notes)
    assert [p.source.format for p in parts] == ["recorder", "recorder"]  # rollout_data says less of the same rows
    got = fates(parts[0].table)
    assert got.keys() == REAL[name].keys()
    for fate, (trajectories, groups, length) in REAL[name].items():
        assert got[fate] == (trajectories, groups, length if length is None else pytest.approx(length, abs=1e-4))
    assert parts[0].source.version_offset == 0
    assert not problems
    assert not notes.problems


def test_events_become_rows() -> None:
    (trajectories, buffer), problems = found(FIXTURE)
    rows = rows_of(trajectories)
    assert Counter(r["fate"] for r in rows) == {"trained": 320, "stale": 32}
    first = rows[0]
    assert (first["group"], first["session"], first["turn"]) == ("b95d4c6f-b3f8-4d42-b650-7f80487e2b27", 1, 0)
    assert (first["decided_step"], first["train_version"], first["submit_version"]) == (1, 0, 0)
    stale = next(r for r in rows if r["fate"] == "stale")
    assert (stale["train_version"], stale["decided_step"], stale["submit_step"]) == (None, 5, 2)
    assert stale["decided_step"] - stale["submit_step"] + 1 == 4  # prompt age, above the threshold of 3
    (state, *_) = scalars(buffer).to_pylist()
    assert (state["step"], state["running"], state["finished"], state["wait_s"]) == (1, 31, 1, 3.219)
    assert trajectories.fates is not None
    assert not problems


def test_events_of_hostile_values_are_rows_without_them(tmp_path: Path) -> None:
    event = {"event": "sample", "step": 2, "key": "u_0_0", "response_len": 3, "t": 1.7e9}
    rows = [
        event | {"key": "u_x_0", "step": 1 << 40, "response_len": "many"},
        event | {"key": None},
        event | {"key": "pad_0_0"},
        event | {"key": "v_1_0", "reward": math.nan, "min_global_steps": -1, "t": -5},
        {"event": "evict_group", "uid": "w", "n_traj": 0, "reason": "failed", "step": 2},
        {"event": "evict", "key": "x_0_0", "reason": "whim", "step": 2},
    ]
    path = lines(tmp_path / "trace.jsonl", rows)
    path.write_bytes(path.read_bytes() + b'{"event": "sam')
    (source,), problems = found(tmp_path)
    notes = Parsed(tmp_path, "trace")
    got = scalars(source, notes).to_pylist()
    assert [(r["group"], r["session"], r["fate"]) for r in got] == [
        ("u_x_0", None, "trained"),
        ("v", 1, "trained"),
        ("w", None, "failed"),
        ("x", 0, "unknown"),
    ]
    assert [r["decided_step"] for r in got] == [None, 2, 2, 2]
    assert (got[1]["reward"], got[1]["first_version"], got[1]["t_decided"]) == (None, None, None)
    assert problems == {"torn_line": 1}
    assert {p.kind for p in notes.problems} == {"trace_group", "trace_nonfinite", "trace_negative", "trace_counts"}


# --- verl's rollout_data -------------------------------------------------------------------------------------------


def test_a_dump_of_verl_has_no_lengths_in_tokens(tmp_path: Path) -> None:
    first = [{"input": "a", "output": "x", "score": 1.0, "step": 1, "uid": f"u_{i}_0"} for i in (0, 1)]
    first.append({"input": "", "output": "", "score": 0, "step": 1, "uid": "pad_0_0"})
    lines(tmp_path / "rollout_data/1.jsonl", first)
    lines(tmp_path / "rollout_data/2.jsonl", [{"input": "a", "output": "x", "score": "0.5"}] * 2)
    lines(tmp_path / "val_data/1.jsonl", [{"input": "a", "output": "x", "score": 1.0, "reward": 1.0}])
    (source,), _ = found(tmp_path)
    rows = rows_of(source)
    assert source.fates == ("trained",)
    assert [(r["group"][:2], r["session"], r["decided_step"], r["reward"]) for r in rows] == [
        ("u", 0, 1, 1.0),
        ("u", 1, 1, 1.0),
        ("2:", 0, 2, 0.5),
        ("2:", 1, 2, 0.5),
    ]
    assert {r["response_length"] for r in rows} == {None}
    assert {r["last_version"] for r in rows} == {None}
    assert len({r["prompt_key"] for r in rows}) == 1
    assert "a" not in {r["prompt_key"] for r in rows}


# --- NeMo-RL -------------------------------------------------------------------------------------------------------


def nemo(index: int, prompt: list[int], reply: list[int], width: int = 8, **values: Any) -> dict[str, Any]:
    """A line as the logger writes it: batches of one, padded to the longest."""
    ids, size = prompt + reply, len(prompt) + len(reply)
    pad = [0] * (width - size)
    logs = [0.0] * len(prompt) + [-0.5 - i for i in range(len(reply))] + [0.0] * len(pad)
    return {
        "content": ["text"],
        "rewards": [1.0],
        "input_lengths": [size],
        "token_ids": [ids + pad],
        "token_loss_mask": [[0] * len(prompt) + [1] * len(reply) + pad],
        "sample_loss_mask": [1.0],
        "advantages": [[0.25] * width],
        "generation_logprobs": [logs],
        "prev_logprobs": [[v * 2 for v in logs]],
        "idx": index,
        **values,
    }


def test_train_data_of_nemo_rl_has_tokens(tmp_path: Path) -> None:
    rows = [nemo(0, [5, 6], [7, 8, 9]), nemo(1, [5, 6], [7]), nemo(2, [1], [2, 3], sample_loss_mask=[0.0])]
    lines(tmp_path / "train_data_step10.jsonl", rows)
    lines(tmp_path / "train_data_step2.jsonl", [nemo(0, [5, 6], [7])])
    lines(tmp_path / "val_data_step2.jsonl", [{"content": "text", "rewards": 1.0}])
    sources, problems = found(tmp_path)
    assert [s.path.name for s in sources] == ["train_data_step2.jsonl", "train_data_step10.jsonl"]
    first, second, third = rows_of(sources[1])
    assert (first["prompt_length"], first["response_length"], first["loss_tokens"]) == (2, 3, 3)
    assert first["behave_logp"] == [-0.5, -1.5, -2.5]
    assert first["prox_logp"] == [-1.0, -3.0, -5.0]
    assert (first["decided_step"], first["train_version"], first["last_version"]) == (10, 9, None)
    assert first["advantage"] == 0.25
    assert [first["session"], second["session"]] == [0, 1]
    assert first["group"] == second["group"] != third["group"]
    assert (third["loss_tokens"], third["loss_mask"], third["fate"]) == (0, [False, False], "trained")
    assert rows_of(sources[0])[0]["prompt_key"] == first["prompt_key"]
    assert not problems


def test_a_mask_shorter_than_the_tokens_of_nemo_rl_tells_no_length(tmp_path: Path) -> None:
    lines(tmp_path / "train_data_step1.jsonl", [nemo(0, [5], [7, 8], token_loss_mask=[[0]]), nemo(1, [5], [7])])
    (source,), _ = found(tmp_path)
    notes = Parsed(tmp_path, "trace")
    assert [r["response_length"] for r in scalars(source, notes).to_pylist()] == [None, 1]
    assert "trace_lengths" in {p.kind for p in notes.problems}


# --- prime-rl ------------------------------------------------------------------------------------------------------


def node(parent: int | None, ids: list[int], sampled: list[float] | None = None) -> dict[str, Any]:
    """A message; `sampled` are the log-probs of its last tokens."""
    count = len(sampled or [])
    return {
        "parent": parent,
        "sampled": sampled is not None,
        "token_ids": ids,
        "mask": [False] * (len(ids) - count) + [True] * count,
        "logprobs": sampled or [],
    }


def episode(name: str, group: str, start: int, end: int, *, ok: bool = True, nodes: Rows | None = None) -> Rows:
    trace = {
        "id": f"t-{name}",
        "ok": ok,
        "nodes": [node(None, [1, 2]), node(0, [3, 4, 5], [-0.5, -1.0])] if nodes is None else nodes,
        "rewards": {"exact": {"value": 0.5}, "form": {"value": 0.25}},
        "timing": {"start": 1.7e9},
    }
    work = {"type": "train", "step": start + 1, "policy": {"start": start, "end": end}}
    return [
        {"id": name, "group": {"id": group}, "task": {"q": group}, "ok": ok, "run": {"work": work}, "traces": [trace]}
    ]


def test_episodes_of_prime_rl(tmp_path: Path) -> None:
    kept, late, lost = episode("e1", "a", 0, 0), episode("e2", "a", 0, 1), episode("e3", "b", 0, 1)
    broken = episode("e4", "b", 0, 1, ok=False)
    root = tmp_path / "run/rollouts"
    lines(root / "step_1/train/effective/traces.jsonl", kept)
    lines(root / "step_1/train/all/traces.jsonl", [*kept, *late, *lost])
    lines(root / "step_2/train/effective/traces.jsonl", late)
    lines(
        root / "step_2/train/all/traces.jsonl", [*broken, {"id": "e5", "group": {"id": "c"}, "ok": False, "traces": []}]
    )
    lines(root / "step_2/eval/all/traces.jsonl", kept)
    (source,), problems = found(tmp_path)
    assert source.path == root
    rows = rows_of(source)
    got = [
        (r["group"], r["session"], r["fate"], r["decided_step"], r["train_version"], r["last_version"]) for r in rows
    ]
    assert got == [
        ("a", 0, "trained", 1, 0, 0),
        ("b", 0, "unknown", None, None, 1),
        ("a", 1, "trained", 2, 1, 1),
        ("b", 1, "failed", None, None, 1),
        ("c", None, "failed", None, None, None),
    ]
    first = rows[0]
    assert (first["prompt_length"], first["response_length"], first["loss_tokens"], first["reward"]) == (3, 2, 2, 0.75)
    assert dict(first["reward_parts"]) == {"exact": 0.5, "form": 0.25}
    assert first["behave_logp"] == [-0.5, -1.0]
    assert first["loss_mask"] == [True, True]
    assert not problems


def test_each_path_of_a_tree_is_one_turn_and_tool_output_is_no_loss(tmp_path: Path) -> None:
    nodes = [node(None, [1]), node(0, [2], [-1.0]), node(1, [3, 4]), node(2, [5], [-2.0]), node(1, [6], [-3.0])]
    lines(tmp_path / "rollouts/step_1/train/effective/traces.jsonl", episode("e", "a", 0, 0, nodes=nodes))
    (source,), _ = found(tmp_path)
    long, short = rows_of(source)
    assert (long["turn"], long["response_length"], long["turns"]) == (0, 4, 2)
    assert long["loss_mask"] == [True, False, False, True]
    assert long["behave_logp"] == [-1.0, 0.0, 0.0, -2.0]
    assert (short["turn"], short["behave_logp"]) == (1, [-1.0, -3.0])


def test_token_exports_are_joined_where_the_tokens_are_the_same(tmp_path: Path) -> None:
    other = episode("e2", "b", 0, 0, nodes=[node(None, [9]), node(0, [8], [-4.0])])
    lines(tmp_path / "rollouts/step_1/train/effective/traces.jsonl", [*episode("e1", "a", 0, 0), *other])
    export = {"token_ids": [1, 2, 3, 4, 5], "loss_mask": [False] * 3 + [True, True], "step": 1}
    logs = {"inference_logprobs": [0, 0, 0, -0.5, -1.0], "trainer_logprobs": [-9.0, -9.0, -9.0, -0.75, None]}
    lines(tmp_path / "token_exports/step_1/rank_0.jsonl", [export | logs])
    (source,), _ = found(tmp_path)
    assert source.has_log_probs == ("behave_logp", "theta_logp")
    first, second = (r for b in batches(source) for r in b.to_pylist())
    assert first["behave_logp"] == [-0.5, -1.0]
    assert first["theta_logp"] is None  # null stands for a NaN or an infinity
    assert second["theta_logp"] is None
    lines(
        tmp_path / "token_exports/step_1/rank_0.jsonl", [export | logs | {"trainer_logprobs": [0, 0, 0, -0.75, -2.0]}]
    )
    first, second = (r for b in batches(source) for r in b.to_pylist())
    assert first["theta_logp"] == [-0.75, -2.0]


# --- AReaL ---------------------------------------------------------------------------------------------------------


def test_a_dump_of_areal_is_joined_with_its_sessions(tmp_path: Path) -> None:
    def sample(task: int, index: int, version: int) -> dict[str, Any]:
        lengths = {"seqlen": 10 + index, "prompt_len": 4, "head_version": -1, "tail_version": version}
        return {"task_id": task, "sample_idx": index, **lengths, "reward": 0.5, "prompt": "secret", "completion": "x"}

    def session(task: int, number: int, status: str, rank: int = 0, **more: Any) -> dict[str, Any]:
        return {"task_id": task, "session_id": number, "rank": rank, "status": status, "submit_ts": 1.7e9, **more}

    logs = tmp_path / "logs/me/exp/trial"
    lines(logs / "rollout/3/7.jsonl", [sample(7, 0, 3), sample(7, 1, 3)])
    lines(logs / "rollout/12/8.jsonl", [sample(8, 0, 12)])
    lines(logs / "rollout/4/9.jsonl", [sample(9, 0, 4)])
    phases = {"generate": [{"start_ts": 1.7e9, "end_ts": 1.7e9 + 5}]}
    sessions = [
        session(7, 1, "accepted", finalized_ts=1.7e9 + 9),
        session(7, 0, "accepted", phases=phases),
        session(8, 2, "rejected", reason="rejected", finalized_ts=1.7e9 + 9),
        session(10, 3, "failed", reason="workflow_exception"),
        session(9, 4, "accepted"),
    ]
    lines(logs / "session_tracer/rollout/sessions-r0.jsonl", sessions)
    lines(logs / "session_tracer/rollout/sessions-r1.jsonl", [session(9, 0, "rejected", rank=1)])
    (source,), problems = found(tmp_path)
    rows = rows_of(source)
    got = [
        (r["group"], r["session"], r["fate"], r["response_length"], r["last_version"], r["first_version"]) for r in rows
    ]
    assert got == [
        ("7", 0, "trained", 6, 3, None),
        ("7", 1, "trained", 7, 3, None),
        ("9", 0, "unknown", 6, 4, None),
        ("8", 0, "filtered", 6, 12, None),
        ("10", 0, "failed", None, None, None),
    ]
    assert rows[0]["t_done"].timestamp() == 1.7e9 + 5
    assert rows[1]["t_enqueue"].timestamp() == 1.7e9 + 9
    assert rows[3]["t_decided"].timestamp() == 1.7e9 + 9
    notes = Parsed(tmp_path, "trace")
    scalars(source, notes)
    assert {p.kind for p in notes.problems} == {"trace_sessions", "trace_counts"}
    assert not problems


def test_a_dump_of_areal_without_sessions_knows_no_fate(tmp_path: Path) -> None:
    lines(
        tmp_path / "rollout/3/7.jsonl",
        [{"task_id": 7, "sample_idx": 0, "seqlen": 9, "prompt_len": 4, "tail_version": 3}],
    )
    (source,), _ = found(tmp_path)
    assert [r["fate"] for r in rows_of(source)] == ["unknown"]
    assert source.fates == ("unknown",)


# --- all -----------------------------------------------------------------------------------------------------------

NAMES = (
    "trajectory_trace.jsonl",
    "rollout_data/1.jsonl",
    "train_data_step1.jsonl",
    "rollouts/step_1/train/effective/traces.jsonl",
    "rollout/3/7.jsonl",
)
KEYS = [
    *("event", "key", "step", "uid", "n_traj", "reason", "response_len", "t", "reward", "input", "output", "score"),
    *(
        "token_ids",
        "input_lengths",
        "token_loss_mask",
        "advantages",
        "generation_logprobs",
        "rewards",
        "traces",
        "nodes",
    ),
    *("id", "group", "ok", "run", "mask", "parent", "logprobs", "task_id", "seqlen", "prompt_len", "tail_version"),
]
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["sample", "evict", "a_1_2", "\ud800"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES), drawn=st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8), max_size=4)
)
def test_no_line_of_a_dump_is_a_crash(tmp_path: Path, name: str, drawn: Rows) -> None:
    base = {"event": "sample", "key": "u_0_0", "input": "a"}
    path = lines(tmp_path / "fuzz" / name, [base, *(base | row for row in drawn)])
    parsed = [p for p in read_all(discover([tmp_path / "fuzz"])) if p.traces]
    assert parsed
    assert not [q for p in parsed for q in p.problems if q.kind == "reader_crashed"]
    for source in (t for p in parsed for t in p.traces):
        notes = Parsed(path, "trace")
        list(batches(source, notes))
        scalars(source, notes)
        assert not [q for q in notes.problems if q.kind == "trace_unreadable"]
    path.unlink()
