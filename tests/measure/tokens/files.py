"""Seeded trace files of a few hundred trajectories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from verl_audit.trace.write import to_table, write


def table(seed: int, rows: int = 40) -> pa.Table:
    """Trained trajectories of one step, with masks, segments and empty responses; no two seeds alike."""
    rng = np.random.default_rng(seed)
    out = []
    for row in range(rows):
        length = int(rng.integers(0, 60)) if row % 7 else 0
        behave = -rng.exponential(1, length)
        cut = length // 2
        out.append({
            "group": f"{seed}-{row // 4}", "session": row % 4, "fate": "trained", "decided_step": seed,
            "train_version": 5, "train_minibatch": row % 2, "response_length": length,
            "segments": [{"version": 3, "start": 0, "length": cut},
                         {"version": 4, "start": cut, "length": length - cut}],
            "advantage": float(rng.standard_normal()), "behave_logp": behave,
            "theta_logp": np.minimum(behave + rng.normal(0, 0.2, length), 0), "loss_mask": rng.random(length) < 0.8,
        })  # fmt: skip
    return to_table(out, updates_per_version=2)


def write_run(folder: Path, count: int = 4) -> list[str]:
    """Files of steps 1 to `count`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part-{step}.parquet" for step in range(1, count + 1)]
    for step, path in enumerate(paths, start=1):
        write(table(step), path)
    return [str(path) for path in paths]
