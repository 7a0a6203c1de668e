"""How long a plan takes: the grid of 128 cards with its figures, and the simulation of a shortlist.

python benchmarks/plan.py

Each measured in this process, best of three, imports left out; wall time, and processor time in brackets, which other
work on the machine does not lengthen. The grid has every split of 128 cards into single
cards with 5 k and 10 theta (6,350 settings); the batch is 512 groups of 16, four updates to a sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from verl_audit.plan.figures import heatmaps, timeline
from verl_audit.plan.profile import Given, Profile, from_numbers
from verl_audit.plan.search import Limits, Plan, make_plan
from verl_audit.plan.svg import heatmap_svg, timeline_svg

GRID, SHORTLIST = 2.0, 20.0
"""Targets in seconds."""


def profile() -> Profile:
    """32 cards, R:T = 3:1, a big batch."""
    return from_numbers(
        Given(rollout=300, train=100, sync=5, baseline_cards=32, groups=512, group_size=16, updates=4, slots=64)
    )


def drawn(plan: Plan) -> list[str]:
    """All figures of a plan."""
    lanes = timeline(plan)
    return [heatmap_svg(f) for f in heatmaps(plan)] + ([timeline_svg(lanes)] if lanes else [])


def best_of_three(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time and of processor time."""
    walls, processor = [], []
    for _ in range(3):
        wall, own = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processor.append(time.process_time() - own)
    return min(walls), min(processor)


@click.command(help=__doc__)
def main() -> None:
    """Print both times with their targets."""
    given, limits = profile(), Limits(128)
    grid = best_of_three(lambda: drawn(make_plan(given, limits, simulated=False)))
    plan = make_plan(given, limits, simulated=False)
    whole = best_of_three(lambda: drawn(make_plan(given, limits)))
    ran = [c.simulated for c in make_plan(given, limits).shortlist if c.simulated]
    trajectories = sum(len(c.lags) for run in ran for c in run.cycles) * 16
    click.echo(f"grid of {len(plan.grid)} settings with figures: {grid[0]:.2f} s ({grid[1]:.2f} s); target {GRID:g} s")
    click.echo(
        f"shortlist of {len(ran)}, {trajectories} trajectories: {whole[0] - grid[0]:.2f} s more "
        f"({whole[1] - grid[1]:.2f} s); target {SHORTLIST:g} s"
    )


if __name__ == "__main__":
    main()
