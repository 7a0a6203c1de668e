"""Linearised intervals: against the bootstrap they replace, against identities, and the coverage they claim."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measure.evictions import lengths, longest, traces
from verl_audit.measure.clustered import Linear, by_class, interval, mean, shift, standardised
from verl_audit.measure.trace_groups import Sums


def sums_of(x: np.ndarray, trained: np.ndarray) -> Sums:
    """One trajectory a group."""
    ones = np.ones(len(x))
    return Sums(x, ones, x * trained, ones * trained)


@given(
    st.lists(st.tuples(st.floats(1, 100), st.booleans(), st.integers(0, 3)), min_size=2, max_size=50),
    st.booleans(),
)
def test_parts_add_up_and_the_whole_is_the_plain_difference(rows: list[tuple[float, bool, int]], log: bool) -> None:
    x, trained, stratum = (np.array(c) for c in zip(*rows, strict=True))
    found = shift(sums_of(x, trained), stratum, log=log)
    if not trained.any():
        assert found is None
        return
    assert found is not None
    a, b = x[trained].mean(), x.mean()
    assert found.total.value == pytest.approx(np.log(a / b) if log else a - b, abs=1e-9)
    assert found.within.value + found.composition.value == pytest.approx(found.total.value, abs=1e-9)
    assert 0 <= found.lost < 1


def test_one_stratum_leaves_nothing_to_composition() -> None:
    x = np.random.default_rng(0).normal(10, 2, 60)
    found = shift(sums_of(x, np.arange(60) % 3 > 0), np.zeros(60, dtype=np.int64))
    assert found is not None
    assert found.composition.value == pytest.approx(0, abs=1e-12)
    assert found.within.low == pytest.approx(found.total.low)


def test_standardised_is_the_inverse_probability_weighted_mean() -> None:
    rng = np.random.default_rng(1)
    stratum = rng.integers(0, 4, 400)
    x, trained = rng.normal(stratum, 1.0), rng.random(400) < 0.2 + 0.2 * stratum
    found = standardised(sums_of(x, trained), stratum)
    assert found is not None
    p = np.bincount(stratum, trained) / np.bincount(stratum)
    weight = 1 / p[stratum[trained]]
    assert found[0].value == pytest.approx((weight @ x[trained]) / weight.sum())


def test_a_stratum_without_trained_is_lost() -> None:
    stratum = np.repeat([0, 1], 10)
    found = standardised(sums_of(np.arange(20.0), stratum == 0), stratum)
    assert found is not None
    assert [x.value for x in found[:2]] == pytest.approx([4.5, 4.5])
    assert found[2] == 0.5


def test_the_standard_error_is_that_of_a_bootstrap_within_fates() -> None:
    rng = np.random.default_rng(2)
    length = lengths(rng, 300)
    evicted = longest(length, 0.2)
    groups, _ = traces(length, evicted)
    found = shift(groups.length, np.zeros(300, dtype=np.int64), log=True)
    total, kept, dropped = length.sum(axis=1), np.flatnonzero(~evicted), np.flatnonzero(evicted)
    drawn = [
        np.log(a.mean() / np.concatenate([a, b]).mean())
        for a, b in (
            (total[rng.choice(kept, len(kept))], total[rng.choice(dropped, len(dropped))]) for _ in range(2000)
        )
    ]
    assert found is not None
    assert found.total.se == pytest.approx(np.std(drawn), rel=0.08)


def test_a_mean_has_the_textbook_interval() -> None:
    x = np.random.default_rng(3).normal(5, 2, 40)
    linear = mean(x, np.ones(40))
    assert linear is not None
    found = interval(linear)
    assert found.se == pytest.approx(x.std(ddof=1) / np.sqrt(40))
    assert (found.high - found.low) / 2 == pytest.approx(2.0227 * found.se, rel=1e-3)


def test_two_classes_have_welch_degrees_of_freedom() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(0, 1, 12), rng.normal(0, 3, 30)
    influence = np.concatenate([-(a - a.mean()) / 12, (b - b.mean()) / 30])
    found = by_class(Linear(b.mean() - a.mean(), influence), np.repeat([0, 1], [12, 30]))
    assert found.se == pytest.approx(np.sqrt(a.var(ddof=1) / 12 + b.var(ddof=1) / 30))
    assert (found.high - found.value) / found.se == pytest.approx(2.02, abs=0.02)


def test_one_evicted_group_says_little() -> None:
    x = np.random.default_rng(5).normal(10, 1, 30)
    found = shift(sums_of(x, np.arange(30) > 0), np.zeros(30, dtype=np.int64))
    assert found is not None
    assert found.total.low < 0 < found.total.high


def test_nothing_evicted_is_exactly_no_shift() -> None:
    length = lengths(np.random.default_rng(6), 40)
    groups, where = traces(length, np.zeros(40, dtype=bool))
    found = shift(groups.length, where.block, log=True)
    assert found is not None
    assert (found.total.value, found.within.low, found.within.high, found.lost) == (0.0, 0.0, 0.0, 0.0)
