"""The rollout engine on an event-driven clock.

A response of n tokens takes `prefill + n * token_seconds` once it has a slot, so long responses come back late: that
is all it takes for completion order and stale drops to select short ones. At a weight sync every running request is
aborted, the new weights are loaded, and it resumes with a new prefill; its further tokens come from the new version.
So one trajectory may span several versions, as in verl's asynchronous trainers. In colocate_async the engine stops when
the batch is complete and sleeps until the sync.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.numerics import Floats
from verl_audit.reference.pool import Group, Pool
from verl_audit.reference.router import Routes
from verl_audit.reference.settings import Settings
from verl_audit.reference.task import STOP


@dataclass(frozen=True)
class Loaded:
    """Weights as one replica holds them: what it samples from and the version it says it has."""

    number: int
    """Position among all that were ever loaded."""
    label: int
    logp: Floats
    """As recorded, (contexts, vocabulary)."""
    cumulated: Floats
    """Cumulative probabilities of all tokens but the last, (contexts, vocabulary - 1)."""
    routes: Routes | None
    """Experts the engine chooses for each context."""
    validating: Floats
    """`cumulated` for validation prompts, which verl samples with settings of their own (val_kwargs): no top_p."""


def sampling_table(logp: Floats) -> Floats:
    """Cumulative probabilities of all tokens but the last; what has no mass is never drawn."""
    cumulated = np.cumsum(np.exp(logp), axis=1)
    cumulated /= cumulated[:, -1:]
    cumulated[cumulated >= 1 - 1e-6] = 2.0
    table: Floats = cumulated[:, :-1]
    return table


def loaded(number: int, label: int, logp: Floats, routes: Routes | None, whole: Floats | None = None) -> Loaded:
    """Log-probs with the tables to sample from; `whole`: those without top_p, where it is set."""
    table = sampling_table(logp)
    return Loaded(number, label, logp, table, routes, table if whole is None else sampling_table(whole))


class Engine:
    """Replicas with common slots; requests wait their turn in order of submission."""

    def __init__(self, settings: Settings, seed: int) -> None:
        """An idle engine at time 0 without weights."""
        self.settings = settings
        self.rng = np.random.default_rng([seed, 3])
        self.slow_rng = np.random.default_rng([seed, 5])
        """Of its own, so that the same responses are drawn with and without stragglers."""
        in_flight = int((settings.warmup + 2) * settings.group_batch)
        self.pool = Pool(in_flight * settings.group_size, settings.positions, settings.group_size)
        self.now = 0.0
        self.pace = settings.token_seconds * settings.slowness
        self.replicas: list[Loaded] = []
        self.waiting: deque[int] = deque()
        self.running: list[tuple[float, int]] = []
        self.owner: dict[int, Group] = {}
        self.stopped = np.zeros(0, np.int64)
        """Rows aborted and not resumed yet."""
        self.asleep = False
        self.submitted = 0
        self.aborted = 0
        """Requests interrupted by the last sync."""
        self.prefilled = 0
        """Tokens the last sync made the engine prefill again."""

    # -- requests

    def submit(self, classes: NDArray[np.int64], step: int, version: int) -> list[Group]:
        """Send prompts, one group each."""
        s, pool, made = self.settings, self.pool, []
        for prompt_class in classes.tolist():
            first = pool.take()
            made.append(Group(self.submitted, first, prompt_class, step, version, self.now, s.group_size))
            self.submitted += 1
            rows = slice(first, first + s.group_size)
            pool.prompt_class[rows] = prompt_class
            pool.replica[rows] = (first + np.arange(s.group_size) + made[-1].number) % s.replicas
            pool.progress[rows] = pool.ended[rows] = 0
            pool.attempt[rows] = -1
            self.owner.update(dict.fromkeys(range(first, first + s.group_size), made[-1]))
            self.waiting.extend(range(first, first + s.group_size))
        fresh = np.concatenate([pool.rows(group) for group in made]) if made else np.zeros(0, np.int64)
        pool.chance[fresh] = self.rng.random((len(fresh), s.positions), dtype=np.float32)
        pool.cut[fresh] = self._failures(len(fresh), version)
        pool.pace[fresh] = self._paces(len(fresh))
        self._sample(fresh)
        self._start()
        return made

    def _failures(self, n: int, version: int) -> NDArray[np.int64]:
        """Token at which each request fails; beyond the limit: never."""
        if not self.settings.failure or version < self.settings.onset_version:
            return np.full(n, self.settings.positions + 1)
        hazard = 1 - (1 - self.settings.failure) ** (1 / max(self.settings.lengths))
        return self.rng.geometric(hazard, n)

    def _paces(self, n: int) -> NDArray[np.float64]:
        """Seconds a token of each request."""
        s = self.settings
        if not s.straggler:
            return np.full(n, self.pace)
        return np.where(self.slow_rng.random(n) < s.straggler, s.straggler_factor, 1.0) * self.pace

    def _sample(self, rows: NDArray[np.int64]) -> None:
        """Draw every token not yet written from the weights now loaded, and how long the response gets by that.

        All of a response is drawn at once, since the policy does not look back; a sync draws the rest again.
        """
        if not len(rows):
            return
        pool, s = self.pool, self.settings
        place = np.arange(s.positions)
        for number, replica in enumerate(self.replicas):
            if all(replica is not r for r in self.replicas[:number]):
                same = [i for i, r in enumerate(self.replicas) if r is replica]
                at = rows if len(same) == s.replicas else rows[np.isin(pool.replica[rows], same)]
                tables = pool.prompt_class[at][:, None] * s.positions + place
                drawn = (pool.chance[at][:, :, None] >= replica.cumulated[tables]).sum(axis=2)
                new = place >= pool.progress[at][:, None]
                pool.tokens[at] = np.where(new, drawn, pool.tokens[at])
                pool.behave[at] = np.where(new, replica.logp[tables, drawn], pool.behave[at])
                pool.source[at] = np.where(new, replica.number, pool.source[at])
        stops = pool.tokens[rows] == STOP
        stops[:, s.response_limit - 1 :] = True
        pool.length[rows] = stops.argmax(axis=1) + 1

    def _start(self) -> None:
        """Give free slots to the requests that wait longest."""
        while self.waiting and len(self.running) < self.settings.slots and not self.asleep:
            self._run(self.waiting.popleft(), self.now)

    def _run(self, row: int, at: float) -> None:
        pool, s = self.pool, self.settings
        pool.begun[row] = at + s.prefill_seconds
        if pool.attempt[row] < 0:  # verl notes the version of the first attempt, even if it is aborted without a token
            pool.attempt[row] = self.replicas[pool.replica[row]].label
        if not pool.progress[row]:
            pool.first_token[row] = pool.begun[row] + pool.pace[row]
        left = min(pool.length[row], pool.cut[row]) - pool.progress[row]
        heapq.heappush(self.running, (float(pool.begun[row] + left * pool.pace[row]), row))

    # -- time

    def finish_next(self) -> Group | None:
        """Go on to the next completion; the group, if it was its last. None too when nothing runs."""
        ended, row = heapq.heappop(self.running)
        self.now = max(self.now, ended)
        group, pool = self.owner.pop(row), self.pool
        pool.ended[row] = ended
        if pool.cut[row] <= pool.length[row]:
            pool.length[row] = pool.cut[row]
            group.failed = True
        group.open -= 1
        self._start()
        if group.open:
            return None
        group.done = ended
        return group

    def pass_time(self, seconds: float) -> list[Group]:
        """Let time go by, e.g. while the trainer computes; the groups completed meanwhile."""
        until, done = self.now + seconds, []
        while self.running and self.running[0][0] <= until:
            group = self.finish_next()
            done += [group] if group else []
        self.now = max(self.now, until)
        return done

    # -- weight sync

    def sleep(self) -> None:
        """Abort what runs and generate nothing until the next load: the cards are the trainer's."""
        self._abort()
        self.asleep = True

    def _abort(self) -> None:
        """Stop what runs; what was written stays."""
        pool = self.pool
        rows = np.array(sorted(row for _, row in self.running), np.int64)
        written = np.floor((self.now - pool.begun[rows]) / pool.pace[rows]).astype(np.int64)
        most = np.minimum(pool.length[rows], pool.cut[rows]) - 1
        pool.progress[rows] = np.clip(pool.progress[rows] + np.maximum(written, 0), 0, most)
        self.stopped, self.running = np.concatenate([self.stopped, rows]), []

    def load(self, replicas: list[Loaded], seconds: float) -> list[Group]:
        """Abort what runs, load weights for `seconds`, resume. Returns groups that the abort ended (no resumption)."""
        pool, s = self.pool, self.settings
        self._abort()
        rows, self.stopped, self.asleep = self.stopped, np.zeros(0, np.int64), False
        self.aborted, self.prefilled = len(rows), int(pool.progress[rows].sum())
        self.replicas = replicas
        cut_off: list[Group] = []
        if not s.partial_rollout:
            rows, cut_off = self._give_up(rows)
        self.now += seconds
        self._sample(np.concatenate([rows, np.array(self.waiting, np.int64)]))
        for row in rows.tolist():
            self._run(row, self.now)
        self._start()
        return cut_off

    def _give_up(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Group]]:
        """Without resumption a response ends where the abort met it, and is trained on as it is (verl fully_async)."""
        pool, ended = self.pool, []
        begun = rows[pool.progress[rows] > 0]
        pool.length[begun] = pool.progress[begun]
        for row in begun.tolist():
            group = self.owner.pop(row)
            pool.ended[row] = self.now
            group.open -= 1
            group.done = self.now
            ended += [] if group.open else [group]
        return rows[pool.progress[rows] == 0], ended

    def release(self, group: Group) -> None:
        """The rows of a decided group may be used again."""
        self.pool.free.append(group.first)
