"""Exact Shapley shares of what the log-ratio does to the loss: clipping, divergences, effective sample size.

For a functional f of a sum x of components, with f(0) = 0 and n players,

    phi_i = sum over A without i of  |A|! (n - 1 - |A|)! / n!  [f(A + i) - f(A)]

so that the parts add up to f of the whole whatever their correlation. "Alone" and "left out" numbers do not: with
both, mismatch alone clipped .121, leaving it out saved .032, the total was .128.  Source: Shapley 1953.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import or_

import numpy as np

from verl_audit.measure.decompose.identity import component_name
from verl_audit.measure.decompose.tables import Keys, Refused, Table, grouped, jackknife, keys, numbers, ratio
from verl_audit.measure.stats import Array, Estimate

FRAGILE = 0.5
"""Concentration above which neither total nor shares of a functional should carry a conclusion."""
SUMS = ("n", "sum", "sq_sum", "k3_sum", "w_sum", "w2_sum", "clip_n", "clip_low", "clip_high")
_N, _SUM, _SQ, _K3, _W, _W2, _CLIP_N, _LOW, _HIGH = range(len(SUMS))


def _mean(column: int) -> Callable[[Array], Array]:
    return lambda sums: ratio(sums[..., column], sums[..., _N])


def _clip(sums: Array) -> Array:
    """Of the tokens whose advantage is known; NaN without one."""
    return ratio(sums[..., _LOW] + sums[..., _HIGH], sums[..., _CLIP_N])


def neg_log_ess(sums: Array) -> Array:
    """ln E[w^2] - 2 ln E[w]: minus the logarithm of the effective sample size as a share of the tokens."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.log(_mean(_W2)(sums)) - 2 * np.log(_mean(_W)(sums))
    return found


@dataclass(frozen=True)
class Functional:
    """A number made of a coalition's sums, 0 for the empty one. Sums: last axis in the order of SUMS."""

    unit: str
    definition: str
    value: Callable[[Array], Array]


FUNCTIONALS: Mapping[str, Functional] = {
    "clip": Functional(
        "share of tokens", "actively clipped: x > ln(1 + e_high) at A > 0, x < ln(1 - e_low) at A < 0", _clip
    ),
    "k1": Functional("nats", "mean of -x", lambda sums: -_mean(_SUM)(sums)),
    "k3": Functional("nats", "mean of e^x - 1 - x", _mean(_K3)),
    "chi2": Functional("ratio", "mean of e^(2x), less 1", lambda sums: _mean(_W2)(sums) - 1),
    "neg_log_ess": Functional("nats", "ln E[w^2] - 2 ln E[w], w = e^x", neg_log_ess),
    "second": Functional("nats^2", "mean of x^2", _mean(_SQ)),
    "variance": Functional(
        "nats^2",
        "variance of x; a part is Cov(X_i, X), and may be negative",
        lambda sums: _mean(_SQ)(sums) - _mean(_SUM)(sums) ** 2,
    ),
}


@dataclass(frozen=True)
class Part:
    """One component's part of a functional."""

    component: str
    amount: Estimate
    share: Estimate | None
    """Amount over total; None when the total cannot be told from 0."""


@dataclass(frozen=True)
class Split:
    """A functional of the log-ratio shared among its components."""

    functional: str
    unit: str
    total: Estimate
    parts: tuple[Part, ...]
    concentration: float
    """Largest part of the total's jackknife variance that one cluster makes. Above FRAGILE a few tokens decide, as with
    MoE tails in chi2: intervals that claim 95 % then held the truth in about 85 of 100 runs."""

    def part(self, component: str) -> Part | None:
        """The part of `M`, `S`, `U` or a sum such as `S+M`; None when it was not told apart."""
        return next((p for p in self.parts if p.component == component), None)

    @property
    def leader(self) -> str | None:
        """Component with the largest part, if it is beyond doubt that it is larger than half; else None."""
        return next((p.component for p in self.parts if p.share is not None and p.share.low > 0.5), None)


@dataclass(frozen=True)
class Game:
    """Sums by cluster and coalition: `sums[cluster, coalition]`, the coalition's bits counting `players`."""

    players: tuple[int, ...]
    """Bit masks of the components told apart, disjoint."""
    sums: Array
    tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the players."""
        return tuple(component_name(p) for p in self.players)


def game(subsets: Table, within: int | None = None) -> Game | Refused:
    """Coalitions of the kernel's `subsets` table, of all components or of those in the mask `within`."""
    masks = keys(subsets, "subset")
    values = np.column_stack([numbers(subsets, name) for name in SUMS])
    counted = (masks > 0) & (values[:, _N] > 0)
    if within is not None:
        counted &= (masks & ~np.int64(within)) == 0
    if not counted.any():
        return Refused("no tokens with two sets of log-probs", "two log-prob columns of the same tokens")
    (clusters, present), sums = grouped([keys(subsets, "cluster")[counted], masks[counted]], values[counted])
    players = _players(present)
    column = {int(mask): i for i, mask in enumerate(present)}
    coalitions = [reduce(or_, (p for j, p in enumerate(players) if c >> j & 1), 0) for c in range(1 << len(players))]
    absent = [c for c in coalitions[1:] if c not in column]
    if absent or len(set(sums[..., _N].sum(axis=0).tolist())) > 1:
        return Refused("the coalitions do not cover the same tokens", "the same log-prob columns for all trajectories")
    table = np.zeros((len(clusters), len(coalitions), len(SUMS)))
    for i, coalition in enumerate(coalitions[1:], start=1):
        table[:, i] = sums[:, column[coalition]]
    return Game(players, table, int(table[:, -1, _N].sum()))


def shapley_values(game: Game, functional: Functional) -> Callable[[Array], Array]:
    """The function that turns totals (batch, coalition, SUMS) into parts (batch, player)."""
    weights = _weights(len(game.players))

    def parts(totals: Array) -> Array:
        f = np.zeros(totals.shape[:-1])
        f[:, 1:] = functional.value(totals[:, 1:])
        found: Array = f @ weights.T
        return found

    return parts


def concentration(game: Game, functional: Functional) -> float:
    """Largest part of the jackknife variance of the whole that one cluster makes; 0 if it does not vary."""
    whole = game.sums[:, -1]
    without = functional.value(whole.sum(axis=0) - whole)
    spread = (without - without.mean()) ** 2
    return float(np.nan_to_num(ratio(spread.max(), spread.sum())))


def shapley(
    subsets: Table, within: int | None = None, names: Sequence[str] = tuple(FUNCTIONALS)
) -> dict[str, Split] | Refused:
    """Exact shares of each functional, with 95 % delete-one-cluster intervals.

    `subsets` as the token kernel makes it: cluster, subset (bit 1 U, 2 S, 4 M; joined components set several) and
    the sums of SUMS; `within` restricts the whole to the components of a mask (6: S + M, the importance weight of
    decoupled mode).
    """
    found = game(subsets, within)
    return found if isinstance(found, Refused) else {name: _split(found, name) for name in names}


def correlation(subsets: Table, first: str, second: str) -> Estimate | Refused:
    """Correlation of two components over tokens, from var(x + y) = var x + var y + 2 cov.

    Coarse rounding of the rollout's weights makes S and M correlate at about -.3: weights that move but stay on the
    same grid point hide small updates from the engine.
    """
    found = game(subsets)
    if isinstance(found, Refused):
        return found
    if not {first, second} <= set(found.names):
        return Refused(f"{first} and {second} were not recorded apart", "the log-prob set between them")
    i, j = (1 << found.names.index(name) for name in (first, second))
    variance = FUNCTIONALS["variance"].value

    def statistic(totals: Array) -> Array:
        x, y, both = variance(totals[:, i]), variance(totals[:, j]), variance(totals[:, i | j])
        return ratio((both - x - y) / 2, np.sqrt(np.maximum(x * y, 0)))[:, None]

    return jackknife(found.sums, statistic, found.tokens, bounds=(-1, 1))[0]


def _players(masks: Keys) -> tuple[int, ...]:
    """The smallest masks: those that contain no other."""
    found = [int(m) for m in masks]
    return tuple(m for m in found if not any(o != m and o & m == o for o in found))


def _weights(players: int) -> Array:
    """Matrix (player, coalition) of the Shapley formula."""
    weights = np.zeros((players, 1 << players))
    for i in range(players):
        others = [j for j in range(players) if j != i]
        for size in range(players):
            for chosen in combinations(others, size):
                coalition = sum(1 << j for j in chosen)
                weight = math.factorial(size) * math.factorial(players - 1 - size) / math.factorial(players)
                weights[i, coalition | 1 << i] += weight
                weights[i, coalition] -= weight
    return weights


def _split(game: Game, name: str) -> Split:
    functional = FUNCTIONALS[name]
    parts = shapley_values(game, functional)
    count = len(game.players)

    def statistic(totals: Array) -> Array:
        amounts = parts(totals)
        whole = functional.value(totals[:, -1])[:, None]
        return np.concatenate([whole, amounts, ratio(amounts, whole)], axis=1)

    total, *rest = jackknife(game.sums, statistic, game.tokens)
    amounts, shares = rest[:count], rest[count:]
    told = abs(total.value) > 0 and (total.low > 0 or total.high < 0)
    return Split(
        name,
        functional.unit,
        total,
        tuple(
            Part(component, amount, share if told else None)
            for component, amount, share in zip(game.names, amounts, shares, strict=True)
        ),
        concentration(game, functional),
    )
