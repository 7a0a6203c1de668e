"""Which groups may be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.measure.trace_tables import RUN, trace_store
from verl_audit.measure.cohorts import cohorts, evicted_recorded, leave_out, outstanding
from verl_audit.measure.trace_groups import Groups, group_up, rows


def steady(steps: int = 20, *, age: int = 2, fates: dict[int, str] | None = None) -> Groups:
    """Four groups of one trajectory a step, decided `age` steps later; `fates` by group where not trained."""
    n = 4 * steps
    fate = [(fates or {}).get(g, "trained") for g in range(n)]
    step = np.arange(n) // 4 + 1
    decided = np.where(np.array(fate) == "in_flight", np.nan, step + age)
    return group_up(rows(np.arange(n), fate, submit_step=step, decided_step=decided, response_length=np.ones(n)))


def test_a_cohort_with_a_group_in_flight_is_left_out_whole() -> None:
    found = cohorts(steady(fates={9: "in_flight"}), outstanding=1)
    assert (found.basis, found.weaker, found.open) == ("submit_step", "", 1)
    assert np.flatnonzero(~found.resolved[12:]).size == 0
    assert not found.resolved[8:12].any()


def test_a_group_of_unknown_fate_opens_its_cohort() -> None:
    assert cohorts(steady(fates={9: "unknown"}), outstanding=0).open == 1


def test_without_in_flight_rows_the_youngest_cohorts_are_left_out() -> None:
    """Groups of a cohort are decided 0, 1, 2 and 3 steps later, and the record ends at step 20."""
    step, age = np.arange(80) // 4 + 1, np.arange(80) % 4
    seen = step + age <= 20
    groups = group_up(
        rows(np.arange(80)[seen], ["trained"] * seen.sum(), submit_step=step[seen], decided_step=(step + age)[seen])
    )
    for left in (None, 6):
        found = cohorts(groups, outstanding=left)
        assert (found.edge, groups.submit_step[found.resolved].max()) == (3, 17)
    assert cohorts(groups, outstanding=0).edge == 0


def test_an_empty_buffer_at_the_end_closes_all_cohorts() -> None:
    groups = steady(20, age=0)
    found = cohorts(groups, outstanding=0)
    assert (found.edge, bool(found.resolved.all())) == (0, True)


def test_cohorts_submitted_before_the_record_began_are_left_out() -> None:
    found = cohorts(steady(20, age=3), outstanding=0)
    assert found.edge == 3


@pytest.mark.parametrize("basis", ["submit_version", "first_version"])
def test_versions_stand_in_for_steps_and_are_called_weaker(basis: str) -> None:
    version = np.arange(40) // 4
    groups = group_up(rows(np.arange(40), ["trained"] * 40, train_version=version + 1, **{basis: version}))
    found = cohorts(groups, outstanding=0)
    assert found.basis == basis
    assert basis.replace("_", " ") in found.weaker


def test_without_any_clock_the_run_is_one_cohort() -> None:
    found = cohorts(group_up(rows(np.arange(5), ["trained"] * 4 + ["in_flight"])))
    assert (found.basis, found.total, found.resolved.tolist()) == ("", 1, [True] * 4 + [False])
    assert "one cohort" in found.weaker


def test_groups_without_a_step_are_counted() -> None:
    step = np.where(np.arange(20) < 3, np.nan, 1)
    found = cohorts(group_up(rows(np.arange(20), ["trained"] * 20, submit_step=step, decided_step=step)), outstanding=0)
    assert (found.unplaced, int(found.resolved.sum())) == (3, 17)


def test_blocks_join_neighbouring_cohorts() -> None:
    found = cohorts(steady(40, age=0), outstanding=0)
    sizes = np.bincount(found.block)
    assert (len(sizes), sizes.min(), sizes.max()) == (5, 32, 32)


def test_a_dump_of_training_batches_compares_nothing() -> None:
    assert "only trained" in cohorts(steady(), evicted_recorded=False).blind
    assert not cohorts(steady(fates={3: "stale"}), evicted_recorded=False).blind


def test_groups_that_a_filter_alone_evicted_can_be_left_out() -> None:
    fate = ["trained", "filtered", "stale", "stale"]
    groups = group_up(
        rows(range(4), fate, session=[0] * 4, reasons=[0, 2, 1, 3], submit_step=[1] * 4, decided_step=[1] * 4)
    )
    found = leave_out(cohorts(groups, outstanding=0), groups, {"filtered"})
    assert found.resolved.tolist() == [True, False, True, True]
    assert found.block.tolist() == [0, -1, 0, 0]


@pytest.mark.parametrize(
    ("fates", "told"),
    [([None], True), ([["trained", "stale"]], True), ([["trained"]], False), ([None, ["trained"]], False), ([], True)],
)
def test_the_sources_tell_whether_the_evicted_are_recorded(fates: list[list[str] | None], told: bool) -> None:
    sources = [{"table": "trajectories", "fates": f} for f in fates] + [{"table": "syncs", "fates": ["trained"]}]
    assert evicted_recorded(trace_store(trace_sources=sources), RUN) is told


def test_outstanding_is_the_last_count_of_the_buffer() -> None:
    counts: list[dict[str, Any]] = [
        {"step": 2, "pending": 1, "running": 2, "finished": None, "failed": 1},
        {"step": 1, "running": 9},
    ]
    assert outstanding(trace_store(buffer_depth=counts), RUN) == 4
    assert outstanding(trace_store(buffer_depth=[{"step": 2}]), RUN) is None
    assert outstanding(trace_store(), RUN) is None
