"""The loop: submit, sample, update, sync, and tell an observer. Read this module first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.batch import Trajectories, collect
from verl_audit.reference.buffer import Buffer
from verl_audit.reference.clock import Engine
from verl_audit.reference.learner import TRAINER, Learner, Passes, Updated
from verl_audit.reference.numerics import Floats
from verl_audit.reference.policy import make_policy
from verl_audit.reference.pool import Group
from verl_audit.reference.settings import Settings
from verl_audit.reference.task import Task, expected_score, make_task, score

STOP_WORLD_RESERVE = 0.02
"""Seconds of a sync that pass even when nothing is sent."""


@dataclass
class Times:
    """Seconds of one step, by verl's timer names."""

    gen: float = 0.0
    old_log_prob: float = 0.0
    adv: float = 0.0
    update_actor: float = 0.0
    update_weights: float = 0.0
    began: float = 0.0

    @property
    def step(self) -> float:
        """All of it."""
        return self.gen + self.old_log_prob + self.adv + self.update_actor + self.update_weights


@dataclass(frozen=True)
class Step:
    """One cycle between two syncs, as a logger sees it."""

    number: int
    updated: tuple[Updated, ...]
    times: Times
    micro: tuple[Times, ...]
    """Times of each mini-batch (fully_async logs them one by one)."""
    validation: Validation | None


@dataclass(frozen=True)
class Validation:
    """Answers of the rollout engine, with the weights it holds."""

    prompt_class: NDArray[np.int64]
    reward: Floats
    passed: Floats


class Observer(Protocol):
    """Who is told what happens: the log and the traces."""

    def validated(self, run: Run, step: int, validation: Validation) -> None:
        """Before the first step."""

    def discarded(self, run: Run, group: Group, reasons: list[str], step: int) -> None:
        """Evicted; its rows are still in the pool."""

    def stepped(self, run: Run, step: Step) -> None:
        """A step was trained and synced; counts of the buffer are still those of the step."""

    def synced(self, run: Run, version: int, began: float, seconds: float) -> None:
        """Weights were sent."""

    def ended(self, run: Run) -> None:
        """No more steps."""


@dataclass
class Run:
    """State of one run, and the truth that only the simulation knows."""

    settings: Settings
    seed: int
    observers: tuple[Observer, ...] = ()
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(updates, seconds, expected reward of the trainer's policy over all prompt classes), exact."""

    def __post_init__(self) -> None:
        """Make task, policy, engine and buffer from the seed."""
        s = self.settings
        self.task: Task = make_task(s.classes, s.vocabulary, s.lengths, s.positions, s.task_seed)
        policy, weights = make_policy(self.task, s.features, s.experts, s.skill, s.task_seed)
        self.learner = Learner(s, policy, weights)
        self.engine = Engine(s, self.seed)
        self.draw = np.random.default_rng([self.seed, 4])
        self.buffer = Buffer(s, self.engine, self._prompts, self._rewards, self._discarded)

    def execute(self) -> Run:
        """Run to the end."""
        s, step = self.settings, 1
        self.engine.load(self.learner.publish(0, []), 0.0)
        self._remember()
        self._tell_validation(0)
        if s.v1_async and s.admission < 0:
            self.buffer.submit(round(s.warmup * s.group_batch), 1)
        for step in range(1, s.updates // s.updates_per_sync + 1):
            done = self._step(step)
            for observer in self.observers:
                observer.stepped(self, done)
            self.buffer.counts = type(self.buffer.counts)()
        for observer in self.observers:
            observer.ended(self)
        return self

    # -- one step

    def _step(self, number: int) -> Step:
        s, times = self.settings, Times(began=self.engine.now)
        if s.trainer != "fully_async" and s.admission < 0:
            self.buffer.submit(s.group_batch, number)
        else:
            self.buffer.admit(number)
        batches = self._all_at_once(number, times) if s.trainer in ("sync", "colocate_async") else []
        if s.trainer == "colocate_async":
            self.engine.sleep()
        updated, micro = [], []
        prox: Passes | None = None
        for j in range(s.updates_per_sync):
            part = Times(began=self.engine.now)
            batch = batches[j] if batches else self._take(number, s.groups, part)
            if not s.bypass and (j == 0 or s.router_replay):
                prox = self._snapshot(batch, j, prox)
            updated.append(self._update(number, batch, j, prox, part))
            micro.append(part)
            _add(times, part)
        self._sync(number, times)
        validation = self._validate() if number % s.test_freq == 0 else None
        self._remember()
        return Step(number, tuple(updated), times, tuple(micro), validation)

    def _snapshot(self, batch: Trajectories, j: int, before: Passes | None) -> Passes:
        """pi_old of the cycle: the weights at its start, whatever was updated since."""
        if j == 0:
            self.start_weights = self.learner.weights
        now, self.learner.weights = self.learner.weights, self.start_weights
        made = self.learner.passes(batch)
        self.learner.weights = now
        return made

    def _all_at_once(self, number: int, times: Times) -> list[Trajectories]:
        """A trainer on the engine's own cards waits for the whole batch, then trains on it."""
        s, before = self.settings, self.engine.now
        groups = self.buffer.sample(number, s.group_batch)
        times.gen += self.engine.now - before
        return [collect(s, self.task, self.engine, groups[i : i + s.groups]) for i in range(0, s.group_batch, s.groups)]

    def _take(self, number: int, n: int, times: Times) -> Trajectories:
        before = self.engine.now
        groups = self.buffer.sample(number, n)
        times.gen += self.engine.now - before
        return collect(self.settings, self.task, self.engine, groups)

    def _update(self, number: int, batch: Trajectories, j: int, prox: Passes | None, times: Times) -> Updated:
        """Train on a mini-batch while the engine goes on generating, unless it sleeps."""
        s = self.settings
        load = 0.3 + 0.7 * float(batch.length.mean()) / 20
        times.old_log_prob = (0.0 if s.bypass else s.log_prob_seconds) * load + 0.01
        times.adv = 0.01
        times.update_actor = s.update_seconds * load
        done = self.learner.update(batch, j, prox)
        for group in batch.groups:
            self.engine.release(group)
        self.buffer.pass_time(times.old_log_prob + times.adv + times.update_actor, number)
        if s.trainer == "fully_async" or s.admission >= 0:
            self.buffer.admit(number)
        return done

    def _sync(self, number: int, times: Times) -> None:
        s, began = self.settings, self.engine.now
        held = self.learner.publish(number, self.engine.replicas)
        seconds = STOP_WORLD_RESERVE + s.sync_seconds
        self.buffer.arrive(self.engine.load(held, seconds), number)
        self.buffer.synced(number)
        times.update_weights = seconds
        for observer in self.observers:
            observer.synced(self, number, began, seconds)

    # -- measuring

    def _validate(self) -> Validation:
        """Every prompt class `validation_samples` times, spread over the replicas as their requests are."""
        s = self.settings
        classes = np.repeat(np.arange(s.classes), s.validation_samples)
        replica = np.arange(len(classes)) % s.replicas
        chance = self.draw.random((len(classes), s.positions), dtype=np.float32)
        tables = np.stack([r.validating for r in self.engine.replicas])
        context = classes[:, None] * s.positions + np.arange(s.positions)
        tokens = (chance[:, :, None] >= tables[replica[:, None], context]).sum(axis=2)
        stops = tokens == 0
        stops[:, s.response_limit - 1 :] = True
        reward, passed = score(self.task, classes, tokens, stops.argmax(axis=1) + 1)
        return Validation(classes, reward, passed)

    def _tell_validation(self, step: int) -> None:
        validation = self._validate()
        for observer in self.observers:
            observer.validated(self, step, validation)

    def _remember(self) -> None:
        """Exact expected reward of the trainer's policy, whatever the run logs."""
        s = self.settings
        logp = self.learner.policy.forward(self.learner.weights, TRAINER).logp
        table = logp.reshape(s.classes, s.positions, s.vocabulary)
        reward = float(expected_score(self.task, table, s.response_limit).mean())
        self.curve.append((self.learner.updates, self.engine.now, reward))

    # -- what the buffer asks for

    def _prompts(self, n: int) -> NDArray[np.int64]:
        """Prompt classes, drawn evenly from those in the training data."""
        s = self.settings
        known = max(1, round(s.train_classes * s.classes))
        return self.draw.integers(0, known, n)

    def _rewards(self, group: Group) -> Floats:
        return collect(self.settings, self.task, self.engine, [group]).reward

    def _discarded(self, group: Group, reasons: list[str], step: int) -> None:
        for observer in self.observers:
            observer.discarded(self, group, reasons, step)


def _add(total: Times, part: Times) -> None:
    for name in ("gen", "old_log_prob", "adv", "update_actor"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
