"""AReaL's `rollout/<version>/<task_id>.jsonl`, joined on task_id with `session_tracer/<role>/sessions-r<rank>.jsonl`.

The dump has lengths and versions, rejected trajectories included; the sessions have the fates and the times. A prompt
ends where the loss begins. What was accepted is taken as trained, though the last of a run may not have been; what a
workflow returned nothing for is unknown. `head_version` is -1 where prompts are stamped so, and then unknown. No step
is recorded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_json import Row, listed, micros, real, rows_of, text, whole
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.write import to_table

DUMP = re.compile(r"(?:^|.*/)rollout/\d{1,9}/[^/]+\.jsonl")
SESSIONS = re.compile(r"(?:^|.*/)session_tracer/[^/]+/sessions-r\d+\.jsonl")
_FATES = {
    "accepted": "trained",
    "rejected": "filtered",
    "failed": "failed",
    "pending": "in_flight",
}
_KEPT = frozenset({"task_id", "sample_idx", "seqlen", "prompt_len", "head_version", "tail_version", "reward"})


def sources(path: Path, notes: Parsed) -> list[TraceSource]:
    """One source: the directory that holds `rollout` and `session_tracer`."""
    rows = sum(1 for file in [*_dumps(path), *_sessions(path)] for _ in rows_of(file, notes))
    fates = (*_FATES.values(), "unknown") if _sessions(path) else ("unknown",)
    return [TraceSource(path, "areal", rows=rows, fates=fates)]


def _dumps(path: Path) -> list[Path]:
    return sorted(
        (path / "rollout").glob("[0-9]*/*.jsonl"), key=lambda p: (_number(p.parent.name), _number(p.stem), p.name)
    )


def _number(name: str) -> int:
    return int(name) if re.fullmatch(r"\d{1,18}", name, re.ASCII) else -1


def _sessions(path: Path) -> list[Path]:
    return sorted((path / "session_tracer").glob("*/sessions-r*.jsonl"))


def parts(source: TraceSource, notes: Parsed, *, tokens: bool) -> Iterator[pa.Table]:
    """All rows in one piece; the dump holds no tokens."""
    told = Parsed(source.path, notes.format) if tokens else notes
    quiet = Parsed(source.path, notes.format)  # bad lines are told by `sources`
    dumped: dict[str, list[Row]] = defaultdict(list)
    for file in _dumps(source.path):
        for row in rows_of(file, quiet):
            if (task := text(row.get("task_id"))) is not None:
                dumped[task].append({k: v for k, v in row.items() if k in _KEPT})
    sessions = _by_task(source.path, quiet, told)
    rows = [
        made
        for task in [*dumped, *(t for t in sessions if t not in dumped)]
        for made in _task(task, dumped.get(task, []), sessions.get(task, []))
    ]
    yield to_table(rows)


def _by_task(path: Path, quiet: Parsed, notes: Parsed) -> dict[str, list[Row]]:
    """Sessions of each task; a task number that several ranks gave out names no one task, and is left out."""
    found: dict[str, list[Row]] = defaultdict(list)
    for file in _sessions(path):
        for row in rows_of(file, quiet):
            if (task := text(row.get("task_id"))) is not None:
                found[task].append(row)
    several = [t for t, rows in found.items() if len({(str(r.get("rank")), str(r.get("role"))) for r in rows}) > 1]
    for task in several:
        del found[task]
    if several:
        notes.note("trace_sessions", "task numbers given out by several ranks: not joined", count=len(several))
    return found


def _task(task: str, dumped: list[Row], sessions: list[Row]) -> list[Row]:
    """Trajectories of a task with the session of each; sessions that left no trajectory are rows without a length."""
    ordered = sorted(sessions, key=lambda row: whole(row.get("session_id")) or 0)
    if not dumped:
        return [{"group": task, "session": i, **_fate(row)} for i, row in enumerate(ordered)]
    paired = ordered if len(ordered) == len(dumped) else [_common(ordered)] * len(dumped)
    return [
        {"group": task, **_sample(row, i), **_fate(of)} for i, (row, of) in enumerate(zip(dumped, paired, strict=True))
    ]


def _common(sessions: list[Row]) -> Row:
    """What all sessions of a task say, where they cannot be told apart."""
    statuses = {str(row.get("status")) for row in sessions}
    return {"status": statuses.pop()} if len(statuses) == 1 else {}


def _sample(row: Row, index: int) -> Row:
    total, prompt = whole(row.get("seqlen")), whole(row.get("prompt_len"))
    head, tail = whole(row.get("head_version")), whole(row.get("tail_version"))
    length = total - prompt if total is not None and prompt is not None else None
    session = whole(row.get("sample_idx"))
    return {
        "session": index if session is None else session,
        "first_version": head if head is not None and head >= 0 else None,
        "last_version": tail if tail is not None and tail >= 0 else None,
        "prompt_length": prompt,
        "response_length": length,
        "loss_tokens": length,
        "reward": real(row.get("reward")),
    }


def _fate(session: Row) -> Row:
    fate = _FATES.get(str(session.get("status")), "unknown")
    if session.get("reason") == "returned_none":
        fate = "unknown"
    finalized = micros(session.get("finalized_ts"))
    phases = session.get("phases")
    calls = listed(phases.get("generate")) if isinstance(phases, dict) else []
    ends = [end for call in calls if isinstance(call, dict) and (end := micros(call.get("end_ts"))) is not None]
    return {
        "fate": fate,
        "reasons": [fate],
        "t_submit": micros(session.get("submit_ts")),
        "t_done": max(ends, default=None),
        "t_enqueue": finalized if fate == "trained" else None,
        "t_decided": finalized if fate != "trained" else None,
    }
