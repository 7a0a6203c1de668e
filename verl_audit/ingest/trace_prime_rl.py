"""prime-rl's `rollouts/step_<N>/train/{all,effective}/traces.jsonl`, with `token_exports/` where they were enabled.

A line is an episode: traces of a prompt whose messages form a tree; each path from root to leaf is one sample. What
`effective` of step N holds was trained at step N by version N - 1; what only `all` holds was not: it failed, or it is
not told why (stale, filtered and surplus look alike). A policy span gives the versions at dispatch and completion.
A token export has no name in common with an episode: they are joined where the tokens are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_audit.ingest.model import Parsed
from verl_audit.ingest.trace_json import Row, flags, floats, key_of, listed, micros, real, rows_of, text, whole
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.trace.write import to_table

NAME = re.compile(r"(?:^|.*/)rollouts/step_\d{1,9}/(train|eval)/(?:all|effective)/traces\.jsonl")
EXPORT = re.compile(r"(?:^|.*/)token_exports/step_\d{1,9}/rank_\d+\.jsonl")
_STEP = re.compile(r"step_(\d{1,9})")
Id = tuple[str, str]
"""Ids of an episode and of a trace in it."""


def sources(path: Path, notes: Parsed) -> list[TraceSource]:
    """One source: the `rollouts` directory, as an episode may be completed in one step and trained in another."""
    steps, rows = _steps(path), 0
    for step in steps:
        for kind in ("effective", "all"):
            rows += sum(1 for _ in rows_of(_file(path, step, kind), notes))
    exported = (path.parent / "token_exports").is_dir()
    logs = ("behave_logp", "theta_logp") if exported else ("behave_logp",)
    return [TraceSource(path, "prime_rl", has_log_probs=logs, rows=rows, fates=("trained", "failed", "unknown"))]


def _steps(path: Path) -> list[int]:
    found = [int(m[1]) for p in path.iterdir() if (m := _STEP.fullmatch(p.name)) and (p / "train").is_dir()]
    return sorted(found)


def _file(path: Path, step: int, kind: str) -> Path:
    return path / f"step_{step}" / "train" / kind / "traces.jsonl"


def _episodes(path: Path, step: int, kind: str) -> Iterator[Row]:
    file = _file(path, step, kind)
    if file.is_file():
        yield from rows_of(file, Parsed(path, "trace_prime_rl"))  # bad lines are told by `sources`


def parts(source: TraceSource, notes: Parsed, *, tokens: bool) -> Iterator[pa.Table]:
    """One piece a step: what it trained, then what arrived in it and was never trained."""
    steps = _steps(source.path)
    trained = {
        _id(episode, trace)
        for step in steps
        for episode in _episodes(source.path, step, "effective")
        for trace in _traces(episode)
    }
    groups = dict[str, int]()
    for step in steps:
        exports = _exports(source.path, step, notes) if tokens else {}
        rows: list[Row] = []
        for kind in ("effective", "all"):
            for episode in _episodes(source.path, step, kind):
                rows += _rows(episode, step, kind, trained, groups, exports, tokens)
        yield to_table(rows)


def _id(episode: Row, trace: Row) -> Id:
    return text(episode.get("id")) or "", text(trace.get("id")) or ""


def _traces(episode: Row) -> list[Row]:
    return [trace for trace in listed(episode.get("traces")) if isinstance(trace, dict)]


def _rows(
    episode: Row,
    step: int,
    kind: str,
    trained: set[Id],
    groups: dict[str, int],
    exports: dict[tuple[Any, ...], Row],
    tokens: bool,
) -> list[Row]:
    group = text(_get(episode, "group", "id")) or text(episode.get("id"))
    made: list[Row] = []
    if group is None:
        return made
    base = _episode(episode, step, kind)
    for trace in _traces(episode):
        if kind == "all" and _id(episode, trace) in trained:
            continue
        session = groups[group] = groups.get(group, -1) + 1
        for turn, path in enumerate(_branches(listed(trace.get("nodes")))):
            made.append({"group": group, "session": session, "turn": turn, **base, **_trace(trace, base["fate"])})
            made[-1].update(_branch(path, exports, tokens))
    if not _traces(episode) and kind == "all":
        made.append({"group": group, **base, "fate": "failed"})
    return made


def _episode(episode: Row, step: int, kind: str) -> Row:
    was_trained = kind == "effective"
    return {
        "fate": "trained" if was_trained else "unknown" if episode.get("ok") is True else "failed",
        "submit_step": whole(_get(episode, "run", "work", "step")),
        "decided_step": step if was_trained else None,
        "submit_version": (started := whole(_get(episode, "run", "work", "policy", "start"))),
        "first_version": started,
        "last_version": whole(_get(episode, "run", "work", "policy", "end")),
        "train_version": step - 1 if was_trained and step > 0 else None,
        "prompt_key": key_of(episode.get("task")) if "task" in episode else None,
    }


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _trace(trace: Row, fate: str) -> Row:
    rewards = trace.get("rewards")
    parts = {
        str(name): value
        for name, reward in (rewards.items() if isinstance(rewards, dict) else ())
        if (value := real(reward.get("value") if isinstance(reward, dict) else reward)) is not None
    }
    failed = fate != "trained" and trace.get("ok") is False
    return {
        "fate": "failed" if failed else fate,
        "reward": sum(parts.values()) if parts else None,
        "reward_parts": parts or None,
        "t_submit": micros(_get(trace, "timing", "start")),
        "truncated": bool(trace.get("is_truncated")) if "is_truncated" in trace else None,
    }


def _branches(nodes: list[Any]) -> list[list[Row]]:
    """Paths from a root to each leaf, in the order of the leaves."""
    nodes = [node if isinstance(node, dict) else {} for node in nodes]
    parents = [p if type(p := node.get("parent")) is int and 0 <= p < i else None for i, node in enumerate(nodes)]
    leaves = [i for i in range(len(nodes)) if i not in set(parents)]
    return [_path(nodes, parents, leaf) for leaf in leaves]


def _path(nodes: list[Row], parents: list[int | None], leaf: int) -> list[Row]:
    path, at = [], leaf
    while True:
        path.append(nodes[at])
        parent = parents[at]  # always an earlier node, so this ends
        if parent is None:
            return path[::-1]
        at = parent


def _branch(path: list[Row], exports: dict[tuple[Any, ...], Row], tokens: bool) -> Row:
    """Lengths and token lists of one sample: the response begins at the first token that was sampled."""
    ids = [t for node in path for t in listed(node.get("token_ids"))]
    mask = [f for node in path for f in flags(listed(node.get("mask")))]
    made: Row = {"turns": sum(node.get("sampled") is True for node in path)}
    if len(ids) != len(mask) or not ids:
        return made
    start = mask.index(True) if True in mask else len(mask)
    made |= {"prompt_length": start, "response_length": len(ids) - start, "loss_tokens": sum(mask)}
    if not tokens:
        return made
    sampled = [v for node in path for v in floats(listed(node.get("logprobs")))]
    made["loss_mask"] = mask[start:]
    if len(sampled) == sum(mask):
        values = iter(sampled)
        made["behave_logp"] = [next(values) if flag else 0.0 for flag in mask[start:]]
    return made | _exported(exports.get(tuple(ids)), start, len(ids))


def _exported(export: Row | None, start: int, end: int) -> Row:
    if export is None:
        return {}
    made: Row = {"loss_mask": flags(listed(export.get("loss_mask")))[start:end]}
    for name, column in (("inference_logprobs", "behave_logp"), ("trainer_logprobs", "theta_logp")):
        made[column] = floats(listed(export.get(name))[start:end])
    return made


def _exports(path: Path, step: int, notes: Parsed) -> dict[tuple[Any, ...], Row]:
    """Token exports of a step by their tokens; sequences that occur twice cannot be told apart and are left out."""
    found: dict[tuple[Any, ...], Row] = {}
    twice = set[tuple[Any, ...]]()
    for file in sorted((path.parent / "token_exports" / f"step_{step}").glob("rank_*.jsonl")):
        for row in rows_of(file, notes):
            key = tuple(t for t in listed(row.get("token_ids")) if isinstance(t, (int, float)))
            (twice.add(key) if key in found else found.setdefault(key, row))
    for key in twice:
        del found[key]
    if twice:
        notes.note("trace_export", f"step {step}: token exports of equal sequences are not joined", count=len(twice))
    return found
