"""A plan against the clock of the reference loop: a profile of one run, and what other settings then take.

python -m benchmarks.plan_clock [--write]

In each environment one traced run is profiled as `verl-audit plan` does it: 2 cards for training, 4 for rollouts with
40 trajectories at a time each, two batches ahead, one update a sync. Every other cell is predicted from that profile
and run. `fixed`: the policy does not learn, so lengths are the same in all runs; `learning`: it does. `log alone`: as
`fixed`, but profiled from the log and `--slots` without traces. --write puts the figures into docs/plan-clock.json,
from which docs/generate.py makes the tables of docs/plan.md. Seed 0, simulated time only: the same figures on
every machine.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from tests.plan.clock import SLOTS, Cell, logged, predicted, profile, run
from verl_audit.plan.profile import Profile

RECORDS = Path(__file__).parents[1] / "docs" / "plan-clock.json"
ENVIRONMENTS = ("small", "wide", "long")


def cells() -> Iterator[Cell]:
    """Every cell of the grid."""
    yield from (Cell(rollout=r, theta=t) for r in (1, 2, 4, 8) for t in (0.5, 1, 2, 4))
    yield from (Cell(train=n, rollout=r, theta=t) for n in (1, 4) for r in (2, 8) for t in (1, 2))
    yield from (Cell(k=k, rollout=r, theta=t) for k in (2, 4) for r in (2, 4) for t in (0.25, 0.5, 1))
    yield from (Cell(sync=s, rollout=r) for s in (0.5, 2.0) for r in (2, 4))
    yield from (Cell(strategy="fully_async", k=4, rollout=2, theta=t) for t in (0, 0.1, 0.5))
    yield from (
        Cell(strategy=how, threshold=h, rollout=r) for how in ("drop", "wait") for h in (2, 3, 5) for r in (2, 4)
    )  # type: ignore[arg-type]


def measured(env: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Both sides of every cell, for each way of running and profiling."""
    for learns in (False, True):
        name = "learning" if learns else "fixed"
        ways = {name: _traced(run(Cell(), env, folder / name, learns=learns, traced=True))}
        if not learns:
            ways["log alone"] = profile(run(Cell(), env, folder / "log", learns=False), slots=SLOTS)
        for number, cell in enumerate(cells()):
            found = logged(run(cell, env, folder / f"{name}-{number}", learns=learns))
            for way, profiled in ways.items():
                said = {key: _short(value) for key, value in predicted(profiled, cell).items()}
                yield {
                    "way": way,
                    "env": env,
                    **asdict(cell),
                    "found": {k: _short(v) for k, v in found.items()},
                    **said,
                }


def _traced(path: Path) -> Profile:
    """As traces tell it; where none waited for a slot they cannot tell how many there are, and the user must."""
    found = profile(path)
    return profile(path, slots=SLOTS) if "trajectories at a time" in {u.what for u in found.work.unknown} else found


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def errors(rows: list[dict[str, Any]], name: str) -> np.ndarray[Any, Any]:
    """Relative errors of a prediction, where the log has the value."""
    what = name.removeprefix("simulated_")
    return np.array([r[name] / r["found"][what] - 1 for r in rows if r["found"][what]])


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write docs/plan-clock.json.")
def main(write: bool) -> None:
    """Print the errors, all cells and those away from kinks."""
    rows: list[dict[str, Any]] = []
    for env in ENVIRONMENTS:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(env, Path(folder))
    if write:
        RECORDS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    for way in dict.fromkeys(row["way"] for row in rows):
        for kink in (False, True):
            some = [r for r in rows if r["way"] == way and r["kink"] is kink]
            for name in ("step", "simulated_step", "lag", "simulated_lag"):
                off = np.abs(errors(some, name))
                click.echo(
                    f"{way}, {'at kinks' if kink else 'elsewhere'}: {name} of {len(off)} cells: "
                    f"median {np.median(off):.1%}, {np.mean(off <= 0.1):.0%} within 10 %, largest {off.max():.1%}"
                )


if __name__ == "__main__":
    main()
