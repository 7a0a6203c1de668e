"""Files of the trace schema: read back whole, and whatever is wrong with them told and kept out."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all
from verl_audit.ingest.runs import group_runs
from verl_audit.ingest.traces import Settled, TraceSource, batches, read, scalars, settled
from verl_audit.trace.schema import COLUMNS, Table
from verl_audit.trace.write import to_table, write

Rows = list[dict[str, Any]]
DAY = 1_700_000_000_000_000


def row(number: int = 0, /, **values: Any) -> dict[str, Any]:
    """A trajectory with nothing wrong: three tokens of version 3, trained by version 4 at step 5."""
    return {
        "group": f"g{number}",
        "session": 0,
        "fate": "trained",
        "decided_step": 5,
        "submit_step": 4,
        "first_version": 3,
        "last_version": 3,
        "train_version": 4,
        "response_length": 3,
        "behave_logp": [-0.5, -0.25, -2.0],
        "prox_logp": [-0.5, -0.5, -2.5],
        "loss_mask": [True, True, True],
        "segments": [{"version": 3, "start": 0, "length": 3}],
        "reward": 1.0,
        **values,
    }


def written(directory: Path, rows: Rows, name: str = "t.parquet", table: Table = "trajectories", **more: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write(to_table(rows, table, **more), directory / name)
    return directory / name


def opened(path: Path) -> tuple[list[TraceSource], Parsed]:
    """The sources below a path, and the problems found so far."""
    parsed = read(path)
    notes = Parsed(path, "trace", problems=[p for one in parsed for p in one.problems])
    return [source for one in parsed for source in one.traces], notes


def run_of(path: Path) -> tuple[list[Settled], dict[str, int]]:
    """The settled sources of a path and the count of each kind of problem, those of the token lists included."""
    sources, notes = opened(path)
    parts = settled(sources, lambda source: notes)
    for part in parts:
        for _ in batches(part.source, notes):
            pass
    return parts, {p.kind: p.count for p in notes.problems}


def only(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The only row of a trace, scalars and lists, and the problems."""
    parts, problems = run_of(path)
    (scalar,) = parts[0].table.to_pylist()
    (tokens,) = [r for batch in batches(parts[0].source) for r in batch.to_pylist()]
    assert {k: tokens[k] for k in scalar} == scalar
    return tokens, problems


def test_a_written_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [row(i, reward_parts={"exact": 0.5}, t_done=DAY) for i in range(5)]
    written(tmp_path / "trace", rows, run="r", updates_per_version=2)
    (source,), notes = opened(tmp_path / "trace")
    assert (source.run, source.updates_per_version, source.rows, source.table) == ("r", 2, 5, "trajectories")
    assert source.has_log_probs == ("behave_logp", "prox_logp")
    table = scalars(source, notes)
    assert table["group"].to_pylist() == [f"g{i}" for i in range(5)]
    assert table["row"].to_pylist() == list(range(5))
    assert "behave_logp" not in table.column_names
    assert {c.name for c in COLUMNS["trajectories"] if not c.tokens} | {"row"} == set(table.column_names)
    (batch,) = batches(source, notes)
    assert batch.column("behave_logp").to_pylist() == [[-0.5, -0.25, -2.0]] * 5
    assert batch.column("row").to_pylist() == list(range(5))
    assert not notes.problems


def test_columns_that_nobody_needs_are_not_read(tmp_path: Path) -> None:
    written(tmp_path, [row(0), row(1, behave_logp=[-1.0]), row(2, train_version=1)])
    (source,), notes = opened(tmp_path)
    (batch,) = batches(source, notes, columns=["behave_logp", "train_version"])
    assert batch.column("behave_logp").to_pylist() == [[-0.5, -0.25, -2.0], None, [-0.5, -0.25, -2.0]]
    assert batch.column("train_version").to_pylist() == [4, 4, None]
    assert batch.column("reward").null_count == batch.column("prox_logp").null_count == 3
    assert {p.kind for p in notes.problems} == {"trace_lengths"}


def test_blobs_are_decoded_to_lists_without_a_copy(tmp_path: Path) -> None:
    blob = [struct.pack("<3f", -0.5, -0.25, -2.0), None, b""]
    rows = [row(0), row(1), row(2, response_length=0, segments=[], loss_mask=[])]
    names = [n for n in rows[0] if not n.endswith("_logp")]
    table = to_table({n: [r[n] for r in rows] for n in names} | {"behave_logp_f32le": blob}, blobs=True)
    write(table, tmp_path / "t.parquet")
    (source,), notes = opened(tmp_path)
    (batch,) = batches(source, notes)
    assert batch.column("behave_logp").to_pylist() == [[-0.5, -0.25, -2.0], None, []]
    assert not notes.problems


def test_a_blob_of_no_whole_number_of_floats_is_null(tmp_path: Path) -> None:
    values = {"group": ["a", "b"], "fate": ["trained"] * 2, "response_length": [1, 1]}
    table = to_table(values | {"behave_logp_f32le": [b"\0\0\0", struct.pack("<f", -1.0)]}, blobs=True)
    write(table, tmp_path / "t.parquet")
    (source,), notes = opened(tmp_path)
    (batch,) = batches(source, notes)
    assert batch.column("behave_logp").to_pylist() == [None, [-1.0]]
    assert [(p.kind, p.count) for p in notes.problems] == [("trace_type", 1)]


# --- files ---------------------------------------------------------------------------------------------------------


def test_unreadable_files_are_told_and_the_others_read(tmp_path: Path) -> None:
    whole = written(tmp_path, [row(1)], "2.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(b"")
    (tmp_path / "3.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "4.parquet").write_bytes(b"PAR1")
    (tmp_path / "5.parquet.tmp").write_bytes(whole)
    parts, problems = run_of(tmp_path)
    assert [p.table["group"].to_pylist() for p in parts] == [["g1"]]
    assert problems == {"trace_unreadable": 3}


def test_discovery_finds_the_directory_of_a_trace_once(tmp_path: Path) -> None:
    for step in (10, 2):
        written(tmp_path / f"trace/step={step}", [row(step, decided_step=step)], "part-0.parquet")
    written(tmp_path / "trace", [{"version": 1, "step": 1}], "syncs.parquet", "syncs")
    (tmp_path / "trace/step=2/part-1.parquet.tmp").write_bytes(b"PAR1")
    found = discover([tmp_path])
    assert [(f.path.name, f.format) for f in found.files] == [("trace", "trace")]
    assert "being written" in {s.path.name: s.reason for s in found.skipped}["part-1.parquet.tmp"]
    (parsed,) = read_all(found)
    assert [(s.table, s.path.parent.name) for s in parsed.traces] == [
        ("trajectories", "step=2"),
        ("trajectories", "step=10"),
        ("syncs", "trace"),
    ]


def test_the_files_word_beats_its_folders(tmp_path: Path) -> None:
    written(tmp_path / "step=7", [row(0, decided_step=5), row(1, decided_step=7)])
    bare = to_table([row(2)]).drop_columns(["decided_step"])
    (tmp_path / "step=9").mkdir()
    pq.write_table(bare, tmp_path / "step=9/t.parquet")
    parts, problems = run_of(tmp_path)
    assert [p.table["decided_step"].to_pylist() for p in parts] == [[5, 7], [9]]
    assert problems == {"trace_folder": 1}


def test_a_corrupt_row_group_costs_its_own_rows_only(tmp_path: Path) -> None:
    path = groups_of(tmp_path / "t.parquet", [[row(i)] for i in range(4)])
    place = pq.ParquetFile(path).metadata.row_group(2)
    names = {place.column(i).path_in_schema: place.column(i) for i in range(place.num_columns)}
    smash(path, names["group"].data_page_offset + names["group"].total_compressed_size - 3)
    parts, problems = run_of(path)
    assert parts[0].table["row"].to_pylist() == [0, 1, 3]
    assert problems["trace_row_group"] >= 1
    assert [r for b in batches(parts[0].source) for r in b.column("row").to_pylist()] == [0, 1, 3]


def test_a_corrupt_list_is_caught_by_its_checksum_and_costs_that_column_only(tmp_path: Path) -> None:
    path = groups_of(tmp_path / "t.parquet", [[row(i)] for i in range(3)])
    smash(path, path.read_bytes().index(struct.pack("<f", -0.25)))
    parts, problems = run_of(path)
    assert parts[0].table["row"].to_pylist() == [0, 1, 2]
    lists = [r for b in batches(parts[0].source) for r in b.column("behave_logp").to_pylist()]
    assert lists == [None, [-0.5, -0.25, -2.0], [-0.5, -0.25, -2.0]]
    assert problems == {"trace_damaged": 1}


def groups_of(path: Path, groups: list[Rows]) -> Path:
    """A file with one row group for each list of rows, uncompressed so that a test finds its way in it."""
    tables = [to_table(rows) for rows in groups]
    with pq.ParquetWriter(
        path,
        tables[0].schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            writer.write_table(table)
    return path


def smash(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x5A
    path.write_bytes(data)


def test_one_giant_row_group_comes_in_several_batches(tmp_path: Path) -> None:
    length = 1 << 18
    values = [-0.5] * length
    rows = [
        row(i, response_length=length, behave_logp=values, prox_logp=None, loss_mask=None, segments=None)
        for i in range(12)
    ]
    pq.write_table(to_table(rows), tmp_path / "t.parquet", row_group_size=100)
    (source,), notes = opened(tmp_path)
    sizes = [len(batch) for batch in batches(source, notes)]
    assert sum(sizes) == 12
    assert max(sizes) * length <= 2 << 20
    assert not notes.problems


def test_a_file_of_several_runs_is_a_source_for_each(tmp_path: Path) -> None:
    written(tmp_path, [row(0, run="a"), row(1, run="b"), row(2, run="a")])
    parsed = read(tmp_path)
    assert [(p.identity.experiment, [s.run for s in p.traces]) for p in parsed] == [("a", ["a"]), ("b", ["b"])]
    groups = [scalars(p.traces[0])["group"].to_pylist() for p in parsed]
    assert groups == [["g0", "g2"], ["g1"]]
    assert [r for b in batches(parsed[0].traces[0]) for r in b.column("row").to_pylist()] == [0, 2]


# --- columns -------------------------------------------------------------------------------------------------------


def test_extra_and_missing_columns_are_told(tmp_path: Path) -> None:
    table = to_table([row()]).drop_columns(["response_length"]).append_column("mine", pa.array([1]))
    pq.write_table(table, tmp_path / "t.parquet")
    parts, problems = run_of(tmp_path)
    assert problems == {"trace_column_extra": 1, "trace_column_missing": 1}
    assert parts[0].table["response_length"].to_pylist() == [None]


def test_without_groups_nothing_can_be_counted(tmp_path: Path) -> None:
    pq.write_table(to_table([row()]).drop_columns(["group"]), tmp_path / "t.parquet")
    parts, problems = run_of(tmp_path)
    assert len(parts[0].table) == 0
    assert problems == {"trace_column_missing": 1, "trace_group": 1}


FOREIGN: Mapping[str, Callable[[pa.Table], pa.Table]] = {
    "int64": lambda t: t.set_column(
        t.schema.get_field_index("decided_step"), "decided_step", pa.array([5], pa.int64())
    ),
    "float": lambda t: t.set_column(t.schema.get_field_index("decided_step"), "decided_step", pa.array([5.0])),
    "double lists": lambda t: cast(t, "behave_logp", pa.list_(pa.float64())),
    "large lists": lambda t: cast(t, "behave_logp", pa.large_list(pa.float32())),
    "fixed lists": lambda t: cast(t, "behave_logp", pa.list_(pa.float32(), 3)),
    "half floats": lambda t: cast(t, "behave_logp", pa.list_(pa.float16())),
    "int8 mask": lambda t: cast(t, "loss_mask", pa.list_(pa.int8())),
    "plain strings": lambda t: cast(t, "fate", pa.string()),
    "large strings": lambda t: cast(t, "group", pa.large_string()),
    "dictionary": lambda t: t.set_column(0, "run", pa.array(["r"]).dictionary_encode()),
    "all null": lambda t: t.set_column(t.schema.get_field_index("turn"), "turn", pa.nulls(1)),
    "large segments": lambda t: cast(
        t, "segments", pa.list_(pa.struct([(n, pa.int64()) for n in ("version", "start", "length")]))
    ),
}


def cast(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    values = table[name].to_pylist()
    if kind == pa.list_(pa.int8()):
        values = [[int(v) for v in row] for row in values]
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        values = [[{f.name: s[f.name] for f in kind.value_type} for s in v] for v in values]
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_types_of_other_writers_are_taken(tmp_path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    written(tmp_path, [row(0)], "a.parquet")
    pq.write_table(change(to_table([row(0)])), tmp_path / "b.parquet")
    (left, right), problems = run_of(tmp_path)
    assert not {k: n for k, n in problems.items() if k != "trace_repeated"}
    ours, theirs = (
        next(iter(batches(s))).to_pylist()[0] for s in (TraceSource(left.source.path, "parquet"), right.source)
    )
    assert {**ours, "run": None} == {**theirs, "run": None}
    assert left.table.schema == right.table.schema


def test_cells_that_do_not_fit_are_null_and_counted(tmp_path: Path) -> None:
    table = to_table([row(0), row(1), row(2)])
    table = table.set_column(table.schema.get_field_index("turns"), "turns", pa.array([1, 1 << 40, None], pa.int64()))
    table = table.set_column(
        table.schema.get_field_index("prompt_length"), "prompt_length", pa.array([1.5, math.nan, 2.0])
    )
    table = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array(["a", "b", None]))
    pq.write_table(table, tmp_path / "t.parquet")
    parts, _ = run_of(tmp_path)
    got = parts[0].table
    assert got["turns"].to_pylist() == [1, None, None]
    assert got["prompt_length"].to_pylist() == [None, None, 2]
    assert got["reward"].to_pylist() == [None, None, None]
    notes = Parsed(tmp_path, "trace")
    scalars(parts[0].source, notes)
    assert [(p.kind, p.count) for p in notes.problems] == [("trace_type", 5)]


# --- rows ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"fate": "eaten"}, "trace_fate", {"fate": "unknown"}),
    ({"response_length": -1}, "trace_negative", {"response_length": None}),
    ({"session": -1}, "trace_negative", {"session": None}),
    ({"reward": math.nan}, "trace_nonfinite", {"reward": None}),
    ({"advantage": math.inf}, "trace_nonfinite", {"advantage": None}),
    ({"loss_tokens": 4}, "trace_counts", {"loss_tokens": None}),
    ({"loss_tokens": 2, "rejected_tokens": 3}, "trace_counts", {"rejected_tokens": None, "loss_tokens": 2}),
    ({"submit_step": 6}, "trace_age", {"submit_step": None, "decided_step": 5}),
    ({"first_version": 4}, "trace_versions", {"first_version": None, "last_version": None}),
    ({"train_version": 2}, "trace_lag", {"train_version": None}),
    ({"segments": [{"version": 9, "start": 0, "length": 3}]}, "trace_lag", {"train_version": None}),
    ({"segments": [{"version": 3, "start": 0, "length": 4}]}, "trace_segments", {"segments": None}),
    (
        {"segments": [{"version": 3, "start": 0, "length": 2}, {"version": 3, "start": 1, "length": 2}]},
        "trace_segments",
        {"segments": None},
    ),
    ({"segments": [{"version": 3, "start": 0, "length": -1}]}, "trace_segments", {"segments": None}),
    ({"segments": [{"version": -3, "start": 0, "length": 3}]}, "trace_segments", {"segments": None}),
    ({"segments": [{"version": 3, "start": 1, "length": 2}]}, "trace_gap", {}),
    ({"segments": []}, "trace_gap", {}),
    ({"behave_logp": [-0.5, -1.0]}, "trace_lengths", {"behave_logp": None, "prox_logp": [-0.5, -0.5, -2.5]}),
    ({"behave_logp": []}, "trace_lengths", {"behave_logp": None}),
    ({"loss_mask": [True]}, "trace_lengths", {"loss_mask": None, "behave_logp": None, "prox_logp": None}),
    ({"behave_logp": [-0.5, math.nan, -1.0]}, "trace_log_prob", {"behave_logp": None}),
    ({"behave_logp": [-0.5, -math.inf, -1.0]}, "trace_log_prob", {"behave_logp": None}),
    ({"behave_logp": [-0.5, 0.5, -1.0]}, "trace_log_prob", {"behave_logp": None}),
    ({"expert_agreement": [0.5, 1.5, 0.0]}, "trace_agreement", {"expert_agreement": None}),
]


@pytest.mark.parametrize(("change", "kind", "becomes"), BAD, ids=lambda v: str(v)[:60])
def test_what_cannot_be_true_is_null_and_counted(
    tmp_path: Path, change: dict[str, Any], kind: str, becomes: dict[str, Any]
) -> None:
    written(tmp_path, [row(0, **change)])
    got, problems = only(tmp_path)
    assert problems.keys() == {kind}
    assert {name: got[name] for name in becomes} == becomes
    untouched = {k: v for k, v in row(0).items() if k not in (*change, *becomes, "segments", "train_version")}
    assert {name: got[name] for name in untouched} == untouched


GOOD: list[dict[str, Any]] = [
    {"submit_step": 5},  # trained in the step that submitted it: prompt age 1
    {"train_version": 3},  # lag 0
    {"behave_logp": [-0.5, 0.01, 0.0]},  # rounding
    {"behave_logp": [-0.5, math.nan, -1.0], "loss_mask": [True, False, True]},
    {"segments": [{"version": 3, "start": 0, "length": 1}, {"version": 3, "start": 2, "length": 1}], "turns": 2},
    {"segments": [{"version": 2, "start": 0, "length": 0}, {"version": 3, "start": 0, "length": 3}]},
    {"segments": None, "behave_logp": None, "prox_logp": None, "loss_mask": None},
    {"response_length": 0, "segments": [], "behave_logp": [], "prox_logp": [], "loss_mask": []},
    {"loss_tokens": 3, "rejected_tokens": 3},
]


@pytest.mark.parametrize("change", GOOD, ids=lambda v: str(v)[:60])
def test_what_can_be_true_stays(tmp_path: Path, change: dict[str, Any]) -> None:
    written(tmp_path, [row(0, **change)])
    got, problems = only(tmp_path)
    assert not problems
    stays = {k: v for k, v in change.items() if k not in ("segments", "behave_logp")}
    assert {name: got[name] for name in stays} == stays
    assert got["behave_logp"] is not None or change.get("behave_logp", 1) is None


def test_tokens_outside_the_loss_hold_no_nan(tmp_path: Path) -> None:
    written(tmp_path, [row(0, behave_logp=[-0.5, math.nan, -1.0], loss_mask=[True, False, True])])
    got, problems = only(tmp_path)
    assert got["behave_logp"] == [-0.5, 0.0, -1.0]
    assert not problems


def test_segments_are_checked_row_by_row(tmp_path: Path) -> None:
    bad = [{"version": 3, "start": 0, "length": 9}]
    rows = [row(0), row(1, segments=None), row(2, segments=bad), row(3), row(4, segments=[])]
    parts, problems = (written(tmp_path, rows), run_of(tmp_path))[1]
    assert [s is not None for s in parts[0].table["segments"].to_pylist()] == [True, False, False, True, True]
    assert problems == {"trace_segments": 1, "trace_gap": 1}


# --- the run as a whole --------------------------------------------------------------------------------------------


def first_batch(offset: int, **change: Any) -> Rows:
    """A run from its first step on, its train_version labelled `offset` too high."""
    steps = [{"decided_step": s, "submit_step": s, "train_version": s - 1 + offset} for s in (1, 2, 3)]
    versions = [{"first_version": v, "last_version": v, "segments": None} for v in (0, 1, 1)]
    return [row(i, **(s | v | change)) for i, (s, v) in enumerate(zip(steps, versions, strict=True))]


@pytest.mark.parametrize("offset", [1, -1, 0, 2])
def test_the_first_batch_calibrates_the_version(tmp_path: Path, offset: int) -> None:
    rows = first_batch(offset)
    if offset < 0:
        rows[0]["train_version"] = 0
        rows = [
            r | {"first_version": r["first_version"] + 1, "last_version": r["last_version"] + 1} for r in first_batch(0)
        ]
    written(tmp_path, rows[:1], "1.parquet")
    written(tmp_path, rows[1:], "2.parquet")  # the offset holds for the run, wherever its first batch lies
    parts, problems = run_of(tmp_path)
    lags = [
        t - v
        for p in parts
        for t, v in zip(p.table["train_version"].to_pylist(), p.table["last_version"].to_pylist(), strict=True)
    ]
    assert lags == [0, 0, 1]
    assert problems == ({"trace_offset": 2} if offset else {})
    assert [p.source.version_offset for p in parts] == [offset, offset]
    again = [r for p in parts for b in batches(p.source) for r in b.column("train_version").to_pylist()]
    assert again == [v for p in parts for v in p.table["train_version"].to_pylist()]


def test_a_trace_that_begins_late_calibrates_nothing(tmp_path: Path) -> None:
    written(
        tmp_path,
        [row(0, decided_step=2, train_version=1, first_version=0, last_version=0, submit_step=1, segments=None)],
    )
    parts, problems = run_of(tmp_path)
    assert parts[0].source.version_offset == 0
    assert not problems


def test_a_first_batch_of_several_lags_calibrates_nothing(tmp_path: Path) -> None:
    rows = first_batch(1)
    rows[1] = rows[1] | {"decided_step": 1, "submit_step": 1, "train_version": 2}
    written(tmp_path, [rows[0], rows[1] | {"first_version": 0, "last_version": 0}])
    assert run_of(tmp_path)[0][0].source.version_offset == 0


def test_after_a_resume_the_later_decision_counts(tmp_path: Path) -> None:
    life1 = [row(0, fate="trained", t_decided=DAY), row(1, fate="in_flight", decided_step=None, t_decided=DAY + 9)]
    life2 = [row(0, fate="stale", t_decided=DAY + 5, decided_step=4), row(1, fate="trained", t_decided=DAY + 1), row(2)]
    written(tmp_path, life1, "1.parquet")
    written(tmp_path, life2, "2.parquet")
    parts, problems = run_of(tmp_path)
    kept = [
        (g, f) for p in parts for g, f in zip(p.table["group"].to_pylist(), p.table["fate"].to_pylist(), strict=True)
    ]
    assert kept == [("g0", "stale"), ("g1", "trained"), ("g2", "trained")]
    assert problems == {"trace_repeated": 2}
    assert [[r for b in batches(p.source) for r in b.column("row").to_pylist()] for p in parts] == [[], [0, 1, 2]]


def test_a_group_that_was_open_and_unknown_gives_way_to_what_is_known_later(tmp_path: Path) -> None:
    def unknown(i: int, fate: str = "in_flight") -> dict[str, Any]:
        return {"group": f"g{i}", "fate": fate, "response_length": 0, "decided_step": 3, "submit_step": 3}

    written(tmp_path, [row(0), unknown(1), unknown(2), unknown(3)], "1.parquet")
    written(tmp_path, [unknown(2), row(3, fate="in_flight"), row(3), unknown(0, "failed")], "2.parquet")
    written(tmp_path, [row(4), unknown(4)], "3.parquet")
    parts, problems = run_of(tmp_path)
    kept = [
        (g, f, s)
        for p in parts
        for g, f, s in zip(*(p.table[n].to_pylist() for n in ("group", "fate", "session")), strict=True)
    ]
    assert kept == [
        ("g0", "trained", 0),
        ("g1", "in_flight", None),
        ("g2", "in_flight", None),
        ("g3", "trained", 0),
        ("g0", "failed", None),
        ("g4", "trained", 0),
    ]
    assert problems == {"trace_repeated": 4}


def test_turns_sessions_and_rows_without_a_session_are_no_repeats(tmp_path: Path) -> None:
    rows = [
        row(0, turn=0),
        row(0, turn=1),
        row(0, session=1),
        row(0, session=None),
        row(0, session=None),
        row(1, turn=0),
    ]
    written(tmp_path, rows)
    parts, problems = run_of(tmp_path)
    assert len(parts[0].table) == 6
    assert not problems


# --- properties ----------------------------------------------------------------------------------------------------

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), cut=st.booleans())
def test_damage_anywhere_is_no_crash(tmp_path: Path, place: float, mask: int, cut: bool) -> None:
    """Whatever byte is wrong or wherever the file ends, the sources around it are read."""
    path = groups_of(tmp_path / "t.parquet", [[row(2 * i), row(2 * i + 1)] for i in range(4)])
    whole = path.read_bytes()
    at = int(place * len(whole))
    path.write_bytes(whole[:at] if cut else bytes([*whole[:at], whole[at] ^ mask, *whole[at + 1 :]]))
    written(tmp_path, [row(99)], "z.parquet")
    parts, _ = run_of(tmp_path)
    assert parts[-1].table["group"].to_pylist() == ["g99"]


@SLOW
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_damage_in_a_page_never_makes_a_value(tmp_path: Path, place: float, mask: int) -> None:
    """Every value read was written at its row; row groups without damage are whole. (A footer has no checksum.)"""
    rows = [row(i, reward=i / 7, behave_logp=[-i / 3, -1.0, -2.0], t_done=DAY + i) for i in range(8)]
    path = groups_of(tmp_path / "t.parquet", [rows[i : i + 2] for i in range(0, 8, 2)])
    before = {r["row"]: r for r in rows_in(path)}
    pages = page_bytes(path)
    index, at = pages[int(place * len(pages))]
    smashed = bytearray(path.read_bytes())
    smashed[at] ^= mask
    path.write_bytes(smashed)
    after = {r["row"]: r for r in rows_in(path)}
    for number, got in after.items():
        if number // 2 != index:
            assert got == before[number]
        for name, value in got.items():
            assert value in (None, before[number][name])
    assert {number for number in before if number // 2 != index} <= after.keys()


def rows_in(path: Path) -> Rows:
    sources, notes = opened(path)
    return [r for s in sources for b in batches(s, notes) for r in b.to_pylist()]


def page_bytes(path: Path) -> list[tuple[int, int]]:
    """Row group and place of every byte of page data: all of a column chunk but the header of its one page."""
    data, found = path.read_bytes(), []
    metadata = pq.ParquetFile(path).metadata
    for index in range(metadata.num_row_groups):
        for c in range(metadata.num_columns):
            chunk = metadata.row_group(index).column(c)
            end = chunk.data_page_offset + chunk.total_compressed_size
            size = chunk.total_uncompressed_size
            header = header_size(data[chunk.data_page_offset : end], size)
            found += [(index, at) for at in range(chunk.data_page_offset + header, end)]
    return found


def header_size(chunk: bytes, size: int) -> int:
    """Bytes before the data of a page: its header tells (thrift, field 2) how many follow."""
    place, value = 1, 0
    place += 1  # page type (one byte), then the tag of field 2
    place += 1
    for shift in range(0, 64, 7):
        value |= (chunk[place] & 0x7F) << shift
        place += 1
        if not chunk[place - 1] & 0x80:
            break
    return size - (value >> 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.none(), st.lists(st.floats(width=32), max_size=5)), st.booleans()),
        max_size=12,
    )
)
@SLOW
def test_lists_that_pass_fit_their_row(tmp_path: Path, drawn: list[tuple[int, list[float] | None, bool]]) -> None:
    rows = [
        row(
            i, response_length=n, behave_logp=values, prox_logp=None, segments=None, loss_mask=[True] * n if m else None
        )
        for i, (n, values, m) in enumerate(drawn)
    ]
    written(tmp_path, rows)
    got = rows_in(tmp_path / "t.parquet")
    for (length, values, _), back in zip(drawn, got, strict=True):
        fits = values is not None and len(values) == length and all(math.isfinite(v) and v <= 0.125 for v in values)
        assert back["behave_logp"] == (values if fits else None)


# --- runs ----------------------------------------------------------------------------------------------------------


def metrics(path: Path, name: str, start: float) -> None:
    """A file of verl's `file` logger, named like its run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [{"step": s, "data": {"actor/grad_norm": start + s / 7, "critic/score/mean": s / 9}} for s in range(1, 21)]
    (path.parent / f"{name}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))


def grouped(root: Path) -> list[tuple[str, list[str]]]:
    parsed = read_all(discover([root]))
    return [(r.name, sorted(parsed[i].format for i in r.sources)) for r in group_runs(parsed, root)]


def test_a_trace_belongs_to_the_run_it_lies_with(tmp_path: Path) -> None:
    metrics(tmp_path / "a/logs/p/x", "one", 1.0)
    written(tmp_path / "a/trace", [row(0)])
    metrics(tmp_path / "b/logs/p/x", "two", 2.0)
    written(tmp_path / "b/trace", [row(0)], run="any name")
    assert grouped(tmp_path) == [("one", ["trace", "verl_jsonl"]), ("two", ["trace", "verl_jsonl"])]


def test_a_trace_that_names_a_run_belongs_to_it_wherever_it_lies(tmp_path: Path) -> None:
    metrics(tmp_path / "logs/p/x", "one", 1.0)
    metrics(tmp_path / "logs/p/x", "two", 2.0)
    written(tmp_path / "traces", [row(0, run="two"), row(1, run="three")])
    runs = grouped(tmp_path)
    assert ("one", ["verl_jsonl"]) in runs
    assert ("two", ["trace", "verl_jsonl"]) in runs
    assert [formats for name, formats in runs if name == "three"] == [["trace"]]


def test_a_trace_alone_is_a_run(tmp_path: Path) -> None:
    written(tmp_path / "trace", [row(0)], run="mine")
    assert grouped(tmp_path) == [("mine", ["trace"])]
