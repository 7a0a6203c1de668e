"""Trajectories to reduce: drawn by hypothesis, and batches made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from verl_audit.trace.schema import LOG_PROBS
from verl_audit.trace.write import to_table

LOG_PROB = st.one_of(
    st.floats(-12, 0, width=32),
    st.sampled_from([0.0, -0.0, -0.5, -1e-6, float("nan"), float("-inf"), -100.0]),
)


@st.composite
def trajectory(draw: st.DrawFn, sets: Sequence[str] = tuple(LOG_PROBS)) -> dict[str, Any]:
    """One row: any subset of log-probs, of any length from 0, now and then unequal; masks, versions, segments."""
    length = draw(st.integers(0, 12))
    row: dict[str, Any] = {
        "group": draw(st.sampled_from(["a", "b", "c"])),
        "fate": draw(st.sampled_from(["trained", "trained", "stale", "unknown"])),
        "response_length": length,
        "decided_step": draw(st.none() | st.integers(0, 2)),
        "train_version": draw(st.none() | st.integers(0, 3)),
        "train_minibatch": draw(st.none() | st.integers(0, 1)),
        "first_version": draw(st.none() | st.integers(0, 3)),
        "last_version": draw(st.none() | st.integers(0, 3)),
        "advantage": draw(st.none() | st.sampled_from([-1.0, 0.0, 1.0, float("nan")])),
    }
    for name in sets:
        if draw(st.booleans()):
            size = draw(st.integers(0, 12)) if draw(st.integers(0, 20)) == 0 else length
            row[name] = draw(st.lists(LOG_PROB, min_size=size, max_size=size))
    if draw(st.booleans()):
        row["loss_mask"] = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    if draw(st.booleans()):
        row["segments"] = _segments(draw, length)
    return row


def _segments(draw: st.DrawFn, length: int) -> list[dict[str, Any]]:
    """Calls in order, with gaps."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    versions = st.none() | st.integers(0, 3)
    return [{"version": draw(versions), "start": a, "length": b - a} for a, b in pairs]


def batches(rows: Sequence[Mapping[str, Any]], cuts: Sequence[int] = ()) -> Iterator[pa.RecordBatch]:
    """The rows as record batches of the schema, cut before the given rows."""
    table = to_table(rows)
    edges = [0, *sorted(c for c in cuts if c <= len(rows)), len(rows)]
    for a, b in pairwise(edges):
        yield from table.slice(a, b - a).to_batches()
