"""The token kernel compiled by numba (extra `fast`): several simple loops over 1,024 tokens that stay in cache.

Separate loops, since one fused loop does not vectorise. Arithmetic is float32, sums are float64. The sums are those of
one kind of processor: the width of its vectors orders the additions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from verl_audit.measure.tokens.kernel import COUNTS, VALUES, Pieces, PieceSums
from verl_audit.measure.tokens.spec import BINS, BUCKETS, CLAMP, FIRST_EXPONENT, Spec

_TOKENS = 1024
_F = np.float32
_ZERO, _HALF, _ONE, _TWO, _CLAMP = _F(0), _F(0.5), _F(1), _F(2), _F(CLAMP)
_LOG2E, _LN2 = _F(1.4426950408889634), _F(0.6931471805599453)
_C2, _C3, _C4, _C5, _C6, _C7 = (_F(1 / n) for n in (2, 6, 24, 120, 720, 5040))
"""Taylor coefficients of e^r - 1 - r; |r| <= ln 2 / 2 leaves a relative error below 1e-7."""
_BIAS, _SHIFT = np.int32(127), np.int32(23)
_LAST = BINS - 1
_FAST = {"reassoc", "nsz", "contract", "arcp"}
"""Not `nnan`: a NaN must be seen."""


def _jit(function: Any) -> Any:
    """Compiled at the first call, and kept on disk where a folder for it can be written."""
    try:
        return njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")(function)
    except RuntimeError:  # numba found no such folder
        return njit(nogil=True, fastmath=_FAST, error_model="numpy")(function)


def reduce_pieces(pieces: Pieces, spec: Spec, rows: int, strata: bool) -> PieceSums:
    """Sums of each piece; see `kernel.Reduce`."""
    count = len(pieces.starts)
    out = PieceSums(
        np.zeros((count, len(COUNTS)), np.int64),
        np.zeros((count, len(VALUES))),
        np.zeros((2 * rows, BUCKETS), np.int64),
        np.zeros((count if strata else 0, BINS), np.int64),
        np.zeros((count if strata else 0, 2, BINS)),
    )
    mask = np.zeros(0, np.uint8) if pieces.mask is None else pieces.mask
    arrays = [_read_only(a) for a in (pieces.later, pieces.earlier, mask, pieces.starts, pieces.lengths)]
    arrays += [_read_only(pieces.signs), _read_only(pieces.rows)]
    limits = _F(spec.clip_below), _F(spec.clip_above)
    _all(*arrays, pieces.mask is not None, *limits, out.counts, out.values, out.histogram, out.bin_counts, out.bin_sums)
    halves = out.histogram.reshape(2, rows, BUCKETS)
    return PieceSums(out.counts, out.values, halves[0] + halves[1], out.bin_counts, out.bin_sums)


def _read_only(array: Any) -> Any:
    """A view of one kind, contiguous and not writable: a second kind would be compiled a second time."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@_jit
def _all(  # type: ignore[no-untyped-def]
    later, earlier, mask, starts, lengths, signs, rows, masked, low, high, counts, values, histogram, bin_n, bin_sums
):  # fmt: skip
    d, size = np.empty(_TOKENS, _F), np.empty(_TOKENS, _F)
    behave, good, power = np.empty(_TOKENS, _F), np.empty(_TOKENS, np.uint8), np.empty(_TOKENS, np.int32)
    half = histogram.shape[0] // 2
    for p in range(len(starts)):
        at, end = starts[p], starts[p] + lengths[p]
        while at < end:
            m = min(_TOKENS, end - at)
            one = slice(at, at + m)
            _difference(later[one], earlier[one], mask[one] if masked else mask, masked, d, behave, good, counts[p])
            _clamp(m, d, size, counts[p])
            _count(m, d, size, signs[p], low, high, counts[p], values[p])
            _sum(m, d, power, values[p])
            if half:
                _bucket(m, size, histogram[rows[p]], histogram[half + rows[p]])
            if len(bin_n):
                _stratify(m, size, behave, good, bin_n[p], bin_sums[p])
            at += m
        if half:
            histogram[rows[p], 0] -= lengths[p] - counts[p, 0]


@_jit
def _difference(later, earlier, mask, masked, d, behave, good, counts):  # type: ignore[no-untyped-def]
    """d, 0 for tokens that do not count; |earlier|; which tokens count."""
    n = nan = 0
    for i in range(len(later)):
        x = later[i] - earlier[i]
        wanted = mask[i] != 0 if masked else True
        strange = x != x  # noqa: PLR0124
        fine = wanted & (not strange)
        nan += wanted & strange
        n += fine
        d[i] = x if fine else _ZERO
        behave[i] = abs(earlier[i])
        good[i] = fine
    counts[0] += n
    counts[1] += nan


@_jit
def _clamp(m, d, size, counts):  # type: ignore[no-untyped-def]
    clamped = 0
    for i in range(m):
        a = abs(d[i])
        clamped += a > _CLAMP
        a = min(_CLAMP, a)
        size[i] = a
        d[i] = a if d[i] > _ZERO else -a
    counts[2] += clamped


@_jit
def _count(m, d, size, sign, low, high, counts, values):  # type: ignore[no-untyped-def]
    """Active clips, tails and the largest |d|."""
    over_ln2 = over_1 = 0
    largest = _ZERO
    for i in range(m):
        a = size[i]
        largest = max(largest, a)
        over_ln2 += a > _LN2
        over_1 += a > _ONE
    counts[5] += over_ln2
    counts[6] += over_1
    values[5] = max(values[5], largest)
    clipped = 0
    if sign < 0:
        for i in range(m):
            clipped += d[i] < low
        counts[3] += clipped
    elif sign > 0:
        for i in range(m):
            clipped += d[i] > high
        counts[4] += clipped


@_jit
def _sum(m, d, power, values):  # type: ignore[no-untyped-def]
    """Sums of d, |d|, d^2, k3 = e^d - 1 - d and (e^d - 1)^2, with e^d = 2^k e^r, |r| <= ln 2 / 2."""
    two_to_k = power.view(np.float32)
    for i in range(m):
        x = d[i]
        power[i] = (np.int32(x * _LOG2E + (_HALF if x > _ZERO else -_HALF)) + _BIAS) << _SHIFT
    s = a = sq = k3 = e2 = 0.0
    for i in range(m):
        x = d[i]
        k = (power[i] >> _SHIFT) - _BIAS
        r = x - _F(k) * _LN2
        small = r * r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7)))))
        z = small if k == 0 else two_to_k[i] * (_ONE + r + small) - _ONE - x
        wide, e = np.float64(x), np.float64(x + z)
        s += wide
        a += abs(wide)
        sq += wide * wide
        k3 += np.float64(z)
        e2 += e * e
    values[0] += s
    values[1] += a
    values[2] += sq
    values[3] += k3
    values[4] += e2


@_jit
def _bucket(m, size, even, odd):  # type: ignore[no-untyped-def]
    """Two tables by turns: one alone would wait for its own last store."""
    bits = size.view(np.int32)
    for i in range(0, m - 1, 2):
        even[bits[i] >> 21] += 1
        odd[bits[i + 1] >> 21] += 1
    if m & 1:
        even[bits[m - 1] >> 21] += 1


@_jit
def _stratify(m, size, behave, good, bin_n, bin_sums):  # type: ignore[no-untyped-def]
    bits = behave.view(np.int32)
    for i in range(m):
        b = (bits[i] >> _SHIFT) - FIRST_EXPONENT
        b = 0 if b < 0 else (min(b, _LAST))
        a = np.float64(size[i])
        bin_n[b] += good[i]
        bin_sums[0, b] += a
        bin_sums[1, b] += a * a
