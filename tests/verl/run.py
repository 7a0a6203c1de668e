"""Real verl 0.9.1 on a CPU with the recorder: three trainers, the filter, and what both sides tell of each step.

    python tests/verl/run.py [--keep DIR] [--only NAME]...

Needs an interpreter with verl and this package, and the CPU plugin in VERL_CPU_DIR (default: ../shared/verl_cpu beside
the checkout). `make test-verl` makes such an interpreter. Exit code 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fully_async  # type: ignore[import-not-found]
import overrides  # type: ignore[import-not-found]
from agreement import disagreements, metrics, residual, table  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]
PLUGIN = Path(os.environ.get("VERL_CPU_DIR", ROOT.parent / "shared" / "verl_cpu"))
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
    recorded: bool = True


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
    Case("unrecorded", "separate_async", (*SLOW, "--threshold=2"), recorded=False),
)


def launch(case: Case, assets: Path, out: Path) -> float:
    """Run verl once; seconds it took. Raises with the end of its console if it failed."""
    sampler = "AuditReplayBuffer" if case.mode == "sync" else "AuditReplayBufferAsync"
    recorder = [
        f"{SAMPLER}.path=pkg://verl_audit.record.verl",
        f"{SAMPLER}.name={sampler}",
        f"+trainer.v1.sampler.sampler_kwargs.audit_dir={out / case.name / 'audit'}",
        "+trainer.v1.sampler.sampler_kwargs.log_prob_sample=1.0",
    ]
    command = [
        *(sys.executable, str(PLUGIN / "run_e2e.py"), f"--assets={assets}", f"--out={out}", f"--name={case.name}"),
        *(f"--mode={case.mode}", f"--steps={case.steps}", f"--batch={BATCH}", "--n=4", "--test_freq=4"),
        *("--loggers=console,file", *case.options, *case.overrides, *(recorder if case.recorded else ())),
    ]
    shutil.rmtree(out / case.name, ignore_errors=True)
    begun = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        console = (out / case.name / "console.log").read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{case.name} failed:\n{console[-3000:]}{done.stderr[-2000:]}")
    return time.monotonic() - begun


def checked(case: Case, out: Path) -> list[str]:
    """What is wrong with a recorded run; prints what was compared."""
    run = out / case.name
    wrong = list(disagreements(run))
    rows = table(run, "trajectories")
    counts = {fate: sum(r["fate"] == fate for r in rows) for fate in sorted({r["fate"] for r in rows})}
    ledger = residual(run, BATCH, 0 if case.mode == "sync" else WARMUP)
    if ledger["residual"]:
        wrong.append(f"the ledger does not close: {ledger}")
    if case.name == "filter" and not counts.get("filtered"):
        wrong.append("no group was filtered: the run shows nothing")
    if case.name == "sync_steps" and {r["train_minibatch"] for r in rows if r["fate"] == "trained"} != {0, 1}:
        wrong.append("two updates a version, and train_minibatch is not 0 and 1")
    if "verl-audit recorder:" in (run / "console.log").read_text(encoding="utf-8", errors="replace"):
        wrong.append("the recorder warned")
    print(f"{case.name}: {len(metrics(run))} steps, trajectories {counts}, groups {ledger}")  # noqa: T201
    return [f"{case.name}: {text}" for text in wrong]


def main() -> None:
    """Run the cases and exit 1 if traces and metrics disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path("/tmp/verl-audit-runs"))
    parser.add_argument("--only", action="append", choices=[*(case.name for case in CASES), "fully_async"])
    given = parser.parse_args()
    out, assets = given.keep, given.keep / "assets"
    if not (PLUGIN / "run_e2e.py").exists():
        raise SystemExit(f"{PLUGIN} holds no run_e2e.py: set VERL_CPU_DIR")
    if not (assets / "model").exists():
        environment = {**os.environ, "PYTHONPATH": str(PLUGIN)}
        make = [sys.executable, str(PLUGIN / "make_assets.py"), "--out", str(assets)]
        subprocess.run(make, check=True, env=environment, stdout=subprocess.DEVNULL)
    wrong, took = [f"overrides: {text}" for text in overrides.disagreements()], {}
    print(f"overrides: {len(overrides.LINES)} command lines by Hydra and by preflight")  # noqa: T201
    for case in CASES:
        if given.only and case.name not in given.only:
            continue
        took[case.name] = launch(case, assets, out)
        wrong += checked(case, out) if case.recorded else []
    if not given.only or "fully_async" in given.only:
        shutil.rmtree(out / "fully_async", ignore_errors=True)
        fully_async.launch(PLUGIN, assets, out / "fully_async")
        rows = table(out / "fully_async", "trajectories")
        print(f"fully_async: {len(rows)} trajectories of {fully_async.STEPS} updates")  # noqa: T201
        wrong += [f"fully_async: {text}" for text in fully_async.disagreements(out / "fully_async")]
    if {"unrecorded", "separate_async"} <= set(took):
        both = [
            sum(m["timing_s/step"] for m in metrics(out / name).values()) for name in ("separate_async", "unrecorded")
        ]
        print(f"seconds in steps with and without the recorder: {both[0]:.1f}, {both[1]:.1f}")  # noqa: T201
    print("\n".join(wrong[:20]) or "traces and verl's own metrics agree")  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
