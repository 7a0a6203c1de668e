"""What the recorder wrote beside real verl 0.9.1 runs: within the schema, closed, and in step with verl's own metrics.

The runs are those of `make test-verl`; a tiny model on a CPU, unmodified verl.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.verl import fully_async, one_step_off
from tests.verl.agreement import disagreements, metrics, payloads, residual, table
from verl_audit.record.writer import KEY_DROPPED
from verl_audit.trace.schema import COLUMNS, FATES, KEY_RUN, KEY_TABLE, KEY_UPDATES, TABLES, schema
from verl_audit.trace.write import to_table

RUNS = Path(__file__).parents[2] / "fixtures" / "recorded"
NAMES = ("separate_async", "colocate_async", "sync")
WARMUP = {"separate_async": 2, "colocate_async": 2, "sync": 0}


@pytest.fixture(params=NAMES)
def run(request: pytest.FixtureRequest) -> Path:
    return RUNS / str(request.param)


def test_files_have_the_columns_and_types_of_the_schema(run: Path) -> None:
    for path in run.glob("audit/*.parquet"):
        found = pq.read_schema(path)
        name = path.name.partition("-")[0]
        assert name in TABLES
        assert found.metadata[KEY_TABLE] == name.encode()
        assert found.metadata[KEY_RUN] == run.name.encode()
        assert (found.metadata[KEY_UPDATES], found.metadata[KEY_DROPPED]) == (b"1", b"0")
        assert found.equals(schema(name))
        to_table(pq.read_table(path).to_pylist(), name)


def test_required_columns_are_filled_and_fates_known(run: Path) -> None:
    for name in TABLES:
        rows = table(run, name)
        assert rows
        for column in COLUMNS[name]:
            assert not column.required or all(row[column.name] is not None for row in rows)
    rows = table(run, "trajectories")
    assert {row["fate"] for row in rows} <= set(FATES)
    assert all(row["reasons"][0] == row["fate"] for row in rows)


def test_traces_agree_with_the_metrics_of_verl_in_every_step(run: Path) -> None:
    assert len(metrics(run)) == 8
    assert list(disagreements(run)) == []


def test_each_sync_says_what_it_sent(run: Path) -> None:
    assert list(payloads(run)) == []


def test_what_syncs_interrupted_is_what_the_calls_say() -> None:
    """Tokens prefilled again, by request and by sync: the same sum; in synchronous runs none."""
    for name in NAMES:
        calls = [row["segments"] for row in table(RUNS / name, "trajectories") if row["segments"]]
        resumed = [
            after["prefill"]
            for one in calls
            for before, after in pairwise(one)
            if before["stop"] == "aborted" and before["length"] and after["version"] > before["version"]
        ]
        syncs = table(RUNS / name, "syncs")
        assert sum(row["prefill_tokens"] or 0 for row in syncs) == sum(resumed)
        assert bool(resumed) is (name != "sync")


def test_the_ledger_closes(run: Path) -> None:
    assert residual(run, 8, WARMUP[run.name])["residual"] == 0
    rows = [r for r in table(run, "trajectories") if r["session"] is not None]
    assert len({(r["group"], r["session"], r["turn"]) for r in rows}) == len(rows)


def test_segments_cover_the_response_and_token_lists_are_as_long(run: Path) -> None:
    for row in table(run, "trajectories"):
        if row["segments"] is not None:
            assert [s["start"] for s in row["segments"]] == [
                sum(s["length"] for s in row["segments"][:i]) for i in range(len(row["segments"]))
            ]
            assert sum(s["length"] for s in row["segments"]) == row["response_length"]
        for name in (c.name for c in COLUMNS["trajectories"] if c.tokens):
            assert row[name] is None or len(row[name]) == row["response_length"]


def test_versions_never_run_ahead_of_the_trainer(run: Path) -> None:
    for row in table(run, "trajectories"):
        if row["fate"] == "trained":
            assert row["first_version"] <= row["last_version"] <= row["train_version"] == row["decided_step"] - 1
            assert row["submit_version"] <= row["first_version"]


def test_times_are_in_order(run: Path) -> None:
    for row in table(run, "trajectories"):
        if row["fate"] == "trained":
            times = [row[name] for name in ("t_submit", "t_done", "t_enqueue", "t_decided")]
            assert None not in times
            assert times == sorted(times)


def test_the_probe_is_whole_where_the_installed_version_sampled_all(run: Path) -> None:
    rows = [r for r in table(run, "trajectories") if r["fate"] == "trained"]
    fresh = [r for r in rows if r["first_version"] == r["train_version"]]
    assert fresh
    assert all(r["trainer_logp"] == r["prox_logp"] for r in fresh)
    assert all(r["trainer_logp"] is None for r in rows if r not in fresh)
    if run.name == "sync":
        assert fresh == rows
        gap = np.concatenate([np.subtract(r["prox_logp"], r["behave_logp"]) for r in rows])
        assert 0 < np.abs(gap).mean() < 0.05  # bf16 rollout, fp32 training


def test_syncs_have_a_row_for_each_version_and_a_time_for_each_phase(run: Path) -> None:
    syncs = [row for row in table(run, "syncs") if row["replica"] is None]
    assert {row["version"] for row in syncs} == set(range(9))
    assert all(row["t0"] < row["t1"] and row["transfer_s"] > 0 for row in syncs)
    if run.name == "separate_async":
        standalone = [row for row in syncs if row["abort_s"] is not None]  # the others wake the trainer's own engines
        assert {row["version"] for row in standalone} == set(range(9))
        assert all(row["abort_s"] > 0 and row["resume_s"] > 0 for row in standalone)


def test_replicas_run_the_version_that_was_published(run: Path) -> None:
    rows = [row for row in table(run, "syncs") if row["replica_version"] is not None]
    assert rows
    assert all(row["replica_version"] == row["version"] for row in rows)


def test_each_batch_has_a_depth_and_a_wait(run: Path) -> None:
    waits = [row for row in table(run, "buffer") if row["wait_s"] is not None]
    assert [row["step"] for row in waits] == list(range(1, 9))
    assert all(row["wait_s"] >= 0 and row["finished"] + row["failed"] >= 8 for row in waits)


def test_what_was_generated_and_what_was_trained_on_differ_where_groups_were_dropped() -> None:
    rows = table(RUNS / "separate_async", "trajectories")
    length = {fate: np.mean([r["response_length"] for r in rows if r["fate"] == fate]) for fate in ("trained", "stale")}
    assert length["stale"] > length["trained"]


def test_fully_async_is_recorded_through_the_plugin() -> None:
    run = RUNS / "fully_async"
    assert list(fully_async.disagreements(run)) == []
    rows = table(run, "trajectories")
    assert {row["fate"] for row in rows} == {"trained"}
    assert len(rows) == fully_async.MINI * fully_async.SIZE * fully_async.STEPS
    assert {(row["train_version"], row["train_minibatch"]) for row in rows} == {
        (v, m) for v in range(4) for m in (0, 1)
    }
    assert all(sum(s["length"] for s in row["segments"]) == row["response_length"] for row in rows)
    assert all(row["last_version"] <= row["train_version"] for row in rows)
    for path in run.glob("audit/*.parquet"):
        found = pq.read_schema(path)
        assert found.equals(schema(path.name.partition("-")[0]))  # type: ignore[arg-type]
        assert found.metadata[KEY_UPDATES] == b"2"


def test_one_step_off_is_recorded_through_the_plugin() -> None:
    run = RUNS / "one_step_off"
    assert list(one_step_off.disagreements(run)) == []
    assert list(payloads(run)) == []
    assert len(table(run, "trajectories")) == fully_async.MINI * fully_async.SIZE * fully_async.STEPS
