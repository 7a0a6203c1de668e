"""Measures of run health: what else can flatten a reward curve, and whether there is enough of a run to judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verl_audit.measure.model import Measure
from verl_audit.measure.run import RunData, measured
from verl_audit.measure.stats import Array, early_late

VITAL = ("grad_norm", "pg_loss", "entropy", "ppo_kl")


def health_measures(
    run: RunData, *, died_before_step1: bool, source_differences: int, rewritten_values: int, baselines: int
) -> Iterator[Measure]:
    """All health measures."""
    yield measured("steps_logged", float(len(run.train_steps)))
    yield measured("validation_points", float(len(run.get("validation"))))
    yield measured("died_before_step1", died_before_step1)
    yield measured("source_differences", float(source_differences))
    yield measured("rewritten_values", float(rewritten_values))
    yield measured("baseline_runs", float(baselines))
    bad = sorted({s for name in VITAL for s in run.nonfinite.get(name, ())})
    logged = sorted({*bad, *(int(s) for name in VITAL for s in run.get(name).step)})
    yield measured("nonfinite_steps", float(len(bad)) if logged else None)
    yield measured("nonfinite_tail", float(_tail(logged, bad)) if logged else None)
    yield measured("nonfinite_first_step", float(bad[0]) if bad else None)
    yield measured("entropy_ratio", _late_over_early(run.get("entropy").value, 0.1))
    yield measured("grad_norm_ratio", _late_over_early(run.get("grad_norm").value, 1 / 3, median=True))
    yield measured("reward_flat_steps", _equal_share(run, "score_trained_min", "score_trained_max"))
    yield measured("length_constant_steps", _equal_share(run, "response_length_min", "response_length_max"))


def _tail(steps: Sequence[int], bad: Sequence[int]) -> int:
    """How many of the last steps are bad without a good one between."""
    wrong = set(bad)
    return next((i for i, s in enumerate(reversed(steps)) if s not in wrong), len(steps))


def _late_over_early(values: Array, share: float, *, median: bool = False) -> float | None:
    """Mean (or median) of the last part over the first, at least 3 points each."""
    if len(values) < 6:
        return None
    early, late = early_late(values, max(share, 3 / len(values)))
    middle = np.median if median else np.mean
    return float(middle(late) / middle(early)) if middle(early) > 0 else None


def _equal_share(run: RunData, low: str, high: str) -> float | None:
    a, b = run.get(low), run.get(high)
    common = np.intersect1d(a.step, b.step)
    return float((a.value[np.isin(a.step, common)] == b.value[np.isin(b.step, common)]).mean()) if len(common) else None
