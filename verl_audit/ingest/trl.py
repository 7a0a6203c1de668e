"""`trainer_state.json` of TRL and other trainers built on transformers: the whole log history of a run.

Every checkpoint holds one, each with all the history before it: the one with the highest step tells all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_audit.ingest import unpack
from verl_audit.ingest.model import Identity, Parsed
from verl_audit.ingest.rows import INT64, Row, emit, flatten

NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*(\d{1,18})')
_LARGEST = 1 << 30


def is_state(head: bytes) -> bool:
    """Whether JSON is the state of a trainer."""
    return b'"log_history"' in head and head.lstrip(b"\0 \r\n\t").startswith(b"{")


def run_directory(path: Path) -> Path:
    """The output directory a state belongs to, be it in a checkpoint or beside them."""
    return path.parent.parent if _CHECKPOINT.fullmatch(path.parent.name) else path.parent


def newest(paths: Sequence[Path]) -> Path:
    """Of the states of one run, the one that went furthest; a damaged one counts by the step it still tells."""
    return max(paths, key=lambda path: (_global_step(path), str(path)))


def _global_step(path: Path) -> int:
    try:
        with path.open("rb") as stream:
            text = stream.read(_LARGEST)
    except OSError:
        return -1
    history = text.find(b'"log_history"')
    found = _GLOBAL_STEP.search(text[:history] if history >= 0 else text) or _GLOBAL_STEP.search(text)
    return int(found[1]) if found else -1


def read(path: Path) -> list[Parsed]:
    """Read the log history; never raises."""
    parsed = Parsed(path, "trl_state", identity=Identity(experiment=run_directory(path.absolute()).name or None))
    text = b""
    try:
        with unpack.opened(path, parsed.note) as stream:
            text = stream.read(_LARGEST)
    except OSError as error:
        parsed.note("unreadable", str(error))
    parsed.bytes_read = len(text)
    emit(_rows(_history(text, parsed), parsed), parsed.metrics)
    return [parsed]


def _history(text: bytes, parsed: Parsed) -> Iterable[Any]:
    """The entries of the log history; of a damaged file those before the damage."""
    try:
        tree = json.loads(text)  # takes the bare NaN that Python writes
        entries = tree.get("log_history") if isinstance(tree, dict) else None
        if isinstance(entries, list):
            return entries
        parsed.note("no_history", "there is no log_history in it", 0)
        return []
    except (ValueError, RecursionError) as error:
        decoded = text.decode("utf-8", "replace")
        start = _HISTORY.search(decoded)
        parsed.note("torn_file", f"damaged JSON: {str(error)[:100]}; the whole entries before it are read", 0)
        return _salvaged(decoded, start.end()) if start else []


def _salvaged(text: str, pos: int) -> Iterable[Any]:
    decoder = json.JSONDecoder()
    while (pos := _skip(text, pos)) < len(text):
        try:
            entry, pos = decoder.raw_decode(text, pos)
        except (ValueError, RecursionError):
            return
        yield entry


def _skip(text: str, pos: int) -> int:
    while pos < len(text) and text[pos] in " ,\r\n\t":
        pos += 1
    return pos


def _rows(entries: Iterable[Any], parsed: Parsed) -> Iterable[Row]:
    for index, entry in enumerate(entries):
        step = entry.get("step") if isinstance(entry, dict) else None
        if type(step) is not int or abs(step) >= INT64:
            parsed.note("no_step", "an entry without a step", index)
            continue
        row = Row(step)
        for key, value in flatten(entry):
            if key == "step":
                continue
            if not row.take(key, value):
                parsed.note("not_a_number", f"{key} holds text, a list or null, which is no metric", index)
        yield row
