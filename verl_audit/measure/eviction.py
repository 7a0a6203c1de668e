"""Step 3 measures: the ledger in groups, and what selection did to the trained prompts, lengths and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from verl_audit.measure.model import Measure
from verl_audit.measure.run import RunData, grown, mean_measure, mean_of, measured
from verl_audit.measure.stats import Array, Estimate, ar1_mean, fraction, log_ratio, variance_ratio

REASONS = ("stale_groups", "filtered_groups", "failed_groups", "surplus_groups")
SHARES = {
    "stale_groups": "stale_groups_share",
    "filtered_groups": "filtered_share",
    "failed_groups": "failed_share",
}
ABSENT = {
    "stale_groups": ("sync", "v0", "fully_async", "one_step_off"),
    "filtered_groups": ("v0", "fully_async", "one_step_off"),
    "failed_groups": ("sync", "v0", "fully_async", "one_step_off"),
    "surplus_groups": ("v0", "colocate_async", "separate_async", "fully_async", "one_step_off"),
}
"""Trainers in which a fate cannot occur unless its key is logged: the mechanism is not in their code (verl 0.9.1)."""
ADMISSIBLE = 0.05
"""Evicted share above which trained reward is no longer comparable (trained .83 against validation .59 at 48 %)."""


def ledger(run: RunData) -> dict[str, float | None]:
    """Groups by fate over the run; None where it was not recorded. `decided` sums trained and evicted ones."""
    counts: dict[str, float | None] = {reason: _count(run, reason) for reason in REASONS}
    counts["overflow_groups"] = _overflow(run)
    per_step = run.number("groups_per_step")
    known = per_step is not None and len(run.train_steps) > 0 and not run.all_picked
    counts["trained_groups"] = per_step * len(run.train_steps) if known and per_step is not None else None
    counts["decided"] = None if counts["trained_groups"] is None else _sum(counts)
    return counts


def _sum(counts: Mapping[str, float | None]) -> float:
    return float(sum(v for v in counts.values() if v is not None))


def most_trained(run: RunData) -> float | None:
    """Upper bound of the trained groups when the batch size is unknown.

    Trajectories are step tokens over mean prompt plus response length; a group holds at least two of them, since
    without a critic (no `critic/values`) a lone trajectory has no advantage.
    """
    tokens, response, prompt = (run.get(s) for s in ("tokens_step", "response_length_mean", "prompt_length_mean"))
    steps = np.intersect1d(np.intersect1d(tokens.step, response.step), prompt.step)
    if not len(steps) or run.all_picked:
        return None
    each = sum(s.value[np.isin(s.step, steps)] for s in (response, prompt))
    trajectories = float(np.median(tokens.value[np.isin(tokens.step, steps)] / np.maximum(each, 1))) * len(
        run.train_steps
    )
    return trajectories / 2


def _count(run: RunData, reason: str) -> float | None:
    series = run.get(reason)
    if run.picked(reason):
        return None
    if len(series):
        return float(series.value.sum())
    return 0.0 if run.facts.get("trainer") in ABSENT[reason] else None


def _overflow(run: RunData) -> float | None:
    """Only fully_async has a queue that can overflow."""
    family = run.facts.get("trainer_family", run.facts.get("trainer"))
    if family is not None and family != "fully_async":
        return 0.0
    total = run.get("overflow_groups_total")
    return grown(total.value) if len(total) else None


def eviction_measures(run: RunData, baselines: Sequence[RunData]) -> Iterator[Measure]:
    """All measures of step 3."""
    counts = ledger(run)
    most = most_trained(run) if counts["decided"] is None else None
    yield measured("trained_groups", counts["trained_groups"], high=most)
    for reason, part in SHARES.items():
        yield measured(reason, counts[reason])
        yield _share(part, counts[reason], counts, most)
    yield measured("surplus_groups", counts["surplus_groups"])
    yield _overflow_share(run)
    share = _share("evicted_share", _evicted(counts), counts, most)
    yield share
    yield measured("reward_admissible", _admissible(share))
    ages = run.get("stale_age_max")
    yield measured("stale_age_max", float(ages.value.max()) if len(ages) else None)
    yield mean_measure("aborted_share", run.get("aborted_share").value)
    yield mean_measure("response_clip_share", run.get("response_clip_share").value)
    shift = _shift(run, baselines, "prompt_length_mean") if _same_data(run, baselines) else None
    yield measured("prompt_length_shift", shift)
    yield measured("kept_length_shift", _kept_shift(run))
    yield measured("response_length_shift", _shift(run, baselines, "response_length_mean") if baselines else None)
    yield measured("batch_clumping", _clumping(run, baselines))
    yield measured("trained_val_divergence", _divergence(run, baselines))
    yield _damage(share, shift)


def _evicted(counts: Mapping[str, float | None]) -> float | None:
    """Stale, failed and overflowed groups; None unless staleness and failure counts are known."""
    parts = [counts[r] for r in ("stale_groups", "failed_groups", "overflow_groups")]
    return None if any(p is None for p in parts) else float(sum(p for p in parts if p is not None))


def _share(name: str, count: float | None, counts: Mapping[str, float | None], most: float | None) -> Measure:
    """Share of decided groups with its Wilson interval; only a lower bound when the trained groups are only bounded."""
    decided = counts["decided"]
    if count is not None and decided:
        return measured(name, _part_of(count, decided))
    if count == 0:
        return measured(name, 0.0, low=0.0)
    if count is None or most is None:
        return measured(name, None)
    return measured(name, None, low=count / max(1.0, most + _sum(counts)))


def _part_of(part: float, whole: float) -> Estimate | None:
    """Wilson share; counts that contradict each other (a counter reset by a restart) stay within 0 and 1."""
    return fraction(min(max(round(part), 0), max(round(whole), 0)), round(whole))


def reward_admissible(run: RunData) -> bool | None:
    """Whether the trained reward of a run averages over nearly all that was generated; None when unknown."""
    counts = ledger(run)
    most = most_trained(run) if counts["decided"] is None else None
    return _admissible(_share("evicted_share", _evicted(counts), counts, most))


def _admissible(share: Measure) -> bool | None:
    value = share.number()
    if value is not None:
        return value <= ADMISSIBLE
    return False if share.low is not None and share.low > ADMISSIBLE else None


def _overflow_share(run: RunData) -> Measure:
    lost, made = run.get("overflow_groups_total"), run.get("generated_groups_total")
    if not len(lost) or not len(made) or made.value.max() <= 0:
        return measured("overflow_share", None)
    return measured("overflow_share", _part_of(grown(lost.value), grown(made.value)))


def _same_data(run: RunData, baselines: Sequence[RunData]) -> bool:
    ours = run.facts.get("train_files")
    return ours is not None and bool(baselines) and all(b.facts.get("train_files") == ours for b in baselines)


def _pooled(baselines: Sequence[RunData], signal: str) -> Array:
    return np.concatenate([b.get(signal).value for b in baselines]) if baselines else np.array([])


def _shift(run: RunData, baselines: Sequence[RunData], signal: str) -> Estimate | None:
    """ln of the ratio of means over the steps both have."""
    ours = run.get(signal)
    if not len(ours):
        return None
    series = [ours, *(b.get(signal) for b in baselines if b.has(signal))]
    first, last = max(s.step.min() for s in series), min(s.step.max() for s in series)
    common = [s.at(lambda step: (step >= first) & (step <= last)).value for s in series]
    return log_ratio(common[0], np.concatenate(common[1:])) if len(common) > 1 else None


def _kept_shift(run: RunData) -> Estimate | float | None:
    """Mean over steps of ln(kept / generated length); both are of one framework, which counts their tokens alike."""
    made, kept = run.get("generated_length_mean"), run.get("kept_length_mean")
    common = np.intersect1d(made.step[made.value > 0], kept.step[kept.value > 0])
    if not len(common):
        return None
    shift = np.zeros(len(made))
    inside = np.isin(made.step, common)
    shift[inside] = np.log(kept.value[np.isin(kept.step, common)] / made.value[inside])
    beside_drops = run.has("evicted_length_mean")  # kept lengths are then logged only in steps that dropped some
    return mean_of(shift if beside_drops else shift[inside])


def _clumping(run: RunData, baselines: Sequence[RunData]) -> Estimate | None:
    """Variance between steps over the baseline's; a step mean of G groups varies as 1/G, which is divided out."""
    groups = [run.number("groups_per_step"), *(b.number("groups_per_step") for b in baselines)]
    if not _same_data(run, baselines) or any(g is None for g in groups) or len(set(groups[1:])) != 1:
        return None
    found = variance_ratio(run.get("prompt_length_mean").value, _pooled(baselines, "prompt_length_mean"))
    if found is None:
        return None
    scale = float(groups[0] or 1) / float(groups[1] or 1)
    return Estimate(found.value * scale, found.low * scale, found.high * scale, found.n, found.se)


def _divergence(run: RunData, baselines: Sequence[RunData]) -> Estimate | None:
    """Mean over steps that both validated of (trained - validation) less the baseline's; needs 8 such steps."""
    gaps = [g for g in (_trained_less_validation(r) for r in (run, *baselines)) if g]
    if len(gaps) != 1 + len(baselines) or not baselines:
        return None
    common = sorted(set(gaps[0]).intersection(*gaps[1:]))
    differences = [gaps[0][s] - float(np.mean([g[s] for g in gaps[1:]])) for s in common]
    return ar1_mean(np.array(differences))


def _trained_less_validation(run: RunData) -> dict[float, float]:
    trained, validation = run.get("reward_trained", "score_trained"), run.get("validation")
    if not len(trained) or len(validation) < 2:
        return {}
    reach = max(1.0, float(np.diff(validation.step).min()) / 2)
    near = (
        (s, v, trained.value[np.abs(trained.step - s) <= reach])
        for s, v in zip(validation.step, validation.value, strict=True)
    )
    return {float(s): float(around.mean() - v) for s, v, around in near if s > 0 and len(around)}


def _damage(share: Measure, shift: Estimate | None) -> Measure:
    """Signal lost to selection: 1 - exp(min(shift, 0)), never more than the evicted share."""
    most = share.number()
    if most is None:
        return measured("damage_eviction", None)
    if most == 0:
        return measured("damage_eviction", 0.0, low=0.0, high=0.0)
    if shift is None:
        return measured("damage_eviction", None, low=0.0, high=most)
    lost, least, worst = (float(min(1 - np.exp(min(x, 0.0)), most)) for x in (shift.value, shift.high, shift.low))
    return measured("damage_eviction", lost, n=shift.n, low=least, high=worst)
