"""Columns as foreign writers left them, in the types of the trace schema; what does not fit is null and counted.

Files of one run may differ: int64 for int32, double for float, large or fixed-size lists, dictionaries or plain
strings, columns of nothing but null.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.trace.schema import BLOB, LOG_PROBS, Column, width


def conform(part: pa.Table, columns: tuple[Column, ...], scalars: Parsed, tokens: Parsed) -> pa.Table:
    """The part with exactly these columns, in order and of the schema's types; columns it lacks are null.

    Cells that do not fit are null and counted under `trace_type`, at `scalars` or `tokens` by what the column holds.
    """
    arrays = []
    for column in columns:
        notes = tokens if column.tokens else scalars
        found = _find(part, column, notes)
        if found is None:
            arrays.append(pa.nulls(len(part), column.type))
            continue
        array, lost = convert(found, column.type)
        if lost:
            notes.note("trace_type", f"{column.name}: {found.type} where {column.type} belongs", count=lost)
        arrays.append(_valid(array, column, notes))
    return pa.Table.from_arrays(arrays, names=[c.name for c in columns])


def _find(part: pa.Table, column: Column, notes: Parsed) -> pa.Array | None:
    names = set(part.column_names)
    if column.name in names:
        return _whole(part[column.name])
    if column.name in LOG_PROBS and (blob := column.name + BLOB) in names:
        return floats_of(_whole(part[blob]), column, notes)
    return None


def _whole(column: pa.ChunkedArray) -> pa.Array:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _valid(array: pa.Array, column: Column, notes: Parsed) -> pa.Array:
    """Text that is no UTF-8 cannot be shown or stored; token lists hold numbers only."""
    if column.tokens:
        return array
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        notes.note("trace_type", f"{column.name}: {str(error)[:100]}", count=len(array))
        return pa.nulls(len(array), column.type)
    return array


def floats_of(blobs: pa.Array, column: Column, notes: Parsed) -> pa.Array:
    """Binary values of little-endian float32 as lists, without a copy; a length that is no multiple of 4 is null."""
    if not pa.types.is_binary(blobs.type):
        try:
            blobs = blobs.cast(pa.binary())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return blobs
    offsets = np.frombuffer(blobs.buffers()[1] or b"", np.int32)[blobs.offset : blobs.offset + len(blobs) + 1]
    if not len(blobs):
        return pa.array([], column.type)
    missing = blobs.is_null().to_numpy(zero_copy_only=False)
    torn = (np.diff(offsets) % 4 != 0) & ~missing
    if torn.any():
        notes.note("trace_type", f"{column.name}{BLOB}: bytes of no whole number of floats", count=int(torn.sum()))
    if (offsets % 4).any():  # not aligned: rows are copied one by one
        rows = [
            None if b is None or t else np.frombuffer(b, "<f4") for b, t in zip(blobs.to_pylist(), torn, strict=True)
        ]
        return pa.array(rows, column.type)
    count = int(offsets[-1]) // 4
    values = pa.Array.from_buffers(pa.float32(), count, [None, blobs.buffers()[2] or pa.py_buffer(b"")])
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets // 4, pa.int32()), values, type=column.type, mask=mask)


def convert(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int]:
    """The array as `kind`, and how many cells that held something do so no more."""
    have = array.type
    if have == kind:
        return array, 0
    if pa.types.is_null(have):
        return pa.nulls(len(array), kind), 0
    if pa.types.is_dictionary(have):
        return convert(array.cast(have.value_type), kind)
    if isinstance(array, pa.ExtensionArray):
        return convert(array.storage, kind)
    for matches, how in _KINDS:
        if matches(kind):
            made = how(array, kind)
            return made if made is not None else (pa.nulls(len(array), kind), len(array) - array.null_count)
    return pa.nulls(len(array), kind), len(array) - array.null_count


def _label(array: pa.Array, kind: pa.DictionaryType) -> tuple[pa.Array, int] | None:
    text = _text(array, kind.value_type)
    return None if text is None else (text[0].dictionary_encode().cast(kind), text[1])


def _text(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int] | None:
    have = array.type
    if pa.types.is_integer(have) or pa.types.is_large_string(have) or pa.types.is_string(have):
        return array.cast(kind), 0
    return (array.cast(kind), 0) if pa.types.is_string_view(have) else None


def _integers(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int] | None:
    have = array.type
    if not (pa.types.is_integer(have) or pa.types.is_floating(have)):
        return None
    if pa.types.is_float16(have):
        array = array.cast(pa.float32())
    limits = np.iinfo(width(kind))
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    fits = (values >= limits.min) & (values <= limits.max)
    if values.dtype.kind == "f":
        fits &= np.floor(values) == values
    missing = array.is_null().to_numpy(zero_copy_only=False)
    made = pa.array(np.where(fits, values, 0).astype(width(kind)), kind, mask=missing | ~fits)
    return made, int((~fits & ~missing).sum())


def _floats(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int] | None:
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)):
        return None
    return array.cast(kind, safe=False), 0


def _booleans(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, int] | None:
    return (array.cast(kind), 0) if pa.types.is_integer(array.type) else None


def _times(array: pa.Array, kind: pa.TimestampType) -> tuple[pa.Array, int] | None:
    """Other units are cut to microseconds; times without a zone are taken as UTC."""
    if not pa.types.is_timestamp(array.type):
        return None
    return array.cast(pa.timestamp("us", array.type.tz), safe=False).cast(kind), 0


def _lists(array: pa.Array, kind: pa.ListType) -> tuple[pa.Array, int] | None:
    """A list one of whose elements does not fit is null as a whole."""
    have = array.type
    if pa.types.is_fixed_size_list(have):
        array = array.cast(pa.list_(have.value_type))
    elif not (pa.types.is_list(have) or pa.types.is_large_list(have)):
        return None
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    inner, lost = convert(values, kind.value_type)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    bad = _holding(_nulled(values, inner), offsets - offsets[0]) & ~missing if lost else np.zeros(len(array), bool)
    fitting = inner if kind.value_field.nullable else _filled(inner)
    mask = pa.array(missing | bad) if missing.any() or bad.any() else None
    starts = pa.array((offsets - offsets[0]).astype(np.int32))
    return pa.ListArray.from_arrays(starts, fitting, type=kind, mask=mask), int(bad.sum())


def _nulled(before: pa.Array, after: pa.Array) -> np.ndarray:
    made: np.ndarray = (after.is_null().to_numpy(zero_copy_only=False)) & before.is_valid().to_numpy(
        zero_copy_only=False
    )
    return made


def _holding(marked: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which lists hold a marked element."""
    before = np.concatenate([[0], np.cumsum(marked)])
    held: np.ndarray = np.diff(before[offsets]) > 0
    return held


def _filled(values: pa.Array) -> pa.Array:
    """Elements that the schema forbids to be null: NaN for a number, false for a flag."""
    if not values.null_count or pa.types.is_nested(values.type):
        return values
    return values.fill_null(False if pa.types.is_boolean(values.type) else float("nan"))


def _structs(array: pa.Array, kind: pa.StructType) -> tuple[pa.Array, int] | None:
    """A struct that lacks a required field, or holds one that does not fit, is null."""
    if not pa.types.is_struct(array.type):
        return None
    names = {field.name for field in array.type}
    parts = [convert(array.field(f.name), f.type)[0] if f.name in names else pa.nulls(len(array), f.type) for f in kind]
    missing = array.is_null().to_numpy(zero_copy_only=False)
    broken = np.zeros(len(array), bool)
    for i, field in enumerate(kind):
        if not field.nullable and parts[i].null_count:
            broken |= parts[i].is_null().to_numpy(zero_copy_only=False)
            parts[i] = parts[i].fill_null("" if pa.types.is_string(field.type) else 0)
    mask = pa.array(missing | broken) if missing.any() or broken.any() else None
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask), int((broken & ~missing).sum())


def _maps(array: pa.Array, kind: pa.MapType) -> tuple[pa.Array, int] | None:
    try:
        return array.cast(kind, safe=False), 0
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


_KINDS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_dictionary, _label),
    (pa.types.is_string, _text),
    (pa.types.is_integer, _integers),
    (pa.types.is_floating, _floats),
    (pa.types.is_boolean, _booleans),
    (pa.types.is_timestamp, _times),
    (pa.types.is_map, _maps),
    (pa.types.is_list, _lists),
    (pa.types.is_struct, _structs),
)
