"""Fill the store: raw rows first, then what each run's keys mean, then the reconciled tables and views."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa

from verl_audit.ingest.adapters import Adapter, KeyMapping, Mapped, load_signals
from verl_audit.ingest.detect import Fact
from verl_audit.ingest.model import KINDS, MetricBuffer, Parsed, Problem
from verl_audit.ingest.runs import Unit

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
) -> None:
    """Insert sources and their raw rows.

    `names` are the paths to show; a source's id is `base` plus its index. `only` are the indices to insert, else all.
    """
    for index, (source, name) in enumerate(zip(parsed, names, strict=True)):
        if only is not None and index not in only:
            continue
        source_id, buffer = base + index, source.metrics
        rounded = "rounded" in {KINDS[k] for k in set(buffer.kind_id)}
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
        if len(buffer):
            rows = _arrow(buffer, source_id)
            con.register("rows", rows)
            con.execute(
                "INSERT INTO raw_metrics "
                "SELECT source_id, segment, record, step, step, key, value, kind, wall_time FROM rows"
            )
            con.unregister("rows")
        load_problems(con, source.problems, name)


def _arrow(buffer: MetricBuffer, source_id: int) -> pa.Table:
    wall = np.frombuffer(buffer.wall_time, dtype=np.float64)
    kinds = pa.DictionaryArray.from_arrays(pa.array(np.frombuffer(buffer.kind_id, dtype=np.int8)), pa.array(KINDS))
    keys = pa.DictionaryArray.from_arrays(pa.array(np.frombuffer(buffer.key_id, dtype=np.int32)), pa.array(buffer.keys))
    return pa.table(
        {
            "source_id": pa.array(np.full(len(buffer), source_id, dtype=np.int32)),
            "segment": pa.array(np.frombuffer(buffer.segment, dtype=np.int32)),
            "record": pa.array(np.frombuffer(buffer.record, dtype=np.int64)),
            "step": pa.array(np.frombuffer(buffer.step, dtype=np.int64)),
            "key": keys,
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
    if rows:
        con.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


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


def shift_axis(con: duckdb.DuckDBPyConnection, run: str, adapter: Adapter) -> None:
    """Move rows that a framework logs late to the version that trained on them.

    Records that hold the adapter's axis key take its value as step; keys it lists as unshifted stay. Sources
    whose step is the tracker's own counter take the logged `training/global_step`, `train/global_step` or
    `global_step`.
    """
    keys = [
        key
        for (key,) in con.execute(
            "SELECT DISTINCT key FROM raw_metrics JOIN segments USING (source_id, segment) WHERE run = ?", [run]
        ).fetchall()
    ]
    if adapter.axis_key:
        _shift(con, run, [adapter.axis_key], "logged", [key for key in keys if adapter.is_shifted(key)])
    _shift(con, run, ["training/global_step", "train/global_step", "global_step"], "counter", keys)


def _shift(con: duckdb.DuckDBPyConnection, run: str, axis_keys: list[str], step_kind: str, shifted: list[str]) -> None:
    con.execute(
        """
        UPDATE raw_metrics r SET axis_step = axis.value::BIGINT
        FROM (SELECT source_id, segment, record, max(value) AS value FROM raw_metrics
              WHERE key IN (SELECT unnest(?)) AND isfinite(value) GROUP BY ALL) axis
        JOIN segments s USING (source_id, segment) JOIN sources o USING (source_id)
        WHERE r.source_id = axis.source_id AND r.segment = axis.segment AND r.record = axis.record
          AND s.run = ? AND o.step_kind = ? AND r.key IN (SELECT unnest(?))
        """,
        [axis_keys, run, step_kind, shifted],
    )


# Every value with its run, its stream (the files of one tracker) and the order of its process life in time.
_LIVED = """
CREATE TEMP VIEW lived AS
SELECT s.run, o.format AS stream, o.precision, o.path, r.* EXCLUDE (step, axis_step), r.axis_step AS step, s.ord
FROM raw_metrics r JOIN segments s USING (source_id, segment) JOIN sources o USING (source_id)
"""
# A later life trained on from a checkpoint: what earlier ones logged from its first step on is of a branch that was
# given up. The first step counts key by key (a resumed run validates at the step that its forerunner trained); for a
# key that it never logs its first training step does, if it logs most of what its forerunner did.
_CUTS = """
CREATE TEMP TABLE cuts AS
WITH firsts AS (SELECT run, stream, ord, key, min(step) AS step FROM lived GROUP BY ALL),
     several AS (SELECT run, stream FROM firsts GROUP BY ALL HAVING count(DISTINCT ord) > 1),
     begun AS (SELECT run, stream, ord, count(*) AS keys,
                      min(step) FILTER (NOT regexp_matches(key, '^(val|test)')) AS step
               FROM firsts SEMI JOIN several USING (run, stream) GROUP BY ALL),
     pairs AS (SELECT a.run, a.stream, a.ord, b.ord AS later, count(*) AS common
               FROM firsts a SEMI JOIN several USING (run, stream)
               JOIN firsts b ON a.run = b.run AND a.stream = b.stream AND a.key = b.key AND b.ord > a.ord
               GROUP BY ALL)
SELECT a.run, a.stream, a.ord, a.key, min(coalesce(b.step, f.step)) AS cut
FROM firsts a JOIN pairs p ON a.run = p.run AND a.stream = p.stream AND a.ord = p.ord
JOIN begun f ON f.run = p.run AND f.stream = p.stream AND f.ord = p.later
JOIN begun own ON own.run = a.run AND own.stream = a.stream AND own.ord = a.ord
LEFT JOIN firsts b ON b.run = a.run AND b.stream = a.stream AND b.ord = p.later AND b.key = a.key
WHERE b.step IS NOT NULL OR p.common > 0.5 * own.keys
GROUP BY ALL
"""
_STREAMS = """
CREATE TEMP TABLE streams AS
SELECT l.*, row_number() OVER (PARTITION BY l.run, l.stream, l.key, l.step ORDER BY l.ord DESC, l.record DESC) AS age
FROM lived l LEFT JOIN cuts c USING (run, stream, ord, key) WHERE c.cut IS NULL OR l.step < c.cut
"""
_METRICS = """
INSERT INTO metrics
SELECT run, key, step, value, kind, wall_time, source_id FROM streams WHERE age = 1
QUALIFY row_number() OVER (
    PARTITION BY run, key, step
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
SELECT a.run, a.key, a.step, oa.path, a.value, b.path, b.value
FROM metrics a JOIN sources oa USING (source_id)
JOIN streams b ON a.run = b.run AND a.key = b.key AND a.step = b.step AND b.age = 1 AND b.source_id != a.source_id
WHERE {_DISAGREE.format(a="a", b="b")}
ORDER BY ALL
"""
_REWRITTEN = f"""
INSERT INTO rewritten
SELECT b.run, b.key, b.step, b.path, b.value, a.value
FROM (SELECT l.* FROM lived l JOIN cuts c USING (run, stream, ord, key) WHERE l.step >= c.cut) b
LEFT JOIN (SELECT * FROM streams WHERE age = 1) a USING (run, stream, key, step)
WHERE a.value IS NULL OR {_DISAGREE.format(a="a", b="b")}
ORDER BY ALL
"""
_SIGNALS = """
INSERT INTO signals
SELECT run, role, signal, label, step, value * scale + "offset", kind, key, inert_because IS NOT NULL, false
FROM metrics JOIN key_map USING (run, key) JOIN runs USING (run)
WHERE standing = 'mapped' AND corrupt_because IS NULL
QUALIFY row_number() OVER (PARTITION BY run, signal, label, step ORDER BY key) = 1
"""
_ZEROS = """
INSERT INTO signals
SELECT DISTINCT c.run, c.role, z.signal, z.label, c.step, 0.0, 'finite', z.key, false, true
FROM zero_keys z
JOIN (SELECT m.run, role, key, step FROM metrics m JOIN runs USING (run)) c ON c.run = z.run AND c.key = z.zero_with
ANTI JOIN signals s ON s.run = z.run AND s.signal = z.signal AND s.label = z.label AND s.step = c.step
"""


def finish(con: duckdb.DuckDBPyConnection, mappings: Mapping[str, KeyMapping]) -> None:
    """Reconcile trackers and process lives, derive signals, fill in zeros that were left out, make the wide views."""
    for statement in (_LIVED, _CUTS, _STREAMS, _METRICS):
        con.execute(statement)
    limits = {"same": AGREE, "rounded": AGREE_ROUNDED}
    con.execute(_DIFFERENCES, limits)
    con.execute(_REWRITTEN, limits)
    con.execute("DROP TABLE streams; DROP TABLE cuts; DROP VIEW lived")
    con.execute(_SIGNALS)
    con.execute(
        "CREATE TEMP TABLE zero_keys (run VARCHAR, signal VARCHAR, label VARCHAR, key VARCHAR, zero_with VARCHAR)"
    )
    _insert(con, "zero_keys", [row for run, mapping in mappings.items() for row in _zero_rows(run, mapping)])
    con.execute(_ZEROS)
    con.execute("DROP TABLE zero_keys")
    _wide_views(con)


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
