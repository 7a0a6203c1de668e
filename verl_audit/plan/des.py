"""A seeded discrete-event simulation of both pools: what the closed forms leave out, at a second a run.

Trajectories take a free slot in the order of admission and keep it for their duration; a group is finished with its
last trajectory. The trainer takes B finished groups for each update and syncs weights after k of them. In a sync both
pools stand; then the version rises and new groups are admitted, up to (1 + theta) Q under way. Times of the rollout
pool are kept on a clock of its own, which stands during syncs, so that no event has to be moved.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from verl_audit.measure.stats import Array
from verl_audit.plan.workload import Workload

CYCLES, WARM_UP, LEAST = 16, 5, 6
"""Cycles simulated, those left out of the averages while queues fill, and the fewest averaged over."""
MAX_TRAJECTORIES, MAX_CYCLE = 120_000, 60_000
"""Trajectories of a simulation, about: larger batches are simulated for fewer cycles. And those of one cycle."""


@dataclass(frozen=True)
class Setting:
    """One simulated run: counts, and seconds in any unit."""

    slots: int
    groups: int
    """Groups of one update (B)."""
    group_size: int
    updates: int
    """Updates per sync (k)."""
    theta: float
    update_seconds: float
    sync_seconds: float
    mean_duration: float
    resume_seconds: float = 0.0
    """A trajectory under way takes so much longer for each sync it meets, to be prefilled again."""
    drain: bool = False
    """A sync waits until everything under way is finished."""
    one_behind: bool = False
    """one_step_off: train the batch that the cycle before generated, while the whole next one is generated."""
    evict_above: float | None = None
    wait_at: float | None = None
    """Age in versions at which the trainer waits for groups under way (verl v1's strategy `wait`)."""
    cycles: int = CYCLES
    warm_up: int = WARM_UP


@dataclass(frozen=True)
class Cycle:
    """What one cycle took: times in seconds, lags in versions."""

    start: float
    end: float
    waits: tuple[tuple[float, float], ...]
    """When the trainer waited for groups."""
    sync_start: float
    rollout_busy: float
    """Slot-seconds of generation."""
    under_way: float
    """Groups admitted and not yet trained when the cycle began."""
    lags: tuple[int, ...]
    """Versions since the first token, of each trained group's first trajectory."""
    ages: tuple[int, ...]
    """Versions since admission, of each trained group."""
    evicted: int


@dataclass(frozen=True)
class Simulated:
    """Averages over the cycles after the warm-up; `se` is the standard error of the cycle time from these cycles."""

    cycle: float
    se: float
    train_idle: float
    rollout_idle: float
    sync_share: float
    lag_versions: float
    age_versions: float
    under_way: float
    evicted: float
    slots: int
    cycles: tuple[Cycle, ...] = field(repr=False, default=())
    trace: tuple[tuple[float, float, int], ...] = field(repr=False, default=())
    """How many slots are busy: from, until, count."""


@dataclass
class _Group:
    admitted: int
    started: int = -1
    left: int = 0


class _Pool:
    """The rollout pool on its own clock."""

    def __init__(self, setting: Setting, durations: Array, rng: np.random.Generator) -> None:
        self._setting = setting
        self._drawn = _draws(durations * setting.mean_duration, rng)
        self._waiting: deque[_Group] = deque()
        self._running: list[tuple[float, int, _Group]] = []
        self._free, self._count = setting.slots, 0
        self.clock, self.busy, self.version = 0.0, 0.0, 0
        self.ready: deque[_Group] = deque()
        self._unfinished: Counter[int] = Counter()
        self.under_way = 0
        """Groups admitted and neither trained nor evicted."""
        self.paused = 0.0
        """Length of all syncs so far: how far this clock is behind."""
        self.trace: list[tuple[float, float, int]] = []

    @property
    def wall(self) -> float:
        """Time of the whole system."""
        return self.clock + self.paused

    def admit(self, groups: int) -> None:
        """Queue new groups; free slots start at once."""
        size = self._setting.group_size
        for _ in range(groups):
            group = _Group(self.version, left=size)
            self._waiting.extend([group] * size)
        self.under_way += groups
        self._unfinished[self.version] += groups
        self._start()

    def until(self, clock: float) -> None:
        """Generate until this time."""
        while self._running and self._running[0][0] <= clock:
            self._finish()
        self._pass(clock)

    def until_ready(self, groups: int) -> None:
        """Generate until so many groups are finished, or nothing is left."""
        while len(self.ready) < groups and self._running:
            self._finish()

    def until_young(self, age: float) -> None:
        """Generate until no unfinished group was admitted `age` versions ago, this version counted, or earlier."""
        while self._running and any(n and self.version - v + 1 >= age for v, n in self._unfinished.items()):
            self._finish()

    def until_empty(self) -> None:
        """Generate all that was admitted."""
        while self._running:
            self._finish()

    def sync(self, seconds: float, resume: float) -> None:
        """Stand for a sync; all that is under way ends later by `resume`, which keeps its order."""
        self.paused += seconds
        self._running = [(ends + resume, number, group) for ends, number, group in self._running]

    def _pass(self, clock: float) -> None:
        if clock > self.clock:
            self.busy += (clock - self.clock) * len(self._running)
            self.trace.append((self.wall, clock + self.paused, len(self._running)))
            self.clock = clock

    def _finish(self) -> None:
        self._pass(self._running[0][0])
        _, _, group = heapq.heappop(self._running)
        self._free += 1
        group.left -= 1
        if not group.left:
            self.ready.append(group)
            self._unfinished[group.admitted] -= 1
        self._start()

    def _start(self) -> None:
        while self._free and self._waiting:
            group = self._waiting.popleft()
            if group.started < 0:
                group.started = self.version
            self._free -= 1
            self._count += 1
            heapq.heappush(self._running, (self.clock + next(self._drawn), self._count, group))


def _draws(durations: Array, rng: np.random.Generator) -> Iterator[float]:
    """Durations with replacement, drawn in blocks; rows of a table are drawn whole, being groups."""
    while True:
        yield from rng.choice(durations, 4096).ravel().tolist()


def simulate(setting: Setting, durations: Array, seed: int = 0) -> Simulated:
    """Simulate a run; `durations` are relative (mean 1), drawn with replacement. Same seed, same result.

    Shape (points,), drawn for each trajectory, or (groups, group_size), drawn for each group.
    """
    pool = _Pool(setting, durations, np.random.default_rng(seed))
    batch = setting.groups * setting.updates
    quota = batch * 2 if setting.one_behind else max(batch, round((1 + setting.theta) * batch))
    pool.admit(quota)
    if setting.one_behind:
        pool.until_ready(batch)
    cycles, now = [], pool.clock
    for _ in range(setting.cycles):
        cycle = _one_cycle(setting, pool, now)
        cycles.append(cycle)
        pool.sync(setting.sync_seconds, setting.resume_seconds)
        now = cycle.end
        pool.version += 1
        pool.admit(quota - pool.under_way)
    return _averages(setting, cycles, pool.trace)


def _one_cycle(setting: Setting, pool: _Pool, start: float) -> Cycle:
    """k updates and a sync."""
    busy, under_way, now = pool.busy, pool.under_way, start
    waits, trained, evicted = list[tuple[float, float]](), list[_Group](), 0
    for _ in range(setting.updates):
        batch: list[_Group] = []
        while len(batch) < setting.groups:
            pool.until_ready(setting.groups - len(batch))
            if setting.wait_at is not None:
                pool.until_young(setting.wait_at)
            if pool.wall > now:
                waits.append((now, pool.wall))
                now = pool.wall
            evicted += _take(setting, pool, batch)
        trained += batch
        now += setting.update_seconds
        pool.until(now - pool.paused)
    if setting.drain or setting.one_behind:
        pool.until_empty()
        if pool.wall > now:
            waits.append((now, pool.wall))
            now = pool.wall
    pool.under_way -= len(trained)
    return Cycle(
        start,
        now + setting.sync_seconds,
        tuple(waits),
        now,
        pool.busy - busy,
        under_way,
        tuple(pool.version - g.started for g in trained),
        tuple(pool.version - g.admitted for g in trained),
        evicted,
    )


def _take(setting: Setting, pool: _Pool, batch: list[_Group]) -> int:
    """Move finished groups into the batch; those too old are thrown away, replaced and counted."""
    evicted = 0
    while len(batch) < setting.groups and pool.ready:
        group = pool.ready.popleft()
        if setting.evict_above is not None and pool.version - group.admitted + 1 > setting.evict_above:
            evicted += 1
        else:
            batch.append(group)
    if evicted:
        pool.under_way -= evicted
        pool.admit(evicted)
    return evicted


def _averages(setting: Setting, cycles: list[Cycle], trace: list[tuple[float, float, int]]) -> Simulated:
    kept = cycles[setting.warm_up :]
    lengths = np.array([c.end - c.start for c in kept])
    total, trained = float(lengths.sum()), sum(len(c.lags) for c in kept)
    evicted = sum(c.evicted for c in kept)
    syncs = setting.sync_seconds * len(kept)
    return Simulated(
        cycle=total / len(kept),
        se=float(lengths.std(ddof=1) / len(kept) ** 0.5) if len(kept) > 1 else float("nan"),
        train_idle=_rest(total, setting.update_seconds * setting.updates * len(kept) + syncs),
        rollout_idle=_rest(total, sum(c.rollout_busy for c in kept) / setting.slots + syncs),
        sync_share=syncs / total,
        lag_versions=sum(sum(c.lags) for c in kept) / trained,
        age_versions=sum(sum(c.ages) for c in kept) / trained,
        under_way=sum(c.under_way for c in kept) / len(kept),
        evicted=evicted / (evicted + trained),
        cycles=tuple(cycles),
        trace=tuple(trace),
        slots=setting.slots,
    )


def _rest(total: float, used: float) -> float:
    """Share of the total that is left; rounding errors of a full pool are no idle time below 0."""
    return max(0.0, 1 - used / total)


def setting_of(work: Workload, train_cards: float, rollout_cards: float, updates: float, theta: float) -> Setting:
    """The simulation of one candidate: whole counts, at least one of each; a huge batch is scaled down.

    Scaled down are groups and slots alike, so that times and shares are kept and only the largest of many is less
    extreme.
    """
    per_cycle = work.per_update * updates * (1 + theta)
    scale = min(1.0, MAX_CYCLE / per_cycle)
    warm_up = min(WARM_UP, 2 + math.ceil(theta))
    slots = max(1, round(work.slots_per_card * rollout_cards * scale))
    groups, size = max(1, round(work.groups * scale)), max(1, round(work.group_size))
    return Setting(
        slots=slots,
        groups=groups,
        group_size=size,
        updates=round(updates),
        theta=theta,
        update_seconds=float(work.train.on(np.array(train_cards))),
        sync_seconds=work.sync_seconds,
        resume_seconds=work.resume_seconds,
        # the pool's time for an update is kept whatever the rounding of its counts
        mean_duration=float(work.rollout.on(np.array(rollout_cards))) * slots / (groups * size),
        drain=not work.partial,
        one_behind=work.mode == "one_step_off",
        evict_above=work.evict_above,
        wait_at=work.wait_at,
        cycles=int(np.clip(MAX_TRAJECTORIES / (per_cycle * scale), warm_up + LEAST, CYCLES)),
        warm_up=warm_up,
    )
