"""Token sums into the token tables of the store, where SQL joins them with the trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_audit.measure.tokens.engines import MERGE_AT, Failure
from verl_audit.measure.tokens.spec import UNKNOWN, bin_edges, bucket_edges
from verl_audit.measure.tokens.sums import TokenSums, merge

_NULLABLE = ("step", "lag", "minibatch", "lag_updates")
_EDGES = {"bin": bin_edges, "bucket": bucket_edges}


def load(
    con: duckdb.DuckDBPyConnection, run: str, shards: Iterable[TokenSums | Failure], ids: Mapping[str, int]
) -> tuple[Failure, ...]:
    """Put the sums of a run's shards into the store; returns what could not be read, by source.

    `ids`: name of each source (`shard.name_of`) to its `source_id`. Per-trajectory rows go in shard by shard, so memory
    stays flat; the other tables follow at the end.
    """
    told: list[Failure] = []
    waiting = [merge([])]
    for shard in shards:
        if isinstance(shard, Failure):
            told.append(shard)
            continue
        for source, table in shard.trajectories.items():
            numbered = table.add_column(0, "source_id", pa.array(np.full(len(table), ids[source]), pa.int32()))
            _insert(con, "token_trajectories", run, numbered)
        waiting.append(replace(shard, trajectories={}))
        if len(waiting) > MERGE_AT:
            waiting = [merge(waiting)]
    total = merge(waiting)
    told += [Failure(p.file, p.detail, p.kind, p.count) for p in total.problems]
    for name, table in total.tables().items():
        _insert(con, f"token_{name}", run, _named(table))
    return tuple(told)


def _named(table: pa.Table) -> pa.Table:
    """Unknown keys as null, bins with their edges."""
    for name in _NULLABLE:
        if name in table.column_names:
            known = pc.if_else(pc.equal(table[name], UNKNOWN), pa.scalar(None, pa.int64()), table[name])
            table = table.set_column(table.schema.get_field_index(name), name, known)
    for name, edges in _EDGES.items():
        if name in table.column_names:
            low = pa.array(edges())
            table = table.append_column("low", low.take(table[name].combine_chunks()))
            table = table.append_column("high", low.take(pc.add(table[name], 1).combine_chunks()))
    return table


def _insert(con: duckdb.DuckDBPyConnection, name: str, run: str, table: pa.Table) -> None:
    con.register("_token_rows", table.add_column(0, "run", pa.repeat(run, len(table))))
    con.execute(f"INSERT INTO {name} BY NAME SELECT * FROM _token_rows")
    con.unregister("_token_rows")
