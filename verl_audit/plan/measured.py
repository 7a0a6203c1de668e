"""A profile measured from a run: the work of both pools from its timers, and what they leave open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from verl_audit.errors import AuditError
from verl_audit.measure.run import Series
from verl_audit.pipeline import Loaded
from verl_audit.plan.profile import ASSUMED_GROUPS, ASSUMED_SIZE, Given, Profile, exponent_of, unknown_scaling
from verl_audit.plan.reading import Reading
from verl_audit.plan.split import one, predict
from verl_audit.plan.tail import Durations, makespan
from verl_audit.plan.workload import Mode, Reference, Unknown, Work, Workload

COLOCATED = ("sync", "v0", "colocate_async")
"""Trainers whose rollouts and updates take turns on the same cards."""
WAITS = 0.05
"""Share of a step that a trainer waits below which the rollout time cannot be read from it."""


def from_run(loaded: Loaded, given: Given) -> Profile:
    """A profile measured from a run; where it leaves rollouts open, a synchronous baseline may tell them."""
    reading = Reading(loaded, 0, given)
    if reading.trainer in COLOCATED:
        return _from_turns(reading)
    if reading.trainer in get_args(Mode):
        return _from_pools(reading, loaded)
    raise AuditError(
        f"{reading.data.name}: which trainer wrote it is not known; give it with --set fact.trainer=separate_async "
        f"(or {', '.join([*COLOCATED, 'fully_async', 'one_step_off'])})"
    )


def _work(reading: Reading, seconds: float, cards: float, exponent: float | None) -> Work:
    low, high = reading.interval(seconds)
    return Work(seconds, cards, exponent_of(exponent), low, high)


def _from_turns(reading: Reading) -> Profile:
    """A run whose rollouts and updates take turns on the same cards; its generation ends with the slowest one."""
    given = reading.given
    cards = reading.cards(given.baseline_cards, "trainer")
    if cards is None:
        raise AuditError(f"{reading.data.name}: its cards are not known; give --baseline-cards")
    updates, sync = reading.updates, reading.sync
    step = float(reading.steps.value.mean()) - reading.mean("time_save")
    generating = given.rollout if given.rollout is not None else reading.mean("time_gen", "wait_seconds")
    if not generating:
        raise AuditError(f"{reading.data.name}: it logs no generation time (timing_s/gen); give --rollout")
    training = given.train if given.train is not None else max(step - generating - sync, 0.0)
    groups, size = _batch(reading, updates)
    trajectories = groups * updates * size
    slots, durations = min(reading.slots(cards, trajectories), trajectories / cards), reading.durations()
    evict_above, wait_at = _thresholds(reading, given.mode or "separate_async")
    busy = _without_drain(durations, trajectories, slots * cards, drains=reading.trainer != "colocate_async")
    shares = f"generation {generating:.3g} s ({1 - busy:.0%} of it drain), training {training:.3g} s"
    work = Workload(
        mode=given.mode or "separate_async",
        rollout=_work(reading, generating * busy / updates, cards, given.rollout_exponent),
        train=_work(reading, training / updates, cards, given.train_exponent),
        reference=Reference(step / updates, cards, f"{reading.data.name} ({reading.trainer}, {cards:g} cards)"),
        sync_seconds=sync,
        groups=groups,
        group_size=size,
        slots_per_card=slots,
        durations=durations,
        evict_above=evict_above,
        wait_at=wait_at,
        measured=(f"{len(reading.steps)} steps of {step:.3g} s: {shares}, weight sync {sync:.3g} s",),
        unknown=(*reading.unknown, *unknown_scaling(given)),
        notes=_notes(reading, pools=False),
    )
    return Profile(work, round(cards), round(updates), given.theta or 0.0, reading.noise())


def _without_drain(durations: Durations, trajectories: float, slots: float, *, drains: bool) -> float:
    """Share of a generation phase in which the slots are filled: (N / n) / makespan; the rest is the drain."""
    n = min(slots, trajectories)
    return float(trajectories / n / makespan(durations, trajectories, n)) if drains else 1.0


def _batch(reading: Reading, updates: float) -> tuple[float, float]:
    given = None if reading.given.groups is None else float(reading.given.groups)
    groups = reading.fact("groups_per_step", given, ASSUMED_GROUPS, "groups per step") / updates
    return groups, reading.fact("group_size", reading.given.group_size, ASSUMED_SIZE, "trajectories per group")


def _thresholds(reading: Reading, mode: Mode) -> tuple[float | None, float | None]:
    """Prompt age above which v1's `drop` evicts, or at which `wait` waits; other trainers have no such limit."""
    strategy = reading.data.facts.get("staleness_strategy") if mode == "separate_async" else None
    limit = reading.data.number("staleness_threshold")
    if strategy == "wait":
        return None, reading.given.threshold or limit
    return reading.given.threshold or (limit if strategy == "drop" else None), None


def _from_pools(reading: Reading, loaded: Loaded) -> Profile:
    """A run with a rollout pool of its own: training is timed, rollout time inferred from the trainer's wait."""
    given, mode = reading.given, next(m for m in get_args(Mode) if m == reading.trainer)
    pools = _pool_cards(reading)
    updates, sync = reading.updates, reading.sync
    step = float(reading.steps.value.mean()) - reading.mean("time_save")
    waiting = _waiting(reading, step)
    training = given.train if given.train is not None else max(step - waiting - sync, 0.0)
    groups, size = _batch(reading, updates)
    theta = _theta(reading, mode)
    slots = reading.slots(pools[1], (1 + theta) * groups * updates * size)
    work = Workload(
        mode=mode,
        rollout=Work(step / updates, pools[1], exponent_of(given.rollout_exponent)),
        train=_work(reading, training / updates, pools[0], given.train_exponent),
        reference=Reference(
            step / updates, sum(pools), f"{reading.data.name} ({mode}, {pools[0]:g}:{pools[1]:g} cards)"
        ),
        sync_seconds=sync,
        groups=groups,
        group_size=size,
        slots_per_card=slots,
        durations=reading.durations(),
        resume_seconds=reading.traced.resume if reading.traced else 0.0,
        partial=reading.data.facts.get("partial_rollout") is not False,
        wait_at=_thresholds(reading, mode)[1],
    )
    evict_above, wait_at = _thresholds(reading, given.mode or mode)
    rollout, how = _rollout_work(reading, loaded, work, Seen(pools, updates, theta, step, waiting))
    work = replace(
        work,
        mode=given.mode or mode,
        rollout=rollout,
        evict_above=evict_above,
        wait_at=wait_at,
        measured=(
            f"{len(reading.steps)} steps of {step:.3g} s: waiting {waiting:.3g} s, training {training:.3g} s, "
            f"weight sync {sync:.3g} s",
            how,
        ),
        unknown=(*reading.unknown, *unknown_scaling(given)),
        notes=_notes(reading, pools=True),
    )
    cards = round(sum(pools))
    return Profile(work, cards, round(updates), theta, reading.noise(), round(pools[0]), round(pools[1]))


def _pool_cards(reading: Reading) -> tuple[float, float]:
    """Cards of trainer and rollout pool."""
    train = reading.cards(reading.given.train_cards, "trainer")
    rollout = reading.cards(reading.given.rollout_cards, "actor_rollout_ref.rollout", "rollout")
    if train is None or rollout is None:
        raise AuditError(
            f"{reading.data.name}: the cards of its {'trainer' if train is None else 'rollout pool'} are not known; "
            "give --train-cards and --rollout-cards"
        )
    return train, rollout


def _waiting(reading: Reading, step: float) -> float:
    waiting = reading.data.get("wait_seconds")
    if len(waiting):
        return reading.mean("wait_seconds")
    idle = reading.data.get("trainer_idle_share").value
    if len(idle):
        return float(idle.mean()) * step
    raise AuditError(f"{reading.data.name}: it logs no time that the trainer waits for samples (timing_s/gen)")


def _theta(reading: Reading, mode: Mode) -> float:
    if mode == "one_step_off":
        return 1.0
    name = "fa_staleness_share" if mode == "fully_async" else "warmup_batches"
    return reading.fact(
        name, reading.given.theta, 0.1 if mode == "fully_async" else 1.0, "extra share of a cycle under way"
    )


@dataclass(frozen=True)
class Seen:
    """What a run with two pools shows: cards of trainer and rollouts, k, theta, seconds of a cycle and of its wait."""

    pools: tuple[float, float]
    updates: float
    theta: float
    step: float
    waiting: float


def _rollout_work(reading: Reading, loaded: Loaded, work: Workload, seen: Seen) -> tuple[Work, str]:
    """The rollout pool's work of one update, and how it was found; its bounds where it is only bounded."""
    given, cards = reading.given, seen.pools[1]
    if given.rollout is not None:
        return Work(given.rollout / seen.updates, cards, exponent_of(given.rollout_exponent)), "rollout time as given"
    if (traced := reading.traced) is not None:
        held = traced.seconds * work.per_update / (work.slots_per_card * cards)
        return (
            _work(reading, held, cards, given.rollout_exponent),
            f"rollouts {held * seen.updates:.3g} s: {traced.count} traced trajectories, each {traced.seconds:.3g} s "
            f"in one of {work.slots_per_card * cards:.4g} slots, and {traced.resume:.2g} s more for each sync it met",
        )
    idle = reading.data.get("rollout_idle_share").value
    if len(idle):
        busy = (1 - float(idle.mean())) * seen.step / seen.updates
        return (
            _work(reading, busy, cards, given.rollout_exponent),
            f"rollout pool idle {idle.mean():.0%} (a lower bound: draining counts as busy)",
        )
    if seen.waiting >= WAITS * seen.step:
        busy = _solve(lambda t: _cycle(work, seen, t) - seen.step, seen.step / seen.updates)
        return (
            _work(reading, busy, cards, given.rollout_exponent),
            f"rollouts {busy * seen.updates:.3g} s, as much as makes the trainer wait {seen.waiting:.3g} s",
        )
    return _bounded(reading, loaded, work, seen)


def _bounded(reading: Reading, loaded: Loaded, work: Workload, seen: Seen) -> tuple[Work, str]:
    """A trainer that never waits shows only that rollouts are fast enough; a synchronous baseline tells how fast."""
    exponent = exponent_of(reading.given.rollout_exponent)
    most = _solve(lambda t: _cycle(work, seen, t) - 1.02 * seen.step, seen.step / seen.updates)
    for index in range(1, len(loaded.baselines) + 1):
        base = Reading(loaded, index, Given())
        if base.trainer in COLOCATED:
            known = _from_turns(base).work
            per_update = work.per_update / known.per_update
            seconds = known.rollout.card_seconds * per_update / seen.pools[1]
            return Work(min(seconds, most), seen.pools[1], exponent, min(seconds, most) / 2, most), (
                f"rollouts {seconds * seen.updates:.3g} s, from generation of {base.data.name}"
            )
    reading.unknown.append(
        Unknown(
            "rollout time",
            f"at most {most * seen.updates:.3g} s: the trainer hardly waits",
            "a synchronous run as --baseline, or fully_async's rollouter/idle_ratio",
        )
    )
    return Work(most, seen.pools[1], exponent, most / 2, most), f"rollouts at most {most * seen.updates:.3g} s"


def _cycle(work: Workload, seen: Seen, rollout_seconds: float) -> float:
    trial = replace(work, rollout=replace(work.rollout, seconds=rollout_seconds))
    return float(predict(trial, one(*seen.pools, seen.updates, seen.theta)).cycle[0])


def _solve(excess: Callable[[float], float], high: float) -> float:
    """The root of an increasing function in [0, high], by halving; `high` where it is below 0 there."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2


def _notes(reading: Reading, *, pools: bool) -> tuple[str, ...]:
    said = []
    if pools and reading.trainer == "separate_async" and float(reading.steps.value.mean()) < 40:
        said.append(
            "verl looks for samples every 2 s: of steps this short the wait is rounded up, and the rollout time with it"
        )
    drift = _drift(reading.data.get("response_length_mean"))
    if abs(drift) > 0.2:
        said.append(f"response length changed by {drift:+.0%} over the run: the plan holds for its mean")
    if reading.noise() > 0.3:
        said.append(
            f"step times vary by {reading.noise():.0%} from step to step: differences below that need many steps"
        )
    return tuple(said)


def _drift(series: Series) -> float:
    third = len(series) // 3
    early, late = series.value[:third], series.value[len(series) - third :]
    return float(late.mean() / early.mean() - 1) if third and early.mean() > 0 else math.nan
