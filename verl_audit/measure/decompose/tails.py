"""Heavy tails of the gap: few tokens that differ much, as router flips of a mixture-of-experts model make them.

Their size is read from the tail share and quantiles, not from a mean: one flip can outweigh a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_audit.measure.decompose.identity import NAMES
from verl_audit.measure.decompose.shapley import Split
from verl_audit.measure.decompose.tables import Refused, Table, column_names, grouped, jackknife, keys, numbers, ratio
from verl_audit.measure.stats import Array, Estimate
from verl_audit.measure.tokens.spec import bucket_edges

FAR = 0.75
"""Nats; the first bucket edge above ln 2 = .693, where a weight is more than doubled or halved."""
FEW, MOST = 0.05, 0.5
"""Tails dominate when at most 5 % of tokens beyond .75 hold more than half of sum d^2. A Gaussian with 5 % there
holds .28 beyond, so this is never a broad gap."""
AGREEMENT = ("agree_n", "agree_sum")


@dataclass(frozen=True)
class Tails:
    """Tail of |d|, nats."""

    tail_share: Estimate
    """Tokens with |d| > ln 2, share; clusters are training steps."""
    p99: tuple[float, float]
    p999: tuple[float, float]
    """Quantiles of |d| as bounds of the bucket that holds them."""
    far_share: float
    """Tokens with |d| >= .75, share."""
    far_square_share: float
    """Part of sum d^2 held by those tokens (bucket middles)."""
    dominate: bool
    expert_agreement: Estimate | None
    """Mean share of MoE layers at which trainer and rollout chose the same experts; None if not recorded."""


def tails(cells: Table, histogram: Table) -> Tails | Refused:
    """Tails from `cells` (step, listed, tail_ln2; agree_n, agree_sum if recorded) and `histogram` (bucket, count)."""
    columns = np.column_stack([numbers(cells, name) for name in ("listed", "tail_ln2")])
    tokens = int(columns[:, 0].sum())
    (buckets,), counts = grouped([keys(histogram, "bucket")], numbers(histogram, "count")[:, None])
    total = float(counts.sum())
    if tokens == 0 or total == 0:
        return Refused("no tokens with two sets of log-probs", "two log-prob columns of the same tokens")
    low, high = bucket_edges()[buckets], bucket_edges()[buckets + 1]
    count, far = counts[:, 0], low >= FAR
    square = count * low * high
    far_share = float(count[far].sum()) / total
    far_square = float(square[far].sum() / square.sum()) if square.sum() > 0 else 0.0
    _, sums = grouped([keys(cells, "step")], columns)
    return Tails(
        tail_share=jackknife(sums, lambda t: ratio(t[:, 1], t[:, 0])[:, None], tokens, bounds=(0, 1))[0],
        p99=quantile(low, high, count, 0.99),
        p999=quantile(low, high, count, 0.999),
        far_share=far_share,
        far_square_share=far_square,
        dominate=far_share <= FEW and far_square > MOST,
        expert_agreement=_agreement(cells),
    )


def quantile(low: Array, high: Array, count: Array, p: float) -> tuple[float, float]:
    """Bounds of the bucket with the p-quantile (the smallest x with at least a share p of the tokens at or below)."""
    place = int(np.searchsorted(np.cumsum(count), p * count.sum() * (1 - 1e-12)))
    return float(low[place]), float(high[place])


def disagreement(splits: Mapping[str, Split]) -> str:
    """A sentence when clip and chi2 name different main components, else "".

    Flips are few and huge, staleness broad and small: in a loop with FP8 experts clipping was 68 % staleness and
    chi2 85 % mismatch. Neither is wrong: the first counts tokens that lose their gradient, the second the variance
    of the weights.
    """
    leaders = {name: splits[name].leader for name in ("clip", "chi2") if name in splits}
    first, second = leaders.get("clip"), leaders.get("chi2")
    if first is None or second is None or first == second:
        return ""
    return (
        f"clipping is mostly {_words(first)} and the variance of the weights mostly {_words(second)}: "
        "few tokens differ much, many a little"
    )


def _words(component: str) -> str:
    return " and ".join(NAMES[c] for c in component.split("+"))


def _agreement(cells: Table) -> Estimate | None:
    if not set(AGREEMENT) <= set(column_names(cells)):
        return None
    columns = np.nan_to_num(np.column_stack([numbers(cells, name) for name in AGREEMENT]))
    _, sums = grouped([keys(cells, "step")], columns)
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        return None
    return jackknife(sums, lambda t: ratio(t[:, 1], t[:, 0])[:, None], int(sums[:, 0].sum()), bounds=(0, 1))[0]
