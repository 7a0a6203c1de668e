"""What is true of a simulated run: its cause, and how fast it really learned.

Learning speed is a time-warp against the mean curve of baseline runs of the same environment: the factor `a` for which
`reward(u) = baseline(a u)` fits best, u counting optimizer updates. The curves are the exact expected rewards of the
trainer's policy, so no metric and no noise of a run enters. Per hour the clock ratio is applied.

Onsets are in logged steps: when the mechanism set in, where it does so in the middle of a run, and from when on the
run is surely behind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.settings import Settings

Curve = NDArray[np.float64]
"""Rows of (updates, seconds, expected reward)."""
SPEEDS = np.exp(np.linspace(np.log(0.05), np.log(3.0), 165))
"""Factors that are tried: steps of 2.5 %."""
LEAST_GAIN = 0.25
"""Reward a baseline must gain for a speed to mean anything."""
BEHIND = 2.0
"""Standard deviations of the log-speed by which a run must be behind to be surely so: 1 run of 44 is, by chance."""


@dataclass(frozen=True)
class BaselineCurve:
    """Mean of several baseline runs of one environment, and how much the log-speed of one varies."""

    updates: Curve
    reward: Curve
    seconds_per_update: float
    sd_log_speed: float
    runs: int


def speed(updates: Curve, reward: Curve, baseline_updates: Curve, baseline_reward: Curve) -> float:
    """Least-squares time-warp factor; a run that is faster is compared up to where the baseline ends."""
    end, errors = baseline_updates[-1], []
    for factor in SPEEDS:
        inside = factor * updates <= end
        apart = reward[inside] - np.interp(factor * updates[inside], baseline_updates, baseline_reward)
        errors.append(float(np.mean(apart**2)))
    return float(SPEEDS[int(np.argmin(errors))])


def speed_to_end(updates: Curve, reward: Curve, baseline_updates: Curve, baseline_reward: Curve) -> float:
    """Updates the baseline needs for what the run reaches in its last tenth, over those the run took.

    It sees a plateau, which a time-warp over the whole run averages away.
    """
    reached = float(reward[-max(1, len(reward) // 10) :].mean())
    best = np.maximum.accumulate(baseline_reward)
    middle = float(updates[-max(1, len(updates) // 10) :].mean())
    needed = float(np.interp(reached, best, baseline_updates)) if reached < best[-1] else float(baseline_updates[-1])
    return needed / middle


@cache
def baseline_curves() -> dict[tuple[str, str], BaselineCurve]:
    """The shipped curves by environment and baseline scenario (written by `docs/reference_runs.py`)."""
    found = json.loads(files("verl_audit.reference").joinpath("curves.json").read_text(encoding="utf-8"))
    return {
        (environment, name): BaselineCurve(
            np.array(c["updates"], float),
            np.array(c["reward"], float),
            c["seconds_per_update"],
            c["sd_log_speed"],
            c["runs"],
        )
        for environment, named in found["curves"].items()
        for name, c in named.items()
    }


def behind_from(updates: Curve, reward: Curve, baseline: BaselineCurve) -> float | None:
    """First update from which on the run stays below a baseline run that is `BEHIND` sd slow; None where it does not.

    That comes after the mechanism has set in: the shortfall must first outgrow what differs between equal runs.
    """
    slow = np.interp(updates * np.exp(-BEHIND * baseline.sd_log_speed), baseline.updates, baseline.reward)
    level = np.flatnonzero(reward >= slow)
    first = int(level[-1]) + 1 if len(level) else 0
    return float(updates[first]) if first < len(updates) else None


def onsets(curve: Curve, baseline: BaselineCurve | None, settings: Settings) -> dict[str, Any]:
    """Logged steps at which the mechanism first touches the run and from which the run is behind, null where unknown.

    A mechanism that is there from the start has no step at which it sets in.
    """
    before = settings.onset_update
    taught = baseline is not None and np.ptp(baseline.reward) >= LEAST_GAIN
    behind = behind_from(curve[:, 0], curve[:, 2], baseline) if taught and baseline is not None else None
    return {
        "sets_in": None if before is None else before // settings.updates_per_sync + 1,
        "behind": None if behind is None else int(np.ceil(behind / settings.updates_per_sync)),
    }


def measured(curve: Curve, baseline: BaselineCurve | None) -> dict[str, Any]:
    """Ratios to the baseline, null where there is none for these settings."""
    end = {
        "updates": int(curve[-1, 0]),
        "seconds": round(float(curve[-1, 1]), 3),
        "reward": round(float(curve[-1, 2]), 5),
    }
    if baseline is None or np.ptp(baseline.reward) < LEAST_GAIN:
        return {**dict.fromkeys(("speed_per_update", "speed_per_hour", "speed_to_end", "sd_log_speed")), "end": end}
    to_end = speed_to_end(curve[:, 0], curve[:, 2], baseline.updates, baseline.reward)
    per_update = speed(curve[:, 0], curve[:, 2], baseline.updates, baseline.reward)
    pace = baseline.seconds_per_update / (curve[-1, 1] / curve[-1, 0])
    return {
        "speed_per_update": round(per_update, 3),
        "speed_per_hour": round(per_update * pace, 3),
        "speed_to_end": round(to_end, 3),
        "sd_log_speed": baseline.sd_log_speed,
        "end": end,
        "baseline_reward": round(float(np.interp(curve[-1, 0], baseline.updates, baseline.reward)), 5),
    }
