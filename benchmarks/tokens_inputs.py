"""Seeded trace files of a given size, in the layout that the writer of the trace schema chooses.

python benchmarks/tokens_inputs.py SIZE FOLDER [--steps N] [--single-turn] [--blobs] [--giant]

Lengths are log-normal (sigma .6, at most four times the mean). Behave log-probs imitate log_softmax of bf16 logits: 9 %
are exactly 0, about 70 % above -0.05, a tail to -12. Theta differs by noise that grows with 1 - p and with the lag; one
token in 2,000 jumps. A third of the trajectories cross a version. One in ten has a tool answer that the loss leaves
out, unless `--single-turn`. Groups are of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verl_audit.trace import write as writer
from verl_audit.trace.schema import BLOB, SEGMENT
from verl_audit.trace.write import to_table

SEED = 7
FILE_TOKENS = 8_000_000
F32 = np.float32


@dataclass(frozen=True)
class Size:
    """Steps, trajectories a step, mean tokens a trajectory."""

    steps: int
    trajectories: int
    mean: int


SIZES = {
    "small": Size(20, 100, 500),
    "medium": Size(100, 1000, 2000),
    "large": Size(1000, 3300, 8000),
}


def write(
    size: Size,
    folder: Path,
    *,
    single_turn: bool = False,
    blobs: bool = False,
    giant: bool = False,
    steps_a_file: int | None = None,
) -> int:
    """Write the files of a size and return how many tokens they hold.

    Without `steps_a_file`, as many steps as make 8 M tokens. `giant`: one row group a file, all else as pyarrow has it.
    """
    folder.mkdir(parents=True)
    tokens, at_once = 0, steps_a_file or max(1, FILE_TOKENS // (size.trajectories * size.mean))
    for first in range(1, size.steps + 1, at_once):
        steps = [_step(s, size, single_turn, blobs) for s in range(first, min(first + at_once, size.steps + 1))]
        table, path = pa.concat_tables([t for t, _ in steps]), folder / f"part-{first:04d}.parquet"
        if giant:
            pq.write_table(table, path, row_group_size=len(table))
        else:
            writer.write(table.unify_dictionaries(), path)
        tokens += sum(count for _, count in steps)
    return tokens


def _step(step: int, size: Size, single_turn: bool, blobs: bool) -> tuple[pa.Table, int]:
    rng = np.random.default_rng([SEED, step])
    rows = size.trajectories
    lengths = np.minimum(rng.lognormal(np.log(size.mean) - 0.18, 0.6, rows), 4 * size.mean).astype(np.int64)
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    crossing = rng.random(rows) < 1 / 3
    version = np.maximum(step - 1 - rng.integers(0, 4, rows), 0)
    behave, theta = _log_probs(rng, int(offsets[-1]), np.repeat(step - 1 - version, lengths))
    mask, tool = np.ones(offsets[-1], np.bool_), np.flatnonzero(rng.random(rows) < 0.1)
    for row in [] if single_turn else tool:
        mask[offsets[row] + lengths[row] // 3 : offsets[row] + lengths[row] // 2] = False
    columns: dict[str, Any] = {
        "group": [f"{step:04d}-{row // 8:05d}" for row in range(rows)],
        "session": np.arange(rows) % 8,
        "fate": ["trained"] * rows,
        "decided_step": np.full(rows, step),
        "train_version": np.full(rows, step - 1),
        "train_minibatch": np.arange(rows) * 4 // rows,
        "first_version": version,
        "last_version": np.where(crossing, np.minimum(version + 1, step - 1), version),
        "segments": _segments(version, np.minimum(version + 1, step - 1), crossing, lengths),
        "response_length": lengths,
        "loss_tokens": np.add.reduceat(mask.astype(np.int64), offsets[:-1]),
        "advantage": rng.standard_normal(rows, F32),
        "loss_mask": pa.ListArray.from_arrays(offsets, mask),
    }
    for name, values in (("behave_logp", behave), ("theta_logp", theta)):
        if blobs:
            columns[name + BLOB] = pa.Array.from_buffers(
                pa.binary(), rows, [None, pa.py_buffer((offsets * 4).astype(np.int32)), pa.py_buffer(values)]
            )
        else:
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    columns = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in columns.items()}
    return _table(columns, blobs), int(offsets[-1])


def _table(columns: dict[str, Any], blobs: bool) -> pa.Table:
    """As `to_table`, for columns that are Arrow arrays already."""
    arrays = {n: v.cast(_kind(n, blobs)) for n, v in columns.items() if isinstance(v, pa.Array)}
    table = to_table({n: v for n, v in columns.items() if n not in arrays}, updates_per_version=4, blobs=blobs)
    for name, array in arrays.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), array)
    return table


def _kind(name: str, blobs: bool) -> pa.DataType:
    return to_table([], blobs=blobs).schema.field(name).type


def _log_probs(rng: np.random.Generator, n: int, lag: NDArray[Any]) -> tuple[NDArray[F32], NDArray[F32]]:
    behave = -np.exp(rng.standard_normal(n, F32) * F32(2.5) - F32(4.5))
    np.maximum(behave, F32(-12), out=behave)
    behave[rng.random(n, F32) < 0.09] = 0
    doubt = np.sqrt(np.minimum(-behave, F32(1)))
    theta = behave + rng.standard_normal(n, F32) * doubt * (F32(0.01) + F32(0.02) * lag.astype(F32))
    jumps = rng.random(n, F32) < 1 / 2000
    theta[jumps] -= rng.exponential(2, int(jumps.sum())).astype(F32)
    return behave, np.minimum(theta, 0).astype(F32)


def _segments(
    first: NDArray[Any], second: NDArray[Any], crossing: NDArray[np.bool_], lengths: NDArray[np.int64]
) -> pa.Array:
    counts = np.where(crossing, 2, 1)
    cut = np.where(crossing, lengths // 2, lengths)
    rows = np.repeat(np.arange(len(first)), counts)
    later = np.r_[False, rows[1:] == rows[:-1]]
    fields = {
        "version": np.where(later, second[rows], first[rows]),
        "start": np.where(later, cut[rows], 0),
        "length": np.where(later, lengths[rows] - cut[rows], cut[rows]),
    }
    arrays = [pa.array(fields[f.name], f.type) if f.name in fields else pa.nulls(len(rows), f.type) for f in SEGMENT]
    return pa.ListArray.from_arrays(
        pa.array(np.r_[0, np.cumsum(counts)], pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(SEGMENT))
    )


@click.command(help=__doc__)
@click.argument("size", type=click.Choice(list(SIZES)))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--steps", type=int, help="write only so many steps: a slice")
@click.option("--single-turn", is_flag=True, help="every response token is a loss token")
@click.option("--blobs", is_flag=True, help="log-probs in the fast form")
@click.option("--giant", is_flag=True, help="one row group a file, as pyarrow writes by default")
def main(size: str, folder: Path, steps: int | None, single_turn: bool, blobs: bool, giant: bool) -> None:
    """Write the files."""
    one = SIZES[size]
    slice_ = Size(steps or one.steps, one.trajectories, one.mean)
    click.echo(f"{write(slice_, folder, single_turn=single_turn, blobs=blobs, giant=giant):,} tokens")


if __name__ == "__main__":
    main()
