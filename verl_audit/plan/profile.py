"""A profile, what a plan starts from: a workload with its setting; here from numbers, in `measured` from a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_audit.errors import AuditError
from verl_audit.plan.tail import Durations, lognormal
from verl_audit.plan.workload import Mode, Reference, Unknown, Work, Workload

ASSUMED_SIGMA, ASSUMED_CAP = 1.0, 4.0
"""Spread of durations where no length is known: that of long reasoning responses, cut at 4 times their mean."""
ASSUMED_GROUPS, ASSUMED_SIZE, ASSUMED_WAVES = 64.0, 8.0, 4.0
"""Groups an update, trajectories a group, and trajectories for each slot of a baseline update, where not known."""
ASSUMED_NOISE = 0.1
"""Coefficient of variation of step times where none were measured."""


@dataclass(frozen=True)
class Given:
    """Numbers from the user; None is not given. Times are of one step, that is of `updates` updates, in any unit."""

    rollout: float | None = None
    train: float | None = None
    sync: float | None = None
    baseline_cards: int | None = None
    rollout_cards: int | None = None
    train_cards: int | None = None
    updates: int | None = None
    theta: float | None = None
    groups: float | None = None
    group_size: float | None = None
    slots: float | None = None
    """Trajectories at a time on one rollout card."""
    rollout_exponent: float | None = None
    train_exponent: float | None = None
    durations: Durations | None = None
    mode: Mode | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Profile:
    """A workload with the setting it was measured at: what `plan` starts from."""

    work: Workload
    cards: int
    updates: int
    theta: float
    noise: float
    """Coefficient of variation of step times, from one step to the next."""
    train_cards: int | None = None
    rollout_cards: int | None = None
    """The split of the profiled run; None where both took turns on all cards."""


def from_numbers(given: Given) -> Profile:
    """A profile of a synchronous baseline step: rollout and training in turn on all of `baseline_cards`."""
    if given.rollout is None or given.train is None or given.baseline_cards is None:
        raise AuditError("without a run directory, --baseline-cards, --rollout and --train are needed")
    cards = float(given.baseline_cards)
    updates, sync = given.updates or 1, given.sync or 0.0
    unknown = list(_unknown_numbers(given))
    groups, size = given.groups or ASSUMED_GROUPS, given.group_size or ASSUMED_SIZE
    work = Workload(
        mode=given.mode or "separate_async",
        rollout=Work(given.rollout / updates, cards, exponent_of(given.rollout_exponent)),
        train=Work(given.train / updates, cards, exponent_of(given.train_exponent)),
        reference=Reference(
            (given.rollout + given.train + sync) / updates, cards, f"{cards:g} cards, rollout and training in turn"
        ),
        sync_seconds=sync,
        groups=groups / updates,
        group_size=size,
        slots_per_card=given.slots or groups * size / (ASSUMED_WAVES * cards),
        durations=given.durations or lognormal(ASSUMED_SIGMA, ASSUMED_CAP),
        evict_above=given.threshold,
        unit="",
        measured=("rollout and training time: as given",),
        unknown=tuple(unknown),
    )
    return Profile(work, given.baseline_cards, updates, given.theta if given.theta is not None else 0.0, ASSUMED_NOISE)


def exponent_of(given: float | None) -> float:
    """A scaling exponent: perfect where none is given."""
    return 1.0 if given is None else given


def _unknown_numbers(given: Given) -> Iterator[Unknown]:
    if given.sync is None:
        yield Unknown("weight-sync time", "0", "timing_s/update_weights of any run; --sync")
    yield from unknown_scaling(given)
    if given.durations is None:
        yield unknown_lengths()
    if given.groups is None or given.group_size is None:
        yield Unknown(
            "batch",
            f"{ASSUMED_GROUPS:g} groups of {ASSUMED_SIZE:g} a step",
            "the configuration; --groups, --group-size",
        )
    if given.slots is None:
        yield Unknown(
            "trajectories at a time",
            f"a quarter of a step's on {given.baseline_cards} cards",
            "rollout.max_num_seqs, KV cache; --slots",
        )
    yield Unknown("noise of step times", f"{ASSUMED_NOISE:.0%}", "20 steps of any run")


def unknown_lengths() -> Unknown:
    """That no length is known."""
    return Unknown(
        "spread of durations",
        f"log-normal, sigma {ASSUMED_SIGMA:g}, cut at {ASSUMED_CAP:g} x mean",
        "trainer.rollout_data_dir, or --lengths FILE",
    )


def unknown_scaling(given: Given) -> Iterator[Unknown]:
    """Which scaling exponents are assumed."""
    missing = [
        name
        for name, value in (("rollout", given.rollout_exponent), ("training", given.train_exponent))
        if value is None
    ]
    if missing:
        yield Unknown(
            f"scaling of {' and '.join(missing)}",
            "time falls as 1/cards (exponent 1)",
            "a second split; --rollout-exponent, --train-exponent",
        )
