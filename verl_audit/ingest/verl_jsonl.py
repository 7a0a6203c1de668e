"""verl's file logger: one `{"step": N, "data": {key: value, ...}}` a line.

It writes NaN and both infinities as `null`, and starts the file anew when a run resumes under the same name.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_audit.ingest import unpack
from verl_audit.ingest.model import Identity, Parsed

_INT64 = 1 << 63


def read(path: Path) -> list[Parsed]:
    """Read a file logger's file; never raises."""
    identity = Identity(project=path.absolute().parent.name or None, experiment=Path(unpack.inner_name(path)).stem)
    parsed = Parsed(path, "verl_jsonl", identity=identity)
    try:
        with unpack.opened(path, parsed.note) as stream:
            _read_stream(stream, parsed)
    except OSError as error:
        parsed.note("unreadable", str(error))
    _check_beginning(parsed)
    return [parsed]


def _read_stream(stream: BinaryIO, parsed: Parsed) -> None:
    offset = 0
    for line in stream:
        # runs of NUL are left by crashes on network file systems
        for piece in line.split(b"\0") if b"\0" in line else (line,):
            if piece and not piece.isspace():
                _row(piece, parsed, offset, torn=not line.endswith(b"\n"))
        offset += len(line)
    parsed.bytes_read = offset


def _row(line: bytes, parsed: Parsed, offset: int, torn: bool) -> None:
    try:
        row = _load(line)
    except (ValueError, RecursionError) as error:
        kind = "torn_line" if torn else "bad_line"
        parsed.note(kind, f"not a JSON object: {str(error)[:100]}", offset)
        return
    step, data = (row.get("step"), row.get("data")) if isinstance(row, dict) else (None, None)
    if type(step) is not int or abs(step) >= _INT64 or not isinstance(data, dict):
        parsed.note("bad_line", 'not {"step": int, "data": {...}}', offset)
        return
    parsed.metrics.next_record(step)
    with suppress(TypeError, OverflowError):  # something else than numbers, or a whole one too large: one by one
        parsed.metrics.add_row(data)
        return
    for key, value in data.items():
        _value(key, value, parsed, offset)


def _load(line: bytes) -> Any:
    """Other writers leave bare NaN and long integers in JSON, which orjson refuses."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)


def _value(key: str, value: object, parsed: Parsed, offset: int) -> None:
    if value is None:
        parsed.metrics.add(key, math.nan, "nonfinite_unknown")
    elif isinstance(value, (bool, int, float)):
        try:
            parsed.metrics.add(key, float(value))
        except OverflowError:
            parsed.metrics.add(key, math.inf if value > 0 else -math.inf, "clamped")
    else:
        parsed.note("not_a_number", f"{key} holds text, a list or a table, which is no metric", offset)


def _check_beginning(parsed: Parsed) -> None:
    first, _ = parsed.metrics.span or (0, 0)
    if first > 1:
        advice = "if the run was resumed, earlier steps may be left in its console log or tracker"
        parsed.note("history_overwritten", f"the file begins at step {first}; {advice}", 0)
