"""Does a run differ from its baseline in what it was to learn, and how fast, rather than in how it was run?

A slowdown against a baseline with another learning rate or data set says nothing of asynchrony.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

_ACTOR = (
    r"optim\.(lr|weight_decay|lr_warmup_steps|lr_warmup_steps_ratio|betas)|entropy_coeff|clip_ratio(_low|_high|_c)?|"
    r"loss_agg_mode|ppo_epochs|ppo_mini_batch_size|grad_clip|use_kl_loss|kl_loss_coef|kl_loss_type"
)
_VERL = (
    rf"actor_rollout_ref\.(actor\.({_ACTOR})|rollout\.(n|temperature)|model\.(path|lora_rank))|"
    r"algorithm\.(adv_estimator|gamma|lam|norm_adv_by_std_in_grpo|use_kl_in_reward|kl_ctrl\.kl_coef)|"
    r"data\.(train_files|max_response_length)|(reward\.)?custom_reward_function\.name"
)
_OTHERS = r"learning_rate|lr|num_generations|n_samples_per_prompt|entropy_coef|eps_clip(_high)?"
RECIPE = re.compile(rf"{_VERL}|{_OTHERS}")
"""Settings that decide how fast a policy learns wherever its samples come from, by their whole name. Those of rollout
correction, sampling filters, precision and asynchrony are left out: they are what a diagnosis is about."""
SWITCHES: Mapping[str, str] = {
    "actor_rollout_ref.actor.kl_loss_coef": "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_type": "actor_rollout_ref.actor.use_kl_loss",
    "algorithm.kl_ctrl.kl_coef": "algorithm.use_kl_in_reward",
}
"""Settings that decide nothing unless another one is true."""
_UNSET = ("", "none", "null")
_CACHED = re.compile(r"models--[^/]*--([^/]+)/snapshots/[^/]+/?$")
"""A model in the cache of the Hugging Face hub, whose last part is a hash."""


def differences(config: Mapping[str, str], baselines: Sequence[Mapping[str, str]]) -> tuple[str, ...] | None:
    """Settings of the recipe that differ from a baseline's, in words with both values; None where that is not known.

    A key that one of them lacks or leaves null does not count, since what then holds is not known here. Data files of
    one name in different folders may be the same or not: nothing is known of them.
    """
    found: dict[str, str] = {}
    unknown = not baselines
    for base in baselines:
        shared = list(_shared(config, base))
        unknown |= not shared or any(_may_differ(key, config[key], base[key]) for key in shared)
        for key in shared:
            if _meant(key, config[key]) != _meant(key, base[key]):
                found.setdefault(key, f"{key} is {config[key]}, the baseline's {base[key]}")
    return tuple(found.values()) if found or not unknown else None


def _shared(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Keys of the recipe that both set and that decide something in both."""
    for key in sorted(ours.keys() & theirs.keys()):
        if RECIPE.fullmatch(key) and all(_set(tree, key) for tree in (ours, theirs)):
            yield key


def _set(tree: Mapping[str, str], key: str) -> bool:
    on = tree.get(SWITCHES.get(key, ""), "true").lower() == "true"
    return on and tree[key].strip().lower() not in _UNSET


def _meant(key: str, value: str) -> Hashable:
    """A value as it is to be compared: of paths the name, since machines differ."""
    if key.endswith("model.path"):
        cached = _CACHED.search(value)
        return (cached.group(1) if cached else PurePosixPath(value.rstrip("/")).name).lower()
    if key.endswith("train_files"):
        return tuple(_ends(value, 1))
    return canonical(value)


def _may_differ(key: str, ours: str, theirs: str) -> bool:
    """Whether data files share their names and not the folders those names stand in."""
    if not key.endswith("train_files"):
        return False
    return _ends(ours, 1) == _ends(theirs, 1) and _ends(ours, 2) != _ends(theirs, 2)


def _ends(paths: str, parts: int) -> list[tuple[str, ...]]:
    return [PurePosixPath(path).parts[-parts:] for path in _listed(paths)]


def _listed(value: str) -> list[str]:
    return [part.strip(" '\"") for part in value.strip("[]() ").split(",")]


def canonical(value: str) -> Hashable:
    """Spellings of one value alike: 1e-6 and 0.000001, True and true, `[0.9,0.999]` and `(0.9, 0.999)`."""
    try:
        number = float(value)
    except ValueError:
        pass
    else:
        return number if math.isfinite(number) else value
    if value.lower() in ("true", "false"):
        return value.lower()
    if value[:1] in ("[", "(") and value[-1:] in ("]", ")"):
        return tuple(canonical(part) for part in _listed(value))
    return value
