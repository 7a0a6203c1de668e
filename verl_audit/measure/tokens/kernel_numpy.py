"""The token kernel in numpy: blocks of whole pieces that stay in cache, sums of a block by `np.add.reduceat`.

`reduceat` returns the next element for an empty piece and adds in an order that depends on the length alone; so empty
pieces never reach it, and long pieces are cut at fixed places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.tokens.kernel import COUNTS, VALUES, Pieces, PieceSums
from verl_audit.measure.tokens.spec import BINS, BUCKETS, CLAMP, FIRST_EXPONENT, Spec

BLOCK = 1 << 15
"""Tokens of a block: 16K to 128K were measured equal, 256K slower by a seventh."""
_LN2 = np.float32(0.6931471805599453)
_SMALL = np.float32(0.35)
_TAYLOR = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2))
"""Coefficients of e^d - 1 - d from d^7 down; below `_SMALL` the relative error is below 1e-7."""
_BIN = np.clip(np.arange(256) - FIRST_EXPONENT, 0, BINS - 1)
"""Bin of each exponent of a float32."""

Int = NDArray[np.int64]
Float = NDArray[np.float64]
F32 = NDArray[np.float32]


def reduce_pieces(pieces: Pieces, spec: Spec, rows: int, strata: bool) -> PieceSums:
    """Sums of each piece; see `kernel.Reduce`."""
    count = len(pieces.starts)
    out = PieceSums(
        np.zeros((count, len(COUNTS)), np.int64),
        np.zeros((count, len(VALUES))),
        np.zeros((rows, BUCKETS), np.int64),
        np.zeros((count if strata else 0, BINS), np.int64),
        np.zeros((count if strata else 0, 2, BINS)),
    )
    with np.errstate(invalid="ignore"):  # infinity - infinity is no number, and counted
        for block in _blocks(pieces):
            _reduce_block(pieces, spec, block, out)
    return out


class _Block:
    """Adjacent tokens [lo, hi) in parts: `of` is the piece of each part, `at` its first token in the block."""

    def __init__(self, of: Int, starts: Int, lengths: Int) -> None:
        self.of, self.lengths = of, lengths
        self.lo, self.hi = int(starts[0]), int(starts[-1] + lengths[-1])
        self.at = starts - self.lo

    def part(self, tokens: Int) -> Int:
        """Part of each token of the block."""
        return np.searchsorted(self.at, tokens, "right") - 1


def _blocks(pieces: Pieces) -> Iterator[_Block]:
    parts = -(-pieces.lengths // BLOCK)
    of = np.repeat(np.arange(len(parts)), parts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = pieces.starts[of] + nth * BLOCK
    lengths = np.minimum(pieces.lengths[of] - nth * BLOCK, BLOCK)
    ends = starts + lengths
    gaps = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    for begin, stop in zip(np.r_[0, gaps], np.r_[gaps, len(of)], strict=True):
        first = int(begin)
        while first < stop:
            last = max(first + 1, int(np.searchsorted(ends[:stop], starts[first] + BLOCK, "right")))
            yield _Block(of[first:last], starts[first:last], lengths[first:last])
            first = last


def _reduce_block(pieces: Pieces, spec: Spec, block: _Block, out: PieceSums) -> None:
    one = slice(block.lo, block.hi)
    mask = None if pieces.mask is None or pieces.mask[one].all() else pieces.mask[one]
    d = np.subtract(pieces.later[one], pieces.earlier[one])
    counts = np.zeros((len(block.of), len(COUNTS)), np.int64)
    mask = _repair(d, mask, block, counts)
    counts[:, 0] = block.lengths if mask is None else np.add.reduceat(mask.astype(np.int64), block.at)
    size = np.abs(d)
    _count(d, size, pieces.signs[block.of], spec, block, counts)
    values, wide = _sums(d, size, block)
    np.add.at(out.counts, block.of, counts)
    np.add.at(out.values[:, :-1], block.of, values)
    np.maximum.at(out.values[:, -1], block.of, np.maximum.reduceat(size, block.at))
    if len(out.histogram):
        _bucket(size, pieces.rows[block.of], block, counts[:, 0], out.histogram)
    if len(out.bin_counts):
        _stratify(pieces.earlier[one], mask, wide, block, out)


def _repair(d: F32, mask: NDArray[np.uint8] | None, block: _Block, counts: Int) -> NDArray[np.uint8] | None:
    """Zero what does not count and clamp the rest, in place; returns the mask without tokens that are no number."""
    if not np.isfinite(d).all():
        nan = np.isnan(d)
        wanted = nan if mask is None else nan & (mask != 0)
        counts[:, 1] = np.add.reduceat(wanted.astype(np.int64), block.at)
        mask = (~nan).astype(np.uint8) if mask is None else mask * ~nan
        d[mask == 0] = 0
    elif mask is not None:
        np.multiply(d, mask, out=d)
    if max(d.max(), -d.min()) > CLAMP:
        counts[:, 2] = np.add.reduceat((np.abs(d) > CLAMP).astype(np.int64), block.at)
        np.clip(d, -CLAMP, CLAMP, out=d)
    return mask


def _count(d: F32, size: F32, signs: NDArray[np.int8], spec: Spec, block: _Block, counts: Int) -> None:
    """Active clips and tails: few tokens, found by one comparison."""
    low, high = np.float32(spec.clip_below), np.float32(spec.clip_above)
    far = np.flatnonzero(size > min(_LN2, high, -low))
    if not len(far):
        return
    part = block.part(far)
    x, sign = d[far], signs[part]
    hits = ((sign < 0) & (x < low), (sign > 0) & (x > high), size[far] > _LN2, size[far] > 1)
    for column, hit in enumerate(hits, start=3):
        counts[:, column] = np.bincount(part[hit], minlength=len(block.of))


def _sums(d: F32, size: F32, block: _Block) -> tuple[Float, tuple[Float, Float]]:
    """Sums of d, |d|, d^2, k3 and (e^d - 1)^2 by part; and |d|, d^2 of each token."""
    wide, wide_size = d.astype(np.float64), size.astype(np.float64)
    square = wide * wide
    k3 = _k3(d, size, wide)
    e = wide + k3
    np.multiply(e, e, out=e)
    sums = [np.add.reduceat(x, block.at) for x in (wide, wide_size, square, k3, e)]
    return np.stack(sums, axis=1), (wide_size, square)


def _k3(d: F32, size: F32, wide: Float) -> Float:
    """e^d - 1 - d without the cancellation."""
    small = d * _TAYLOR[0]
    for coefficient in _TAYLOR[1:]:
        small += coefficient
        small *= d
    small *= d
    k3: Float = small.astype(np.float64)
    far = np.flatnonzero(size > _SMALL)
    if len(far):
        k3[far] = np.expm1(wide[far]) - wide[far]
    return k3


def _bucket(size: F32, rows: Int, block: _Block, counted: Int, histogram: Int) -> None:
    """Tokens that do not count lie in bucket 0 and are taken out again."""
    bucket: NDArray[Any] = size.view(np.int32) >> 21
    first = int(rows[0])
    if (rows == first).all():
        histogram[first] += np.bincount(bucket, minlength=BUCKETS)
    else:
        bucket = bucket + np.repeat(rows * BUCKETS, block.lengths)
        histogram += np.bincount(bucket, minlength=histogram.size).reshape(histogram.shape)
    np.subtract.at(histogram[:, 0], rows, block.lengths - counted)


def _stratify(
    earlier: F32, mask: NDArray[np.uint8] | None, wide: tuple[Float, Float], block: _Block, out: PieceSums
) -> None:
    where = _BIN.take(np.abs(earlier).view(np.uint32) >> 23)
    where += np.repeat(np.arange(len(block.of)) * BINS, block.lengths)
    shape, width = (len(block.of), BINS), len(block.of) * BINS
    counts = np.bincount(where, minlength=width)
    if mask is not None:
        counts -= np.bincount(where[mask == 0], minlength=width)
    np.add.at(out.bin_counts, block.of, counts.reshape(shape))
    sums = [np.bincount(where, weights, width).reshape(shape) for weights in wide]
    np.add.at(out.bin_sums, block.of, np.stack(sums, axis=1))
