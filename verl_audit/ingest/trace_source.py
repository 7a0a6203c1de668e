"""What names one file (or set of files) of a trace, before anything in it is believed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_audit.ingest.model import Problem
from verl_audit.trace.schema import Table

TraceFormat = Literal["parquet", "recorder", "verl_dump", "nemo_rl", "prime_rl", "areal"]
"""`parquet` is the trace schema itself; the others are dumps of other tools that are mapped onto it."""


@dataclass(frozen=True)
class TraceSource:
    """One table of one run in one file, or in the files of one dump."""

    path: Path
    format: TraceFormat
    table: Table = "trajectories"
    updates_per_version: int | None = None
    """Optimizer updates between two published versions; None: not stated."""
    run: str | None = None
    """The run its rows name."""
    only_run: bool = False
    """The file holds rows of other runs too: those are left out."""
    has_log_probs: tuple[str, ...] = ()
    rows: int = 0
    """Rows (parquet) or records (dumps) in it, before any is left out."""
    problems: tuple[Problem, ...] = ()
    fates: tuple[str, ...] | None = None
    """Fates that the format can tell; None: any. A dump of trained rows alone says nothing of what was lost."""
    version_offset: int = 0
    """Taken off every train_version, so that the first batch of the run is on-policy."""
    dropped: frozenset[int] = frozenset()
    """Positions of rows that a later source or row of the run replaces."""
