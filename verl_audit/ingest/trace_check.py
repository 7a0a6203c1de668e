"""What a trace may hold: each rule that a cell breaks makes it null (or leaves the row out) and is counted.

Kinds of problems: `trace_group`, `trace_fate`, `trace_negative`, `trace_nonfinite`, `trace_counts`, `trace_age`,
`trace_versions`, `trace_segments`, `trace_gap`, `trace_lag` over scalars; `trace_lengths`, `trace_log_prob`,
`trace_agreement` over token lists.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_audit.ingest.model import Parsed
from verl_audit.trace.schema import FATES, LOG_PROBS

POSITIVE = 0.125
"""Largest log-prob that rounding explains: bfloat16 has 8 significant bits, so logits between 16 and 32 and the log of
their sum are each off by up to 2^-4; their difference is a log-prob off by up to 2^-3."""

_NOT_NEGATIVE = (
    "session",
    "turn",
    "submit_step",
    "decided_step",
    "submit_version",
    "first_version",
    "last_version",
    "train_version",
    "train_minibatch",
    "prompt_length",
    "response_length",
    "loss_tokens",
    "rejected_tokens",
    "turns",
)


def check_scalars(table: pa.Table, notes: Parsed) -> pa.Table:
    """Rows of the trajectories table with a group, and only cells that can be true."""
    table = _grouped(table, notes)
    table = _fates(table, notes)
    for name in _NOT_NEGATIVE:
        table = _nulled(table, name, _below(table, name, 0), "trace_negative", f"{name} below 0", notes)
    for name in ("reward", "advantage"):
        bad = _bools(pc.invert(pc.is_finite(table[name])))
        table = _nulled(table, name, bad, "trace_nonfinite", f"{name} is NaN or infinite", notes)
    table = _counts(table, notes)
    table = _steps(table, notes)
    return _segments(table, notes)


def check_lags(table: pa.Table, notes: Parsed) -> pa.Table:
    """A trainer older than the weights that sampled its tokens is no trainer version."""
    _, newest = segment_versions(table)
    for version in (table["first_version"], table["last_version"], newest):
        late = _bools(pc.less(table["train_version"], version))
        detail = "train_version older than the version that sampled a token: a negative lag"
        table = _nulled(table, "train_version", late, "trace_lag", detail, notes)
    return table


def segment_versions(table: pa.Table) -> tuple[pa.Array, pa.Array]:
    """Oldest and newest version of each row's segments that hold tokens; null without any."""
    lists = _array(table, "segments")
    flat, offsets = _flat(lists)
    version, length = flat.field("version"), flat.field("length").to_numpy(zero_copy_only=False)
    known = version.is_valid().to_numpy(zero_copy_only=False) & (length > 0)
    values = version.fill_null(0).to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(lists)), np.diff(offsets))[known]
    low, high = np.full(len(lists), np.iinfo(np.int32).max), np.full(len(lists), -1)
    np.minimum.at(low, rows, values[known])
    np.maximum.at(high, rows, values[known])
    none = high < 0
    return pa.array(low, pa.int32(), mask=none), pa.array(high, pa.int32(), mask=none)


def _grouped(table: pa.Table, notes: Parsed) -> pa.Table:
    missing = table["group"].null_count
    if not missing:
        return table
    notes.note("trace_group", "rows without a group are left out", count=missing)
    return table.filter(pc.is_valid(table["group"]))


def _fates(table: pa.Table, notes: Parsed) -> pa.Table:
    text = _array(table, "fate").cast(pa.string())
    wrong = _bools(pc.invert(pc.is_in(text, pa.array(list(FATES)))))
    if wrong.any():
        first = text[int(np.argmax(wrong))]
        notes.note("trace_fate", f"no such fate: {str(first)[:40]!r}; taken as unknown", count=int(wrong.sum()))
    settled = pc.if_else(pa.array(wrong), "unknown", text)
    return _replaced(table, "fate", settled.dictionary_encode().cast(table.schema.field("fate").type))


def _counts(table: pa.Table, notes: Parsed) -> pa.Table:
    for part, whole in (("loss_tokens", "response_length"), ("rejected_tokens", "loss_tokens")):
        over = _bools(pc.greater(table[part], table[whole]))
        table = _nulled(table, part, over, "trace_counts", f"{part} above {whole}", notes)
    unknown = _bools(pc.and_(pc.is_null(table["response_length"]), pc.is_valid(table["session"])))
    if unknown.any() and table["response_length"].null_count < len(table):  # a format without lengths is no mistake
        notes.note("trace_counts", "response_length unknown: not in any count of tokens", count=int(unknown.sum()))
    return table


def _steps(table: pa.Table, notes: Parsed) -> pa.Table:
    """Prompt age is decided_step - submit_step + 1; a prompt cannot be decided before it was submitted."""
    young = _bools(pc.greater(table["submit_step"], table["decided_step"]))
    table = _nulled(table, "submit_step", young, "trace_age", "prompt age below 1", notes)
    crossed = _bools(pc.greater(table["first_version"], table["last_version"]))
    detail = "first_version after last_version: both left out"
    table = _nulled(table, "first_version", crossed, "trace_versions", detail, notes)
    return _nulled(table, "last_version", crossed, None, "", notes)


def _segments(table: pa.Table, notes: Parsed) -> pa.Table:
    """Segments lie in the response, in order, one after another. A gap is told, and its tokens have no version.

    Between the turns of a conversation a gap is right: tool output is no segment.
    """
    lists = _array(table, "segments")
    if lists.null_count == len(lists):
        return table
    flat, offsets = _flat(lists)
    rows = np.repeat(np.arange(len(lists)), np.diff(offsets))
    start, length = (_numbers(flat.field(name)) for name in ("start", "length"))
    response = _numbers(table["response_length"], fill=np.iinfo(np.int32).max)
    before = np.where(np.concatenate([[True], rows[1:] != rows[:-1]]), 0, np.concatenate([[0], (start + length)[:-1]]))
    wrong = (start < before[: len(start)]) | (length < 0) | (start + length > response[rows]) | _negative(flat)
    bad = _marks(len(lists), rows[wrong])
    held = np.diff(offsets) > 0
    covered = np.bincount(rows, weights=length, minlength=len(lists))
    known = _bools(pc.is_valid(table["response_length"])) & _bools(pc.is_valid(lists))
    talk = _bools(pc.greater(table["turns"], 1))
    gap = known & (held | (response > 0)) & (covered < response) & ~bad & ~talk
    if gap.any():
        notes.note(
            "trace_gap", "segments leave tokens of the response out: their version is unknown", count=int(gap.sum())
        )
    detail = "segments that overlap, or go beyond the response, or have a version below 0"
    return _nulled(table, "segments", bad, "trace_segments", detail, notes)


def _negative(flat: pa.StructArray) -> np.ndarray:
    return _numbers(flat.field("version")) < 0


def check_tokens(table: pa.Table, lists: tuple[str, ...], notes: Parsed) -> pa.Table:
    """Token lists as long as the response, with log-probs that are finite and not positive where the loss counts.

    A list that is not is null; without a mask that fits, all lists of the row are. What tokens outside the loss hold
    is of no account: a log-prob there that is no number is 0.
    """
    lengths = {name: _lengths(table, name) for name in (*lists, "loss_mask")}
    expected = _expected(table, lengths)
    uneven = {name: (have >= 0) & (have != expected) for name, have in lengths.items()}
    for name in lists:
        bad = uneven[name] | (uneven["loss_mask"] if lengths[name].size else uneven[name])
        detail = f"{name} and response_length or loss_mask differ in length"
        table = _nulled(table, name, bad & (lengths[name] >= 0), "trace_lengths", detail, notes)
    detail = "loss_mask and response_length differ in length"
    table = _nulled(table, "loss_mask", uneven["loss_mask"], "trace_lengths", detail, notes)
    for name in lists:
        high = POSITIVE if name in LOG_PROBS else 1.0
        low = -np.inf if name in LOG_PROBS else 0.0
        table = _plausible(table, name, low, high, notes)
    return table


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return _numbers(pc.list_value_length(_array(table, name)), fill=-1)


def _expected(table: pa.Table, lengths: dict[str, np.ndarray]) -> np.ndarray:
    """The length every list of a row must have: of the response if known, else of the mask, else of the first list."""
    expected = _numbers(table["response_length"], fill=-1)
    for name in ("loss_mask", *lengths):
        expected = np.where(expected < 0, lengths[name], expected)
    return expected


def _plausible(table: pa.Table, name: str, low: float, high: float, notes: Parsed) -> pa.Table:
    lists = _array(table, name)
    flat, offsets = _flat(lists)
    values: np.ndarray = flat.to_numpy(zero_copy_only=False)
    # NaN passes through both reductions, so one look tells whether a closer one is needed.
    if not len(values) or (low <= values.min() and values.max() <= high and np.isfinite(values.min())):
        return table
    wrong = ~(np.isfinite(values) & (values <= high) & (values >= low))
    counted = _counted(table, lists)
    rows = np.repeat(np.arange(len(lists)), np.diff(offsets))
    bad = _marks(len(lists), rows[wrong & counted])
    kind = "trace_log_prob" if name in LOG_PROBS else "trace_agreement"
    what = f"{name} is NaN, infinite or above {high}" if name in LOG_PROBS else f"{name} outside 0 to 1"
    cleaned = pa.array(np.where(wrong, np.float32(0), values), pa.float32())
    missing = lists.is_null().to_numpy(zero_copy_only=False)
    starts = pa.array(offsets.astype(np.int32))
    made = pa.ListArray.from_arrays(starts, cleaned, type=lists.type, mask=pa.array(missing))
    return _nulled(_replaced(table, name, made), name, bad, kind, what, notes)


def _counted(table: pa.Table, lists: pa.Array) -> np.ndarray:
    """Per token of `lists` whether the loss counts it; all of a row without a mask."""
    mask = _array(table, "loss_mask")
    have = lists.is_valid().to_numpy(zero_copy_only=False)
    masked = mask.is_valid().to_numpy(zero_copy_only=False)
    size = _numbers(pc.list_value_length(lists), fill=0) * have
    counted = np.ones(int(size.sum()), bool)
    flags, offsets = _flat(pc.if_else(pa.array(have & masked), mask, pa.scalar(None, mask.type)))
    del offsets
    counted[np.repeat(have & masked, size)] = flags.to_numpy(zero_copy_only=False)
    return counted


def _flat(lists: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Elements of all lists that are not null, and the offset of each list in them."""
    lengths = _numbers(pc.list_value_length(lists), fill=0)
    return pc.list_flatten(lists), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _numbers(values: pa.Array | pa.ChunkedArray, fill: int = 0) -> np.ndarray:
    numbers: np.ndarray = (
        values.fill_null(fill).to_numpy(zero_copy_only=False)
        if isinstance(values, pa.Array)
        else values.fill_null(fill).to_numpy()
    )
    return numbers.astype(np.int64)


def _bools(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A condition as a mask; unknown is false."""
    mask: np.ndarray = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
    return mask.astype(bool)


def _below(table: pa.Table, name: str, bound: int) -> np.ndarray:
    return _bools(pc.less(table[name], bound))


def _marks(size: int, rows: np.ndarray) -> np.ndarray:
    marks = np.zeros(size, bool)
    marks[rows] = True
    return marks


def _nulled(table: pa.Table, name: str, bad: np.ndarray, kind: str | None, detail: str, notes: Parsed) -> pa.Table:
    if not bad.any():
        return table
    if kind:
        notes.note(kind, f"{detail} (first at row {_place(table, bad)})", count=int(bad.sum()))
    column = _array(table, name)
    return _replaced(table, name, pc.if_else(pa.array(bad), pa.scalar(None, column.type), column))


def _place(table: pa.Table, bad: np.ndarray) -> int:
    return int(table["row"][int(np.argmax(bad))].as_py())


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name).with_nullable(True), values)
