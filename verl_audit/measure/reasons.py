"""Which reason shifted the trained distribution, and by how much, when reasons overlap.

v(A) = E[x | evicted by no reason in A] is the mean were only the reasons in A at work; v of all reasons is the trained
mean, v of none the generated one. A reason's part is its Shapley value, the average of what it adds to v over all
orders (Shapley 1953), so the parts add up to trained - generated, and two reasons that evict the same groups share.
A recorder that keeps only the first reason hides the overlap; then the parts depend on that order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from verl_audit.measure.clustered import Linear, by_class, fate_class
from verl_audit.measure.cohorts import Cohorts
from verl_audit.measure.model import Measure
from verl_audit.measure.stats import Array
from verl_audit.measure.survival import measure, unfit
from verl_audit.measure.trace_groups import EVICTIONS, Codes, Groups, Sums


@dataclass(frozen=True)
class ReasonPart:
    """One reason: the groups it applied to, alone or with others, and its part of the shifts."""

    reason: str
    groups: Measure
    alone: Measure
    """Groups to which no other reason applied."""
    length: Measure
    """Part of trained minus generated mean response length, tokens."""
    reward: Measure


def parts_by_reason(groups: Groups, where: Cohorts) -> tuple[ReasonPart, ...]:
    """Shapley parts of the length and reward shifts over resolved cohorts, for the reasons that occur.

    A group of which some trajectories were trained counts with its evicted ones alone.
    """
    evicted = where.resolved & ((groups.rows == 0) | (groups.trained_rows < groups.rows))
    bits = np.where(evicted, groups.reasons, 0)
    present = [i for i in range(len(EVICTIONS)) if ((bits >> i) & 1).any()]
    length = _parts("trace_reason_length", "tokens", groups.length, where, bits, present)
    reward = _parts("trace_reason_reward", "reward", groups.reward, where, bits, present)
    n = int(where.resolved.sum())
    return tuple(
        ReasonPart(
            EVICTIONS[i],
            Measure(f"trace_reason_groups_{EVICTIONS[i]}", int(((bits >> i) & 1).sum()), "groups", n=n),
            Measure(f"trace_reason_alone_{EVICTIONS[i]}", int((bits == 1 << i).sum()), "groups", n=n),
            length[i],
            reward[i],
        )
        for i in present
    )


def _parts(name: str, unit: str, sums: Sums, where: Cohorts, bits: Codes, present: list[int]) -> dict[int, Measure]:
    keep = where.resolved & (sums.count > 0)
    why, mine, some = unfit(sums, where), sums.at(keep), bits[keep]
    found = {} if why else _of_groups(mine, some, present)
    why = why or "a set of reasons leaves nothing"
    fate = some * 3 + fate_class(mine)
    return {
        i: measure(f"{name}_{EVICTIONS[i]}", unit, by_class(found[i], fate))
        if i in found
        else Measure(f"{name}_{EVICTIONS[i]}", None, unit, missing=why)
        for i in present
    }


def _of_groups(sums: Sums, bits: Codes, players: list[int]) -> dict[int, Linear]:
    """Each group as its trained part, which has no reason, and the rest; influence summed over both."""
    found = shapley(
        np.concatenate([sums.trained_total, sums.total - sums.trained_total]),
        np.concatenate([sums.trained_count, sums.count - sums.trained_count]),
        np.concatenate([np.zeros_like(bits), bits]),
        players,
    )
    half = len(bits)
    return {i: Linear(x.value, x.influence[:half] + x.influence[half:]) for i, x in found.items()}


def shapley(total: Array, count: Array, bits: Codes, players: list[int]) -> dict[int, Linear]:
    """Shapley values of v(A) = sum(total) / sum(count) over groups with no bit of A, with influence per group.

    phi_i = sum over A without i of |A|! (m - |A| - 1)! / m! (v(A + i) - v(A)), m players: 2^m means. Empty when every
    group has a reason, since then some v(A) is not defined.
    """
    values = {a: _free_of(total, count, bits, a) for k in range(len(players) + 1) for a in combinations(players, k)}
    if any(v is None for v in values.values()):
        return {}
    m = len(players)
    found = {}
    for i in players:
        value, influence = 0.0, np.zeros(len(total))
        for a in (a for a in values if i not in a):
            weight = math.factorial(len(a)) * math.factorial(m - len(a) - 1) / math.factorial(m)
            more, less = values[tuple(sorted((*a, i)))], values[a]
            assert more is not None and less is not None
            value += weight * (more.value - less.value)
            influence += weight * (more.influence - less.influence)
        found[i] = Linear(value, influence)
    return found


def _free_of(total: Array, count: Array, bits: Codes, reasons: tuple[int, ...]) -> Linear | None:
    free = (bits & sum(1 << i for i in reasons)) == 0
    weight = float(count[free].sum())
    if weight <= 0:
        return None
    value = float(total[free].sum()) / weight
    return Linear(value, free * (total - value * count) / weight)
