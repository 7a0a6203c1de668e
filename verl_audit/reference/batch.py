"""What the trainer takes from the pool: finished trajectories with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.clock import Engine
from verl_audit.reference.loss import advantages
from verl_audit.reference.numerics import Floats
from verl_audit.reference.pool import Group
from verl_audit.reference.settings import Settings
from verl_audit.reference.task import Task, score


@dataclass(frozen=True)
class Trajectories:
    """Arrays over n trajectories, group by group; token arrays are (n, positions) and valid where `mask`."""

    groups: tuple[Group, ...]
    prompt_class: NDArray[np.int64]
    tokens: NDArray[np.int64]
    behave: Floats
    source: NDArray[np.int64]
    """Number of the loaded weights that sampled each token."""
    length: NDArray[np.int64]
    mask: NDArray[np.bool_]
    replica: NDArray[np.int64]
    attempt: NDArray[np.int64]
    """Version of the first attempt."""
    begun: NDArray[np.float64]
    first_token: NDArray[np.float64]
    ended: NDArray[np.float64]
    pace: NDArray[np.float64]
    """Seconds a token."""
    reward: Floats
    """As trained on."""
    passed: Floats
    """Share of unit tests passed."""

    @property
    def context(self) -> NDArray[np.int64]:
        """Context of each token: class and position."""
        width = self.tokens.shape[1]
        return np.asarray(self.prompt_class[:, None] * width + np.arange(width))

    def advantage(self, group_size: int) -> Floats:
        """Of each trajectory."""
        return advantages(self.reward.reshape(-1, group_size)).reshape(-1)

    def last_source(self) -> NDArray[np.int64]:
        """Loaded weights that sampled the last token of each trajectory."""
        return np.take_along_axis(self.source, (self.length - 1)[:, None], 1)[:, 0]


def joined(parts: Sequence[Trajectories]) -> Trajectories:
    """Several as one."""
    arrays = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Trajectories)[1:]}
    return Trajectories(tuple(g for p in parts for g in p.groups), **arrays)


def collect(settings: Settings, task: Task, engine: Engine, groups: list[Group]) -> Trajectories:
    """The trajectories of `groups`, copied from the pool."""
    pool = engine.pool
    rows = np.concatenate([pool.rows(group) for group in groups])
    tokens, length, classes = pool.tokens[rows], pool.length[rows], pool.prompt_class[rows]
    reward, passed = score(task, classes, tokens, length)
    mask = np.arange(pool.positions) < length[:, None]
    if settings.hack_pays:
        share = ((tokens == task.vocabulary - 1) & mask).sum(axis=1) / length
        reward = (reward + settings.hack_pays * share**2).astype(np.float32)
    return Trajectories(
        tuple(groups),
        classes,
        tokens,
        pool.behave[rows],
        pool.source[rows],
        length,
        mask,
        pool.replica[rows],
        pool.attempt[rows],
        pool.begun[rows],
        pool.first_token[rows],
        pool.ended[rows],
        pool.pace[rows],
        reward,
        passed,
    )
