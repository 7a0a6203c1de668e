"""Reconciling trackers and process lives, deriving signals, and handing the store over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_audit.ingest.adapters import KeyMapping, choose_adapter, map_keys
from verl_audit.ingest.model import Format, Identity, Parsed, ValueKind
from verl_audit.store.database import lock_down, open_store, publish
from verl_audit.store.load import RunInput, finish, load_key_map, load_run, load_sources, shift_axis

Value = float | tuple[float, ValueKind]
Lives = Sequence[Sequence[tuple[int, Mapping[str, Value]]]]
JSONL: Final = "verl_jsonl"
CONSOLE: Final = "verl_console"
WANDB: Final = "wandb"
TENSORBOARD: Final = "tensorboard"


def source(form: Format, *lives: Sequence[tuple[int, Mapping[str, Value]]], name: str = "", **more: Any) -> Parsed:
    """A parsed source of the given process lives; a life starts where the step falls."""
    parsed = Parsed(Path(f"/run/{name or form}"), form, float32=form == TENSORBOARD, **more)
    for life in lives:
        for step, values in life:
            parsed.metrics.next_record(step)
            for key, value in values.items():
                number, kind = value if isinstance(value, tuple) else (value, None)
                parsed.metrics.add(key, number, kind)
    if form == CONSOLE:
        parsed.metrics.mark_rounded()
    return parsed


def store(*sources: Parsed, adapt: bool = False, facts: Mapping[str, Any] | None = None) -> duckdb.DuckDBPyConnection:
    """A store that holds the sources as one run, reconciled."""
    con = open_store()
    names = [str(s.path) for s in sources]
    load_sources(con, sources, names)
    units = tuple((i, s) for i, p in enumerate(sources) for s in range(max(p.metrics.segment, default=0) + 1))
    load_run(con, RunInput("r", "run", "r", units), sources, names)
    mappings: dict[str, KeyMapping] = {}
    if adapt:
        keys = sorted({key for s in sources for key in s.metrics.keys})
        adapter, _ = choose_adapter(keys)
        assert adapter is not None
        mappings["r"] = map_keys(adapter, keys, facts or {})
        load_key_map(con, "r", mappings["r"])
        shift_axis(con, "r", adapter)
    finish(con, mappings)
    return con


def values(con: duckdb.DuckDBPyConnection, key: str = "x") -> dict[int, float]:
    return dict(con.execute("SELECT step, value FROM metrics WHERE key = ? ORDER BY step", [key]).fetchall())


def kind(con: duckdb.DuckDBPyConnection, key: str = "x") -> str:
    rows = con.execute("SELECT kind FROM metrics WHERE key = ?", [key]).fetchall()
    assert len(rows) == 1
    return str(rows[0][0])


def test_the_last_life_wins_per_key_and_not_per_row() -> None:
    con = store(source(JSONL, [(1, {"x": 1.0, "y": 1.5}), (2, {"x": 2.0, "y": 2.5})], [(1, {"x": 9.0})]))
    assert values(con) == {1: 9.0}
    assert values(con, "y") == {1: 1.5, 2: 2.5}


def test_an_overlap_of_two_lives_is_kept_as_rewritten() -> None:
    con = store(source(JSONL, [(s, {"x": float(s)}) for s in range(1, 6)], [(s, {"x": s + 0.5}) for s in (4, 5, 6)]))
    assert values(con) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: 5.5, 6: 6.5}
    assert con.execute("SELECT step, earlier, later FROM rewritten ORDER BY step").fetchall() == [
        (4, 4.0, 4.5),
        (5, 5.0, 5.5),
    ]
    assert con.execute("SELECT count(*) FROM differences").fetchall() == [(0,)]


def test_an_overlap_that_agrees_is_not_rewritten() -> None:
    con = store(source(JSONL, [(1, {"x": 1.0}), (2, {"x": 2.0})], [(1, {"x": 1.0}), (2, {"x": 2.0})]))
    assert con.execute("SELECT count(*) FROM rewritten").fetchall() == [(0,)]


def test_lives_in_several_files_follow_the_time_at_which_they_started() -> None:
    late = source(WANDB, [(1, {"x": 2.0})], name="a", identity=Identity(started=200.0))
    early = source(WANDB, [(1, {"x": 1.0}), (2, {"x": 3.0})], name="b", identity=Identity(started=100.0))
    for con in (store(late, early), store(early, late)):
        assert values(con) == {1: 2.0}, "step 2 is of the branch that was given up"
        assert con.execute("SELECT step, earlier, later FROM rewritten ORDER BY step").fetchall() == [
            (1, 1.0, 2.0),
            (2, 3.0, None),
        ]


def test_a_life_that_went_further_is_given_up_where_the_next_one_begins() -> None:
    first = [(s, {"x": float(s), "y": 0.5}) for s in range(1, 10)]
    second = [(4, {"val/x": 1.0}), *((s, {"x": s + 0.5, "y": 0.5}) for s in (5, 6))]
    con = store(source(JSONL, first, second))
    assert values(con) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5, 6: 6.5}
    assert sorted(values(con, "y")) == [1, 2, 3, 4, 5, 6]


def test_a_count_left_out_at_0_does_not_survive_from_the_branch_that_was_given_up() -> None:
    first = [(s, {"x": float(s), "y": 1.0, "evicted": 3.0}) for s in range(1, 8)]
    con = store(source(JSONL, first, [(s, {"x": s + 0.5, "y": 1.0}) for s in (5, 6)]))
    assert sorted(values(con, "evicted")) == [1, 2, 3, 4]


def test_another_writer_of_other_keys_cuts_nothing() -> None:
    con = store(source(JSONL, [(s, {"x": float(s), "y": 1.0}) for s in range(1, 5)], [(1, {"other": 1.0})]))
    assert sorted(values(con)) == [1, 2, 3, 4]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_exact_beats_float32_beats_rounded(order: tuple[int, ...]) -> None:
    exact = source(JSONL, [(1, {"x": 0.123456789})])
    single = source(TENSORBOARD, [(1, {"x": 0.12345679104328156, "y": 0.25})])
    printed = source(CONSOLE, [(1, {"x": 0.123, "y": 0.25, "z": 0.5})])
    three = (exact, single, printed)
    con = store(*(three[i] for i in order))
    assert values(con) == {1: 0.123456789}
    assert con.execute(
        "SELECT key, format FROM metrics JOIN sources USING (source_id) WHERE key <> 'x' ORDER BY key"
    ).fetchall() == [("y", TENSORBOARD), ("z", CONSOLE)]
    assert con.execute("SELECT count(*) FROM differences").fetchall() == [(0,)]


@pytest.mark.parametrize(
    ("weak", "strong", "value", "name"),
    [
        ((math.nan, "nonfinite_unknown"), (math.nan, "nan"), math.nan, "nan"),
        ((math.nan, "nonfinite_unknown"), (-math.inf, "inf"), -math.inf, "inf"),
        ((1.7e308, "clamped"), (math.inf, "inf"), math.inf, "inf"),
    ],
)
def test_an_exact_nan_or_infinity_is_taken_and_is_no_difference(
    weak: Value, strong: Value, value: float, name: str
) -> None:
    for sources in (
        (source(JSONL, [(1, {"x": weak})]), source(WANDB, [(1, {"x": strong})])),
        (source(WANDB, [(1, {"x": strong})]), source(JSONL, [(1, {"x": weak})])),
    ):
        con = store(*sources)
        got = values(con)[1]
        assert (got == value or (math.isnan(got) and math.isnan(value))) and kind(con) == name
        assert con.execute("SELECT count(*) FROM differences").fetchall() == [(0,)]


def test_a_number_beside_a_null_is_a_difference() -> None:
    con = store(source(JSONL, [(1, {"x": (math.nan, "nonfinite_unknown")})]), source(WANDB, [(1, {"x": 3.0})]))
    assert values(con) == {1: 3.0}
    assert con.execute("SELECT key, step FROM differences").fetchall() == [("x", 1)]


@given(
    value=st.floats(min_value=-1e6, max_value=1e6, allow_nan=False),
    other=st.sampled_from([0.0, 4e-7, 3e-6, 1e-3]),
)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_two_exact_trackers_agree_to_a_millionth(value: float, other: float) -> None:
    """Copies differ by what float32 rounds (6e-8), never by 3e-6."""
    con = store(source(JSONL, [(1, {"x": value})]), source(WANDB, [(1, {"x": value * (1 + other)})]))
    expected = 0 if other < 1e-6 or value * (1 + other) == value else 1
    assert con.execute("SELECT count(*) FROM differences").fetchall() == [(expected,)]


@given(st.floats(min_value=0, max_value=1e6, allow_nan=False, width=32))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_what_formats_round_is_no_difference(value: float) -> None:
    """A three-decimal print of a double and its float32 copy are one value, large ones too."""
    double = value * (1 + 3e-8)
    con = store(source(TENSORBOARD, [(1, {"x": value})]), source(CONSOLE, [(1, {"x": round(double, 3)})]))
    assert con.execute("SELECT count(*) FROM differences").fetchall() == [(0,)]


def test_a_printed_value_that_is_off_by_a_thousandth_is_a_difference() -> None:
    con = store(source(JSONL, [(1, {"x": 0.1234, "y": 0.1234})]), source(CONSOLE, [(1, {"x": 0.123, "y": 0.125})]))
    assert con.execute("SELECT key, a, b FROM differences").fetchall() == [("y", 0.1234, 0.125)]


def test_a_fully_async_row_moves_to_the_version_that_trained_it() -> None:
    row = {"fully_async/count/current_param_version": 4.0, "critic/score/mean": 0.5, "actor/grad_norm": 1.0}
    beside = {"fully_async/rollouter/idle_ratio": 0.25}
    con = store(source(JSONL, [(5, row), (5, beside), (5, {"val-core/toy/acc/mean@1": 0.75})]), adapt=True)
    assert values(con, "critic/score/mean") == {4: 0.5}
    assert values(con, "fully_async/rollouter/idle_ratio") == {5: 0.25}
    assert values(con, "val-core/toy/acc/mean@1") == {5: 0.75}
    assert con.execute("SELECT DISTINCT step FROM raw_metrics").fetchall() == [(5,)]


def test_a_counter_of_log_calls_gives_way_to_the_logged_step() -> None:
    counted = source(
        WANDB,
        [(i, {"training/global_step": float(10 * i), "critic/score/mean": 0.5}) for i in (1, 2)],
        step_kind="counter",
    )
    assert values(store(counted, adapt=True), "critic/score/mean") == {10: 0.5, 20: 0.5}
    logged = source(JSONL, [(i, {"training/global_step": float(10 * i), "critic/score/mean": 0.5}) for i in (1, 2)])
    assert values(store(logged, adapt=True), "critic/score/mean") == {1: 0.5, 2: 0.5}


V1 = {"trainer": "separate_async", "trainer_family": "v1", "is_async": True}


def eviction_rows() -> Parsed:
    companion = "training/off_policy/trajectory_spans/mean"
    evicted = "training/off_policy/evicted_samples"
    return source(
        JSONL,
        [
            (0, {"val-core/toy/acc/mean@1": 0.1}),
            (1, {companion: 1.0}),
            (2, {companion: 1.0, evicted: 3.0}),
            (3, {companion: 1.0, evicted: (math.nan, "nonfinite_unknown")}),
        ],
    )


def test_a_count_left_out_at_zero_is_filled_in_beside_its_companion_only() -> None:
    con = store(eviction_rows(), adapt=True, facts=V1)
    rows = con.execute(
        "SELECT step, value, derived FROM signals WHERE signal = 'stale_groups' ORDER BY step"
    ).fetchall()
    assert rows[:2] == [(1, 0.0, True), (2, 3.0, False)]
    assert rows[2][0] == 3 and math.isnan(rows[2][1])


def test_nan_is_kept_apart_from_missing() -> None:
    con = store(eviction_rows(), adapt=True, facts=V1)
    assert con.execute("SELECT step, kind FROM signals WHERE signal = 'stale_groups' AND isnan(value)").fetchall() == [
        (3, "nonfinite_unknown")
    ]
    assert con.execute("SELECT step, stale_groups FROM steps ORDER BY step").fetchall() == [
        (0, None),
        (1, 0.0),
        (2, 3.0),
        (3, None),
    ]


def test_the_wide_view_takes_the_mean_over_labels() -> None:
    con = store(
        source(JSONL, [(1, {"critic/score/mean": 1.0, "val-core/a/acc/mean@1": 0.2, "val-core/b/acc/mean@1": 0.4})]),
        adapt=True,
        facts=V1,
    )
    (row,) = con.execute("SELECT validation FROM steps").fetchall()
    assert row[0] == pytest.approx(0.3)


# -- handing over -----------------------------------------------------------------------------------------------


def test_publish_writes_a_whole_database_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    con = store(source(JSONL, [(1, {"x": 1.0})]))
    target = tmp_path / "it's a store.db"
    for _ in range(2):
        publish(con, target)
        assert [p.name for p in tmp_path.iterdir()] == [target.name]
        with duckdb.connect(str(target), read_only=True) as other:
            assert other.execute("SELECT key, value FROM metrics").fetchall() == [("x", 1.0)]
            assert other.execute("SELECT count(*) FROM steps").fetchall() == [(0,)]


def test_publish_replaces_a_file_that_a_reader_holds_open(tmp_path: Path) -> None:
    target = tmp_path / "a.db"
    publish(store(source(JSONL, [(1, {"x": 1.0})])), target)
    with duckdb.connect(str(target), read_only=True) as reader:
        publish(store(source(JSONL, [(1, {"x": 2.0})])), target)
        assert reader.execute("SELECT value FROM metrics").fetchall() == [(1.0,)]
    with duckdb.connect(str(target), read_only=True) as later:
        assert later.execute("SELECT value FROM metrics").fetchall() == [(2.0,)]


def test_a_failed_publish_leaves_the_old_database(tmp_path: Path) -> None:
    con = store(source(JSONL, [(1, {"x": 1.0})]))
    with pytest.raises(duckdb.Error):
        publish(con, tmp_path / "nowhere" / "a.db")


def test_what_a_crash_left_beside_the_target_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".a.db.writing").write_bytes(b"torn")
    (tmp_path / ".a.db.writing.wal").write_bytes(b"torn")
    publish(store(source(JSONL, [(1, {"x": 1.0})])), tmp_path / "a.db")
    assert [p.name for p in tmp_path.iterdir()] == ["a.db"]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('{}')",
        "SELECT * FROM '{}'",
        "COPY metrics TO '{}.out'",
        "ATTACH '{}.db' AS other",
        "INSTALL httpfs",
        "SET enable_external_access = true",
    ],
)
def test_sql_reaches_no_file(query: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    con = store(source(JSONL, [(1, {"x": 1.0})]))
    lock_down(con)
    with pytest.raises(duckdb.Error):
        con.execute(query.format(secret))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret.csv"]
    assert con.execute("SELECT count(*) FROM metrics").fetchall() == [(1,)]
