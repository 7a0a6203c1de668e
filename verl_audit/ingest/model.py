"""What a reader hands on: metric rows in columns, and everything it noticed beside them.

Readers know a file format and nothing of frameworks: keys stay as written, values stay as logged, and
whatever could not be read is a `Problem` with file and byte offset, never an exception.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from verl_audit.ingest.trace_source import TraceSource

import numpy as np

ValueKind = Literal["finite", "nan", "inf", "nonfinite_unknown", "clamped", "rounded"]
"""How far a stored value can be believed.

`finite`, `nan`, `inf` are exact (the sign of an infinity is in the value). `nonfinite_unknown`: the format
wrote NaN and infinity alike (verl's file logger writes `null`); stored as NaN. `clamped`: the format replaced
an infinity by a large number (MLflow), or the number may stand for a NaN or an infinity (a zero of ClearML).
`rounded`: finite, but printed with few decimals, so an exact 0 means nothing.
"""
KINDS: tuple[ValueKind, ...] = ("finite", "nan", "inf", "nonfinite_unknown", "clamped", "rounded")
_KIND_ID = {kind: i for i, kind in enumerate(KINDS)}

StepKind = Literal["logged", "counter"]
"""`logged`: the framework's own step. `counter`: the tracker's running number of log calls (wandb `_step`)."""

Format = Literal[
    "verl_console",
    "verl_jsonl",
    "wandb",
    "wandb_output",
    "wandb_export",
    "wandb_chart",
    "wandb_parquet",
    "tensorboard",
    "trl_state",
    "dict_console",
    "areal_console",
    "mlflow",
    "mlflow_files",
    "swanlab",
    "swanlab_output",
    "trackio",
    "clearml",
    "jsonl",
    "hydra",
    "dump",
    "trace",
    "trace_recorder",
    "trace_nemo_rl",
    "trace_prime_rl",
    "trace_areal",
]


@dataclass(frozen=True)
class Problem:
    """Something in the input that could not be read or believed; reading went on after it."""

    file: str
    kind: str
    detail: str
    offset: int | None = None
    count: int = 1


@dataclass(frozen=True)
class Event:
    """Something a log tells beside metrics: a traceback, the last progress mark, an announced path."""

    kind: Literal["traceback", "progress", "validation_text", "announce"]
    detail: str
    step: int | None = None
    offset: int | None = None


@dataclass(frozen=True)
class Identity:
    """What a source says about which run it belongs to; every part may be unknown."""

    project: str | None = None
    experiment: str | None = None
    run_id: str | None = None
    started: float | None = None
    """Start of the process that wrote it, Unix seconds."""


@dataclass(frozen=True)
class ConfigFound:
    """A configuration tree as found, with `${...}` left as written when the file does not resolve it."""

    tree: Mapping[str, Any]
    origin: Literal["hydra", "console", "wandb", "tracker"]
    overrides: tuple[str, ...] = ()


@dataclass
class MetricBuffer:
    """Metric rows in columns; one `add` per value, one `next_record` per log call.

    `record` numbers the log calls of the source from 0; `segment` counts process lives in the source from 0
    (a step that falls starts a new one, or a file boundary does).
    """

    keys: list[str] = field(default_factory=list)
    key_id: array[int] = field(default_factory=lambda: array("i"))
    record: array[int] = field(default_factory=lambda: array("q"))
    segment: array[int] = field(default_factory=lambda: array("i"))
    step: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))
    kind_id: array[int] = field(default_factory=lambda: array("b"))
    wall_time: array[float] = field(default_factory=lambda: array("d"))
    _ids: dict[str, int] = field(default_factory=dict)
    _row_keys: list[str] = field(default_factory=list)
    _row_ids: array[int] = field(default_factory=lambda: array("i"))
    """The keys of the last row and their numbers."""
    _record: int = -1
    _segment: int = 0
    _last_step: int | None = None
    _wall: float = math.nan

    def next_record(self, step: int, wall_time: float | None = None, restart: bool | None = None) -> None:
        """Open the next log call at `step`. A step below the last one starts a new segment, unless `restart` tells."""
        fell = self._last_step is not None and step < self._last_step
        if fell if restart is None else restart:
            self._segment += 1
        self._last_step = step
        self._record += 1
        self._wall = math.nan if wall_time is None else wall_time

    def add(self, key: str, value: float, kind: ValueKind | None = None) -> None:
        """Append one value to the open record; `kind` is derived from the value unless given."""
        if self._last_step is None:
            raise ValueError("next_record comes before add")
        index = self._ids.get(key)
        if index is None:
            index = self._ids[key] = len(self.keys)
            self.keys.append(key)
        if kind is None:
            kind = "finite" if math.isfinite(value) else "nan" if math.isnan(value) else "inf"
        self.key_id.append(index)
        self.record.append(self._record)
        self.segment.append(self._segment)
        self.step.append(self._last_step)
        self.value.append(value)
        self.kind_id.append(_KIND_ID[kind])
        self.wall_time.append(self._wall)

    def add_row(self, row: Mapping[str, float]) -> None:
        """Append all values of a log call at once, which is faster than one by one; the result is the same.

        TypeError or OverflowError, and nothing is appended, when a value is no number or too large for one.
        """
        values = array("d", row.values())
        if self._last_step is None or not math.isfinite(sum(values)):  # NaN and infinity survive a sum
            for key, value in zip(row, values, strict=True):
                self.add(key, value)
            return
        keys, n = list(row), len(values)
        if keys != self._row_keys:  # rows of one writer name the same keys in the same order
            if not row.keys() <= self._ids.keys():
                for key in (k for k in keys if k not in self._ids):
                    self._ids[key] = len(self.keys)
                    self.keys.append(key)
            self._row_keys, self._row_ids = keys, array("i", map(self._ids.__getitem__, keys))
        self.key_id.extend(self._row_ids)
        self.record.extend(array("q", (self._record,)) * n)
        self.segment.extend(array("i", (self._segment,)) * n)
        self.step.extend(array("q", (self._last_step,)) * n)
        self.value.extend(values)
        self.kind_id.frombytes(bytes(n))
        self.wall_time.extend(array("d", (self._wall,)) * n)

    @property
    def place(self) -> tuple[int, int]:
        """Record and segment that are open."""
        return self._record, self._segment

    def add_later(self, place: tuple[int, int], step: int, key: str, value: float, kind: ValueKind) -> None:
        """Append a value to an earlier record, given by its `place` and step."""
        now = self._record, self._segment, self._last_step, self._wall
        (self._record, self._segment), self._last_step, self._wall = place, step, math.nan
        self.add(key, value, kind)
        self._record, self._segment, self._last_step, self._wall = now

    def resume(self, records: int) -> None:
        """Take over columns that were filled from elsewhere: `records` log calls."""
        self._ids = {key: index for index, key in enumerate(self.keys)}
        self._record = records - 1
        self._segment = self.segment[-1] if self.segment else 0
        self._last_step = self.step[-1] if self.step else None

    def mark_rounded(self) -> None:
        """Turn every finite value into a rounded one (sources that print three decimals)."""
        finite, rounded = _KIND_ID["finite"], _KIND_ID["rounded"]
        self.kind_id = array("b", (rounded if k == finite else k for k in self.kind_id))

    @property
    def kinds(self) -> set[ValueKind]:
        """Which kinds of values there are."""
        return {KINDS[i] for i in np.flatnonzero(np.bincount(np.frombuffer(self.kind_id, np.int8)))} if self else set()

    @property
    def lives(self) -> int:
        """Number of process lives; one where there is no value."""
        return int(np.frombuffer(self.segment, np.int32).max()) + 1 if self else 1

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step of the values, if there are any."""
        if not self:
            return None
        steps = np.frombuffer(self.step, np.int64)
        return int(steps.min()), int(steps.max())

    @property
    def records(self) -> int:
        """Number of log calls read."""
        return self._record + 1

    def __len__(self) -> int:
        """Number of values."""
        return len(self.value)


@dataclass(frozen=True)
class Sample:
    """One row of a generation dump: lengths are in characters, text is not kept."""

    split: Literal["train", "validation"]
    step: int
    uid: str | None
    score: float | None
    input_chars: int | None
    output_chars: int | None
    padding: bool = False
    data_source: str | None = None


@dataclass
class Parsed:
    """Everything one reader got out of one file; a file may yield several (wandb history, its console)."""

    path: Path
    format: Format
    metrics: MetricBuffer = field(default_factory=MetricBuffer)
    step_kind: StepKind = "logged"
    float32: bool = False
    sampled: bool = False
    """The source holds a selection of the logged rows: spikes may lie between them, gaps mean nothing."""
    identity: Identity = Identity()
    configs: list[ConfigFound] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    traces: list[TraceSource] = field(default_factory=list)
    """Tables of trajectories it holds, whose rows are read later."""
    problems: list[Problem] = field(default_factory=list)
    bytes_read: int = 0
    counted_steps: array[int] | None = None
    """Steps as the reader counted them, where those in `metrics` were taken from another source."""
    values_lost: int = 0
    """Values known to have been written and not recovered (a torn last pair, a bad block counts as a problem)."""

    def note(self, kind: str, detail: str, offset: int | None = None, count: int = 1) -> None:
        """Report a problem; repeats of a kind are counted on its first occurrence."""
        for i, seen in enumerate(self.problems):
            if seen.kind == kind:
                self.problems[i] = replace(seen, count=seen.count + count)
                return
        self.problems.append(Problem(str(self.path), kind, detail, offset, count))
