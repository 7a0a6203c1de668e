"""Sums of float64 that do not depend on order: fixed-point integers, 2^-56 to 2^127, in four limbs of int64.

Each addend is rounded to a multiple of 2^-56 (1.4e-17) by itself, and integers add exactly, so any grouping, any order
and any number of workers gives the same bits. A canonical number has its lower limbs in [0, 2^40), which leaves room
for eight million addends before the next carry.
(The idea of the long accumulator: Kulisch, Computer Arithmetic and Validity, 2013.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LIMBS = 4
_BITS = 40
_LOWEST = 2.0**-56
MOST_ROWS = 1 << 13
_LOW = np.int64((1 << _BITS) - 1)
_WEIGHTS = tuple(_LOWEST * 2.0 ** (_BITS * i) for i in range(LIMBS))
"""Value of one unit of each limb, lowest first."""


def sums(x: Float, first: Int) -> Int:
    """Sums over rows of each group: limbs, in a new last axis, in canonical form.

    Group g is rows first[g] to first[g + 1] of `x` (rows, ...), whose numbers are finite and below 2^103; no group is
    empty. At most 8,192 rows: then the limbs, integers below 2^40, add exactly as float64.
    """
    if len(x) > MOST_ROWS:
        raise ValueError(f"{len(x)} rows at once; the sums are exact for {MOST_ROWS}")
    limbs = np.zeros((len(first), *x.shape[1:], LIMBS), np.int64)
    rest = x.copy()
    top = LIMBS - 1 if np.abs(x).max(initial=0) >= _WEIGHTS[-1] / 2 else LIMBS - 2
    for i in range(top, 0, -1):
        whole = rest * (1 / _WEIGHTS[i])
        np.trunc(whole, out=whole)  # floor would round small negative numbers
        limbs[..., i] = np.add.reduceat(whole, first)
        whole *= _WEIGHTS[i]
        rest -= whole
    rest *= 1 / _WEIGHTS[0]
    limbs[..., 0] = np.add.reduceat(np.rint(rest, out=rest), first)
    return carried(limbs)


def carried(limbs: Int) -> Int:
    """The same numbers in canonical form."""
    out: Int = limbs.copy()
    for i in range(LIMBS - 1):
        out[..., i + 1] += out[..., i] >> _BITS
        out[..., i] &= _LOW
    return out


def joined(limbs: Int) -> Float:
    """The numbers as float64, within two units in the last place; a function of the canonical form alone."""
    negative = limbs[..., -1] < 0
    size = np.where(negative[..., None], carried(-limbs), limbs)
    value: Float = np.zeros(limbs.shape[:-1])
    for i, weight in enumerate(_WEIGHTS):
        value += size[..., i] * weight
    value[negative] *= -1
    return value
