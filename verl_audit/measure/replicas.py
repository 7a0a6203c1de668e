"""Weight sync as the trajectories saw it: which version each engine sampled with, and whether new ones arrived.

Clock: the newest version that any engine had begun to sample with when a generate call began (segments carry times),
else the training version of the trajectory (of its deciding step, for evicted ones). An engine's *gap* at a clock
value is that value's newest version minus the newest version the engine itself sampled with. Healthy: 0 or 1 (engines
are updated one after another); frozen: it grows by 1 per version, while a backlog grows the oldest lag only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import duckdb
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from verl_audit.measure.model import Measure
from verl_audit.measure.stats import Array

WINDOW = 20
"""Clock values over which a frozen replica must stay behind at the same pace."""
LAST = 10
BEHIND = 2
"""Versions by which a replica may trail: one for updating engines in turn, one for a request cut by the sync."""
FROZEN_SLOPE = 0.5
"""Growth of the gap per version, over `WINDOW` values, that counts as frozen; a frozen replica has exactly 1."""
MIN_VERSIONS = 5
"""Fewest published versions to say that none arrived."""


@dataclass(frozen=True)
class Replica:
    """One engine (arrays over its clock values)."""

    server: str
    clock: Array
    gap: Array
    """Versions behind the newest engine."""
    behind: Measure
    """Median gap, versions."""
    end: Measure
    """Median gap over its last 10 clock values."""
    worst: Measure
    slope: Measure
    """Largest growth of the gap per version over 20 successive clock values."""


@dataclass(frozen=True)
class Replicas:
    """All engines of a run that the segments name."""

    each: tuple[Replica, ...]
    behind: Measure
    """Engines whose median gap, over the run or at its end, is above 2 versions."""
    frozen: Measure
    """Engines whose gap grows by more than .5 per version over 20 values."""
    worst_slope: Measure
    timed: bool
    """Whether segments carried times; without, the clock is the training version, which queues blur."""


def replicas(con: duckdb.DuckDBPyConnection, run: str) -> Replicas:
    """Versions per engine from the store's `trajectory_segments`."""
    timed = _timed(con, run)
    columns = con.execute(_GAPS_TIMED if timed else _GAPS_STEPPED, {"run": run}).fetchnumpy()
    server = np.asarray(columns["server"], dtype=object)
    clock, gap = np.asarray(columns["clock"], dtype=float), np.asarray(columns["gap"], dtype=float)
    names = sorted(set(server))
    each = tuple(_replica(name, clock[server == name], gap[server == name]) for name in names)
    if len(each) < 2:
        why = "the segments name no engine" if not each else "only one engine: there is none to compare it with"
        none = Measure("trace_replicas_behind", None, "replicas", missing=why)
        slope = Measure("trace_replica_slope", None, "versions per version", missing=why)
        return Replicas(each, none, replace(none, name="trace_replicas_frozen"), slope, timed)
    trailing = sum(max(float(r.behind.value or 0), float(r.end.value or 0)) > BEHIND for r in each)
    slopes = [r.slope.number() for r in each]
    known = [s for s in slopes if s is not None]
    return Replicas(
        each,
        Measure("trace_replicas_behind", trailing, "replicas", n=len(each)),
        _frozen(known, len(each)),
        Measure("trace_replica_slope", max(known), "versions per version", n=len(known))
        if known
        else Measure("trace_replica_slope", None, "versions per version", missing=_FEW),
        timed,
    )


_FEW = f"no engine was seen at {WINDOW} versions"


def _frozen(slopes: list[float], n: int) -> Measure:
    if not slopes:
        return Measure("trace_replicas_frozen", None, "replicas", missing=_FEW)
    return Measure("trace_replicas_frozen", sum(s > FROZEN_SLOPE for s in slopes), "replicas", n=n)


def _replica(server: str, clock: Array, gap: Array) -> Replica:
    n = len(clock)
    return Replica(
        server,
        clock,
        gap,
        Measure("trace_replica_behind", float(np.median(gap)), "versions", n=n),
        Measure("trace_replica_behind_end", float(np.median(gap[-LAST:])), "versions", n=min(n, LAST)),
        Measure("trace_replica_behind_max", float(gap.max()), "versions", n=n),
        _slope(clock, gap),
    )


def _slope(clock: Array, gap: Array) -> Measure:
    """Largest least-squares slope of the gap on the clock over windows of 20 clock values."""
    name, unit = "trace_replica_slope", "versions per version"
    if len(clock) < WINDOW:
        return Measure(name, None, unit, n=len(clock), missing=f"seen at {len(clock)} versions, {WINDOW} needed")
    x, y = sliding_window_view(clock, WINDOW), sliding_window_view(gap, WINDOW)
    centred = x - x.mean(axis=1, keepdims=True)
    slopes = (centred * y).sum(axis=1) / (centred * centred).sum(axis=1)
    return Measure(name, float(slopes.max()), unit, n=len(clock))


def _timed(con: duckdb.DuckDBPyConnection, run: str) -> bool:
    row = con.execute(
        "SELECT count(t0) > 0.5 * count(*) FROM trajectory_segments "
        "WHERE run = ? AND server IS NOT NULL AND version IS NOT NULL",
        [run],
    ).fetchone()
    return bool(row and row[0])


_GAPS_TIMED = """
WITH s AS (
    SELECT server, version, max(version) OVER (ORDER BY t0 RANGE UNBOUNDED PRECEDING) AS clock
    FROM trajectory_segments WHERE run = $run AND server IS NOT NULL AND version IS NOT NULL AND t0 IS NOT NULL)
SELECT server, clock, clock - max(version) AS gap FROM s GROUP BY server, clock ORDER BY server, clock
"""
_GAPS_STEPPED = """
WITH steps AS (
    SELECT decided_step, max(train_version) AS version FROM trajectories
    WHERE run = $run AND train_version IS NOT NULL GROUP BY decided_step),
s AS (
    SELECT g.server, g.version, coalesce(t.train_version, steps.version) AS clock
    FROM trajectory_segments g JOIN trajectories t USING (run, trajectory_id)
    LEFT JOIN steps ON steps.decided_step = t.decided_step
    WHERE g.run = $run AND g.server IS NOT NULL AND g.version IS NOT NULL),
newest AS (SELECT clock, max(version) AS version FROM s WHERE clock IS NOT NULL GROUP BY clock)
SELECT s.server, s.clock, newest.version - max(s.version) AS gap
FROM s JOIN newest USING (clock) GROUP BY s.server, s.clock, newest.version ORDER BY s.server, s.clock
"""


@dataclass(frozen=True)
class Delivery:
    """Whether published weights arrived."""

    delivered: Measure
    """Versions the trajectories advanced per version of the trainer: 1 healthy, 0 none arrived."""
    partial: Measure
    """Share of versions that some replicas, not all, reported after their sync."""
    undelivered: Measure
    """Share of versions that no replica reported after their sync."""
    behind: Measure
    """Largest median, over replicas, of versions behind after a sync."""
    unchanged: Measure
    """Share of syncs whose payload has exactly the norm of the sync before: new label, same weights."""
    empty: Measure
    """Share of syncs that sent no tensor, or only zeros."""


def delivery(con: duckdb.DuckDBPyConnection, run: str) -> Delivery:
    """From the store's `trajectories`, `trajectory_segments` and `syncs`."""
    partial, undelivered, behind = _reports(con, run)
    unchanged, empty = _payload(con, run)
    return Delivery(_delivered(con, run), partial, undelivered, behind, unchanged, empty)


def _delivered(con: duckdb.DuckDBPyConnection, run: str) -> Measure:
    """(last - first version sampled with) / (last - first training version), in the trained trajectories.

    Over the later half of the training versions where that is long enough: while a queue fills, the lag grows though
    every version arrives.
    """
    name, unit = "trace_versions_delivered", "share"
    row = con.execute(
        """WITH v AS (
            SELECT train_version AS trained, max(coalesce(last_version, s.version)) AS newest,
                min(coalesce(last_version, s.version)) AS oldest, count(coalesce(last_version, s.version)) AS n
            FROM trajectories t LEFT JOIN (
                SELECT trajectory_id, max(version) AS version FROM trajectory_segments WHERE run = $run
                GROUP BY trajectory_id) s USING (trajectory_id)
            WHERE t.run = $run AND train_version IS NOT NULL AND coalesce(last_version, s.version) IS NOT NULL
            GROUP BY train_version),
        half AS (SELECT max(trained) AS first FROM v
            WHERE trained <= (SELECT (max(trained) + min(trained)) / 2 FROM v))
        SELECT max(trained) - min(trained), max(newest) - min(oldest), sum(n), max(trained) - any_value(first),
            max(newest) - max(newest) FILTER (trained <= first)
        FROM v, half""",
        {"run": run},
    ).fetchone()
    assert row is not None
    published, arrived, n, later, arrived_later = row
    if not n:
        return Measure(
            name, None, unit, missing="training and sampling versions are not known of the same trajectories"
        )
    if published < MIN_VERSIONS:
        why = f"the training version rose by {published}, {MIN_VERSIONS} needed"
        return Measure(name, None, unit, n=int(n), missing=why)
    if later >= MIN_VERSIONS:
        published, arrived = later, arrived_later
    return Measure(name, float(arrived) / float(published), unit, n=int(published))


def _reports(con: duckdb.DuckDBPyConnection, run: str) -> tuple[Measure, Measure, Measure]:
    names = ("trace_sync_partial_share", "trace_sync_undelivered_share", "trace_sync_behind")
    row = con.execute(
        """WITH s AS (
            SELECT version, coalesce(replica, '') AS replica, max(replica_version) AS has FROM syncs
            WHERE run = $run AND replica_version IS NOT NULL GROUP BY ALL),
        v AS (SELECT version, count(*) FILTER (has >= version) AS there, count(*) AS n FROM s GROUP BY version),
        r AS (SELECT replica, median(greatest(version - has, 0)) AS gap FROM s GROUP BY replica)
        SELECT (SELECT count(*) FROM v), (SELECT count(*) FROM v WHERE there BETWEEN 1 AND n - 1),
            (SELECT count(*) FROM v WHERE there = 0), (SELECT max(gap) FROM r), (SELECT count(*) FROM r)""",
        {"run": run},
    ).fetchone()
    assert row is not None
    versions, some, none, gap, replicas_ = row
    if not versions:
        why = "the syncs record no version per replica"
        a, b, c = (
            Measure(name, None, unit, missing=why)
            for name, unit in zip(names, ("share", "share", "versions"), strict=True)
        )
        return a, b, c
    return (
        Measure(names[0], some / versions, "share", n=int(versions)),
        Measure(names[1], none / versions, "share", n=int(versions)),
        Measure(names[2], float(gap), "versions", n=int(replicas_)),
    )


def _payload(con: duckdb.DuckDBPyConnection, run: str) -> tuple[Measure, Measure]:
    row = con.execute(
        """WITH s AS (
            SELECT payload_norm AS norm, payload_count AS tensors,
                lag(payload_norm) OVER (PARTITION BY replica ORDER BY version, t0 NULLS FIRST) AS before
            FROM syncs WHERE run = $run)
        SELECT count(*) FILTER (norm IS NOT NULL AND before IS NOT NULL), count(*) FILTER (norm = before),
            count(*) FILTER (norm IS NOT NULL OR tensors IS NOT NULL),
            count(*) FILTER (norm = 0 OR tensors = 0) FROM s""",
        {"run": run},
    ).fetchone()
    assert row is not None
    pairs, same, known, zero = row
    unchanged = Measure(
        "trace_sync_unchanged_share", None, "share", missing="the norm of two successive payloads is not recorded"
    )
    empty = Measure(
        "trace_sync_empty_share", None, "share", missing="neither norm nor count of the payload is recorded"
    )
    if pairs:
        unchanged = Measure(unchanged.name, same / pairs, "share", n=int(pairs))
    if known:
        empty = Measure(empty.name, zero / known, "share", n=int(known))
    return unchanged, empty
