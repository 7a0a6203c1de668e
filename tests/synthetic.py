"""Small verl 0.9.1 runs made up for tests: rows under verl's key names, written as its file logger writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

Row = tuple[int, dict[str, float | None]]
OFF = "training/off_policy/"


def row(
    step: int,
    *,
    reward: float = 0.5,
    gap: float | None = 0.004,
    chi2: float | None = 0.003,
    lag: float | None = 0.0,
    lag_max: float | None = None,
    extra: Mapping[str, float | None] | None = None,
) -> Row:
    """One full row of a v1 trainer; None leaves the keys of that gauge out."""
    data: dict[str, float | None] = {
        "training/global_step": step,
        "training/epoch": 0,
        "critic/score/mean": reward,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": reward,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "critic/advantages/mean": 0.001,
        "actor/pg_loss": 0.01,
        "actor/grad_norm": 1.25,
        "actor/entropy": 0.4,
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": 0.0,
        "response_length/mean": 100.5,
        "response_length/max": 200.0,
        "response_length/min": 10.0,
        "prompt_length/mean": 50.25,
        "timing_s/step": 10.125,
        "timing_s/gen": 5.25,
        "timing_s/update_weights": 0.25,
        "perf/total_num_tokens": 64 * 150.75,
    }
    if gap is not None:
        data |= {
            "training/rollout_probs_diff_mean": gap,
            "training/rollout_probs_diff_max": min(1.0, 20 * gap),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_actor_probs_pearson_corr": 0.9991,
            "rollout_corr/kl": 0.0005,
        }
    if chi2 is not None:
        data["rollout_corr/chi2_token"] = chi2
    if lag is not None:
        top = lag if lag_max is None else lag_max
        data |= {
            f"{OFF}trajectory_spans/mean": 1.0 + lag / 2,
            f"{OFF}trajectory_spans/max": 1.0 + top,
            f"{OFF}trajectory_staleness/mean": lag / 2,
            f"{OFF}trajectory_staleness/max": top,
            f"{OFF}trajectory_staleness/min": 0.0,
            f"{OFF}trajectory_staleness_worst/mean": lag,
            f"{OFF}trajectory_staleness_worst/max": top,
        }
    return step, data | dict(extra or {})


def learning(step: int, *, speed: float = 1.0, tau: float = 40.0) -> float:
    """A saturating reward curve from .2 to .8."""
    return 0.8 - 0.6 * exp(-speed * step / tau)


def rows(
    steps: Iterable[int], *, speed: float = 1.0, noise: float = 0.01, seed: int = 0, every: int = 0, **given: Any
) -> list[Row]:
    """Rows of a run that learns; `every` steps a validation score is added, step 0 included."""
    rng, made = random.Random(seed), []
    for step in steps:
        extra = dict(given.get("extra") or {})
        if every and step % every == 0:
            extra["val-core/toy/acc/mean@1"] = learning(step, speed=speed) + rng.gauss(0, noise / 2)
        if step == 0:
            made.append((0, {k: v for k, v in extra.items() if k.startswith("val")}))
            continue
        jitter = {"prompt_length/mean": 50 + rng.gauss(0, 1), **extra}
        gap = given.get("gap", 0.004)
        made.append(
            row(
                step,
                **{
                    **given,
                    "gap": None if gap is None else gap * (1 + rng.gauss(0, 0.02)),
                    "reward": learning(step, speed=speed) + rng.gauss(0, noise),
                    "extra": jitter,
                },
            )
        )
    return made


def write_jsonl(path: Path, made: Sequence[Row]) -> Path:
    """The rows as verl's file logger writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in made), encoding="utf-8")
    return path


def config_text(mode: str = "sync", **over: Any) -> str:
    """A Hydra configuration of a v1 run, as YAML; `over` sets flat names used in tests."""
    value = {
        "train_batch_size": 16,
        "mini": 16,
        "n": 4,
        "train_files": "data/toy/train.parquet",
        "bypass": "false",
        "quantization": "null",
        "threshold": 4,
        "strategy": "drop",
        "lr": 1e-4,
        **over,
    }
    return f"""
data:
  train_batch_size: {value["train_batch_size"]}
  max_response_length: 200
  train_files: {value["train_files"]}
algorithm:
  rollout_correction: {{rollout_is: null, rollout_rs: null, bypass_mode: {value["bypass"]}}}
  filter_groups: {{enable: false}}
actor_rollout_ref:
  hybrid_engine: true
  actor:
    ppo_mini_batch_size: {value["mini"]}
    ppo_epochs: 1
    fsdp_config: {{dtype: bfloat16}}
    optim: {{lr: {value["lr"]}}}
  rollout:
    n: {value["n"]}
    dtype: bfloat16
    quantization: {value["quantization"]}
    calculate_log_probs: true
    temperature: 1.0
    top_p: 1.0
    top_k: -1
trainer:
  use_v1: true
  total_training_steps: 60
  v1:
    trainer_mode: {mode}
    separate_async: {{parameter_sync_step: 1}}
    sampler:
      max_off_policy_threshold: {value["threshold"]}
      max_off_policy_strategy: {value["strategy"]}
      custom_sampler: {{}}
"""


def write_run(folder: Path, made: Sequence[Row], mode: str | None = "sync", *, name: str = "exp", **over: Any) -> Path:
    """A run directory with a file log and, when `mode` is given, its Hydra configuration."""
    write_jsonl(folder / "toy" / f"{name}.jsonl", made)
    if mode is not None:
        hydra = folder / ".hydra"
        hydra.mkdir(exist_ok=True)
        (hydra / "config.yaml").write_text(config_text(mode, **over), encoding="utf-8")
    return folder
