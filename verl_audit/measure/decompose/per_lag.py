"""The gap by lag: tokens, mean |d|, effective sample size, clipped and tail share at each lag of any traced run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_audit.measure.decompose.bracket import staleness
from verl_audit.measure.decompose.tables import Table, grouped, jackknife, keys, numbers, ratio
from verl_audit.measure.stats import Array, Estimate
from verl_audit.measure.tokens.spec import UNKNOWN

_SUMS = ("n", "w_sum", "w2_sum", "clip_n", "clip_low", "clip_high", "listed", "tail_ln2")


@dataclass(frozen=True)
class LagRow:
    """Tokens trained at one lag. Intervals: NaN bounds with fewer than 8 clusters."""

    lag: int | None
    """Versions; None where a token's version is not known."""
    updates: float | None
    """Token mean of the optimizer updates from sampling to the update that trained on it; None if k is not known."""
    tokens: int
    mean_abs: Estimate
    """Mean |d| of the strata (prox - behave where prox was recorded), nats; clusters are hashed prompt groups."""
    ess: Estimate
    """Effective sample size of w = e^(total log-ratio), share of the tokens; clusters are training steps."""
    clip_share: Estimate
    """Actively clipped tokens, share of those of known advantage, as bypass mode clips; clusters are training steps."""
    tail_share: Estimate
    """Tokens with |d| > ln 2, share; clusters are training steps."""


def per_lag(cells: Table, strata: Table, *, updates_per_version: int | None) -> tuple[LagRow, ...]:
    """One row per lag in ascending order, tokens of unknown lag last.

    `cells`: step, lag, minibatch and sums of the total log-ratio; `strata` as in `bracket`.
    """
    lags, n = keys(cells, "lag"), numbers(cells, "n")
    sums = np.column_stack([numbers(cells, name) for name in _SUMS])
    updates = _updates(cells, updates_per_version)
    present = sorted(set(lags[n > 0].tolist()), key=lambda lag: (lag == UNKNOWN, lag))
    return tuple(_row(lag, cells, sums, updates, strata, lags == lag) for lag in present)


def signal_rates(totals: Array) -> Array:
    """ESS, clipped share and share beyond ln 2 from totals (batch, _SUMS)."""
    n, w, w2, known, low, high, listed, tail = totals.T
    return np.stack([ratio(w * w, n * w2), ratio(low + high, known), ratio(tail, listed)], axis=-1)


def _row(lag: int, cells: Table, sums: Array, updates: Array | None, strata: Table, here: Array) -> LagRow:
    n = sums[here, 0]
    tokens = int(n.sum())
    _, by_step = grouped([keys(cells, "step")[here]], sums[here])
    ess, clip, tail = jackknife(by_step, signal_rates, tokens, bounds=(0, 1))
    known = updates is not None and lag != UNKNOWN
    return LagRow(
        lag=None if lag == UNKNOWN else lag,
        updates=float(n @ updates[here]) / tokens if known and updates is not None else None,
        tokens=tokens,
        mean_abs=_mean_abs(strata, lag),
        ess=ess,
        clip_share=clip,
        tail_share=tail,
    )


def _updates(cells: Table, k: int | None) -> Array | None:
    if k is None:
        return None
    return staleness(keys(cells, "lag"), keys(cells, "minibatch"), later="theta_logp", updates_per_version=k)


def _mean_abs(strata: Table, lag: int) -> Estimate:
    here = (keys(strata, "lag") == lag) & (numbers(strata, "n") > 0)
    columns = np.column_stack([numbers(strata, name)[here] for name in ("n", "abs_sum")])
    _, sums = grouped([keys(strata, "cluster")[here]], columns)
    return jackknife(sums, lambda t: ratio(t[:, 1], t[:, 0])[:, None], int(columns[:, 0].sum()), bounds=(0, math.inf))[
        0
    ]
