"""Replicas that stay behind, and syncs that do not arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.replicas import BEHIND, FROZEN_SLOPE, Delivery, Replicas, delivery, replicas


def run_of(versions: dict[str, list[int]], *, timed: bool = True, queue: int = 1) -> Replicas:
    """One segment per engine and version; the i-th starts at time i and is trained `queue` versions later."""
    segments: list[dict[str, Any]] = []
    trajectories: list[dict[str, Any]] = []
    for server, (name, had) in enumerate(versions.items()):
        for i, version in enumerate(had):
            at = len(trajectories)
            trajectories.append(
                {"group": str(at), "fate": "trained", "decided_step": i + queue, "train_version": i + queue}
            )
            segments.append(
                {
                    "trajectory_id": at,
                    "segment": 0,
                    "version": version,
                    "server": name,
                    "t0": i + server / 10 if timed else None,
                }
            )
    return replicas(trace_store(trajectories=trajectories, trajectory_segments=segments), RUN)


@pytest.mark.parametrize("timed", [True, False])
def test_healthy_replicas_are_neither_behind_nor_frozen(timed: bool) -> None:
    found = run_of({"a": list(range(40)), "b": [max(0, v - 1) for v in range(40)]}, timed=timed)
    assert found.timed is timed
    assert (found.behind.value, found.behind.n, found.frozen.value) == (0, 2, 0)
    assert {r.server: r.behind.value for r in found.each} == {"a": 0, "b": 1}


@pytest.mark.parametrize("timed", [True, False])
def test_a_replica_that_freezes_midway_falls_behind_by_one_a_version(timed: bool) -> None:
    found = run_of({"a": list(range(60)), "b": [min(v, 20) for v in range(60)]}, timed=timed)
    assert (found.behind.value, found.frozen.value) == (1, 1)
    assert found.worst_slope.value == pytest.approx(1)


def test_a_replica_that_trails_evenly_is_behind_and_not_frozen() -> None:
    found = run_of({"a": list(range(40)), "b": [max(0, v - 5) for v in range(40)]})
    assert (found.behind.value, found.frozen.value) == (1, 0)
    frozen = next(r for r in found.each if r.server == "b")
    assert (frozen.behind.value, frozen.worst.value) == (5, 5)


def test_slow_requests_of_a_healthy_replica_do_not_count_against_it() -> None:
    """Each engine also samples old versions (a request cut and resumed elsewhere keeps the version it began with)."""
    rng = np.random.default_rng(70)
    segments = [
        {"trajectory_id": 0, "segment": 0, "version": max(0, v - lag), "server": f"s{s}", "t0": v + 0.1}
        for v in range(40)
        for s in range(4)
        for lag in (0, int(rng.integers(0, 9)))
    ]
    found = replicas(trace_store(trajectory_segments=segments), RUN)
    assert (found.behind.value, found.frozen.value) == (0, 0)
    assert float(found.worst_slope.value or 0) < FROZEN_SLOPE


def test_a_replica_that_freezes_late_is_behind_at_the_end() -> None:
    found = run_of({"a": list(range(60)), "b": [min(v, 52) for v in range(60)]})
    late = next(r for r in found.each if r.server == "b")
    assert (late.behind.value, late.end.value, found.behind.value) == (0, 2.5, 1)


def test_a_short_run_tells_who_is_behind_but_not_who_is_frozen() -> None:
    found = run_of({"a": list(range(10)), "b": [0] * 10})
    assert (found.behind.value, found.frozen.value) == (1, None)
    assert "20 versions" in found.frozen.missing
    assert BEHIND == 2


def test_one_engine_or_none_cannot_be_compared() -> None:
    assert run_of({"a": [1, 2]}).behind.missing == "only one engine: there is none to compare it with"
    assert run_of({}).frozen.missing == "the segments name no engine"


# -- delivery ----------------------------------------------------------------------------------------------


def delivered(
    sampled: list[int | None], *, segments: bool = False, syncs: list[dict[str, Any]] | None = None
) -> Delivery:
    trajectories = [
        {"group": str(i), "fate": "trained", "train_version": i, "last_version": None if segments else v}
        for i, v in enumerate(sampled)
    ]
    calls = [{"trajectory_id": i, "segment": 0, "version": v} for i, v in enumerate(sampled) if segments]
    return delivery(trace_store(trajectories=trajectories, trajectory_segments=calls, syncs=syncs or []), RUN)


@pytest.mark.parametrize("segments", [True, False])
def test_versions_that_never_arrive(segments: bool) -> None:
    assert delivered([0] * 10, segments=segments).delivered.value == 0
    assert delivered([max(0, i - 1) for i in range(10)], segments=segments).delivered.value == 1


def test_a_queue_that_fills_is_no_fault_and_syncs_that_stop_are() -> None:
    """The lag of the first run grows from 0 to 6 and stays; the second gets no weights from version 14 on."""
    assert delivered([max(0, i - 6) for i in range(20)]).delivered.value == 1
    assert delivered([min(i, 14) for i in range(20)]).delivered.value == pytest.approx(5 / 10)


def test_too_few_versions_or_none_say_nothing() -> None:
    assert delivered([0] * 5).delivered.missing == "the training version rose by 4, 5 needed"
    assert "not known" in delivered([None] * 9).delivered.missing


def test_partial_and_undelivered_syncs() -> None:
    had = {1: (1, 1), 2: (2, 1), 3: (1, 1), 4: (4, 1)}
    syncs = [
        {"version": v, "replica": r, "replica_version": x}
        for v, pair in had.items()
        for r, x in zip("ab", pair, strict=True)
    ]
    found = delivered([], syncs=syncs)
    assert (found.partial.value, found.undelivered.value, found.partial.n) == (0.5, 0.25, 4)
    assert (found.behind.value, found.behind.n) == (1.5, 2)


def test_a_replica_ahead_of_the_label_is_not_behind() -> None:
    assert delivered([], syncs=[{"version": 1, "replica": "a", "replica_version": 2}]).behind.value == 0


def test_a_payload_that_does_not_change_is_told() -> None:
    norms = [3.0, 3.0, 3.0, 3.5]
    found = delivered([], syncs=[{"version": v, "payload_norm": x} for v, x in enumerate(norms)])
    assert found.unchanged.value == pytest.approx(2 / 3)
    assert (found.unchanged.n, found.empty.value) == (3, 0)


def test_an_empty_payload_is_told() -> None:
    found = delivered([], syncs=[{"version": 1, "payload_count": 0}, {"version": 2, "payload_norm": 0.0}])
    assert (found.empty.value, found.unchanged.value) == (1, None)


def test_unrecorded_payload_and_versions_have_a_reason() -> None:
    found = delivered([], syncs=[{"version": 1}])
    assert found.partial.missing == "the syncs record no version per replica"
    assert "payload" in found.empty.missing and "payload" in found.unchanged.missing
