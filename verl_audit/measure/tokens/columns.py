"""Arrow columns as numpy arrays without a copy where there is none to make: scalars, lists of tokens, aligned lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.measure.tokens.spec import UNKNOWN
from verl_audit.trace.schema import BLOB, width

Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

_F32 = 4


@dataclass(frozen=True)
class Lists:
    """One list a row: row i holds values[offsets[i]:offsets[i + 1]] if `valid[i]`, else null."""

    values: NDArray[Any]
    offsets: Int
    valid: Bool

    @property
    def lengths(self) -> Int:
        """Entries of each row; what a null row hides counts too."""
        return np.diff(self.offsets)


def numbers(array: pa.Array) -> NDArray[Any]:
    """A view of a primitive array; what is null holds anything.

    (`Array.to_numpy` imports pandas where it is installed: a third of a second.)
    """
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return np.unpackbits(bits, bitorder="little", count=array.offset + len(array))[array.offset :]
    kind = np.dtype(width(array.type))
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), kind)
    return np.frombuffer(buffer, kind, array.offset + len(array))[array.offset :]


def valid(array: pa.Array) -> Bool:
    """Which entries are not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    return numbers(array.is_valid()).astype(np.bool_)


def column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """A column of a batch; None if it is not there."""
    at = batch.schema.get_field_index(name)
    return None if at < 0 else batch.column(at)


def integers(array: pa.Array | None, rows: int) -> Int:
    """A column of integers, `UNKNOWN` where it is null or not there."""
    if array is None or pa.types.is_null(array.type):
        return np.full(rows, UNKNOWN, np.int64)
    out: Int = numbers(array).astype(np.int64)
    out[~valid(array)] = UNKNOWN
    return out


def token_lists(batch: pa.RecordBatch, name: str) -> Lists | None:
    """A log-prob column as float32, in either form; null elements are NaN. None if no row has a list."""
    array = column(batch, name)
    if array is None or array.null_count == len(array):
        array = column(batch, name + BLOB)
        return None if array is None or array.null_count == len(array) else _blobs(array)
    found = lists(array)
    values = found.values.astype(np.float32) if found.values.dtype != np.float32 else found.values
    return Lists(values, found.offsets, found.valid)


def mask_lists(batch: pa.RecordBatch, name: str = "loss_mask") -> Lists | None:
    """A mask column of booleans or numbers as 0 and 1; a null element does not count. None if no row has one."""
    array = column(batch, name)
    if array is None or array.null_count == len(array):
        return None
    found = lists(array, null=0)
    bits = pa.types.is_boolean(array.type.value_type) and found.values.dtype == np.uint8
    return Lists(found.values if bits else (found.values != 0).astype(np.uint8), found.offsets, found.valid)


def lists_of(array: pa.Array) -> tuple[Int, pa.Array]:
    """Offsets and elements of a list column of any kind: list, large, fixed-size, view.

    Raises `TypeError` for anything else.
    """
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * kind.list_size, array.values
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return numbers(array.offsets).astype(np.int64), array.values
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        sizes = np.where(valid(array), numbers(array.sizes), 0)
        return np.cumsum(np.r_[0, sizes], dtype=np.int64), array.flatten()
    raise TypeError(f"a list is needed, not {kind}")


def lists(array: pa.Array, null: float = np.nan) -> Lists:
    """A list column whose elements are numbers or booleans; a null element becomes `null`.

    Raises `TypeError` for anything else.
    """
    offsets, elements = lists_of(array)
    kind = elements.type
    if pa.types.is_null(kind):
        elements = elements.cast(pa.float32())
    elif not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"a list of numbers is needed, not {array.type}")
    values = numbers(elements)
    if elements.null_count:
        values = np.where(valid(elements), values, np.float64(null) if values.dtype.kind != "f" else null)
    return Lists(values, offsets, valid(array))


def _blobs(array: pa.Array) -> Lists:
    """Raw little-endian float32; a value whose bytes are no whole number of them is taken for an empty list."""
    wide = pa.types.is_large_binary(array.type)
    if not wide and not pa.types.is_binary(array.type):
        raise TypeError(f"binary is needed, not {array.type}")
    _, where, data = array.buffers()
    count = array.offset + len(array) + 1
    at = np.frombuffer(where, np.int64 if wide else np.int32, count)[array.offset :].astype(np.int64)
    if (at % _F32).any():
        kept = [b if b is not None and len(b) % _F32 == 0 else b"" for b in array.to_pylist()]
        data = b"".join(kept)
        at = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    size = int(at[-1])
    values = np.frombuffer(data or b"", "<f4", size // _F32) if size else np.zeros(0, np.float32)
    return Lists(values, at // _F32, valid(array))


@dataclass(frozen=True)
class Aligned:
    """Lists of the same rows, laid so that one row begins at the same place in each: `starts`, `lengths` (rows,)."""

    values: Mapping[str, NDArray[Any]]
    starts: Int
    lengths: Int


def align(columns: Mapping[str, Lists], rows: Int) -> Aligned:
    """Bring lists of equal lengths in line: a view if they already are, else a copy of these rows.

    `rows` ascend; each of them is valid in every column and has the same length in each.
    """
    first = next(iter(columns.values()))
    lengths = first.lengths[rows]
    begins = {name: one.offsets[rows] for name, one in columns.items()}
    starts = begins[next(iter(columns))] - begins[next(iter(columns))][0]
    if all(np.array_equal(at - at[0], starts) for at in begins.values()):
        end = int(starts[-1] + lengths[-1])
        views = {name: one.values[begins[name][0] : begins[name][0] + end] for name, one in columns.items()}
        return Aligned(views, starts, lengths)
    copies = {name: np.concatenate(_runs(one, begins[name], lengths)) for name, one in columns.items()}
    return Aligned(copies, np.cumsum(lengths) - lengths, lengths)


def _runs(one: Lists, begins: Int, lengths: Int) -> Sequence[NDArray[Any]]:
    """Slices that hold the rows one after another, as few as adjacency allows."""
    ends = begins + lengths
    cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    first, last = np.r_[0, cuts], np.r_[cuts, len(begins)] - 1
    return [one.values[a:b] for a, b in zip(begins[first], ends[last], strict=True)]


def strings(array: pa.Array) -> tuple[Int, list[str]]:
    """Codes of a string column and what they stand for; null is the empty string."""
    encoded = array if pa.types.is_dictionary(array.type) else array.cast(pa.string()).dictionary_encode()
    codes = numbers(encoded.indices).astype(np.int64)
    words = [word or "" for word in encoded.dictionary.to_pylist()]
    if encoded.null_count:
        codes[~valid(encoded)] = len(words)
    return codes, [*words, ""]
