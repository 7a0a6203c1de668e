"""The policy loss: which log-prob is 'old', which tokens the clip silences, which weights correct for the rest.

With b, p, q the log-probs of rollout engine, pi_old and the policy being updated:

    bypass       ratio = exp(q - b)    staleness and mismatch both push tokens over the clip, where they teach nothing
    recompute    ratio = exp(q - p)    nothing is clipped, and nothing corrects for samples of another policy
    decoupled    recompute, each token weighted by exp(p - b): truncated (TIS), or masked when far off (MIS)

Clip and dual clip as in verl's `compute_policy_loss_vanilla`; advantages as in GRPO, per group and divided by the
standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.numerics import Floats
from verl_audit.reference.settings import Settings

DUAL_CLIP = 3.0
"""clip_ratio_c of verl."""


@dataclass(frozen=True)
class Weighted:
    """Correction of each token: its weight, and whether it stays in the loss."""

    weight: Floats
    kept: NDArray[np.bool_]


@dataclass(frozen=True)
class Pushed:
    """What one update does to each token's log-prob, and how much of it the clip silenced."""

    push: Floats
    """-d loss / d log-prob."""
    loss: float
    clipped: float
    clipped_lower: float
    kl: float


def advantages(rewards: Floats) -> Floats:
    """GRPO: (groups, members) rewards, centred in the group and divided by its standard deviation."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    result: Floats = centred / (rewards.std(axis=1, ddof=1, keepdims=True) + np.float32(1e-6))
    return result


def correction(settings: Settings, old: Floats, behave: Floats, mask: NDArray[np.bool_]) -> Weighted:
    """Truncated importance weights and rejection masks from `old - behave`, (trajectories, positions)."""
    s = settings
    gap = np.where(mask, old - behave, np.float32(0))
    total, count = gap.sum(axis=1, keepdims=True), mask.sum(axis=1, keepdims=True)
    log_weight = {"none": np.zeros_like(gap), "token": gap, "sequence": np.broadcast_to(total, gap.shape)}[s.rollout_is]
    weight = np.minimum(np.exp(np.clip(log_weight, -20, 20)), np.float32(s.rollout_is_threshold))
    kept = mask
    if s.rollout_rs != "none":
        tested = gap if s.rollout_rs == "token_k1" else np.broadcast_to(total / count, gap.shape)
        kept = mask & (np.abs(tested) <= np.log(s.rollout_rs_threshold))
    return Weighted(weight.astype(np.float32), kept)


def push(settings: Settings, theta: Floats, old: Floats, advantage: Floats, fix: Weighted) -> Pushed:
    """Gradient of the clipped loss, token mean. All (trajectories, positions)."""
    s, kept = settings, fix.kept
    n = max(1, int(kept.sum()))
    ratio = np.exp(np.clip(theta - old, -20, 20))
    high = (advantage > 0) & (ratio > 1 + s.clip)
    low = (advantage < 0) & (ratio < 1 - s.clip)
    dual = (advantage < 0) & (ratio > DUAL_CLIP)
    silent = (high | low | dual) | ~kept
    gain = np.where(silent, 0, advantage * ratio * fix.weight) / np.float32(n)
    bounded = np.where(high | low, np.clip(ratio, 1 - s.clip, 1 + s.clip), np.where(dual, DUAL_CLIP, ratio))
    loss = -float((advantage * bounded * fix.weight)[kept].sum()) / n
    share = [float((what & kept).sum()) / n for what in (high | low, dual)]
    return Pushed(gain.astype(np.float32), loss, share[0], share[1], float((old - theta)[kept].sum()) / n)
