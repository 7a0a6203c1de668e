from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.trace.schema import KEY_TABLE, KEY_UPDATES, TABLES, schema
from verl_audit.trace.write import leaves, row_groups, to_table, write

ROWS = [
    {
        "group": "a",
        "session": 0,
        "fate": "trained",
        "reasons": ["trained"],
        "response_length": 3,
        "segments": [{"version": 4, "start": 0, "length": 3, "server": "s0", "prefill": 9, "stop": "stop"}],
        "behave_logp": [-0.5, 0.0, -2.0],
        "prox_logp": [-0.5, -0.1, -2.5],
        "loss_mask": [True, True, False],
        "reward_parts": {"exact": 1.0},
        "sums": [],
    },
    {"group": "a", "session": 1, "fate": "stale", "response_length": 0, "behave_logp": []},
]


def test_a_written_table_is_read_back_with_nulls_where_nothing_was_known(tmp_path: Path) -> None:
    write(to_table(ROWS, run="r", updates_per_version=2), tmp_path / "t.parquet")
    back = pq.read_table(tmp_path / "t.parquet")
    assert back.schema.metadata[KEY_UPDATES] == b"2"
    first, second = back.to_pylist()
    assert first["segments"][0]["version"] == 4
    assert first["segments"][0]["t0"] is None
    assert dict(first["reward_parts"]) == {"exact": 1.0}
    assert second["behave_logp"] == []
    assert second["prox_logp"] is None
    assert second["train_version"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_log_prob_lists_are_plain_and_uncompressed(tmp_path: Path) -> None:
    write(to_table(ROWS), tmp_path / "t.parquet")
    group = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    logp = columns["behave_logp.list.element"]
    assert logp.compression == "UNCOMPRESSED"
    assert not logp.has_dictionary_page
    assert not logp.is_stats_set
    assert columns["group"].has_dictionary_page
    assert set(columns) == set(leaves(to_table(ROWS).schema))


def test_sql_reads_a_trace_file(tmp_path: Path) -> None:
    write(to_table(ROWS), tmp_path / "t.parquet")
    query = f"select fate, len(behave_logp), segments[1].version, reward_parts['exact'] from '{tmp_path}/t.parquet'"
    assert duckdb.execute(query).fetchall() == [("trained", 3, 4, 1.0), ("stale", 0, None, None)]


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100))
def test_row_groups_are_the_table_in_order(lengths: list[int], tokens: int) -> None:
    table = pa.table({"response_length": pa.array(lengths, pa.int32())})
    groups = list(row_groups(table, tokens))
    assert [x for g in groups for x in g["response_length"].to_pylist()] == lengths
    for group in filter(len, groups):
        *before, _ = group["response_length"].to_pylist()
        assert not sum(before) or sum(group["response_length"].to_pylist()) <= tokens


@pytest.mark.parametrize("table", TABLES)
def test_every_table_can_be_written_empty(table: str, tmp_path: Path) -> None:
    write(to_table([], table), tmp_path / "t.parquet")  # type: ignore[arg-type]
    assert pq.read_schema(tmp_path / "t.parquet").metadata[KEY_TABLE] == table.encode()


def test_the_fast_form_holds_bytes_under_its_own_names(tmp_path: Path) -> None:
    target = schema(blobs=True)
    assert target.field("behave_logp_f32le").type == pa.binary()
    assert "behave_logp" not in target.names
    row = {"group": "g", "fate": "trained", "response_length": 1, "behave_logp_f32le": b"\x00\x00\x00\x00"}
    write(to_table([row], blobs=True), tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet")["behave_logp_f32le"].to_pylist() == [b"\x00" * 4]


def test_a_column_the_schema_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no such column: colour"):
        to_table([{"group": "g", "fate": "trained", "response_length": 1, "colour": 1}])
