"""Does a run differ from its baseline in what it was to learn, and how fast, rather than in how it was run?

A slowdown against a baseline with another learning rate or data set says nothing of asynchrony. Keys are matched by
their last parts, since frameworks nest them differently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

_OPTIMISER = r"optim\.(lr|weight_decay|lr_warmup_steps|lr_warmup_steps_ratio|lr_scheduler_type|warmup_style|betas)"
_LOSS = (
    r"actor\.(entropy_coeff|use_kl_loss|kl_loss_coef|kl_loss_type|clip_ratio(_low|_high|_c)?|loss_agg_mode|ppo_epochs|"
    r"ppo_mini_batch_size|grad_clip)|policy_loss\.loss_mode"
)
_ADVANTAGE = r"algorithm\.(adv_estimator|gamma|lam|norm_adv_by_std_in_grpo|use_kl_in_reward|kl_ctrl\.kl_coef)"
_OTHER_FRAMEWORKS = r"learning_rate|num_generations|n_samples_per_prompt|entropy_coef|kl_coef|eps_clip(_high)?"
_TASK = (
    r"rollout\.(n|temperature)|model\.(path|lora_rank)|data\.(train_files|max_response_length)|"
    r"custom_reward_function\.name|reward_manager"
)
RECIPE = re.compile(rf"(?:^|\.)(?:{'|'.join((_OPTIMISER, _LOSS, _ADVANTAGE, _TASK, _OTHER_FRAMEWORKS))})$")
"""Settings that decide how fast a policy learns wherever its samples come from. Those of rollout correction, sampling
filters, precision and asynchrony are left out: they are what a diagnosis is about."""
_PATHS = re.compile(r"(path|files)$")


def differences(config: Mapping[str, str], baselines: Sequence[Mapping[str, str]]) -> tuple[str, ...] | None:
    """Settings of the recipe that differ from a baseline's, as `key: value, baseline's`; None where one is unknown.

    A key that one of them lacks does not count, since its default is not known here.
    """
    ours = {key for key in config if RECIPE.search(key)}
    if not ours or not baselines or not all(any(RECIPE.search(key) for key in b) for b in baselines):
        return None
    found: dict[str, str] = {}
    for base in baselines:
        for key in sorted(ours & base.keys()):
            if _meant(key, config[key]) != _meant(key, base[key]):
                found.setdefault(key, f"{key} is {config[key]}, the baseline's {base[key]}")
    return tuple(found.values())


def _meant(key: str, value: str) -> str | float:
    """A value as it is to be compared: paths by their last part, since machines differ."""
    if _PATHS.search(key):
        return PurePosixPath(value.strip("[]'\" ").rstrip("/")).name
    return canonical(value)


def canonical(value: str) -> str | float:
    """Numbers as numbers, so that 1e-6 and 0.000001 are alike."""
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value
