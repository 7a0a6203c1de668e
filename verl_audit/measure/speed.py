"""The symptom of a run: did reward slow down, on which evidence, per update, per sample and per hour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_audit.measure.eviction import ADMISSIBLE, reward_admissible
from verl_audit.measure.gap import largest_lag
from verl_audit.measure.model import Measure
from verl_audit.measure.run import EMPTY, RunData, Series, measured
from verl_audit.measure.symptom import (
    CANNOT_TELL,
    MARGIN,
    Curve,
    Gap,
    SingleRun,
    Speed,
    Untestable,
    common_range,
    end_gap,
    learning_speed,
    onset,
    per_hour,
    per_sample,
    single_run,
)

State = Literal["slower", "not_shown", "unclear", "untested"]
Evidence = Literal["validation", "trained_reward"]
NAMED: Mapping[Evidence, str] = {"validation": "validation", "trained_reward": "trained reward"}
MANY = f"more than {100 * ADMISSIBLE:.0f} %"
MIN_VALIDATION = 8
"""Fewest validation points from which a learning speed is read."""
MIN_SIDE = 40
"""Fewest steps before and after a switch to asynchronous rollouts in one run."""


@dataclass(frozen=True)
class Symptom:
    """Whether reward slowed. `not_shown`: estimate not below the margin; `unclear`: below it, not significantly."""

    state: State
    because: str
    evidence: Literal["validation", "trained_reward", "single_run"] | None = None
    per_update: Speed | None = None
    per_sample: Speed | None = None
    per_hour: Speed | None = None
    end_gap: Gap | None = None
    onset: tuple[float, float] | None = None
    """Steps between which the run began to fall behind (held by 9 of 10 intervals); from 0 unless it first kept up."""
    single: SingleRun | None = None
    caveats: tuple[str, ...] = ()
    wants: str = ""
    """What would make an untested run testable: `baseline` or `validation`."""

    @property
    def excluded(self) -> bool:
        """Whether a slowdown is ruled out, not merely unseen: the whole interval of the speed is above the margin."""
        return self.state == "not_shown" and self.per_update is not None and self.per_update.low >= MARGIN


def symptom(
    run: RunData,
    baselines: Sequence[RunData],
    *,
    admissible: bool | None,
    run_sd: float,
    switch_step: float | None = None,
) -> Symptom:
    """Judge one run against its baselines; alone, only a known switch to asynchronous rollouts can be judged."""
    if not baselines:
        return _alone(run, switch_step if switch_step is not None else _switch(run), admissible)
    found = _curves(run, baselines, admissible)
    if isinstance(found, _NoCurves):
        caveats = (*_about_baselines(baselines), *found.notes)
        return Symptom("untested", found.reason, caveats=caveats, wants="validation")
    caveats = (*_about_baselines(found.baselines), *found.notes)
    evidence, curves = found.evidence, found.curves
    points = MIN_VALIDATION if evidence == "validation" else MIN_SIDE
    speed = learning_speed(curves[0], curves[1:], run_sd=run_sd, min_points=points)
    if isinstance(speed, Untestable):
        wants = "baseline" if evidence == "validation" else "validation"
        return Symptom("untested", _untestable(speed, found), evidence, caveats=caveats, wants=wants)
    gap = (
        end_gap(curves[0], curves[1], run_sd=speed.run_sd_used)
        if evidence == "validation"
        else Untestable("trained reward is not read as a level")
    )
    found_gap = gap if isinstance(gap, Gap) else None
    state = _state(speed, found_gap)
    slower = state == "slower"
    began = onset(curves[0], curves[1], min_points=points, run_sd=speed.run_sd_used) if slower else None
    return Symptom(
        state,
        _because(state, speed, found_gap, evidence),
        evidence,
        speed,
        _clock(run, found.baselines, speed, "sample"),
        _clock(run, found.baselines, speed, "hour"),
        found_gap,
        _in_steps(began, found.updates),
        caveats=caveats,
    )


def _about_baselines(baselines: Sequence[RunData]) -> Iterator[str]:
    """What makes a baseline less than a synchronous run that trains on all it generates."""
    for base in baselines:
        if base.facts.get("is_async") is True:
            yield f"the baseline {base.name} is itself asynchronous, so it may be slow as well"
        if reward_admissible(base) is False:
            yield f"the baseline {base.name} evicted {MANY} of its groups, so it may be slow as well"


def _untestable(problem: Untestable, found: _Curves) -> str:
    """The reason in terms of steps and evidence, where the baseline is the obstacle."""
    if not problem.flaw:
        return problem.reason
    first, last, _ = common_range(found.curves[0], found.curves[1:])
    over = f"over steps {max(1.0, first / found.updates):.0f} to {last / found.updates:.0f}"
    named = f"the baseline's {NAMED[found.evidence]}"
    return (
        f"{over} {named} "
        + {
            "flat": "rises too little to measure a speed",
            "falls": "falls, so there is no learning to compare with",
        }[problem.flaw]
    )


def _state(speed: Speed, gap: Gap | None) -> State:
    if speed.slower or (gap is not None and gap.harm and speed.value < 1):
        return "slower"
    return "not_shown" if speed.no_slowdown else "unclear"


def _because(state: State, speed: Speed, gap: Gap | None, evidence: Evidence) -> str:
    interval = f"90 % interval {speed.low:.2f} to {speed.high:.2f}, from {NAMED[evidence]}"
    ratio = f"learning speed {speed.value:.2f} of the baseline's per update ({interval})"
    if state == "slower" and not speed.slower and gap is not None:
        return f"{ratio}; at the end {gap.value:.3f} behind the baseline"
    if state == "unclear":
        least = f"{speed.smallest_detectable:.2f}"
        return f"{ratio}: below the {MARGIN} margin, but these runs could have shown a slowdown only below {least}"
    return ratio


@dataclass(frozen=True)
class _Curves:
    """The curves to compare, the run's first, and the baselines they come from."""

    evidence: Evidence
    curves: list[Curve]
    baselines: Sequence[RunData]
    updates: float
    """Updates per step of the run, where the clock is updates; else 1."""
    notes: list[str]


@dataclass(frozen=True)
class _NoCurves:
    reason: str
    notes: list[str]


def _curves(run: RunData, baselines: Sequence[RunData], admissible: bool | None) -> _Curves | _NoCurves:
    """Validation where enough of it lies in the steps that all runs cover, else trained reward where it compares."""
    factors = updates_per_step(run, baselines)
    notes = [] if factors else ["updates per step are not known for every run: compared step by step"]
    validation = _scaled(shared_validation(run, baselines), factors)
    shared = common_range(validation[0], validation[1:])[2]
    if shared >= MIN_VALIDATION:
        return _Curves("validation", validation, baselines, (factors or [1.0])[0], notes)
    few = _few((run, *baselines), shared)
    fit, refused = _fit_for_reward(baselines)
    obstacle = _obstacle(run, fit, refused, admissible)
    if obstacle:
        return _NoCurves(f"{obstacle}, and {few}", notes)
    trained = [r.get("score_trained", "reward_trained") for r in (run, *fit)]
    if any(len(s) < MIN_SIDE for s in trained):
        return _NoCurves(f"{few}, and a trained reward curve needs {MIN_SIDE} steps in each run", notes)
    caution = [] if admissible else ["whether groups were evicted is not known: trained reward may be selected"]
    factors = updates_per_step(run, fit)
    left_out = [f"left out, since {why}" for why in refused]
    unknown = [b.name for b in fit if reward_admissible(b) is None]
    caution += [f"whether the baseline {', '.join(unknown)} evicted groups is not known"] if unknown else []
    told = [f"{few}, so trained reward was used", *left_out, *caution, *notes]
    return _Curves("trained_reward", _scaled(trained, factors), fit, (factors or [1.0])[0], told)


def _obstacle(run: RunData, fit: Sequence[RunData], refused: Sequence[str], admissible: bool | None) -> str:
    """Why trained reward is no evidence here; "" when it is."""
    if admissible is False:
        return f"trained reward is inadmissible, since {MANY} of groups were evicted"
    if not fit:
        return f"trained reward is inadmissible, since {' and '.join(refused)}"
    apart = _other_data(run, fit)
    return apart and f"trained reward does not compare: {apart}"


def _fit_for_reward(baselines: Sequence[RunData]) -> tuple[list[RunData], list[str]]:
    """Baselines whose trained reward averages over nearly all they generated, and why the others do not."""
    fit, refused = [], []
    for base in baselines:
        few = reward_admissible(base)
        if few is False:
            refused.append(f"the baseline {base.name} evicted {MANY} of its groups")
        elif few is None and base.facts.get("is_async") is True:
            refused.append(f"the baseline {base.name} is asynchronous and how many groups it evicted is not known")
        else:
            fit.append(base)
    return fit, refused


def _few(runs: Sequence[RunData], shared: int) -> str:
    """How many validation points there are, and the setting that gives enough of them."""
    steps = min(_planned(r) for r in runs)
    every = int(steps // MIN_VALIDATION)
    have = f"only {shared} validation point{'s' * (shared != 1)} in common" if shared else "no validation in common"
    set_to = [r.number("test_freq") or 0.0 for r in runs]
    if all(0 < now <= every for now in set_to):
        return f"{have} ({MIN_VALIDATION} needed: at step {MIN_VALIDATION * max(set_to):.0f} they are there)"
    if every < 1:
        return f"{have} ({MIN_VALIDATION} needed)"
    now = f" instead of {max(set_to):.0f}" if max(set_to) > every else ""
    return f"{have} ({MIN_VALIDATION} needed: trainer.test_freq={every}{now} gives them in {steps:.0f} steps)"


def _planned(run: RunData) -> float:
    """Steps the run is to have, else those it has."""
    logged = run.train_steps
    return max(run.number("total_steps") or 0.0, float(logged[-1]) if len(logged) else 0.0)


def _other_data(run: RunData, baselines: Sequence[RunData]) -> str:
    """In words, that a baseline is known to train on other files (named by their last folder); "" otherwise."""
    ours, *theirs = (_files(r) for r in (run, *baselines))
    other = next((t for t in theirs if ours and t and t != ours), "")
    return other and f"the run trains on {ours}, its baseline on {other}"


def _files(run: RunData) -> str:
    named = run.facts.get("train_files")
    return ", ".join(sorted("/".join(f.split("/")[-2:]) for f in named.split(","))) if isinstance(named, str) else ""


def updates_per_step(run: RunData, baselines: Sequence[RunData]) -> list[float]:
    """Updates per step of each run; empty unless all are known, and then the clock of every run is its step."""
    updates = [r.number("updates_per_version") for r in (run, *baselines)]
    return [u for u in updates if u] if all(updates) else []


def _scaled(series: Sequence[Series], factors: Sequence[float]) -> list[Curve]:
    return [Curve(s.step * f, s.value) for s, f in zip(series, factors or [1.0] * len(series), strict=True)]


def shared_validation(run: RunData, baselines: Sequence[RunData]) -> list[Series]:
    """Mean over the validation metrics that every run logged."""
    labelled = [r.labels.get("validation", {}) for r in (run, *baselines)]
    shared = sorted(set(labelled[0]).intersection(*labelled[1:]))
    return [_mean([own[label] for label in shared]) for own in labelled]


def _mean(series: Sequence[Series]) -> Series:
    """Mean over series at the steps that all of them have."""
    if not series:
        return EMPTY
    steps = series[0].step
    for other in series[1:]:
        steps = np.intersect1d(steps, other.step)
    return Series(steps, np.mean([s.value[np.isin(s.step, steps)] for s in series], axis=0)) if len(steps) else EMPTY


def _clock(run: RunData, baselines: Sequence[RunData], speed: Speed, clock: Literal["sample", "hour"]) -> Speed | None:
    """The speed on another clock; None when a run does not say how many samples or hours an update takes."""
    runs = (run, *baselines)
    rates = [
        _per_update(r, clock, k)
        for r, k in zip(runs, updates_per_step(run, baselines) or [1.0] * len(runs), strict=True)
    ]
    if any(rate is None for rate in rates):
        return None
    ours, theirs = float(rates[0] or 0), float(np.mean([r for r in rates[1:] if r is not None]))
    return per_sample(speed, ours, theirs) if clock == "sample" else per_hour(speed, 1 / ours, 1 / theirs)


def _per_update(run: RunData, clock: Literal["sample", "hour"], updates: float) -> float | None:
    if clock == "sample":
        samples = run.number("samples_per_step")
        return None if not samples else samples / updates
    seconds = run.get("time_step").value
    return float(seconds.mean()) / 3600 / updates if len(seconds) and 0 < seconds.mean() < math.inf else None


def _in_steps(interval: tuple[float, float] | None, updates: float) -> tuple[float, float] | None:
    """In steps, rounded outwards to whole ones."""
    return (
        None
        if interval is None
        else (float(math.floor(interval[0] / updates)), float(math.ceil(interval[1] / updates)))
    )


def _switch(run: RunData) -> float | None:
    """Step at which asynchronous rollouts were switched on: lag 0 for MIN_SIDE steps, above it for as many."""
    lag = largest_lag(run)
    above = np.flatnonzero(lag.value > 0)
    if not len(above) or above[0] < MIN_SIDE or len(lag) - above[0] < MIN_SIDE:
        return None
    return float(lag.step[above[0]])


def _alone(run: RunData, switch_step: float | None, admissible: bool | None) -> Symptom:
    if switch_step is None:
        return Symptom("untested", CANNOT_TELL, wants="baseline")
    if admissible is False:
        return Symptom(
            "untested",
            f"trained reward is inadmissible, since {MANY} of groups were evicted; give a baseline",
            wants="baseline",
        )
    curve = run.get("score_trained", "reward_trained")
    found = single_run(Curve(curve.step, curve.value), switch_step)
    state: State = "slower" if found.slowed else "untested"
    because = f"at the switch at step {switch_step:.0f}: {found.reason}"
    return Symptom(state, because, "single_run", single=found, wants="baseline")


def speed_measures(found: Symptom) -> Iterator[Measure]:
    """The symptom as measures."""
    for name, speed in (
        ("speed_update", found.per_update),
        ("speed_sample", found.per_sample),
        ("speed_hour", found.per_hour),
    ):
        yield (
            measured(name, None)
            if speed is None
            else measured(name, speed.value, n=speed.n_run, low=speed.low, high=speed.high)
        )
    gap = found.end_gap
    yield (
        measured("end_gap", None)
        if gap is None
        else measured("end_gap", -gap.value, n=gap.n, low=-gap.high, high=-gap.low)
    )
