"""ClearML's offline session: `metrics.jsonl`, each line an array of events, in a folder or a zip file.

It writes NaN and infinities as 0.0, so a zero here may be any of them (kind `clamped`).
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from verl_audit.ingest import jsonl
from verl_audit.ingest.model import Identity, Parsed, ValueKind
from verl_audit.ingest.rows import INT64, Row, emit, number

_NAMES = ("project_name", "name", "id")
_SCALAR = "training_stats_scalar"
_LONGEST = 4 << 30


def is_events(line: object) -> bool:
    """Whether a line of JSON is an array of ClearML events."""
    return isinstance(line, list) and bool(line) and isinstance(line[0], dict) and {"metric", "type"} <= line[0].keys()


def is_session(path: Path) -> bool:
    """Whether a zip file is an offline session."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "metrics.jsonl" in archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError):
        return False


def read(path: Path) -> list[Parsed]:
    """Read a session's zip file, or its `metrics.jsonl`; never raises."""
    parsed = Parsed(path, "clearml")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                parsed.identity = _identity(archive.read("task.json") if "task.json" in archive.namelist() else b"")
                with archive.open("metrics.jsonl") as member:
                    _events(io.BytesIO(_content(member, parsed)), parsed)
        else:
            task = path.with_name("task.json")
            parsed.identity = _identity(task.read_bytes() if task.is_file() else b"")
            with path.open("rb") as stream:
                _events(stream, parsed)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        parsed.note("unreadable", str(error))
    return [parsed]


def _content(member: Any, parsed: Parsed) -> bytes:
    """The member's bytes, up to where it is damaged."""
    data = bytearray()
    try:
        while (piece := member.read(1 << 16)) and len(data) < _LONGEST:
            data += piece
    except Exception as error:  # zlib.error, BadZipFile, EOFError
        parsed.note("damaged_archive", f"{str(error)[:100]}; values just before may be wrong", len(data))
    return bytes(data)


def _identity(text: bytes) -> Identity:
    try:
        task = json.loads(text)
    except ValueError:
        return Identity()
    if not isinstance(task, dict):
        return Identity()
    project, name, run = (value if isinstance(value := task.get(k), str) and value else None for k in _NAMES)
    return Identity(project, name, run)


def _events(stream: BinaryIO, parsed: Parsed) -> None:
    rows: list[Row] = []
    offset = 0
    for line in stream:
        text = line.strip(b"\0 \r\n")
        if b"\0" in line:
            parsed.note("nul_bytes", "a hole of NUL bytes where lines may have been", offset)
        if text:
            try:
                rows.extend(_rows(jsonl.load(text), parsed, offset))
            except (ValueError, RecursionError, AttributeError) as error:
                kind = "bad_line" if line.endswith(b"\n") else "torn_line"
                parsed.note(kind, f"not an array of events: {str(error)[:100]}", offset)
        offset += len(line)
    parsed.bytes_read = offset
    emit(rows, parsed.metrics)
    zeros = sum(value == 0 for value in parsed.metrics.value)
    detail = "ClearML stores NaN and infinities as 0.0: this source cannot show them, and a zero may be one"
    parsed.note("nonfinite_lost", detail, 0, max(zeros, 1))


def _rows(events: Any, parsed: Parsed, offset: int) -> Iterable[Row]:
    """One row for each step of an array; events that are no scalars (plots, images) are counted."""
    rows: dict[int, Row] = {}
    if not isinstance(events, list):
        raise ValueError("not an array")
    for event in events:
        step, value = event.get("iter"), number(event.get("value"))
        if event.get("type") != _SCALAR:
            parsed.note("not_a_number", "an event that is no scalar", offset)
        elif not isinstance(step, int) or abs(step) >= INT64 or value is None:
            parsed.note("bad_event", "a scalar without step or number", offset)
        else:
            moment = event.get("timestamp")
            wall = moment / 1000 if isinstance(moment, (int, float)) else None
            key = "/".join(str(event[part]) for part in ("metric", "variant") if event.get(part))
            kind: ValueKind | None = "clamped" if value[0] == 0 else value[1]
            rows.setdefault(step, Row(step, wall_time=wall)).values.append((key, value[0], kind))
    return rows.values()
