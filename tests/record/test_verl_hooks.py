"""Sampler, recorder and plugin on a stand-in for verl: the same calls in the same order, without torch or Ray.

That the stand-in behaves as verl does is shown by `make test-verl`, which runs verl itself.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.record.stand_ins import stand_ins
from tests.record.test_verl_sync import auto_await
from verl_audit.record import guard


class Config(dict[str, Any]):
    """As OmegaConf: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def config(**sampler: Any) -> Config:
    v1 = Config(sampler=Config(sampler), trainer_mode="separate_async")
    return Config(
        trainer=Config(v1=v1, experiment_name="exp", default_local_dir="nowhere"),
        algorithm=Config(
            filter_groups=Config(enable=True, metric="acc", max_inflight_gen_batches=3),
            rollout_correction=Config(bypass_mode=False, rollout_rs="token_k1"),
        ),
        data=Config(train_batch_size=1, max_response_length=8, gen_batch_size=None),
        actor_rollout_ref=Config(
            rollout=Config(n=2), actor=Config(ppo_mini_batch_size=1, ppo_epochs=1), hybrid_engine=True
        ),
    )


class Buffer:
    """The parts of verl's ReplayBuffer that are looked at."""

    def __init__(self, **kwargs: Any) -> None:
        self.given = kwargs
        self.partitions: dict[str, dict[str, Any]] = defaultdict(dict)
        self.finished_keys: dict[str, set[str]] = defaultdict(set)
        self.failure_keys: dict[str, set[str]] = defaultdict(set)
        self.pending_keys: dict[str, set[str]] = defaultdict(set)
        self.running_keys: dict[str, set[str]] = defaultdict(set)
        self.prompt_global_steps: dict[str, dict[str, int]] = defaultdict(dict)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, int]]:
        self._sync_metadata_from_transfer_queue()
        reasons = ({"old"}, {"old", "flat"}, {"bad"}, Counter[str]())
        self._evict_terminal_groups(global_steps, partition_id, reasons)
        self._clear_groups(partition_id, {"extra"})
        return self._materialize_batch(partition_id, ["good"], {}), {"evicted": 3}

    def _sync_metadata_from_transfer_queue(self) -> None:
        for uid in ("old", "flat", "good", "extra"):
            self.finished_keys["train"].add(uid)
            self.prompt_global_steps["train"].setdefault(uid, 3)
            for session in (0, 1):
                self.partitions["train"][f"{uid}_{session}_0"] = TAG
        self.failure_keys["train"].add("bad")

    def _evict_terminal_groups(self, step: int, partition: str, reasons: Any) -> Any:
        self._clear_groups(partition, reasons[0] | reasons[1] | reasons[2])

    def _clear_groups(self, partition: str, uids: set[str]) -> None:
        self.partitions[partition] = {
            k: t for k, t in self.partitions[partition].items() if k.split("_")[0] not in uids
        }

    def _materialize_batch(self, partition: str, uids: list[str], snapshot: Any) -> Any:
        keys = [f"{uid}_{s}_0" for uid in uids for s in (0, 1)]
        return SimpleNamespace(keys=keys, tags=[TAG for _ in keys], partition_id=partition)


TAG = {"prompt_len": 3, "response_len": 2, "min_global_steps": 4, "max_global_steps": 4, "global_steps": 3}


class Trainer:
    """The parts of verl's PPOTrainer that are looked at."""

    def __init__(self, settings: Config, make: Callable[..., Any]) -> None:
        self.config, self.trainer_mode = settings, "separate_async"
        self.global_steps, self.total_training_steps, self.local_trigger_step = 5, 5, 0
        self.checkpoint_manager = SimpleNamespace(replicas=[])
        self.replay_buffer = make(refill_fn=self.refill, sampler_kwargs=settings.trainer.v1.sampler.get("kwargs"))

    def refill(self, count: int) -> None: ...

    def _resolve_filter_groups_metric(self) -> str:
        return "acc"

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        return len(batch["uid"])

    def on_init_end(self) -> None: ...

    def get_llm_client(self) -> object:
        return self

    def _step_once(self) -> Any:
        return self._update_actor(self.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=1)[0])

    def _update_actor(self, batch: Any) -> Any:
        return batch

    def _compute_metrics(self, batch: Any) -> str:
        return "computed"


class Tensor:
    """As much of a torch tensor as is used."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.dtype, self.shape = self.values.dtype, self.values.shape

    def unbind(self) -> list[Tensor]:
        return [Tensor(v) for v in self.values]

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def float(self) -> Tensor:
        return Tensor(self.values.astype(np.float32))

    def is_floating_point(self) -> bool:
        return self.values.dtype.kind == "f"

    def numpy(self) -> Any:
        return self.values


def fetched(*, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
    data = {
        "rm_scores": Tensor(np.tile([0.0, 1.0], (len(keys), 1))),
        "extra_fields": [{"reward_extra_info": {"acc": 1.0}} for _ in keys],
        "rollout_log_probs": Tensor(np.full((len(keys), 2), -1.0)),
        "old_log_probs": Tensor(np.full((len(keys), 2), -1.5)),
        "loss_mask": Tensor(np.ones((len(keys), 2), np.int64)),
        "response_mask": Tensor(np.tile([1, 0], (len(keys), 1))),
        "advantages": Tensor(np.full((len(keys), 2), 0.25)),
    }
    return {name: data[name] for name in select_fields if name in data}


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, module in stand_ins(Buffer, (Client, ResumingClient), fetched, auto_await).items():
        monkeypatch.setitem(sys.modules, name, module)
    names = ("verl_sampler", "verl_recorder", "verl_client", "verl_separate")
    for name in names:
        monkeypatch.delitem(sys.modules, f"verl_audit.record.{name}", raising=False)
    monkeypatch.setattr(guard, "_told", set())
    yield importlib.import_module("verl_audit.record.verl")
    for name in names:
        sys.modules.pop(f"verl_audit.record.{name}", None)


def rows(directory: Path, table: str = "trajectories") -> list[dict[str, Any]]:
    return [r for p in sorted(directory.glob(f"{table}-*.parquet")) for r in pq.read_table(p).to_pylist()]


def run(sampler: ModuleType, directory: Path, name: str = "AuditReplayBufferAsync") -> tuple[Trainer, Any]:
    options = {"audit_dir": str(directory), "log_prob_sample": 1.0}
    trainer = Trainer(config(kwargs=options), getattr(sampler, name))
    trainer.on_init_end()
    trainer._submit_batch_to_rollout({"uid": np.array(["good"]), "raw_prompt": ["1+1"]})
    batch = trainer._step_once()
    assert trainer._compute_metrics(batch) == "computed"
    return trainer, batch


def test_every_group_has_its_fate_with_all_reasons(sampler: ModuleType, tmp_path: Path) -> None:
    run(sampler, tmp_path)
    fates = {r["group"]: (r["fate"], r["reasons"]) for r in rows(tmp_path)}
    assert fates == {
        "old": ("stale", ["stale", "filtered"]),
        "flat": ("filtered", ["filtered"]),
        "bad": ("failed", ["failed"]),
        "extra": ("surplus", ["surplus"]),
        "good": ("trained", ["trained"]),
    } | {uid: fates[uid] for uid in fates if fates[uid][0] == "in_flight"}
    [bad] = [r for r in rows(tmp_path) if r["group"] == "bad"]
    assert (bad["session"], bad["response_length"]) == (None, 0)
    good = [r for r in rows(tmp_path) if r["fate"] == "trained"]
    assert [(r["session"], r["loss_tokens"], r["rejected_tokens"], r["train_minibatch"]) for r in good] == [
        (0, 2, 1, 0),
        (1, 2, 1, 0),
    ]
    assert good[0]["behave_logp"] == [-1.0, -1.0]
    assert good[0]["trainer_logp"] == [-1.5, -1.5]  # sampled by version 4, which trains in step 5
    assert good[0]["prompt_key"]
    assert good[0]["t_submit"] <= good[0]["t_decided"]


def test_many_tokens_are_fetched_in_pieces_and_without_rejection_one_mask_is_enough(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, asked = importlib.import_module("verl_audit.record.verl_recorder"), list[Any]()

    def get(**asks: Any) -> dict[str, Any]:
        asked.append((len(asks["keys"]), "loss_mask" in asks["select_fields"]))
        return fetched(**asks)

    monkeypatch.setattr(recorder, "CHUNK_TOKENS", 2)
    monkeypatch.setattr(recorder.tq, "kv_batch_get", get)
    settings = config(kwargs={"audit_dir": str(tmp_path)})
    settings["algorithm"]["rollout_correction"]["rollout_rs"] = None
    trainer = Trainer(settings, sampler.AuditReplayBufferAsync)
    trainer.total_training_steps = 9
    trainer._compute_metrics(trainer._step_once())
    trainer.replay_buffer.recorder.writer.close()
    assert set(asked) == {(1, False)}
    trained = [r for r in rows(tmp_path) if r["fate"] == "trained"]
    assert [(r["session"], r["loss_tokens"], r["rejected_tokens"]) for r in trained] == [(0, 1, 0), (1, 1, 0)]


def test_rows_that_do_not_come_are_dropped_and_counted_and_the_next_are_recorded(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, hangs = importlib.import_module("verl_audit.record.verl_recorder"), threading.Event()
    monkeypatch.setattr(recorder, "ROWS_SECONDS", 0.01)
    trainer = Trainer(config(kwargs={"audit_dir": str(tmp_path)}), sampler.AuditReplayBufferAsync)
    trainer.total_training_steps = 9
    seen, queue = trainer.replay_buffer.recorder, recorder.tq.kv_batch_get

    def get(**asks: Any) -> dict[str, Any]:
        if "advantages" in asks["select_fields"]:
            hangs.wait(30.0)
        return fetched(**asks)

    monkeypatch.setattr(recorder.tq, "kv_batch_get", get)
    for step in (1, 2):  # the second is not even asked for: the first hangs on
        trainer.global_steps = step
        assert trainer._compute_metrics(trainer._step_once()) == "computed"
        assert seen.writer.counts.dropped == 2 * step
    hangs.set()
    seen._late.join()
    wait_for(lambda: not seen._late.is_running())
    monkeypatch.setattr(recorder, "ROWS_SECONDS", 30.0)
    monkeypatch.setattr(recorder.tq, "kv_batch_get", queue)
    trainer.global_steps = 3
    trainer._compute_metrics(trainer._step_once())
    seen.writer.close()
    assert [r["decided_step"] for r in rows(tmp_path) if r["fate"] == "trained"] == [3, 3]
    assert seen.writer.counts.dropped == 4
    assert len([m for m in caplog.messages if "dropped and counted" in m]) == 1
    last = max(tmp_path.glob("trajectories-0*.parquet"))
    assert pq.read_schema(last).metadata[b"verl_audit.dropped"] == b"4"


def test_without_an_update_a_batch_is_recorded_when_the_step_ends(sampler: ModuleType, tmp_path: Path) -> None:
    """As in a critic's warm-up."""
    trainer = Trainer(config(kwargs={"audit_dir": str(tmp_path)}), sampler.AuditReplayBufferAsync)
    batch = trainer.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=1)[0]
    trainer._compute_metrics(batch)
    trained = [r for r in rows(tmp_path) if r["fate"] == "trained"]
    assert [(r["group"], r["session"], r["train_minibatch"]) for r in trained] == [("good", 0, None), ("good", 1, None)]


def test_undecided_groups_are_recorded_on_the_way_in_case_the_job_is_killed(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = importlib.import_module("verl_audit.record.verl_recorder")
    monkeypatch.setattr(recorder, "OPEN_SECONDS", 0.0)
    trainer = Trainer(config(kwargs={"audit_dir": str(tmp_path)}), sampler.AuditReplayBufferAsync)
    trainer.total_training_steps = 9
    buffer = trainer.replay_buffer
    trainer._submit_batch_to_rollout({"uid": np.array(["waits", "runs"]), "raw_prompt": ["1+1", "2+2"]})
    batch = trainer._step_once()
    buffer.prompt_global_steps["train"] = {"waits": 4, "runs": 5, "good": 3}
    buffer.partitions["train"] = {"waits_0_0": TAG, "waits_1_0": TAG}
    trainer._compute_metrics(batch)
    # A writer that ends without closing, as if killed: what it wrote is there.
    wait_for(lambda: list(tmp_path.glob("trajectories-open-*.parquet")))
    found = [r for r in rows(tmp_path, "trajectories-open") if r["fate"] == "in_flight"]
    assert sorted((r["group"], r["session"], r["response_length"], r["submit_step"]) for r in found[:2]) == [
        ("waits", 0, 2, 4),
        ("waits", 1, 2, 4),
    ]
    assert [(r["group"], r["session"], r["decided_step"]) for r in found[2:]] == [("runs", None, 5)]
    assert all(r["t_submit"] and r["prompt_key"] for r in found)
    buffer.prompt_global_steps["train"], buffer.partitions["train"] = {}, {}
    buffer.recorder.step_ended(SimpleNamespace(keys=[], tags=[]))
    buffer.recorder.writer.close()
    assert rows(tmp_path, "trajectories-open") == []


def wait_for(condition: Callable[[], Any]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_the_filter_that_verl_withholds_is_handed_on(sampler: ModuleType, tmp_path: Path) -> None:
    trainer, _ = run(sampler, tmp_path)
    assert trainer.replay_buffer.given["filter_groups_metric"] == "acc"
    settings = config(sync_refill_failed_groups=True, kwargs={"audit_dir": str(tmp_path)})
    given = Trainer(settings, sampler.AuditReplayBuffer).replay_buffer.given
    assert given["sync_refill_failed_groups"] is True
    assert (given["train_batch_size"], given["gen_batch_size"], given["max_inflight_gen_batches"]) == (1, 1, 3)


def test_a_recorder_that_fails_changes_nothing(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = importlib.import_module("verl_audit.record.verl_recorder")

    def boom(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    for name in ("sample_began", "polled", "evicted", "cleared", "selected", "step_ended", "update_begins"):
        monkeypatch.setattr(recorder.VerlRecorder, name, boom)
    _, batch = run(sampler, tmp_path)
    assert batch.keys == ["good_0_0", "good_1_0"]
    assert len(caplog.messages) == len(set(caplog.messages))
    assert not rows(tmp_path)


def test_a_recorder_that_cannot_be_made_leaves_verls_sampler(
    sampler: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(kwargs={"audit_dir": str(tmp_path), "log_prob_sample": "much"})
    trainer = Trainer(settings, sampler.AuditReplayBufferAsync)
    assert trainer.replay_buffer.recorder is None
    assert trainer._step_once().keys == ["good_0_0", "good_1_0"]
    assert len([m for m in caplog.messages if "_make_recorder" in m]) == 1


def test_an_unknown_version_and_missing_methods_are_told_once(
    sampler: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sys.modules["verl"].__version__ = "1.4.0"  # type: ignore[attr-defined]
    run(sampler, tmp_path)
    told = [m for m in caplog.messages if "1.4.0" in m]
    assert len(told) == 2
    assert "is not one of 0.9.0, 0.9.1" in told[0]
    assert "lacks" in told[1]
    assert "update_weights" in told[1]
    assert rows(tmp_path)


def test_only_the_samplers_are_names_of_the_module(sampler: ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = sampler.Nothing


# ------------------------------------------------------------------ segments


class Client:
    """verl's client of one attempt a call."""

    version = 3

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, object]:
        return "s1", object()

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        await self._acquire_server(request_id, prompt_ids=prompt_ids)
        stop = "abort" if len(prompt_ids) < 5 else "stop"
        return SimpleNamespace(token_ids=[1, 2], stop_reason=stop, extra_fields={"global_steps": self.version})


class ResumingClient(Client):
    """verl's client that goes on after an abort."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        tokens: list[int] = []
        while True:
            output = await super().generate(request_id, prompt_ids=prompt_ids + tokens)
            tokens += output.token_ids
            self.version += 1
            if output.stop_reason != "abort":
                return SimpleNamespace(token_ids=tokens, stop_reason="stop", extra_fields={"global_steps": 9})


def test_a_client_notes_each_attempt(sampler: ModuleType) -> None:
    module = importlib.import_module("verl_audit.record.verl_client")
    client = module.audited(ResumingClient())
    output = asyncio.run(client.generate("r1", prompt_ids=[7, 7, 7]))
    calls = output.extra_fields["audit_segments"]
    assert [(c["version"], c["server"], c["length"], c["prefill"], c["stop"]) for c in calls] == [
        (3, "s1", 2, 3, "abort"),
        (4, "s1", 2, 5, "stop"),
    ]
    assert all(c["t0"] <= c["t1"] for c in calls)
    assert module.audited(client) is client


def test_turns_of_a_conversation_share_one_list(sampler: ModuleType) -> None:
    module = importlib.import_module("verl_audit.record.verl_client")
    client = module.audited(Client())

    async def talk() -> tuple[Any, Any, Any]:
        first = await client.generate("r1", prompt_ids=[7] * 5)
        second = await client.generate("r1", prompt_ids=[7] * 9)
        other, again = [await client.generate("det-1", prompt_ids=[7] * 5) for _ in range(2)]
        assert len(other.extra_fields["audit_segments"]) == len(again.extra_fields["audit_segments"]) == 1
        return first, second, other

    first, second, _ = asyncio.run(talk())
    assert first.extra_fields["audit_segments"] is second.extra_fields["audit_segments"]
    assert [c["prefill"] for c in first.extra_fields["audit_segments"]] == [5, 9]


def test_a_client_of_another_class_is_left_alone(sampler: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Client):
        pass

    module = importlib.import_module("verl_audit.record.verl_client")
    assert type(module.audited(Own())) is Own
    assert [m for m in caplog.messages if "Own is not verl's own" in m]


# ------------------------------------------------------------------ fully_async and one_step_off


def test_batches_of_the_separate_trainers_are_recorded(
    sampler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_AUDIT_DIR", str(tmp_path))
    monkeypatch.setenv("VERL_AUDIT_LOG_PROB_SAMPLE", "1")
    separate = importlib.import_module("verl_audit.record.verl_separate")

    class Separate:
        def __init__(self) -> None:
            settings = Config(trigger_parameter_sync_step=2, require_batches=1)
            self.config = Config({**config(), "async_training": settings, "algorithm": Config()})
            self.global_steps, self.current_param_version, self.local_trigger_step = 7, 3, 2
            self.checkpoint_manager = SimpleNamespace(replicas=[])

        def _fit_update_actor(self, batch: Any) -> Any:
            return batch

    separate.watch_trainer(SimpleNamespace(SeparateRayPPOTrainer=Separate))
    batch = SimpleNamespace(
        batch={
            "responses": Tensor(np.zeros((2, 4))),
            "attention_mask": Tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]),
            "response_mask": Tensor([[1, 1, 1, 0], [1, 0, 0, 0]]),
            "rollout_log_probs": Tensor(np.full((2, 4), -1.0)),
            "old_log_probs": Tensor(np.full((2, 4), -2.0)),
            "token_level_scores": Tensor([[0, 0, 1.0, 0], [0, 0, 0, 0]]),
        },
        non_tensor_batch={
            "uid": np.array(["uid_sample_0_1"] * 2),
            "min_global_steps": [2, 3],
            "max_global_steps": [2, 3],
        },
    )
    trainer = Separate()
    assert trainer._fit_update_actor(batch) is batch
    trainer.__dict__[separate.RECORDER].writer.close()
    first, second = rows(tmp_path)
    assert (first["group"], first["session"], first["decided_step"], first["train_version"]) == (
        "uid_sample_0_1",
        0,
        7,
        3,
    )
    assert (second["session"], second["response_length"], second["prompt_length"]) == (1, 1, 3)
    assert (first["response_length"], first["reward"], first["prox_logp"]) == (3, 1.0, [-2.0] * 3)
    assert (first["trainer_logp"], second["trainer_logp"]) == (None, [-2.0])
    assert (first["train_minibatch"], first["loss_tokens"], first["rejected_tokens"]) == (1, 3, 0)


PLUGIN = """
import sys, types
import verl_audit.record.verl_plugin as plugin
print(any(type(f).__name__ == "_Finder" for f in sys.meta_path))
"""


@pytest.mark.parametrize("directory", ["", "somewhere"])
def test_the_plugin_does_nothing_unless_it_is_asked(directory: str) -> None:
    environment = {**os.environ, "VERL_AUDIT_DIR": directory}
    done = subprocess.run([sys.executable, "-c", PLUGIN], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(bool(directory))


def test_a_module_is_patched_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = importlib.import_module("verl_audit.record.verl_plugin")
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [plugin._Finder(), *sys.meta_path])
    monkeypatch.setitem(plugin.PATCHES, "late_module", lambda module: setattr(module, "VALUE", module.VALUE + 1))
    assert importlib.import_module("late_module").VALUE == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_what_runs_verl_itself_says_what_it_needs() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "MAKE", "MFLAGS"))
    }
    command = ["make", "--dry-run", "test-verl"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "set VERL_CPU_DIR to a folder with run_e2e.py" in line
