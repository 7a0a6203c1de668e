"""The examples run, and what they record is within the schema."""

import importlib.util
import itertools
import queue
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl_audit.trace.schema import schema

ROOT = Path(__file__).parents[1]


def test_the_plain_loop_records_every_fate_and_the_bias_of_dropping(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "examples" / "plain_loop.py"), str(tmp_path)], check=True)
    files = sorted(tmp_path.glob("trajectories-*.parquet"))
    assert all(pq.read_schema(path).equals(schema()) for path in files)
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    assert {row["fate"] for row in rows} == {"trained", "stale", "in_flight"}
    length = {fate: [r["response_length"] for r in rows if r["fate"] == fate] for fate in ("trained", "stale")}
    assert sum(length["stale"]) / len(length["stale"]) > sum(length["trained"]) / len(length["trained"])
    assert all(r["train_version"] >= r["last_version"] for r in rows if r["fate"] == "trained")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if importlib.util.find_spec("transformers") is None:
        stand_in = ModuleType("transformers")
        stand_in.TrainerCallback = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformers", stand_in)
    spec = importlib.util.spec_from_file_location("trl_async_grpo", ROOT / "examples" / "trl_async_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TrlTrainer:
    """What the example uses of TRL's AsyncGRPOTrainer, and its way of taking samples and of sending weights."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(run_name="r", weight_sync_steps=1, max_staleness=1)
        self.state, self.model_version = SimpleNamespace(global_step=0), 0
        self.rollout_queue: queue.Queue[Any] = queue.Queue()
        self.weight_transfer = SimpleNamespace(
            pause=lambda: None, send_weights=list, resume=lambda: None, init_weight_transfer=lambda: "made"
        )
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def sync(self) -> None:
        self.weight_transfer.pause()
        self.weight_transfer.send_weights((f"w{i}", np.zeros(4, np.float32)) for i in range(3))
        self.weight_transfer.resume()
        self.model_version += 1

    def samples(self) -> Iterator[Any]:
        """As its RolloutQueueDataset: what is too old is dropped."""
        while self.rollout_queue.qsize():
            sample = self.rollout_queue.get(timeout=1.0)
            if self.model_version - sample.model_version <= self.args.max_staleness:
                yield sample


def trl_sample(group: int, version: int, enqueued_at: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        prompt=[],
        completion=[],
        input_ids=np.arange(6),
        completion_mask=np.array([0, 0, 1, 1, 0, 1]),
        old_log_probs=np.array([0, 0, -1.0, -2.0, 0, -3.0], np.float32),
        advantage=0.5,
        model_version=version,
        group_id=group,
        metrics={"reward": 1.0},
        enqueued_at=enqueued_at,
    )


def recorded(directory: Path, table: str) -> list[dict[str, Any]]:
    return [row for p in sorted(directory.glob(f"{table}-*.parquet")) for row in pq.read_table(p).to_pylist()]


def test_trls_queue_and_weight_transfer_are_recorded_on_their_way(example: ModuleType, tmp_path: Path) -> None:
    trainer = TrlTrainer()
    writer = example.record(trainer, tmp_path)
    writer.log_prob_sample = 1.0
    assert trainer.weight_transfer.init_weight_transfer() == "made"
    trainer.sync()
    taken = list[Any]()
    for step in (1, 2, 3):
        for group, version in ((step, step), (step, step), (10 + step, max(1, step - 2))):
            trainer.rollout_queue.put(trl_sample(group, version))
        taken += trainer.samples()
        trainer.state.global_step = step
        trainer.callbacks[0].on_step_end(None, trainer.state, None)
        trainer.sync()
    trainer.callbacks[0].on_train_end(None, trainer.state, None)
    rows = recorded(tmp_path, "trajectories")
    assert [(r["group"], r["session"], r["fate"], r["decided_step"]) for r in rows[-3:]] == [
        ("3", 0, "trained", 3),
        ("3", 1, "trained", 3),
        ("13", 0, "stale", 3),
    ]
    assert sum(r["fate"] == "trained" for r in rows) == len(taken) == 8
    assert (rows[0]["prompt_length"], rows[0]["response_length"], rows[0]["loss_tokens"]) == (2, 4, 3)
    assert rows[0]["behave_logp"] == [-1.0, -2.0, 0.0, -3.0]
    assert rows[0]["loss_mask"] == [True, True, False, True]
    syncs = [(r["version"], r["payload_count"], r["payload_bytes"]) for r in recorded(tmp_path, "syncs")]
    assert syncs == [(1, 3, 48), (2, 3, 48), (3, 3, 48), (4, 3, 48)]
    assert [r["step"] for r in recorded(tmp_path, "buffer")] == [1, 2, 3]


def test_the_example_fits_trls_own_queue_dataset(example: ModuleType, tmp_path: Path) -> None:
    """Where TRL is installed: its dataset takes from the recorded queue, and drops by the rule that is recorded."""
    grpo = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    pytest.importorskip("accelerate").PartialState(cpu=True)  # TRL's logger wants one
    trainer = TrlTrainer()
    writer = example.record(trainer, tmp_path)
    trainer.model_version = 3
    for group, version in ((1, 3), (2, 1), (3, 2)):
        trainer.rollout_queue.put(trl_sample(group, version))
    made = grpo.RolloutQueueDataset(
        trainer.rollout_queue, lambda: trainer.model_version, lambda _: None, 60.0, defaultdict(list), max_staleness=1
    )
    taken = [sample["group_id"] for sample in itertools.islice(made, 2)]
    writer.close()
    fates = {row["group"]: row["fate"] for row in recorded(tmp_path, "trajectories")}
    assert taken == [1, 3]
    assert fates == {"1": "trained", "2": "stale", "3": "trained"}
