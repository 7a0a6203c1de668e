"""wandb's transaction log, `run-<id>.wandb` (0.15 to 0.31), read without wandb.

History rows are metrics, the `run` record holds the configuration and the identity, and `output_raw` holds
the console text: a killed run may have printed steps that never became history, so that text is read as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from verl_audit.ingest import recorded
from verl_audit.ingest.framing import HEADER, payloads
from verl_audit.ingest.model import ConfigFound, Identity, Parsed
from verl_audit.ingest.wire import (
    DOUBLE,
    Value,
    WireError,
    as_bytes,
    as_float,
    as_int,
    as_text,
    fields,
    signed,
    zigzag,
)

MAGIC = b":W&B\xe1\xbe\x00"
_HISTORY, _CONFIG, _OUTPUT_RAW, _RUN = 2, 5, 13, 17
_JSON_TAG = b"\x82\x01"  # field 16, length-delimited
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|-?Infinity|NaN")
_DIGITS = b"0123456789+-.eE"
_BOOLS = {b"true": 1.0, b"false": 0.0}
_OTHER_STEPS = ("global_step", "training/global_step", "train/global_step")
_INT64 = 1 << 63


@dataclass
class _Log:
    """What has been read so far of one file."""

    history: Parsed
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[bytes, str] = field(default_factory=dict)
    """Keys of history items by the bytes that hold them."""
    hidden: set[str] = field(default_factory=set)
    """Those of them that begin with an underscore."""
    output: dict[int, bytearray] = field(default_factory=lambda: {0: bytearray(), 1: bytearray()})
    """Console text by stream (0 stderr, 1 stdout): pieces of the two interleave inside lines."""


def read(path: Path) -> list[Parsed]:
    """History of a `.wandb` file, and what its console text tells, if anything."""
    log = _Log(Parsed(path, "wandb"))
    try:
        with path.open("rb") as stream:
            _read_stream(stream, log)
            log.history.bytes_read = stream.tell()
    except OSError as error:
        log.history.note("unreadable", str(error))
    if log.config:
        log.history.configs.append(ConfigFound(log.config, "wandb"))
    output = _console(path, log.output)
    if output is None:
        return [log.history]
    output.identity = log.history.identity
    return [log.history, output]


def _read_stream(stream: BinaryIO, log: _Log) -> None:
    note = log.history.note
    header = stream.read(HEADER)
    if header != MAGIC:
        note("bad_header", "empty file" if not header else "not a wandb file header", 0)
    if len(header) < HEADER:
        return
    for offset, payload in payloads(stream, note):
        if not payload:
            # a NUL tells the console reader that text is missing here
            for text in log.output.values():
                text.append(0)
            continue
        try:
            _record(payload, log)
        except (WireError, ValueError, RecursionError) as error:
            note("bad_record", str(error), offset)


def _record(payload: bytes, log: _Log) -> None:
    for number, value in fields(payload):
        if number == _HISTORY:
            _history(as_bytes(value), log)
        elif number == _OUTPUT_RAW:
            record = dict(fields(as_bytes(value)))
            log.output[1 if record.get(1) else 0] += as_bytes(record.get(3, b""))
        elif number == _CONFIG:
            _update_config(as_bytes(value), log.config)
        elif number == _RUN:
            _run(as_bytes(value), log)


def _history(record: bytes, log: _Log) -> None:
    """One history row: numbers become metrics; `_step`, `_timestamp` and other underscore keys do not."""
    usual, parsed = _usual_row(record, log), log.history
    row, step = usual or _row(record)
    logged = row.get("_step")
    if isinstance(logged, float) and abs(logged) < _INT64:
        step = int(logged)
    wall = row.get("_timestamp")
    parsed.metrics.next_record(step, wall if isinstance(wall, float) else None)
    if usual:
        for key in log.hidden:
            row.pop(key, None)
    scalars = row if usual else dict(_scalars(row))
    parsed.metrics.add_row(scalars)
    if any(scalars.get(key, step) != step for key in _OTHER_STEPS):
        parsed.step_kind = "counter"


def _row(record: bytes) -> tuple[dict[str, Any], int]:
    """Contents by key, and the step, of a HistoryRecord."""
    found = list(fields(record))
    row = dict(_item(as_bytes(value)) for number, value in found if number == 1)
    return row, _step(found)


def _usual_row(record: bytes, log: _Log) -> tuple[dict[str, Any], int] | None:
    """The same for the usual record, several times as fast; None if it is another.

    Usual: items of one key part and a number as short JSON text, then the step. Cut at the tag of the text, a piece is
    the text of one item, with its length before it, and the head of the next item.
    """
    head, *pieces = record.split(_JSON_TAG)
    if not pieces or not all(pieces):
        return None
    heads = [head, *[piece[piece[0] + 1 :] for piece in pieces]]
    rest = heads.pop()
    texts = [piece[1 : piece[0] + 1] for piece in pieces]
    if b"".join(texts).translate(None, _DIGITS):
        return None
    try:
        row: dict[str, Any] = dict(zip(map(log.names.__getitem__, heads), map(float, texts), strict=True))
    except KeyError:
        return _usual_row(record, log) if _learn(heads, log) else None
    except ValueError:
        return None
    found = list(fields(rest))
    if any(number == 1 for number, _ in found):
        return None
    return row, _step(found)


def _learn(heads: Iterable[bytes], log: _Log) -> bool:
    """Take up the keys of new heads; false if there is one that is not usual."""
    for head in heads:
        if head not in log.names:
            key = _head_key(head)
            if key is None or key.endswith("._type"):  # of a media object, whose numbers are no metrics
                return False
            log.names[head] = key
            if key.startswith("_"):
                log.hidden.add(key)
    return True


def _head_key(head: bytes) -> str | None:
    """The key in the head of an item (its tag and length, those of the one key part, the key), if that is all."""
    usual = len(head) > 4 and head[0] == 0x0A and head[1] < 0x80 and head[2] in b"\n\x12" and head[3] == len(head) - 4
    return head[4:].decode("utf-8", "replace") if usual and head[3] < 0x80 else None


def _step(found: Iterable[tuple[int, Value]]) -> int:
    message = next((as_bytes(value) for number, value in found if number == 2), b"")
    return next((signed(v) for n, v in fields(message) if n == 1), 0)


def _item(item: bytes) -> tuple[str, Any]:
    """Key and content of a history or config item; numbers and booleans are floats."""
    size = item[1] if len(item) > 1 else 0x80
    if size < 0x80 and item[0] in b"\n\x12" and item[2 + size : 4 + size] == _JSON_TAG:
        rest = item[4 + size :]  # the usual shape, spelled out for speed: one key part, then short JSON text
        if rest and rest[0] < 0x80 and len(rest) == 1 + rest[0]:
            return item[2 : 2 + size].decode("utf-8", "replace"), _json_value(rest[1:])
    key, nested, text, typed = "", [], None, None
    for number, value in fields(item):
        if number == 1:
            key = as_text(value)
        elif number == 2:
            nested.append(as_text(value))
        elif number == 16:
            text = as_bytes(value)
        elif number == 4:
            typed = float(as_int(value) != 0)
        elif number == 5:
            typed = float(zigzag(value))
        elif number == 6:
            typed = as_float(value, DOUBLE)
    return ".".join(nested) or key, typed if text is None else _json_value(text)


def _json_value(text: bytes) -> Any:
    """A number as float, an object as dict; anything else, which is no metric, as None."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if text[:1] == b"{":
        return json.loads(text, parse_int=float)
    return _BOOLS.get(text)


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a row, nested ones under dotted keys; parts of media objects (`_type`) are left out."""
    media = {key[: -len("_type")] for key in row if key.endswith("._type")}
    found: list[tuple[str, float]] = []
    for key, value in row.items():
        if key.startswith("_") or (media and any(prefix in media for prefix in _prefixes(key))):
            continue
        if isinstance(value, float):
            found.append((key, value))
        elif isinstance(value, dict) and "_type" not in value:
            found.extend((f"{key}.{k}", v) for k, v in _scalars(value))
        elif isinstance(value, bool):
            found.append((key, float(value)))
    return found


def _prefixes(key: str) -> list[str]:
    return list(accumulate(f"{part}." for part in key.split(".")[:-1]))


def _update_config(record: bytes, tree: dict[str, Any]) -> None:
    """Apply a ConfigRecord: `update` items carry JSON text under a key or a path of keys."""
    for number, value in fields(record):
        if number != 1:
            continue
        item = [(n, v) for n, v in fields(as_bytes(value))]
        path = [as_text(v) for n, v in item if n == 2] or [as_text(v) for n, v in item if n == 1]
        text = next((as_bytes(v) for n, v in item if n == 16), None)
        if not path or path[0] == "_wandb" or text is None:
            continue
        branch = tree
        for part in path[:-1]:
            child = branch.setdefault(part, {})
            if not isinstance(child, dict):
                child = branch[part] = {}
            branch = child
        branch[path[-1]] = json.loads(text)


def _run(record: bytes, log: _Log) -> None:
    """Identity and configuration of a RunRecord; a later record adds to an earlier one."""
    found: dict[int, bytes] = {n: v for n, v in fields(record) if isinstance(v, bytes)}
    known = log.history.identity

    def text(number: int, default: str | None) -> str | None:
        return found[number].decode("utf-8", "replace") if found.get(number) else default

    log.history.identity = Identity(
        project=text(3, known.project),
        experiment=text(8, known.experiment),
        run_id=text(1, known.run_id),
        started=_timestamp(found[17]) if 17 in found else known.started,
    )
    if 4 in found:
        _update_config(found[4], log.config)


def _timestamp(message: bytes) -> float | None:
    parts = dict(fields(message))
    seconds = as_int(parts.get(1, 0)) + as_int(parts.get(2, 0)) / 1e9
    return seconds or None


def _console(path: Path, output: dict[int, bytearray]) -> Parsed | None:
    """What the recorded console text tells; offsets are positions in that text, stdout before stderr."""
    stdout, stderr = output[1], output[0]
    seam = b"" if stdout.endswith(b"\n") or not stdout else b"\0\n"  # an open line must not look finished
    parsed = recorded.read_text(bytes(stdout + seam + stderr if stderr else stdout), path)
    parsed.format = "wandb_output"
    return parsed if parsed.metrics.records or parsed.events or parsed.configs else None
