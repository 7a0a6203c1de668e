"""A workload from numbers, or measured from a run: its timers, lengths and configuration, and what they leave open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from verl_audit.errors import AuditError
from verl_audit.ingest.detect import plain
from verl_audit.measure.run import RunData, Series
from verl_audit.measure.run import load as load_run_data
from verl_audit.measure.stats import ar1_mean
from verl_audit.pipeline import Loaded
from verl_audit.plan.split import one, predict
from verl_audit.plan.tail import Durations, from_sample, lognormal, makespan, sigma_of
from verl_audit.plan.workload import Mode, Reference, Unknown, Work, Workload

COLOCATED = ("sync", "v0", "colocate_async")
"""Trainers whose rollouts and updates take turns on the same cards."""
ASSUMED_SIGMA, ASSUMED_CAP = 1.0, 4.0
"""Spread of durations where no length is known: that of long reasoning responses, cut at 4 times their mean."""
ASSUMED_GROUPS, ASSUMED_SIZE, ASSUMED_WAVES = 64.0, 8.0, 4.0
"""Groups an update, trajectories a group, and trajectories for each slot of a baseline update, where not known."""
ASSUMED_NOISE = 0.1
"""Coefficient of variation of step times where none were measured."""
WAITS = 0.05
"""Share of a step that a trainer waits below which the rollout time cannot be read from it."""
MIN_STEPS = 8


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


# -- from numbers --------------------------------------------------------------------------------------------


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
        rollout=Work(given.rollout / updates, cards, _exponent(given.rollout_exponent)),
        train=Work(given.train / updates, cards, _exponent(given.train_exponent)),
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


def _exponent(given: float | None) -> float:
    return 1.0 if given is None else given


def _unknown_numbers(given: Given) -> Iterator[Unknown]:
    if given.sync is None:
        yield Unknown("weight-sync time", "0", "timing_s/update_weights of any run; --sync")
    yield from _unknown_scaling(given)
    if given.durations is None:
        yield _unknown_lengths()
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


def _unknown_lengths() -> Unknown:
    return Unknown(
        "spread of durations",
        f"log-normal, sigma {ASSUMED_SIGMA:g}, cut at {ASSUMED_CAP:g} x mean",
        "trainer.rollout_data_dir, or --lengths FILE",
    )


def _unknown_scaling(given: Given) -> Iterator[Unknown]:
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


# -- from a run ----------------------------------------------------------------------------------------------


def from_run(loaded: Loaded, given: Given) -> Profile:
    """A profile measured from a run; where it leaves rollouts open, a synchronous baseline may tell them."""
    reading = _Reading(loaded, 0, given)
    if reading.trainer in COLOCATED:
        return _from_turns(reading)
    if reading.trainer in get_args(Mode):
        return _from_pools(reading, loaded)
    raise AuditError(
        f"{reading.data.name}: which trainer wrote it is not known; give it with --set fact.trainer=separate_async "
        f"(or {', '.join([*COLOCATED, 'fully_async', 'one_step_off'])})"
    )


class _Reading:
    """One run's timers, facts and configuration, per cycle (one row of its log)."""

    def __init__(self, loaded: Loaded, index: int, given: Given) -> None:
        self.source = (loaded.run, *loaded.baselines)[index]
        self.data: RunData = load_run_data(loaded.store, self.source.run, plain(self.source.facts))
        self.store, self.given, self.unknown = loaded.store, given, list[Unknown]()
        self.trainer = self.data.facts.get("trainer")
        self.steps = self._settled(self.data.get("time_step"))
        if len(self.steps) < MIN_STEPS:
            raise AuditError(f"{self.data.name}: {len(self.steps)} steps with a step time; a profile needs {MIN_STEPS}")

    def _settled(self, series: Series) -> Series:
        """Without the first tenth, in which engines warm up and queues fill."""
        first = series.step[max(1, len(series) // 10)] if len(series) > 1 else 0.0
        return series.at(lambda s: s >= first)

    def mean(self, *names: str) -> float:
        """Sum of a timer over the judged steps, per step; 0 where it was never logged."""
        series = self.data.get(*names)
        inside = series.at(lambda s: np.isin(s, self.steps.step)).value
        return float(inside.sum() / len(self.steps))

    @property
    def sync(self) -> float:
        """Seconds of one weight sync."""
        if self.given.sync is not None:
            return self.given.sync
        value = self._settled(self.data.get("time_update_weights")).value
        if not len(value):
            self.unknown.append(Unknown("weight-sync time", "0", "timing_s/update_weights is logged by verl"))
        return float(value.mean()) if len(value) else 0.0

    def fact(self, name: str, given: float | None, taken: float, what: str) -> float:
        """A number from the user, the configuration, or assumed and said to be."""
        found = given if given is not None else self.data.number(name)
        if found is None:
            self.unknown.append(Unknown(what, f"{taken:g}", f"the configuration (.hydra); --set fact.{name}=N"))
        return taken if found is None else float(found)

    @property
    def updates(self) -> float:
        """Updates of one row of the log."""
        given = None if self.given.updates is None else float(self.given.updates)
        return self.fact("updates_per_version", given, 1.0, "updates per weight sync")

    def setting(self, *keys: str) -> float | None:
        """The first of these configuration values that is a number above 0."""
        for key in keys:
            try:
                value = float(self.source.config[key][0])
            except (KeyError, ValueError):
                continue
            if value > 0:
                return value
        return None

    def cards(self, given: int | None, *places: str) -> float | None:
        """nodes x GPUs per node of the first place that has both."""
        if given is not None:
            return float(given)
        for place in places:
            nodes, each = self.setting(f"{place}.nnodes"), self.setting(f"{place}.n_gpus_per_node")
            if nodes and each:
                return nodes * each
        return None

    def durations(self) -> Durations:
        """Relative durations: response lengths of dumps, else a log-normal of the logged mean and largest length."""
        if self.given.durations is not None:
            return self.given.durations
        rows = self.store.execute(
            "SELECT output_chars FROM samples WHERE run = ? AND split = 'train' AND NOT padding AND output_chars > 0 "
            "ORDER BY output_chars",
            [self.source.run],
        ).fetchall()
        if len(rows) >= 64:
            return from_sample([n for (n,) in rows], f"{len(rows)} dumped responses, in characters")
        return self._fitted_durations()

    def _fitted_durations(self) -> Durations:
        mean, largest = self.mean("response_length_mean"), self.mean("response_length_max")
        count, limit = self.data.number("samples_per_step"), self.data.number("response_limit")
        if not mean or not largest or not count:
            self.unknown.append(_unknown_lengths())
            return lognormal(ASSUMED_SIGMA, ASSUMED_CAP)
        cut = bool(limit) and largest >= 0.98 * (limit or 0.0)
        sigma = sigma_of(largest / mean, count)
        self.unknown.append(
            Unknown(
                "spread of durations",
                f"log-normal, sigma {sigma:.2f} from mean and largest length"
                + (" (the limit cuts it: at least)" if cut else ""),
                "trainer.rollout_data_dir, or --lengths FILE",
            )
        )
        return lognormal(sigma, largest / mean)

    def slots(self, rollout_cards: float, under_way: float) -> float:
        """Trajectories at a time on one rollout card: max_num_seqs / TP, never more than are under way."""
        most = under_way / rollout_cards
        if self.given.slots is not None:
            return min(self.given.slots, most)
        place = "actor_rollout_ref.rollout"
        seqs = self.setting(f"{place}.max_num_seqs")
        if seqs is None:
            self.unknown.append(
                Unknown("trajectories at a time", f"{most / ASSUMED_WAVES:g} a card", "rollout.max_num_seqs; --slots")
            )
            return most / ASSUMED_WAVES
        self.unknown.append(
            Unknown(
                "KV cache", "holds max_num_seqs trajectories", "the engine's `Running: N reqs`; --slots if it is fewer"
            )
        )
        return min(seqs / (self.setting(f"{place}.tensor_model_parallel_size") or 1.0), most)

    def noise(self) -> float:
        """Coefficient of variation of step times."""
        values = self.steps.value
        return float(values.std(ddof=1) / values.mean())

    def interval(self, value: float) -> tuple[float, float]:
        """A 95 % interval of a timer that is the most of a step, from the spread of the step times."""
        found = ar1_mean(self.steps.value)
        assert found is not None
        half = (found.high - found.low) / 2 / found.value
        return max(0.0, value * (1 - half)), value * (1 + half)


def _work(reading: _Reading, seconds: float, cards: float, exponent: float | None) -> Work:
    low, high = reading.interval(seconds)
    return Work(seconds, cards, _exponent(exponent), low, high)


def _from_turns(reading: _Reading) -> Profile:
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
    slots, durations = reading.slots(cards, trajectories), reading.durations()
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
        evict_above=_threshold(reading, given.mode or "separate_async"),
        measured=(f"{len(reading.steps)} steps of {step:.3g} s: {shares}, weight sync {sync:.3g} s",),
        unknown=(*reading.unknown, *_unknown_scaling(given)),
        notes=_notes(reading, pools=False),
    )
    return Profile(work, round(cards), round(updates), given.theta or 0.0, reading.noise())


def _without_drain(durations: Durations, trajectories: float, slots: float, *, drains: bool) -> float:
    """Share of a generation phase in which the slots are filled: (N / n) / makespan; the rest is the drain."""
    n = min(slots, trajectories)
    return float(trajectories / n / makespan(durations, trajectories, n)) if drains else 1.0


def _batch(reading: _Reading, updates: float) -> tuple[float, float]:
    given = None if reading.given.groups is None else float(reading.given.groups)
    groups = reading.fact("groups_per_step", given, ASSUMED_GROUPS, "groups per step") / updates
    return groups, reading.fact("group_size", reading.given.group_size, ASSUMED_SIZE, "trajectories per group")


def _threshold(reading: _Reading, mode: Mode) -> float | None:
    """Prompt age above which v1's `drop` evicts; other trainers have no such limit."""
    if reading.given.threshold is not None:
        return reading.given.threshold
    drops = reading.data.facts.get("staleness_strategy") == "drop"
    return reading.data.number("staleness_threshold") if drops and mode == "separate_async" else None


def _from_pools(reading: _Reading, loaded: Loaded) -> Profile:
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
        rollout=Work(step / updates, pools[1], _exponent(given.rollout_exponent)),
        train=_work(reading, training / updates, pools[0], given.train_exponent),
        reference=Reference(
            step / updates, sum(pools), f"{reading.data.name} ({mode}, {pools[0]:g}:{pools[1]:g} cards)"
        ),
        sync_seconds=sync,
        groups=groups,
        group_size=size,
        slots_per_card=slots,
        durations=reading.durations(),
        partial=reading.data.facts.get("partial_rollout") is not False,
        evict_above=_threshold(reading, mode),
    )
    rollout, how = _rollout_work(reading, loaded, work, Measured(pools, updates, theta, step, waiting))
    work = replace(
        work,
        mode=given.mode or mode,
        rollout=rollout,
        evict_above=_threshold(reading, given.mode or mode),
        measured=(
            f"{len(reading.steps)} steps of {step:.3g} s: waiting {waiting:.3g} s, training {training:.3g} s, "
            f"weight sync {sync:.3g} s",
            how,
        ),
        unknown=(*reading.unknown, *_unknown_scaling(given)),
        notes=_notes(reading, pools=True),
    )
    cards = round(sum(pools))
    return Profile(work, cards, round(updates), theta, reading.noise(), round(pools[0]), round(pools[1]))


def _pool_cards(reading: _Reading) -> tuple[float, float]:
    """Cards of trainer and rollout pool."""
    train = reading.cards(reading.given.train_cards, "trainer")
    rollout = reading.cards(reading.given.rollout_cards, "actor_rollout_ref.rollout", "rollout")
    if train is None or rollout is None:
        raise AuditError(
            f"{reading.data.name}: the cards of its {'trainer' if train is None else 'rollout pool'} are not known; "
            "give --train-cards and --rollout-cards"
        )
    return train, rollout


def _waiting(reading: _Reading, step: float) -> float:
    waiting = reading.data.get("wait_seconds")
    if len(waiting):
        return reading.mean("wait_seconds")
    idle = reading.data.get("trainer_idle_share").value
    if len(idle):
        return float(idle.mean()) * step
    raise AuditError(f"{reading.data.name}: it logs no time that the trainer waits for samples (timing_s/gen)")


def _theta(reading: _Reading, mode: Mode) -> float:
    if mode == "one_step_off":
        return 1.0
    name = "fa_staleness_share" if mode == "fully_async" else "warmup_batches"
    return reading.fact(
        name, reading.given.theta, 0.1 if mode == "fully_async" else 1.0, "extra share of a cycle under way"
    )


@dataclass(frozen=True)
class Measured:
    """What a run with two pools shows: cards of trainer and rollouts, k, theta, seconds of a cycle and of its wait."""

    pools: tuple[float, float]
    updates: float
    theta: float
    step: float
    waiting: float


def _rollout_work(reading: _Reading, loaded: Loaded, work: Workload, seen: Measured) -> tuple[Work, str]:
    """The rollout pool's work of one update, and how it was found; its bounds where it is only bounded."""
    given, cards = reading.given, seen.pools[1]
    if given.rollout is not None:
        return Work(given.rollout / seen.updates, cards, _exponent(given.rollout_exponent)), "rollout time as given"
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


def _bounded(reading: _Reading, loaded: Loaded, work: Workload, seen: Measured) -> tuple[Work, str]:
    """A trainer that never waits shows only that rollouts are fast enough; a synchronous baseline tells how fast."""
    exponent = _exponent(reading.given.rollout_exponent)
    most = _solve(lambda t: _cycle(work, seen, t) - 1.02 * seen.step, seen.step / seen.updates)
    for index in range(1, len(loaded.baselines) + 1):
        base = _Reading(loaded, index, Given())
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


def _cycle(work: Workload, seen: Measured, rollout_seconds: float) -> float:
    trial = replace(work, rollout=replace(work.rollout, seconds=rollout_seconds), evict_above=None)
    return float(predict(trial, one(*seen.pools, seen.updates, seen.theta)).cycle[0])


def _solve(excess: Callable[[float], float], high: float) -> float:
    """The root of an increasing function in [0, high], by halving; `high` where it is below 0 there."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2


def _notes(reading: _Reading, *, pools: bool) -> tuple[str, ...]:
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
