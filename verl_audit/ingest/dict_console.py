"""Consoles that print one Python dict a line: TRL (`{'loss': 0.1, ..., 'epoch': 2.0}`), slime (`perf 3: {...}`),
OpenRLHF (`Global step 3: {...}`).

slime and OpenRLHF print a step before the dict. TRL prints none: its lines are numbered in order, so that they
line up with nothing else. A dict cut short counts up to its last comma.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from verl_audit.ingest import console
from verl_audit.ingest.model import Parsed, ValueKind
from verl_audit.ingest.rows import INT64, Row, emit, number

_LOGGER = re.compile(rb"(?:\[[^\]\n]{0,60}\]|[\w./-]{1,80}:\d+(?: -)?|(?:INFO|DEBUG|WARNING)[ :-]*|[\s-])*")
_HEAD = re.compile(rb"([A-Za-z_][\w/-]{0,40}|Global step) (\d{1,18}): (?=\{['\"])")
_KEY = re.compile(rb"\s*(['\"])((?:(?!\1)[^\\\n]){1,300})\1: ")
_VALUE = re.compile(rb"(?:(?:np\.)?[a-z]+\d*\()?([^,{}\[\]()'\"]{1,60}?)\)?\s*(?=[,}])")
_TEXT = re.compile(rb"(?:'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")\s*(?=[,}])")
_NESTED = re.compile(rb"(?:[\[({](?:[^\[\](){}]|[\[({][^\[\](){}]*[\])}])*[\])}])\s*(?=[,}])")
_NUMBER = re.compile(rb"[+-]?(?:nan|inf|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_MARKS = (b"'epoch': ", b'"epoch": ', b": {'", b': {"')
_TRIED = 200
_LONGEST_LINE = 16 << 20


def has_mark(text: bytes) -> bool:
    """Whether text holds a line of one of these consoles."""
    return any(_segment(segment) for mark in _MARKS for segment in _segments_with(mark, text))


def _segments_with(mark: bytes, text: bytes) -> Iterator[bytes]:
    at = -1
    for _ in range(_TRIED):  # sampled text may be full of braces
        at = text.find(mark, at + 1)
        if at < 0:
            return
        stop = text.find(b"\n", at) + 1 or len(text)
        line = text[text.rfind(b"\n", 0, at) + 1 : stop]
        yield from (segment for segment in console.ANSI.sub(b"", line).rstrip(b"\r\n").split(b"\r") if mark in segment)
        at = stop - 1


@dataclass
class _Dict:
    """One printed dict: its pairs, and what was wrong with it."""

    head: tuple[str, int] | None
    """`perf 3:` before it."""
    pairs: list[tuple[str, float]] = field(default_factory=list)
    others: int = 0
    torn: bool = False
    rounded: bool = False

    def get(self, *keys: str) -> float | None:
        return next((value for key, value in self.pairs if key in keys), None)


def read(path: Path) -> list[Parsed]:
    """Read such a console: metrics from its dicts, tracebacks and the like as in any console; never raises."""
    return console.read_as(path, "dict_console", add_lines)


def add_lines(stream: BinaryIO, parsed: Parsed) -> None:
    """Add the dicts of a console's text to what was read from it otherwise."""
    reader = _Reader(parsed)
    emit(_rows(stream, reader), parsed.metrics)
    reader.finish()


def _rows(stream: BinaryIO, reader: _Reader) -> Iterator[Row]:
    offset = 0
    while line := stream.readline(_LONGEST_LINE):
        if b"\0" in line:
            reader.parsed.note("nul_bytes", "a hole of NUL bytes where lines may have been", offset)
        if b"{'" in line or b'{"' in line:
            yield from reader.line(line, offset)
        offset += len(line)


_STEPS = ("step", "global_step")


@dataclass
class _Numbers:
    """Numbers for lines without a step.

    A line that adds to the one before it (same epoch, other keys) shares its number, and after a fall of the
    epoch the count goes on from the earlier line of that epoch.
    """

    epochs: list[float] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def give(self, found: _Dict) -> int:
        epoch, keys = found.get("epoch"), {key for key, _ in found.pairs} - {"epoch"}
        last = self.epochs[-1] if self.epochs else None
        if last is not None and (epoch is None or epoch == last) and self.keys.isdisjoint(keys):
            self.keys |= keys
            return len(self.epochs)
        if last is not None and epoch is not None and epoch < last:
            del self.epochs[bisect_left(self.epochs, epoch) :]
        self.epochs.append(last if epoch is None and last is not None else epoch or 0.0)
        self.keys = set(keys)
        return len(self.epochs)


@dataclass
class _Reader:
    """State between lines; lines that carry no step are numbered."""

    parsed: Parsed
    numbers: _Numbers = field(default_factory=_Numbers)
    highest: dict[str, int] = field(default_factory=dict)
    counted: int = 0

    def line(self, raw: bytes, offset: int) -> Iterator[Row]:
        clean = console.ANSI.sub(b"", raw)
        for segment in clean.rstrip(b"\r\n").split(b"\r"):
            found = _segment(segment)
            if found is None:
                continue
            if len({key for key, _ in found.pairs}) < len(found.pairs):
                self.parsed.note("doubtful_line", "a key comes twice: two lines run into one another", offset)
            else:
                yield self._row(found, offset)

    def _row(self, found: _Dict, offset: int) -> Row:
        if found.torn:
            self.parsed.note("torn_line", "a dict is damaged or cut off: read up to its last comma", offset)
            self.parsed.values_lost += 1
        if found.others:
            self.parsed.note(
                "not_a_number", "a value is text, a list or None, which is no metric", offset, found.others
            )
        step = self._step(found)
        kind: ValueKind | None = "rounded" if found.rounded else None
        return Row(step, [(k, v, kind if math.isfinite(v) else None) for k, v in found.pairs if k not in _STEPS])

    def _step(self, found: _Dict) -> int:
        if found.head:
            name, step = found.head
            self.highest[name] = max(step, self.highest.get(name, 0))
            return step
        own = found.get(*_STEPS)
        if own is not None and abs(own) < INT64 and own == int(own):
            return int(own)
        self.counted += 1
        return self.numbers.give(found)

    def finish(self) -> None:
        parsed = self.parsed
        if self.counted:
            parsed.step_kind = "counter"
            detail = "no step is printed: lines are numbered from 1 in order (trainer_state.json holds the steps)"
            parsed.note("steps_counted", detail, 0, self.counted)
        train, rollout = self.highest.get("step", 0), max(self.highest.get(n, 0) for n in ("rollout", "perf"))
        if rollout and train > 1.5 * rollout + 2:
            detail = f"'step' counts optimiser steps (to {train}), 'rollout' and 'perf' count rollouts (to {rollout})"
            parsed.note("two_step_axes", detail, 0)


def _segment(segment: bytes) -> _Dict | None:
    """The dict of metrics a line consists of, if it does; nothing but known prefixes may stand before it."""
    segment = segment.lstrip(b"\0").partition(b"\0")[0]  # what follows a hole may be of another line
    start = min((at for at in (segment.find(b"{'"), segment.find(b'{"')) if at >= 0), default=-1)
    if start < 0:
        return None
    pos = console.after_prefixes(segment, start)
    logger = _LOGGER.match(segment, pos, start)
    pos = logger.end() if logger else pos
    head = _HEAD.match(segment, pos)
    if (head.end() if head else pos) != start:
        return None
    found = _pairs(segment[start:], (head[1].decode(), int(head[2])) if head else None)
    return found if _is_metrics(found) else None


def _is_metrics(found: _Dict) -> bool:
    if not found.pairs or found.others > len(found.pairs):
        return False
    if found.head:
        return found.head[0] == "Global step" or any("/" in key for key, _ in found.pairs)
    if found.torn and found.get("loss", "reward") is not None:  # the epoch comes last
        return True
    return found.get("epoch") is not None and len(found.pairs) > 1


def _pairs(text: bytes, head: tuple[str, int] | None) -> _Dict:
    """Pairs up to the closing brace; a pair without a comma or brace after it may be cut off and is left out."""
    found = _Dict(head)
    pos = 1
    while key := _KEY.match(text, pos):
        value = _VALUE.match(text, key.end()) or _TEXT.match(text, key.end()) or _NESTED.match(text, key.end())
        if not value:
            break
        _add(found, key[2].decode("utf-8", "replace"), value)
        if text[value.end() : value.end() + 1] == b"}":
            return found
        pos = value.end() + 1
    found.torn = True
    return found


def _add(found: _Dict, key: str, value: re.Match[bytes]) -> None:
    text = value[1] if value.re is _VALUE else value[0].strip()
    quoted = text[:1] in (b"'", b'"')
    text = text.strip(b"'\" ") if quoted else text.strip()
    if _NUMBER.fullmatch(text):
        found.pairs.append((key, float(text)))
        found.rounded |= quoted  # transformers 5 prints numbers as text, shortened
    elif text in (b"True", b"False"):
        found.pairs.append((key, float(text == b"True")))
    elif (spelled := number(text.decode("utf-8", "replace"))) is not None:
        found.pairs.append((key, spelled[0]))
    else:
        found.others += 1
