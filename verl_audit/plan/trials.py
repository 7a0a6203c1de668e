"""The first test plan: what to run in which order, for how many steps, what to record, what would refute the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from verl_audit.plan.search import NEAR, Choice, Plan, Split, steps_to_tell
from verl_audit.plan.workload import KNOB, Mode

NODE = 8
"""Most GPUs of a node, for the configuration keys."""
OFF_BY = 0.1
"""Idle share beyond the prediction that says the model is wrong about a pool: the closed form errs by up to .09."""

RECORD: dict[Mode, tuple[str, ...]] = {
    "separate_async": (
        "timing_s/step, timing_s/gen (the wait), timing_s/update_actor, timing_s/update_weights",
        "training/off_policy/trajectory_staleness/mean and trajectory_staleness_worst/max, evicted_samples",
        "response_length/mean and /max; trainer.rollout_data_dir for the lengths themselves",
        "validation (trainer.test_freq): a faster step that learns less is no gain",
    ),
    "fully_async": (
        "timing_s/step, fully_async/total_wait_time, timing_s/timing_s/param_sync",
        "fully_async/trainer/idle_ratio with rollouter/idle_ratio, and monitor/queue/mq_queue_size beside them",
        "fully_async/count/staleness_samples against static/max_required_samples (is it admission that pauses?)",
        "fully_async/processing_time/tp50, tp95 and max; partial/partial_ratio; count/dropped_stale_samples",
        "validation (rollout.test_freq): a faster step that learns less is no gain",
    ),
    "one_step_off": (
        "timing_s/step, timing_s/wait_prev_gen or timing_s/gen (the wait), timing_s/generate_async",
        "timing_s/sync_rollout_weights, timing_s/update_actor",
        "response_length/mean and /max; trainer.rollout_data_dir for the lengths themselves",
        "validation (trainer.test_freq): a faster step that learns less is no gain",
    ),
}
"""What to record, in verl's keys."""


@dataclass(frozen=True)
class Trial:
    """One run of the test plan."""

    what: str
    why: str
    split: str
    settings: tuple[str, ...]
    steps: int
    """Steps to log, those to be thrown away included."""
    skip: int
    """First steps to leave out, while queues fill."""
    expect: str
    then: tuple[str, ...] = ()


def trials(plan: Plan) -> tuple[Trial, ...]:
    """The runs, most informative first: the first choice, then what separates it from the next best explanation."""
    first = plan.shortlist[0]
    found = [_first(plan, first)]
    if plan.shortlist[1:]:
        found.append(_rival(plan, first, max(plan.shortlist[1:], key=lambda c: (c.good_in, -c.relative))))
    fresher = _fresher(plan, first.split)
    if fresher is not None:
        found.append(fresher)
    return tuple(found)


def settings(plan: Plan, split: Split) -> tuple[str, ...]:
    """The configuration of a split in verl's keys."""
    mode, groups = plan.profile.work.mode, plan.profile.work.groups
    where = "rollout" if mode != "separate_async" else "actor_rollout_ref.rollout"
    cards = (_nodes("trainer", split.train_cards), _nodes(where, split.rollout_cards))
    if mode == "one_step_off":
        return (*cards, f"data.train_batch_size={groups * split.updates:g}")
    theta = f"{KNOB[mode]}={split.theta:g}"
    if mode == "fully_async":
        return (*cards, f"async_training.trigger_parameter_sync_step={split.updates}", theta)
    batch = f"data.train_batch_size={groups * split.updates:g}"
    theta += "" if split.theta.is_integer() else " (a fraction needs verl >= 0.9.1)"
    return (*cards, f"trainer.v1.separate_async.parameter_sync_step={split.updates} {batch}", theta)


def _nodes(place: str, cards: int) -> str:
    each = next(n for n in range(NODE, 0, -1) if cards % n == 0)
    return f"{place}.nnodes={cards // each} {place}.n_gpus_per_node={each}"


def _skip(split: Split) -> int:
    """Cycles until queues have their length: those that hold the lag, and two more."""
    return 2 + math.ceil(split.theta)


def _trial(plan: Plan, choice: Choice, what: str, why: str, steps: int, then: tuple[str, ...]) -> Trial:
    split, skip = choice.split, _skip(choice.split)
    return Trial(what, why, split.name, settings(plan, split), steps + skip, skip, expectation(plan, choice), then)


def expectation(plan: Plan, choice: Choice) -> str:
    """What the trial should show: time per update with its range, and both idle shares."""
    split, run, unit = choice.split, choice.simulated, plan.profile.work.unit
    base = plan.profile.work.reference.seconds
    idle = (split.train_idle, split.rollout_idle) if run is None else (run.train_idle, run.rollout_idle)
    absolute = f" ({choice.relative * base:.3g} {unit})" if unit else ""
    return (
        f"{choice.relative:.2f} of the reference's time per update{absolute}, range {choice.low:.2f} to "
        f"{choice.high:.2f}; trainer waiting {idle[0]:.0%}, rollouts idle {idle[1]:.0%}"
    )


def _first(plan: Plan, choice: Choice) -> Trial:
    gain = abs(1 - choice.relative)
    steps = min(steps_to_tell(plan.profile.noise, max(gain, NEAR)), 100)
    t, r = choice.split.train_idle, choice.split.rollout_idle
    if choice.simulated is not None:
        t, r = choice.simulated.train_idle, choice.simulated.rollout_idle
    then = (
        f"trainer waits more than {t + OFF_BY:.0%}: rollouts are slower than profiled; move cards to rollouts",
        f"rollouts idle more than {r + OFF_BY:.0%}, trainer not waiting: updates are slower; move cards to training",
        "both above: no split mends it; raise theta if the quota is used up, else look for drains, stragglers, slow "
        "syncs and dead collectors (verl-audit diagnose, rules resources-*)",
    )
    return _trial(plan, choice, "First choice", "the fastest allowed setting", steps, then)


def _rival(plan: Plan, first: Choice, other: Choice) -> Trial:
    difference = abs(other.relative / first.relative - 1)
    told = steps_to_tell(plan.profile.noise, difference) if difference >= NEAR else 0
    steps = min(told or 20, 100)
    if not told:
        why, then = f"predicted within {NEAR:.0%} of the first", "equal times: keep the one with the smaller lag"
    else:
        why = f"{difference:.0%} slower by prediction" + (
            f", and among the best in {other.good_in} of {len(plan.scenarios)} scenarios" if other.good_in else ""
        )
        then = "two splits give both scaling exponents: plan again with --rollout-exponent and --train-exponent"
    if told > steps:
        then += f"; {told} steps each would be needed to tell the two apart at this noise"
    return _trial(plan, other, "Another split", why, steps, (then,))


def _fresher(plan: Plan, split: Split) -> Trial | None:
    """The same split with less lag: tells what the lag costs in learning."""
    near = list(_fresher_settings(plan, split))
    if not near:
        return None
    i = min(near, key=lambda n: float(plan.predicted.lag_updates[n]))
    grid, found = plan.grid, plan.predicted
    fresh = Split(
        **{
            **split.__dict__,
            "updates": int(grid.updates[i]),
            "theta": float(grid.theta[i]),
            "relative": float(found.relative[i]),
            "lag_updates": float(found.lag_updates[i]),
            "train_idle": float(found.train_idle[i]),
            "rollout_idle": float(found.rollout_idle[i]),
        }
    )
    choice = Choice(fresh, None, fresh.relative, fresh.relative, fresh.relative, 0)
    return Trial(
        "Same split, fresher samples",
        f"lag {fresh.lag_updates:.1f} updates in place of {split.lag_updates:.1f}, "
        f"{fresh.relative / split.relative - 1:.0%} slower",
        split.name,
        settings(plan, fresh),
        20 + _skip(fresh),
        _skip(fresh),
        f"{choice.relative:.2f} of the reference's time per update; trainer waiting {fresh.train_idle:.0%}",
        ("verl-audit diagnose RUN --baseline FIRST: the faster step is worth it only if reward per hour rises",),
    )


def _fresher_settings(plan: Plan, split: Split) -> Iterator[int]:
    """Candidates of the same split with at most two thirds of the lag, and at most a fifth slower."""
    grid, found, limits = plan.grid, plan.predicted, plan.limits
    for i in range(len(grid)):
        if (
            grid.train_cards[i] == split.train_cards
            and found.lag_updates[i] <= split.lag_updates * 2 / 3
            and found.per_update[i] <= 1.2 * split.per_update
            and found.sync_share[i] <= limits.sync_share
        ):
            yield i
