"""Trace schema, version 1: what each column of a trace file is called, means, and may hold.

A public contract (docs/trace-schema.md is generated from this module). Unknown is null, never 0. Lengths are tokens,
times UTC, log-probs nats. *Version* is the number of weight syncs published so far (0: the initial weights); the
rollout engine's label of the weights is meant wherever a framework has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

VERSION = 1

Table = Literal["trajectories", "syncs", "buffer"]
TABLES: tuple[Table, ...] = get_args(Table)

Fate = Literal["trained", "stale", "filtered", "failed", "aborted", "surplus", "in_flight", "unknown"]
FATES: Mapping[str, str] = {
    "trained": "in a batch that the trainer took a gradient from",
    "stale": "thrown away for its age",
    "filtered": "thrown away for its group's rewards (DAPO: no variance)",
    "failed": "generation or reward raised an error",
    "aborted": "cut off and not resumed",
    "surplus": "finished and never needed",
    "in_flight": "not decided when the run ended",
    "unknown": "the writer does not know",
}

KEY_VERSION, KEY_TABLE, KEY_RUN = b"verl_audit.trace", b"verl_audit.table", b"verl_audit.run"
KEY_UPDATES = b"verl_audit.updates_per_version"
"""Keys of the parquet file's metadata: schema version, table, run, and optimizer updates between two versions."""

LOG_PROBS: Mapping[str, str] = {
    "behave_logp": "rollout engine's log-prob, recorded at sampling",
    "trainer_logp": "trainer's log-prob under the weights that sampled the token",
    "prox_logp": "trainer's log-prob under the snapshot the loss takes as old policy (pi_old)",
    "theta_logp": "trainer's log-prob under the weights being updated, as the loss saw them",
}
"""Log-prob columns in the order of the path behave -> trainer -> prox -> theta."""

BLOB = "_f32le"
"""Suffix of the fast form of a log-prob column: raw little-endian float32, one binary value a trajectory."""


@dataclass(frozen=True)
class Column:
    """One column: Arrow type, meaning, and whether every row must have it."""

    name: str
    type: pa.DataType
    meaning: str
    required: bool = False
    tokens: bool = False
    """One entry per response token."""


def _list(element: pa.DataType) -> pa.DataType:
    """A list whose elements are never null: decodes 1.5 times as fast as one whose elements may be."""
    return pa.list_(pa.field("element", element, nullable=False))


_TIME = pa.timestamp("us", tz="UTC")
_LABEL = pa.dictionary(pa.int32(), pa.string())

SEGMENT = pa.struct(
    [
        pa.field("version", pa.int32()),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("server", pa.string()),
        pa.field("t0", _TIME),
        pa.field("t1", _TIME),
        pa.field("prefill", pa.int32()),
        pa.field("stop", pa.string()),
    ]
)
"""One generate call: version that sampled it, first response token and count, engine, begin and end, tokens
prefilled before it, and why it stopped."""

SUMS = pa.struct(
    [
        pa.field("later", pa.string(), nullable=False),
        pa.field("earlier", pa.string(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        *(
            pa.field(name, pa.float64(), nullable=False)
            for name in ("sum", "abs_sum", "sq_sum", "abs_max", "k3_sum", "w_sum", "w2_sum")
        ),
    ]
)
"""Sums over loss tokens of d = later - earlier, for trajectories whose lists were not kept: d, |d|, d^2, max |d|,
e^d - 1 - d, e^d and e^2d. `later` and `earlier` name log-prob columns."""

TRAJECTORIES: tuple[Column, ...] = (
    Column("run", pa.string(), "run it belongs to, if a directory holds several"),
    Column(
        "group", pa.string(), "prompt group: the trajectories sampled for one submission of a prompt", required=True
    ),
    Column("session", pa.int32(), "index of the trajectory in its group, from 0"),
    Column("turn", pa.int32(), "index of the output within a session that yields several, from 0"),
    Column("fate", _LABEL, "what became of it: " + ", ".join(FATES), required=True),
    Column("reasons", _list(pa.string()), "every fate that applied, the one that decided first"),
    Column("submit_step", pa.int32(), "trainer step during which the prompt was submitted"),
    Column("decided_step", pa.int32(), "trainer step at which the fate was decided: the one that trained it"),
    Column("t_submit", _TIME, "prompt submitted"),
    Column("t_first_token", _TIME, "first response token"),
    Column("t_done", _TIME, "last response token"),
    Column("t_enqueue", _TIME, "seen complete in the buffer"),
    Column("t_decided", _TIME, "fate decided: taken by the trainer or thrown away"),
    Column("submit_version", pa.int32(), "version published when the prompt was submitted"),
    Column("first_version", pa.int32(), "version that sampled the first token"),
    Column("last_version", pa.int32(), "version that sampled the last token"),
    Column("train_version", pa.int32(), "version of the trainer's policy when the step that trained it began"),
    Column("train_minibatch", pa.int32(), "optimizer updates since that version before it was trained on, from 0"),
    Column("segments", _list(SEGMENT), "generate calls in order; together they cover the response"),
    Column("prompt_length", pa.int32(), "prompt tokens"),
    Column("response_length", pa.int32(), "response tokens, all of them: tool output too", required=True),
    Column("loss_tokens", pa.int32(), "response tokens the loss counts, before any rejection"),
    Column("rejected_tokens", pa.int32(), "loss tokens masked by rejection sampling"),
    Column("truncated", pa.bool_(), "stopped by the length limit"),
    Column("turns", pa.int32(), "turns of the conversation"),
    Column("reward", pa.float32(), "reward of the trajectory, as the advantage estimator took it"),
    Column("reward_parts", pa.map_(pa.string(), pa.float64()), "named parts of the reward"),
    Column("advantage", pa.float32(), "mean advantage over its loss tokens"),
    Column("prompt_key", pa.string(), "identity of the prompt across epochs: the difficulty stratum"),
    *(Column(name, _list(pa.float32()), text, tokens=True) for name, text in LOG_PROBS.items()),
    Column("loss_mask", _list(pa.bool_()), "which response tokens the loss counts, before any rejection", tokens=True),
    Column(
        "expert_agreement",
        _list(pa.float32()),
        "share of MoE layers at which trainer and rollout chose the same experts",
        tokens=True,
    ),
    Column("sums", _list(SUMS), "sums of log-prob differences, where the lists were not kept"),
)

SYNCS: tuple[Column, ...] = (
    Column("run", pa.string(), "run it belongs to, if a directory holds several"),
    Column("version", pa.int32(), "version that this sync published", required=True),
    Column("replica", pa.string(), "rollout engine replica; null: all of them, or not told apart"),
    Column("replica_version", pa.int32(), "version the replica reports after the sync"),
    Column("step", pa.int32(), "trainer step after which it was published"),
    Column("t0", _TIME, "sync began"),
    Column("t1", _TIME, "sync ended: the replica generates again"),
    Column("abort_s", pa.float64(), "seconds spent stopping generation"),
    Column("transfer_s", pa.float64(), "seconds spent moving weights"),
    Column("resume_s", pa.float64(), "seconds spent resuming generation"),
    Column("aborted", pa.int32(), "requests interrupted"),
    Column("prefill_tokens", pa.int64(), "tokens prefilled again because of it"),
    Column("payload_count", pa.int32(), "tensors sent"),
    Column("payload_bytes", pa.int64(), "bytes sent"),
    Column("payload_norm", pa.float64(), "L2 norm of the weights sent"),
)

BUFFER: tuple[Column, ...] = (
    Column("run", pa.string(), "run it belongs to, if a directory holds several"),
    Column("t", _TIME, "time of the count"),
    Column("step", pa.int32(), "trainer step during which it was counted", required=True),
    Column("pending", pa.int32(), "groups submitted, not started"),
    Column("running", pa.int32(), "groups being generated"),
    Column("finished", pa.int32(), "groups complete and waiting"),
    Column("failed", pa.int32(), "groups that ended in an error and wait for removal"),
    Column("wait_s", pa.float64(), "seconds the trainer waited for this batch"),
)

COLUMNS: Mapping[Table, tuple[Column, ...]] = {"trajectories": TRAJECTORIES, "syncs": SYNCS, "buffer": BUFFER}


def width(kind: pa.DataType) -> str:
    """Name of the numpy dtype of a number; pyarrow's own way needs pandas in older releases.

    Raises `TypeError` for a type that is no number.
    """
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise TypeError(f"{kind} is no number")
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def schema(
    table: Table = "trajectories",
    *,
    run: str | None = None,
    updates_per_version: int | None = None,
    blobs: bool = False,
) -> pa.Schema:
    """Arrow schema of a trace file, its metadata included.

    `updates_per_version` is the number of optimizer updates between two published versions; without it lag cannot be
    counted in updates. `blobs` puts the fast form of the log-prob columns in the place of the lists.
    """
    fields = []
    for column in COLUMNS[table]:
        name, kind = column.name, column.type
        if blobs and name in LOG_PROBS:
            name, kind = name + BLOB, pa.binary()
        fields.append(pa.field(name, kind, nullable=not column.required))
    metadata = {KEY_VERSION: str(VERSION).encode(), KEY_TABLE: table.encode()}
    if run is not None:
        metadata[KEY_RUN] = run.encode()
    if updates_per_version is not None:
        metadata[KEY_UPDATES] = str(updates_per_version).encode()
    return pa.schema(fields, metadata)
