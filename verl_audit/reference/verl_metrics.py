"""The metrics of one mini-batch and of one step, by verl's own formulas and key names (0.9.1).

Which keys exist depends on the mode, and a missing key says as much as a value: bypass mode logs no gap between
trainer and rollout at all, and eviction counts are left out where they are 0. Values are Python numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.batch import Trajectories
from verl_audit.reference.buffer import Counts
from verl_audit.reference.learner import Learner, Updated
from verl_audit.reference.numerics import Floats
from verl_audit.reference.settings import Settings

Metrics = dict[str, float | int]
OFF = "training/off_policy/"
PROMPT_TOKENS = 4
"""Tokens of the shortest prompt; a prompt names its class, so longer answers have longer prompts."""


def prompt_lengths(settings: Settings, prompt_class: NDArray[np.int64]) -> NDArray[np.int64]:
    """Prompt tokens of each trajectory."""
    lengths = np.array(sorted(set(settings.lengths)))
    return np.asarray(PROMPT_TOKENS + 2 * (prompt_class % len(lengths)) + prompt_class % 3)


def minibatch_metrics(settings: Settings, done: Updated) -> Metrics:
    """What the trainer and its workers report for one update."""
    made: Metrics = {}
    mask = done.trajectories.mask
    if done.prox is not None:
        made["actor/entropy"] = _mean(done.entropy[mask])
        made |= probs_diff(done.prox[mask], done.trajectories.behave[mask])
        made |= rollout_corr(settings, done)
    return made | actor(done)


def probs_diff(old: Floats, behave: Floats) -> Metrics:
    """Differences of probabilities (not log-probs) of the sampled tokens, `calculate_debug_metrics`."""
    p, b = np.exp(old), np.exp(behave)
    gap = np.abs(p - b)
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_mean": _mean(gap),
        "training/rollout_probs_diff_std": float(gap.std(ddof=1)),
        "training/rollout_actor_probs_pearson_corr": _pearson(p, b),
    }


def rollout_corr(settings: Settings, done: Updated) -> Metrics:
    """Off-policy metrics, then importance weights and rejection where they are set, `rollout_corr_helper`."""
    batch = done.trajectories
    mask = batch.mask
    old = np.asarray(done.old, np.float64)
    behave, count = np.asarray(batch.behave, np.float64), batch.length
    gap = np.where(mask, old - behave, 0.0)
    log_ppl, log_ppl_rollout = -_rows(old, mask) / count, -_rows(behave, mask) / count
    apart = log_ppl - log_ppl_rollout
    tokens = gap[mask]
    made: Metrics = {
        "rollout_corr/training_ppl": _mean(np.exp(log_ppl)),
        "rollout_corr/training_log_ppl": _mean(log_ppl),
        "rollout_corr/kl": _mean(-tokens),
        "rollout_corr/k3_kl": _mean(np.exp(tokens) - tokens - 1),
        "rollout_corr/rollout_ppl": _mean(np.exp(log_ppl_rollout)),
        "rollout_corr/rollout_log_ppl": _mean(log_ppl_rollout),
        "rollout_corr/log_ppl_diff": _mean(apart),
        "rollout_corr/log_ppl_abs_diff": _mean(np.abs(apart)),
        "rollout_corr/log_ppl_diff_max": float(apart.max()),
        "rollout_corr/log_ppl_diff_min": float(apart.min()),
        "rollout_corr/ppl_ratio": _mean(np.exp(apart)),
        "rollout_corr/chi2_token": _mean(np.exp(2 * np.clip(tokens, -20, 20))) - 1,
        "rollout_corr/chi2_seq": _mean(np.exp(2 * np.clip(gap.sum(axis=1), -20, 20))) - 1,
    }
    if settings.rollout_is != "none":
        made |= _weights(settings, gap, mask)
    if settings.rollout_rs != "none":
        made |= _rejected(settings, done, gap)
    return made


def _weights(settings: Settings, gap: NDArray[np.float64], mask: NDArray[np.bool_]) -> Metrics:
    top, key = settings.rollout_is_threshold, "rollout_corr/rollout_is_"
    by_row = settings.rollout_is == "sequence"
    logs = np.broadcast_to(gap.sum(axis=1, keepdims=True), gap.shape) if by_row else gap
    raw = np.exp(np.clip(logs, -20, 20))
    weight = np.minimum(raw, top)
    tokens = weight[mask]
    per_row = _rows(weight, mask) / mask.sum(axis=1)
    raw_row = _rows(raw, mask) / mask.sum(axis=1)
    ends = raw[:, 0] if by_row else tokens
    judged = raw[:, 0] if by_row else raw[mask]
    return {
        f"{key}mean": _mean(tokens),
        f"{key}max": float(ends.max()),
        f"{key}min": float(ends.min()),
        f"{key}std": float(tokens.std()),
        f"{key}eff_sample_size": 1 / _mean((tokens / max(tokens.mean(), 1e-12)) ** 2),
        f"{key}ratio_fraction_high": _mean(np.asarray(judged > top)),
        f"{key}ratio_fraction_low": _mean(np.asarray(judged < 1 / top)),
        f"{key}seq_mean": _mean(per_row),
        f"{key}seq_std": float(per_row.std(ddof=1)),
        f"{key}seq_max": float(per_row.max()),
        f"{key}seq_min": float(per_row.min()),
        f"{key}seq_max_deviation": float(np.abs(per_row - 1).max()),
        f"{key}seq_fraction_high": _mean(raw_row > top),
        f"{key}seq_fraction_low": _mean(raw_row < 1 / top),
    }


def _rejected(settings: Settings, done: Updated, gap: NDArray[np.float64]) -> Metrics:
    """k1 is minus the log-ratio, per token or its mean over the trajectory; the thresholds are ratios."""
    mask, name = done.trajectories.mask, settings.rollout_rs
    limit = float(np.log(settings.rollout_rs_threshold))
    rows = -_rows(gap, mask) / mask.sum(axis=1)
    values = -gap[mask] if name == "token_k1" else rows
    gone = mask & ~done.fix.kept
    lost, lost_rows = float(gone.sum() / mask.sum()), _mean(np.asarray(gone.any(axis=1)))
    key = f"rollout_corr/rollout_rs_{name}_"
    made: Metrics = {
        f"{key}mean": _mean(values),
        f"{key}max": float(values.max()),
        f"{key}min": float(values.min()),
        f"{key}std": float(values.std()),
        f"{key}fraction_high": _mean(values > limit),
        f"{key}fraction_low": _mean(values < -limit),
        f"{key}masked_fraction": lost,
        f"{key}seq_masked_fraction": lost_rows,
        f"{key}seq_mean": _mean(rows),
        f"{key}seq_std": float(rows.std(ddof=1)),
        f"{key}seq_max": float(rows.max()),
        f"{key}seq_min": float(rows.min()),
        f"{key}seq_max_deviation": float(np.abs(rows).max()),
        f"{key}seq_fraction_high": _mean(rows > limit),
        f"{key}seq_fraction_low": _mean(rows < -limit),
    }
    both = {"rollout_rs_masked_fraction": lost, "rollout_rs_seq_masked_fraction": lost_rows}
    return made | {f"rollout_corr/{k}": v for k, v in both.items()}


def actor(done: Updated) -> Metrics:
    """What the update itself reports; in decoupled mode with one update a version the clip is 0 by construction."""
    return {
        "actor/pg_clipfrac": done.pushed.clipped,
        "actor/ppo_kl": done.pushed.kl,
        "actor/pg_clipfrac_lower": done.pushed.clipped_lower,
        "actor/pg_loss": done.pushed.loss,
        "actor/loss": done.pushed.loss,
        "actor/grad_norm": done.grad_norm,
        "actor/lr": done.rate,
        "actor/perf/max_memory_allocated_gb": 12.5,
        "actor/perf/max_memory_reserved_gb": 14.0,
        "actor/perf/cpu_memory_used_gb": 40.0,
    }


def data_metrics(settings: Settings, updated: Sequence[Updated]) -> Metrics:
    """Rewards, advantages and lengths of everything a step trained on, `compute_data_metrics`."""
    batches = [u.trajectories for u in updated]
    reward = np.concatenate([b.reward for b in batches]).astype(np.float64)
    each = np.concatenate([u.advantage[u.fix.kept] for u in updated]).astype(np.float64)
    length = np.concatenate([b.length for b in batches])
    prompts = prompt_lengths(settings, np.concatenate([b.prompt_class for b in batches]))
    made: Metrics = {}
    for name, values in (
        ("critic/score", reward),
        ("critic/rewards", reward),
        ("critic/advantages", each if len(each) else np.zeros(1)),
        ("critic/returns", each if len(each) else np.zeros(1)),
    ):
        made |= {f"{name}/{k}": v for k, v in _spread(values).items()}
    widest = settings.response_limit if settings.trainer == "fully_async" else int(length.max())
    for name in ("response_length", "response_length_non_aborted"):
        made |= {f"{name}/{k}": v for k, v in _spread(length).items()}
        made[f"{name}/clip_ratio"] = _mean(length == widest)
    made["response/aborted_ratio"] = 0.0
    made |= {f"prompt_length/{k}": v for k, v in _spread(prompts).items()}
    made["prompt_length/clip_ratio"] = _mean(prompts == prompts.max())
    return made | {"num_turns/min": 2, "num_turns/max": 2, "num_turns/mean": 2.0}


def off_policy(learner: Learner, version: int, batches: Sequence[Trajectories]) -> Metrics:
    """Spans and lags of trained trajectories, from the versions of the first and the last generation attempt."""
    labels = np.array(learner.labels)
    first = np.concatenate([b.attempt for b in batches])
    last = np.concatenate([labels[b.last_source()] for b in batches])
    made: Metrics = {}
    for name, values in (
        ("trajectory_spans", last - first + 1),
        ("trajectory_staleness", version - last),
        ("trajectory_staleness_worst", version - first),
    ):
        made |= {
            f"{OFF}{name}/mean": _mean(values),
            f"{OFF}{name}/max": int(values.max()),
            f"{OFF}{name}/min": int(values.min()),
        }
    return made


def evictions(counts: Counts) -> Metrics:
    """Groups evicted since the last step; keys of what did not happen are left out."""
    made: Metrics = {}
    if counts.stale_ages:
        made[f"{OFF}evicted_samples"] = float(len(counts.stale_ages))
        made |= {f"{OFF}evicted_samples_staleness/{k}": v for k, v in _spread(np.array(counts.stale_ages)).items()}
    if counts.filtered:
        made["training/filter_groups/evicted_samples"] = float(counts.filtered)
    if counts.failed:
        made["training/rollout_failure/evicted_samples"] = float(counts.failed)
    return made


def combined(parts: Sequence[Metrics]) -> Metrics:
    """Mini-batches of a step as v1 aggregates them: by what the key contains; equal sizes, so means are plain."""
    if len(parts) == 1:
        return parts[0]
    made: Metrics = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        made[key] = _reduced(key, values)
    return made


def _reduced(key: str, values: Sequence[float | int]) -> float | int:
    if key.endswith(("/lr", "_valid")):
        return values[-1]
    if "max" in key:
        return max(values)
    if "min" in key:
        return min(values)
    return sum(values) / len(values)


def _spread(values: NDArray[np.floating] | NDArray[np.integer]) -> Metrics:
    return {"mean": _mean(values), "max": float(values.max()), "min": float(values.min())}


def _rows(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray(np.where(mask, values, 0.0).sum(axis=1))


def _mean(values: NDArray[np.generic]) -> float:
    return float(np.mean(values, dtype=np.float64))  # type: ignore[arg-type]


def _pearson(x: Floats, y: Floats) -> float:
    a, b = x - x.mean(dtype=np.float64), y - y.mean(dtype=np.float64)
    bottom = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / bottom if bottom > 0 else float("nan")
