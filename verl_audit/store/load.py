"""Fill the store: raw rows first, then what each run's keys mean, then the reconciled tables and views."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verl_audit.ingest.adapters import Adapter, KeyMapping, Mapped, load_signals
from verl_audit.ingest.detect import Fact
from verl_audit.ingest.model import KINDS, MetricBuffer, Parsed, Problem
from verl_audit.ingest.runs import Unit

AT_ONCE = 500
"""Rows of one INSERT: a statement for each row takes seven times as long."""
AGREE = 1e-6
"""Relative difference up to which two copies of a value are one: float32 copies differ by 6e-8."""
AGREE_ROUNDED = 5.1e-4
"""Absolute difference up to which a value printed with three decimals agrees with an exact one."""


@dataclass(frozen=True)
class RunInput:
    """One run to be loaded: the units (source, segment) it consists of, and what is known about it."""

    run: str
    role: str
    name: str
    units: tuple[Unit, ...]
    because: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Flattened configuration: key to (value as text, origin)."""


def load_sources(
    con: duckdb.DuckDBPyConnection,
    parsed: Sequence[Parsed],
    names: Sequence[str],
    base: int = 0,
    only: Collection[int] | None = None,
    keep: bool = False,
) -> None:
    """Insert sources and their raw rows.

    `names` are the paths to show; a source's id is `base` plus its index. `only` are the indices to insert, else all;
    with `keep`, the rows of the others are put away for the next reading.
    """
    for index, (source, name) in enumerate(zip(parsed, names, strict=True)):
        source_id, buffer = base + index, source.metrics
        chosen = only is None or index in only
        if len(buffer) and (chosen or keep):
            _insert_rows(con, source, source_id)
        if not chosen:
            continue
        rounded = "rounded" in buffer.kinds
        exactness = "rounded" if rounded else "float32" if source.float32 else "float64"
        precision = "sampled" if source.sampled else exactness
        con.execute(
            "INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                source_id,
                name,
                source.format,
                source.step_kind,
                precision,
                source.bytes_read,
                buffer.records,
                len(buffer),
                source.values_lost,
            ],
        )
        load_problems(con, source.problems, name)


def _insert_rows(con: duckdb.DuckDBPyConnection, source: Parsed, source_id: int) -> None:
    buffer = source.metrics
    con.register("rows", _arrow(source, source_id, _key_ids(con, buffer.keys)))
    con.execute(
        "INSERT INTO raw_values "
        "SELECT source_id, segment, record, step, axis_step, key_id, value, kind, wall_time FROM rows"
    )
    con.unregister("rows")
    if _repeats(buffer):
        con.execute("INSERT INTO repeated VALUES (?)", [source_id])


def _repeats(buffer: MetricBuffer) -> bool:
    """Whether some record holds a key twice."""
    by_key = np.argsort(np.frombuffer(buffer.key_id, dtype=np.int32).astype(_smallest(len(buffer.keys))), kind="stable")
    keys, records = np.frombuffer(buffer.key_id, np.int32)[by_key], np.frombuffer(buffer.record, np.int64)[by_key]
    return bool(((keys[1:] == keys[:-1]) & (records[1:] <= records[:-1])).any())


def _smallest(count: int) -> type[np.uint16] | type[np.int32]:
    """An integer type for that many numbers; sorting 16 bits takes a tenth of the time."""
    return np.uint16 if count <= 1 << 16 else np.int32


def _key_ids(con: duckdb.DuckDBPyConnection, keys: Sequence[str]) -> NDArray[np.int32]:
    """The number of each key in the store; new keys are added."""
    known = {key: index for index, key in con.execute("SELECT key_id, key FROM keys").fetchall()}
    new = [key for key in keys if key not in known]
    known |= {key: len(known) + i for i, key in enumerate(new)}
    if new:
        con.register("rows", pa.table({"id": pa.array([known[key] for key in new], pa.int32()), "key": pa.array(new)}))
        con.execute("INSERT INTO keys SELECT * FROM rows")
        con.unregister("rows")
    return np.fromiter((known[key] for key in keys), np.int32, len(keys))


def _arrow(source: Parsed, source_id: int, key_ids: NDArray[np.int32]) -> pa.Table:
    buffer, steps = source.metrics, source.metrics.step
    as_read = steps if source.counted_steps is None else source.counted_steps
    wall = np.frombuffer(buffer.wall_time, dtype=np.float64)
    kinds = pa.DictionaryArray.from_arrays(pa.array(np.frombuffer(buffer.kind_id, dtype=np.int8)), pa.array(KINDS))
    return pa.table(
        {
            "source_id": pa.array(np.full(len(buffer), source_id, dtype=np.int32)),
            "segment": pa.array(np.frombuffer(buffer.segment, dtype=np.int32)),
            "record": pa.array(np.frombuffer(buffer.record, dtype=np.int64)),
            "step": pa.array(np.frombuffer(as_read, dtype=np.int64)),
            "axis_step": pa.array(np.frombuffer(steps, dtype=np.int64)),
            "key_id": pa.array(key_ids[np.frombuffer(buffer.key_id, dtype=np.int32)]),
            "value": pa.array(np.frombuffer(buffer.value, dtype=np.float64)),
            "kind": kinds,
            "wall_time": pa.array(wall, mask=np.isnan(wall)),
        }
    )


def load_problems(con: duckdb.DuckDBPyConnection, problems: Iterable[Problem], name: str = "") -> None:
    """Insert problems; `name` replaces the path of problems found inside one source."""
    rows = [[name or p.file, p.offset, p.kind, p.detail, p.count] for p in problems]
    if rows:
        con.executemany("INSERT INTO problems VALUES (?, ?, ?, ?, ?)", rows)


def load_run(
    con: duckdb.DuckDBPyConnection,
    run: RunInput,
    parsed: Sequence[Parsed],
    names: Sequence[str],
    base: int = 0,
) -> None:
    """Insert a run with its segments, events, dump rows, configuration and facts."""
    con.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", [run.run, run.role, run.name, "; ".join(run.because)])
    for order, (index, segment) in enumerate(sorted(run.units, key=lambda u: _start(parsed, u))):
        con.execute("INSERT INTO segments VALUES (?, ?, ?, ?)", [base + index, segment, run.run, order])
    for index in sorted({i for i, _ in run.units}):
        source = parsed[index]
        _insert(
            con,
            "events",
            [[run.run, names[index], e.kind, e.step, e.detail, e.offset] for e in source.events],
        )
        _insert(
            con,
            "samples",
            [
                [
                    run.run,
                    s.split,
                    s.step,
                    s.uid,
                    s.score,
                    s.input_chars,
                    s.output_chars,
                    s.padding,
                    s.data_source,
                ]
                for s in source.samples
            ],
        )
    _insert(con, "config", [[run.run, key, value, origin] for key, (value, origin) in run.config.items()])


def load_facts(con: duckdb.DuckDBPyConnection, run: str, facts: Mapping[str, Fact]) -> None:
    """Insert what is known of a run; unknown values stay NULL beside their reason."""
    _insert(con, "facts", [[run, name, _text(fact.value), fact.reason] for name, fact in facts.items()])


def _text(value: object) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _insert(con: duckdb.DuckDBPyConnection, table: str, rows: list[list[object]]) -> None:
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        values = ", ".join([f"({', '.join('?' * len(rows[0]))})"] * len(some))
        con.execute(f"INSERT INTO {table} VALUES {values}", [value for row in some for value in row])


def _start(parsed: Sequence[Parsed], unit: Unit) -> tuple[float, str, int]:
    source = parsed[unit[0]]
    started = source.identity.started
    return (math.inf if started is None else started, str(source.path), unit[1])


def load_key_map(con: duckdb.DuckDBPyConnection, run: str, mapping: KeyMapping) -> None:
    """Insert how the keys of a run were understood."""
    _insert(con, "key_map", [_mapped_row(run, m) for m in mapping.mapped])
    for standing, keys in (("known", mapping.known), ("unknown", mapping.unknown)):
        _insert(con, "key_map", [[run, key, standing, *[None] * 13] for key in keys])


def _mapped_row(run: str, m: Mapped) -> list[object]:
    contains = ", ".join(m.contains)
    head = [
        run,
        m.key,
        "mapped",
        m.signal,
        m.label or "",
        m.unit_kind,
        m.against,
        contains,
        m.weight,
        m.reducer,
    ]
    return [*head, m.on_policy, m.scale, m.offset, m.inert_because, m.corrupt_because, m.zero_with]


_OF_RUN = "raw_values JOIN segments USING (source_id, segment) WHERE run = ?"


def key_ranges(con: duckdb.DuckDBPyConnection, run: str) -> list[tuple[str, float | None, float | None]]:
    """Every key of a run with its least and greatest finite value, by name."""
    return con.execute(
        "SELECT key, low, high FROM (SELECT key_id, min(value) FILTER (isfinite(value)) AS low, "
        f"max(value) FILTER (isfinite(value)) AS high FROM {_OF_RUN} GROUP BY key_id) "
        "JOIN keys USING (key_id) ORDER BY key",
        [run],
    ).fetchall()


def shift_axis(con: duckdb.DuckDBPyConnection, run: str, adapter: Adapter) -> None:
    """Move rows that a framework logs late to the version that trained on them.

    Records that hold the adapter's axis key take its value as step; keys it lists as unshifted stay. Sources
    whose step is the tracker's own counter take the logged `training/global_step`, `train/global_step` or
    `global_step`.
    """
    keys = [
        key
        for (key,) in con.execute(
            f"SELECT key FROM keys WHERE key_id IN (SELECT key_id FROM {_OF_RUN})", [run]
        ).fetchall()
    ]
    if adapter.axis_key:
        _shift(con, run, [adapter.axis_key], "logged", [key for key in keys if adapter.is_shifted(key)])
    _shift(con, run, ["training/global_step", "train/global_step", "global_step"], "counter", keys)


def _shift(con: duckdb.DuckDBPyConnection, run: str, axis_keys: list[str], step_kind: str, shifted: list[str]) -> None:
    con.execute(
        """
        UPDATE raw_values r SET axis_step = axis.step
        FROM (SELECT source_id, segment, record, max(value)::BIGINT AS step
              FROM raw_values JOIN keys USING (key_id) JOIN segments USING (source_id, segment)
              JOIN sources USING (source_id)
              WHERE key IN (SELECT unnest(?)) AND isfinite(value) AND run = ? AND step_kind = ? GROUP BY ALL) axis
        WHERE r.source_id = axis.source_id AND r.segment = axis.segment AND r.record = axis.record
          AND r.axis_step <> axis.step
          AND r.key_id IN (SELECT key_id FROM keys WHERE key IN (SELECT unnest(?)))
        """,
        [axis_keys, run, step_kind, shifted],
    )


# Runs of one source and one process life that logged each step in one record: nothing in them needs reconciling.
_PLAIN = """
CREATE TEMP TABLE plain AS
WITH records AS (SELECT DISTINCT run, source_id, segment, record, axis_step
                 FROM raw_values JOIN segments USING (source_id, segment))
SELECT run FROM records GROUP BY run
HAVING count(DISTINCT (source_id, segment)) = 1 AND count(*) = count(DISTINCT axis_step)
   AND bool_and(source_id NOT IN (FROM repeated))
"""
_PLAIN_METRICS = """
INSERT INTO metric_values
SELECT source_id, segment, key_id, axis_step, value, kind, wall_time
FROM raw_values JOIN segments USING (source_id, segment) WHERE run IN (FROM plain)
"""
# Every other value with its run, its stream (the files of one tracker) and the order of its process life in time.
_LIVED = """
CREATE TEMP VIEW lived AS
SELECT s.run, o.format AS stream, s.ord, r.* EXCLUDE (step, axis_step), r.axis_step AS step, r.rowid AS seq
FROM raw_values r JOIN segments s USING (source_id, segment) JOIN sources o USING (source_id)
WHERE s.run NOT IN (FROM plain)
"""
# A later life trained on from a checkpoint: what earlier ones logged from its first step on is of a branch that was
# given up. The first step counts key by key (a resumed run validates at the step that its forerunner trained); for a
# key that it never logs its first training step does, if it logs most of what its forerunner did.
_CUTS = """
CREATE TEMP TABLE cuts AS
WITH firsts AS (SELECT run, stream, ord, key_id, min(step) AS step FROM lived GROUP BY ALL),
     several AS (SELECT run, stream FROM firsts GROUP BY ALL HAVING count(DISTINCT ord) > 1),
     begun AS (SELECT run, stream, ord, count(*) AS keys,
                      min(step) FILTER (NOT regexp_matches(key, '^(val|test)')) AS step
               FROM firsts JOIN keys USING (key_id) SEMI JOIN several USING (run, stream) GROUP BY ALL),
     pairs AS (SELECT a.run, a.stream, a.ord, b.ord AS later, count(*) AS common
               FROM firsts a SEMI JOIN several USING (run, stream)
               JOIN firsts b ON a.run = b.run AND a.stream = b.stream AND a.key_id = b.key_id AND b.ord > a.ord
               GROUP BY ALL)
SELECT a.run, a.stream, a.ord, a.key_id, min(coalesce(b.step, f.step)) AS cut
FROM firsts a JOIN pairs p ON a.run = p.run AND a.stream = p.stream AND a.ord = p.ord
JOIN begun f ON f.run = p.run AND f.stream = p.stream AND f.ord = p.later
JOIN begun own ON own.run = a.run AND own.stream = a.stream AND own.ord = a.ord
LEFT JOIN firsts b ON b.run = a.run AND b.stream = a.stream AND b.ord = p.later AND b.key_id = a.key_id
WHERE b.step IS NOT NULL OR p.common > 0.5 * own.keys
GROUP BY ALL
"""
_KEPT = """
CREATE TEMP VIEW kept AS
SELECT l.* FROM lived l LEFT JOIN cuts c USING (run, stream, ord, key_id) WHERE c.cut IS NULL OR l.step < c.cut
"""
_GIVEN_UP = """
CREATE TEMP VIEW given_up AS
SELECT l.* FROM lived l JOIN cuts c USING (run, stream, ord, key_id) WHERE l.step >= c.cut
"""
# Windows are costly: only points that were logged more than once pass through one.
_DOUBLED = "CREATE TEMP TABLE doubled AS SELECT run, key_id, step FROM kept GROUP BY ALL HAVING count(*) > 1"
_NEWEST = """
SELECT * FROM kept SEMI JOIN {points} USING ({keys})
QUALIFY row_number() OVER (PARTITION BY run, stream, key_id, step ORDER BY ord DESC, record DESC, seq DESC) = 1
"""
_STREAMS = "CREATE TEMP TABLE streams AS " + _NEWEST.format(points="doubled", keys="run, key_id, step")
_SINGLE_METRICS = """
INSERT INTO metric_values
SELECT source_id, segment, key_id, step, value, kind, wall_time FROM kept ANTI JOIN doubled USING (run, key_id, step)
"""
_DOUBLED_METRICS = """
INSERT INTO metric_values
SELECT source_id, segment, key_id, step, value, kind, wall_time FROM streams JOIN sources USING (source_id)
QUALIFY row_number() OVER (
    PARTITION BY run, key_id, step
    ORDER BY CASE kind WHEN 'clamped' THEN 1 WHEN 'rounded' THEN 2 WHEN 'nonfinite_unknown' THEN 3 ELSE 0 END,
             precision = 'sampled', precision = 'float32', source_id) = 1
"""
_DISAGREE = """CASE
    WHEN 'nonfinite_unknown' IN ({a}.kind, {b}.kind) THEN isfinite({a}.value) OR isfinite({b}.value)
    WHEN 'clamped' IN ({a}.kind, {b}.kind) THEN false
    WHEN isfinite({a}.value) AND isfinite({b}.value) THEN abs({a}.value - {b}.value) >
        $same * greatest(abs({a}.value), abs({b}.value))
        + CASE WHEN 'rounded' IN ({a}.kind, {b}.kind) THEN $rounded ELSE 0 END
    ELSE {a}.value IS DISTINCT FROM {b}.value END"""
_DIFFERENCES = f"""
INSERT INTO differences
SELECT b.run, key, b.step, oa.path, a.value, ob.path, b.value
FROM streams b JOIN segments s ON s.run = b.run
JOIN metric_values a ON a.source_id = s.source_id AND a.segment = s.segment AND a.key_id = b.key_id AND a.step = b.step
JOIN keys ON keys.key_id = b.key_id
JOIN sources oa ON oa.source_id = a.source_id JOIN sources ob ON ob.source_id = b.source_id
WHERE b.source_id <> a.source_id AND {_DISAGREE.format(a="a", b="b")}
ORDER BY ALL
"""
_REWRITTEN = f"""
INSERT INTO rewritten
SELECT b.run, key, b.step, path, b.value, a.value
FROM given_up b JOIN keys USING (key_id) JOIN sources USING (source_id)
LEFT JOIN ({_NEWEST.format(points="given_up", keys="run, stream, key_id, step")}) a USING (run, stream, key_id, step)
WHERE a.value IS NULL OR {_DISAGREE.format(a="a", b="b")}
ORDER BY ALL
"""
# Of several keys that are one signal (one a version of the framework) the first by name counts at a step.
_MEANT = """
CREATE TEMP TABLE meant AS
SELECT *, count(*) OVER (PARTITION BY run, signal, label) > 1 AS rivals
FROM key_map JOIN keys USING (key) JOIN runs USING (run) WHERE standing = 'mapped' AND corrupt_because IS NULL
"""
_SIGNALS = """
INSERT INTO signals
SELECT run, role, signal, label, step, value * scale + "offset", kind, key, inert_because IS NOT NULL, false
FROM metric_values JOIN segments USING (source_id, segment) JOIN meant USING (run, key_id) WHERE
"""
_FIRST = "QUALIFY row_number() OVER (PARTITION BY run, signal, label, step ORDER BY key) = 1"
_ZEROS = """
INSERT INTO signals
SELECT DISTINCT c.run, c.role, z.signal, z.label, c.step, 0.0, 'finite', z.key, false, true
FROM zero_keys z
JOIN (SELECT m.run, role, key, step FROM metrics m JOIN runs USING (run)) c ON c.run = z.run AND c.key = z.zero_with
ANTI JOIN signals s ON s.run = z.run AND s.signal = z.signal AND s.label = z.label AND s.step = c.step
"""


def finish(con: duckdb.DuckDBPyConnection, mappings: Mapping[str, KeyMapping]) -> None:
    """Reconcile trackers and process lives, derive signals, fill in zeros that were left out, make the wide views."""
    con.execute(_PLAIN)
    con.execute(_PLAIN_METRICS)
    if con.execute("SELECT 1 FROM segments WHERE run NOT IN (FROM plain) LIMIT 1").fetchone():
        _reconcile(con)
    con.execute("DROP TABLE plain")
    con.execute(_MEANT)
    con.execute(f"{_SIGNALS} NOT rivals")
    con.execute(f"{_SIGNALS} rivals {_FIRST}")
    con.execute("DROP TABLE meant")
    con.execute(
        "CREATE TEMP TABLE zero_keys (run VARCHAR, signal VARCHAR, label VARCHAR, key VARCHAR, zero_with VARCHAR)"
    )
    _insert(con, "zero_keys", [row for run, mapping in mappings.items() for row in _zero_rows(run, mapping)])
    con.execute(_ZEROS)
    con.execute("DROP TABLE zero_keys")
    _wide_views(con)


def _reconcile(con: duckdb.DuckDBPyConnection) -> None:
    """One value a run, key and step out of several trackers and process lives, and where those disagree."""
    for statement in (_LIVED, _CUTS, _KEPT, _GIVEN_UP, _DOUBLED, _STREAMS, _SINGLE_METRICS, _DOUBLED_METRICS):
        con.execute(statement)
    limits = {"same": AGREE, "rounded": AGREE_ROUNDED}
    con.execute(_DIFFERENCES, limits)
    con.execute(_REWRITTEN, limits)
    con.execute("DROP VIEW given_up; DROP VIEW kept; DROP VIEW lived")
    con.execute("DROP TABLE cuts; DROP TABLE doubled; DROP TABLE streams")


def _zero_rows(run: str, mapping: KeyMapping) -> list[list[object]]:
    left_out = [m for m in (*mapping.mapped, *mapping.implied) if m.zero_with and not m.corrupt_because]
    return [[run, m.signal, m.label or "", m.key, m.zero_with] for m in left_out]


def _wide_views(con: duckdb.DuckDBPyConnection) -> None:
    columns = ", ".join(
        f"avg(value) FILTER (signal = '{name}' AND isfinite(value)) AS \"{name}\"" for name in sorted(load_signals())
    )
    con.execute(
        f"CREATE VIEW steps AS SELECT step, {columns} FROM signals WHERE role = 'run' GROUP BY step ORDER BY step"
    )
    con.execute(
        f"CREATE VIEW baseline_steps AS SELECT run, step, {columns} FROM signals WHERE role = 'baseline' "
        "GROUP BY run, step ORDER BY run, step"
    )
