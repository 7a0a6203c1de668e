"""Per-trajectory traces of a simulated run in the project's trace schema.

Every trajectory gets a row with its fate. Token lists are kept for a share of the groups and sums for the rest, so
that a run stays below a few megabytes. The simulation knows all four log-prob sets; a real run may be made to look
poorer by keeping fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.errors import AuditError
from verl_audit.reference.batch import Trajectories, collect, joined
from verl_audit.reference.learner import Updated
from verl_audit.reference.loop import Run, Step, Validation
from verl_audit.reference.numerics import Floats
from verl_audit.reference.pool import Group
from verl_audit.reference.verl_metrics import prompt_lengths
from verl_audit.trace.schema import LOG_PROBS, SEGMENT, SUMS, schema
from verl_audit.trace.write import to_table, write

SETS = tuple(name.removesuffix("_logp") for name in LOG_PROBS)
EPOCH = 1_767_225_600.0
"""Simulated clock 0: 2026-01-01 00:00 UTC, seconds."""


@dataclass(frozen=True)
class TraceOptions:
    """What to record: which log-prob sets, and for which share of the groups their lists."""

    sets: tuple[str, ...] = SETS
    lists: float = 0.1


def trace_options(sets: str, lists: float) -> TraceOptions:
    """Options from text, e.g. `behave,prox`; `AuditError` for an unknown set."""
    chosen = tuple(part for part in sets.split(",") if part)
    if unknown := [name for name in chosen if name not in SETS]:
        raise AuditError(f"--trace-sets: {', '.join(unknown)}: known are {', '.join(SETS)}")
    if not 0 <= lists <= 1:
        raise AuditError(f"--trace-lists {lists}: a share from 0 to 1")
    return TraceOptions(tuple(name for name in SETS if name in chosen), lists)


@dataclass
class Traces:
    """Observer that collects rows; `write` puts them into files."""

    options: TraceOptions
    chunks: list[pa.Table] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    buffer: list[dict[str, Any]] = field(default_factory=list)
    gone: dict[tuple[str, ...], list[Trajectories]] = field(default_factory=dict)
    """Evicted since the last step, by reasons."""
    decided: dict[int, float] = field(default_factory=dict)
    """When each evicted group was."""

    # -- observer

    def validated(self, run: Run, step: int, validation: Validation) -> None:
        """Validation is not traced."""

    def discarded(self, run: Run, group: Group, reasons: list[str], step: int) -> None:
        """Copied before its rows are used again."""
        batch = collect(run.settings, run.task, run.engine, [group])
        self.gone.setdefault(tuple(reasons), []).append(batch)
        self.decided[group.number] = run.engine.now

    def stepped(self, run: Run, step: Step) -> None:
        """Evicted and trained trajectories, and what the buffer held at each look."""
        for reasons, parts in self.gone.items():
            self.chunks.append(self._table(run, joined(parts), list(reasons), step.number, None))
        self.gone = {}
        for done in step.updated:
            self.chunks.append(self._table(run, done.trajectories, ["trained"], step.number, done))
        for wait in run.buffer.counts.waits:
            self.buffer.append(self._buffer_row(run, step.number, wait))

    def synced(self, run: Run, version: int, began: float, seconds: float) -> None:
        """One row a replica."""
        times = {"t0": _time(began), "t1": _time(began + seconds), "transfer_s": seconds}
        for number, held in enumerate(run.engine.replicas):
            first = number == 0
            self.syncs.append(
                {
                    "version": version,
                    "replica": f"replica-{number}",
                    "replica_version": held.label,
                    "step": version,
                    "aborted": run.engine.aborted if first else 0,
                    "prefill_tokens": run.engine.prefilled if first else 0,
                    **times,
                }
            )

    def ended(self, run: Run) -> None:
        """What was not decided when the run ended."""
        left = [*run.buffer.finished, *run.buffer.unfinished.values()]
        if left:
            batch = collect(run.settings, run.task, run.engine, left)
            self.chunks.append(self._table(run, batch, ["in_flight"], None, None))

    def _buffer_row(self, run: Run, step: int, wait: float) -> dict[str, Any]:
        unfinished = run.buffer.unfinished.values()
        pending = sum(g.open == run.settings.group_size and not run.engine.pool.begun[g.first] for g in unfinished)
        return {
            "t": _time(run.engine.now),
            "step": step,
            "pending": pending,
            "running": len(run.buffer.unfinished) - pending,
            "finished": len(run.buffer.finished),
            "failed": 0,
            "wait_s": wait,
        }

    def write(self, out: Path, run: Run) -> None:
        """Write `trajectories`, `syncs` and `buffer` into `out`."""
        out.mkdir(parents=True)
        updates = run.settings.updates_per_sync
        kind = schema(updates_per_version=updates)
        write(pa.concat_tables(self.chunks) if self.chunks else kind.empty_table(), out / "trajectories.parquet")
        write(to_table(self.syncs, "syncs", updates_per_version=updates), out / "syncs.parquet")
        write(to_table(self.buffer, "buffer", updates_per_version=updates), out / "buffer.parquet")

    # -- rows

    def _table(
        self, run: Run, batch: Trajectories, reasons: list[str], step: int | None, done: Updated | None
    ) -> pa.Table:
        kind, n = schema(updates_per_version=run.settings.updates_per_sync), len(batch.length)
        columns = _columns(run, batch, reasons, step, done)
        if step is not None:
            decided = [self.decided.get(group.number, run.engine.now) for group in batch.groups]
            columns["t_decided"] = _times(np.repeat(decided, run.settings.group_size))
        columns |= self._log_probs(run, batch, done)
        arrays = []
        for column in kind:
            values = columns.get(column.name)
            made = values if isinstance(values, pa.Array) else _array(values, column.type, n)
            arrays.append(made)
        return pa.Table.from_arrays(arrays, schema=kind)

    def _log_probs(self, run: Run, batch: Trajectories, done: Updated | None) -> dict[str, Any]:
        """Token lists of the chosen sets for a share of the groups, sums of their differences for the others."""
        values: dict[str, Floats] = {"behave_logp": batch.behave}
        if done is not None:
            values |= {"theta_logp": done.theta, "trainer_logp": run.learner.sampled_by(batch)}
            values |= {"prox_logp": done.prox} if done.prox is not None else {}
        values = {n: values[n] for n in LOG_PROBS if n in values and n.removesuffix("_logp") in self.options.sets}
        kept = np.repeat([_kept(group.number, self.options.lists) for group in batch.groups], run.settings.group_size)
        kept &= done is not None
        made: dict[str, Any] = {name: _lists(table, batch.mask, kept, pa.float32()) for name, table in values.items()}
        if run.settings.experts and done is not None:
            same = np.stack(run.learner.agreements)[batch.source, batch.context].astype(np.float32)
            made["expert_agreement"] = _lists(same, batch.mask, kept, pa.float32())
        made["sums"] = _sums(values, batch.mask, ~kept)
        return made


def _kept(number: int, share: float) -> bool:
    """Whether group `number` is in an even sample of that share."""
    return int((number + 1) * share) > int(number * share)


def _columns(
    run: Run, batch: Trajectories, reasons: list[str], step: int | None, done: Updated | None
) -> dict[str, Any]:
    s, n = run.settings, len(batch.length)
    size, groups = s.group_size, batch.groups
    labels = np.array(run.learner.labels)
    length, ended = _written(run, batch) if reasons == ["in_flight"] else (batch.length, batch.ended)
    finished, begun = ended > 0, length > 0
    last = np.maximum(length - 1, 0)[:, None]
    prompts = prompt_lengths(s, batch.prompt_class)

    def each(values: Iterable[Any]) -> NDArray[Any]:
        return np.repeat(np.array(list(values)), size)

    reward = batch.reward.astype(np.float32)
    return {
        "group": each(f"g{group.number:06d}" for group in groups),
        "session": np.tile(np.arange(size), len(groups)),
        "fate": [reasons[0]] * n,
        "reasons": [reasons] * n,
        "submit_step": each(group.step for group in groups),
        "decided_step": None if step is None else np.full(n, step),
        "t_submit": _times(each(group.submitted for group in groups)),
        "t_first_token": _times(batch.first_token, begun),
        "t_done": _times(ended, finished),
        "t_enqueue": _times(each(group.done for group in groups), each(group.done > 0 for group in groups)),
        "submit_version": each(group.version for group in groups),
        "first_version": _masked(labels[batch.source[:, 0]], begun),
        "last_version": _masked(labels[np.take_along_axis(batch.source, last, 1)[:, 0]], begun),
        "train_version": None if done is None or step is None else np.full(n, step - 1),
        "train_minibatch": None if done is None else np.full(n, done.minibatch),
        "segments": _segments(run, batch, length, prompts, labels),
        "prompt_length": prompts,
        "response_length": length,
        "loss_tokens": length,
        "rejected_tokens": None if done is None else (batch.mask & ~done.fix.kept).sum(axis=1),
        "truncated": _masked((length == s.response_limit) & (batch.tokens[:, s.response_limit - 1] != 0), finished),
        "turns": _masked(np.ones(n, np.int64), finished),
        "reward": _masked(reward, finished),
        "advantage": None if done is None else done.advantage[:, 0],
        "prompt_key": [f"class-{c}" for c in batch.prompt_class.tolist()],
    }


def _written(run: Run, batch: Trajectories) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens of undecided trajectories so far, and when they ended; 0 for those still running or waiting."""
    size, running = run.settings.group_size, {row for _, row in run.engine.running}
    rows = np.concatenate([np.arange(g.first, g.first + size) for g in batch.groups])
    pool, now = run.engine.pool, run.engine.now
    so_far = np.floor((now - batch.begun) / batch.pace).astype(np.int64)
    busy = np.array([row in running for row in rows.tolist()])
    partly = np.clip(pool.progress[rows] + np.maximum(so_far, 0), 0, batch.length - 1)
    ended = np.where(batch.ended > 0, batch.ended, 0.0)
    return np.where(batch.ended > 0, batch.length, np.where(busy, partly, pool.progress[rows])), ended


def _segments(
    run: Run, batch: Trajectories, length: NDArray[np.int64], prompts: NDArray[np.int64], labels: NDArray[np.int64]
) -> pa.Array:
    """Runs of tokens from the same loaded weights. Times are known of the first start and the last run only."""
    place = np.arange(batch.source.shape[1])
    inside = place < length[:, None]
    new = inside.copy()
    new[:, 1:] &= batch.source[:, 1:] != batch.source[:, :-1]
    rows, starts = np.nonzero(new)
    last = np.append(rows[1:] != rows[:-1], True) if len(rows) else np.zeros(0, np.bool_)
    ends = np.where(last, length[rows], np.append(starts[1:], 0)) if len(rows) else starts
    whole = last & (batch.ended[rows] > 0)
    first = starts == 0
    t0 = np.where(first, batch.first_token[rows] - batch.pace[rows], batch.begun[rows])
    stops = np.where(whole, np.where(length[rows] == run.settings.response_limit, "length", "stop"), "abort")
    fields = {
        "version": pa.array(labels[batch.source[rows, starts]], pa.int32()),
        "start": pa.array(starts, pa.int32()),
        "length": pa.array(ends - starts, pa.int32()),
        "server": pa.array([f"replica-{r}" for r in batch.replica[rows].tolist()], pa.string()),
        "t0": _times(t0, first | last),
        "t1": _times(batch.ended[rows], whole),
        "prefill": pa.array(prompts[rows] + starts, pa.int32()),
        "stop": pa.array(stops.tolist(), pa.string()),
    }
    structs = pa.StructArray.from_arrays(list(fields.values()), fields=list(SEGMENT))
    offsets = np.concatenate([[0], np.cumsum(new.sum(axis=1))])
    return _list_array(offsets, structs, SEGMENT)


def _lists(values: Floats, mask: NDArray[np.bool_], kept: NDArray[np.bool_], element: pa.DataType) -> pa.Array:
    """Token lists of the kept rows, null for the others."""
    chosen = mask & kept[:, None]
    offsets = np.concatenate([[0], np.cumsum(chosen.sum(axis=1))])
    return _list_array(offsets, pa.array(values[chosen], element), element, ~kept)


def _list_array(
    offsets: NDArray[np.int64], values: pa.Array, element: pa.DataType, null: NDArray[np.bool_] | None = None
) -> pa.Array:
    kind = pa.list_(pa.field("element", element, nullable=False))
    mask = None if null is None else pa.array(null)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind, mask=mask)


def _sums(values: dict[str, Floats], mask: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> pa.Array:
    """Sums over tokens of the differences of neighbours on the path, and from its start to its end."""
    names = list(values)
    pairs = list(zip(names[1:], names[:-1], strict=True))
    pairs += [(names[-1], names[0])] if len(names) > 2 else []
    n = int(wanted.sum())
    if not pairs or not n:
        return pa.nulls(len(wanted), pa.list_(pa.field("element", SUMS, nullable=False)))
    inside = mask[wanted]
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("n", *_SUM_NAMES)}
    for later, earlier in pairs:
        d = (values[later].astype(np.float64) - values[earlier])[wanted]
        for name, total in _summed(np.where(inside, d, 0.0), inside).items():
            columns[name].append(total)
    flat = {name: np.stack(parts, axis=1).reshape(-1) for name, parts in columns.items()}
    arrays = [pa.array([pair[i] for pair in pairs] * n, pa.string()) for i in (0, 1)]
    arrays += [pa.array(flat["n"], pa.int32()), *(pa.array(flat[name], pa.float64()) for name in _SUM_NAMES)]
    structs = pa.StructArray.from_arrays(arrays, fields=list(SUMS))
    offsets = np.concatenate([[0], np.cumsum(np.where(wanted, len(pairs), 0))])
    return _list_array(offsets, structs, SUMS, ~wanted)


_SUM_NAMES = ("sum", "abs_sum", "sq_sum", "abs_max", "k3_sum", "w_sum", "w2_sum")


def _summed(d: NDArray[np.float64], inside: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Sums of one difference, by trajectory; `d` is 0 outside the response."""
    w = np.where(inside, np.exp(d), 0.0)
    return {
        "n": inside.sum(axis=1),
        "sum": d.sum(axis=1),
        "abs_sum": np.abs(d).sum(axis=1),
        "sq_sum": (d**2).sum(axis=1),
        "abs_max": np.abs(d).max(axis=1),
        "k3_sum": np.where(inside, np.exp(d) - 1 - d, 0.0).sum(axis=1),
        "w_sum": w.sum(axis=1),
        "w2_sum": (w**2).sum(axis=1),
    }


def _array(values: Sequence[Any] | NDArray[Any] | None, kind: pa.DataType, n: int) -> pa.Array:
    if values is None:
        return pa.nulls(n, kind)
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def _masked(values: NDArray[Any], known: NDArray[np.bool_]) -> pa.Array:
    kind = {"b": pa.bool_(), "f": pa.float32()}.get(values.dtype.kind, pa.int32())
    return pa.array(values, kind, mask=~known)


def _times(seconds: NDArray[np.float64], known: NDArray[np.bool_] | None = None) -> pa.Array:
    micro = np.round((seconds + EPOCH) * 1e6).astype(np.int64)
    mask = None if known is None else ~known
    return pa.array(micro, pa.int64(), mask=mask).cast(pa.timestamp("us", tz="UTC"))


def _time(seconds: float) -> int:
    return round((seconds + EPOCH) * 1e6)
