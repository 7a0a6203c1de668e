"""Measure the reference loop: `python docs/reference_runs.py [--env NAME] [SCENARIO ...]`.

Writes the mean curves of the baselines (verl_audit/reference/curves.json, seeds 1000 to 1004) and the true learning
speed of every scenario in every environment (docs/reference-runs.json, seeds 0 to 2), from which docs/generate.py
draws the page. All of it takes about 12 minutes on two cores; with names only those are measured again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: small matrices, and two processes

import numpy as np

from verl_audit.reference import environments, scenario, scenarios
from verl_audit.reference.loop import Run
from verl_audit.reference.scenarios import settings_of
from verl_audit.reference.truth import BaselineCurve, measured, speed

DOCS = Path(__file__).parent
CURVES = DOCS.parent / "verl_audit" / "reference" / "curves.json"
RUNS = DOCS / "reference-runs.json"
BASELINE_SEEDS = range(1000, 1005)
SEEDS = range(3)
POINTS = 41


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", action="append", choices=list(environments()))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("names", nargs="*", metavar="SCENARIO")
    asked = parser.parse_args()
    names = asked.names or [s.name for s in scenarios()]
    curves = _read(CURVES, {"curves": {}})
    runs = _read(RUNS, {})
    with ProcessPoolExecutor(2) as pool:
        for env in asked.env or environments():
            for name in [n for n in names if any(s.baseline == n for s in scenarios())]:
                curves["curves"].setdefault(env, {})[name] = _baseline(pool, env, name)
                _write(CURVES, curves)
            for name in names:
                runs.setdefault(env, {})[name] = _measure(pool, env, name, curves["curves"][env], range(asked.seeds))
                _write(RUNS, runs)


def _read(path: Path, empty: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty


def _write(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=None, separators=(",", ":"), sort_keys=True)
    path.write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")


def one(env: str, name: str, seed: int) -> tuple[np.ndarray, float]:
    """Exact learning curve and CPU seconds of one run."""
    before = process_time()
    run = Run(settings_of(scenario(name), env, {}), seed).execute()
    return np.array(run.curve), process_time() - before


def _baseline(pool: ProcessPoolExecutor, env: str, name: str) -> dict[str, Any]:
    found = [curve for curve, _ in pool.map(partial(one, env, name), BASELINE_SEEDS)]
    updates, rewards = found[0][:, 0], np.array([curve[:, 2] for curve in found])
    logs = [np.log(speed(updates, r, updates, np.delete(rewards, i, 0).mean(axis=0))) for i, r in enumerate(rewards)]
    pace = float(np.mean([curve[-1, 1] / curve[-1, 0] for curve in found]))
    return {
        "updates": updates.astype(int).tolist(),
        "reward": np.round(rewards.mean(axis=0), 5).tolist(),
        "seconds_per_update": round(pace, 5),
        "sd_log_speed": round(float(np.std(logs, ddof=1)), 4),
        "runs": len(found),
    }


def _measure(pool: ProcessPoolExecutor, env: str, name: str, curves: dict[str, Any], seeds: range) -> dict[str, Any]:
    b = curves[scenario(name).baseline]
    base = BaselineCurve(
        np.array(b["updates"], float),
        np.array(b["reward"], float),
        b["seconds_per_update"],
        b["sd_log_speed"],
        b["runs"],
    )
    found = list(pool.map(partial(one, env, name), seeds))
    truths = [measured(curve, base) for curve, _ in found]
    mean = np.mean([curve for curve, _ in found], axis=0)
    places = np.linspace(0, len(mean) - 1, POINTS).round().astype(int)
    keys = ("speed_per_update", "speed_per_hour", "speed_to_end")
    made: dict[str, Any] = {key: [t[key] for t in truths] for key in keys}
    made |= {"updates": mean[places, 0].astype(int).tolist(), "reward": np.round(mean[places, 2], 4).tolist()}
    print(env, name, made["speed_per_update"], made["speed_to_end"], made["speed_per_hour"], _cpu(found), flush=True)  # noqa: T201
    return made


def _cpu(found: Sequence[tuple[np.ndarray, float]]) -> str:
    return f"{np.mean([seconds for _, seconds in found]):.2f} s"


if __name__ == "__main__":
    main()
