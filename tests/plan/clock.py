"""Runs of the reference loop, whose clock knows nothing of the planner, and what a profile of one predicts of others.

The profiled run is traced and has 2 cards for training and 4 for rollouts, 40 trajectories at a time each, two batches
ahead, one update a sync. A cell has other cards, k, theta, sync time or threshold. More training cards are quicker
updates, more rollout cards more slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl_audit.pipeline import load_all
from verl_audit.plan.des import setting_of, simulate
from verl_audit.plan.measured import from_run
from verl_audit.plan.profile import Given, Profile
from verl_audit.plan.reading import Reading
from verl_audit.plan.split import TERMS, one, predict
from verl_audit.plan.workload import Workload
from verl_audit.reference import TraceOptions
from verl_audit.reference import simulate as run_loop

UPDATES = 120
SLOTS, RESERVE = 40, 0.02
"""Trajectories at a time on a rollout card; seconds of a sync besides `sync_seconds`."""
KINK = 0.1
"""A cell is at a kink if rollouts or updates slower or faster by this share change what its cycle waits for."""


@dataclass(frozen=True)
class Cell:
    """Settings of a run."""

    train: int = 2
    rollout: int = 4
    k: int = 1
    theta: float = 2.0
    sync: float = 0.1
    """Seconds of a weight sync."""
    strategy: Literal["", "drop", "wait", "fully_async"] = ""
    threshold: int = 0

    def loop(self, updates: int) -> dict[str, Any]:
        """The loop's settings."""
        made = {
            "updates": updates,
            "replicas": self.rollout,
            "slots": SLOTS * self.rollout,
            "update_seconds": 0.8 * 2 / self.train,
            "log_prob_seconds": 0.2 * 2 / self.train,
            "updates_per_sync": self.k,
            "sync_seconds": self.sync - RESERVE,
        }
        if self.strategy == "fully_async":
            return made | {"staleness_share": self.theta}
        return made | {"warmup": self.theta, "threshold": self.threshold, "strategy": self.strategy or "drop"}

    def work(self, profiled: Workload) -> Workload:
        """What the profile says of it: the same work, under the cell's rules."""
        return replace(
            profiled,
            mode="fully_async" if self.strategy == "fully_async" else "separate_async",
            sync_seconds=self.sync,
            evict_above=float(self.threshold) if self.strategy == "drop" else None,
            wait_at=float(self.threshold) if self.strategy == "wait" else None,
        )


def run(cell: Cell, env: str, out: Path, *, learns: bool = True, updates: int = UPDATES, traced: bool = False) -> Path:
    """Simulate a cell with the loop; its log, and traces without token lists. A policy that learns changes lengths."""
    name = "fully_async" if cell.strategy == "fully_async" else "async"
    options = TraceOptions((), 0.0) if traced else None
    return run_loop(name, env, 0, out, logs=("file",), traces=options, **cell.loop(updates), rate_factor=float(learns))


def profile(path: Path, slots: float | None = None) -> Profile:
    """As `verl-audit plan` measures it; the configuration of a simulated run always says 1 card for training."""
    return from_run(load_all(path), Given(train_cards=2, slots=slots))


def logged(path: Path) -> dict[str, float]:
    """Seconds of a step with its sync, and mean lag of the oldest token in versions where it is logged.

    Without the first tenth. The step that fully_async logs does not hold its sync.
    """
    seen = Reading(load_all(path), 0, Given())
    apart = seen.sync if seen.trainer == "fully_async" else 0.0
    return {
        "step": seen.mean("time_step") + apart,
        "lag": seen.mean("lag_oldest_mean"),
        "evicted": _share(seen.mean("evicted_stale"), seen.data.number("groups_per_step") or 0.0),
    }


def _share(evicted: float, trained: float) -> float:
    return evicted / (evicted + trained) if trained else 0.0


def predicted(profiled: Profile, cell: Cell) -> Mapping[str, Any]:
    """By the formulas and by the simulation: seconds of a step, lag in versions; what binds; whether at a kink."""
    work, there = cell.work(profiled.work), one(cell.train, cell.rollout, cell.k, cell.theta)
    said = predict(work, there)
    setting = setting_of(work, cell.train, cell.rollout, cell.k, cell.theta)
    run = simulate(setting, work.durations.drawable(setting.group_size))
    moved = [_slower(work, pool, by) for pool in ("rollout", "train") for by in (1 - KINK, 1 + KINK)]
    return {
        "step": float(said.cycle[0]),
        "lag": float(said.lag_versions[0]),
        "evicted": float(said.evicted[0]),
        "simulated_step": run.cycle,
        "simulated_lag": run.lag_versions,
        "simulated_evicted": run.evicted,
        "binds": TERMS[int(said.binds[0])],
        "kink": any(predict(other, there).binds[0] != said.binds[0] for other in moved),
    }


def _slower(work: Workload, pool: str, by: float) -> Workload:
    moved = replace(getattr(work, pool), seconds=getattr(work, pool).seconds * by)
    return replace(work, **{pool: moved})
