"""verl's console: `step:12 - actor/pg_loss:0.1 - ...` lines, and what else a log tells.

The text around them is hostile: Ray prefixes with colours, progress bars glued on without a separator, prints
of two threads inside one another, NUL bytes, megabytes of sampled text. A line counts only if nothing but
known prefixes stands before `step:` and some key holds a `/`; a value that may be cut off is not stored.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from verl_audit.ingest import unpack
from verl_audit.ingest.console_blocks import Block, ConfigEcho, Traceback, Validation, identity
from verl_audit.ingest.model import Event, Format, Parsed

_CHUNK = 4 << 20
_LONGEST_LINE = 64 << 20
_INT64 = 1 << 63

MARKS = (
    b"step:",
    b"Traceback (most recent call last)",
    b"Training Progress:",
    b"otal training steps:",
    b"Creating file logger at",
    b"Saving tensorboard log to",
    b"validation metrics: {",
    b"{'actor_rollout_ref':",
    b"Exception ignored in",
)
"""Lines without one of these are looked at only inside a block (config echo, traceback, validation dict)."""

ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_RAY = rb"\(\w[\w:.-]{0,120}(?: \w+)? pid=\d+(?:, ip=[^)\s]+)?\)"  # the actor's name may precede its class
_PID = rb"\(pid=\d+(?:, ip=[^)\s]+)?\)"  # before the actor has a name
_TIME = rb"\[?\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\]?(?: std(?:out|err) [FP] )?"  # kubectl, ts
_LAUNCHER = rb"\[(?:default|rank) ?\d+\]:?|\d{1,5}: |[\w.-]{1,60} +\| "  # torchrun; srun -l; docker compose
_BAR = rb"[^|]{0,80}?\d+%\|[^|]*\| *[\d.]+\w*/[\d.]+\w* \[[^\]]*\]"
_DUMPED = rb"\(?Dumped generations to \S+?\.jsonl"  # printed by another thread of the trainer
_PREFIX = re.compile(rb"[\s\0]+|" + b"|".join((_RAY, _PID, _TIME, _LAUNCHER, _DUMPED, _BAR)))
_SUFFIX = re.compile(
    rb"(?: \[repeated \d+x across cluster\](?: \(Ray dedup.*)?|\(?Dumped generations to .*)$", re.DOTALL
)
_ANY_RAY = re.compile(_RAY)
_OWNER = re.compile(rb"(?:" + _TIME + rb" ?)?((?:(?:" + _RAY + rb"|" + _PID + rb"|" + _LAUNCHER + rb") ?)*)")

_RECORD = re.compile(rb"step:(-?\d{1,19}) - ")
_WRAPPED = re.compile(rb"[A-Za-z_][\w.]*\(([^(),]+)(?:,[^()]*)?\)")
_NUMBER = re.compile(rb"True|False|[+-]?(?:nan|inf|\d+(?:\.(\d+))?([eE][+-]?\d+)?)")
_LONGEST_KEY = 300
_USUAL = re.compile(
    rb"([^\s:\0]{1,300}):(np\.\w+\()?([+-]?(?:nan|inf|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?))(?(2)\))(?: - |\Z)"
)
"""A pair in which nothing needs a second look."""
_PATIENCE = 20_000
_PROGRESS = re.compile(rb"Training Progress:[^|\r\n]{0,40}\|[^|\r\n]*\| *(\d{1,12})/(\d{1,12})")
_ANNOUNCE = re.compile(
    rb"[Tt]otal training steps: \d+|Creating file logger at [^\r\n]+|Saving tensorboard log to [^\r\n]+"
)
_ANNOUNCED = (b"otal training steps: ", b"Creating file logger at ", b"Saving tensorboard log to ")
_ROLE = re.compile(rb"\((FullyAsync(?:TaskRunner|Trainer|Rollouter)|OneStepTaskRunner|TaskRunnerV1|TaskRunner) pid=")
"""Ray's name of the process that drives the training: it tells which trainer wrote the log."""


def read(path: Path) -> list[Parsed]:
    """Read a console log, one `Parsed` a run: a configuration of another name starts the next; never raises."""
    scanner = _Scanner(Parsed(path, "verl_console"))
    try:
        with unpack.opened(path, scanner.parsed.note) as stream:
            _scan(stream, scanner)
    except OSError as error:
        scanner.parsed.note("unreadable", str(error))
    return [*scanner.done, scanner.parsed]


def read_as(path: Path, form: Format, add: Callable[[BinaryIO, Parsed], None]) -> list[Parsed]:
    """Read a console whose metrics are no step lines: `add` takes them from it, the rest is as in any console."""
    parsed = read(path)[0]
    parsed.format = form
    try:
        with unpack.opened(path) as stream:
            add(stream, parsed)
    except OSError as error:
        parsed.note("unreadable", str(error))
    return [parsed]


def read_bytes(text: bytes, path: Path) -> Parsed:
    """Read the console text of one run from memory; `path` says where it came from."""
    scanner = _Scanner(Parsed(path, "verl_console"), one_run=True)
    _scan(io.BytesIO(text), scanner)
    return scanner.parsed


def _scan(stream: BinaryIO, scanner: _Scanner) -> None:
    base = 0
    while chunk := stream.read(_CHUNK):
        if not chunk.endswith(b"\n"):
            chunk += stream.readline(_LONGEST_LINE)
        for start, stop in _lines(chunk, scanner):
            scanner.line(chunk[start:stop], base + start)
        base += len(chunk)
    scanner.finish(base)


def _lines(chunk: bytes, scanner: _Scanner) -> Iterator[tuple[int, int]]:
    """Bounds of the lines worth looking at: those with a mark, and all of them while a block is open."""
    following = {mark: chunk.find(mark) for mark in MARKS}
    pos = 0
    while pos < len(chunk):
        if not scanner.open:
            for mark, at in following.items():
                if 0 <= at < pos:
                    following[mark] = chunk.find(mark, pos)
            hit = min((at for at in following.values() if at >= 0), default=-1)
            if hit < 0:
                return
            pos = chunk.rfind(b"\n", pos, hit) + 1 or pos
        stop = chunk.find(b"\n", pos) + 1 or len(chunk)
        yield pos, stop
        pos = stop


@dataclass
class _NumberStyle:
    """Whether the floats of a log are printed with three decimals (verl before spring 2025)."""

    floats: int = 0
    exact: bool = False
    """Some float has an exponent or a fourth decimal."""
    padded: bool = False
    """Some float ends in a zero that `repr` would not print."""
    all_three: bool = True

    def see(self, number: re.Match[bytes]) -> None:
        decimals, exponent = number[1], number[2]
        if decimals is None and exponent is None:
            return
        places = len(decimals or b"")
        self.floats += 1
        self.exact |= exponent is not None or places > 3
        self.padded |= places > 1 and decimals.endswith(b"0")
        self.all_three &= places == 3

    @property
    def rounded(self) -> bool:
        return not self.exact and (self.padded or (self.all_three and self.floats >= 20))


@dataclass
class _Scanner:
    """State of one pass over a log."""

    parsed: Parsed
    one_run: bool = False
    done: list[Parsed] = field(default_factory=list)
    began: int = 0
    """Where the text of the current run begins."""
    open: list[Block] = field(default_factory=list)
    style: _NumberStyle = field(default_factory=_NumberStyle)
    progress: tuple[int, int, int] | None = None
    step: int | None = None
    patience: int = 0
    ignored: bytes | None = None
    """The process that last said "Exception ignored in"."""
    roles: set[str] = field(default_factory=set)
    names: dict[bytes, str] = field(default_factory=dict)

    def line(self, raw: bytes, offset: int) -> None:
        """Take one line with its terminator, if it has one."""
        clean = ANSI.sub(b"", raw) if b"\x1b" in raw else raw
        if b" pid=" in clean:
            self._roles(clean, offset)
        body = clean.rstrip(b"\r\n")
        segments = body.split(b"\r")
        owner = b""
        for i, segment in enumerate(segments):
            ended = i + 1 < len(segments) or len(body) < len(clean)
            if b"step:" in segment:
                self._records(segment, ended, offset)
            self._remarks(segment, offset)
            for part in _by_process(segment):
                owner = self._blocks(part, owner, offset)

    def _records(self, segment: bytes, ended: bool, offset: int) -> None:
        """The records of one line: one, or two when a killed process left its line open."""
        starts = _record_starts(segment)
        for i, match in enumerate(starts):
            last = i + 1 == len(starts)
            if last and ended and self._usual_record(int(match[1]), segment[match.end() :]):
                continue
            stop = len(segment) if last else starts[i + 1].start()
            self._record(int(match[1]), _pairs(segment[match.end() : stop], ended and last), offset)

    def _usual_record(self, step: int, text: bytes) -> bool:
        """Take a line of usual pairs alone, as `_record` would; false, and nothing done, if it is another."""
        if not self.style.exact or abs(step) >= _INT64 or b"pid=" in text or _USUAL.sub(b"", text):
            return False
        row = {key: float(value) for key, _, value in _USUAL.findall(text)}
        if len(row) <= text.count(b" - ") or not any(b"/" in key for key in row):
            return False
        self.step = step
        self.parsed.metrics.next_record(step)
        self.parsed.metrics.add_row({self._name(key): value for key, value in row.items()})
        return True

    def _name(self, key: bytes) -> str:
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = _text(key)
        return name

    def _record(self, step: int, line: _Line, offset: int) -> None:
        if abs(step) >= _INT64:
            return
        if not any(b"/" in key for key, _ in line.pairs):
            if b"/" in line.tail:
                self._lost(step, line, offset)
            return
        if line.bad > len(line.pairs) or len({key for key, _ in line.pairs}) < len(line.pairs):
            # verl prints a dict: a key that comes twice shows two lines run into one another
            self.parsed.note("doubtful_line", "begins like a step line, but holds text or two lines", offset)
            return
        self.step = step
        metrics = self.parsed.metrics
        metrics.next_record(step)
        for key, number in line.pairs:
            self.style.see(number)
            text = number[0]
            value = 1.0 if text == b"True" else 0.0 if text == b"False" else float(text)
            metrics.add(key.decode("utf-8", "replace"), value)
        self._lost(step, line, offset)

    def _lost(self, step: int, line: _Line, offset: int) -> None:
        for kind, count in (("unreadable_value", line.bad), (line.cut, line.unsure)):
            if count:
                self.parsed.note(kind, f"step {step}: a value is damaged or may be cut off", offset, count)
        self.parsed.values_lost += line.bad + line.unsure

    def _remarks(self, segment: bytes, offset: int) -> None:
        if b"Training Progress:" in segment:
            for match in _PROGRESS.finditer(segment):
                self._progress(int(match[1]), int(match[2]), offset)
        for match in _ANNOUNCE.finditer(segment) if any(mark in segment for mark in _ANNOUNCED) else ():
            self.parsed.events.append(Event("announce", _text(match[0]).strip(), offset=offset))

    def _roles(self, line: bytes, offset: int) -> None:
        for match in _ROLE.finditer(line):
            role = _text(match[1])
            if role not in self.roles:
                self.roles.add(role)
                self.parsed.events.append(Event("announce", role, offset=offset))

    def _progress(self, done: int, total: int, offset: int) -> None:
        if self.progress and done < self.progress[0]:
            self._flush_progress()
        self.progress = (done, total, offset)

    def _flush_progress(self) -> None:
        """Report how far one process life came."""
        if self.progress:
            done, total, offset = self.progress
            self.parsed.events.append(Event("progress", f"{done}/{total}", done, offset))

    def _blocks(self, segment: bytes, owner: bytes, offset: int) -> bytes:
        """Feed open blocks and open new ones; returns the process the segment belongs to."""
        match = _OWNER.match(segment)
        prefix = match[1].strip() if match else b""
        owner, text = prefix or owner, segment[match.end() if match else 0 :]
        started = self._start(owner, text, offset)
        if started and not isinstance(started, Validation):
            self._close([b for b in self.open if b.owner == owner and type(b) is type(started)])
        line = _text(text) if self.open or started else ""
        self._close([b for b in self.open if b.owner == owner and b.take(line)])
        self.patience -= 1
        if not self.patience:  # a block that never ends must not keep the scan on its slow path
            self._close(list(self.open))
        if started:
            self.patience = _PATIENCE
            self.open.append(started)
            if not isinstance(started, Traceback) and started.take(line):
                self._close([started])
        if text.strip(b"\0 "):
            self.ignored = owner if b"Exception ignored in" in text else None
        return owner

    def _start(self, owner: bytes, text: bytes, offset: int) -> Block | None:
        if text.startswith(b"Traceback (most recent call last)"):
            return Traceback(owner, offset, self.ignored == owner)
        if text.startswith(b"{'actor_rollout_ref':"):
            return ConfigEcho(owner, offset)
        if b"validation metrics: {" in text:
            return Validation(owner, offset, self.step)
        return None

    def _close(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.open.remove(block)
            block.emit(self.parsed)
            if isinstance(block, ConfigEcho) and not self.one_run:
                self._turn(block.offset)

    def _turn(self, offset: int) -> None:
        """Start the next run when the configuration just read names another one."""
        names = [identity(dict(c.tree)) for c in self.parsed.configs[-2:]]
        if len(names) < 2 or not all(n.experiment for n in names) or names[0] == names[1]:
            return
        following = Parsed(self.parsed.path, self.parsed.format, identity=names[1])
        following.configs.append(self.parsed.configs.pop())
        self.parsed.identity = names[0]
        self._end(offset)
        self.done.append(self.parsed)
        self.parsed, self.began, self.step = following, offset, None
        self.style, self.progress, self.roles = _NumberStyle(), None, set()

    def _end(self, offset: int) -> None:
        self._flush_progress()
        if self.style.rounded:
            self.parsed.metrics.mark_rounded()
        self.parsed.bytes_read = offset - self.began

    def finish(self, size: int) -> None:
        """Close what is open at the end of the log, which has `size` bytes."""
        self._close(list(self.open))
        self._end(size)


def _by_process(segment: bytes) -> list[bytes]:
    """A segment cut where the prefix of another process stands inside it (its newline came too late)."""
    marks = segment.count(b" pid=")
    if not marks or (marks == 1 and _ANY_RAY.match(segment)):
        return [segment]
    starts = [m.start() for m in _ANY_RAY.finditer(segment)]
    cuts = [0, *(s for s in starts if not _only_prefixes(segment, s)), len(segment)]
    return [segment[a:b] for a, b in pairwise(cuts)]


def _record_starts(segment: bytes) -> list[re.Match[bytes]]:
    """Where `step:N - ` opens a record, as opposed to ending a key such as `training/global_step:N`."""
    found: list[re.Match[bytes]] = []
    for match in _RECORD.finditer(segment):
        if found:
            piece = segment[found[-1].end() : match.start()].rpartition(b" - ")[2]
            if (b":" in piece or b"pid=" in piece) and not piece[-1:].isalpha() and piece[-1:] not in b"_/.@-":
                found.append(match)
        elif _only_prefixes(segment, match.start()):
            found.append(match)
    return found


def _only_prefixes(segment: bytes, stop: int) -> bool:
    return after_prefixes(segment, stop) == stop


def after_prefixes(segment: bytes, stop: int) -> int:
    """Where the known prefixes (Ray, launchers, times, progress bars) at the start of a segment end."""
    pos = 0
    while pos < stop and (part := _PREFIX.match(segment, pos, stop)):
        pos = part.end()
    return pos


@dataclass
class _Line:
    """The pairs of one step line, and how many could not be used."""

    pairs: list[tuple[bytes, re.Match[bytes]]] = field(default_factory=list)
    bad: int = 0
    unsure: int = 0
    cut: str = "torn_line"
    tail: bytes = b""
    """The last pair of a line without end."""


def _pairs(text: bytes, ended: bool) -> _Line:
    """`key:value - key:value`; the last pair of a line without end is unsure (12 may be 12.75 cut off)."""
    line = _Line()
    text, hole, rest = text.partition(b"\0")
    if hole:  # what stood in the hole may be the rest of this value and the beginning of another line
        line.cut, ended = "nul_bytes", False
        line.unsure = rest.count(b" - ")
    pieces = (_SUFFIX.sub(b"", text) if ended else text).split(b" - ")
    if not ended:
        line.tail = pieces.pop().strip()
        line.unsure += bool(line.tail)
    held = b""
    for piece in pieces:
        if b":" not in piece:
            held += piece + b" - "  # a key may contain the separator
            continue
        key, _, value = (held + piece).rpartition(b":")
        held = b""
        number = _number(value.strip())
        if number and key.strip() and len(key) <= _LONGEST_KEY and b"pid=" not in key:
            line.pairs.append((key.strip(), number))
        else:
            line.bad += 1
    line.bad += bool(held.strip(b" -"))
    return line


def _number(text: bytes) -> re.Match[bytes] | None:
    """A number as Python prints it, bare or as `np.float64(...)`."""
    wrapped = _WRAPPED.fullmatch(text)
    return _NUMBER.fullmatch(wrapped[1] if wrapped else text)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
