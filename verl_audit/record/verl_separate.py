"""What fully_async and one_step_off tell: the batch of every update, segments from the clients, and each sync.

Both derive from verl's SeparateRayPPOTrainer, whose `_fit_update_actor` sees the whole batch just before the update.
Only trained trajectories pass there: what fully_async's queue loses by overflow is counted by verl and has no name.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
from verl.utils.ray_utils import auto_await

from verl_audit.record.guard import Missing, quietly, spent
from verl_audit.record.verl_rows import Fate, Group, Trained, row, trained_row
from verl_audit.record.verl_sync import SyncLog
from verl_audit.record.writer import TraceWriter

RECORDER = "_verl_audit_recorder"


def watch_clients(module: ModuleType) -> None:
    """Rollout clients of every trainer note their calls."""
    original = module.LLMServerManager.get_client

    @wraps(original)
    def get_client(self: Any, *args: Any, **kwargs: Any) -> Any:
        client = original(self, *args, **kwargs)
        quietly(_audited, client)
        return client

    module.LLMServerManager.get_client = get_client


def _audited(client: Any) -> None:
    from verl_audit.record.verl_client import audited  # noqa: PLC0415  it imports the module that is being patched

    audited(client)


def watch_trainer(module: ModuleType) -> None:
    """Batches are written before the update that trains on them."""
    original = module.SeparateRayPPOTrainer._fit_update_actor

    @wraps(original)
    def _fit_update_actor(self: Any, batch: Any) -> Any:
        quietly(_record, self, batch)
        return original(self, batch)

    module.SeparateRayPPOTrainer._fit_update_actor = _fit_update_actor


def _record(trainer: Any, batch: Any) -> None:
    recorder = trainer.__dict__.get(RECORDER)
    if recorder is None:
        recorder = trainer.__dict__[RECORDER] = SeparateRecorder(trainer)
    recorder.update(batch)


class SeparateRecorder:
    """Writes the rows of one trainer."""

    def __init__(self, trainer: Any) -> None:
        """The first update finds the checkpoint manager made, so all syncs but the first are timed."""
        config = trainer.config
        self.trainer = trainer
        self.updates = 0
        correction = config.algorithm.get("rollout_correction") or {}
        self.is_bypass = bool(correction.get("bypass_mode", False))
        self.rejects = correction.get("rollout_rs") is not None
        self.limit = int(config.data.max_response_length)
        self.syncs = SyncLog(lambda: int(trainer.global_steps), auto_await)
        self.syncs.watch_manager(trainer.checkpoint_manager, missing := Missing("verl"))
        missing.tell()
        self.writer = TraceWriter(
            os.environ["VERL_AUDIT_DIR"],
            run=str(config.trainer.experiment_name),
            updates_per_version=_updates_per_version(config),
            log_prob_sample=float(os.environ.get("VERL_AUDIT_LOG_PROB_SAMPLE", "0.05")),
        )

    def update(self, batch: Any) -> None:
        """One batch is about to be trained on."""
        step = int(self.trainer.global_steps)
        rows = [self._row(made, step, self._version(step)) for made in _unpacked(batch)]
        self.updates += 1
        for made in rows:
            self.syncs.interrupted(made.get("segments") or ())
        segments = [s for made in rows for s in made.get("segments") or ()]
        self.writer.trajectories(rows)
        self.writer.syncs([*self.syncs.drain(), *self.syncs.replicas(segments)])
        self.writer.seconds = spent.so_far()
        self.writer.step_done(step)

    def _version(self, step: int) -> int:
        """fully_async counts syncs. one_step_off gives the weights that step g trains the label g as it begins.

        In the first step of its life nothing has been trained since the label before, which sampled the batch.
        """
        counted = getattr(self.trainer, "current_param_version", None)
        return int(counted) if counted is not None else step if self.updates else step - 1

    def _row(self, one: dict[str, Any], step: int, version: int) -> dict[str, Any]:
        key = f"{one['uid']}_{one['session']}_0"
        tag = {
            "prompt_len": one["prompt_length"],
            "response_len": one["response_length"],
            "min_global_steps": _version(one.get("min_global_steps")),
            "max_global_steps": _version(one.get("max_global_steps")),
        }
        fields = {"extra_fields": one, "rm_scores": one.get("scores"), "num_turns": one.get("__num_turns__")}
        made = row(key, tag, fields, Group(), Fate(("trained",), step, None), self.limit)
        lists = Trained(
            minibatch=self._minibatch(),
            behave=one.get("rollout_log_probs"),
            prox=None if self.is_bypass else one.get("old_log_probs"),
            mask=None if self.rejects else one["kept"],  # what was rejected is masked by now
            kept=one["kept"],
            advantages=one.get("advantages"),
        )
        return trained_row(made, step, lists, version=version)

    def _minibatch(self) -> int | None:
        """Updates since the last sync: known in fully_async where a batch is one mini-batch."""
        local = getattr(self.trainer, "local_trigger_step", None)
        settings = self.trainer.config.get("async_training")
        if local is None or settings is None or int(settings.get("require_batches", 1)) != 1:
            return None
        return (int(local) - 1) * _epochs(self.trainer.config)


def _epochs(config: Any) -> int:
    return int(config.actor_rollout_ref.actor.get("ppo_epochs", 1) or 1)


def _updates_per_version(config: Any) -> int | None:
    settings = config.get("async_training")
    if settings is None:
        return None
    steps, batches = settings.get("trigger_parameter_sync_step", 1), settings.get("require_batches", 1)
    return int(steps) * int(batches) * _epochs(config)


def _version(value: Any) -> int | None:
    return None if value is None else int(value)


def _unpacked(batch: Any) -> list[dict[str, Any]]:
    """Rows of verl's DataProto: right-padded responses and left-padded prompts cut to their lengths."""
    tensors, others = batch.batch, batch.non_tensor_batch
    width = tensors["responses"].shape[1]
    attention = tensors["attention_mask"].detach().cpu().numpy()
    lengths, prompts = attention[:, -width:].sum(1), attention[:, :-width].sum(1)
    names = {"rollout_log_probs": np.float32, "old_log_probs": np.float32, "advantages": np.float32}
    lists = {n: tensors[n].detach().float().cpu().numpy().astype(k) for n, k in names.items() if n in tensors}
    kept = tensors["response_mask"].detach().cpu().numpy().astype(bool)
    scores = tensors["token_level_scores"].detach().float().cpu().numpy() if "token_level_scores" in tensors else None
    seen: Counter[str] = Counter()
    made = []
    for i, length in enumerate(lengths):
        one: dict[str, Any] = {name: values[i] for name, values in others.items()}
        uid = str(one.get("uid", i))
        one.update(uid=uid, session=seen[uid], response_length=int(length), prompt_length=int(prompts[i]))
        seen[uid] += 1
        one.update({name: values[i, :length] for name, values in lists.items()}, kept=kept[i, :length])
        one["scores"] = None if scores is None else scores[i]
        made.append(one)
    return made
