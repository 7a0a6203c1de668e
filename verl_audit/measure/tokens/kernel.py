"""What a token kernel is given and gives back; `choose` finds the fastest one installed.

A kernel sums over pieces: runs of tokens of one trajectory that one policy version sampled. The sums of a piece are a
function of its tokens alone, so however rows are batched, filed or shared out, they are equal to the bit. The numpy and
the numba kernel add in different orders: integers, maxima and |d| buckets are equal, float sums to about 1e-6 relative
to the sum of absolute terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.tokens.spec import Spec

Kernel = Literal["numpy", "numba"]

COUNTS = ("n", "nan", "clamped", "clip_low", "clip_high", "tail_ln2", "tail_1")
"""Columns of `PieceSums.counts`."""
VALUES = ("sum", "abs_sum", "sq_sum", "k3_sum", "e2_sum", "abs_max")
"""Columns of `PieceSums.values`; `e2_sum` is the sum of (e^d - 1)^2."""


@dataclass(frozen=True)
class Pieces:
    """T tokens in P pieces; d = later - earlier in float32."""

    later: NDArray[np.float32]
    """(T,)"""
    earlier: NDArray[np.float32]
    """(T,); its size chooses the stratum bin."""
    mask: NDArray[np.uint8] | None
    """(T,), 0 or 1; None: every token counts."""
    starts: NDArray[np.int64]
    """(P,), first token; pieces do not overlap and ascend."""
    lengths: NDArray[np.int64]
    """(P,), at least 0."""
    signs: NDArray[np.int8]
    """(P,), sign of the advantage; 0: no clip counts."""
    rows: NDArray[np.int64]
    """(P,), row of the histogram."""


@dataclass(frozen=True)
class PieceSums:
    """Sums of each piece, and what was asked for beside them."""

    counts: NDArray[np.int64]
    """(P, COUNTS)"""
    values: NDArray[np.float64]
    """(P, VALUES)"""
    histogram: NDArray[np.int64]
    """(rows, BUCKETS) tokens by |d|; no rows unless asked for."""
    bin_counts: NDArray[np.int64]
    """(P, BINS) tokens by |earlier|; no pieces unless asked for."""
    bin_sums: NDArray[np.float64]
    """(P, 2, BINS) |d| and d^2; no pieces unless asked for."""


Reduce: TypeAlias = Callable[[Pieces, Spec, int, bool], PieceSums]
"""Pieces, settings, histogram rows (0: none), and whether strata are wanted."""


def choose(name: Kernel | None = None) -> Reduce:
    """The kernel of that name; without one, numba (extra `fast`) if installed, else numpy."""
    if (name or available()) == "numba":
        from verl_audit.measure.tokens import kernel_numba  # noqa: PLC0415  # imports a compiler

        return kernel_numba.reduce_pieces
    from verl_audit.measure.tokens import kernel_numpy  # noqa: PLC0415

    return kernel_numpy.reduce_pieces


def available() -> Kernel:
    """Name of the kernel that `choose` takes by default."""
    return "numba" if find_spec("numba") else "numpy"
