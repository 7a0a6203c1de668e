"""`trajectory_trace.jsonl`: events of a recording replay buffer inside verl's v1 trainers.

`sample` and `evict` are trajectories, `evict_group` a group (one whose generation failed may have no trajectory),
`state` the depth of the buffer. One v1 step is one weight sync, and step g trains the weights of label g - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_json import Row, micros, real, rows_of, text, trajectory_key, whole
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.write import to_table

_MARKS = {"schema": "fields", "sample": "key", "evict": "key", "evict_group": "uid", "state": "inflight_ages"}
"""Events, and the field that each has."""
_FATES = {"stale": "stale", "dapo": "filtered", "failed": "failed", "surplus": "surplus"}
_TOLD = ("trained", *_FATES.values())


def is_event(row: Row) -> bool:
    """Whether a line is an event of this recorder."""
    return _MARKS.get(str(row.get("event")), "event?") in row


def sources(path: Path, notes: Parsed) -> list[TraceSource]:
    """The trajectories and the buffer depth in one file."""
    counts = {"trajectories": 0, "buffer": 0}
    for row in rows_of(path, notes):
        event = row.get("event")
        counts["buffer"] += event == "state"
        counts["trajectories"] += event in ("sample", "evict") or _is_empty_group(row)
    made = [TraceSource(path, "recorder", rows=counts["trajectories"], fates=_TOLD)]
    if counts["buffer"]:
        made.append(TraceSource(path, "recorder", "buffer", rows=counts["buffer"]))
    return made


def parts(source: TraceSource, notes: Parsed, *, tokens: bool) -> Iterator[pa.Table]:
    """All rows of one table; the format holds no tokens, `tokens` changes nothing."""
    told = Parsed(source.path, notes.format) if tokens else notes
    quiet = Parsed(source.path, notes.format)  # lines that are no events are told by `sources`
    rows = rows_of(source.path, quiet)
    if source.table == "buffer":
        yield to_table([_state(row) for row in rows if row.get("event") == "state"], "buffer")
        return
    yield to_table([made for row in rows if (made := _trajectory(row, told)) is not None])


def _is_empty_group(row: Row) -> bool:
    return row.get("event") == "evict_group" and whole(row.get("n_traj")) == 0


def _trajectory(row: Row, notes: Parsed) -> Row | None:
    event = row.get("event")
    if event in ("sample", "evict"):
        key = trajectory_key(row.get("key"))
    elif _is_empty_group(row):
        key = (name, None, None) if (name := text(row.get("uid"))) else None
    else:
        return None
    if key is None:
        notes.note("trace_group", "events without a key are left out")
        return None
    if key[0].startswith("pad"):
        return None  # rows that fill up a batch, of no prompt
    fate = "trained" if event == "sample" else _FATES.get(str(row.get("reason")), "unknown")
    submitted, decided = whole(row.get("prompt_steps")), whole(row.get("step"))
    return {
        "group": key[0],
        "session": key[1],
        "turn": key[2],
        "fate": fate,
        "reasons": [fate],
        "submit_step": submitted,
        "decided_step": decided,
        "t_decided": micros(row.get("t")),
        "submit_version": None if submitted is None else submitted - 1,
        "first_version": whole(row.get("min_global_steps")),
        "last_version": whole(row.get("max_global_steps")),
        "train_version": decided - 1 if decided is not None and fate == "trained" else None,
        "prompt_length": whole(row.get("prompt_len")),
        "response_length": whole(row.get("response_len")),
        "reward": real(row.get("reward")),
    }


def _state(row: Row) -> Row:
    return {
        "t": micros(row.get("t")),
        "step": whole(row.get("step")),
        "pending": whole(row.get("pending")),
        "running": whole(row.get("running")),
        "finished": whole(row.get("finished_left")),
        "failed": whole(row.get("failure")),
        "wait_s": real(row.get("wait_s")),
    }
