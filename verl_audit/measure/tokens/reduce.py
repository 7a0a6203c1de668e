"""From batches of trajectories to `TokenSums`: one pass, one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.measure.tokens.columns import Bool, Int, Lists, align, mask_lists, token_lists
from verl_audit.measure.tokens.kernel import COUNTS as KERNEL_COUNTS
from verl_audit.measure.tokens.kernel import VALUES as KERNEL_VALUES
from verl_audit.measure.tokens.kernel import Kernel, Pieces, PieceSums, Reduce, choose
from verl_audit.measure.tokens.paths import PATH, Subset, subsets
from verl_audit.measure.tokens.recorded import recorded_sums
from verl_audit.measure.tokens.rows import Cut, Rows, cut, lag_of_whole, read_rows
from verl_audit.measure.tokens.spec import BUCKETS, UNKNOWN, Spec
from verl_audit.measure.tokens.sums import (
    COUNTS,
    LAYOUTS,
    NOTICED,
    SUMS,
    TRAJECTORIES,
    TRAJECTORY_COUNTS,
    Float,
    Pending,
    TokenSums,
)

COLUMNS = (
    *("run", "group", "fate", "decided_step", "train_version", "train_minibatch", "first_version", "last_version"),
    *("segments", "advantage", "sums", "loss_mask", *PATH),
)
"""Columns of the trace schema that are read; log-probs in either form."""

_KC = {name: i for i, name in enumerate(KERNEL_COUNTS)}
_KV = {name: i for i, name in enumerate(KERNEL_VALUES)}


class _State:
    """What the batches so far add up to."""

    def __init__(self, spec: Spec, kernel: Reduce, updates: int | None) -> None:
        self.spec, self.kernel, self.updates = spec, kernel, updates
        self.pending = {name: Pending(layout) for name, layout in LAYOUTS.items()}
        self.trajectories: list[pa.Table] = []
        self.noticed = dict.fromkeys(NOTICED, 0)


def reduce_batches(
    batches: Iterable[pa.RecordBatch],
    spec: Spec | None = None,
    *,
    updates_per_version: int | None = None,
    source: str = "",
    kernel: Kernel | None = None,
) -> TokenSums:
    """Sums over the loss tokens of one source.

    `batches` have columns of the trace schema, in any list form; absent ones are unknown. A column `row` tells each
    row's place in the source; without it they are counted from 0 over all batches. The result does not depend on how
    the rows are cut into batches. `updates_per_version` turns lag in versions into lag in updates; None: unknown.
    Raises `TypeError` for a token column that holds no numbers.
    """
    state = _State(spec or Spec(), choose(kernel), updates_per_version)
    first = 0
    for batch in batches:
        if batch.num_rows:
            _reduce_batch(state, batch, read_rows(batch, state.spec, first))
        first += batch.num_rows
        del batch  # the next one may take its memory
    state.noticed["rows"] = first
    groups = {name: pending.all() for name, pending in state.pending.items()}
    table = pa.concat_tables([TRAJECTORIES.empty_table(), *state.trajectories]).combine_chunks().sort_by("row")
    state.noticed["rows_reduced"] = len(table)
    return TokenSums(groups, {source: table}, state.noticed)


def _reduce_batch(state: _State, batch: pa.RecordBatch, rows: Rows) -> None:
    found = {name: token_lists(batch, name) for name in PATH}
    lists = {name: one for name, one in found.items() if one is not None}
    mask = mask_lists(batch)
    pattern = np.zeros(batch.num_rows, np.int64)
    for bit, name in enumerate(PATH):
        if name in lists:
            pattern |= lists[name].valid.astype(np.int64) << bit
    masked = np.zeros(batch.num_rows, np.bool_) if mask is None else mask.valid
    unequal = _unequal([*lists.values(), *([] if mask is None else [mask])], pattern > 0)
    state.noticed["rows_unequal"] += int((unequal & rows.wanted).sum())
    pattern[unequal | ~rows.wanted] = 0
    for code in np.unique(pattern):
        names = [name for bit, name in enumerate(PATH) if code >> bit & 1]
        if len(names) < 2:
            continue
        for has_mask in (True, False):
            which = np.flatnonzero((pattern == code) & (masked == has_mask))
            if len(which):
                columns = {name: lists[name] for name in names}
                _reduce_rows(state, rows, which, columns | ({"mask": mask} if mask is not None and has_mask else {}))
    _recorded(state, batch, rows, rows.wanted & ~unequal & ((pattern & 1 == 0) | (pattern == 1)))


def _unequal(lists: list[Lists], present: Bool) -> Bool:
    """Rows with lists of different lengths, an absent one aside."""
    longest = np.full(len(present), -1, np.int64)
    unequal = np.zeros(len(present), np.bool_)
    for one in lists:
        lengths = one.lengths
        unequal |= one.valid & (longest >= 0) & (lengths != longest)
        longest = np.where(one.valid, lengths, longest)
    return unequal & present


def _reduce_rows(state: _State, rows: Rows, which: Int, columns: Mapping[str, Lists]) -> None:
    """Rows that recorded the same sets."""
    aligned = align(columns, which)
    cuts = cut(rows, which, aligned.lengths)
    state.noticed["rows_bad_segments"] += cuts.bad_segments
    state.noticed["rows_negative_lag"] += cuts.negative
    names = [name for name in columns if name != "mask"]
    for subset in subsets(names):
        later, earlier = _ends(subset, aligned.values)
        owner = which[cuts.of]
        counted = rows.counted[owner]
        lags, codes = np.unique(np.where(counted, cuts.lag, UNKNOWN - 1), return_inverse=True)
        pieces = Pieces(
            later=later,
            earlier=earlier,
            mask=aligned.values.get("mask"),
            starts=aligned.starts[cuts.of] + cuts.start,
            lengths=cuts.length,
            signs=rows.sign[owner],
            rows=codes.ravel().astype(np.int64),
        )
        sums = state.kernel(pieces, state.spec, len(lags) if subset.total else 0, subset.strata)
        _gather(state, rows, which, cuts, subset, lags, sums)


def _ends(subset: Subset, values: Mapping[str, NDArray[np.float32]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Arrays whose difference is that of the subset; of two parts that do not touch, (q - p) and (b - c)."""
    later, earlier = (values[name] for name in subset.pairs[0])
    if len(subset.pairs) == 1:
        return later, earlier
    one, other = (values[name] for name in subset.pairs[1])
    with np.errstate(invalid="ignore"):
        return later - earlier, other - one


def _gather(state: _State, rows: Rows, which: Int, cuts: Cut, subset: Subset, lags: Int, found: PieceSums) -> None:
    """Piece sums into the tables."""
    owner = which[cuts.of]
    known = rows.sign_known[owner]
    counts, sums, most = _columns(found, known)
    used = np.flatnonzero(rows.counted[owner] & (found.counts[:, 0] > 0))
    row = owner[used]
    lag_keys = _lag_keys(state, rows, row, cuts.lag[used])
    if subset.total:
        state.noticed["nan_tokens"] += int(found.counts[:, _KC["nan"]].sum())
        state.noticed["clamped_tokens"] += int(found.counts[:, _KC["clamped"]].sum())
        state.trajectories.append(_trajectories(rows, which, cuts, counts, sums, most, found))
        keys = np.stack([rows.step[row], *lag_keys], axis=1)
        state.pending["cells"].put(keys, counts[used, :, None], sums[used, :, None], most[used])
        kept = lags >= UNKNOWN
        state.pending["histogram"].put(
            lags[kept, None], found.histogram[kept, None, :], np.zeros((kept.sum(), 0, BUCKETS))
        )
    if subset.strata:
        keys = np.stack([rows.cluster[row], *lag_keys], axis=1)
        state.pending["strata"].put(keys, found.bin_counts[used, None, :], found.bin_sums[used])
    subset_keys = np.stack([rows.cluster[row], np.full(len(row), subset.bits)], axis=1)
    columns = [COUNTS.index(name) for name in LAYOUTS["subsets"].counts]
    state.pending["subsets"].put(subset_keys, counts[used][:, columns, None], sums[used, :, None])


def _lag_keys(state: _State, rows: Rows, row: Int, lag: Int) -> tuple[Int, Int, Int]:
    """Lag in versions, mini-batch, and lag in updates."""
    minibatch = rows.minibatch[row]
    if state.updates is None:
        return lag, minibatch, np.full(len(row), UNKNOWN)
    known = (lag >= 0) & (minibatch >= 0)
    return lag, minibatch, np.where(known, state.updates * lag + minibatch, UNKNOWN)


def _columns(found: PieceSums, sign_known: Bool) -> tuple[Int, Float, Float]:
    """Counts, sums and maxima of pieces in the order of the tables' columns; e^d = 1 + d + k3."""
    c, v = found.counts, found.values
    n = c[:, _KC["n"]]
    clip_n = np.where(sign_known, n, 0)
    counts = np.stack([n, n, clip_n, *(c[:, _KC[name]] for name in COUNTS[3:])], axis=1)
    total, size, square, k3, e2 = (v[:, _KV[name]] for name in ("sum", "abs_sum", "sq_sum", "k3_sum", "e2_sum"))
    sums = np.stack([total, size, square, k3, n + (total + k3), n + 2 * (total + k3) + e2], axis=1)
    return counts, sums, v[:, _KV["abs_max"], None]


def _trajectories(
    rows: Rows, which: Int, cuts: Cut, counts: Int, sums: Float, most: Float, found: PieceSums
) -> pa.Table:
    """Sums of each row: its pieces in order."""
    first = np.flatnonzero(np.r_[True, cuts.of[1:] != cuts.of[:-1]])
    nan = found.counts[:, [_KC["nan"]]]
    whole = np.add.reduceat(np.concatenate([counts, nan], axis=1), first)
    floats = np.concatenate([np.add.reduceat(sums, first), np.maximum.reduceat(most, first)], axis=1)
    return trajectory_table(rows.position[which], whole, floats)


def trajectory_table(position: Int, counts: Int, floats: Float) -> pa.Table:
    """The per-trajectory table from its columns: counts (rows, TRAJECTORY_COUNTS), floats (rows, SUMS + abs_max)."""
    arrays = [pa.array(position)]
    arrays += [pa.array(counts[:, i].astype(np.int32)) for i in range(len(TRAJECTORY_COUNTS))]
    arrays += [pa.array(np.ascontiguousarray(floats[:, i])) for i in range(len(SUMS) + 1)]
    return pa.Table.from_arrays(arrays, schema=TRAJECTORIES)


def _recorded(state: _State, batch: pa.RecordBatch, rows: Rows, open_rows: Bool) -> None:
    """Rows without lists to make a total of, whose writer kept sums: trajectories and cells."""
    found = recorded_sums(batch, open_rows)
    if found is None:
        return
    which, n, values = found
    counts = np.zeros((len(which), len(TRAJECTORY_COUNTS)), np.int64)
    counts[:, 0] = n
    state.trajectories.append(trajectory_table(rows.position[which], counts, values))
    used = np.flatnonzero(rows.counted[which] & (n > 0))
    row = which[used]
    keys = np.stack([rows.step[row], *_lag_keys(state, rows, row, lag_of_whole(rows, row))], axis=1)
    state.pending["cells"].put(keys, counts[used, : len(COUNTS), None], values[used, :-1, None], values[used, -1:])
