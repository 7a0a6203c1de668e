"""From the columns of a trace through the token kernel to the decomposition, on tokens whose parts are known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.measure.token_draws import SETS, Setting, Tokens, draw
from verl_audit.measure.decompose.bracket import Bracket, mismatch_bracket
from verl_audit.measure.decompose.damage import Damage, damage
from verl_audit.measure.decompose.per_lag import per_lag
from verl_audit.measure.decompose.shapley import shapley
from verl_audit.measure.decompose.tables import Refused
from verl_audit.measure.decompose.tails import Tails, tails
from verl_audit.measure.tokens.reduce import reduce_batches
from verl_audit.measure.tokens.spec import Spec
from verl_audit.measure.tokens.sums import TokenSums
from verl_audit.trace.schema import schema

VERSION = 100
SETTING = Setting(mismatch=0.3, drift=0.2, lags=(0, 1, 2, 4), k=2, trajectories=800)


def trace(tokens: Tokens, length: int, recorded: tuple[str, ...]) -> pa.RecordBatch:
    """Trajectories of two segments, four to a group."""
    rows = len(tokens.lag) // length
    lag = tokens.lag.reshape(rows, length)
    logp = dict(zip(SETS, np.cumsum([tokens.behave, *(tokens.parts[p] for p in "MSU")], axis=0), strict=True))
    half = length // 2
    segments = [[{"version": VERSION - int(row[at]), "start": at, "length": half} for at in (0, half)] for row in lag]
    columns = {
        "group": [f"group {i // 4}" for i in range(rows)],
        "fate": ["trained"] * rows,
        "decided_step": tokens.step[::length].tolist(),
        "train_version": [VERSION] * rows,
        "train_minibatch": tokens.minibatch[::length].tolist(),
        "segments": segments,
        "response_length": [length] * rows,
        "advantage": tokens.advantage[::length].tolist(),
        **{name: logp[name].reshape(rows, length).tolist() for name in recorded},
    }
    fields = [schema().field(name) for name in columns]
    return pa.record_batch([pa.array(columns[f.name], f.type) for f in fields], schema=pa.schema(fields))


def reduced(tokens: Tokens, recorded: tuple[str, ...] = SETS) -> TokenSums:
    batch = trace(tokens, SETTING.tokens, recorded)
    return reduce_batches([batch], Spec(clip_low=0.2, clip_high=0.28), updates_per_version=SETTING.k, kernel="numpy")


def test_four_sets_give_the_parts_that_were_put_in() -> None:
    tokens = draw(SETTING)
    found = shapley(reduced(tokens).subsets)
    assert not isinstance(found, Refused)
    for name in "MSU":
        part = found["variance"].part(name)
        assert part is not None and part.share is not None
        assert part.share.value == pytest.approx(tokens.covariance_share(name), abs=1e-4)
        assert part.share.low < part.share.value < part.share.high


def test_three_sets_give_a_bracket_with_the_truth_and_a_damage() -> None:
    tokens = draw(SETTING)
    sums = reduced(tokens, ("behave_logp", "prox_logp", "theta_logp"))
    bracket = mismatch_bracket(
        sums.strata, later="prox_logp", trajectories=SETTING.trajectories, updates_per_version=SETTING.k
    )
    assert isinstance(bracket, Bracket)
    assert bracket.low < tokens.second_share() < bracket.high
    assert bracket.second.value == pytest.approx(np.mean(tokens.total(["S", "M"]) ** 2), rel=1e-4)
    tail = tails(sums.cells, sums.histogram)
    assert isinstance(tail, Tails)
    exact = damage(reduced(tokens).subsets, mode="decoupled")
    bounded = damage(sums.subsets, mode="decoupled", bracket=bracket, tails=tail)
    assert isinstance(exact, Damage) and isinstance(bounded, Damage)
    assert exact.mismatch is not None and bounded.mismatch is not None
    assert bounded.mismatch.low < exact.mismatch.value < bounded.mismatch.high
    assert bounded.loss.value == pytest.approx(exact.loss.value, rel=1e-6)


def test_table_by_lag_and_tails() -> None:
    tokens = draw(SETTING)
    sums = reduced(tokens, ("behave_logp", "prox_logp"))
    rows = per_lag(sums.cells, sums.strata, updates_per_version=SETTING.k)
    assert [row.lag for row in rows] == [0, 1, 2, 4]
    size = np.abs(tokens.total(["S", "M"]))
    for row in rows:
        here = tokens.lag == row.lag
        assert row.tokens == here.sum()
        assert row.mean_abs.value == pytest.approx(size[here].mean(), rel=1e-4)
    tail = tails(sums.cells, sums.histogram)
    assert isinstance(tail, Tails)
    assert tail.tail_share.value == pytest.approx((size > np.log(2)).mean(), abs=1e-4)
    assert tail.p99[0] <= np.quantile(size, 0.99) <= tail.p99[1]
