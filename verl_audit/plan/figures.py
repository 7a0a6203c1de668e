"""The figures of a plan as data: two heatmaps over the cards of both pools, and a timeline of the shortlist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_audit.measure.stats import Array
from verl_audit.plan.des import Simulated
from verl_audit.plan.search import Plan
from verl_audit.plan.split import Candidates, predict
from verl_audit.plan.tail import floats

SHOWN = 3
"""Choices, and cycles of each, on the timeline."""
BINS = 240
"""Points of a timeline's curve."""


@dataclass(frozen=True)
class Heatmap:
    """Values over training cards (columns) and rollout cards (rows); NaN where there are not as many cards."""

    title: str
    note: str
    train: tuple[int, ...]
    rollout: tuple[int, ...]
    values: Array
    """Shape (rollout, train)."""
    chosen: tuple[int, int]
    """Training and rollout cards of the first choice."""
    better: Literal["low", "high"]


@dataclass(frozen=True)
class Block:
    """A stretch of the trainer's time."""

    start: float
    end: float
    kind: Literal["update", "wait", "sync"]


@dataclass(frozen=True)
class Lane:
    """One choice on the timeline; times over the reference's time per update, from the start of a cycle."""

    title: str
    blocks: tuple[Block, ...]
    busy: tuple[tuple[float, float], ...]
    """Share of rollout slots that are busy, over time."""
    span: float


def heatmaps(plan: Plan) -> tuple[Heatmap, Heatmap]:
    """Time per update and throughput per card, k and theta as in the first choice."""
    first, limits = plan.shortlist[0].split, plan.limits
    train = np.arange(limits.train_multiple, limits.cards, limits.train_multiple)
    rollout = np.arange(limits.rollout_multiple, limits.cards, limits.rollout_multiple)
    t, r = (x.ravel().astype(float) for x in np.meshgrid(train, rollout))
    fits = t + r <= limits.cards
    every = Candidates(t[fits], r[fits], np.full(fits.sum(), float(first.updates)), np.full(fits.sum(), first.theta))
    found = predict(plan.profile.work, every)
    axes = (tuple(train.tolist()), tuple(rollout.tolist()))
    note = f"k = {first.updates}, theta = {first.theta:g}; reference: {plan.profile.work.reference.name}"
    chosen = (first.train_cards, first.rollout_cards)

    def spread(values: Array) -> Array:
        whole = np.full(len(t), np.nan)
        whole[fits] = values
        return whole.reshape(len(rollout), len(train))

    return (
        Heatmap("Time per update over the reference's", note, *axes, spread(found.relative), chosen, "low"),
        Heatmap(
            "Updates per card and second over the reference's", note, *axes, spread(found.per_card), chosen, "high"
        ),
    )


def timeline(plan: Plan) -> tuple[Lane, ...]:
    """The last cycles of the first simulated choices, on one time axis."""
    simulated = [c for c in plan.shortlist if c.simulated is not None][:SHOWN]
    if not simulated:
        return ()
    base = plan.profile.work.reference.seconds
    longest = max(c.simulated.cycle for c in simulated if c.simulated) / base
    span = min(SHOWN * longest, max(4 * min(c.simulated.cycle for c in simulated if c.simulated) / base, longest))
    lanes = []
    for choice in simulated:
        split, run = choice.split, choice.simulated
        assert run is not None
        title = f"{split.name} training:rollout, k = {split.updates}, theta = {split.theta:g}"
        lanes.append(_lane(title, run, base, span))
    return tuple(lanes)


def _lane(title: str, run: Simulated, base: float, span: float) -> Lane:
    cycles = run.cycles
    need = next((n for n in range(1, len(cycles)) if cycles[-1].end - cycles[-n].start >= span * base), len(cycles))
    start = cycles[-need].start
    blocks: list[Block] = []
    for cycle in cycles[-need:]:
        at = cycle.start
        for low, high in cycle.waits:
            blocks += [Block(at, low, "update"), Block(low, high, "wait")]
            at = high
        blocks += [Block(at, cycle.sync_start, "update"), Block(cycle.sync_start, cycle.end, "sync")]
    shown = [
        Block((b.start - start) / base, min((b.end - start) / base, span), b.kind)
        for b in blocks
        if b.end > b.start and (b.start - start) / base < span
    ]
    edges = np.linspace(0, span, BINS + 1)
    busy = _busy_shares(run, start + edges * base) / run.slots
    middles = (edges[1:] + edges[:-1]) / 2
    return Lane(title, tuple(shown), tuple(zip(middles.tolist(), busy.tolist(), strict=True)), span)


def _busy_shares(run: Simulated, edges: Array) -> Array:
    """Mean number of busy slots between the edges, from the integral of the trace; syncs count as 0."""
    trace = np.array(run.trace)
    spent = np.cumsum((trace[:, 1] - trace[:, 0]) * trace[:, 2])
    before = np.concatenate([[0.0], spent[:-1]])
    integral = np.interp(edges, trace[:, :2].ravel(), np.column_stack([before, spent]).ravel())
    return floats(np.diff(integral) / np.diff(edges))
