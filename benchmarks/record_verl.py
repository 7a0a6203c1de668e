"""What the recorder for verl costs a trainer: seconds a step that it waits, and processor seconds behind its back.

python benchmarks/record_verl.py [--trajectories N] [--tokens N] [--steps N] [--evicted SHARE]

Stand-ins for verl and TransferQueue make the calls that verl makes, so neither is needed; fetching costs nothing here,
and in a real run what TransferQueue takes comes on top. The trainer updates for as long as the rows take.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.record.stand_ins import stand_ins

SIZE = 8


class Settings(dict[str, Any]):
    """As OmegaConf: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        """A setting."""
        return self[name]


def settings(directory: Path, groups: int) -> Settings:
    """What the recorder reads of a configuration."""
    sampler = Settings(sampler_kwargs=Settings(audit_dir=str(directory)))
    return Settings(
        trainer=Settings(v1=Settings(sampler=sampler), experiment_name="bench"),
        algorithm=Settings(filter_groups=None, rollout_correction=Settings()),
        data=Settings(train_batch_size=groups, max_response_length=1 << 20),
        actor_rollout_ref=Settings(rollout=Settings(n=SIZE), actor=Settings(ppo_mini_batch_size=groups)),
    )


class Tensor:
    """Rows of one field, as a jagged tensor gives them."""

    def __init__(self, values: Any) -> None:
        """`values` are arrays, or one array."""
        self.values, self.dtype = values, np.float32

    def unbind(self) -> list[Tensor]:
        """One by one."""
        return [Tensor(value) for value in self.values]

    def detach(self) -> Tensor:
        """As torch's."""
        return self

    cpu = float = detach

    def is_floating_point(self) -> bool:
        """As torch's."""
        return bool(self.values.dtype.kind == "f")

    def numpy(self) -> Any:
        """As torch's."""
        return self.values


class Queue:
    """TransferQueue with as many tokens as a key's tag says."""

    def __init__(self, tokens: int) -> None:
        """`tokens` is the longest response."""
        rng = np.random.default_rng(0)
        self.logp = -rng.standard_exponential(2 * tokens, np.float32)
        self.later, self.ones = self.logp + np.float32(0.01), np.ones(2 * tokens, np.int64)
        self.length: dict[str, int] = {}

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        """The fields of some trajectories."""
        lengths = [self.length[key] for key in keys]
        lists = {
            "rm_scores": self.later,
            "rollout_log_probs": self.logp,
            "old_log_probs": self.later,
            "response_mask": self.ones,
            "advantages": self.later,
        }
        data: dict[str, Any] = {name: Tensor([values[:n] for n in lengths]) for name, values in lists.items()}
        data["extra_fields"] = [_extra(n) for n in lengths]
        data["num_turns"] = [2] * len(keys)
        return {name: data[name] for name in select_fields}


def _extra(length: int) -> dict[str, Any]:
    third, now = length // 3, time.time()
    calls = [
        {"version": k, "start": 0, "length": third, "server": f"s{k % 4}", "t0": now, "t1": now}
        | {"prefill": 512 + k * third, "stop": "abort" if k < 2 else "stop"}
        for k in range(3)
    ]
    return {"audit_segments": calls, "reward_extra_info": {"acc": 1.0}}


class Buffer:
    """verl's replay buffer, as far as it is looked at."""

    def __init__(self, **_: Any) -> None:
        """Empty."""
        for name in ("finished", "failure", "pending", "running"):
            setattr(self, f"{name}_keys", defaultdict(set))
        self.partitions: dict[str, dict[str, Any]] = defaultdict(dict)
        self.prompt_global_steps: dict[str, dict[str, int]] = defaultdict(dict)

    def sample(self, step: int, partition: str, evicted: list[str], chosen: list[str]) -> Any:
        """Poll, evict, choose."""
        self._sync_metadata_from_transfer_queue()
        self._evict_terminal_groups(step, partition, (set(evicted), set(), set(), None))
        return self._materialize_batch(partition, chosen)

    def _sync_metadata_from_transfer_queue(self) -> None: ...

    def _evict_terminal_groups(self, step: int, partition: str, reasons: Any) -> None:
        self._clear_groups(partition, reasons[0])

    def _clear_groups(self, partition: str, uids: set[str]) -> None:
        gone = {f"{uid}_{s}_0" for uid in uids for s in range(SIZE)}
        for key in gone:
            del self.partitions[partition][key]
        self._forget(partition, uids)

    def _materialize_batch(self, partition: str, uids: list[str]) -> Any:
        keys = [f"{uid}_{s}_0" for uid in uids for s in range(SIZE)]
        tags = [self.partitions[partition].pop(key) for key in keys]
        self._forget(partition, set(uids))
        return SimpleNamespace(keys=keys, tags=tags)

    def _forget(self, partition: str, uids: set[str]) -> None:
        self.finished_keys[partition] -= uids  # type: ignore[attr-defined]
        for uid in uids:
            del self.prompt_global_steps[partition][uid]


class Trainer:
    """verl's trainer, as far as it is looked at."""

    def __init__(self, config: Settings, sampler: Any, steps: int) -> None:
        """With the recorder's sampler."""
        self.config, self.trainer_mode, self.total_training_steps = config, "separate_async", steps
        self.global_steps = self.local_trigger_step = 0
        self.replay_buffer = sampler(refill_fn=self.refill, sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs)

    def refill(self, count: int) -> None:
        """Not needed here."""

    def _resolve_filter_groups_metric(self) -> None: ...

    def _submit_batch_to_rollout(self, batch: Any) -> None: ...

    def on_init_end(self) -> None:
        """verl's hook."""

    def get_llm_client(self) -> None:
        """verl's hook."""

    def _update_actor(self, batch: Any) -> None:
        time.sleep(0.01)
        waiting = getattr(self.replay_buffer.recorder, "_ahead", None)
        if waiting is not None:
            waiting.join()

    def _compute_metrics(self, batch: Any) -> None: ...


def submit(trainer: Trainer, queue: Queue, rng: np.random.Generator, step: int, groups: int, tokens: int) -> list[str]:
    """A step's groups, all finished at once."""
    buffer, uids = trainer.replay_buffer, [f"{step}x{g}" for g in range(groups)]
    trainer._submit_batch_to_rollout({"uid": uids, "raw_prompt": [f"{uid}?" for uid in uids]})
    for uid in uids:
        buffer.prompt_global_steps["train"][uid] = step
        buffer.finished_keys["train"].add(uid)
        for session in range(SIZE):
            n = queue.length[f"{uid}_{session}_0"] = int(rng.integers(tokens // 2, tokens * 3 // 2))
            versions = {"min_global_steps": 0, "max_global_steps": 2}
            buffer.partitions["train"][f"{uid}_{session}_0"] = {"prompt_len": 512, "response_len": n, **versions}
    return uids


@click.command()
@click.option("--trajectories", default=8192, help="Trained each step.")
@click.option("--tokens", default=8192)
@click.option("--steps", default=3)
@click.option("--evicted", default=0.1, help="Share of the groups that is thrown away on top.")
def main(trajectories: int, tokens: int, steps: int, evicted: float) -> None:
    """Measure."""
    queue, rng = Queue(tokens), np.random.default_rng(1)
    sys.modules.update(stand_ins(Buffer, (type("A", (), {}), type("B", (), {})), queue.kv_batch_get, lambda f: f))
    from verl_audit.record import verl  # noqa: PLC0415
    from verl_audit.record.guard import spent  # noqa: PLC0415

    kept = trajectories // SIZE
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(settings(Path(directory), kept), verl.AuditReplayBufferAsync, steps)
        for step in range(1, steps + 1):
            trainer.global_steps = step
            uids = submit(trainer, queue, rng, step, kept + round(kept * evicted), tokens)
            batch = trainer.replay_buffer.sample(step, "train", uids[kept:], uids[:kept])
            trainer._update_actor(batch)
            trainer._compute_metrics(batch)
        waited = trainer.replay_buffer.recorder.writer.seconds or 0.0  # before the last file is waited for
        counts = trainer.replay_buffer.recorder.writer.counts
        if counts.dropped or counts.lost or counts.failed:
            raise click.ClickException(f"not everything was recorded: {counts}")
    click.echo(f"{trajectories} trajectories of {tokens} tokens a step, and {evicted:.0%} more thrown away")
    click.echo(f"the trainer waited {waited / steps:.3f} s a step, {spent.processor / steps:.3f} s of it computing")
    click.echo(f"behind it: {spent.behind / steps:.2f} processor seconds a step")


if __name__ == "__main__":
    main()
