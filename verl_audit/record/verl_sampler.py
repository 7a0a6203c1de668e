"""Samplers for verl's v1 trainers that select as verl's own do, and record what is selected and what is thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_audit.record.guard import Missing, quietly, tell_once
from verl_audit.record.verl_recorder import VerlRecorder

KNOWN = ("0.9.0", "0.9.1")
"""Versions of verl that this was run with or read against."""


def _withheld(refill_fn: Any, *, is_async: bool) -> dict[str, Any]:
    """What verl hands to its own samplers and to no other, from the trainer behind `refill_fn`."""
    trainer = refill_fn.__self__
    config, sampler = trainer.config, trainer.config.trainer.v1.sampler
    metric = trainer._resolve_filter_groups_metric()
    refill = bool(sampler.get("sync_refill_failed_groups", False))
    if is_async:
        return {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    groups, size = config.algorithm.get("filter_groups", None), config.data.train_batch_size
    one_by_one = metric is not None or refill
    return {
        "filter_groups_metric": metric,
        "sync_refill_failed_groups": refill,
        "train_batch_size": size,
        "gen_batch_size": 1 if one_by_one else (config.data.get("gen_batch_size", None) or size),
        "max_inflight_gen_batches": 1 if metric is None else groups.get("max_inflight_gen_batches", 1),
    }


class _Audited:
    """What both samplers add: each override calls verl's own method and looks on."""

    _is_async = True
    recorder: VerlRecorder | None = None

    def __init__(self, *, refill_fn: Any = None, sampler_kwargs: Any = None, **given: Any) -> None:
        """Takes what verl gives to a custom sampler, and takes from the trainer what verl gives to its own alone."""
        withheld = _withheld(refill_fn, is_async=self._is_async)
        whole: dict[str, Any] = {**withheld, **given, "refill_fn": refill_fn, "sampler_kwargs": sampler_kwargs}
        super().__init__(**whole)
        self.recorder = quietly(self._make_recorder, refill_fn.__self__, sampler_kwargs)

    def _make_recorder(self, trainer: Any, options: Mapping[str, Any] | None) -> VerlRecorder:
        version = str(getattr(verl, "__version__", "unknown"))
        if not version.startswith(KNOWN):
            tell_once("version", f"verl {version} is not one of {', '.join(KNOWN)}: what is not found is not recorded")
        return VerlRecorder(self, trainer, options or {}, Missing(f"verl {version}"))

    def sample(self, global_steps: int, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        """verl's sample; the time until it returns is the wait for this batch."""
        if self.recorder is not None:
            quietly(self.recorder.sample_began, partition_id)
        return super().sample(global_steps, partition_id, *args, **kwargs)  # type: ignore[misc]

    def _sync_metadata_from_transfer_queue(self) -> Any:
        result = super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]
        if self.recorder is not None:
            quietly(self.recorder.polled)
        return result

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        if self.recorder is not None:
            quietly(self.recorder.evicted, global_steps, partition_id, eviction_reasons)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)  # type: ignore[misc]

    def _clear_groups(self, partition_id: str, uids: set[str]) -> Any:
        if self.recorder is not None:
            quietly(self.recorder.cleared, partition_id, uids)
        return super()._clear_groups(partition_id, uids)  # type: ignore[misc]

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], *args: Any, **kwargs: Any) -> Any:
        if self.recorder is not None:
            quietly(self.recorder.selected, partition_id, selected_prompt_uids)
        return super()._materialize_batch(partition_id, selected_prompt_uids, *args, **kwargs)  # type: ignore[misc]


class AuditReplayBufferAsync(_Audited, ReplayBufferAsync):
    """verl's sampler of the asynchronous trainers, with a record of every group."""


class AuditReplayBuffer(_Audited, ReplayBuffer):
    """verl's sampler of the synchronous trainer, with a record of every group."""

    _is_async = False
