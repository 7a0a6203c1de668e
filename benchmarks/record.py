"""What recording costs a training job: processor seconds a step in the caller's thread, and memory.

python benchmarks/record.py [--trajectories N] [--tokens N] [--steps N]

A stand-in batch of random log-probs is handed to `TraceWriter` in chunks of 64 trajectories, as the recorder for verl
fetches them, with and without a writer in processes of their own. Between steps the job waits as long as the step
took, for the writing thread to overlap with.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from verl_audit.record import TraceWriter

CHUNK = 64


def chunks(step: int, count: int, tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Trajectories of one step: lengths uniform from half to one and a half of `tokens`, three segments each."""
    rng = np.random.default_rng(step)
    for start in range(0, count, CHUNK):
        yield [trajectory(rng, f"{step}-{i // 8}", i % 8, tokens, step) for i in range(start, start + CHUNK)]


def trajectory(rng: np.random.Generator, group: str, session: int, tokens: int, step: int) -> dict[str, Any]:
    """One row with two log-prob lists and a mask."""
    n = int(rng.integers(tokens // 2, tokens * 3 // 2))
    behave = rng.standard_exponential(n, np.float32)
    np.negative(behave, out=behave)
    third = n // 3
    return {
        "group": group,
        "session": session,
        "fate": "trained",
        "reasons": ["trained"],
        "submit_step": step,
        "decided_step": step,
        "train_version": step - 1,
        "train_minibatch": 0,
        "prompt_length": 512,
        "response_length": n,
        "reward": 0.5,
        "advantage": 0.1,
        "reward_parts": {"accuracy": 1.0},
        "segments": [
            {"version": step - 3 + k, "start": k * third, "length": third, "server": f"s{k}", "stop": "abort"}
            for k in range(3)
        ],
        "behave_logp": behave,
        "prox_logp": behave + np.float32(0.01),
        "loss_mask": np.ones(n, bool),
    }


def job(directory: Path | None, count: int, tokens: int, steps: int) -> tuple[list[float], float, float]:
    """Processor seconds in the writer's calls by step, seconds at close, and peak memory in 10^6 bytes."""
    writer = TraceWriter(directory) if directory else None
    spent = []
    for step in range(1, steps + 1):
        begun, inside = time.perf_counter(), 0.0
        for rows in chunks(step, count, tokens):
            called = time.thread_time()
            if writer:
                writer.trajectories(rows)
            inside += time.thread_time() - called
        called = time.thread_time()
        if writer:
            writer.step_done(step)
        spent.append(inside + time.thread_time() - called)
        time.sleep(time.perf_counter() - begun)
    called = time.perf_counter()
    if writer:
        writer.close()
        if writer.counts.dropped or writer.counts.lost or writer.counts.failed:
            raise click.ClickException(f"not everything was recorded: {writer.counts}")
    at_close = time.perf_counter() - called
    return spent, at_close, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


@click.command()
@click.option("--trajectories", default=8192)
@click.option("--tokens", default=8192)
@click.option("--steps", default=3)
@click.option("--child", type=click.Choice(["with", "without"]), hidden=True)
def main(trajectories: int, tokens: int, steps: int, child: str | None) -> None:
    """Measure, or with --child be the job that is measured."""
    if child:
        with tempfile.TemporaryDirectory() as directory:
            spent, at_close, peak = job(Path(directory) if child == "with" else None, trajectories, tokens, steps)
            size = sum(p.stat().st_size for p in Path(directory).iterdir()) / 1e6
        click.echo(f"{min(spent)} {max(spent)} {at_close} {peak} {size}")
        return
    sizes = [f"--trajectories={trajectories}", f"--tokens={tokens}", f"--steps={steps}"]
    found = {}
    for way in ("without", "with"):
        command = [sys.executable, __file__, *sizes, f"--child={way}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = [float(x) for x in done.stdout.split()]
    low, high, at_close, peak, size = found["with"]
    total = trajectories * tokens
    click.echo(f"{trajectories} trajectories of {tokens} tokens on average: {total / 1e6:.0f} M tokens a step")
    click.echo(
        f"in the caller's thread: {low:.2f} to {high:.2f} processor seconds a step, {high / total * 1e9:.1f} ns a token"
    )
    click.echo(f"that is 1 % of a step of {high * 100:.0f} s, {total / (high * 100):,.0f} tokens a second")
    click.echo(f"at close: {at_close:.2f} s")
    click.echo(f"memory: {peak - found['without'][3]:.0f} MB above the same job without (peak {peak:.0f} MB)")
    click.echo(f"disk: {size / steps:.1f} MB a step")


if __name__ == "__main__":
    main()
