"""Closed forms: step time, idle shares, lag and eviction of a split, vectorised over candidates.

One cycle is k updates on Q = k B groups and one weight sync of T seconds, in which both pools stand. With rollout
time a and training time b of a cycle, overlap s in [0, 1] hides a share of the shorter one:

    A(s) = max(a, b) + (1 - s) min(a, b)

The overlap is no free number. At most (1 + theta) Q groups may be under way in a cycle (fully_async's
staleness_threshold; separate_async's num_warmup_batches acts alike), and the trainer takes them as a stream of k
mini-batches. The cycle then takes at least

    a                               rollouts never wait
    b + max(0, 1/k - theta) a       the trainer waits for its first mini-batch
    (1 - theta) a + b/k             rollouts pause until the last mini-batch is trained

and about the largest of these, plus T. The last two hide that groups finish with their longest trajectory and that the
pool drains while it is paused; `_until_stream` and `_until_enough` take that into account by residual lives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_audit.measure.lag import in_updates
from verl_audit.measure.stats import Array
from verl_audit.plan.tail import Durations, drain, floats
from verl_audit.plan.workload import Workload

TERMS = ("rollout", "trainer", "batches", "admission", "oldest")
"""What a cycle waits for, in the order of `Prediction.binds`."""
EVICTION_ROUNDS = 8
"""Evicted groups are generated again, which lengthens the cycle, which evicts fewer: it settles within these."""

HALVINGS = 30
EXCEEDED = float(np.exp(-np.euler_gamma))
"""How many of n draws exceed the expected largest of n others."""


@dataclass(frozen=True)
class Candidates:
    """Settings to predict, as arrays of one shape: cards of both pools, updates per sync, share of extra groups."""

    train_cards: Array
    rollout_cards: Array
    updates: Array
    theta: Array

    @property
    def cards(self) -> Array:
        """Cards of both pools."""
        return self.train_cards + self.rollout_cards

    def take(self, index: NDArray[Any]) -> Candidates:
        """Some of the candidates."""
        return Candidates(self.train_cards[index], self.rollout_cards[index], self.updates[index], self.theta[index])

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.train_cards)


@dataclass(frozen=True)
class Prediction:
    """What is expected of each candidate. Seconds in the workload's unit; shares are of the cycle."""

    cycle: Array
    per_update: Array
    relative: Array
    """Time per update over that of the reference run."""
    per_card: Array
    """Updates per card and second over those of the reference run."""
    train_idle: Array
    rollout_idle: Array
    sync_share: Array
    lag_versions: Array
    """Mean lag of a trajectory's oldest token."""
    lag_updates: Array
    evicted: Array
    """Share of finished groups thrown away as stale."""
    binds: NDArray[np.int_]
    """Index into TERMS."""

    def take(self, index: NDArray[Any]) -> Prediction:
        """The predictions of some candidates."""
        return Prediction(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def one(train_cards: float, rollout_cards: float, updates: float, theta: float) -> Candidates:
    """A single candidate."""
    return Candidates(*(np.array([float(x)]) for x in (train_cards, rollout_cards, updates, theta)))


def overlap(a: ArrayLike, b: ArrayLike, s: ArrayLike) -> Array:
    """A(s) = max(a, b) + (1 - s) min(a, b): a step whose shorter part is hidden to the share s."""
    a, b, s = map(floats, (a, b, s))
    return floats(np.maximum(a, b) + (1 - s) * np.minimum(a, b))


def best_ratio(rollout: float, train: float, s: float) -> float:
    """Rollout cards per training card that minimise A(s) on a fixed number of cards; W in card-seconds.

    min(r, sqrt(r / (1 - s))) for r = W_r / W_t >= 1, the reciprocal of the mirrored case for r < 1. By setting the
    derivative of A to 0 on the side of the kink where the larger work dominates.
    """
    if rollout < train:
        return 1 / best_ratio(train, rollout, s)
    r = rollout / train
    return r if s >= 1 else min(r, (r / (1 - s)) ** 0.5)


def overlap_of(a: ArrayLike, b: ArrayLike, k: ArrayLike, theta: ArrayLike) -> Array:
    """The overlap s that k and theta give: min(1, (theta a + (1 - 1/k) b) / min(a, b))."""
    a, b, k, theta = map(floats, (a, b, k, theta))
    return floats(np.minimum(1.0, (theta * a + (1 - 1 / k) * b) / np.minimum(a, b)))


def least_theta(a: ArrayLike, b: ArrayLike, k: ArrayLike) -> Array:
    """The theta above which a cycle gets no shorter, tails left out.

    From (1 - theta) a + b/k = max(a, b): b / (k a) where a >= b, else max(0, 1 - (1 - 1/k) b/a); and from
    b + (1/k - theta) a = max(a, b): 1/k - max(0, a - b)/a.
    """
    a, b, k = map(floats, (a, b, k))
    admission = np.where(a >= b, b / (k * a), np.maximum(0.0, 1 - (1 - 1 / k) * b / a))
    return floats(np.maximum(admission, np.maximum(0.0, 1 / k - np.maximum(0.0, a - b) / a)))


def sync_share(update_seconds: ArrayLike, sync_seconds: ArrayLike, k: ArrayLike) -> Array:
    """T / (k T_mb + T): the share of a weight sync in a cycle that waits for nothing else, a lower bound."""
    t, sync, k = map(floats, (update_seconds, sync_seconds, k))
    return floats(sync / (k * t + sync))


def fluid_cycle(a: ArrayLike, b: ArrayLike, k: ArrayLike, theta: ArrayLike, sync: ArrayLike = 0.0) -> Array:
    """Cycle time without tails: the largest of the three terms above, plus the sync."""
    a, b, k, theta, sync = map(floats, (a, b, k, theta, sync))
    terms = (a, b + np.maximum(0.0, 1 / k - theta) * a, (1 - theta) * a + b / k)
    return floats(np.maximum.reduce(terms) + sync)


def predict(work: Workload, given: Candidates) -> Prediction:
    """What each candidate is expected to do; groups evicted as stale are generated again."""
    evicted = np.zeros(len(given))
    for _ in range(1 if work.evict_above is None else EVICTION_ROUNDS):
        found = _predict(work, given, evicted)
        if work.evict_above is not None:
            evicted = (evicted + _evicted(work, given, found)) / 2
    return found


def _predict(work: Workload, given: Candidates, evicted: Array) -> Prediction:
    k = given.updates
    b = k * work.train.on(given.train_cards)
    a = k * work.rollout.on(given.rollout_cards) / (1 - np.minimum(evicted, 0.95))
    terms = _terms(work, given, a, b)
    binds = np.argmax(terms + 1e-12 * np.arange(len(TERMS), 0, -1)[:, None] * terms[0], axis=0)
    cycle = terms.max(axis=0) + work.sync_seconds
    lag = _lag(work, given, a, b, binds)
    relative = cycle / k / work.reference.seconds
    return Prediction(
        cycle=cycle,
        per_update=cycle / k,
        relative=relative,
        per_card=work.reference.cards / given.cards / relative,
        train_idle=np.maximum(0.0, 1 - (b + work.sync_seconds) / cycle),
        rollout_idle=np.maximum(0.0, 1 - (a + work.sync_seconds + _resume(work)) / cycle),
        sync_share=work.sync_seconds / cycle,
        lag_versions=lag,
        lag_updates=in_updates(lag, k),
        evicted=evicted,
        binds=binds,
    )


def _resume(work: Workload) -> float:
    """Seconds that rollouts stand after a sync; none are under way where the pool drains at each."""
    return work.resume_seconds if work.partial and work.mode != "one_step_off" else 0.0


def _progress(work: Workload, cycle: Array) -> Array:
    """How far a trajectory gets in a cycle in which a sync interrupts it."""
    return floats(np.maximum(cycle - _resume(work), 0.05 * cycle))


def _terms(work: Workload, given: Candidates, a: Array, b: Array) -> Array:
    """The candidates for the cycle without sync, in the order of TERMS; shape (terms, candidates)."""
    k, theta = given.updates, given.theta
    slots, trajectories = work.slots_per_card * given.rollout_cards, work.per_update * k
    mean = work.mean_duration(given.rollout_cards)
    tail = mean * drain(work.durations, np.minimum(slots, trajectories))
    none = np.zeros_like(a)
    oldest = none if work.wait_at is None else _until_young(work, given, b, mean) / work.wait_at
    if work.mode == "one_step_off":  # the whole next batch is generated, and finished, while this one trains
        return np.stack([a + tail, b, none, none, none])
    stream = b + _until_stream(work, given, b, mean)
    if not work.partial:  # a sync waits for everything under way
        last = (1 - theta) * a + b / k + np.where(theta == 0, tail, 0.0)
        return np.stack([a + tail, b, stream, last, oldest])
    resume = _resume(work)
    met = resume * np.minimum(1.0, theta * trajectories / slots)  # share of the slots that a sync interrupts, at most
    last = _until_enough(work, given, a + met, b, mean) + b / k
    ahead = (theta >= 1) & (a + tail <= b)  # the next batch is ready before it is asked for
    at_once = _unqueued(work, given, b, mean)
    crowd = trajectories * _running(work, _progress(work, at_once) / mean) / slots
    calm = at_once + mean * np.maximum(0.0, crowd - 1)
    last = np.maximum(at_once, np.minimum(np.where(ahead, b, last), calm))
    return np.stack([a + resume, b, np.minimum(stream, calm), last, oldest])


def _unqueued(work: Workload, given: Candidates, b: Array, mean: Array) -> Array:
    """The least cycle, sync left out, if every trajectory had a slot at once: the time that answers take by themselves.

    Q groups begin in each cycle of length c, and a group lasts D, its longest trajectory. The j-th mini-batch is there
    in time if, (k - j + 1) b/k before the cycle ends, no more groups are unfinished than it leaves over:

        sum over i >= 1 of P(D > i c - (k - j + 1) b/k - (i - 1) r) <= 1 + theta - j/k + e^-gamma / Q

    and c is the least for which that holds for all j; r is lost to each sync on the way. The last term is for the
    largest of a finite number: the expected maximum of n draws is exceeded by e^-gamma = .56 of them (extreme-value
    theory).
    """
    group, longest = work.durations.of_groups(work.group_size)
    unit = mean * longest
    low = np.maximum(b, unit / (1 + given.theta))  # Little's law: Q D / c groups are unfinished on average
    found, late = low.copy(), np.flatnonzero(~_in_time(work, given, group, unit, b, low))
    if not len(late):
        return floats(found)
    some, b, unit = given.take(late), b[late], unit[late]
    low, high = low[late], np.maximum(low[late], b + unit * group.values[-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = _in_time(work, some, group, unit, b, middle)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    found[late] = high
    return floats(found)


def _until_young(work: Workload, given: Candidates, b: Array, mean: Array) -> Array:
    """From the admission of a cycle's groups to the end of the cycle whose trainer waited for the last of them.

    Strategy `wait` with threshold h lets no group be unfinished h - 1 cycles after its admission when the trainer asks,
    and a cycle then trains for b: h cycles are no shorter than the makespan of a cycle's groups and b.
    """
    group, longest = work.durations.of_groups(work.group_size)
    cycle = work.per_update * given.updates
    slots = np.minimum(work.slots_per_card * given.rollout_cards, cycle)
    alone = longest * group.longest_of(cycle / work.group_size)
    met = (work.wait_at or 1.0) - 1
    return floats(mean * np.maximum(alone, cycle / slots + drain(work.durations, slots)) + b + met * _resume(work))


def _running(work: Workload, cycle: Array) -> Array:
    """Trajectories running when a cycle begins, over those that begin with it; `cycle` in mean durations."""
    return 1 + _surviving(work.durations, cycle, cycle)


def _surviving(durations: Durations, first: Array, cycle: Array) -> Array:
    """Sum over i >= 0 of P(D > first + i cycle)."""
    total, age = np.zeros(len(first)), first
    while (age < durations.values[-1]).any():
        total += 1 - np.searchsorted(durations.values, age, side="right") / len(durations.values)
        age = age + cycle
    return total


def _in_time(
    work: Workload, given: Candidates, group: Durations, unit: Array, b: Array, cycle: Array
) -> NDArray[np.bool_]:
    """Whether every mini-batch is ready when the trainer could take it; `unit` is the mean duration of a group."""
    k, fits = given.updates, np.ones(len(given), dtype=bool)
    finite = EXCEEDED * work.group_size / (work.per_update * k)
    for j in range(1, int(k.max()) + 1):
        unfinished = _surviving(group, (cycle - (k - j + 1) / k * b) / unit, _progress(work, cycle) / unit)
        fits &= (j > k) | (unfinished <= 1 + given.theta - j / k + finite)
    return fits


def _until_stream(work: Workload, given: Candidates, b: Array, mean: Array) -> Array:
    """How long the trainer waits for its mini-batches before the last: largest over j < k of t_j - (j - 1) b/k.

    t_j is when the share j/k - theta of a cycle, which was not carried over, is finished by a pool that was paused
    and begins anew: the longest trajectories of the first groups are waited for.
    """
    group, longest = work.durations.of_groups(work.group_size)
    k, batch = given.updates, work.per_update * given.updates
    at_once = np.minimum(work.slots_per_card * given.rollout_cards, batch)
    waits = np.zeros(len(given))
    for j in range(1, int(k.max())):
        share = np.where(j < k, np.maximum(0.0, j / k - given.theta), 0.0)
        units = np.maximum(group.until_finished(share * batch / at_once, longest), group.quantile(share))
        waits = np.maximum(waits, np.where(share > 0, mean * longest * units - (j - 1) * b / k, 0.0))
    return waits


def _until_enough(work: Workload, given: Candidates, a: Array, b: Array, mean: Array) -> Array:
    """When the Q-th group of a cycle is finished, if rollouts pause afterwards; by conservation of work.

    All n slots are busy until nothing is left to start. Then u = n E[max_G] / G groups are unfinished (Little's law)
    and end one by one. theta Q of them are not needed: if j = u - theta Q > 0, the last one needed is the j-th to
    end, after R = F_e^-1(j/u) of the residual lives of groups (for theta = 0 the expected last). Slots work for a in
    all: until then t - R + E[min(residual, R)], and for b/k more, while the last mini-batch trains. Hence
    t = a + R - E[min(residual, R + b/k)]. If j <= 0, slots stay busy for p = -j m G / n and
    t = a - min(p, b/k) - E[min(residual, b/k - p)]. Never less than (1 - theta) Q new groups take, all begun at once.
    """
    d, (group, longest) = work.durations, work.durations.of_groups(work.group_size)
    slots, cycle = work.slots_per_card * given.rollout_cards, work.per_update * given.updates
    share = np.minimum(1.0, (1 + given.theta) * cycle / slots)
    unfinished = np.minimum(share * slots * longest, (1 + given.theta) * cycle) / work.group_size
    spare = given.theta * cycle / work.group_size - unfinished
    needed = np.clip(-spare / unfinished, 0.0, 1.0)
    last = group.last_of(unfinished)
    reach = longest * np.where(needed >= 1, last, np.minimum(last, group.residual_quantile(needed))) * (needed > 0)
    update = b / given.updates
    busy = np.minimum(np.maximum(0.0, spare) * work.group_size / slots * mean, update)
    finished = a + mean * reach - busy - share * mean * d.spent(reach + (update - busy) / mean)
    fresh = np.clip(1 - given.theta, 0.0, 1.0)
    floor = np.where(fresh >= 1, d.longest_of(cycle), longest * group.quantile(fresh)) * (fresh > 0)
    return floats(np.maximum(finished, mean * floor))


def _lag(work: Workload, given: Candidates, a: Array, b: Array, binds: NDArray[np.int_]) -> Array:
    """Mean versions between a group's first token and its training: groups carried over a sync / Q (Little's law).

    Where the rollout pool binds these are the groups in its slots and those finished while the last mini-batch
    trained, n E[max_G] / (Q G) + b / (k a), never more than theta; elsewhere the quota is used up: theta.
    one_step_off trains exactly one version behind.
    """
    if work.mode == "one_step_off":
        return np.ones(len(given))
    theta = given.theta if work.evict_above is None else np.minimum(given.theta, work.evict_above - 1)
    if not work.partial:
        return theta
    longest = work.durations.of_groups(work.group_size)[1]
    in_slots = work.slots_per_card * given.rollout_cards * longest / (work.per_update * given.updates)
    carried = in_slots + b / (given.updates * a)
    return np.where(binds == TERMS.index("rollout"), np.minimum(theta, carried), theta)


def _evicted(work: Workload, given: Candidates, found: Prediction) -> Array:
    """Share of finished groups whose prompt age passes the threshold h before they are trained.

    Too much under way: (1 + theta) Q groups of h admissions at most are kept, so 1 - h / (1 + theta) age out whatever
    their length. Of the others those that finish later than h cycles after admission: the wait for a slot behind what
    was admitted before, and the longest trajectory of the group.
    """
    assert work.evict_above is not None
    threshold = work.evict_above
    crowded = np.maximum(0.0, 1 - threshold / (1 + given.theta))
    group, longest = work.durations.of_groups(work.group_size)
    slots, batch = work.slots_per_card * given.rollout_cards, work.per_update * given.updates
    mean = work.mean_duration(given.rollout_cards)
    lasting = mean[:, None] * longest * group.quantile((np.arange(64) + 0.5) / 64)
    behind = found.binds == TERMS.index("rollout")
    queued = np.where(behind, np.minimum(given.theta, threshold - 1), 0.0)
    late = np.zeros(len(given))
    update = work.train.on(given.train_cards)
    asked = threshold * (found.cycle - work.sync_seconds - _resume(work)) - update
    places = (np.arange(8) + 0.5) / 8
    for x in places:
        wait = np.maximum(0.0, ((queued + x) * batch / slots - longest) * mean - behind * update)
        late += (wait[:, None] + lasting >= asked[:, None]).mean(axis=1)
    return floats(1 - (1 - crowded) * (1 - late / len(places)))
