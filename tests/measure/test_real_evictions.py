"""What verl's replay buffer took out of real runs, from the records those runs left."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.ingest.writers import REAL_RUNS
from verl_audit.ingest import traces
from verl_audit.measure.cohorts import Cohorts, cohorts, evicted_recorded, outstanding
from verl_audit.measure.ipw import generated_reward
from verl_audit.measure.ledger import Expected, Ledger, ledger, read_depth
from verl_audit.measure.reasons import parts_by_reason
from verl_audit.measure.survival import (
    length_bias,
    prompt_age,
    reward_bias,
    survival_by_difficulty,
    survival_by_length,
    truncation_point,
)
from verl_audit.measure.trace_groups import Groups, group_up, read_rows
from verl_audit.measure.trace_lag import lag_kinds
from verl_audit.store.database import open_store
from verl_audit.store.traces import load_traces

pytestmark = pytest.mark.skipif(not REAL_RUNS.is_dir(), reason="the real runs are not beside the repository")
GROUP_SIZE = 4


@cache
def run_of(name: str) -> tuple[Groups, Cohorts, Ledger, float | None]:
    """Groups, cohorts, ledger and mean newest lag of a recorded run."""
    con = open_store()
    (parsed,) = traces.read_recorder(REAL_RUNS / name / "trajectory_trace.jsonl")
    load_traces(con, name, parsed.traces)
    data = read_rows(con, name)
    groups = group_up(data)
    where = cohorts(groups, outstanding=outstanding(con, name), evicted_recorded=evicted_recorded(con, name))
    book = ledger(data, groups, expected=Expected(group_size=GROUP_SIZE), depth=read_depth(con, name))
    return groups, where, book, lag_kinds(con, name)["newest"].mean.number()


@pytest.mark.parametrize(
    ("name", "fates", "in_flight", "undelivered"),
    [
        ("async_drop_bias", {"trained": (960, 3840, 41908), "stale": (140, 560, 9924)}, 32, 0),
        ("rb_drop", {"trained": (480, 1920, 129102), "stale": (231, 924, 90129), "failed": (13, 0, None)}, 16, 52),
        ("rb_wait", {"trained": (480, 1920, 147382)}, 16, 0),
        ("rb_dapo", {"trained": (240, 960, 68495), "filtered": (151, 604, 31830), "failed": (5, 0, None)}, 16, 20),
    ],
)
def test_the_ledger_closes(name: str, fates: dict[str, object], in_flight: int, undelivered: int) -> None:
    book = run_of(name)[2]
    lines = {x.fate: (x.groups.value, x.trajectories.value, x.tokens.value) for x in book.lines if x.groups.value}
    assert lines == fates
    assert (book.open_groups.value, book.undelivered.value, book.lost_groups.value) == (in_flight, undelivered, 0)
    assert book.closes


def test_dropping_stale_groups_shortened_what_was_trained() -> None:
    groups, where, _, lag = run_of("async_drop_bias")
    bias = length_bias(groups, where)
    assert bias.total.number() == pytest.approx(-0.080, abs=0.001)
    assert bias.within.high is not None and bias.within.high < -0.05
    assert reward_bias(groups, where).within.number() == pytest.approx(0.047, abs=0.001)
    shares = [b.trained.number() for b in survival_by_length(groups, where).bins]
    assert shares == pytest.approx([1, 1, 0.974, 0.942, 0.792, 0.601], abs=0.001)
    assert [m.value for m in prompt_age(groups)[1:]] == [3, 4]
    assert lag == pytest.approx(0.962, abs=0.001)


def test_weighting_undoes_it_where_length_explains_it() -> None:
    groups, where, _, _ = run_of("async_drop_bias")
    found = generated_reward(groups, where)
    trained, generated, weighted = (m.number() or np.nan for m in (found.trained, found.generated, found.weighted))
    assert (trained, generated, weighted) == pytest.approx((0.525, 0.483, 0.486), abs=0.001)
    groups, where, _, _ = run_of("rb_drop")
    assert "more than length" in generated_reward(groups, where).weighted.missing


def test_dropping_in_the_replay_buffer_halves_survival_at_long_lengths() -> None:
    groups, where, _, _ = run_of("rb_drop")
    bias = length_bias(groups, where)
    assert bias.within.high is not None and bias.within.high < -0.05
    point = truncation_point(groups, where)
    assert point.low is not None and point.high is not None and point.low < 110 < point.high
    parts = {p.reason: p.length.number() for p in parts_by_reason(groups, where)}
    assert parts == {"stale": pytest.approx(-10.1, abs=0.1), "failed": 0}


def test_waiting_evicts_nothing_and_shifts_nothing() -> None:
    groups, where, _, _ = run_of("rb_wait")
    for bias in (length_bias(groups, where), reward_bias(groups, where)):
        assert (bias.total.value, bias.total.low, bias.total.high) == (0, 0, 0)


def test_the_reward_filter_takes_both_ends_and_lengthens_what_is_trained() -> None:
    groups, where, _, _ = run_of("rb_dapo")
    bias = length_bias(groups, where)
    assert bias.within.low is not None and bias.within.low > 0.05
    shares = [b.trained.number() for b in survival_by_difficulty(groups, where).bins]
    assert (shares[0], shares[-1], set(shares[1:-1])) == (0, 0, {1.0})
