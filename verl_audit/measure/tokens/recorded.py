"""Sums that a writer kept in the place of the lists (column `sums` of the trace schema)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from verl_audit.measure.tokens.columns import Bool, Int, column, lists_of, numbers, strings, valid
from verl_audit.measure.tokens.paths import PATH
from verl_audit.measure.tokens.sums import SUMS, Float

_FIELDS = (*SUMS, "abs_max")


def recorded_sums(batch: pa.RecordBatch, wanted: Bool) -> tuple[Int, Int, Float] | None:
    """Rows, n (rows,) and the columns SUMS + abs_max of the total log-ratio: behave to the last set that has sums.

    Only `wanted` rows; entries whose numbers are not finite or negative where they cannot be are passed over.
    """
    array = column(batch, "sums")
    if array is None or pa.types.is_null(array.type) or array.null_count == len(array):
        return None
    offsets, structs = lists_of(array)
    owner = np.repeat(np.arange(len(array)), np.diff(offsets))
    one = structs.slice(int(offsets[0]), len(owner))
    n = numbers(one.field("n")).astype(np.int64)
    values = np.stack([numbers(one.field(name)).astype(np.float64) for name in _FIELDS], axis=1)
    rank = _rank(one, "later")
    fine = (_rank(one, "earlier") == 0) & (rank > 0) & (n >= 0) & np.isfinite(values).all(axis=1)
    fine &= (values[:, 1:] >= 0).all(axis=1) & (values < _LARGEST).all(axis=1) & wanted[owner] & valid(array)[owner]
    at = np.flatnonzero(fine)
    at = at[np.lexsort((rank[at], owner[at]))]
    last = at[np.r_[owner[at][1:] != owner[at][:-1], True][: len(at)]]
    return owner[last], n[last], values[last]


_LARGEST = 2.0**80
"""Far above e^40 times any count of tokens, and within what sums exactly."""


def _rank(structs: pa.Array, name: str) -> Int:
    """Place on the path of the set that a field names; -1 for anything else."""
    codes, words = strings(structs.field(name))
    return np.array([PATH.index(w) if w in PATH else -1 for w in words], np.int64)[codes] if len(codes) else codes
