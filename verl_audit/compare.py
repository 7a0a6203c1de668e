"""Runs side by side: what differs in configuration, measures and learning, and where they part first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_audit._version import __version__
from verl_audit.diagnose.causes import weigh
from verl_audit.diagnose.evaluate import RuleSet
from verl_audit.diagnose.verdict import Verdict, decide
from verl_audit.errors import AuditError
from verl_audit.ingest.detect import plain
from verl_audit.ingest.events import errors
from verl_audit.measure.compute import Context, compute
from verl_audit.measure.divergence import Divergence, first_divergence
from verl_audit.measure.eviction import ledger
from verl_audit.measure.intervention import Change, changed
from verl_audit.measure.model import Measure
from verl_audit.measure.recipe import canonical, differences
from verl_audit.measure.run import RunData, Series
from verl_audit.measure.run import load as load_run_data
from verl_audit.measure.series import CLOCKS, on_clock, reward_lines, rewards, side_by_side, signal_of
from verl_audit.measure.speed import Symptom, updates_per_step
from verl_audit.measure.stats import Array, early_late
from verl_audit.pipeline import Loaded, Progress, dir_and_run, load_all, load_rules, named, values_of
from verl_audit.report.document import plain_types, speed_tree
from verl_audit.report.series import TITLES, lines_tree, title_and_unit
from verl_audit.settings import Settings
from verl_audit.store.database import count

SCHEMA_VERSION = "1.0"
MOST_RUNS = 8
"""Runs of one comparison: a figure with more lines is not read."""
SIGNALS = (
    "lag", "gap_prob_mean", "gap_kl", "gap_logp_abs", "ess", "response_length_mean", "prompt_length_mean", "entropy",
    "grad_norm", "time_step",
)  # fmt: skip
"""Signals that are drawn side by side and searched for the place where runs part; `lag` is the mean lag."""
INCIDENTAL = re.compile(
    r"(^|\.)(experiment_name|project_name|run_name|run_id|\w*_dir|logger|log_val_generations|test_freq|save_freq|"
    r"val_before_train|resume_mode|resume_from_path|max_\w*ckpt_to_keep|store|port|seed|data_loader_seed)$"
)
"""Keys that say where a run writes, what it is called, how often it validates or saves, and its seed: two runs that
differ in these alone are repeats of one configuration."""
THRESHOLD = ("trainer.v1.sampler.max_off_policy_threshold", "async_training.staleness_threshold")
"""Keys that a calibration varies first, so that they lead its table."""


@dataclass(frozen=True)
class Judged:
    """One run of a comparison, judged against the first."""

    name: str
    data: RunData
    measures: Mapping[str, Measure]
    symptom: Symptom
    verdict: Verdict
    config: Mapping[str, str]


def compare(
    paths: Sequence[str | Path], *, settings: Settings | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """The comparison of two or more runs, each `DIR` or `DIR#RUN`, as plain JSON types; the first is the reference.

    Raises `NothingToJudge` when one of them holds nothing that can be used, and `AuditError` on bad usage.
    """
    if not 2 <= len(paths) <= MOST_RUNS:
        given = "1 run was" if len(paths) == 1 else f"{len(paths)} runs were"
        raise AuditError(f"{given} given: a comparison takes 2 to {MOST_RUNS}")
    settings = settings or Settings()
    root, run = dir_and_run(paths[0])
    loaded = load_all(root, paths[1:], run=run, facts=settings.facts, progress=progress, compared=True)
    rules = load_rules(settings.rule_dirs).with_params(settings.params)
    return _tree(_judged(loaded, rules, settings), loaded, paths, settings)


def _judged(loaded: Loaded, rules: RuleSet, settings: Settings) -> list[Judged]:
    inputs = (loaded.run, *loaded.baselines)
    data = [load_run_data(loaded.store, i.run, plain(i.facts)) for i in inputs]
    configs = [values_of(given) for given in inputs]
    made = []
    for i, (given, run) in enumerate(zip(inputs, data, strict=True)):
        stopped = errors(loaded.events[given.run])
        apart, rewritten = (count(loaded.store, t, given.run) for t in ("differences", "rewritten"))
        died = not len(run.train_steps) and bool(stopped)
        recipe = differences(configs[i], configs[:1]) if i else None
        context = Context(died, apart, rewritten, settings.run_sd, settings.switch_step, recipe)
        measures, found = compute(run, data[:1] if i else [], context)
        fired = rules.evaluate(measures)
        error = stopped[-1]["exception"] if stopped else ""
        verdict = decide(weigh(measures, fired, found), fired, found, measures, error=error)
        made.append(Judged(given.run, run, measures, found, verdict, configs[i]))
    return made


def _tree(runs: Sequence[Judged], loaded: Loaded, paths: Sequence[str | Path], settings: Settings) -> dict[str, Any]:
    configuration = _configuration(runs)
    command = ["verl-audit", "compare", *(_shown(path) for path in paths)]
    command += [word for key, value in settings.as_given().items() for word in ("--set", f"{key}={value}")]
    tree: dict[str, Any] = plain_types(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": {"name": "verl-audit compare", "version": __version__, "command": command},
            "runs": [_run(run) for run in runs],
            "configuration": configuration,
            "speed": [None if i == 0 else _speed(run.symptom) for i, run in enumerate(runs)],
            "interventions": list(_interventions(runs, settings)),
            "sweep": _sweep(runs, configuration),
            "divergence": list(_divergences(runs)),
            "measures": list(_measures(runs)),
            "series": {
                "reward": [_quantity(q.name, lines_tree(q)) for q in reward_lines([r.data for r in runs])],
                "signals": [_quantity(q.name, lines_tree(q)) for q in side_by_side([r.data for r in runs], SIGNALS)],
            },
            "problems": [
                dict(zip(("path", "offset", "kind", "detail", "count"), row, strict=True))
                for row in loaded.store.execute(
                    'SELECT path, "offset", kind, detail, count FROM problems ORDER BY ALL'
                ).fetchall()
            ],
        }
    )
    return tree


def _shown(path: str | Path) -> str:
    root, run = dir_and_run(path)
    return named(root) + (f"#{run}" if run else "")


def _run(run: Judged) -> dict[str, Any]:
    steps, facts = run.data.train_steps, run.data.facts
    return {
        "name": run.name,
        "framework": facts.get("framework"),
        "trainer": facts.get("trainer"),
        "is_async": facts.get("is_async"),
        "first_step": int(steps[0]) if len(steps) else None,
        "last_step": int(steps[-1]) if len(steps) else None,
        "outcome": run.verdict.outcome,
        "sentence": run.verdict.sentence,
        "confidence": run.verdict.confidence,
    }


def _quantity(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    title, unit = _meaning(name)
    return {"quantity": name, "title": title, "unit": unit, "lines": lines}


def _meaning(name: str) -> tuple[str, str]:
    if name == "lag":
        return "Mean lag", "versions"
    return (TITLES[name], "score") if name in TITLES else title_and_unit(name)


# -- configuration ---------------------------------------------------------------------------------------------


def _configuration(runs: Sequence[Judged]) -> dict[str, Any]:
    """Keys that differ, apart from incidental ones; detected facts where some configuration is not known."""
    known = [bool(run.config) for run in runs]
    trees = [run.config for run in runs] if all(known) else [_facts(run) for run in runs]
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    differing = {key: values for key in keys if not _alike(values := [tree.get(key) for tree in trees])}
    relevant = {key: v for key, v in differing.items() if not INCIDENTAL.search(key)}
    return {
        "source": "configuration" if all(known) else "facts",
        "unknown": [run.name for run, has in zip(runs, known, strict=True) if not has],
        "differs": [{"key": key, "values": values} for key, values in relevant.items()],
        "incidental": [{"key": key, "values": v} for key, v in differing.items() if key not in relevant],
        "same": len(keys) - len(differing),
    }


def _facts(run: Judged) -> dict[str, str]:
    return {f"fact.{name}": str(v) for name, v in run.data.facts.items() if v is not None}


def _alike(values: Sequence[str | None]) -> bool:
    """Whether all are one value, numbers compared as numbers."""
    return len({None if v is None else canonical(v) for v in values}) == 1


# -- learning --------------------------------------------------------------------------------------------------


def _speed(found: Symptom) -> dict[str, Any]:
    speeds = {"per_update": found.per_update, "per_sample": found.per_sample, "per_hour": found.per_hour}
    return {
        "state": found.state,
        "because": found.because,
        "evidence": found.evidence,
        **{name: speed_tree(speed) for name, speed in speeds.items()},
        "caveats": list(found.caveats),
    }


def _interventions(runs: Sequence[Judged], settings: Settings) -> Iterator[dict[str, Any]]:
    """Every pair of runs that differ in one configuration key, and whether learning speed recovered with it."""
    for i, before in enumerate(runs):
        for after in runs[i + 1 :]:
            pair = _configuration([before, after])
            if len(pair["differs"]) != 1 or pair["source"] != "configuration":
                continue
            key, (old, new) = pair["differs"][0]["key"], pair["differs"][0]["values"]
            change = changed(before.data, after.data, run_sd=settings.run_sd)
            yield {
                "before": before.name,
                "after": after.name,
                "key": key,
                "from": old,
                "to": new,
                **asdict(change),
                "against_first": None if i == 0 else [before.symptom.state, after.symptom.state],
                "sentence": _told(change, key, old, new),
            }


def _told(change: Change, key: str, old: str | None, new: str | None) -> str:
    head = f"With {key} changed from {old} to {new} and no other key that matters,"
    if change.value is None:
        return f"{head} learning speed could not be compared: {change.because}."
    told = f"learning speed per update is {change.value:.2f} times as high"
    interval = f"(90 % interval {change.low:.2f} to {change.high:.2f})"
    said = {
        "faster": "it recovered",
        "slower": "it fell",
        "unclear": "neither a recovery nor a loss is shown",
        "untested": "",
    }[change.outcome]
    return f"{head} {told} {interval}: {said}."


# -- where they part -------------------------------------------------------------------------------------------


def _divergences(runs: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """For each other run, quantity and clock, the first stretch on which it parts from the first run."""
    reference = runs[0].data
    for other in runs[1:]:
        shared = bool(updates_per_step(reference, [other.data]))
        pairs = _pairs(reference, other.data)
        for name, series in pairs:
            for clock in CLOCKS:
                at = [_clock(r, s.step, clock, shared) for r, s in zip((reference, other.data), series, strict=True)]
                if at[0] is None or at[1] is None or not all(map(len, series)):
                    continue
                found = first_divergence((at[0], series[0].value), (at[1], series[1].value))
                title, unit = _meaning(name)
                yield {
                    "run": other.name,
                    "quantity": name,
                    "title": title,
                    "unit": unit,
                    "clock": clock,
                    **_apart(found),
                }


def _pairs(reference: RunData, other: RunData) -> list[tuple[str, tuple[Series, Series]]]:
    found: list[tuple[str, tuple[Series, Series]]] = [(name, (s[0], s[1])) for name, s in rewards([reference, other])]
    return [*found, *((name, (signal_of(reference, name), signal_of(other, name))) for name in SIGNALS)]


def _clock(run: RunData, step: Array, clock: str, shared: bool) -> Array | None:
    return step if clock == "update" and not shared else on_clock(run, step, clock)


def _apart(found: object) -> dict[str, Any]:
    if isinstance(found, Divergence):
        return {**asdict(found), "because": None}
    because = getattr(found, "because", "")
    return {"low": None, "high": None, "difference": None, "direction": None, "because": because}


# -- tables ----------------------------------------------------------------------------------------------------


def _measures(runs: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """Measures that at least one run has, side by side; facts are in the configuration."""
    for name, first in runs[0].measures.items():
        values = [run.measures[name] for run in runs]
        if first.unit == "fact" or all(m.value is None for m in values):
            continue
        yield {
            "measure": name,
            "unit": first.unit,
            "values": [{"value": m.value, "low": m.low, "high": m.high} for m in values],
        }


def _sweep(runs: Sequence[Judged], configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a calibration: what was varied, and for each run what it cost."""
    varied = sorted(configuration["differs"], key=lambda d: (d["key"] not in THRESHOLD, d["key"]))
    return {
        "keys": [d["key"] for d in varied],
        "rows": [_row(run, [d["values"][i] for d in varied], i, runs) for i, run in enumerate(runs)],
    }


def _row(run: Judged, values: Sequence[str | None], place: int, runs: Sequence[Judged]) -> dict[str, Any]:
    counts = ledger(run.data)
    parts = [counts[name] for name in counts if name not in ("trained_groups", "decided")]
    known = [v for v in parts if v is not None]
    named_reward, reward = _reward_level(place, [r.data for r in runs])
    return {
        "run": run.name,
        "values": list(values),
        "lag": _value(run, "lag_mean"),
        "gap": _value(run, "gap_prob_mean"),
        "gap_lag0": _value(run, "gap_prob_lag0"),
        "evicted_groups": sum(known) if known else None,
        "evicted_share": _value(run, "evicted_share"),
        "trained_length": _mean(run.data, "response_length_mean"),
        "reward": reward,
        "reward_of": named_reward,
        "reward_admissible": run.measures["reward_admissible"].value,
        "step_seconds": _value(run, "step_seconds"),
    }


def _value(run: Judged, name: str) -> float | None:
    return run.measures[name].number()


def _mean(run: RunData, name: str) -> float | None:
    series = run.get(name)
    return float(series.value.mean()) if len(series) else None


def _reward_level(place: int, runs: Sequence[RunData]) -> tuple[str | None, float | None]:
    """Mean over the last third of the validation that every run has, else of the trained reward."""
    for name, series in rewards(runs):
        if all(len(s) >= 3 for s in series):
            return name, float(early_late(series[place].value)[1].mean())
    return None, None
