"""Coverage: per cause the signals a judgement needs, whether they are there, and the setting that records them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from verl_audit.diagnose.clearing import FEW_LAG0, LAG0_GAP
from verl_audit.diagnose.readings import ADVANTAGE, CONFIGURATION
from verl_audit.measure.eviction import ABSENT
from verl_audit.measure.gap import GAPS, LAGS, at_lag0
from verl_audit.measure.model import Scalar
from verl_audit.measure.run import RunData

Standing = Literal["present", "derivable", "missing", "inert", "corrupt"]
NEEDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "mismatch": (
        ("gap_prob_mean", "gap_kl", "gap_logp_abs"),
        LAGS,
        ("ess", "chi2_token"),
        (LAG0_GAP,),
    ),
    "staleness": (("lag_newest_mean", "lag_oldest_mean", "lag_mean"), ("ess", "chi2_token"), ("clip_share",)),
    "eviction": (
        ("stale_groups",),
        ("failed_groups",),
        ("groups_per_step",),
        ("prompt_length_mean",),
        ("validation",),
        ("evicted_lengths",),
    ),
    "sync": (
        ("time_update_weights",),
        ("time_step",),
        ("lag_oldest_max", "lag_newest_max"),
        ("gap_prob_mean", "gap_kl", "gap_logp_abs"),
        ("replica_versions",),
    ),
    "symptom": (("validation",), ("score_trained", "reward_trained"), ("time_step",)),
}
"""Per cause the signals it needs, each a tuple of alternatives, most telling first."""
RECORDER = "in verl v1 trainer.v1.sampler.custom_sampler.path=pkg://verl_audit.record.verl, elsewhere TraceWriter"
TRACES_ONLY: Mapping[str, str] = {
    "evicted_lengths": f"per-trajectory traces with a row for every evicted trajectory: {RECORDER}",
    "replica_versions": f"per-trajectory traces with server and version of every segment: {RECORDER}",
}
UNASKED: Mapping[str, str] = {
    CONFIGURATION: "keep .hydra/ or the console log beside the metrics of run and baseline",
    ADVANTAGE: f"per-trajectory traces with advantage: {RECORDER}",
}
"""What a verdict may call missing that no cause needs in every run, and what records it."""
FACTS: Mapping[str, str] = {
    name: f"keep .hydra/ or the console log beside the metrics, or give --set fact.{name}=N"
    for name in ("groups_per_step", "updates_per_version")
}
"""Facts of the configuration without which a count cannot become a share, or versions updates."""


@dataclass(frozen=True)
class Entry:
    """One needed signal: its standing, why, and what would record it."""

    signal: str
    standing: Standing
    because: str
    record: str = ""


def coverage(
    run: RunData, setting: Callable[[str], str | None], recorded: Collection[str] = ()
) -> dict[str, tuple[Entry, ...]]:
    """Coverage by cause (and of the symptom).

    `setting` names what records a signal in the run's framework; `recorded` names the needs that traces satisfy.
    """
    return {
        cause: tuple(_entry(run, alternatives, setting, recorded) for alternatives in needs)
        for cause, needs in NEEDS.items()
    }


def _entry(
    run: RunData, alternatives: tuple[str, ...], setting: Callable[[str], str | None], recorded: Collection[str]
) -> Entry:
    first = alternatives[0]
    traced = next((s for s in alternatives if s in recorded), None)
    if traced is not None:
        return Entry(traced, "present", "from the traces", setting(first) or TRACES_ONLY.get(first, ""))
    if first in TRACES_ONLY:
        return Entry(first, "missing", "no metric carries it", TRACES_ONLY[first])
    if first == LAG0_GAP:
        return _lag0_gap(run)
    if first in FACTS:
        return _fact(run, first)
    usable = next((s for s in alternatives if run.has(s) and not run.blind(s)), None)
    if usable is not None:
        return _present(run, first, usable, setting(first) or "")
    return _absent(run, alternatives, setting(first) or "")


def _fact(run: RunData, name: str) -> Entry:
    if run.facts.get(name) is None:
        return Entry(name, "missing", "no configuration was found", FACTS[name])
    return Entry(name, "present", "known from the configuration", FACTS[name])


def _lag0_gap(run: RunData) -> Entry:
    """The gap at lag 0: no key of its own, but the gap in steps whose largest lag is 0."""
    points = len(at_lag0(run, run.get(*GAPS)))
    record = "traces with log-probs, or 20 steps with trainer.v1.trainer_mode=sync and the same rollout engine"
    if points >= FEW_LAG0:
        return Entry(LAG0_GAP, "derivable", f"from the gap and the lag, {points} points", record)
    return Entry(LAG0_GAP, "missing", f"steps with a gap at lag 0: {points}", record)


def _absent(run: RunData, alternatives: tuple[str, ...], record: str) -> Entry:
    """A signal without usable points: 0 by construction, inert, corrupt or not logged."""
    constructed = _by_construction(alternatives[0], run.facts)
    if constructed:
        return Entry(alternatives[0], "derivable", constructed)
    inert = next((s for s in alternatives if run.blind(s)), None)
    if inert:
        return Entry(inert, "inert", run.inert[inert], record)
    corrupt = next((s for s in alternatives if s in run.corrupt), None)
    if corrupt:
        return Entry(corrupt, "corrupt", run.corrupt[corrupt], record)
    return Entry(alternatives[0], "missing", "not logged", record)


def _present(run: RunData, first: str, usable: str, record: str) -> Entry:
    points = f"{len(run.get(usable))} {'sampled ' if run.picked(usable) else ''}points"
    if usable == first or usable.partition("_")[0] == first.partition("_")[0]:
        return Entry(usable, "present", points, record)
    return Entry(first, "derivable", f"from {usable}, {points}", record)


def _by_construction(signal: str, facts: Mapping[str, Scalar | None]) -> str:
    trainer = facts.get("trainer")
    if signal.startswith("lag_") and facts.get("is_async") is False:
        return "0: rollouts do not overlap training"
    if trainer in ABSENT.get(signal, ()):
        return f"0: the {trainer} trainer has no such fate"
    return ""
