"""Inputs of the judgement made up for tests: measures, findings and symptoms without a run behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import Status
from verl_audit.measure.model import Measure, catalog
from verl_audit.measure.speed import State, Symptom
from verl_audit.measure.symptom import Speed

SOUND: Mapping[str, Any] = {
    "steps_logged": 60.0,
    "is_async": True,
    "trainer": "separate_async",
    "gap_prob_mean": 0.004,
    "gap_prob_lag0": 0.004,
    "gap_trend": 1.0,
    "gauge_contradiction": 0.2,
    "lag0_steps": 30.0,
    "lag_mean": 1.2,
    "lag_oldest_max": 2.0,
    "lag_max_slope": 0.0,
    "off_policy_loss": 0.002,
    "mismatch_share": 0.5,
    "damage_mismatch": 0.001,
    "damage_staleness": 0.001,
    "damage_eviction": 0.0,
    "evicted_share": 0.0,
    "stale_groups": 0.0,
    "failed_groups": 0.0,
    "sync_share": 0.02,
}
"""A healthy asynchronous run in which everything is measured."""


def measures(over: Mapping[str, Any] | None = None, base: Mapping[str, Any] = SOUND) -> dict[str, Measure]:
    """All catalogued measures; a value that is None is missing and wants its signals."""
    given = {**base, **(over or {})}
    made = {}
    for name, definition in catalog().items():
        value = given.get(name)
        if isinstance(value, Measure):
            made[name] = value
        elif value is None:
            wants = tuple(need[0] for need in definition.needs)
            made[name] = Measure(name, None, definition.unit, missing="was not logged", wants=wants)
        else:
            number = None if isinstance(value, bool | str) else float(value)
            made[name] = Measure(name, value, definition.unit, number, number, 30)
    return made


def finding(cause: str, severity: str = "medium", status: Status = "fired", rule: str = "a-rule") -> Finding:
    """A rule's outcome."""
    step = {"mismatch": 1, "staleness": 2, "eviction": 3, "sync": 4}.get(cause, 0)
    said = f"{cause} number 7" if status == "fired" else ""
    values: dict[str, Any] = {"cause": cause, "severity": severity, "decisive": said, "explain": said and f"{said}."}
    return Finding(rule, step, title=f"Title of {cause}", status=status, confidence="medium", **values)


def speed(value: float, low: float, high: float) -> Speed:
    """A speed ratio with its interval."""
    return Speed(
        value, low, high, 0.2, 0.1, -1.0, 1.645, 60, 60, 0.15, high < 0.8, value >= 0.8, False, False, 0.5, None
    )


SYMPTOMS: Mapping[State, Symptom] = {
    "slower": Symptom("slower", "learning speed 0.40", "validation", speed(0.4, 0.3, 0.6)),
    "not_shown": Symptom("not_shown", "learning speed 1.00", "validation", speed(1.0, 0.71, 1.42)),
    "unclear": Symptom("unclear", "learning speed 0.75", "validation", speed(0.75, 0.5, 1.1)),
    "untested": Symptom("untested", "a single run cannot tell; give a baseline", wants="baseline"),
}
FASTER = Symptom("not_shown", "learning speed 1.40", "validation", speed(1.4, 0.95, 1.9))
