"""What the recorded sets determine, exact Shapley shares, tails and the table by lag, against plain arithmetic."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.measure import token_draws
from tests.measure.token_draws import LN2, SETS, Setting, Tokens, cells, draw, histogram, strata, subsets
from verl_audit.measure.decompose.identity import component_bits, component_name, gap_end, identify
from verl_audit.measure.decompose.per_lag import per_lag
from verl_audit.measure.decompose.shapley import FRAGILE, FUNCTIONALS, Split, correlation, shapley
from verl_audit.measure.decompose.tables import Refused, jackknife, keys, numbers, ratio
from verl_audit.measure.decompose.tails import Tails, disagreement, tails

DENSE = Setting(mismatch=0.3, drift=0.2, k=2)
MOE = Setting(mismatch=1.5, flips=0.03, drift=0.2, trajectories=6000, lags=(1, 2, 3, 4, 5))


def need(found: Any, kind: type) -> Any:
    assert isinstance(found, kind), found
    return found


def split(tokens: Tokens, recorded: tuple[str, ...] = SETS) -> dict[str, Split]:
    found = shapley(subsets(tokens, recorded))
    assert not isinstance(found, Refused), found
    return found


def amounts(found: Split) -> dict[str, float]:
    return {p.component: p.amount.value for p in found.parts}


# -- what the sets determine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "exact", "at_zero", "estimable"),
    [
        ("behave trainer prox theta", ("M", "S", "U"), (), ()),
        ("behave prox theta", ("S+M", "U"), ("M",), ("E[M^2]", "mismatch share")),
        ("behave prox", ("S+M",), ("M",), ("E[M^2]", "mismatch share")),
        ("behave theta", ("U+S+M",), ("M",), ("E[M^2]", "mismatch share")),
        ("prox theta", ("U",), (), ()),
        ("behave trainer", ("M",), (), ()),
        ("behave trainer theta", ("M", "U+S"), (), ()),
        ("behave", (), (), ()),
        ("", (), (), ()),
    ],
)
def test_sets_determine(
    recorded: str, exact: tuple[str, ...], at_zero: tuple[str, ...], estimable: tuple[str, ...]
) -> None:
    found = identify([f"{name}_logp" for name in recorded.split()])
    assert (found.exact, found.exact_at_zero, found.estimable) == (exact, at_zero, estimable)
    assert found.reason
    assert bool(found.unknown) == bool(found.wants) == (len(recorded.split()) < 4)


def test_what_is_unknown_is_said_in_words() -> None:
    three = identify(["theta_logp", "prox_logp", "behave_logp"])
    assert three.recorded == ("behave_logp", "prox_logp", "theta_logp")
    assert three.unknown == ("staleness against mismatch, token by token",)
    assert any("trainer_logp" in want for want in three.wants)
    update_only = identify(["prox_logp", "theta_logp"])
    assert update_only.unknown == ("staleness", "mismatch")
    assert "calculate_log_probs" in update_only.wants[0]
    assert "only behave_logp was recorded" in identify(["behave_logp"]).reason


def test_the_gap_ends_at_prox_where_there_is_one() -> None:
    assert gap_end(SETS) == gap_end(["behave_logp", "prox_logp"]) == "prox_logp"
    assert gap_end(["behave_logp", "theta_logp"]) == "theta_logp"
    assert gap_end(["behave_logp", "trainer_logp"]) is gap_end(["prox_logp", "theta_logp"]) is None


def test_names_and_bits_are_inverse() -> None:
    assert [component_name(component_bits(name)) for name in ("M", "S+M", "U+S+M")] == ["M", "S+M", "U+S+M"]
    assert component_bits("S+M") == 6


# -- Shapley -------------------------------------------------------------------------------------------------


def one_token_values(tokens: Tokens, x: NDArray[np.float64]) -> dict[str, float]:
    w = np.exp(x)
    clipped = ((x > math.log(1.28)) & (tokens.advantage > 0)) | ((x < math.log(0.8)) & (tokens.advantage < 0))
    return {
        "clip": clipped.mean(),
        "k1": -x.mean(),
        "k3": (np.exp(x) - 1 - x).mean(),
        "chi2": (w**2).mean() - 1,
        "neg_log_ess": math.log((w**2).mean() / w.mean() ** 2),
        "second": (x**2).mean(),
        "variance": x.var(),
    }


@pytest.mark.parametrize("recorded", [SETS, ("behave_logp", "prox_logp", "theta_logp"), ("behave_logp", "prox_logp")])
def test_shares_are_the_mean_over_orders_of_arrival(recorded: tuple[str, ...]) -> None:
    tokens = draw(DENSE)
    players = token_draws.joined(recorded)
    orders = list(permutations(players))
    expected: dict[str, dict[str, float]] = {name: {} for name in FUNCTIONALS}
    for order in orders:
        x = np.zeros(len(tokens.lag))
        before = dict.fromkeys(FUNCTIONALS, 0.0)
        for player in order:
            x = x + tokens.total(player)
            after = one_token_values(tokens, x)
            label = component_name(sum(token_draws.BITS[p] for p in player))
            for name, sums in expected.items():
                sums[label] = sums.get(label, 0.0) + (after[name] - before[name]) / len(orders)
            before = after
    for name, found in split(tokens, recorded).items():
        assert amounts(found) == pytest.approx(expected[name], rel=1e-9, abs=1e-12)
        assert found.total.value == pytest.approx(before[name], rel=1e-9)


def test_variance_share_is_the_covariance() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2, correlation=-0.3, k=2))
    found = split(tokens)["variance"]
    for name in "MSU":
        part = found.part(name)
        assert part is not None and part.share is not None
        assert part.share.value == pytest.approx(tokens.covariance_share(name))


def test_correlation_of_staleness_and_mismatch() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2, correlation=-0.3, trajectories=2000, lags=(1, 2, 3)))
    direct = np.corrcoef(tokens.parts["S"], tokens.parts["M"])[0, 1]
    found = correlation(subsets(tokens), "S", "M")
    assert not isinstance(found, Refused)
    assert found.value == pytest.approx(direct)
    assert found.low < direct < found.high < -0.2
    assert isinstance(correlation(subsets(tokens, ("behave_logp", "prox_logp")), "S", "M"), Refused)


def test_a_component_that_is_zero_gets_nothing() -> None:
    for name, found in split(draw(Setting(drift=0.2))).items():
        assert amounts(found)["M"] == pytest.approx(0, abs=1e-12), name
        assert amounts(found)["U"] == pytest.approx(0, abs=1e-12), name
    assert split(draw(Setting(drift=0.2)))["second"].leader == "S"


def test_clip_and_chi2_may_name_different_components() -> None:
    found = split(draw(MOE))
    assert (found["clip"].leader, found["chi2"].leader) == ("S", "M")
    assert "clipping is mostly staleness and the variance of the weights mostly mismatch" in disagreement(found)
    assert disagreement(split(draw(Setting(mismatch=0.4, drift=0.02)))) == ""


def test_a_functional_that_a_few_tokens_decide_says_so() -> None:
    flips = split(draw(Setting(mismatch=3.0, flips=0.01, drift=0.1)))
    assert flips["chi2"].concentration > FRAGILE > flips["clip"].concentration
    assert all(s.concentration < FRAGILE for s in split(draw(DENSE)).values())


def test_a_share_of_what_cannot_be_told_from_zero_is_not_given() -> None:
    quiet = split(draw(Setting(mismatch=0.02, drift=0.02)))
    assert quiet["clip"].total.value == 0
    assert all(p.share is None for p in quiet["clip"].parts)
    assert all(p.share is not None for p in quiet["second"].parts)


def test_within_leaves_the_update_out() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2, k=4))
    inner = shapley(subsets(tokens), within=6, names=["second"])
    assert not isinstance(inner, Refused)
    assert inner["second"].total.value == pytest.approx((tokens.total(["S", "M"]) ** 2).mean())
    assert set(amounts(inner["second"])) == {"S", "M"}


def test_rows_in_any_order_and_arrow_tables_give_the_same() -> None:
    table = subsets(draw(DENSE))
    order = np.random.default_rng(0).permutation(len(table["n"]))
    shuffled = pa.table({name: values[order] for name, values in table.items()})
    first, second = shapley(table), shapley(shuffled)
    assert not isinstance(first, Refused) and not isinstance(second, Refused)
    for name, found in first.items():
        assert found.total.value == pytest.approx(second[name].total.value, rel=1e-12, abs=1e-15)
        assert amounts(found) == pytest.approx(amounts(second[name]), rel=1e-9, abs=1e-14)


def test_coalitions_over_different_tokens_are_refused() -> None:
    table = subsets(draw(DENSE))
    some = table["subset"] != 6
    found = shapley({name: values[some] for name, values in table.items()})
    assert isinstance(found, Refused) and "same tokens" in found.reason
    fewer = dict(table, n=np.where(table["subset"] == 1, table["n"] - 1, table["n"]))
    assert isinstance(shapley(fewer), Refused)
    assert isinstance(shapley({name: values[:0] for name, values in table.items()}), Refused)


def test_no_advantage_no_clip() -> None:
    table = subsets(draw(DENSE))
    found = shapley(dict(table, clip_n=0 * table["n"], clip_low=0 * table["n"], clip_high=0 * table["n"]))
    assert not isinstance(found, Refused)
    assert math.isnan(found["clip"].total.value)
    assert all(p.share is None for p in found["clip"].parts)
    assert found["second"].leader is not None


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.tuples(*[st.floats(-2, 2)] * 3, st.sampled_from([-1.0, 1.0])), min_size=12, max_size=60),
    seed=st.integers(0, 9),
)
def test_parts_always_add_up(parts: list[tuple[float, float, float, float]], seed: int) -> None:
    u, s, m, advantage = np.array(parts).T
    n = len(u)
    zero = np.zeros(n, dtype=np.int64)
    cluster = np.random.default_rng(seed).integers(0, 10, n)
    tokens = Tokens({"U": u, "S": s, "M": m}, -np.ones(n), zero, zero, cluster, zero, advantage, 1)
    for found in split(tokens).values():
        assert sum(amounts(found).values()) == pytest.approx(found.total.value, rel=1e-9, abs=1e-9)


# -- intervals -----------------------------------------------------------------------------------------------


def test_jackknife_of_a_mean_is_the_clustered_interval() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        sizes = rng.integers(20, 60, size=40).astype(float)
        means = rng.normal(size=40)
        (found,) = jackknife(np.column_stack([sizes, sizes * means]), lambda t: ratio(t[:, 1], t[:, 0])[:, None], 1)
        held += found.low <= 0 <= found.high
    assert 0.92 <= held / 300 <= 0.98


def test_few_clusters_have_no_interval() -> None:
    (found,) = jackknife(np.ones((7, 2)), lambda t: ratio(t[:, 1], t[:, 0])[:, None], 7)
    assert found.value == 1 and math.isnan(found.low) and math.isnan(found.high)


def test_nulls_are_unknown() -> None:
    table = pa.table({"lag": pa.array([0, None, -1, 3]), "x": pa.array([1.5, None, 2.0, 0.0])})
    assert keys(table, "lag").tolist() == [0, -1, -1, 3]
    assert np.isnan(numbers(table, "x")).tolist() == [False, True, False, False]
    assert len(numbers(table.slice(0, 0), "x")) == 0


# -- by lag --------------------------------------------------------------------------------------------------


def test_table_by_lag_is_that_of_the_tokens() -> None:
    tokens = draw(Setting(mismatch=0.3, drift=0.2, k=2, lags=(0, 1, 3), trajectories=1000))
    d = tokens.total(["S", "M"])
    rows = per_lag(cells(tokens), strata(tokens), updates_per_version=2)
    assert [row.lag for row in rows] == [0, 1, 3]
    for row in rows:
        here = tokens.lag == row.lag
        x, w = d[here], np.exp(d[here])
        assert row.tokens == here.sum()
        assert row.updates == pytest.approx((2 * tokens.lag + tokens.minibatch)[here].mean())
        assert row.mean_abs.value == pytest.approx(np.abs(x).mean())
        assert row.ess.value == pytest.approx(w.sum() ** 2 / (w**2).sum() / len(x))
        assert row.tail_share.value == pytest.approx((np.abs(x) > LN2).mean())
        assert row.mean_abs.low < row.mean_abs.value < row.mean_abs.high
    assert rows[0].mean_abs.high < rows[-1].mean_abs.low
    assert [row.clip_share.value for row in rows] == sorted(row.clip_share.value for row in rows)


def test_unknown_lag_comes_last_and_without_updates() -> None:
    tokens = draw(Setting(drift=0.2, lags=(0, 1), trajectories=256))
    unknown = {name: np.append(values, values[-1:]) for name, values in cells(tokens).items()}
    unknown["lag"][-1] = -1
    rows = per_lag(unknown, strata(tokens), updates_per_version=None)
    assert [(row.lag, row.updates) for row in rows] == [(0, None), (1, None), (None, None)]
    assert math.isnan(rows[-1].mean_abs.value)
    assert math.isnan(rows[0].ess.low), "four steps are too few for an interval"


# -- tails ---------------------------------------------------------------------------------------------------


def tail_of(setting: Setting) -> tuple[Tails, NDArray[np.float64]]:
    tokens = draw(setting)
    return need(tails(cells(tokens), histogram(tokens)), Tails), np.abs(tokens.total(["S", "M"]))


@pytest.mark.parametrize(
    ("setting", "dominate"),
    [
        (Setting(mismatch=1.5, flips=0.03, trajectories=2000), True),
        (Setting(mismatch=0.3, drift=0.1, trajectories=2000), False),
        (Setting(drift=1.0, trajectories=2000), False),
        (Setting(trajectories=2000), False),
    ],
)
def test_tails_are_those_of_the_tokens(setting: Setting, dominate: bool) -> None:
    found, size = tail_of(setting)
    assert found.tail_share.value == pytest.approx((size > LN2).mean())
    assert found.far_share == pytest.approx((size >= 0.75).mean())
    for bounds, p in ((found.p99, 0.99), (found.p999, 0.999)):
        assert bounds[0] <= np.float32(np.quantile(size, p, method="inverted_cdf")) < bounds[1]
    if size.any():
        exact = (size[size >= 0.75] ** 2).sum() / (size**2).sum()
        assert found.far_square_share == pytest.approx(exact, abs=0.03)
    assert found.dominate == dominate
    assert found.expert_agreement is None


def test_expert_agreement_is_the_mean_over_tokens_that_have_it() -> None:
    tokens = draw(Setting(mismatch=0.3, trajectories=1000))
    table = cells(tokens)
    agreed = dict(table, agree_n=table["n"], agree_sum=0.94 * table["n"])
    found = need(tails(agreed, histogram(tokens)), Tails)
    assert found.expert_agreement is not None
    assert found.expert_agreement.value == pytest.approx(0.94)
    none = need(tails(dict(table, agree_n=0 * table["n"], agree_sum=0 * table["n"]), histogram(tokens)), Tails)
    assert none.expert_agreement is None


def test_no_tokens_no_tails() -> None:
    tokens = draw(Setting(trajectories=8))
    nothing = {name: values[:0] for name, values in cells(tokens).items()}
    assert isinstance(tails(nothing, {k: v[:0] for k, v in histogram(tokens).items()}), Refused)
