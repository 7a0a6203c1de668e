"""verl's `rollout_data/<step>.jsonl`: the trained trajectories of each step, without versions.

It holds text and no token count, so response_length is unknown and no count of tokens includes these rows. Text is
not kept: prompts are told apart by a hash. In v1, `uid` is `{uid}_{session}_{index}`; older rows have none, and one
prompt's trajectories of one step are one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from verl_audit.ingest import dumps
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_json import Row, key_of, rows_of, trajectory_key, whole
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.write import to_table


def read(path: Path) -> list[Parsed]:
    """Read the dump for its lengths and scores, and name it as a trace if it is of training. Never raises."""
    (parsed,) = dumps.read(path)
    rows = sum(s.split == "train" for s in parsed.samples)
    if rows:
        parsed.traces.append(TraceSource(path, "verl_dump", rows=rows, fates=("trained",)))
    return [parsed]


def parts(source: TraceSource, notes: Parsed, *, tokens: bool) -> Iterator[pa.Table]:
    """One piece a file, in order of steps; the format holds no tokens."""
    del tokens
    files = sorted(dumps.files(source.path)) if source.path.is_dir() else [(dumps.step_of(source.path), source.path)]
    quiet = Parsed(source.path, notes.format)  # bad lines are told by the reader of the dump
    for step, file in files:
        seen: dict[str, int] = {}
        rows = (_trajectory(row, step, seen) for row in rows_of(file, quiet))
        yield to_table([row for row in rows if row is not None])


def _trajectory(row: Row, step: int, seen: dict[str, int]) -> Row | None:
    if not ("input" in row or "output" in row):
        return None
    prompt = key_of(row.get("input"))
    key = trajectory_key(row.get("uid"))
    if key is None:
        group = f"{step}:{prompt}"
        seen[group] = seen.get(group, -1) + 1
        key = group, seen[group], None
    if key[0].startswith("pad"):
        return None  # rows that fill up a batch, of no prompt
    written = whole(row.get("step"))
    decided = whole(step) if written is None else written
    return {
        "group": key[0],
        "session": key[1],
        "turn": key[2],
        "fate": "trained",
        "decided_step": decided,
        "train_version": decided - 1 if "uid" in row and decided else None,
        "reward": dumps.score(row.get("score")),
        "prompt_key": prompt,
    }
