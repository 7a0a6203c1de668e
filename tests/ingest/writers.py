"""Writers of small test inputs: `.wandb` logs, TensorBoard event files, and ways to damage bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from verl_audit.ingest.model import KINDS, Parsed

SHARED = Path(__file__).parents[2].parent / "shared"
REAL_RUNS = SHARED / "real_runs"
PUBLIC_LOGS = SHARED / "public_logs"

WANDB_HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32_768


def varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def blob(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def double_field(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<d", value)


def float_field(number: int, value: float) -> bytes:
    return varint(number << 3 | 5) + struct.pack("<f", value)


def block_log(records: Iterable[bytes], header: bytes = WANDB_HEADER) -> bytes:
    """LevelDB-style framing with 32 KiB blocks counted from the start of the file."""
    out = bytearray(header)
    for record in records:
        pos, first = 0, True
        while first or pos < len(record):
            left = BLOCK - len(out) % BLOCK
            if left < 7:
                out += bytes(left)
                continue
            part = record[pos : pos + left - 7]
            pos += len(part)
            last = pos >= len(record)
            kind = (1 if last else 2) if first else (4 if last else 3)
            body = bytes([kind]) + part
            out += struct.pack("<IH", zlib.crc32(body), len(part)) + body
            first = False
    return bytes(out)


def item(key: str, text: str, nested: bool = True) -> bytes:
    """A history or config item with JSON text; the key as wandb-core (`nested`) or older writer put it."""
    name = b"".join(blob(2, part.encode()) for part in key.split("\0")) if nested else blob(1, key.encode())
    return name + blob(16, text.encode())


def history(step: int | None, items: Iterable[bytes], timestamp: float | None = None) -> bytes:
    """A record with one history row; `step` goes into the submessage and the `_step` item."""
    body = b"".join(blob(1, one) for one in items)
    if timestamp is not None:
        body += blob(1, item("_timestamp", repr(timestamp)))
    if step is not None:
        body += blob(1, item("_step", str(step))) + blob(2, number_field(1, step) if step else b"")
    return blob(2, body)


def wandb_row(step: int, values: Mapping[str, float], timestamp: float | None = None) -> bytes:
    return history(step, [item(k, json.dumps(v)) for k, v in values.items()], timestamp)


def run_record(run_id: str, project: str, name: str, config: Mapping[str, Any]) -> bytes:
    updates = b"".join(blob(1, item(k, json.dumps(v), nested=False)) for k, v in config.items())
    start = number_field(1, 1_700_000_000) + number_field(2, 500_000_000)
    return blob(
        17,
        blob(1, run_id.encode())
        + blob(3, project.encode())
        + blob(4, updates)
        + blob(8, name.encode())
        + blob(17, start),
    )


def output_raw(text: str, stderr: bool = False) -> bytes:
    return blob(13, (b"" if stderr else number_field(1, 1)) + blob(3, text.encode()))


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def tf_event(step: int, values: bytes, wall: float = 1000.0) -> bytes:
    return double_field(1, wall) + number_field(2, step) + blob(5, values)


def tf_scalar(tag: str, value: float, step: int, wall: float = 1000.0) -> bytes:
    """A framed event with a `simple_value`."""
    return tf_record(tf_event(step, blob(1, blob(1, tag.encode()) + float_field(2, value)), wall))


def tf_tensor(tag: str, tensor: bytes, step: int, wall: float = 1000.0) -> bytes:
    """A framed event with a TensorProto."""
    return tf_record(tf_event(step, blob(1, blob(1, tag.encode()) + blob(8, tensor)), wall))


def tf_version() -> bytes:
    return tf_record(double_field(1, 999.0) + blob(3, b"brain.Event:2"))


def table(parsed: Parsed) -> dict[tuple[str, int], float]:
    """`(key, step) -> value`, the last one written."""
    m = parsed.metrics
    return {(m.keys[k], s): v for k, s, v in zip(m.key_id, m.step, m.value, strict=True)}


def kinds(parsed: Parsed) -> dict[tuple[str, int], str]:
    m = parsed.metrics
    return {(m.keys[k], s): KINDS[kind] for k, s, kind in zip(m.key_id, m.step, m.kind_id, strict=True)}


def problem_kinds(parsed: Parsed) -> list[str]:
    return [p.kind for p in parsed.problems]
