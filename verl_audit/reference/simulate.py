"""Scenario in, run directory out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_audit.errors import AuditError
from verl_audit.reference.loop import Observer, Run
from verl_audit.reference.scenarios import DEFAULT_ENVIRONMENT, Scenario, scenario, settings_of
from verl_audit.reference.traces import TraceOptions, Traces
from verl_audit.reference.truth import baseline_curves, measured, onsets
from verl_audit.reference.verl_log import VerlLog

TRUTH = "truth.json"
"""Beside the run directory as `NAME.truth.json`, so that nothing that reads the directory can see it."""
LOGS = ("console", "file")
COMPARABLE = frozenset(
    {
        "updates",
        "test_freq",
        "validation_samples",
        "slots",
        "token_seconds",
        "slowness",
        "prefill_seconds",
        "update_seconds",
        "log_prob_seconds",
        "sync_seconds",
    }
)
"""Settings a user may override while the shipped baseline curve of the environment still applies to learning."""


def simulate(
    name: str,
    env: str = DEFAULT_ENVIRONMENT,
    seed: int = 0,
    out: str | Path = "run",
    *,
    logs: Sequence[str] = LOGS,
    traces: TraceOptions | None = None,
    **overrides: Any,
) -> Path:
    """Run a scenario and write what a verl run would leave into `out`, which must not exist or be empty.

    `logs` chooses among console and file; `traces` also writes per-trajectory traces. Settings given by name override
    those of the scenario. The truth goes beside the directory as `OUT.truth.json`. Raises `AuditError` for an unknown
    name or a bad setting.
    """
    target = Path(out)
    beside = truth_path(target)
    _check_free(target, beside)
    chosen = scenario(name)
    settings = settings_of(chosen, env, overrides)
    log = VerlLog(settings)
    recorder = Traces(traces) if traces is not None else None
    observers: tuple[Observer, ...] = (log, recorder) if recorder is not None else (log,)
    run = Run(settings, seed, observers).execute()
    log.write(target, f"{chosen.name}-{env}-{seed}", logs)
    if recorder is not None:
        recorder.write(target / "traces", run)
    made = truth(chosen, env, seed, run, overrides)
    beside.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return target


def truth_path(out: Path) -> Path:
    """Where the truth of a run directory stands."""
    return out.with_name(f"{out.name}.{TRUTH}")


def _check_free(target: Path, beside: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AuditError(f"{target}: it exists and is not an empty directory; give another name or remove it")
    if beside.exists() and b'"scenario"' not in beside.read_bytes()[:400]:
        raise AuditError(f"{beside}: it exists and is no truth of a simulated run; give another name or remove it")


def truth(chosen: Scenario, env: str, seed: int, run: Run, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What the scenario says, and what the run shows of it."""
    changed = sorted(set(overrides) - COMPARABLE)
    known = baseline_curves().get((env, chosen.baseline)) if not changed else None
    trained = run.learner.updates * run.settings.groups
    return {
        "scenario": chosen.name,
        "environment": env,
        "seed": seed,
        "overrides": {k: str(v) for k, v in sorted(overrides.items())},
        "family": chosen.family,
        "causes": list(chosen.causes),
        "at_work": list(chosen.at_work),
        "other": chosen.other,
        "harmless": chosen.harmless,
        "per_hour_only": chosen.per_hour,
        "baseline": chosen.baseline,
        **measured(np.array(run.curve), known),
        "onset": onsets(np.array(run.curve), known, run.settings),
        "generated_per_trained": round(run.engine.submitted / trained, 4),
    }
