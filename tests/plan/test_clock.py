"""A profile of one run against other runs, by a clock that shares no code with the planner: the reference loop's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.clock import Cell, logged, predicted, profile, run
from verl_audit.plan.profile import Profile

WITHIN = 0.10


def made(cell: Cell, folder: Path, *, traced: bool = False) -> Path:
    """A short run; its policy does not learn, so that lengths stay as they are."""
    return run(cell, "small", folder / "run", learns=False, updates=48, traced=traced)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile(made(Cell(), tmp_path_factory.mktemp("clock"), traced=True))


def test_what_traces_tell_of_a_run(profiled: Profile) -> None:
    """160 slots, prefill .1 s and .06 s a token; groups of one prompt are alike."""
    work = profiled.work
    assert work.slots_per_card * 4 == 160
    assert work.durations.groups and len(work.durations.groups[0]) == 8
    together, alone = (d.of_groups(8)[1] for d in (work.durations, replace(work.durations, groups=())))
    assert together < 0.95 * alone
    assert work.resume_seconds == pytest.approx(0.1 + 0.06 / 2, rel=0.05), "half a token is lost besides the prefill"
    assert work.sync_seconds == pytest.approx(0.1)
    assert "rollout time" not in {u.what for u in work.unknown}


CELLS = [
    Cell(theta=1),
    Cell(rollout=2),
    Cell(rollout=8),
    Cell(rollout=8, theta=4),
    Cell(train=4, rollout=2, theta=1),
    Cell(k=2, theta=0.25),
    Cell(k=4, theta=0.5, rollout=2),
    Cell(sync=1.0),
    Cell(strategy="wait", threshold=2),
    Cell(strategy="fully_async", theta=0.3, k=4, rollout=2),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_other_settings_are_predicted(cell: Cell, profiled: Profile, tmp_path: Path) -> None:
    said, found = predicted(profiled, cell), logged(made(cell, tmp_path))
    for way in ("", "simulated_"):
        assert said[f"{way}step"] == pytest.approx(found["step"], rel=WITHIN)
        if cell.strategy != "fully_async":  # its log has no lag
            assert said[f"{way}lag"] == pytest.approx(found["lag"], rel=WITHIN)
