"""NeMo-RL's `train_data_step<N>.jsonl`: every trajectory of a training step with its tokens and both log-probs.

Lists run over prompt and response, padded to the longest of the batch (`input_lengths` cuts them); the response
begins at the first token the loss counts. Log-prob i is of token i. The weights that sampled a token are not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_json import Row, flags, floats, key_of, listed, real, rows_of, whole
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.write import to_table

NAME = re.compile(r"train_data_step(\d{1,9})\.jsonl")
_LISTS = ("generation_logprobs", "prev_logprobs")


def sources(path: Path, notes: Parsed) -> list[TraceSource]:
    """One source for each step's file in a directory."""
    files = [path] if path.is_file() else [p for p in path.iterdir() if NAME.fullmatch(p.name) and p.is_file()]
    made = []
    for file in sorted(files, key=_step):
        rows = sum(1 for _ in rows_of(file, notes))
        logs = ("behave_logp", "prox_logp")
        made.append(TraceSource(file, "nemo_rl", has_log_probs=logs, rows=rows, fates=("trained",)))
    return made


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def parts(source: TraceSource, notes: Parsed, *, tokens: bool) -> Iterator[pa.Table]:
    """All rows of one step."""
    step, seen = _step(source.path), dict[str, int]()
    quiet = Parsed(source.path, notes.format)  # bad lines are told by `sources`
    told = quiet if tokens else notes
    yield to_table([_trajectory(row, step, seen, told, tokens) for row in rows_of(source.path, quiet)])


def _trajectory(row: Row, step: int, seen: dict[str, int], notes: Parsed, tokens: bool) -> Row:
    """Trajectories of one prompt in one step are one group: the file does not name it."""
    ids = listed(_one(row.get("token_ids")))
    end = whole(_one(row.get("input_lengths")))
    end = len(ids) if end is None or not 0 <= end <= len(ids) else end
    mask = flags(listed(_one(row.get("token_loss_mask"))))[:end]
    start = mask.index(True) if True in mask else end
    in_loss = real(_one(row.get("sample_loss_mask"))) != 0
    counted = [flag and in_loss for flag in mask[start:]]
    prompt = key_of(ids[:start])
    group = f"{step}:{prompt}"
    session = seen[group] = seen.get(group, -1) + 1
    made: Row = {
        "group": group,
        "session": session,
        "fate": "trained",
        "decided_step": step,
        "train_version": step - 1 if step > 0 else None,
        "prompt_length": start,
        "response_length": end - start,
        "loss_tokens": sum(counted),
        "reward": real(_one(row.get("rewards"))),
        "advantage": _advantage(row, counted, start, end),
        "prompt_key": prompt,
    }
    if len(mask) != end:
        notes.note("trace_lengths", "token_loss_mask is shorter than the tokens: no length can be told")
        return made | {"loss_tokens": None, "prompt_length": None, "response_length": None}
    if tokens:
        made["loss_mask"] = counted
        for name, column in zip(_LISTS, ("behave_logp", "prox_logp"), strict=True):
            values = listed(_one(row.get(name)))
            made[column] = floats(values[start:end]) if values else None
    return made


def _one(value: Any) -> Any:
    """Values are written as batches of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _advantage(row: Row, counted: list[bool], start: int, end: int) -> float | None:
    """The mean over tokens of the loss, or the one value written for the trajectory."""
    value = _one(row.get("advantages"))
    if not isinstance(value, list):
        return real(value)
    kept = [v for v, flag in zip(floats(value[start:end]), counted, strict=False) if flag]
    return sum(kept) / len(kept) if kept else None
