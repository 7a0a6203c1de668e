from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.measure.test_measures import Points, measures, run
from verl_audit.measure.model import Measure


def validation(values: list[float]) -> Points:
    return {10 * i: v for i, v in enumerate(values)}


def at(points: Points, **more: Points) -> dict[str, Measure]:
    return dict(measures(run({}, validation=points, **more)))


RISE_AND_FALL = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]


def test_a_fall_from_the_peak_is_measured_and_dated() -> None:
    found = at(validation(RISE_AND_FALL))
    fall, peak = found["validation_fall"], found["validation_peak_step"]
    assert fall.value == pytest.approx(0.633 - 0.3, abs=0.01)
    assert fall.low is not None
    assert fall.low > 0.1
    assert peak.value == 60
    assert peak.high is not None
    assert 80 <= peak.high <= 100


def test_a_noisy_plateau_is_seldom_a_fall() -> None:
    rng = np.random.default_rng(5)
    fallen = 0
    for _ in range(200):
        curve = 0.5 * (1 - np.exp(-np.arange(15) / 4)) + rng.normal(0, 0.03, 15)
        low = at(validation(curve.tolist()))["validation_fall"].low
        fallen += low is not None and low > 0
    assert fallen <= 10


def test_trained_reward_that_rises_while_validation_falls_is_measured() -> None:
    rising: Points = {s: 0.3 + 0.004 * s + 0.01 * np.sin(s) for s in range(1, 111)}
    found = at(validation(RISE_AND_FALL), score_trained=rising)["trained_rise_after_peak"]
    assert found.low is not None
    assert found.low > 0.1


def test_noise_is_put_beside_the_gain() -> None:
    flat = at(validation([0.5, 0.4, 0.55, 0.45, 0.52, 0.41, 0.54, 0.47, 0.5, 0.45]))["validation_noise_ratio"]
    steep = at(validation([0.05 * i for i in range(12)]))["validation_noise_ratio"]
    assert abs(flat.number() or 0) > 0.5
    assert abs(steep.number() or 0) < 0.05


def test_a_learning_rate_that_stays_low_is_dated() -> None:
    found = measures(run({}, lr={s: 1e-6 if s <= 100 else 1e-8 for s in range(1, 201)}))
    assert found["lr_low_share"].value == 0.5
    assert found["lr_low_step"].value == 101


def test_a_warm_up_is_not_a_low_rate() -> None:
    found = measures(run({}, lr={s: 1e-6 * min(1.0, s / 50) for s in range(1, 201)}))
    assert found["lr_low_share"].value == 0
    assert found["lr_low_step"].value is None


def test_the_ceiling_is_where_scores_can_go_no_further() -> None:
    steps = range(1, 41)
    ends: dict[str, Points] = {
        "score_trained_min": dict.fromkeys(steps, 0.0),
        "score_trained_max": dict.fromkeys(steps, 1.0),
    }
    solved = measures(run({}, score_trained={s: min(0.99, s / 20) for s in steps}, **ends))
    half = measures(run({}, score_trained=dict.fromkeys(steps, 0.5), **ends))
    assert (solved["ceiling_share"].number() or 0) > 0.95
    assert half["ceiling_share"].value == 0.5


def test_spikes_of_the_gradient_norm_are_counted() -> None:
    norms: Points = {s: 30.0 if s % 25 == 0 else 1.0 for s in range(1, 101)}
    assert measures(run({}, grad_norm=norms))["grad_norm_spikes"].value == 0.04


def test_a_non_finite_step_is_dated() -> None:
    broken = replace(run({}, grad_norm=dict.fromkeys(range(1, 30), 1.0)), nonfinite={"grad_norm": (12, 14)})
    assert measures(broken)["nonfinite_first_step"].value == 12
