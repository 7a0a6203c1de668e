"""Runs of real verl 0.9.1 with the recorder: what the traces tell agrees with what verl logged itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from verl_audit import Audit, audit

RECORDED = Path(__file__).parents[2] / "fixtures" / "recorded"
ASYNC = ("separate_async", "colocate_async")
RUNS = (*ASYNC, "sync")


@cache
def judged(name: str) -> Audit:
    return audit(RECORDED / name)


@pytest.mark.parametrize("name", RUNS)
def test_the_ledger_closes(name: str) -> None:
    book = judged(name).document["traces"]["ledger"]
    assert book["closes"]
    assert book["residual"]["trajectories"] == 0
    assert book["lost_groups"] in (0, None)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_in_the_trace_is_a_problem(name: str) -> None:
    assert [p for p in judged(name).document["problems"] if p["kind"].startswith(("trace", "tokens"))] == []


@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize(
    ("lag", "signal"),
    [("train_version - newest", "lag_newest_mean"), ("train_version - oldest", "lag_oldest_mean")],
)
def test_versions_agree_with_verls_own_metrics_step_by_step(name: str, lag: str, signal: str) -> None:
    """verl counts an attempt that was aborted before its first token; the derived lags count tokens."""
    query = f"""
        WITH attempts AS (
            SELECT trajectory_id, min(version) AS oldest, max(version) AS newest
            FROM trajectory_segments GROUP BY trajectory_id),
        traced AS (
            SELECT decided_step AS step, avg({lag}) AS traced FROM trajectories JOIN attempts USING (trajectory_id)
            WHERE fate = 'trained' GROUP BY decided_step)
        SELECT s.step, s.{signal}, traced FROM steps s JOIN traced USING (step)
        WHERE s.{signal} IS NOT NULL ORDER BY s.step"""
    rows = judged(name).sql(query)
    assert len(rows) >= 6
    assert all(logged == pytest.approx(traced, abs=1e-3) for _, logged, traced in rows), rows


@pytest.mark.parametrize("name", ASYNC)
def test_evictions_agree_with_verls_own_counts(name: str) -> None:
    counted = judged(name).sql("SELECT coalesce(sum(stale_groups), 0)::INTEGER FROM steps")
    stale = "SELECT count(DISTINCT \"group\")::INTEGER FROM trajectories WHERE fate = 'stale'"
    assert counted == judged(name).sql(stale)


def test_the_loop_decides_with_its_traces() -> None:
    document = judged("separate_async").document
    assert document["ledger"]["level"] == "traces"
    assert document["measures"]["gap_logp_lag0"]["level"] == "traces"
    assert 0 < document["measures"]["gap_logp_lag0"]["value"] < 0.02  # a bf16 rollout against an fp32 trainer


def test_fully_async_records_what_was_trained() -> None:
    document = judged("fully_async").document
    assert document["traces"]["ledger"]["unit_rows"][0]["fate"] == "trained"
