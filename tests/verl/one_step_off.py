"""verl's one_step_off on a CPU, recorded through the plugin of verl, and what both sides tell of each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

if __package__:
    from tests.verl.agreement import logged, table
    from tests.verl.fully_async import MINI, STEPS, gap, start
else:  # beside run.py, where another `tests` may be installed
    from agreement import logged, table  # type: ignore[import-not-found,no-redef,unused-ignore]
    from fully_async import MINI, STEPS, gap, start  # type: ignore[import-not-found,no-redef,unused-ignore]


def launch(plugin: Path, assets: Path, run: Path) -> None:
    """Eight steps of one update; raises with the end of the console if verl fails."""
    # The wheel looks for verl's configurations below the working directory.
    search = "hydra.searchpath=[pkg://verl.trainer.config]"
    overrides = [search, f"data.train_batch_size={MINI}", f"trainer.total_training_steps={STEPS}"]
    start("verl.experimental.one_step_off_policy.main_ppo", overrides, plugin, assets, run)


def disagreements(run: Path) -> Iterator[str]:
    """Rows of verl's `file` log beside the traces of the same step.

    verl syncs as a step begins: its label g names the weights after g - 1 updates, which sample what step g + 1 trains.
    So all tokens are one version old but in the first step, before which nothing was trained.
    """
    rows, told = table(run, "trajectories"), logged(run)
    if not told:
        yield "verl logged no row"
    for metrics in told:
        step = int(metrics["training/global_step"])
        part = [row for row in rows if row["decided_step"] == step]
        if not part:
            yield f"step {step}: no trajectory is recorded"
            continue
        found = {
            "response_length/mean": np.mean([row["response_length"] for row in part]),
            "critic/score/mean": np.mean([row["reward"] for row in part]),
            "training/rollout_probs_diff_mean": gap(part),
        }
        for name, value in found.items():
            if not np.isclose(value, metrics[name], rtol=1e-4, atol=1e-6):
                yield f"step {step}: {name} is {value} by the traces and {metrics[name]} by verl"
        lags = {row["train_version"] - s["version"] for row in part for s in row["segments"]}
        if lags != {int(step > 1)}:
            yield f"step {step}: lags {sorted(lags)}"
