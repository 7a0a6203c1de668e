"""Console text that a tracker recorded: whose step lines it holds is told by its content."""

from __future__ import annotations

import io
from pathlib import Path

from verl_audit.ingest import areal, console, dict_console
from verl_audit.ingest.model import Parsed


def read_text(text: bytes, path: Path) -> Parsed:
    """What recorded text tells; lines without a step are left to the tracker's own history."""
    parsed = console.read_bytes(text, path)
    if not len(parsed.metrics) and areal.has_mark(text):
        areal.add_tables(io.BytesIO(text), parsed)
    elif not len(parsed.metrics) and dict_console.has_mark(text):
        printed = Parsed(path, "dict_console")
        dict_console.add_lines(io.BytesIO(text), printed)
        if printed.step_kind == "logged":
            parsed.metrics = printed.metrics
            parsed.problems.extend(printed.problems)
            parsed.values_lost += printed.values_lost
    return parsed
