"""Trace files from rows of numpy arrays and lists: written behind the caller's back, and never at its cost.

Rows are reduced at once (log-prob lists to sums, except for a sample), so what waits is small; a thread writes one
file a table and step. If the disk is slower than the run, rows are dropped and counted. Nothing is raised.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  pyarrow needs it, and it cannot be loaded once the interpreter ends
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import wraps
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Literal, ParamSpec
from uuid import uuid4

import numpy as np

from verl_audit.record.sums import LOG_PROBS, log_prob_sums, pairs

Row = Mapping[str, Any]
Name = Literal["trajectories", "syncs", "buffer"]
P = ParamSpec("P")

KEY_DROPPED = b"verl_audit.dropped"
"""Metadata of a file: rows lost so far by its writer. A ledger over such a trace does not close."""
KEY_SECONDS = b"verl_audit.recorder_seconds"
"""Metadata of a file: seconds that the job has waited for its recorder by then, where the recorder takes its time."""
TOKEN_LISTS = (*LOG_PROBS, "loss_mask", "expert_agreement")
ROW_BYTES = 4096
"""Taken for a row without its lists: dictionary, strings and segments of a typical row measure 2 to 4 kB."""
log = logging.getLogger("verl_audit.record")


@dataclass
class Counts:
    """What a writer did: rows written; dropped for want of room; lost to a failed write; calls that failed."""

    written: int = 0
    dropped: int = 0
    lost: int = 0
    failed: int = 0


@dataclass
class _Part:
    """Rows of one step, table by table."""

    step: int
    rows: dict[Name, list[Row]] = field(default_factory=dict)
    size: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """The method with every exception counted and, the first time, told."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            writer: Any = args[0]
            writer.counts.failed += 1
            writer.warn_once("call", f"{method.__name__.strip('_')} failed: {type(error).__name__}: {error}")

    return guarded


class TraceWriter:
    """Writes the tables of the trace schema into a directory, one file a table and step.

    No method raises, blocks on the disk, or keeps a reference to the caller's arrays. `log_prob_sample` is the share
    of groups, chosen by a hash of their name, whose token lists are kept; of all others `sums` are. `limit_bytes`
    bounds what waits for the disk. A resumed job may write into the same directory: no file is ever replaced.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        run: str | None = None,
        updates_per_version: int | None = None,
        log_prob_sample: float = 0.05,
        limit_bytes: int = 128 << 20,
    ) -> None:
        """`run` and `updates_per_version` (optimizer updates between two versions) are written into every file."""
        self.directory = Path(directory)
        self.counts = Counts()
        self.seconds: float | None = None
        """What the caller has spent on recording so far, for the files' metadata."""
        self.log_prob_sample, self.limit_bytes = log_prob_sample, limit_bytes
        self._metadata = {"run": run, "updates_per_version": updates_per_version}
        # A name of its own for each life of a job; the files of a resume sort after those before it.
        self._life = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"
        self._part, self._number = _Part(0), 0
        self._waiting: deque[_Part] = deque()
        self._standing: tuple[int, Callable[[], Iterable[Row]]] | None = None
        self._busy = 0
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._told: set[str] = set()
        atexit.register(self.close)

    @_harmless
    def trajectories(self, rows: Iterable[Row]) -> None:
        """Rows of the trajectories table. Token lists may be any array; what is kept of them is copied."""
        for row in rows:
            self._trajectory(row)

    @_harmless
    def _trajectory(self, row: Row) -> None:
        self._add("trajectories", self._reduced(row))

    @_harmless
    def syncs(self, rows: Iterable[Row]) -> None:
        """Rows of the syncs table."""
        for row in rows:
            self._add("syncs", dict(row))

    @_harmless
    def buffer(self, rows: Iterable[Row]) -> None:
        """Rows of the buffer table."""
        for row in rows:
            self._add("buffer", dict(row))

    @_harmless
    def drop(self, rows: int) -> None:
        """So many rows that the caller could not get are counted as dropped."""
        with self._turn:
            self.counts.dropped += rows

    @_harmless
    def step_done(self, step: int) -> None:
        """The rows given since the last call are those of this step: they become files now."""
        with self._turn:
            self._hand_over(int(step), int(step) + 1)

    @_harmless
    def standing(self, rows: Callable[[], Iterable[Row]], step: int) -> None:
        """Trajectories that are not decided at the end of `step`: they replace those of the call before.

        `rows` is called by the writing thread. They have one file, which is replaced whole, and the rows of a group
        that is decided later take their place when the trace is read.
        """
        with self._turn:
            if not self._closed:
                self._standing = int(step), rows
                self._begin()

    @_harmless
    def close(self, timeout: float = 60.0) -> None:
        """Write what waits, for at most `timeout` seconds. Called at exit by itself; what comes later is dropped."""
        atexit.unregister(self.close)
        with self._turn:
            if not self._closed and len(self._part):
                self._hand_over(self._part.step, self._part.step)
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        if self.counts.dropped or self.counts.lost:
            self.warn_once("end", f"rows not recorded: {self.counts.dropped} dropped, {self.counts.lost} not writable")

    def warn_once(self, kind: str, message: str) -> None:
        """A warning of this kind, the first time only."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("verl-audit recorder: %s (said once; training goes on)", message)

    def keeps(self, group: str) -> bool:
        """Whether the token lists of this group are kept; the same for a group in every process and run."""
        share = int.from_bytes(blake2b(group.encode("utf-8", "replace"), digest_size=4).digest(), "big") / 2**32
        return share < self.log_prob_sample

    def _reduced(self, row: Row) -> Row:
        made = {name: value for name, value in row.items() if name not in TOKEN_LISTS}
        mask = None if row.get("loss_mask") is None else np.array(row["loss_mask"], bool)
        if mask is not None:
            made.setdefault("loss_tokens", int(mask.sum()))
        if self.keeps(str(row.get("group"))):
            kept = {name: np.array(row[name], np.float32) for name in TOKEN_LISTS if row.get(name) is not None}
            return {**made, **kept, **({} if mask is None else {"loss_mask": mask})}
        found = [log_prob_sums(later, earlier, row, mask) for later, earlier in pairs(row)]
        sums = [*(made.get("sums") or ()), *(entry for entry in found if entry)]
        return {**made, "sums": sums} if sums else made

    def _add(self, table: Name, row: Row) -> None:
        size = ROW_BYTES + sum(row[name].nbytes for name in TOKEN_LISTS if name in row)
        with self._turn:
            waiting = self._busy + self._part.size + sum(part.size for part in self._waiting)
            if self._closed or waiting + size > self.limit_bytes:
                self.counts.dropped += 1
                self.warn_once("room", f"the disk is too slow for {self.directory}: rows are dropped and counted")
                return
            self._part.rows.setdefault(table, []).append(row)
            self._part.size += size
            if self._part.size > self.limit_bytes // 4:  # a step too large to wait for its end
                self._hand_over(self._part.step, self._part.step)

    def _hand_over(self, step: int, following: int) -> None:
        part, self._part = self._part, _Part(following)
        if not len(part) or self._closed:
            return
        part.step = step
        self._waiting.append(part)
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="verl-audit-recorder", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._busy = 0
                self._turn.wait_for(lambda: self._waiting or self._standing or self._closed)
                if not (self._waiting or self._standing):
                    return
                part = self._waiting.popleft() if self._waiting else None
                standing = None
                if part is None:
                    standing, self._standing = self._standing, None
                self._busy = part.size if part is not None else 0
            if part is not None:
                for table, rows in part.rows.items():
                    self._number += 1
                    name = f"{table}-{part.step:08d}-{self._life}-{self._number}.parquet"
                    self._write(table, rows, self.directory / name)
            elif standing is not None:
                self._write_standing(*standing)

    @_harmless
    def _write_standing(self, step: int, rows: Callable[[], Iterable[Row]]) -> None:
        path = self.directory / f"trajectories-open-{self._life}.parquet"
        most = self.limit_bytes // ROW_BYTES
        made = [self._reduced(row) for row in islice(rows(), most)]
        if len(made) == most:
            self.warn_once("open", f"only {most} of the trajectories open at step {step} are recorded")
        if made or path.exists():
            self._write("trajectories", made, path)

    def _write(self, table: Name, rows: list[Row], path: Path) -> None:
        try:
            self._write_file(table, rows, path)
            self.counts.written += len(rows)
        except Exception as error:
            self.counts.lost += len(rows)
            self.warn_once("write", f"cannot write {path}: {type(error).__name__}: {error}")
            with suppress(OSError):
                path.with_name(path.name + ".tmp").unlink(missing_ok=True)

    def _write_file(self, table: Name, rows: list[Row], path: Path) -> None:
        from verl_audit.trace.write import to_table, write  # noqa: PLC0415  pyarrow is loaded by the writing thread

        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            made = to_table(rows, table, **self._metadata)
        except (ValueError, TypeError, OverflowError) as error:
            fitting = [row for row in rows if _fits(row, table)]
            self.counts.lost += len(rows) - len(fitting)
            self.warn_once("row", f"a row of {table} does not fit the trace schema: {error}")
            rows[:] = fitting
            made = to_table(rows, table, **self._metadata)
        told = {KEY_DROPPED: str(self.counts.dropped + self.counts.lost).encode()}
        if self.seconds is not None:
            told[KEY_SECONDS] = f"{self.seconds:.6f}".encode()
        write(made.replace_schema_metadata({**made.schema.metadata, **told}), path)


def _fits(row: Row, table: Name) -> bool:
    from verl_audit.trace.write import to_table  # noqa: PLC0415

    try:
        to_table([row], table).validate(full=True)
    except (ValueError, TypeError, OverflowError):
        return False
    return True
