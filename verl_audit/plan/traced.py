"""What traces tell of the rollout pool: how long each trajectory held a slot, and how many ran at a time."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.stats import Array
from verl_audit.plan.tail import Durations, floats, from_groups, from_sample

LEAST = 64
"""Trajectories below which a spread of durations is not taken from them."""
WHOLE = 0.5
"""Share of the trajectories that must be in whole groups of one size for groups to be kept together."""
BUSIEST = 0.95
"""Quantile over time of the trajectories at a time: a pool that is full this rarely is not bound by its slots."""
WAITED = 0.1
"""A request waited for a slot if it did so for this share of a mean duration; the pool has a queue if 1 in 20 did."""

_TIMED = """
SELECT "group", min(t_submit), min(t_first_token), max(t_done), coalesce(min(decided_step) >= $first, false),
    sum(response_length)
FROM trajectories WHERE run = $run AND session IS NOT NULL AND t_done >= t_first_token
GROUP BY "group", session ORDER BY min(submit_step), "group", session
"""
_LENGTHS = """
SELECT "group", sum(response_length) FROM trajectories
WHERE run = $run AND session IS NOT NULL AND decided_step >= $first
GROUP BY "group", session HAVING sum(response_length) > 0 ORDER BY min(submit_step), "group", session
"""
_DUMPED = """
SELECT step || '/' || uid, output_chars FROM samples
WHERE run = $run AND split = 'train' AND NOT padding AND output_chars > 0 ORDER BY step, uid, output_chars
"""
_PAUSES = "SELECT min(t0), max(t1) FROM syncs WHERE run = ? AND t1 >= t0 GROUP BY version ORDER BY 1"


@dataclass(frozen=True)
class Traced:
    """The rollout pool as traces show it."""

    seconds: float
    """A slot is held by a trajectory for so long on average, syncs left out."""
    durations: Durations
    at_once: float
    """Trajectories running at a time, exceeded 5 % of the time."""
    resume: float
    """What a sync takes a trajectory under way besides, to be prefilled again."""
    queued: bool
    """Whether requests waited for a slot: if not, there may be more slots than were ever in use."""
    count: int


def traced(store: duckdb.DuckDBPyConnection, run: str, first: float) -> Traced | None:
    """Durations of trajectories decided from step `first` on; None where fewer than 64 have times.

    A slot is held from the prefill to the last token. When the prefill began is in no trace; the least time between
    submission and first token stands in for its length, since some requests find a free slot at once.
    """
    rows = store.execute(_TIMED, {"run": run, "first": first}).fetchall()
    judged = np.array([row[4] for row in rows], dtype=bool)
    if judged.sum() < LEAST:
        return None
    submitted, begun, ended, tokens = (np.array([row[i] for row in rows], dtype=float) for i in (1, 2, 3, 5))
    pause = _clock(store, run)
    waits = begun - submitted - (pause(begun) - pause(submitted))
    prefill = max(0.0, float(np.nanmin(waits))) if np.isfinite(waits).any() else 0.0
    held = ended - begun - (pause(ended) - pause(begun)) + prefill
    crossed = pause.count(ended) - pause.count(begun)
    resume = _resume(held[judged], tokens[judged], crossed[judged])
    held = held - resume * crossed
    mean = float(held[judged].mean())
    names = [row[0] for row in rows]
    return Traced(
        seconds=mean,
        durations=_together(
            [(n, h) for n, h, j in zip(names, held.tolist(), judged, strict=True) if j],
            "traced trajectories, in seconds",
        ),
        at_once=_at_once(begun - prefill, ended, judged),
        resume=resume,
        queued=bool((waits[judged] - prefill > WAITED * mean).mean() >= 1 - BUSIEST),
        count=int(judged.sum()),
    )


def _resume(held: Array, tokens: Array, crossed: Array) -> float:
    """Seconds that a sync adds to a trajectory of given length, by least squares; 0 where it cannot be told."""
    design = np.column_stack([np.ones(len(held)), tokens, crossed])
    if not np.isfinite(tokens).all() or np.linalg.matrix_rank(design) < design.shape[1]:
        return 0.0
    return max(0.0, float(np.linalg.lstsq(design, held, rcond=None)[0][2]))


def lengths(store: duckdb.DuckDBPyConnection, run: str, first: float) -> Durations | None:
    """Durations as proportional to lengths: tokens of traces, else characters of dumps; None where there are none."""
    for query, values, what in (
        (_LENGTHS, {"run": run, "first": first}, "traced responses, in tokens"),
        (_DUMPED, {"run": run}, "dumped responses, in characters"),
    ):
        rows = store.execute(query, values).fetchall()
        if len(rows) >= LEAST:
            return _together([(name, float(value)) for name, value in rows], what)
    return None


class _Clock:
    """Seconds that syncs had taken by each time."""

    def __init__(self, pauses: list[tuple[float, float]]) -> None:
        self._times = np.array(pauses, dtype=float).ravel()
        lasted = np.diff(self._times, prepend=self._times[:1])
        lasted[::2] = 0.0
        self._passed = np.cumsum(lasted)

    def __call__(self, times: Array) -> Array:
        if not len(self._times):
            return np.zeros(len(times))
        return floats(np.interp(times, self._times, self._passed))

    def count(self, times: Array) -> Array:
        """Syncs begun by each time."""
        return np.searchsorted(self._times[::2], times).astype(float)


def _clock(store: duckdb.DuckDBPyConnection, run: str) -> _Clock:
    pauses: list[tuple[float, float]] = []
    for t0, t1 in store.execute(_PAUSES, [run]).fetchall():
        if not pauses or t0 >= pauses[-1][1]:
            pauses.append((t0, t1))
    return _Clock(pauses)


def _at_once(begun: Array, ended: Array, judged: NDArray[np.bool_]) -> float:
    """Quantile over time of how many run, from the first judged beginning to the last judged one."""
    times = np.concatenate([begun, ended])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.repeat([1, -1], len(begun))[order])[:-1]
    lasted = np.diff(times[order])
    inside = (times[order][:-1] >= begun[judged].min()) & (times[order][:-1] <= begun[judged].max())
    running, lasted = running[inside], lasted[inside]
    rank = np.argsort(running, kind="stable")
    share = np.cumsum(lasted[rank]) / max(lasted.sum(), 1e-12)
    return float(running[rank][min(int(np.searchsorted(share, BUSIEST)), len(rank) - 1)])


def _together(rows: list[tuple[str | None, float]], what: str) -> Durations:
    """Whole groups of the commonest size where most trajectories are in such, else single trajectories."""
    groups: dict[str, list[float]] = {}
    for name, value in rows:
        if name is not None:
            groups.setdefault(name, []).append(value)
    sizes, counts = np.unique([len(g) for g in groups.values()], return_counts=True)
    values = [value for _, value in rows]
    if len(sizes):
        size = int(sizes[np.argmax(sizes * counts)])
        whole = [g for g in groups.values() if len(g) == size]
        if size > 1 and len(whole) * size >= WHOLE * len(rows):
            return from_groups(whole, f"{len(whole)} groups of {size} {what}")
    return from_sample(values, f"{len(values)} {what}")
