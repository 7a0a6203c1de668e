"""The task: write the right tokens, then stop. Harder prompts need longer answers.

A prompt belongs to a class c with an answer of n_c tokens. Every two tokens are covered by one unit test; the reward
is 0.8 times the share of passed tests plus 0.2 for stopping exactly at the end. A policy that stops at random early on
writes about V tokens, so responses of hard classes grow while it learns, and length and difficulty go together: what
evicts long responses evicts hard prompts.

Since the policy sees class and position only, its expected reward has a closed form, which is the noise-free truth
that no metric of a run can give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.numerics import Floats

STOP = 0
"""Token that ends a response."""
TEST_TOKENS = 2
PASSED, STOPPED = 0.8, 0.2


@dataclass(frozen=True)
class Task:
    """Right tokens of every class. `answer` is (classes, limit), STOP after the end; `needed` is (classes,)."""

    answer: NDArray[np.int64]
    needed: NDArray[np.int64]
    vocabulary: int

    @property
    def classes(self) -> int:
        """Number of prompt classes."""
        return len(self.needed)

    @property
    def positions(self) -> int:
        """Positions the policy knows: longest answer, its stop, and some to overrun."""
        return int(self.answer.shape[1])

    @property
    def long(self) -> NDArray[np.bool_]:
        """Which classes need more tokens than the average one."""
        return np.asarray(self.needed > self.needed.mean())


def make_task(classes: int, vocabulary: int, lengths: tuple[int, ...], positions: int, seed: int) -> Task:
    """Answers drawn once; class c takes the length c modulo the number of lengths."""
    rng = np.random.default_rng([seed, 1])
    needed = np.array([lengths[c % len(lengths)] for c in range(classes)])
    answer = rng.integers(1, vocabulary, (classes, positions))
    answer[np.arange(positions) >= needed[:, None]] = STOP
    return Task(answer, needed, vocabulary)


def score(
    task: Task, classes: NDArray[np.int64], tokens: NDArray[np.int64], length: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Reward and share of passed tests of each response; `tokens` is (n, positions), `length` counts the stop token."""
    place = np.arange(task.positions)
    written = place < length[:, None]
    right = (tokens == task.answer[classes]) & written
    inside = place < task.needed[classes][:, None]
    passed = (right & inside).reshape(len(classes), -1, TEST_TOKENS).all(axis=2).sum(axis=1)
    share = passed / (task.needed[classes] // TEST_TOKENS)
    at_end = np.take_along_axis(tokens, (length - 1)[:, None], 1)[:, 0]
    stopped = (length == task.needed[classes] + 1) & (at_end == STOP)
    return (PASSED * share + STOPPED * stopped).astype(np.float32), share.astype(np.float32)


def expected_score(task: Task, logp: Floats, limit: int) -> NDArray[np.float64]:
    """Expected reward of each class under log-probs (classes, positions, vocabulary), responses cut at `limit`."""
    prob = np.exp(logp.astype(np.float64))
    place = np.arange(task.positions)
    right = np.take_along_axis(prob, task.answer[:, :, None], 2)[:, :, 0]
    alive = np.cumprod(1 - prob[:, :, STOP], axis=1)
    reach = np.concatenate([np.ones((task.classes, 1)), alive[:, :-1]], axis=1)
    pairs = right.reshape(task.classes, -1, TEST_TOKENS).prod(axis=2)
    inside = (place < task.needed[:, None]) & (place < limit)
    tests = inside.reshape(task.classes, -1, TEST_TOKENS).all(axis=2)
    passed = (pairs * reach[:, ::TEST_TOKENS] * tests).sum(axis=1) / (task.needed // TEST_TOKENS)
    ends = reach[np.arange(task.classes), task.needed] * right[np.arange(task.classes), task.needed]
    return np.asarray(PASSED * passed + STOPPED * ends * (task.needed < limit))
