"""What a configuration will do with a model whose speed was measured: lag, and the length above which answers go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_audit.errors import AuditError
from verl_audit.ingest.detect import plain
from verl_audit.measure.model import Scalar
from verl_audit.measure.run import load as load_run_data
from verl_audit.pipeline import load_all


@dataclass(frozen=True)
class Prediction:
    """Versions of lag by the queue alone, and tokens above which an answer is dropped; None where unknown."""

    lag: float | None
    drop_above: float | None
    because: str


def predict(facts: Mapping[str, Scalar | None], profile: Path) -> Prediction:
    """Predict from a finished synchronous run of the same model on the same kind of machines.

    Lag: verl submits one batch a step on top of W warm-up batches, so by Little's law (L = lambda W) a prompt spends
    W steps in generation and buffer; token lag is at most that. Length: a group of age above the threshold T is
    dropped when it ends, so it has T steps; a step is at least the trainer's own time (step minus generation), and the
    longest answer of a synchronous step takes its generation time, which gives tokens a second of one answer. Raises
    `AuditError` if the profile lacks these times.
    """
    warmup, threshold = facts.get("warmup_batches"), facts.get("staleness_threshold")
    lag = float(warmup) if isinstance(warmup, float) else None
    speed, trainer_s = _measured(profile)
    if facts.get("staleness_strategy") != "drop" or not isinstance(threshold, float):
        return Prediction(lag, None, "no group is dropped for its age")
    because = f"{speed:.1f} tokens/s of one answer, {trainer_s:.1f} s of training a step, {threshold:g} steps of time"
    return Prediction(lag, speed * trainer_s * threshold, because)


def _measured(profile: Path) -> tuple[float, float]:
    """Tokens a second of one answer, and seconds of a step that are not generation; medians over steps."""
    loaded = load_all(profile)
    run = load_run_data(loaded.store, loaded.run.run, plain(loaded.run.facts))
    if run.facts.get("is_async") is not False:
        raise AuditError(f"{profile}: a profile is a synchronous run: elsewhere generation time is waiting time")
    series = {name: run.get(name) for name in ("response_length_max", "time_gen", "time_step")}
    if lacking := [name for name, found in series.items() if not len(found)]:
        raise AuditError(f"{profile}: no prediction from it, as it does not log {', '.join(lacking)}")
    length, gen, step = (float(np.median(found.value)) for found in series.values())
    return length / gen, max(step - gen, 0.0)
