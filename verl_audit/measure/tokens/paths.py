"""Which differences of log-probs a trajectory gives, from the sets it recorded.

The sets lie on a path behave -> trainer -> prox -> theta whose steps are mismatch, staleness and update drift. Sets
next to each other on the path give the steps between them as one part; every union of parts is one subset to sum over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from verl_audit.trace.schema import LOG_PROBS

PATH = tuple(LOG_PROBS)
_STEPS: Mapping[str, int] = {"trainer_logp": 4, "prox_logp": 2, "theta_logp": 1}
"""Bit of the step that ends at a set."""


@dataclass(frozen=True)
class Subset:
    """A union of parts: the sum of later - earlier over `pairs`, which do not touch."""

    bits: int
    pairs: tuple[tuple[str, str], ...]
    total: bool
    """From behave to the last set."""
    strata: bool
    """From behave to prox if prox was recorded, else to the last set."""


def subsets(recorded: Sequence[str]) -> list[Subset]:
    """All subsets that these sets (in the order of the path) tell apart; none for fewer than two sets."""
    parts = list(pairwise(recorded))
    chosen = (c for size in range(1, len(parts) + 1) for c in combinations(parts, size))
    return [_subset(_joined(c), recorded) for c in chosen]


def _joined(parts: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(later, earlier) of each run of parts that touch."""
    runs: list[tuple[str, str]] = []
    for earlier, later in parts:
        if runs and runs[-1][0] == earlier:
            runs[-1] = later, runs[-1][1]
        else:
            runs.append((later, earlier))
    return tuple(runs)


def _subset(pairs: tuple[tuple[str, str], ...], recorded: Sequence[str]) -> Subset:
    return Subset(
        bits=sum(bits(later, earlier) for later, earlier in pairs),
        pairs=pairs,
        total=pairs == ((recorded[-1], PATH[0]),),
        strata=pairs == (("prox_logp" if "prox_logp" in recorded else recorded[-1], PATH[0]),),
    )


def bits(later: str, earlier: str) -> int:
    """Steps of the path from one set to another."""
    return sum(_STEPS[name] for name in PATH[PATH.index(earlier) + 1 : PATH.index(later) + 1])
