"""What a run has to do, whatever the split: the work of one optimizer update in each pool, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_audit.measure.stats import Array
from verl_audit.plan.tail import Durations

Mode = Literal["separate_async", "fully_async", "one_step_off"]
"""Trainers with a pool of their own for rollouts: those that a split can be planned for (verl's names)."""
KNOB: dict[str, str] = {
    "separate_async": "trainer.v1.separate_async.num_warmup_batches",
    "fully_async": "async_training.staleness_threshold",
}
"""What sets theta, the extra share of a cycle's groups that may be under way (verl 0.9.1)."""


@dataclass(frozen=True)
class Work:
    """One update's work for one pool: `seconds` on `cards` cards; `low` and `high` bound the seconds.

    On C cards it takes seconds * (cards / C)^exponent; exponent 1 is perfect scaling.
    """

    seconds: float
    cards: float
    exponent: float = 1.0
    low: float | None = None
    high: float | None = None

    def on(self, cards: Array) -> Array:
        """Seconds on so many cards."""
        return self.seconds * (self.cards / np.asarray(cards, dtype=float)) ** self.exponent

    @property
    def card_seconds(self) -> float:
        """W of the model: seconds times cards where it was measured."""
        return self.seconds * self.cards

    def at(self, bound: Literal["low", "high"]) -> Work:
        """The same work at a bound of its interval."""
        value = self.low if bound == "low" else self.high
        return replace(self, seconds=self.seconds if value is None else value)


@dataclass(frozen=True)
class Reference:
    """The run that plans are compared with: seconds for one update on its cards."""

    seconds: float
    cards: float
    name: str


@dataclass(frozen=True)
class Unknown:
    """Something the profile does not determine: what stands in for it, and how to measure it."""

    what: str
    taken: str
    measure: str


@dataclass(frozen=True)
class Workload:
    """The profile that a plan is computed from. Seconds are in `unit`; rollout seconds are without the drain tail."""

    mode: Mode
    rollout: Work
    train: Work
    reference: Reference
    sync_seconds: float
    groups: float
    """Groups trained by one update (B)."""
    group_size: float
    slots_per_card: float
    """Trajectories that one rollout card generates at the same time."""
    durations: Durations
    resume_seconds: float = 0.0
    """What a sync costs rollouts besides its own time: those under way are prefilled again."""
    partial: bool = True
    """Whether trajectories under way survive a weight sync; if not, the rollout pool drains at each one."""
    evict_above: float | None = None
    """Prompt age in versions above which a finished group is thrown away (max_off_policy_threshold, drop)."""
    wait_at: float | None = None
    """Prompt age in versions at which the trainer waits for a group (max_off_policy_threshold, wait)."""
    unit: str = "s"
    measured: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def per_update(self) -> float:
        """Trajectories of one update."""
        return self.groups * self.group_size

    def mean_duration(self, rollout_cards: Array) -> Array:
        """Seconds of a mean trajectory: a slot's share of the pool's time for one update, t n / N."""
        return self.rollout.on(rollout_cards) * self.slots_per_card * np.asarray(rollout_cards) / self.per_update


def two_pools(
    *,
    slots: float,
    groups: float,
    group_size: float,
    mean_duration: float,
    update_seconds: float,
    sync_seconds: float,
    durations: Durations,
    mode: Mode = "separate_async",
    partial: bool = True,
    evict_above: float | None = None,
    wait_at: float | None = None,
) -> Workload:
    """A workload of two pools of one card each, told as a simulation tells it: what any clock can be compared with.

    `slots` trajectories at a time of `mean_duration` seconds, updates of `groups` groups that take `update_seconds`.
    `predict` at one card each, k and theta then gives cycle, idle shares, lag and evictions.
    """
    rollout = groups * group_size * mean_duration / slots
    return Workload(
        mode=mode,
        rollout=Work(rollout, 1),
        train=Work(update_seconds, 1),
        reference=Reference(rollout + update_seconds + sync_seconds, 2, "both pools in turn"),
        sync_seconds=sync_seconds,
        groups=groups,
        group_size=group_size,
        slots_per_card=slots,
        durations=durations,
        partial=partial,
        evict_above=evict_above,
        wait_at=wait_at,
    )
