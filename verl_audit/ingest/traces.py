"""Per-trajectory traces: files of the trace schema and the dumps that carry enough to be mapped onto it.

`read` names what a directory holds. `settled` gives the rows of one run, repaired as a whole. `scalars` and `batches`
read one source; nothing downstream knows which format it was. Cells that cannot be true are null and counted as
problems; `row` is a row's position in its source, the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_audit.ingest import trace_areal, trace_nemo_rl, trace_parquet, trace_prime_rl, trace_recorder, trace_verl
from verl_audit.ingest.model import Format, Identity, Parsed
from verl_audit.ingest.trace_check import check_lags, check_scalars, check_tokens, segment_versions
from verl_audit.ingest.trace_columns import conform
from verl_audit.ingest.trace_source import TraceFormat, TraceSource
from verl_audit.trace.schema import COLUMNS, FATES, Column
from verl_audit.trace.write import ROW_GROUP_TOKENS

__all__ = ["Settled", "TraceSource", "batches", "read", "scalars", "settled"]

_MODULES: dict[TraceFormat, ModuleType] = {
    "parquet": trace_parquet,
    "recorder": trace_recorder,
    "verl_dump": trace_verl,
    "nemo_rl": trace_nemo_rl,
    "prime_rl": trace_prime_rl,
    "areal": trace_areal,
}
_POOR: frozenset[TraceFormat] = frozenset({"verl_dump"})
"""Formats that say less of the same rows than any other, and are left out beside one."""
_FINAL = [fate for fate in FATES if fate not in ("in_flight", "unknown")]
_ALWAYS = frozenset({"run", "group", "fate", "response_length", "loss_mask", "step", "version"})
_VERSIONS = frozenset({"first_version", "last_version", "segments"})
"""Columns without which rows cannot be chosen, or lists and versions not be checked."""
_ROW = pa.field("row", pa.int64(), nullable=False)


@dataclass(frozen=True)
class Settled:
    """A source with the repairs that only its whole run can tell, and its scalar rows after them."""

    source: TraceSource
    table: pa.Table


def read(path: Path) -> list[Parsed]:
    """The trace in a directory (or one file), one `Parsed` for each run that it names. Never raises."""
    notes = Parsed(path, "trace")
    found: dict[str | None, list[TraceSource]] = {}
    for file in trace_parquet.files_of(path):
        for source in trace_parquet.sources(file, notes):
            found.setdefault(source.run, []).append(source)
        notes.bytes_read += file.stat().st_size
    made = [Parsed(path, "trace", identity=Identity(experiment=run), traces=found[run]) for run in found]
    made = made or [Parsed(path, "trace")]
    made[0].problems, made[0].bytes_read = notes.problems, notes.bytes_read
    return made


def _read_dump(path: Path, form: Format, module: ModuleType) -> list[Parsed]:
    parsed = Parsed(path, form)
    parsed.traces.extend(module.sources(path, parsed))
    return [parsed]


def read_recorder(path: Path) -> list[Parsed]:
    """A `trajectory_trace.jsonl`."""
    return _read_dump(path, "trace_recorder", trace_recorder)


def read_nemo_rl(path: Path) -> list[Parsed]:
    """The `train_data_step<N>.jsonl` in a directory."""
    return _read_dump(path, "trace_nemo_rl", trace_nemo_rl)


def read_prime_rl(path: Path) -> list[Parsed]:
    """A `rollouts` directory of prime-rl."""
    return _read_dump(path, "trace_prime_rl", trace_prime_rl)


def read_areal(path: Path) -> list[Parsed]:
    """The directory of a trial of AReaL, with `rollout` and `session_tracer`."""
    return _read_dump(path, "trace_areal", trace_areal)


def read_verl(path: Path) -> list[Parsed]:
    """A `rollout_data` or `val_data` directory of verl."""
    return trace_verl.read(path)


def scalars(source: TraceSource, notes: Parsed | None = None) -> pa.Table:
    """All columns of the schema except the token lists, and `row`; checked, with the repairs the source carries."""
    notes = notes or Parsed(source.path, "trace")
    table = _repaired(_unrepaired(source, notes), source)
    return check_lags(table, notes) if source.table == "trajectories" else table


def batches(
    source: TraceSource, notes: Parsed | None = None, columns: Collection[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """All columns with the token lists, row group by row group, each of about a million tokens at most.

    `columns` are those that are needed: of the others some are read, where a check needs them, and the rest are null.
    Log-probs are lists of float32 whatever the file holds; a list that is not as long as the response, or holds what
    no log-prob can be, is null. Problems of the scalars are not counted again.
    """
    notes, quiet = notes or Parsed(source.path, "trace"), Parsed(source.path, "trace")
    schema = COLUMNS[source.table]
    lists = tuple(c.name for c in schema if c.tokens and c.name != "loss_mask")
    only = None if columns is None else {*columns, *_ALWAYS, *(_VERSIONS if "train_version" in columns else ())}
    for part in _parts(source, notes, tokens=True, only=only):
        table = _checked(part, schema, source, quiet, tokens=notes)
        if source.table == "trajectories":
            table = check_lags(_repaired(check_tokens(table, lists, notes), source), quiet)
        yield from _cut(table)


def _cut(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """One batch of a table, or several of about `ROW_GROUP_TOKENS` response tokens."""
    if not len(table):
        return
    if "response_length" not in table.column_names:
        yield from table.combine_chunks().to_batches()
        return
    before = np.concatenate([[0], np.cumsum(table["response_length"].fill_null(0).to_numpy().astype(np.int64))])
    start = 0
    while start < len(table):
        limit = before[start] + 2 * ROW_GROUP_TOKENS
        if before[-1] <= limit:
            stop = len(table)
        else:
            stop = max(start + 1, int(np.searchsorted(before, before[start] + ROW_GROUP_TOKENS, "right")) - 1)
        yield from table.slice(start, stop - start).combine_chunks().to_batches()
        start = stop


def _unrepaired(source: TraceSource, notes: Parsed) -> pa.Table:
    columns = tuple(c for c in COLUMNS[source.table] if not c.tokens)
    parts = [_checked(part, columns, source, notes) for part in _parts(source, notes, tokens=False)]
    if parts:
        return pa.concat_tables([part.unify_dictionaries() for part in parts]).combine_chunks().unify_dictionaries()
    return pa.table(
        [pa.array([], c.type) for c in columns] + [pa.array([], _ROW.type)], names=[*(c.name for c in columns), "row"]
    )


def _parts(
    source: TraceSource, notes: Parsed, *, tokens: bool, only: Collection[str] | None = None
) -> Iterator[pa.Table]:
    """Pieces of a source with `row` in each; what cannot be read ends them and is noted."""
    row, some = 0, {"only": only} if source.format == "parquet" else {}  # dumps have no columns to choose from
    try:
        for part in _MODULES[source.format].parts(source, notes, tokens=tokens, **some):
            rows = pa.array(range(row, row + len(part)), pa.int64())
            row += len(part)
            yield part if "row" in part.column_names else part.append_column(_ROW, rows)
    except trace_parquet.DAMAGE as error:
        notes.note("trace_unreadable", str(error)[:120])


def _checked(
    part: pa.Table, columns: tuple[Column, ...], source: TraceSource, notes: Parsed, tokens: Parsed | None = None
) -> pa.Table:
    """A piece in the schema's types, its cells checked and rows of other runs left out."""
    rows = part["row"].combine_chunks()
    table = conform(part, columns, notes, tokens or notes).append_column(_ROW, rows)
    if source.only_run:
        own = pc.is_null(table["run"]) if source.run is None else pc.equal(table["run"], source.run)
        table = table.filter(pc.fill_null(own, False))
    return check_scalars(table, notes) if source.table == "trajectories" else _required(table, columns, notes)


def _required(table: pa.Table, columns: tuple[Column, ...], notes: Parsed) -> pa.Table:
    """Rows of the small tables that have what each must have."""
    for name in (c.name for c in columns if c.required):
        if missing := table[name].null_count:
            notes.note("trace_required", f"rows without {name} are left out", count=missing)
            table = table.filter(pc.is_valid(table[name]))
    return table


def _repaired(table: pa.Table, source: TraceSource) -> pa.Table:
    if source.dropped:
        gone = np.isin(table["row"].to_numpy(), np.fromiter(source.dropped, np.int64))
        table = table.filter(pa.array(~gone))
    if source.version_offset:
        moved = pc.subtract(table["train_version"], pa.scalar(source.version_offset, pa.int32()))
        table = table.set_column(table.schema.get_field_index("train_version"), "train_version", moved)
    return table


def settled(sources: Sequence[TraceSource], notes: Callable[[TraceSource], Parsed]) -> list[Settled]:
    """The sources of one run with their scalar rows, after the repairs that only the whole run can tell.

    Beside a source that records more, dumps of trained rows alone are left out. A trajectory that occurs more than
    once was decided again after a resume: the one decided last counts. The first batch calibrates `train_version`.
    `notes` gives the place to report problems of a source.
    """
    richer = [s for s in sources if s.table == "trajectories" and s.format not in _POOR and s.rows]
    kept = [s for s in sources if not (richer and s.format in _POOR)]
    read_rows = [(source, _unrepaired(source, notes(source))) for source in kept]
    mine = [(s, table) for s, table in read_rows if s.table == "trajectories"]
    offset, dropped = _offset([table for _, table in mine]), _replaced_rows([table for _, table in mine])
    made = []
    for source, table in read_rows:
        if source.table != "trajectories":
            made.append(Settled(source, table))
            continue
        repaired = replace(source, version_offset=offset, dropped=dropped.pop(0))
        _tell(repaired, notes(source))
        made.append(Settled(repaired, check_lags(_repaired(table, repaired), notes(source))))
    return made


def _tell(source: TraceSource, notes: Parsed) -> None:
    if source.dropped:
        detail = "trajectories decided again, as after a resume: the one decided last counts"
        notes.note("trace_repeated", detail, count=len(source.dropped))
    if source.version_offset:
        detail = (
            f"train_version is {source.version_offset} too high: the run's first batch was sampled by its first weights"
        )
        notes.note("trace_offset", detail)


def _offset(tables: Sequence[pa.Table]) -> int:
    """By how much train_version is labelled higher than the versions of the tokens.

    Before the first update of a run there is one version only: it samples what step 1 (or 0) trains, and trains on
    it. So all tokens of that batch have lag 0, and if all have the same other lag, the labels are off by it. A trace
    that begins later, or a first batch of several lags, calibrates nothing.
    """
    batches = [b for table in tables if len(b := _first_batch(table))]
    if not batches:
        return 0
    first = min(pc.min(batch["decided_step"]).as_py() for batch in batches)
    lags: set[int] = set()
    for batch in batches:
        own = batch.filter(pc.equal(batch["decided_step"], first))
        for version in (own["first_version"], own["last_version"], *segment_versions(own)):
            lags.update(pc.subtract(own["train_version"], version).drop_null().unique().to_pylist())
    return lags.pop() if len(lags) == 1 else 0


def _first_batch(table: pa.Table) -> pa.Table:
    """Rows trained at a step that can be the first of a run."""
    trained = pc.equal(table["fate"].cast(pa.string()), "trained")
    batch = table.filter(pc.fill_null(pc.and_(trained, pc.less_equal(table["decided_step"], 1)), False))
    return batch.filter(pc.equal(batch["decided_step"], pc.min(batch["decided_step"]))) if len(batch) else batch


def _replaced_rows(tables: Sequence[pa.Table]) -> list[frozenset[int]]:
    """Per table the positions of rows that another row of the run replaces.

    Of rows with one group, session and turn the last stays: final over open, then by time decided, by step decided,
    then by place. A row without a session stands for a group of which nothing is known: while it is open, any other row
    of the group replaces it.
    """
    return [again | known for again, known in zip(_decided_again(tables), _known_since(tables), strict=True)]


def _decided_again(tables: Sequence[pa.Table]) -> list[frozenset[int]]:
    keyed = [_keyed(table, index) for index, table in enumerate(tables)]
    rows = pa.concat_tables(keyed) if keyed else pa.table({})
    if not len(rows):
        return [frozenset()] * len(tables)
    group = rows["group"].combine_chunks().dictionary_encode().indices.to_numpy()
    key = [group, *(rows[name].to_numpy() for name in ("session", "turn"))]
    rank = [rows[name].to_numpy() for name in ("final", "when", "step", "source", "row")]
    order = np.lexsort([*reversed(rank), *reversed(key)])
    again = np.logical_and.reduce([part[order][:-1] == part[order][1:] for part in key])
    gone = order[:-1][again]
    source, row = rank[3][gone], rank[4][gone]
    return [frozenset(row[source == index].tolist()) for index in range(len(tables))]


def _known_since(tables: Sequence[pa.Table]) -> list[frozenset[int]]:
    """Open rows without a session whose group has another row, in any table or after them."""
    opens = [pc.and_(pc.is_null(table["session"]), pc.invert(_is_final(table))) for table in tables]
    found: list[frozenset[int]] = [frozenset()] * len(tables)
    if not any(pc.any(one).as_py() for one in opens):
        return found
    others = [_group(table.filter(pc.invert(one))) for table, one in zip(tables, opens, strict=True)]
    known = pa.chunked_array([part for one in others for part in one.chunks], pa.string()).unique()
    later: set[str] = set()
    for i in range(len(tables) - 1, -1, -1):
        own = tables[i].filter(opens[i])
        groups = _group(own)
        is_known = pc.is_in(groups, known).to_pylist()
        gone = set[int]()
        for row, group, elsewhere in reversed(
            [*zip(own["row"].to_pylist(), groups.to_pylist(), is_known, strict=True)]
        ):
            if elsewhere or group in later:
                gone.add(row)
            later.add(group)
        found[i] = frozenset(gone)
    return found


def _group(table: pa.Table) -> pa.ChunkedArray:
    return table["group"].cast(pa.string())


def _is_final(table: pa.Table) -> pa.ChunkedArray:
    return pc.is_in(table["fate"].cast(pa.string()), pa.array(_FINAL))


def _keyed(table: pa.Table, index: int) -> pa.Table:
    own = table.filter(pc.is_valid(table["session"]))
    final = _is_final(own).cast(pa.int8())
    return pa.table(
        {
            "group": own["group"],
            "session": own["session"],
            "turn": pc.fill_null(own["turn"], -1),
            "final": final,
            "when": pc.fill_null(own["t_decided"].cast(pa.int64()), -1),
            "step": pc.fill_null(own["decided_step"], -1),
            "source": pa.array(np.full(len(own), index)),
            "row": own["row"],
        }
    )
