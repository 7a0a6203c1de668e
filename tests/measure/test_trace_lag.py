"""Lag over trained trajectories, by kind."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.trace_lag import lag_counts, lag_kinds, queue_share, updates_lag


def trained(step: int | None, **lag: Any) -> dict[str, Any]:
    return {"group": "g", "fate": "trained", "decided_step": step, "response_length": 10, **lag}


def test_lag_is_told_over_all_and_by_step_for_trained_only() -> None:
    table = [
        trained(1, lag_newest=0),
        trained(1, lag_newest=2),
        trained(2, lag_newest=4),
        trained(2),
        {"group": "x", "fate": "stale", "decided_step": 2, "lag_newest": 9, "response_length": 1},
    ]
    newest = lag_kinds(trace_store(trajectories=table), RUN)["newest"]
    assert (newest.mean.value, newest.mean.n, newest.mean.unit, newest.largest.value) == (2, 3, "versions", 4)
    assert (newest.step.tolist(), newest.step_mean.tolist(), newest.step_max.tolist()) == ([1, 2], [1, 4], [2, 4])
    assert newest.quantiles[0.5].value == 2


def test_the_token_mean_weighs_by_loss_tokens() -> None:
    table = [trained(1, lag_mean=1.0, loss_tokens=30), trained(1, lag_mean=5.0)]
    assert lag_kinds(trace_store(trajectories=table), RUN)["token_mean"].mean.value == 2


def test_unknown_lag_is_not_zero() -> None:
    kinds = lag_kinds(trace_store(trajectories=[trained(1)]), RUN)
    assert {k.mean.value for k in kinds.values()} == {None}
    assert kinds["updates"].mean.missing == "lag_updates is not known of any trained trajectory"
    assert kinds["updates"].mean.unit == "updates"


def test_rows_without_a_step_still_count() -> None:
    newest = lag_kinds(trace_store(trajectories=[trained(None, lag_newest=3), trained(1, lag_newest=1)]), RUN)["newest"]
    assert newest.mean.value == 2
    assert math.isnan(newest.step[-1])


def test_the_interval_is_that_of_the_step_means() -> None:
    rng = np.random.default_rng(60)
    table = [trained(s, lag_newest=int(rng.integers(0, 5))) for s in range(40) for _ in range(8)]
    mean = lag_kinds(trace_store(trajectories=table), RUN)["newest"].mean
    assert mean.low is not None and mean.high is not None
    assert mean.low < 2 < mean.high
    assert mean.high - mean.low < 0.6


def test_lag_counts_are_the_distribution_at_each_step() -> None:
    table = [
        trained(1, lag_newest=0),
        trained(1, lag_newest=2),
        trained(1, lag_newest=2),
        trained(2),
        trained(None, lag_newest=1),
    ]
    found = lag_counts(trace_store(trajectories=table), RUN)
    assert list(zip(found.step, found.lag, found.trajectories, found.tokens, strict=True)) == [
        (1, 0, 1, 10),
        (1, 2, 2, 20),
    ]
    unknown = lag_counts(
        trace_store(trajectories=[trained(1, lag_updates=2.5, loss_tokens=1) | {"response_length": None}]),
        RUN,
        "updates",
    )
    assert (unknown.lag.tolist(), np.isnan(unknown.tokens).tolist()) == ([2], [True])


def test_the_queue_share_splits_the_lag() -> None:
    kinds = lag_kinds(trace_store(trajectories=[trained(1, lag_in_flight=1, lag_in_queue=3)]), RUN)
    assert queue_share(kinds).value == 0.75
    kinds = lag_kinds(trace_store(trajectories=[trained(1, lag_in_flight=0, lag_in_queue=0)]), RUN)
    assert "nothing to split" in queue_share(kinds).missing
    assert "lag_in_queue" in queue_share(lag_kinds(trace_store(), RUN)).missing


def test_updates_between_versions_and_within() -> None:
    found = updates_lag(np.array([5.0, 5.0]), np.array([3.0, 5.0]), np.array([0.0, 2.0]), 4)
    assert found.tolist() == [pytest.approx(8), pytest.approx(2)]
