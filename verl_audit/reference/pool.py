"""Trajectories in flight and finished, as arrays: one row a trajectory, G rows in a row a group."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.numerics import Floats


@dataclass
class Group:
    """One submission of a prompt."""

    number: int
    first: int
    """First of its rows in the pool."""
    prompt_class: int
    step: int
    """Trainer step at submission, which is what verl counts age from."""
    version: int
    submitted: float
    open: int
    """Members still to finish."""
    done: float = 0.0
    failed: bool = False
    flat: bool | None = None
    """Whether its rewards show no variance, once that was looked at."""


@dataclass
class Pool:
    """Arrays of `capacity` rows; rows of groups that were decided are used again."""

    capacity: int
    positions: int
    group_size: int
    free: list[int] = field(default_factory=list)
    """First rows of free blocks, taken from the end."""

    def __post_init__(self) -> None:
        """Allocate; blocks are handed out in ascending order."""
        shape = (self.capacity, self.positions)
        self.chance: Floats = np.zeros(shape, np.float32)
        self.tokens = np.zeros(shape, np.int64)
        self.behave: Floats = np.zeros(shape, np.float32)
        self.source = np.zeros(shape, np.int64)
        self.length = np.zeros(self.capacity, np.int64)
        self.prompt_class = np.zeros(self.capacity, np.int64)
        self.replica = np.zeros(self.capacity, np.int64)
        self.progress = np.zeros(self.capacity, np.int64)
        self.cut = np.zeros(self.capacity, np.int64)
        self.attempt = np.zeros(self.capacity, np.int64)
        self.pace = np.ones(self.capacity)
        self.begun = np.zeros(self.capacity)
        self.first_token = np.zeros(self.capacity)
        self.ended = np.zeros(self.capacity)
        self.free = list(range(self.capacity - self.group_size, -1, -self.group_size))

    def take(self) -> int:
        """A free block of G rows; the pool doubles when none is left."""
        if not self.free:
            old = self.capacity
            for name, array in vars(self).items():
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self.capacity = 2 * old
            self.free = list(range(self.capacity - self.group_size, old - 1, -self.group_size))
        return self.free.pop()

    def rows(self, group: Group) -> NDArray[np.int64]:
        """Row numbers of a group."""
        return np.arange(group.first, group.first + self.group_size)
