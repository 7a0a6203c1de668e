"""All measures of one run against its baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_audit.measure.eviction import eviction_measures
from verl_audit.measure.gap import gap_measures
from verl_audit.measure.health import health_measures
from verl_audit.measure.lag import damage_measures, lag_measures
from verl_audit.measure.model import Measure
from verl_audit.measure.motion import motion_measures
from verl_audit.measure.run import RunData, complete, measured
from verl_audit.measure.speed import Symptom, speed_measures, symptom
from verl_audit.measure.symptom import RUN_SD
from verl_audit.measure.sync import sync_measures
from verl_audit.measure.traced import Traced, overlay


@dataclass(frozen=True)
class Context:
    """What the measures need beside the series."""

    died_before_step1: bool = False
    source_differences: int = 0
    rewritten_values: int = 0
    run_sd: float = RUN_SD
    """Run-to-run sd of ln(learning speed) assumed where fewer than three baselines measure it."""
    switch_step: float | None = None
    recipe: tuple[str, ...] | None = None
    """Settings of the recipe that differ from the baseline's; None where a configuration is not known."""


def compute(
    run: RunData, baselines: Sequence[RunData], context: Context, traced: Traced | None = None
) -> tuple[Mapping[str, Measure], Symptom]:
    """Every catalogued measure (those without value say why), and the symptom they contain.

    What the traces of the run tell takes the place of what its metrics only bound.
    """
    with np.errstate(all="ignore"):  # values near the end of the float range overflow; the result is then no number
        return _compute(run, baselines, context, traced)


def _compute(
    run: RunData, baselines: Sequence[RunData], context: Context, traced: Traced | None
) -> tuple[Mapping[str, Measure], Symptom]:
    from_metrics = [
        *gap_measures(run, baselines),
        *lag_measures(run),
        *motion_measures(run),
        *damage_measures(run, baselines),
        *eviction_measures(run, baselines),
        *sync_measures(run, baselines),
        *_recipe(context.recipe),
        *health_measures(
            run,
            died_before_step1=context.died_before_step1,
            source_differences=context.source_differences,
            rewritten_values=context.rewritten_values,
            baselines=len(baselines),
        ),
    ]
    found = overlay({m.name: m for m in from_metrics}, traced)
    admissible = found["reward_admissible"].value
    judged = symptom(
        run,
        baselines,
        admissible=admissible if isinstance(admissible, bool) else None,
        run_sd=context.run_sd,
        switch_step=context.switch_step,
    )
    return complete([*found.values(), *speed_measures(judged)], run, has_baseline=bool(baselines)), judged


def _recipe(differs: tuple[str, ...] | None) -> Iterator[Measure]:
    yield measured("recipe_differences", None if differs is None else float(len(differs)))
    yield Measure("recipe_differs", "; ".join(differs) if differs else None, "text")
