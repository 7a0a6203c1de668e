"""Measures of run health: what else can flatten a reward curve, and whether there is enough of a run to judge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from verl_audit.measure.departure import departure, running_median
from verl_audit.measure.model import Measure
from verl_audit.measure.run import RunData, Series, aligned, mean_measure, measured
from verl_audit.measure.stats import Array, Estimate, ar1_mean, early_late, normal_quantile, slope

VITAL = ("grad_norm", "pg_loss", "entropy", "ppo_kl")
ONSETS = {
    "entropy_onset": "entropy",
    "grad_norm_onset": "grad_norm",
    "kl_ref_onset": "kl_ref",
    "response_length_onset": "response_length_mean",
    "truncation_onset": "response_clip_share",
    "step_time_onset": "time_step",
}
"""Measure of the onset to the signal whose departure from its early level it dates."""
SPIKE = 5.0
"""Times its running median from which a gradient norm counts as a spike."""
PEAK = 3
"""Validation points averaged for a peak and for the end."""
MIN_RISE = 20
"""Fewest training steps after a validation peak from which a trend of trained reward is read."""


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
    yield from _shifts(run)
    yield from _learning_rate(run.get("lr"))
    yield from _validation(run)
    yield measured("ceiling_share", _ceiling(run))
    yield measured("epochs", float(run.get("epoch").value.max()) + 1 if run.has("epoch") else None)
    yield mean_measure("zero_spread_steps", run.get("zero_spread_share").value)


def _shifts(run: RunData) -> Iterator[Measure]:
    """Late against early levels, and when each series left its early one."""
    spikes = _spikes(run.get("grad_norm").value)
    yield measured("grad_norm_spikes", spikes, n=len(run.get("grad_norm")))
    yield measured("kl_ref_late", _late(run.get("kl_ref").value))
    yield measured("kl_ref_ratio", _late_over_early(run.get("kl_ref").value, 1 / 3, median=True))
    yield measured("response_length_ratio", _late_over_early(run.get("response_length_mean").value, 0.1))
    yield measured("truncation_late", _late(run.get("response_clip_share").value))
    yield measured("truncation_rise", _rise(run.get("response_clip_share").value))
    yield measured("step_time_ratio", _late_over_early(run.get("time_step").value, 1 / 3, median=True))
    for name, signal in ONSETS.items():
        found = departure(run.get(signal))
        low, high = (None, None) if found is None else (found.low, found.high)
        yield measured(name, high, low=low, high=high)


def _late(values: Array) -> float | None:
    """Mean of the last tenth, 3 points at least."""
    return float(values[-max(3, len(values) // 10) :].mean()) if len(values) >= 6 else None


def _rise(values: Array) -> Estimate | None:
    """Last third less first third."""
    early, late = (ar1_mean(part) for part in early_late(values))
    if early is None or late is None:
        return None
    rise, se = late.value - early.value, math.hypot(late.se, early.se)
    half = normal_quantile(0.975) * se
    return Estimate(rise, rise - half, rise + half, early.n + late.n, se)


def _spikes(values: Array) -> float | None:
    """Share of steps whose gradient norm is over 5 times the median of the 21 around it."""
    if len(values) < 20:
        return None
    return float((values > SPIKE * np.maximum(running_median(values, 21), 1e-12)).mean())


def _learning_rate(rate: Series) -> Iterator[Measure]:
    """How much of the run the learning rate spent below a tenth of its maximum after it, and from when."""
    top = int(np.argmax(rate.value)) if len(rate) else 0
    known = len(rate) > 0 and rate.value[top] > 0
    under = rate.at(lambda step: step > rate.step[top]) if known else rate
    low = under.step[under.value < 0.1 * rate.value[top]] if known else under.step
    yield measured("lr_low_share", len(low) / len(rate) if known else None, n=len(rate))
    first = float(low[0]) if known and len(low) else None
    yield measured("lr_low_step", first, low=first, high=first)


def _validation(run: RunData) -> Iterator[Measure]:
    """Fall from the peak, noise against gain, and whether trained reward rose while validation fell."""
    curve = run.get("validation")
    noise, fall = _noise(curve.value), _fall(curve)
    yield measured("validation_noise", noise, n=len(curve))
    gain = _gain(curve.value)
    yield measured("validation_noise_ratio", noise / abs(gain) if noise is not None and gain else None)
    yield measured("validation_fall", fall and fall[0])
    peak = fall and fall[1]
    yield measured("validation_peak_step", peak, low=peak, high=fall and fall[2])
    yield measured("trained_rise_after_peak", None if peak is None else _rise_after(run, peak))


def _noise(values: Array) -> float | None:
    """Standard deviation of one validation score about a smooth curve, from second differences."""
    if len(values) < 6:
        return None
    return float(math.sqrt(np.mean(np.diff(values, 2) ** 2) / 6))


def _gain(values: Array) -> float | None:
    early, late = early_late(values)
    return float(late.mean() - early.mean()) if len(early) >= 2 else None


def _fall(curve: Series) -> tuple[Estimate, float, float] | None:
    """Highest mean of 3 neighbours less the mean of the last 3; the peak's step; the first step half way down.

    The interval allows for the highest of many means lying above the curve (its expected excess under noise).
    """
    noise = _noise(curve.value)
    if noise is None or len(curve) < 2 * PEAK + 2:
        return None
    means = np.convolve(curve.value, np.ones(PEAK) / PEAK, "valid")
    top = int(np.argmax(means[: -PEAK + 1]))
    sd = noise / math.sqrt(PEAK)
    fall = float(means[top] - means[-1])
    excess = sd * normal_quantile(1 - 1 / (len(means) + 1))
    half = normal_quantile(0.975) * sd * math.sqrt(2)
    under = np.flatnonzero(means[top:] < means[top] - fall / 2)
    middle = PEAK // 2
    down = float(curve.step[top + int(under[0]) + middle]) if len(under) and fall > 0 else float(curve.step[-1])
    found = Estimate(fall, fall - excess - half, fall + half, len(curve), sd * math.sqrt(2))
    return found, float(curve.step[top + middle]), down


def _rise_after(run: RunData, peak: float) -> Estimate | None:
    """Change of trained reward from the validation peak to the end: slope times steps."""
    trained = run.get("score_trained", "reward_trained").at(lambda step: step >= peak)
    if len(trained) < MIN_RISE:
        return None
    found, span = slope(trained.step, trained.value), float(np.ptp(trained.step))
    if found is None:
        return None
    return Estimate(found.value * span, found.low * span, found.high * span, found.n, found.se * span)


def _ceiling(run: RunData) -> float | None:
    """Mean score of the last tenth, between the lowest and the highest score of the run."""
    mean, low, high = (run.get(s).value for s in ("score_trained", "score_trained_min", "score_trained_max"))
    late = _late(mean)
    if late is None or not len(low) or not len(high) or high.max() <= low.min():
        return None
    return float((late - low.min()) / (high.max() - low.min()))


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
    common, a, b = aligned(run.get(low), run.get(high))
    return float((a == b).mean()) if len(common) else None
