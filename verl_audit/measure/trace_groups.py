"""Trajectories of one run as arrays, and their sums per prompt group: what all statistics of selection start from.

Length, reward and fate are shared within a group (length ICC .66 to .81 in measured runs, a design effect near 6), so
the unit of every interval is the group. Unknown is NaN for numbers and -1 for codes, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_audit.measure.stats import Array
from verl_audit.trace.schema import FATES

Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

FATE_NAMES: tuple[str, ...] = tuple(FATES)
TRAINED = FATE_NAMES.index("trained")
EVICTIONS: tuple[str, ...] = ("stale", "filtered", "failed", "aborted", "surplus")
"""Fates that keep a generated trajectory from the trainer, in the order of their bits in `reasons`."""
OPEN: tuple[str, ...] = ("in_flight", "unknown")
"""Fates that decide nothing yet."""
MIXED = len(FATE_NAMES)
"""Fate code of a group whose trajectories met different fates."""

_NUMBERS = (
    "submit_step",
    "decided_step",
    "submit_version",
    "first_version",
    "train_version",
    "response_length",
    "reward",
    "truncated",
    "session",
    "turn",
)


@dataclass(frozen=True)
class Rows:
    """Arrays over N trace rows; `group` and `prompt` are dense codes, `reasons` bits over `EVICTIONS`."""

    group: Codes
    fate: Codes
    reasons: Codes
    prompt: Codes
    """Code of `prompt_key`; -1 where unknown."""
    numbers: dict[str, Array]
    """`response_length`, `reward`, `truncated` (0 or 1), `submit_step`, ...: float64, NaN where unknown."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.group)


@dataclass(frozen=True)
class Sums:
    """Sums of one quantity over the known trajectories of each group: all of them, and the trained ones."""

    total: Array
    count: Array
    trained_total: Array
    trained_count: Array

    def at(self, keep: Mask) -> Sums:
        """The groups that `keep` selects."""
        return Sums(self.total[keep], self.count[keep], self.trained_total[keep], self.trained_count[keep])


@dataclass(frozen=True)
class Groups:
    """Arrays over G prompt groups."""

    fate: Codes
    """Code into `FATE_NAMES`, or `MIXED`."""
    reasons: Codes
    """Union of the eviction reasons of its trajectories."""
    rows: Array
    """Trajectories recorded; 0 for a group that left a row but no trajectory."""
    trained_rows: Array
    open: Mask
    """Groups with a trajectory whose fate is not decided, or not known."""
    length: Sums
    reward: Sums
    truncated: Sums
    longest: Array
    """Longest known response, tokens."""
    prompt: Codes
    submit_step: Array
    decided_step: Array
    submit_version: Array
    first_version: Array
    train_version: Array

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.fate)

    @property
    def trained(self) -> Mask:
        """Groups of which at least half of the trajectories were trained."""
        return (self.rows > 0) & (2 * self.trained_rows >= self.rows)


def rows(
    group: ArrayLike,
    fate: ArrayLike,
    *,
    reasons: ArrayLike | None = None,
    prompt: ArrayLike | None = None,
    **numbers: ArrayLike | None,
) -> Rows:
    """Rows from plain arrays: integer group codes, fate names or codes, and any of the numeric columns."""
    codes = np.asarray(group)
    dense: Codes = np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)
    fates = _fate_codes(np.asarray(fate))
    if unknown := set(numbers) - set(_NUMBERS):
        raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
    given = {k: np.asarray(v, dtype=np.float64) for k, v in numbers.items() if v is not None}
    blank = np.full(len(dense), np.nan)
    bits = _own_bits(fates) | (0 if reasons is None else np.asarray(reasons, dtype=np.int64))
    keys = np.full(len(dense), -1) if prompt is None else np.asarray(prompt, dtype=np.int64)
    return Rows(dense, fates, bits, keys, {name: given.get(name, blank) for name in _NUMBERS})


def _fate_codes(fate: NDArray[Any]) -> Codes:
    if fate.dtype.kind in "iu":
        return fate.astype(np.int64)
    names, where = np.unique(fate.astype(str), return_inverse=True)
    return np.array([FATE_NAMES.index(n) for n in names], dtype=np.int64)[where.reshape(-1)]


def _own_bits(fates: Codes) -> Codes:
    table = np.array([1 << EVICTIONS.index(f) if f in EVICTIONS else 0 for f in FATE_NAMES], dtype=np.int64)
    return table[fates]


def read_rows(con: duckdb.DuckDBPyConnection, run: str) -> Rows:
    """All trajectories of a run from the store's `trajectories`, in the order of `trajectory_id`.

    A fate the schema does not know counts as `unknown`.
    """
    flags = " + ".join(
        f"CASE WHEN list_contains(t.reasons, '{r}') THEN {1 << i} ELSE 0 END" for i, r in enumerate(EVICTIONS)
    )
    numbers = ", ".join(f"coalesce(t.{name}::DOUBLE, 'nan'::DOUBLE) AS {name}" for name in _NUMBERS)
    columns = con.execute(
        f"""WITH g AS (
                SELECT "group", row_number() OVER (ORDER BY min(trajectory_id)) - 1 AS code
                FROM trajectories WHERE run = $run GROUP BY "group"),
            p AS (
                SELECT prompt_key, row_number() OVER (ORDER BY min(trajectory_id)) - 1 AS code
                FROM trajectories WHERE run = $run AND prompt_key IS NOT NULL GROUP BY prompt_key)
        SELECT g.code AS "group", coalesce(p.code, -1) AS prompt,
            coalesce(nullif(list_position($fates, t.fate::VARCHAR), 0), $unknown) - 1 AS fate,
            ({flags})::BIGINT AS reasons, {numbers}
        FROM trajectories t JOIN g ON t."group" = g."group" LEFT JOIN p ON t.prompt_key = p.prompt_key
        WHERE t.run = $run ORDER BY t.trajectory_id""",
        {"run": run, "fates": list(FATE_NAMES), "unknown": FATE_NAMES.index("unknown") + 1},
    ).fetchnumpy()
    plain = {name: np.asarray(column) for name, column in columns.items()}
    return rows(
        plain["group"],
        plain["fate"].astype(np.int64),
        reasons=plain["reasons"],
        prompt=plain["prompt"],
        **{name: plain[name] for name in _NUMBERS},
    )


def without_trajectory(data: Rows) -> Mask:
    """Rows that stand for a group of which no trajectory exists: alone in the group, no session, not one token."""
    alone = np.bincount(data.group, minlength=_count(data))[data.group] == 1
    empty = np.nan_to_num(data.numbers["response_length"]) == 0
    return np.asarray(alone & empty & np.isnan(data.numbers["session"]) & (data.fate != TRAINED))


def group_up(data: Rows) -> Groups:
    """Sums per group.

    A group's step and version of submission are the earliest of its rows, its deciding step and training version the
    latest.
    """
    count, real, trained = _count(data), ~without_trajectory(data), data.fate == TRAINED
    order = np.argsort(data.group, kind="stable")
    starts = np.searchsorted(data.group[order], np.arange(count))

    def reduce(ufunc: np.ufunc, values: NDArray[Any]) -> Any:
        return ufunc.reduceat(values[order], starts) if count else values[:0]

    def total(mask: Mask) -> Array:
        return np.bincount(data.group, mask, count).astype(np.float64)

    def sums(name: str) -> Sums:
        values = data.numbers[name]
        known = real & np.isfinite(values)
        filled = np.where(known, values, 0.0)
        return Sums(
            np.bincount(data.group, filled, count).astype(np.float64),
            total(known),
            np.bincount(data.group, filled * trained, count).astype(np.float64),
            total(known & trained),
        )

    first, last = reduce(np.minimum, data.fate), reduce(np.maximum, data.fate)
    lengths = np.where(real, data.numbers["response_length"], np.nan)
    return Groups(
        fate=np.where(first == last, first, MIXED),
        reasons=reduce(np.bitwise_or, data.reasons),
        rows=total(real),
        trained_rows=total(real & trained),
        open=total(np.isin(data.fate, [FATE_NAMES.index(f) for f in OPEN])) > 0,
        length=sums("response_length"),
        reward=sums("reward"),
        truncated=sums("truncated"),
        longest=reduce(np.fmax, lengths),
        prompt=reduce(np.maximum, data.prompt),
        submit_step=reduce(np.fmin, data.numbers["submit_step"]),
        decided_step=reduce(np.fmax, data.numbers["decided_step"]),
        submit_version=reduce(np.fmin, data.numbers["submit_version"]),
        first_version=reduce(np.fmin, data.numbers["first_version"]),
        train_version=reduce(np.fmax, data.numbers["train_version"]),
    )


def _count(data: Rows) -> int:
    return int(data.group.max()) + 1 if len(data) else 0
