"""TensorBoard event files, read without TensorBoard: TFRecord framing, then Event messages.

After damage the next place where a length agrees with its checksum is a record again, so one bad record costs
one record. Scalars come as `simple_value` (float32) or as TF2 tensors; text, images and histograms are no
metrics.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from struct import unpack as struct_unpack
from typing import Any

from verl_audit.ingest.model import Identity, Parsed
from verl_audit.ingest.wire import (
    DOUBLE,
    FLOAT,
    WireError,
    as_bytes,
    as_float,
    as_int,
    as_text,
    fields,
    signed,
    varint,
)

_LENGTH = Struct("<QI")
_CRC = Struct("<I")
_FRAME = 16
_LARGEST = 64 << 20
_CHECKED = 1024
"""Without a C checksum only records up to this size are checked; scalars are far smaller."""
_WALL_TIME_TAG, _STEP_TAG = b"\x09", b"\x10"
_SHORT = 0x80 - 9
"""Tags from this size on have a summary whose length takes two bytes."""
_INT64 = 1 << 63

_FLOAT_TYPE, _DOUBLE_TYPE, _INT32_TYPE, _INT64_TYPE = 1, 2, 3, 9
_TENSOR_FORMS = {_FLOAT_TYPE: "<f", _DOUBLE_TYPE: "<d", _INT32_TYPE: "<i", _INT64_TYPE: "<q"}
_TENSOR_FIELDS = {_FLOAT_TYPE: 5, _DOUBLE_TYPE: 6, _INT32_TYPE: 7, _INT64_TYPE: 10}


def read(path: Path) -> list[Parsed]:
    """Scalars of one event file; never raises."""
    started = re.search(r"tfevents\.(\d{9,11})\b", path.name)
    identity = Identity(*_names(path), started=float(started[1]) if started else None)
    parsed = Parsed(path, "tensorboard", identity=identity)
    try:
        with path.open("rb") as stream:
            if not stream.read(1):
                parsed.note("empty", "no event was written", 0)
                return [parsed]
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                parsed.bytes_read = len(data)
                _events(data, parsed)
    except (OSError, ValueError) as error:
        parsed.note("unreadable", str(error))
    return [parsed]


def _names(path: Path) -> tuple[str | None, str | None]:
    """Project and experiment, where verl's default directory layout tells them."""
    parts = path.absolute().parts
    if len(parts) > 4 and parts[-4] == "tensorboard_log":
        return parts[-3], parts[-2]
    return None, None


def _events(data: mmap.mmap, parsed: Parsed) -> None:
    writer = _Writer(parsed)
    for offset, payload in _records(data, parsed):
        writer.event(payload, offset)
    writer.close()


def _records(data: mmap.mmap, parsed: Parsed) -> Iterator[tuple[int, bytes]]:
    pos, end = 0, len(data)
    while pos < end:
        stop = _record_end(data, pos)
        if stop is None:
            found = _resync(data, pos + 1)
            kind = "torn_record" if found is None else "damaged_record"
            parsed.note(kind, f"{(found or end) - pos} bytes are no record", pos)
            if found is None:
                return
            pos = found
            continue
        payload = data[pos + 12 : stop - 4]
        if _intact(payload, _CRC.unpack_from(data, stop - 4)[0]):
            yield pos, payload
        else:
            parsed.note("damaged_record", "checksum does not match", pos)
        pos = stop


def _record_end(data: mmap.mmap, pos: int) -> int | None:
    """End of the record at `pos`, if its length is plausible and agrees with its checksum."""
    if pos + _FRAME > len(data):
        return None
    length, crc = _LENGTH.unpack_from(data, pos)
    stop: int = pos + _FRAME + length
    if not 0 < length < _LARGEST or stop > len(data) or _masked(_crc32c(data[pos : pos + 8])) != crc:
        return None
    return stop


def _resync(data: mmap.mmap, pos: int) -> int | None:
    """Start of the next record: an Event begins with its wall time, 12 bytes after the record does."""
    at = pos + 12
    while (at := data.find(_WALL_TIME_TAG, at)) >= 0:
        if _record_end(data, at - 12) is not None:
            return at - 12
        at += 1
    return None


def _intact(payload: bytes, crc: int) -> bool:
    if not _FAST_CRC and len(payload) > _CHECKED:
        return True
    return _masked(_crc32c(payload)) == crc


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
        table.append(crc)
    return table


def _slow_crc32c(data: bytes, _table: list[int] = _table()) -> int:  # noqa: B008 (computed once, on purpose)
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF


def _find_crc32c() -> tuple[Callable[[bytes], int], bool]:
    try:
        import google_crc32c  # noqa: PLC0415 (an extra)
    except ImportError:
        return _slow_crc32c, False
    return google_crc32c.value, google_crc32c.implementation == "c"


_crc32c, _FAST_CRC = _find_crc32c()


class _Writer:
    """Turns events to records: each tag of a step is an event of its own; one seen twice begins a record."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed
        self.step: int | None = None
        self.wall: float | None = None
        self.row: dict[str, float] = {}
        self.tags: dict[bytes, str] = {}
        """Tags of usual events by all bytes between step and number."""

    def event(self, payload: bytes, offset: int) -> None:
        """Take one Event message."""
        try:
            if not self._usual(payload):
                self._event(payload)
        except WireError as error:
            self.parsed.note("bad_record", str(error), offset)

    def close(self) -> None:
        """Hand on the last record."""
        if self.row and self.step is not None:
            self.parsed.metrics.next_record(self.step, self.wall)
            self.parsed.metrics.add_row(self.row)
        self.row = {}

    def _usual(self, payload: bytes) -> bool:
        """Take wall time, step and one `simple_value`, in this order and nothing else; false for any other event."""
        if payload[:1] != _WALL_TIME_TAG or payload[9:10] != _STEP_TAG:
            return False
        step, pos = varint(payload, 10)
        head = payload[pos:-4]
        tag = self.tags.get(head)
        if tag is None:
            if (tag := _usual_tag(head)) is None:
                return False
            self.tags[head] = tag
        self.parsed.float32 = True
        self._add(tag, FLOAT.unpack_from(payload, len(payload) - 4)[0], signed(step), DOUBLE.unpack_from(payload, 1)[0])
        return True

    def _add(self, tag: str, value: float, step: int, wall: float | None) -> None:
        if step != self.step or tag in self.row:
            self.close()
            self.step, self.wall = step, wall
        self.row[tag] = value

    def _event(self, payload: bytes) -> None:
        step, wall, summary = 0, None, None
        for number, value in fields(payload):
            if number == 1:
                wall = as_float(value, DOUBLE)
            elif number == 2:
                step = signed(value)
            elif number == 5:
                summary = as_bytes(value)
        for number, value in fields(summary or b""):
            if number == 1:
                self._value(as_bytes(value), step, wall)

    def _value(self, message: bytes, step: int, wall: float | None) -> None:
        tag, scalar = "", None
        for number, value in fields(message):
            if number == 1:
                tag = as_text(value)
            elif number == 2:
                scalar = as_float(value, FLOAT)
                self.parsed.float32 = True
            elif number == 8:
                scalar = self._tensor(as_bytes(value))
        if scalar is not None:
            self._add(tag, scalar, step, wall)

    def _tensor(self, message: bytes) -> float | None:
        """The number in a tensor of one element; None for text and for larger tensors."""
        parts: dict[int, Any] = dict(fields(message))
        kind = as_int(parts.get(1, 0))
        form = _TENSOR_FORMS.get(kind)
        if form is None:
            return None
        listed = parts.get(_TENSOR_FIELDS[kind])
        if 4 in parts:
            scalar = _unpack(form, as_bytes(parts[4]))
        elif isinstance(listed, int):
            scalar = float(signed(listed))
        elif kind in (_FLOAT_TYPE, _DOUBLE_TYPE):
            scalar = _unpack(form, as_bytes(listed or bytes(8 if kind == _DOUBLE_TYPE else 4)))
        else:
            scalar = _packed_int(as_bytes(listed or b"\0"))
        self.parsed.float32 |= kind == _FLOAT_TYPE and scalar is not None
        return scalar


def _usual_tag(head: bytes) -> str | None:
    """The tag in what stands before the number: a summary of one value that holds a tag and the number."""
    size = len(head) - 7
    lengths = (size + 9, size + 7, size)  # of the summary, of its value, of the tag
    if not 0 < size < _SHORT or head != b"\x2a%c\x0a%c\x0a%c" % lengths + head[6:-1] + b"\x15":
        return None
    return head[6:-1].decode("utf-8", "replace")


def _unpack(form: str, data: bytes) -> float | None:
    try:
        return float(struct_unpack(form, data)[0])
    except struct_error:
        return None


def _packed_int(data: bytes) -> float | None:
    """A packed list of one varint, which is a one-field message without its tag."""
    numbers = [signed(v) for _, v in fields(b"\x08" + data) if isinstance(v, int)]
    return float(numbers[0]) if len(numbers) == 1 else None
