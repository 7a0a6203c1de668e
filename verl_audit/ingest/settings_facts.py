"""Settings of verl that are facts as they stand: fact, where it is configured, its kind, and what null means there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
CORRECTION, FILTER, V1 = "algorithm.rollout_correction", "algorithm.filter_groups", "trainer.v1"
REWARD_MODEL = "reward.reward_model"


@dataclass(frozen=True)
class Setting:
    """The first of the paths that is configured; `null` is the fact where it is configured as null."""

    paths: tuple[str, ...]
    kind: Literal["text", "number", "flag"]
    null: str | float | None = None


SETTINGS: Mapping[str, Setting] = {
    "correction_configured": Setting((f"{CORRECTION}.rollout_is",), "text", "none"),
    "rejection_configured": Setting((f"{CORRECTION}.rollout_rs",), "text", "none"),
    "rejection_threshold": Setting((f"{CORRECTION}.rollout_rs_threshold",), "text", "none"),
    "correction_loss": Setting((f"{CORRECTION}.loss_type",), "text"),
    "logprobs_mode": Setting((f"{ROLLOUT}.logprobs_mode",), "text"),
    "actor_strategy": Setting((f"{ACTOR}.strategy",), "text"),
    "routing_recorded": Setting((f"{ROLLOUT}.enable_rollout_routing_replay",), "flag"),
    "filter_metric": Setting((f"{FILTER}.metric",), "text", "none"),
    "filter_max_batches": Setting((f"{FILTER}.max_num_gen_batches",), "number", 0.0),
    "refill_failed": Setting((f"{V1}.sampler.sync_refill_failed_groups",), "flag"),
    "train_batch_size": Setting(("data.train_batch_size",), "number"),
    "gen_batch_size": Setting(("data.gen_batch_size",), "number", 0.0),
    "mini_batch_size": Setting((f"{ACTOR}.ppo_mini_batch_size",), "number"),
    "sync_steps": Setting((f"{V1}.separate_async.parameter_sync_step",), "number"),
    "ppo_epochs": Setting((f"{ACTOR}.ppo_epochs",), "number"),
    "rollout_nodes": Setting((f"{ROLLOUT}.nnodes",), "number"),
    "rollout_gpus": Setting((f"{ROLLOUT}.n_gpus_per_node",), "number"),
    "sync_backend": Setting((f"{ROLLOUT}.checkpoint_engine.backend",), "text"),
    "hybrid_engine": Setting(("actor_rollout_ref.hybrid_engine",), "flag"),
    "reward_model": Setting((f"{REWARD_MODEL}.enable", "reward_model.enable"), "flag"),
    "reward_pool": Setting((f"{REWARD_MODEL}.enable_resource_pool", "reward_model.enable_resource_pool"), "flag"),
    "critic_warmup": Setting(("trainer.critic_warmup",), "number"),
    "validates_before": Setting(("trainer.val_before_train",), "flag"),
}
"""verl 0.9's keys; what each does to a run is told by the rules in rules/config."""
