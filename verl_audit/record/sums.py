"""What is kept of log-probs whose lists are not: sums of their differences, one entry per pair of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOG_PROBS = ("behave_logp", "trainer_logp", "prox_logp", "theta_logp")
"""The log-prob columns of the trace schema in the order of the path; a test holds them equal."""


def log_prob_sums(
    later: str, earlier: str, values: Mapping[str, ArrayLike], where: NDArray[np.bool_] | None
) -> dict[str, Any] | None:
    """Sums of d = later - earlier (nats) over the tokens of `where`, as an entry of the column `sums`.

    None if no token is left or a log-prob is not finite: a sum of NaN would spoil every sum above it. k3 is
    e^d - 1 - d (Schulman, "Approximating KL divergence", 2020), from expm1 since d is mostly near 0. Raises
    `ValueError` for lists of different lengths.
    """
    after, before = np.asarray(values[later]), np.asarray(values[earlier])
    if after.shape != before.shape:  # numpy would spread a list of one token over all
        raise ValueError(f"{later} has {after.shape} tokens, {earlier} {before.shape}")
    d = np.subtract(after, before, dtype=np.float64)
    if where is not None and not where.all():
        d = d[where]
    total = float(d.sum())
    if not d.size or not np.isfinite(total):
        return None
    with np.errstate(over="ignore"):
        grown = np.expm1(d)
        grown_sum, grown_square = float(grown.sum()), _square_sum(grown)
    size = np.abs(d)
    return {
        "later": later,
        "earlier": earlier,
        "n": d.size,
        "sum": total,
        "abs_sum": float(size.sum()),
        "sq_sum": _square_sum(d),
        "abs_max": float(size.max()),
        "k3_sum": max(0.0, grown_sum - total),
        "w_sum": grown_sum + d.size,
        "w2_sum": grown_square + 2 * grown_sum + d.size,
    }


def _square_sum(values: NDArray[np.float64]) -> float:
    # Not by dot: from 10,000 elements on BLAS wakes its threads, which the job needs for itself.
    return float(np.einsum("i,i->", values, values))


def pairs(present: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(later, earlier) of all log-prob columns that are there and are not one and the same array."""
    have = [name for name in LOG_PROBS if present.get(name) is not None]
    made = [(later, earlier) for i, later in enumerate(have) for earlier in have[:i]]
    return [(later, earlier) for later, earlier in made if present[later] is not present[earlier]]
