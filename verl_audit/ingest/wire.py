"""Protobuf wire decoding: enough to walk a message without its schema."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as struct_error

Value = int | bytes
"""Varints are unsigned ints; fixed-width and length-delimited fields are bytes."""

DOUBLE = Struct("<d")
FLOAT = Struct("<f")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a well-formed message."""


def varint(data: bytes, pos: int) -> tuple[int, int]:
    """The unsigned varint at `pos` and the position after it."""
    result = shift = 0
    while shift < 70:
        if pos >= len(data):
            raise WireError("varint runs past the end")
        byte = data[pos]
        pos += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, pos
        shift += 7
    raise WireError("varint longer than ten bytes")


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Field number and value of every field of a message, in file order."""
    pos, end = 0, len(data)
    while pos < end:
        tag = data[pos]
        pos += 1
        if tag >= 0x80:
            tag, pos = varint(data, pos - 1)
        kind = tag & 7
        if kind == _VARINT:
            value, pos = varint(data, pos)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, pos = varint(data, pos)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"unknown wire type {kind}")
        if pos + size > end:
            raise WireError("field runs past the end of its message")
        yield tag >> 3, data[pos : pos + size]
        pos += size


def signed(value: Value) -> int:
    """An int64 varint (negative numbers are stored as ten-byte varints)."""
    number = as_int(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def zigzag(value: Value) -> int:
    """A sint64 varint."""
    number = as_int(value)
    return (number >> 1) ^ -(number & 1)


def as_int(value: Value) -> int:
    """The value of a varint field; another wire type is an error."""
    if not isinstance(value, int):
        raise WireError("expected a varint")
    return value


def as_bytes(value: Value) -> bytes:
    """The value of a fixed-width or length-delimited field; another wire type is an error."""
    if not isinstance(value, bytes):
        raise WireError("expected bytes")
    return value


def as_text(value: Value) -> str:
    """A string field; bad UTF-8 is replaced, not refused."""
    return as_bytes(value).decode("utf-8", "replace")


def as_float(value: Value, form: Struct) -> float:
    """A float or double field, by its `form` (`FLOAT`, `DOUBLE`)."""
    try:
        number: float = form.unpack(as_bytes(value))[0]
    except struct_error as error:
        raise WireError("field of the wrong width") from error
    return number
