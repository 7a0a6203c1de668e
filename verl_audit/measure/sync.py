"""Step 4 measures: how long weight syncs take, whether every replica follows; and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from verl_audit.measure.model import Measure
from verl_audit.measure.run import RunData, Series, mean_measure, measured
from verl_audit.measure.stats import early_late, ratio_of_means, slope

MIN_SLOPE_STEPS = 20
"""Steps over which the largest lag must be seen before its slope means anything."""


def sync_measures(run: RunData, baselines: Sequence[RunData]) -> Iterator[Measure]:
    """All measures of step 4 and of resources."""
    sync, step = run.get("time_update_weights"), run.get("time_step")
    yield mean_measure("sync_seconds", sync.value)
    yield measured("sync_share", _part(sync, step), n=len(sync))
    yield measured("gen_share", _part(run.get("wait_seconds", "time_gen"), step), n=len(step))
    yield mean_measure("step_seconds", step.value)
    base = [b.get("time_step").value for b in baselines if b.has("time_step")]
    yield measured("step_speedup", ratio_of_means(np.concatenate(base), step.value) if base and len(step) else None)
    yield mean_measure("trainer_idle", run.get("trainer_idle_share").value)
    yield mean_measure("rollout_idle", run.get("rollout_idle_share").value)
    yield from _flow_measures(run)
    lag = run.get("lag_oldest_max", "lag_newest_max")
    settled = lag.at(lambda s: s > np.median(s)) if len(lag) >= 2 * MIN_SLOPE_STEPS else lag
    yield measured("lag_max_slope", slope(settled.step, settled.value) if len(lag) >= MIN_SLOPE_STEPS else None)
    payload = run.get("sync_payload_mb")
    yield measured(
        "sync_payload_zero_share",
        float((payload.value == 0).mean()) if len(payload) else None,
        n=len(payload),
    )


def _flow_measures(run: RunData) -> Iterator[Measure]:
    """What goes through the queue between both pools, and the longest rollout."""
    batch, extra = run.number("groups_per_step"), run.number("fa_staleness_share")
    under_way, queue = run.get("in_flight_groups").value, run.get("queue_size").value
    if batch and extra is not None:
        used = under_way / ((1 + extra) * batch)
        yield mean_measure("admission_pause", np.clip(1 - 2 * (1 + extra) * (1 - used), 0.0, 1.0))
    if batch:
        yield mean_measure("queue_steps", queue / batch)
    early, late = early_late(run.get("active_tasks", "in_flight_rollouts").value)
    yield measured("active_trend", ratio_of_means(late, early))
    longest = run.get("rollout_seconds_max").value
    for name, other in (("straggler_ratio", "rollout_seconds_p95"), ("straggler_share", "time_step")):
        below = run.get(other).value
        yield measured(name, float(longest.mean() / below.mean()) if len(longest) and len(below) else None)


def _part(part: Series, whole: Series) -> float | None:
    """Sum of `part` over sum of `whole`, over the steps of `whole`."""
    inside = part.at(lambda s: np.isin(s, whole.step)).value.sum()
    return float(inside / whole.value.sum()) if len(part) and len(whole) and whole.value.sum() > 0 else None
