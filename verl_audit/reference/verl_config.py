"""The Hydra configuration of a simulated run: the settings that decide anything, under verl's names.

A configuration says what was asked, not what happened. Faults of the engine (a temperature of its own, weights
that do not arrive, a restart with other arguments) stand nowhere in it, as in real runs.
"""

from __future__ import annotations

from typing import Any

import yaml

from verl_audit.reference.settings import Settings

Config = dict[str, Any]
VERL_SEPARATE = {"num_warmup_batches": 1, "parameter_sync_step": 4}
"""verl's defaults, which stand in the configuration of other modes too."""
VERL_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}


def config(s: Settings, project: str, experiment: str) -> Config:
    """Nested configuration, as `.hydra/config.yaml` holds it."""
    made: Config = {
        "actor_rollout_ref": {"actor": _actor(s), "rollout": _rollout(s, s.trainer), "model": {"path": _model(s)}},
        "data": {
            "train_files": "data/unit_tests/train.parquet",
            "val_files": "data/unit_tests/val.parquet",
            "max_prompt_length": 16,
            "max_response_length": s.response_limit,
            "train_batch_size": 0 if s.trainer == "fully_async" else s.group_batch,
            "gen_batch_size": 1 if s.trainer == "fully_async" else None,
            "shuffle": True,
        },
        "algorithm": _algorithm(s),
        "reward": {"custom_reward_function": {"path": "unit_tests.py", "name": "compute_score"}},
        "trainer": _trainer(s, project, experiment),
    }
    made["actor_rollout_ref"]["hybrid_engine"] = s.trainer != "fully_async"
    if s.trainer == "fully_async":
        made["async_training"] = {
            "staleness_threshold": s.staleness_share,
            "trigger_parameter_sync_step": s.updates_per_sync,
            "require_batches": 1,
            "partial_rollout": s.partial_rollout,
        }
    return made


def _model(s: Settings) -> str:
    return f"models/softmax-{'moe' if s.experts else 'dense'}-{s.features}"


def _actor(s: Settings) -> Config:
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": s.groups,
        "ppo_epochs": 1,
        "clip_ratio": s.clip,
        "clip_ratio_low": s.clip,
        "clip_ratio_high": s.clip,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": s.entropy_coeff,
        "use_kl_loss": False,
        "policy_loss": {"loss_mode": "vanilla"},
        "grad_clip": 1.0,
        "optim": {"lr": s.rate, "lr_scheduler_type": "constant", "weight_decay": 0.0},
        "fsdp_config": {"dtype": "float32", "model_dtype": "fp32"},
        "router_replay": {"mode": "R3" if s.router_replay else "disabled"},
    }


def _rollout(s: Settings, trainer: str) -> Config:
    form = s.rollout_format if not s.onset else "bf16"
    quantised, own_cards = form not in VERL_DTYPE, trainer in ("sync", "colocate_async")
    return {
        "name": "vllm",
        "mode": "async",
        "n": s.group_size,
        "nnodes": 0 if own_cards else 1,
        "n_gpus_per_node": s.replicas,
        "tensor_model_parallel_size": 1,
        "temperature": 1.0,
        "top_p": s.top_p if not s.onset else 1.0,
        "top_k": -1,
        "dtype": VERL_DTYPE.get(form, "bfloat16"),
        "quantization": form if quantised else None,
        "response_length": s.response_limit,
        "logprobs_mode": "processed_logprobs",
        "calculate_log_probs": True,
        "enable_rollout_routing_replay": s.router_replay,
        "checkpoint_engine": {"backend": "naive" if own_cards else "nccl"},
        "val_kwargs": {"temperature": 1.0, "do_sample": True, "n": 1},
    }


def _algorithm(s: Settings) -> Config:
    return {
        "adv_estimator": "grpo",
        "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False,
        "filter_groups": {"enable": s.filter_groups, "metric": "reward"},
        "rollout_correction": {
            "rollout_is": None if s.rollout_is == "none" else s.rollout_is,
            "rollout_is_threshold": s.rollout_is_threshold,
            "rollout_rs": None if s.rollout_rs == "none" else s.rollout_rs,
            "rollout_rs_threshold": s.rollout_rs_threshold if s.rollout_rs != "none" else None,
            "bypass_mode": s.bypass,
            "loss_type": "ppo_clip",
            "rollout_is_batch_normalize": False,
        },
    }


def _trainer(s: Settings, project: str, experiment: str) -> Config:
    made: Config = {
        "project_name": project,
        "experiment_name": experiment,
        "logger": ["console", "file"],
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "total_training_steps": s.updates // s.updates_per_sync,
        "test_freq": s.test_freq,
        "val_before_train": True,
        "critic_warmup": 0,
        "resume_mode": "disable",
    }
    if s.trainer == "fully_async":
        return made | {"use_v1": False}
    sampler: Config = {
        "max_off_policy_threshold": s.threshold or None,
        "max_off_policy_strategy": s.strategy,
        "sync_refill_failed_groups": False,
        "custom_sampler": {"path": None, "name": None},
    }
    if s.admission >= 0:
        sampler["custom_sampler"] = {"path": "admission.py", "name": "AdmissionReplayBufferAsync"}
        sampler["sampler_kwargs"] = {"max_head_offpolicyness": s.admission}
    elif s.order == "completion":
        sampler["custom_sampler"] = {"path": "completion.py", "name": "CompletionOrderReplayBufferAsync"}
    separate = {"num_warmup_batches": s.warmup, "parameter_sync_step": s.updates_per_sync}
    modes: Config = {"separate_async": separate}
    if s.trainer == "colocate_async":
        modes = {"colocate_async": {"num_warmup_batches": s.warmup}, "separate_async": VERL_SEPARATE}
    v1: Config = {"trainer_mode": s.trainer, "sync": {}, **modes, "sampler": sampler}
    return made | {"use_v1": True, "v1": v1}


def config_text(made: Config) -> str:
    """YAML in the order given."""
    return yaml.safe_dump(made, sort_keys=False)
