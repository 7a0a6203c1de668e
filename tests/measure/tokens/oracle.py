"""The token sums in plain Python, token by token: slow, and written from the definitions alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from verl_audit.measure.tokens import Spec, TokenSums

PATH = ("behave_logp", "trainer_logp", "prox_logp", "theta_logp")
STEP_BIT = (4, 2, 1)
Row = Mapping[str, Any]
Sums = dict[tuple[Any, ...], dict[str, float]]


def expected(rows: Sequence[Row], spec: Spec | None = None, updates: int | None = None) -> dict[str, Sums]:
    """Every table as key -> column -> value."""
    spec = spec or Spec()
    with np.errstate(invalid="ignore"):
        return _expected(rows, spec, updates)


def _expected(rows: Sequence[Row], spec: Spec, updates: int | None) -> dict[str, Sums]:
    out: dict[str, Sums] = {name: {} for name in ("trajectories", "cells", "strata", "subsets", "histogram")}
    for place, row in enumerate(rows):
        _add_row(out, place, row, spec, updates)
    return out


def _add_row(out: dict[str, Sums], place: int, row: Row, spec: Spec, updates: int | None) -> None:
    lists = {name: row[name] for name in PATH if row.get(name) is not None}
    mask = row.get("loss_mask")
    lengths = {len(values) for values in (*lists.values(), *([] if mask is None else [mask]))}
    names = list(lists)
    if len(names) < 2 or len(lengths) != 1:
        return
    if names[0] == PATH[0]:
        out["trajectories"][place,] = defaultdict(float)
    for i in range(lengths.pop()):
        if mask is None or mask[i]:
            value = {n: np.float32(math.nan if lists[n][i] is None else lists[n][i]) for n in names}
            _add_token(out, place, row, value, _keys(row, i, updates), spec)


def _keys(row: Row, token: int, updates: int | None) -> tuple[int, int, int]:
    lag, minibatch = _lag(row, token), _known(row.get("train_minibatch"))
    return lag, minibatch, updates * lag + minibatch if updates and lag >= 0 and minibatch >= 0 else -1


def _add_token(
    out: dict[str, Sums], place: int, row: Row, value: dict[str, np.float32], keys: tuple[int, int, int], spec: Spec
) -> None:
    names = list(value)
    counted = row.get("fate") in (None, *spec.fates)
    cluster = crc32(row["group"].encode()) % 64
    if names[0] == PATH[0]:
        d = value[names[-1]] - value[PATH[0]]
        _put(out["trajectories"], (place,), d, row, spec)
        if counted:
            _put(out["cells"], (_known(row.get("decided_step")), *keys), d, row, spec)
            if not math.isnan(d):
                bucket = int(np.float32(min(abs(d), np.float32(20))).view(np.uint32)) >> 21
                out["histogram"].setdefault((keys[0], bucket), defaultdict(float))["count"] += 1
            last = "prox_logp" if "prox_logp" in names else names[-1]
            key = cluster, *keys, _bin(float(value[PATH[0]]))
            _put(out["strata"], key, value[last] - value[PATH[0]], row, spec)
    parts = list(pairwise(names))
    for chosen in range(1, (1 << len(parts)) if counted else 1):
        picked = [part for j, part in enumerate(parts) if chosen >> j & 1]
        bits = sum(sum(STEP_BIT[PATH.index(a) : PATH.index(b)]) for a, b in picked)
        _put(out["subsets"], (cluster, bits), _difference(picked, value), row, spec)


def _difference(parts: Sequence[tuple[str, str]], value: Mapping[str, Any]) -> Any:
    """Sum of later - earlier; what lies between parts that touch does not enter, not even if it is infinite."""
    (earlier, later), *rest = parts
    for a, b in rest:
        if a != later:
            return (value[b] - value[a]) + _difference([(earlier, later)], value)
        later = b
    return value[later] - value[earlier]


def _known(value: int | None) -> int:
    return -1 if value is None else value


def _lag(row: Row, token: int) -> int:
    trained = row.get("train_version")
    segments = row.get("segments")
    if segments:
        version = next((s["version"] for s in segments if s["start"] <= token < s["start"] + s["length"]), None)
    else:
        first, last = row.get("first_version"), row.get("last_version")
        version = first if first == last else None
    if trained is None or version is None or trained < version:
        return -1
    return int(trained) - int(version)


def _bin(behave: float) -> int:
    edges = [2.0**k for k in range(-11, 4)]
    return sum(abs(behave) >= edge for edge in edges)


def _put(table: Sums, key: tuple[Any, ...], x: np.floating[Any], row: Row, spec: Spec) -> None:
    if math.isnan(x):
        if len(key) == 1:
            table[key]["nan"] += 1
        return
    d = float(np.clip(x, -20, 20))
    cell = table.setdefault(key, defaultdict(float))
    advantage = row.get("advantage")
    sign = 0.0 if advantage is None or math.isnan(advantage) else float(advantage)
    known = advantage is not None and not math.isnan(advantage)
    small = np.float32(d)
    for name, value in {
        "n": 1,
        "listed": 1,
        "clip_n": known,
        "clip_low": sign < 0 and small < np.float32(math.log1p(-spec.clip_low)),
        "clip_high": sign > 0 and small > np.float32(math.log1p(spec.clip_high)),
        "tail_ln2": abs(small) > np.float32(math.log(2)),
        "tail_1": abs(d) > 1,
        "sum": d,
        "abs_sum": abs(d),
        "sq_sum": d * d,
        "k3_sum": math.expm1(d) - d if abs(d) > 1e-3 else d * d / 2 * (1 + d / 3),
        "w_sum": math.exp(d),
        "w2_sum": math.exp(2 * d),
    }.items():
        cell[name] += value
    cell["abs_max"] = max(cell["abs_max"], abs(d))


KEYS = {
    "trajectories": ("row",),
    "cells": ("step", "lag", "minibatch", "lag_updates"),
    "strata": ("cluster", "lag", "minibatch", "lag_updates", "bin"),
    "subsets": ("cluster", "subset"),
    "histogram": ("lag", "bucket"),
}


def found(sums: TokenSums) -> dict[str, Sums]:
    """The tool's tables in the same form."""
    tables = {"trajectories": next(iter(sums.trajectories.values())), **sums.tables()}
    return {name: _dict(table, KEYS[name]) for name, table in tables.items()}


def _dict(table: pa.Table, keys: tuple[str, ...]) -> Sums:
    rows = table.to_pylist()
    out = {tuple(row[k] for k in keys): {n: v for n, v in row.items() if n not in keys} for row in rows}
    assert len(out) == len(rows)
    return out


INTEGERS = frozenset({"n", "listed", "clip_n", "clip_low", "clip_high", "tail_ln2", "tail_1", "nan", "count"})


def assert_same(mine: dict[str, Sums], theirs: dict[str, Sums]) -> None:
    """Counts equal, sums to 2e-6 of their absolute terms; w is 1 + d + k3, so 1 is among the terms of w and w^2."""
    for name, table in theirs.items():
        assert mine[name].keys() == table.keys(), name
        for key, row in table.items():
            for column, value in mine[name][key].items():
                wanted = row.get(column, 0)
                if column in INTEGERS or column == "abs_max":
                    assert value == wanted, (name, key, column)
                else:
                    scale = abs(row.get("abs_sum", 0)) if column == "sum" else abs(wanted)
                    scale += row["n"] if column in ("w_sum", "w2_sum") else 0
                    assert abs(value - wanted) <= 2e-6 * scale + 1e-12, (name, key, column, value, wanted)
