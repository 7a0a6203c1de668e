"""Real verl 0.9.1 on a CPU with the recorder: five trainers, the filter, and what both sides tell of each step.

    python tests/verl/run.py [--keep DIR] [--only NAME]... [--batch GROUPS]

Needs an interpreter with verl and this package, and in VERL_CPU_DIR the scripts that run verl on a CPU. Exit code 1 if
anything disagrees. `make test-verl` makes such an interpreter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fully_async  # type: ignore[import-not-found]
import numpy as np
import one_step_off  # type: ignore[import-not-found]
import overrides  # type: ignore[import-not-found]
import pyarrow.parquet as pq
from agreement import disagreements, logged, metrics, payloads, residual, table  # type: ignore[import-not-found]

from verl_audit.record.writer import KEY_SECONDS

ROOT = Path(__file__).parents[2]
PLUGIN = Path(os.environ.get("VERL_CPU_DIR", ROOT / "verl_cpu"))
BATCH, WARMUP = 8, 2
SAMPLER = "trainer.v1.sampler.custom_sampler"


@dataclass(frozen=True)
class Case:
    """One run: trainer, steps, the plugin's options, and verl overrides."""

    name: str
    mode: str
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    steps: int = 8


SLOW = ("--tick=0.12", "--max_num_seqs=256", f"--warmup={WARMUP}")
CASES = (
    Case("separate_async", "separate_async", (*SLOW, "--threshold=2")),
    Case("colocate_async", "colocate_async", (*SLOW, "--threshold=3")),
    Case("sync", "sync"),
    Case(
        "filter",
        "separate_async",
        (*SLOW, "--threshold=4"),
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
        steps=6,
    ),
    Case(
        "sync_steps",
        "separate_async",
        (*SLOW, "--threshold=4", "--sync_step=2"),
        (
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
            "algorithm.rollout_correction.rollout_rs_threshold=0.0003",
        ),
        steps=6,
    ),
)


APART = {"fully_async": fully_async, "one_step_off": one_step_off}
"""Trainers of their own entry points, which take no sampler."""


def launch(case: Case, assets: Path, out: Path, batch: int) -> None:
    """Run verl once. Raises with the end of its console if it failed."""
    sampler = "AuditReplayBuffer" if case.mode == "sync" else "AuditReplayBufferAsync"
    recorder = [
        f"{SAMPLER}.path=pkg://verl_audit.record.verl",
        f"{SAMPLER}.name={sampler}",
        f"+trainer.v1.sampler.sampler_kwargs.audit_dir={out / case.name / 'audit'}",
        "+trainer.v1.sampler.sampler_kwargs.log_prob_sample=1.0",
    ]
    command = [
        *(sys.executable, str(PLUGIN / "run_e2e.py"), f"--assets={assets}", f"--out={out}", f"--name={case.name}"),
        *(f"--mode={case.mode}", f"--steps={case.steps}", f"--batch={batch}", "--n=4", "--test_freq=4"),
        *("--loggers=console,file", *case.options, *case.overrides, *recorder),
    ]
    shutil.rmtree(out / case.name, ignore_errors=True)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        console = (out / case.name / "console.log").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{case.name} failed:\n{console[-3000:]}{done.stderr[-2000:]}")


def waited(run: Path) -> str:
    """What the trainer waited for its recorder in a step, by the recorder's own clock, beside the time of its steps."""
    told = {
        int(path.name.split("-")[1]): float(pq.read_schema(path).metadata[KEY_SECONDS])
        for path in (run / "audit").glob("trajectories-0*.parquet")
    }
    so_far = [told[step] for step in sorted(told)]
    each = np.diff([0.0, *so_far]) * 1e3
    share = so_far[-1] / sum(row["timing_s/step"] for row in logged(run))
    return (
        f"waited for the recorder: {np.median(each):.1f} ms a step, {each.max():.1f} at most, {share:.2%} of all time"
    )


def checked(case: Case, out: Path, batch: int) -> list[str]:
    """What is wrong with a recorded run; prints what was compared."""
    run = out / case.name
    wrong = [*disagreements(run), *payloads(run)]
    rows = table(run, "trajectories")
    counts = {fate: sum(r["fate"] == fate for r in rows) for fate in sorted({r["fate"] for r in rows})}
    ledger = residual(run, batch, 0 if case.mode == "sync" else WARMUP)
    if ledger["residual"]:
        wrong.append(f"the ledger does not close: {ledger}")
    if case.name == "filter" and not counts.get("filtered"):
        wrong.append("no group was filtered: the run shows nothing")
    if case.name == "sync_steps" and {r["train_minibatch"] for r in rows if r["fate"] == "trained"} != {0, 1}:
        wrong.append("two updates a version, and train_minibatch is not 0 and 1")
    if "verl-audit recorder:" in (run / "console.log").read_text(encoding="utf-8", errors="replace"):
        wrong.append("the recorder warned")
    told = f"{len(metrics(run))} steps, trajectories {counts}, groups {ledger}"
    print(f"{case.name}: {told}; {waited(run)}", flush=True)  # noqa: T201
    return [f"{case.name}: {text}" for text in wrong]


def main() -> None:
    """Run the cases and exit 1 if traces and metrics disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path("/tmp/verl-audit-runs"))
    parser.add_argument("--only", action="append", choices=[*(case.name for case in CASES), *APART])
    parser.add_argument("--batch", type=int, default=BATCH, help="groups of four trajectories a step")
    given = parser.parse_args()
    out, assets = given.keep, given.keep / "assets"
    if not (PLUGIN / "run_e2e.py").exists():
        raise SystemExit(f"{PLUGIN} holds no run_e2e.py: set VERL_CPU_DIR")
    if not (assets / "model").exists():
        environment = {**os.environ, "PYTHONPATH": str(PLUGIN)}
        make = [sys.executable, str(PLUGIN / "make_assets.py"), "--out", str(assets)]
        subprocess.run(make, check=True, env=environment, stdout=subprocess.DEVNULL)
    wrong = [f"overrides: {text}" for text in overrides.disagreements()]
    print(f"overrides: {len(overrides.LINES)} command lines by Hydra and by preflight")  # noqa: T201
    for case in CASES:
        if given.only and case.name not in given.only:
            continue
        launch(case, assets, out, given.batch)
        wrong += checked(case, out, given.batch)
    for name, module in APART.items():
        if given.only and name not in given.only:
            continue
        shutil.rmtree(out / name, ignore_errors=True)
        module.launch(PLUGIN, assets, out / name)
        rows = table(out / name, "trajectories")
        told = f"{len(rows)} trajectories of {fully_async.STEPS} updates"
        print(f"{name}: {told}; {waited(out / name)}", flush=True)  # noqa: T201
        wrong += [f"{name}: {text}" for text in (*module.disagreements(out / name), *payloads(out / name))]
    print("\n".join(wrong[:20]) or "traces and verl's own metrics agree")  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
