"""From a profile to a plan: the grid of splits, what is allowed, a shortlist that is simulated, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from verl_audit.errors import AuditError
from verl_audit.measure.stats import Array, normal_quantile
from verl_audit.plan.des import Simulated, setting_of, simulate
from verl_audit.plan.profile import Profile
from verl_audit.plan.split import TERMS, Candidates, Prediction, one, overlap, predict
from verl_audit.plan.tail import lognormal
from verl_audit.plan.workload import Workload

UPDATES = (1, 2, 4, 8, 16)
THETAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
NEAR = 0.03
"""Times this close count as equal, being about the error of the closed form: the least stale setting is then taken."""
SHORTLIST = 5
MOST_SPLITS = 512
OTHER_EXPONENT = 0.63
"""Exponent of the pessimistic scenario where no scaling was measured: verl docs, 30B, updates and reference log-probs
take 2.40 times as long on 32 cards as on 128, so ln 2.40 / ln 4."""


@dataclass(frozen=True)
class Limits:
    """What may be chosen: cards in all, multiples that tensor, pipeline and data parallelism allow, and budgets."""

    cards: int
    train_multiple: int = 1
    rollout_multiple: int = 1
    updates: tuple[int, ...] = UPDATES
    thetas: tuple[float, ...] = THETAS
    lag_budget: float = 8.0
    """Mean lag in optimizer updates: 8 is where the audit's rules begin to warn."""
    sync_share: float = 0.1
    evicted: float = 0.05
    """Share of groups thrown away above which trained reward is no longer comparable."""


@dataclass(frozen=True)
class Split:
    """The best allowed setting of one split, and what is expected of it. Seconds in the workload's unit."""

    train_cards: int
    rollout_cards: int
    updates: int
    theta: float
    cycle: float
    per_update: float
    relative: float
    no_overlap: float
    full_overlap: float
    """Time per update over the reference's with overlap s = 0 and s = 1, sync left out."""
    per_card: float
    train_idle: float
    rollout_idle: float
    sync_share: float
    lag_versions: float
    lag_updates: float
    evicted: float
    binds: str
    allowed: bool
    """Whether it keeps all budgets; if not, it is the least bad setting of its split."""

    @property
    def name(self) -> str:
        """Training to rollout cards."""
        return f"{self.train_cards}:{self.rollout_cards}"


@dataclass(frozen=True)
class Choice:
    """A shortlisted split with its simulation and the range over scenarios."""

    split: Split
    simulated: Simulated | None
    relative: float
    """Time per update over the reference's: simulated where it was, else predicted."""
    low: float
    high: float
    good_in: int
    """Scenarios in which the split is within 3 % of the best one."""


@dataclass(frozen=True)
class Plan:
    """Everything a plan says."""

    profile: Profile
    limits: Limits
    grid: Candidates
    predicted: Prediction
    splits: tuple[Split, ...]
    """The best setting of each split, by training cards."""
    shortlist: tuple[Choice, ...]
    scenarios: tuple[str, ...]
    bound: float
    """Largest updates per card and second over the reference's, at perfect overlap."""
    none_allowed: str = ""
    """Which budget no setting keeps, if so."""
    now: Split | None = None
    """The profiled run as it is, where it has two pools: the model's account of it."""


def make_plan(profile: Profile, limits: Limits, *, simulated: bool = True, seed: int = 0) -> Plan:
    """Scan the grid, choose a setting for each split, simulate the best ones. AuditError where no split is feasible."""
    work = profile.work
    grid = grid_of(profile, limits)
    predicted = predict(work, grid)
    allowed, why = _allowed(predicted, limits)
    splits = tuple(_best_settings(work, grid, predicted, allowed))
    eligible = [s for s in splits if s.allowed] or list(splits)
    best = sorted(eligible, key=lambda s: (s.per_update, s.lag_updates))[:SHORTLIST]
    stories = tuple(scenarios(profile))
    outcomes = {name: predict(story, grid) for name, story in stories}
    choices = [_choice(profile, s, grid, allowed, outcomes, simulated, seed) for s in best]
    choices.sort(key=lambda c: (c.relative, c.split.lag_updates))
    return Plan(
        profile,
        limits,
        grid,
        predicted,
        splits,
        tuple(choices),
        tuple(name for name, _ in stories),
        bound_per_card(work),
        why,
        _now(profile),
    )


def _now(profile: Profile) -> Split | None:
    if profile.train_cards is None or profile.rollout_cards is None:
        return None
    here = one(profile.train_cards, profile.rollout_cards, profile.updates, profile.theta)
    return _split(profile.work, here, predict(profile.work, here), 0, allowed=True)


def grid_of(profile: Profile, limits: Limits) -> Candidates:
    """Every split of the cards into multiples, with every k and theta."""
    train = np.arange(limits.train_multiple, limits.cards, limits.train_multiple)
    if len(train) > MOST_SPLITS:
        raise AuditError(
            f"{len(train)} splits are too many to look at ({MOST_SPLITS} at most); give a --train-multiple"
        )
    rollout = (limits.cards - train) // limits.rollout_multiple * limits.rollout_multiple
    feasible = rollout > 0
    if not feasible.any():
        raise AuditError(
            f"{limits.cards} cards cannot be split into multiples of {limits.train_multiple} for training and "
            f"{limits.rollout_multiple} for rollouts"
        )
    mode = profile.work.mode
    thetas = (1.0,) if mode == "one_step_off" else limits.thetas
    shape = np.meshgrid(train[feasible], np.array(limits.updates), np.array(thetas), indexing="ij")
    rollouts = np.broadcast_to(rollout[feasible][:, None, None], shape[0].shape)
    t, r, k, theta = (np.asarray(x, dtype=float).ravel() for x in (shape[0], rollouts, shape[1], shape[2]))
    return Candidates(t, r, k, theta)


def bound_per_card(work: Workload) -> float:
    """Updates per card and second when both pools are always busy, over the reference's; 1/cards scaling assumed.

    1 for a reference that wastes nothing; above 1 by what it loses in drains, waits and syncs.
    """
    return work.reference.seconds * work.reference.cards / (work.rollout.card_seconds + work.train.card_seconds)


def _allowed(found: Prediction, limits: Limits) -> tuple[Array, str]:
    """Which candidates keep the budgets; where none does, the budget that excludes most is named."""
    within = {
        f"a lag of {limits.lag_budget:g} updates": found.lag_updates <= limits.lag_budget,
        f"a sync share of {limits.sync_share:.0%}": found.sync_share <= limits.sync_share,
        f"{limits.evicted:.0%} evicted": found.evicted <= limits.evicted,
    }
    allowed = np.logical_and.reduce(list(within.values()))
    return allowed, "" if allowed.any() else min(within, key=lambda name: int(within[name].sum()))


def _best_settings(work: Workload, grid: Candidates, found: Prediction, allowed: Array) -> Iterator[Split]:
    for cards in np.unique(grid.train_cards):
        here = np.flatnonzero(grid.train_cards == cards)
        mine = here[allowed[here]] if allowed[here].any() else here
        near = mine[found.per_update[mine] <= (1 + NEAR) * found.per_update[mine].min()]
        best = near[np.lexsort((found.per_update[near], found.lag_updates[near]))[0]]
        yield _split(work, grid, found, int(best), allowed=bool(allowed[best]))


def _split(work: Workload, grid: Candidates, found: Prediction, i: int, *, allowed: bool) -> Split:
    a, b = work.rollout.on(grid.rollout_cards[i]), work.train.on(grid.train_cards[i])
    base = work.reference.seconds
    return Split(
        train_cards=int(grid.train_cards[i]),
        rollout_cards=int(grid.rollout_cards[i]),
        updates=int(grid.updates[i]),
        theta=float(grid.theta[i]),
        no_overlap=float(overlap(a, b, 0)) / base,
        full_overlap=float(overlap(a, b, 1)) / base,
        binds=TERMS[int(found.binds[i])],
        allowed=allowed,
        **{
            name: float(getattr(found, name)[i])
            for name in (
                "cycle",
                "per_update",
                "relative",
                "per_card",
                "train_idle",
                "rollout_idle",
                "sync_share",
                "lag_versions",
                "lag_updates",
                "evicted",
            )
        },
    )


def scenarios(profile: Profile) -> Iterator[tuple[str, Workload]]:
    """The profile, and variants of it: one uncertain number at a time at the end of its range."""
    work = profile.work
    yield "as profiled", work
    for name, pool in (("rollout", work.rollout), ("training", work.train)):
        for bound in ("low", "high"):
            if (pool.low if bound == "low" else pool.high) is not None:
                moved = pool.at(bound)
                yield f"{name} time {bound}", _with(work, name, moved)
        if pool.exponent == 1.0:
            yield (
                f"{name} scales with exponent {OTHER_EXPONENT:g}",
                _with(work, name, replace(pool, exponent=OTHER_EXPONENT)),
            )
    if not work.sync_seconds:
        yield "a weight sync takes a tenth of an update", replace(work, sync_seconds=0.1 * work.train.seconds)
    yield "lengths nearly equal", replace(work, durations=lognormal(0.3, 4))
    yield "half the trajectories at a time", replace(work, slots_per_card=work.slots_per_card / 2)


def _with(work: Workload, name: str, moved: object) -> Workload:
    return replace(work, **{"rollout" if name == "rollout" else "train": moved})  # type: ignore[arg-type]


def _choice(
    profile: Profile,
    split: Split,
    grid: Candidates,
    allowed: Array,
    outcomes: dict[str, Prediction],
    simulated: bool,
    seed: int,
) -> Choice:
    mine = int(
        np.flatnonzero(
            (grid.train_cards == split.train_cards) & (grid.updates == split.updates) & (grid.theta == split.theta)
        )[0]
    )
    here = grid.train_cards == split.train_cards
    usable = allowed if allowed.any() else np.ones(len(grid), dtype=bool)
    times = [float(found.relative[mine]) for found in outcomes.values()]
    good = sum(
        found.relative[here & usable].min() <= (1 + NEAR) * found.relative[usable].min() for found in outcomes.values()
    )
    run = None
    if simulated:
        setting = setting_of(profile.work, split.train_cards, split.rollout_cards, split.updates, split.theta)
        run = simulate(setting, profile.work.durations.drawable(setting.group_size), seed)
    relative = split.relative if run is None else run.cycle / split.updates / profile.work.reference.seconds
    return Choice(split, run, relative, min(*times, relative), max(*times, relative), int(good))


def steps_to_tell(noise: float, difference: float) -> int:
    """Steps of each of two runs that tell step times this far apart: 2 ((z_.975 + z_.8) noise / difference)^2.

    Two-sided 5 % test with power .8 for independent steps of equal coefficient of variation `noise`; at least 20.
    """
    z = normal_quantile(0.975) + normal_quantile(0.8)
    return max(20, math.ceil(2 * (z * noise / difference) ** 2)) if difference > 0 else 20
