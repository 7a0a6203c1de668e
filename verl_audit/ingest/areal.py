"""AReaL's console: `Train step N/M done.`, then a table drawn with box characters, pairs of key and value a row.

Numbers are printed with five significant digits. Steps are counted from 0 as AReaL's trackers do, so that
`Train step 1` is step 0; when one step prints several tables, each is a tracker step of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from verl_audit.ingest import console
from verl_audit.ingest.model import Parsed

_DONE = re.compile(rb"Train step (\d{1,12})/(\d{1,12}) done\.")
_TABLE = re.compile(rb"Stats \((\d{1,6})/(\d{1,6})\):")
_BAR, _END = "│".encode(), "╘".encode()
_NUMBER = re.compile(rb"[+-]?(?:nan|inf|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_KEY = re.compile(rb"[\w./@:+()-]{1,300}")
_LONGEST_LINE = 16 << 20


def has_mark(text: bytes) -> bool:
    """Whether text holds the line of a finished step, and a table."""
    return b"Train step " in text and _BAR in text and _DONE.search(text) is not None


def read(path: Path) -> list[Parsed]:
    """Read such a console: metrics from its tables, tracebacks and the like as in any console; never raises."""
    return console.read_as(path, "areal_console", add_tables)


def add_tables(stream: BinaryIO, parsed: Parsed) -> None:
    """Add the tables of a console's text to what was read from it otherwise."""
    reader = _Reader(parsed)
    offset = 0
    while line := stream.readline(_LONGEST_LINE):
        reader.line(console.ANSI.sub(b"", line), offset)
        offset += len(line)
    if len(parsed.metrics):
        parsed.metrics.mark_rounded()
        parsed.note("few_digits", "numbers are printed with five significant digits", 0)


@dataclass
class _Reader:
    """State between lines: the step whose tables are being read, and the tracker step they are logged at."""

    parsed: Parsed
    done: int | None = None
    logged: int = -1
    """The last tracker step, which AReaL never uses twice."""
    open: bool = False
    recorded: bool = False
    keys: set[bytes] = field(default_factory=set)
    tables: int = 0
    """How many tables of the step have begun."""

    def line(self, line: bytes, offset: int) -> None:
        if match := _DONE.search(line):
            step = int(match[1]) - 1
            again = self.done is not None and step <= self.done
            self.logged = step if again else max(step, self.logged + 1)
            self.done, self.open, self.recorded, self.tables = step, True, False, 0
        elif self.done is None:
            return
        elif match := _TABLE.search(line):
            self._table(int(match[1]), offset)
        elif _END in line:
            self.open = False
        elif self.open and b"\0" in line:  # a line that named the next step may be in the hole
            self.open = False
            self._lost("nul_bytes", "a hole in a table: its rest is not read", offset, 1)
        elif self.open and _BAR in line:
            self._row(line, offset)

    def _table(self, index: int, offset: int) -> None:
        self.tables += 1
        self.open, self.recorded = index == self.tables, False
        if not self.open:
            self.parsed.note("unplaced_table", "a table without the line that tells its step", offset)
        elif index > 1:
            self.logged += 1

    def _row(self, line: bytes, offset: int) -> None:
        """`│ key │ value │ key │ value │`; what stands before the first bar is a prefix."""
        _, *cells = line.rstrip(b"\r\n").split(_BAR)
        rest = cells.pop().strip(b"\0 ") if cells else b""
        if rest:
            self._lost("torn_line", "a row of the table is cut off", offset, 1)
        for key, value in zip(cells[::2], cells[1::2], strict=False):
            self._pair(key.strip(), value.strip(), offset)

    def _pair(self, key: bytes, value: bytes, offset: int) -> None:
        if not key and not value:
            return
        if not _KEY.fullmatch(key) or not _NUMBER.fullmatch(value):
            self._lost("unreadable_value", "a cell of the table is no key or no number", offset, 1)
            return
        if not self.recorded:
            self.parsed.metrics.next_record(self.logged)
            self.recorded = True
            self.keys.clear()
        if key in self.keys:  # rows of another table, whose head is missing
            self.open = False
            self._lost("doubtful_table", "a key comes twice in one table: the rest of it is not read", offset, 1)
        if self.open:
            self.keys.add(key)
            self.parsed.metrics.add(key.decode(), float(value))

    def _lost(self, kind: str, detail: str, offset: int, count: int) -> None:
        self.parsed.note(kind, detail, offset, count)
        self.parsed.values_lost += count
