"""Values of JSON dumps as the trace schema takes them; what does not fit is None."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_audit.ingest import jsonl, unpack
from verl_audit.ingest.model import Parsed

_INT32 = 1 << 31
Row = dict[str, Any]


def rows_of(path: Path, notes: Parsed) -> Iterator[Row]:
    """The objects of a JSON lines file, in order; lines that are none are noted. Never raises."""
    before = notes.bytes_read
    try:
        with unpack.opened(path, notes.note) as stream:
            for _, row in jsonl.objects(stream, notes):
                yield row
    except OSError as error:
        notes.note("unreadable", f"{path.name}: {error}")
    notes.bytes_read += before


def whole(value: object) -> int | None:
    """A whole number that fits 32 bits."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -_INT32 < value < _INT32 else None


def real(value: object) -> float | None:
    """A number; NaN and infinity stay."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def text(value: object) -> str | None:
    """A string, or a number as one, in UTF-8; empty is None."""
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value).encode("utf-8", "replace").decode() or None
    return None


def micros(value: object) -> int | None:
    """Unix seconds as microseconds; no plausible time is None."""
    seconds = real(value)
    return round(seconds * 1e6) if seconds is not None and 0 < seconds < 1e11 else None


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def floats(values: Sequence[object]) -> list[float]:
    """Numbers of a list; null, which stands for a NaN or an infinity in JSON, and anything else is NaN."""
    return [math.nan if (number := real(value)) is None else number for value in values]


def flags(values: Sequence[object]) -> list[bool]:
    """Flags of a list written as booleans or numbers."""
    return [bool(value) if isinstance(value, (bool, int, float)) else False for value in values]


def key_of(value: object) -> str:
    """A short stable name for a prompt, so that its text need not be kept: 64 bits of BLAKE2b."""
    return hashlib.blake2b(repr(value).encode("utf-8", "replace"), digest_size=8).hexdigest()


def trajectory_key(key: object) -> tuple[str, int | None, int | None] | None:
    """Group, session and turn of a key `{uid}_{session}_{index}`, as verl forms it; another key is a group."""
    name = text(key)
    if name is None:
        return None
    parts = name.rsplit("_", 2)
    if len(parts) == 3 and parts[0] and all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts[1:]):
        return parts[0], int(parts[1]), int(parts[2])
    return name, None, None
