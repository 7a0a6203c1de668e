"""The writer of traces: what it keeps, and that nothing that can happen to a disk reaches the job."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.record import TraceWriter
from verl_audit.record import sums as sums_module
from verl_audit.record.sums import log_prob_sums
from verl_audit.record.writer import KEY_DROPPED, Row
from verl_audit.trace import write as trace_write
from verl_audit.trace.schema import KEY_RUN, KEY_UPDATES, LOG_PROBS, SUMS


def row(group: str = "g", n: int = 4, **more: Any) -> dict[str, Any]:
    given = {"group": group, "session": 0, "fate": "trained", "reasons": ["trained"], "response_length": n}
    lists = {"behave_logp": np.full(n, -1.0, np.float32), "prox_logp": np.full(n, -1.5, np.float32)}
    return {**given, **lists, "loss_mask": np.ones(n, bool), **more}


def rows_of(directory: Path, table: str = "trajectories") -> list[dict[str, Any]]:
    return [r for p in sorted(directory.glob(f"{table}-*.parquet")) for r in pq.read_table(p).to_pylist()]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    class Texts(list[str]):
        def __len__(self) -> int:
            return len(caplog.messages)

        def __iter__(self) -> Iterator[str]:
            return iter(caplog.messages)

    with caplog.at_level(logging.WARNING, "verl_audit.record"):
        yield Texts()


def test_one_file_a_table_and_step_with_all_rows(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, run="r", updates_per_version=2, log_prob_sample=1.0)
    for step in (1, 2):
        writer.trajectories([row("a"), row("b")])
        writer.syncs([{"version": step}])
        writer.buffer([{"step": step, "finished": 3}])
        writer.step_done(step)
    writer.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [n.split("-")[:2] for n in names] == [
        [table, step] for table in ("buffer", "syncs", "trajectories") for step in ("00000001", "00000002")
    ]
    assert [r["group"] for r in rows_of(tmp_path)] == ["a", "b", "a", "b"]
    metadata = pq.read_schema(tmp_path / names[-1]).metadata
    assert metadata[KEY_RUN] == b"r"
    assert metadata[KEY_UPDATES] == b"2"
    assert metadata[KEY_DROPPED] == b"0"
    assert writer.counts.written == 8


def test_lists_are_kept_for_the_sample_and_sums_for_all_others(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, log_prob_sample=0.5)
    groups = [f"g{i}" for i in range(200)]
    writer.trajectories(
        row(g, behave_logp=[-1.0, -2.0, -3.0], prox_logp=[-1.0, -1.0, 9.0], n=3, loss_mask=[True, True, False])
        for g in groups
    )
    writer.step_done(1)
    writer.close()
    kept = {r["group"] for r in rows_of(tmp_path) if r["behave_logp"] is not None}
    assert kept == {g for g in groups if TraceWriter(tmp_path / "other", log_prob_sample=0.5).keeps(g)}
    assert 60 < len(kept) < 140
    other = next(r for r in rows_of(tmp_path) if r["group"] not in kept)
    assert other["loss_tokens"] == 2
    assert other["loss_mask"] is None
    [entry] = other["sums"]
    assert (entry["later"], entry["earlier"], entry["n"]) == ("prox_logp", "behave_logp", 2)
    assert entry["sum"] == pytest.approx(1.0)
    assert entry["w2_sum"] == pytest.approx(1 + np.e**2)
    sampled = next(r for r in rows_of(tmp_path) if r["group"] in kept)
    assert sampled["prox_logp"] == [-1.0, -1.0, 9.0]
    assert sampled["loss_mask"] == [True, True, False]
    assert sampled["sums"] is None


@given(st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=1, max_size=60))
def test_sums_are_those_of_the_definition(tokens: list[tuple[float, float]]) -> None:
    later, earlier = (np.array(side, np.float32) for side in zip(*tokens, strict=True))
    entry = log_prob_sums("later", "earlier", {"later": later, "earlier": earlier}, None)
    assert entry is not None
    d = later.astype(np.longdouble) - earlier.astype(np.longdouble)
    wanted = {
        "n": len(d),
        "sum": d.sum(),
        "abs_sum": abs(d).sum(),
        "sq_sum": (d * d).sum(),
        "abs_max": abs(d).max(),
        "k3_sum": (np.expm1(d) - d).sum(),
        "w_sum": np.exp(d).sum(),
        "w2_sum": np.exp(2 * d).sum(),
    }
    assert {k: entry[k] for k in wanted} == {k: pytest.approx(float(v), rel=1e-9, abs=1e-9) for k, v in wanted.items()}


def test_sums_fit_the_schema_and_leave_out_what_is_no_number() -> None:
    bad = {"a": np.array([np.nan, 0.0]), "b": np.zeros(2)}
    assert log_prob_sums("a", "b", bad, None) is None
    assert log_prob_sums("a", "b", bad, np.zeros(2, bool)) is None
    entry = log_prob_sums("a", "b", bad, np.array([False, True]))
    assert entry is not None
    assert set(entry) == {field.name for field in SUMS}
    assert tuple(LOG_PROBS) == sums_module.LOG_PROBS


def test_a_callers_array_may_change_after_the_call(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, log_prob_sample=1.0)
    given = row()
    writer.trajectories([given])
    given["behave_logp"][:] = 7
    writer.step_done(1)
    writer.close()
    assert rows_of(tmp_path)[0]["behave_logp"] == [-1.0] * 4


def test_a_step_too_large_to_wait_for_its_end_is_several_files_of_that_step(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, limit_bytes=100_000)
    writer.step_done(6)
    for i in range(20):
        writer.trajectories([row(f"g{i}")])
        _drained(writer)
    writer.step_done(7)
    writer.close()
    names = [p.name.split("-")[1] for p in tmp_path.iterdir()]
    assert len(names) > 2
    assert set(names) == {"00000007"}
    assert len(rows_of(tmp_path)) == 20


def test_a_resume_adds_and_never_replaces(tmp_path: Path) -> None:
    for _ in range(3):
        writer = TraceWriter(tmp_path)
        writer.trajectories([row()])
        writer.step_done(5)
        writer.close()
    assert len(rows_of(tmp_path)) == 3


def test_no_call_raises_whatever_it_is_given(tmp_path: Path, warnings: list[str]) -> None:
    writer = TraceWriter(tmp_path, log_prob_sample=0.0)
    writer.trajectories(None)  # type: ignore[arg-type]
    writer.trajectories([row(prox_logp=[1.0])])  # lengths differ
    writer.step_done("x")  # type: ignore[arg-type]
    assert writer.counts.failed == 3
    assert len(warnings) == 1
    writer.trajectories([row("good"), row("bad", colour=1), row("worse", session="x")])
    writer.step_done(1)
    writer.close()
    assert [r["group"] for r in rows_of(tmp_path)] == ["good"]
    assert writer.counts.lost == 2


def test_a_read_only_directory_is_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").write_text("")
    writer = TraceWriter(tmp_path / "file" / "below")
    for step in range(5):
        writer.trajectories([row()])
        writer.step_done(step)
    writer.close()
    assert writer.counts.lost == 5
    assert [m for m in warnings if "cannot write" in m] == [next(iter(warnings))]
    assert [m for m in warnings if "5 not writable" in m]


def test_a_full_disk_leaves_no_file_half_written_and_recording_goes_on_when_there_is_room(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, full = trace_write.write, threading.Event()

    def write(table: Any, path: Path) -> None:
        if not full.is_set():
            whole(table, path)
            return
        path.with_name(path.name + ".tmp").write_bytes(b"PAR1half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace_write, "write", write)
    writer = TraceWriter(tmp_path)
    for step, is_full in enumerate([False, True, True, False]):
        _drained(writer)
        (full.set if is_full else full.clear)()
        writer.trajectories([row(f"g{step}")])
        writer.step_done(step)
    writer.close()
    assert [r["group"] for r in rows_of(tmp_path)] == ["g0", "g3"]
    assert not list(tmp_path.glob("*.tmp"))
    assert len([m for m in warnings if "cannot write" in m]) == 1
    last = max(tmp_path.glob("*.parquet"))
    assert pq.read_schema(last).metadata[KEY_DROPPED] == b"2"


def _drained(writer: TraceWriter) -> None:
    with writer._turn:
        pass
    while writer._waiting or writer._busy:
        time.sleep(0.001)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace_write.write

    def write(table: Any, path: Path) -> None:
        path.with_name(path.name + ".tmp").symlink_to("/dev/full")
        whole(table, path)

    monkeypatch.setattr(trace_write, "write", write)
    writer = TraceWriter(tmp_path)
    writer.trajectories([row()])
    writer.step_done(1)
    writer.close()
    assert writer.counts.lost == 1
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_drops_and_counts_and_never_blocks(
    tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    whole = trace_write.write

    def write(table: Any, path: Path) -> None:
        stuck.wait(60)
        whole(table, path)

    monkeypatch.setattr(trace_write, "write", write)
    writer = TraceWriter(tmp_path, limit_bytes=100_000)
    for step in range(100):
        writer.trajectories([row(f"g{step}")])
        writer.step_done(step)
    assert writer.counts.dropped > 50
    stuck.set()
    writer.close()
    assert writer.counts.written + writer.counts.dropped == 100
    assert len(rows_of(tmp_path)) == writer.counts.written
    assert len([m for m in warnings if "too slow" in m]) == 1


def test_a_stuck_disk_does_not_keep_the_job_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(trace_write, "write", lambda *_: stuck.wait(60))
    writer = TraceWriter(tmp_path)
    writer.trajectories([row()])
    writer.step_done(1)
    writer.close(timeout=0.05)
    assert writer._thread is not None
    assert writer._thread.is_alive()
    assert writer._thread.daemon
    stuck.set()
    writer._thread.join()


JOB = """
import sys, time, numpy as np
from verl_audit.record import TraceWriter
writer = TraceWriter(sys.argv[1])
for step in range(1, 10**6):
    writer.trajectories({"group": f"{step}", "fate": "trained", "response_length": 500} for _ in range(50))
    while writer._waiting or writer._busy:  # a step takes longer than its file
        time.sleep(0.001)
    writer.step_done(step)
    print(step, flush=True)
"""


def test_kill_9_loses_at_most_the_last_step_and_leaves_nothing_unreadable(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        done = 0
        for line in job.stdout:
            done = int(line)
            if done >= 20:  # killed while the file of this step is being written
                os.kill(job.pid, signal.SIGKILL)
                break
    steps = [int(r["group"]) for r in rows_of(tmp_path)]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))
    assert max(steps) >= done - 1
    assert all(steps.count(step) == 50 for step in set(steps))


def test_kill_9_leaves_one_whole_file_of_what_was_open(tmp_path: Path) -> None:
    kept = 'writer.standing(lambda s=step: [{"group": f"{s}-{i}", "fate": "in_flight", "response_length": 0}'
    job = JOB.replace("    print(", f"    {kept} for i in range(40)], step)\n    print(")
    with subprocess.Popen([sys.executable, "-c", job, str(tmp_path)], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if int(line) >= 20:
                os.kill(running.pid, signal.SIGKILL)
                break
    [path] = tmp_path.glob("trajectories-open-*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 40
    assert {row["fate"] for row in rows} == {"in_flight"}
    assert len({row["group"].partition("-")[0] for row in rows}) == 1


def test_what_waits_is_written_at_exit(tmp_path: Path) -> None:
    job = JOB.replace("10**6", "4").replace("    writer.step_done(step)\n", "")
    subprocess.run([sys.executable, "-c", job, str(tmp_path)], check=True, capture_output=True)
    assert len(rows_of(tmp_path)) == 150


def test_importing_the_recorder_loads_nothing_heavy() -> None:
    code = "import sys, verl_audit.record.verl, verl_audit.record.verl_plugin; print(*sorted(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    assert not loaded & {"pyarrow", "duckdb", "torch", "ray", "verl", "rich", "click", "verl_audit.pipeline"}


def test_rows_given_as_any_mapping_of_scalars(tmp_path: Path) -> None:
    given: list[Row] = [{"group": "g", "fate": "stale", "response_length": np.int64(3), "reward": np.float32(0.5)}]
    writer = TraceWriter(tmp_path)
    writer.trajectories(given)
    writer.step_done(1)
    writer.close()
    assert rows_of(tmp_path)[0]["reward"] == 0.5
