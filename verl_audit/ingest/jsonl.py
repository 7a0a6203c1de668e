"""Metric rows as JSON lines, as slime, prime-rl, NeMo-RL and many scripts write them.

A row is an object with a step under one of the usual names and numbers beside it, nested ones joined by `/`.
Rows of samples, traces and generated text also hold a step; what tells them is text, lists of tokens, and many
rows of one shape at one step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_audit.ingest import unpack
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.rows import STEP_KEYS, Row, emit, flatten, number, step_of

_TEXT_KEYS = {
    "input",
    "inputs",
    "output",
    "outputs",
    "prompt",
    "prompts",
    "completion",
    "completions",
    "response",
    "responses",
    "messages",
    "text",
    "content",
    "token_ids",
    "input_ids",
    "uid",
    "sample_id",
    "task_id",
    "event",
    "traces",
    "nodes",
    "trajectory",
    "trajectory_id",
    "question",
    "answer",
}
_LONGEST_TEXT = 200
_ROWS_A_STEP = 8
"""More rows of one shape at one step than this are samples, not log calls."""
_ENVELOPES = ("metrics", "data", "logs")
_TIMES = ("_timestamp", "timestamp", "time")
_PRIME_RL = {"time/wait_for_batch", "time/wait_for_policy"}
_OTHER_STEPS = ("global_step", "training/global_step", "trainer/global_step", "train/global_step")


def refusal(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the first rows of a file are no metrics; None if they are."""
    stepped = [row for row in rows if step_of(row) is not None]
    if not stepped or 2 * len(stepped) < len(rows):
        return "JSON of a kind that is not known"
    if any(not _TEXT_KEYS.isdisjoint(row) or _is_text(row.values()) for row in stepped):
        return "JSON rows of text or samples, no metrics"
    if not any(_has_metric(row) for row in stepped):
        return "JSON rows with a step and no numbers"
    shapes = Counter((step_of(row), frozenset(row)) for row in stepped)
    if max(shapes.values()) > _ROWS_A_STEP:
        return "JSON rows of samples (many of one shape at one step), no metrics"
    return None


def _is_text(values: Iterable[object]) -> bool:
    return any(isinstance(v, list) or (isinstance(v, str) and len(v) > _LONGEST_TEXT) for v in values)


def _has_metric(row: Mapping[str, Any]) -> bool:
    return any(key not in STEP_KEYS and number(value) is not None for key, value in flatten(row))


def read(path: Path) -> list[Parsed]:
    """Read a file of metric rows; never raises."""
    parsed = Parsed(path, "jsonl")
    try:
        with unpack.opened(path, parsed.note) as stream:
            add_objects(objects(stream, parsed), parsed)
    except OSError as error:
        parsed.note("unreadable", str(error))
    return [parsed]


def objects(stream: BinaryIO, parsed: Parsed) -> Iterable[tuple[int, dict[str, Any]]]:
    """Offset and content of every line that is a JSON object; other lines are noted."""
    offset = 0
    for line in stream:
        if b"\0" in line:
            parsed.note("nul_bytes", "a hole of NUL bytes where lines may have been", offset)
        for piece in line.split(b"\0"):  # runs of NUL are left by crashes on network file systems
            if not piece.strip():
                continue
            try:
                row = load(piece)
            except (ValueError, RecursionError) as error:
                kind = "bad_line" if line.endswith(b"\n") else "torn_line"
                parsed.note(kind, f"not JSON: {str(error)[:100]}", offset)
                continue
            if isinstance(row, dict):
                yield offset, row
            else:
                parsed.note("bad_line", "not a JSON object", offset)
        offset += len(line)
    parsed.bytes_read = offset


def load(text: bytes) -> Any:
    """JSON as other writers leave it: bare NaN and long integers, which orjson refuses, are read too."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


@dataclass
class _Nulls:
    """Nulls of a file, whose meaning only the whole file tells.

    Where rows leave out what they lack, a written null was a value: NaN or an infinity. Where all rows have the
    same keys it may as well be a gap in a table.
    """

    shapes: set[frozenset[str]] = field(default_factory=set)
    places: list[tuple[str, Row, int]] = field(default_factory=list)
    """Key, row and offset."""

    def settle(self, parsed: Parsed) -> None:
        """Store those that were values, and count all."""
        numeric, ragged = set(parsed.metrics.keys), len(self.shapes) > 1
        for key, row, offset in self.places:
            if ragged and key in numeric:
                parsed.metrics.add_later(row.place, row.step, key, math.nan, "nonfinite_unknown")
                detail = "null stands for NaN or an infinity, which this format cannot tell apart"
                parsed.note("nonfinite_unknown", detail, offset)
            else:
                parsed.note("null_value", "null may be NaN, an infinity or no value: not stored", offset)


def add_objects(items: Iterable[tuple[int, dict[str, Any]]], parsed: Parsed) -> None:
    """Add rows given as objects to the metrics of `parsed`."""
    nulls = _Nulls()
    emit(_rows(items, parsed, nulls), parsed.metrics)
    nulls.settle(parsed)
    if not _PRIME_RL.isdisjoint(parsed.metrics.keys):
        parsed.note("nonfinite_dropped", "prime-rl leaves NaN and infinities out of this file: a gap may be one", 0)


def _rows(items: Iterable[tuple[int, dict[str, Any]]], parsed: Parsed, nulls: _Nulls) -> Iterator[Row]:
    for offset, item in items:
        found = step_of(item)
        if found is None:
            parsed.note("no_step", "a row without a step", offset)
            continue
        step, step_key = found
        row = Row(step, wall_time=_wall_time(item))
        for key, value in _leaves(item, step_key):
            if value is None:
                nulls.places.append((key, row, offset))
            else:
                _take(row, key, value, parsed, offset)
        if step_key == "_step" and any(k in _OTHER_STEPS and v != step for k, v, _ in row.values):
            parsed.step_kind = "counter"
        nulls.shapes.add(frozenset(item))
        yield row


def _leaves(item: Mapping[str, Any], step_key: str) -> Iterable[tuple[str, object]]:
    for key, value in item.items():
        if key == step_key or key in _TIMES or (key.startswith("_") and not isinstance(value, dict)):
            continue
        if isinstance(value, dict):
            if "_type" not in value:  # media objects of a tracker
                yield from flatten(value, "" if key in _ENVELOPES else f"{key}/")
        else:
            yield key, value


def _take(row: Row, key: str, value: object, parsed: Parsed, offset: int) -> None:
    if not row.take(key, value):
        parsed.note("not_a_number", f"{key} holds text, a list or a table, which is no metric", offset)


def _wall_time(item: Mapping[str, Any]) -> float | None:
    for key in _TIMES:
        value = item.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 1e9 < value < 1e10:
            return float(value)
    return None
