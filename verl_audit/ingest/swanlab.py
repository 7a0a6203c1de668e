"""SwanLab's log, `run-<id>.swanlab` (format 2, SwanLab 0.10): scalars, and the console text of the process.

A second value for a key and step is not in this file; SwanLab drops it here and keeps it in `logs/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from verl_audit.ingest import recorded
from verl_audit.ingest.framing import HEADER, payloads
from verl_audit.ingest.model import Identity, Parsed
from verl_audit.ingest.rows import Row, emit
from verl_audit.ingest.wire import DOUBLE, Value, WireError, as_bytes, as_float, as_int, as_text, fields, signed

MAGIC = b":SWL\xd6\xe1"
_VERSION = 2
_SHORTEST_CUT = 500
_START, _SCALAR, _LOG = 10, 13, 16


@dataclass
class _Log:
    """What has been read so far of one file."""

    scalars: Parsed
    row: Row | None = None
    """The log call that is being read."""
    lines: list[bytes] = field(default_factory=list)
    """Console lines; NUL for one that is lost."""


def read(path: Path) -> list[Parsed]:
    """Scalars of a log, and what its console text tells, if anything; never raises."""
    log = _Log(Parsed(path, "swanlab"))
    try:
        with path.open("rb") as stream:
            emit(_read_stream(stream, log), log.scalars.metrics)
            log.scalars.bytes_read = stream.tell()
    except OSError as error:
        log.scalars.note("unreadable", str(error))
    output = _console(path, log.lines)
    output.identity = log.scalars.identity
    useful = output.metrics.records or output.events or output.configs
    return [log.scalars, output] if useful else [log.scalars]


def _console(path: Path, lines: list[bytes]) -> Parsed:
    """What the console text tells. SwanLab keeps only the first 1024 characters of a line (or 500 to 4096)."""
    longest = max(map(_length, lines), default=0)
    cut = {i for i, line in enumerate(lines) if longest >= _SHORTEST_CUT and _length(line) == longest}
    # a NUL tells the console reader that the rest of the line is missing
    text = b"".join(line + (b"\0\n" if i in cut else b"\n") for i, line in enumerate(lines))
    output = recorded.read_text(text, path)
    output.format = "swanlab_output"
    if cut:
        detail = f"SwanLab cuts console lines after {longest} characters: values behind are only in its scalars"
        output.note("cut_lines", detail, 0, len(cut))
    return output


def _length(line: bytes) -> int:
    return len(line.decode("utf-8", "replace"))


def _read_stream(stream: BinaryIO, log: _Log) -> Iterator[Row]:
    note = log.scalars.note
    header = stream.read(HEADER)
    if header[: len(MAGIC)] != MAGIC:
        note("bad_header", "empty file" if not header else "not a SwanLab file header", 0)
    elif len(header) == HEADER and header[-1] != _VERSION:
        note("unknown_version", f"format {header[-1]} is not known, only {_VERSION}: nothing is read", 0)
        return
    if len(header) < HEADER:
        return
    for offset, payload in payloads(stream, note):
        if not payload:
            log.lines.append(b"\0")
            continue
        before = log.row
        try:
            _record(payload, log)
        except (WireError, ValueError) as error:
            note("bad_record", str(error), offset)
        if before is not None and log.row is not before:
            yield before
    if log.row is not None:
        yield log.row


def _record(payload: bytes, log: _Log) -> None:
    for number, value in fields(payload):
        if number == _SCALAR:
            _scalar(dict(fields(as_bytes(value))), log)
        elif number == _LOG:
            log.lines.append(as_bytes(dict(fields(as_bytes(value))).get(1, b"")))
        elif number == _START:
            start = dict(fields(as_bytes(value)))
            project, name, run = (as_text(start[part]) if part in start else None for part in (1, 4, 10))
            log.scalars.identity = Identity(project, name, run, _time(start.get(12)))


def _scalar(record: dict[int, Value], log: _Log) -> None:
    """proto3 leaves out zeros: a missing step is 0, and so is a missing number."""
    key = as_text(record.get(1, b""))
    step = signed(record.get(2, 0))
    value = dict(fields(as_bytes(record.get(5, b""))))
    wall = _time(record.get(4))
    content = as_float(value[1], DOUBLE) if 1 in value else 0.0
    if log.row is None or log.row.step != step or log.row.wall_time != wall:
        log.row = Row(step, wall_time=wall)
    log.row.values.append((key, content, None))


def _time(message: Value | None) -> float | None:
    if message is None:
        return None
    parts = dict(fields(as_bytes(message)))
    return (as_int(parts.get(1, 0)) + as_int(parts.get(2, 0)) / 1e9) or None
