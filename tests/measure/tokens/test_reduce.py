from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.measure.tokens.oracle import assert_same, expected, found
from tests.measure.tokens.rows import batches, trajectory
from verl_audit.measure.tokens import Spec, TokenSums, merge, reduce_batches
from verl_audit.measure.tokens.kernel import Kernel, available

KERNELS: tuple[Kernel, ...] = ("numpy", "numba") if available() == "numba" else ("numpy",)
ROWS = st.lists(trajectory(), max_size=8)
BASE = {"group": "g", "fate": "trained", "decided_step": 5, "train_version": 4, "train_minibatch": 1}


def one(row: Mapping[str, Any], **options: Any) -> TokenSums:
    return reduce_batches(batches([{**BASE, "response_length": 3, **row}]), **options)


def only(table: pa.Table) -> dict[str, Any]:
    (row,) = table.to_pylist()
    return dict(row)


def equal(a: TokenSums, b: TokenSums) -> bool:
    same = a.noticed == b.noticed and a.trajectories == b.trajectories
    return same and all(a.tables()[name].equals(b.tables()[name]) for name in a.tables())


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(rows=ROWS, updates=st.sampled_from([None, 1, 4]))
def test_the_sums_are_those_of_a_loop_over_tokens(
    kernel: Kernel, rows: list[dict[str, Any]], updates: int | None
) -> None:
    sums = reduce_batches(batches(rows), updates_per_version=updates, kernel=kernel)
    assert_same(found(sums), expected(rows, updates=updates))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(rows=ROWS, cuts=st.lists(st.integers(0, 8), max_size=4))
def test_cutting_rows_into_batches_changes_no_bit(kernel: Kernel, rows: list[dict[str, Any]], cuts: list[int]) -> None:
    whole = reduce_batches(batches(rows), kernel=kernel)
    assert equal(whole, reduce_batches(batches(rows, cuts), kernel=kernel))


@settings(deadline=None, max_examples=40)
@given(shards=st.lists(ROWS, max_size=4), data=st.data())
def test_merging_in_any_order_and_grouping_changes_no_bit(
    shards: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    parts = [reduce_batches(batches(rows), source=str(i)) for i, rows in enumerate(shards)]
    shuffled = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(0, len(parts)))
    assert equal(merge(parts), merge([merge(shuffled[cut:]), merge(shuffled[:cut])]))


@pytest.mark.skipif("numba" not in KERNELS, reason="numba is not installed")
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.001, 0.1, 3.0]))
def test_the_two_kernels_agree(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for length in (0, 1, 2, 1023, 1024, 1025, 70_000):
        behave = -rng.exponential(1, length)
        theta = behave + scale * rng.standard_normal(length)
        rows.append({**BASE, "response_length": length, "advantage": float(rng.standard_normal()),
                     "behave_logp": behave, "theta_logp": theta, "loss_mask": rng.random(length) < 0.9})  # fmt: skip
    a, b = (found(reduce_batches(batches(rows), kernel=kernel)) for kernel in KERNELS)
    assert_same(a, b)


def test_every_column_of_a_hand_counted_trajectory() -> None:
    row = {
        "behave_logp": [-1.0, -1.0, -2.0],
        "theta_logp": [-0.5, -1.0, -3.5],
        "advantage": -0.1,
        "segments": [{"version": 3, "start": 0, "length": 2}, {"version": 4, "start": 2, "length": 1}],
    }
    sums = one(row, updates_per_version=2)
    newer, older = sums.cells.sort_by("lag").to_pylist()
    assert older == {
        "step": 5,
        "lag": 1,
        "minibatch": 1,
        "lag_updates": 3,
        "n": 2,
        "listed": 2,
        "clip_n": 2,
        "clip_low": 0,
        "clip_high": 0,
        "tail_ln2": 0,
        "tail_1": 0,
        "sum": 0.5,
        "abs_sum": 0.5,
        "sq_sum": 0.25,
        "k3_sum": pytest.approx(math.exp(0.5) - 1.5),
        "w_sum": pytest.approx(1 + math.exp(0.5)),
        "w2_sum": pytest.approx(1 + math.exp(1)),
        "abs_max": 0.5,
    }
    assert (newer["lag"], newer["lag_updates"], newer["clip_low"], newer["tail_1"]) == (0, 1, 1, 1)
    whole = only(sums.trajectories[""])
    assert (whole["row"], whole["n"], whole["sum"], whole["abs_max"]) == (0, 3, -1.0, 1.5)


def test_three_sets_tell_update_from_the_rest_and_strata_are_of_the_rest() -> None:
    sums = one({"behave_logp": [-1.0] * 3, "prox_logp": [-1.25] * 3, "theta_logp": [-0.75] * 3})
    assert {r["subset"]: r["sum"] for r in sums.subsets.to_pylist()} == {1: 1.5, 6: -0.75, 7: 0.75}
    assert only(sums.strata)["sq_sum"] == 3 * 0.25**2
    assert only(sums.strata)["bin"] == 12


def test_four_sets_give_all_seven_subsets() -> None:
    sets = {"behave_logp": [-4.0] * 3, "trainer_logp": [-3.0] * 3, "prox_logp": [-2.5] * 3, "theta_logp": [-2.25] * 3}
    sums = {r["subset"]: r["sum"] / 3 for r in one(sets).subsets.to_pylist()}
    assert sums == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 5: 1.25, 6: 1.5, 7: 1.75}


def test_without_behave_there_is_no_total_and_the_update_is_still_counted() -> None:
    sums = one({"prox_logp": [-1.0] * 3, "theta_logp": [-0.5] * 3})
    assert (sums.cells.num_rows, sums.trajectories[""].num_rows) == (0, 0)
    assert {r["subset"]: r["n"] for r in sums.subsets.to_pylist()} == {1: 3}


def test_what_is_no_number_is_left_out_and_counted_and_what_is_huge_is_clamped_and_counted() -> None:
    row = {"behave_logp": [math.nan, -math.inf, -1.0], "theta_logp": [-1.0, -1.0, -200.0]}
    sums = one(row)
    assert (sums.noticed["nan_tokens"], sums.noticed["clamped_tokens"]) == (1, 2)
    whole = only(sums.trajectories[""])
    assert (whole["n"], whole["nan"], whole["sum"], whole["abs_max"]) == (2, 1, 0.0, 20.0)


def test_masked_tokens_count_nowhere_not_even_as_no_number() -> None:
    row = {"behave_logp": [math.nan, -1.0, -math.inf], "theta_logp": [-1.0] * 3, "loss_mask": [False, True, False]}
    sums = one(row)
    assert (sums.noticed["nan_tokens"], sums.noticed["clamped_tokens"]) == (0, 0)
    assert only(sums.histogram) == {"lag": -1, "bucket": 0, "count": 1}


def test_rows_whose_lists_differ_in_length_are_left_out_and_counted() -> None:
    sums = one({"behave_logp": [-1.0] * 3, "theta_logp": [-1.0] * 2})
    assert (sums.noticed["rows_unequal"], sums.cells.num_rows, sums.trajectories[""].num_rows) == (1, 0, 0)


@pytest.mark.parametrize(
    "segments",
    [
        [{"version": 1, "start": 0, "length": 9}],
        [{"version": 1, "start": 0, "length": 2}, {"version": 2, "start": 1, "length": 2}],
        [{"version": 1, "start": -1, "length": 2}],
    ],
)
def test_segments_that_cannot_be_leave_the_lag_unknown(segments: list[dict[str, int]]) -> None:
    sums = one({"behave_logp": [-1.0] * 3, "theta_logp": [-1.0] * 3, "segments": segments})
    assert sums.noticed["rows_bad_segments"] == 1
    assert [(r["lag"], r["n"]) for r in sums.cells.to_pylist()] == [(-1, 3)]


def test_a_negative_lag_is_unknown_and_counted() -> None:
    sums = one({"behave_logp": [-1.0] * 3, "theta_logp": [-1.0] * 3, "first_version": 7, "last_version": 7})
    assert sums.noticed["rows_negative_lag"] == 1
    assert only(sums.cells)["lag"] == -1


def test_evicted_tokens_have_sums_of_their_own_and_are_in_no_cell() -> None:
    sums = one({"fate": "stale", "behave_logp": [-1.0] * 3, "theta_logp": [-1.5] * 3})
    assert only(sums.trajectories[""])["sum"] == -1.5
    assert [sums.tables()[name].num_rows for name in sums.tables()] == [0, 0, 0, 0]


def test_only_the_run_asked_for_counts() -> None:
    rows: Sequence[Mapping[str, Any]] = [
        {**BASE, "run": run, "response_length": 1, "behave_logp": [-1.0], "theta_logp": [-1.0]}
        for run in ("a", "b", None)
    ]
    sums = reduce_batches(batches(rows), Spec(run="a"))
    assert sums.trajectories[""]["row"].to_pylist() == [0, 2]


def test_sums_that_the_writer_kept_reach_trajectories_and_cells() -> None:
    kept = {
        "n": 10,
        "sum": -1.0,
        "sq_sum": 0.5,
        "abs_sum": 2.0,
        "abs_max": 0.6,
        "k3_sum": 0.25,
        "w_sum": 9.2,
        "w2_sum": 8.9,
    }
    row = {
        "sums": [
            {"later": "prox_logp", "earlier": "behave_logp", **kept, "n": 11},
            {"later": "theta_logp", "earlier": "behave_logp", **kept},
            {"later": "theta_logp", "earlier": "prox_logp", **kept, "n": 12},
        ],
        "segments": [{"version": 2, "start": 0, "length": 3}],
    }
    sums = one(row)
    cell = only(sums.cells)
    assert {name: cell[name] for name in kept} == kept
    assert (cell["lag"], cell["listed"], cell["clip_n"]) == (2, 0, 0)
    assert only(sums.trajectories[""])["k3_sum"] == 0.25
    assert (sums.strata.num_rows, sums.subsets.num_rows, sums.histogram.num_rows) == (0, 0, 0)


FORMS: dict[str, pa.DataType] = {
    "list<double>": pa.list_(pa.float64()),
    "list<half>": pa.list_(pa.float16()),
    "large_list": pa.large_list(pa.float32()),
    "fixed size": pa.list_(pa.float32(), 3),
    "view": pa.list_view(pa.float32()),
    "nullable": pa.list_(pa.float32()),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_kind_of_list_is_read(form: str) -> None:
    behave = [[-1.0, -0.5, -2.0], None, [-1.0, -1.0, -1.0]]
    theta = [[-1.5, -0.5, -2.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.25]]
    batch = pa.RecordBatch.from_pydict(
        {
            "group": ["a", "b", "c"],
            "behave_logp": pa.array(behave, FORMS[form]),
            "theta_logp": pa.array(theta, FORMS[form]),
        }
    )
    for start in (0, 1):
        (table,) = reduce_batches([batch.slice(start)]).trajectories.values()
        assert table["sum"].to_pylist() == [-0.5, -0.25][start:]
        assert table["row"].to_pylist() == ([0, 2] if start == 0 else [1])


def test_null_elements_are_no_numbers() -> None:
    batch = pa.RecordBatch.from_pydict({"behave_logp": [[-1.0, None]], "theta_logp": [[None, -1.0]]})
    assert reduce_batches([batch]).noticed["nan_tokens"] == 2


@pytest.mark.parametrize("mask", [[[1, 0]], [[1.0, 0.0]], [[True, False]], [[True, None]]])
def test_any_kind_of_mask_is_read(mask: list[list[Any]]) -> None:
    batch = pa.RecordBatch.from_pydict({"behave_logp": [[-1.0, -1.0]], "theta_logp": [[-1.0, -1.0]], "loss_mask": mask})
    assert only(reduce_batches([batch]).cells)["n"] == 1


def test_the_fast_form_gives_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    lists = {
        name: [rng.standard_normal(n).astype(np.float32) for n in (3, 0, 5)] for name in ("behave_logp", "theta_logp")
    }
    blobs = {f"{name}_f32le": [x.tobytes() for x in values] for name, values in lists.items()}
    plain, fast = (reduce_batches([pa.RecordBatch.from_pydict(columns)]) for columns in (lists, blobs))
    assert equal(plain, fast)


def test_a_blob_that_is_no_whole_number_of_floats_is_an_unequal_list() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"behave_logp_f32le": [b"\0" * 5, b"\0" * 4], "theta_logp_f32le": [b"\0" * 4] * 2}
    )
    sums = reduce_batches([batch])
    assert (sums.noticed["rows_unequal"], sums.noticed["rows_reduced"]) == (1, 1)


def test_a_token_column_of_words_is_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"behave_logp": [["a"]], "theta_logp": [["b"]]})
    with pytest.raises(TypeError, match="a list of numbers is needed, not list<"):
        reduce_batches([batch])


def test_rows_say_their_own_place() -> None:
    batch = pa.RecordBatch.from_pydict({"row": [7, 3], "behave_logp": [[-1.0]] * 2, "theta_logp": [[-1.0]] * 2})
    (table,) = reduce_batches([batch]).trajectories.values()
    assert table["row"].to_pylist() == [3, 7]


def test_the_same_source_twice_is_refused() -> None:
    sums = one({}, source="s")
    with pytest.raises(ValueError, match="reduced twice: s"):
        merge([sums, sums])


def test_settings_no_loss_can_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="0 <= clip_low < 1"):
        Spec(clip_low=1.0)
