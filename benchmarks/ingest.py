"""How fast logs are read, beside reading their bytes and beside what a user does today.

python benchmarks/ingest.py [--scale 1.0] [--only jsonl,console,wandb,tensorboard] [--peer-python PATH]

Seeded inputs of a quarter of the size and of the whole size (scale 1: JSONL of 50,000 steps x 200 keys, console
250 MB, .wandb 500 MB, TensorBoard 5 M points) go into a temporary folder. Each way of reading runs in a process of
its own: seconds are CPU seconds of the work without imports, the peak is that of the whole process.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

WAYS = ("bytes", "today", "reader", "diagnose")
NAMES = ("jsonl", "console", "wandb", "tensorboard")
PART = 4
"""The smaller size is this part of the scale."""
FASTER, PEAK_MB = 3.0, 1500.0
"""Targets: times faster than today's way, and megabytes at scale 1."""
LINEAR = 1.3
"""Time counts as linear in size while seconds per byte grow no more than this."""
HERE = Path(__file__).parent
_KIB = 1 if sys.platform == "darwin" else 1024
"""Unit of ru_maxrss in bytes."""
NOTE = """\
CPU seconds and peak: one run of each way (the fastest of --repeat). x bytes: reader / reading the bytes.
today / ...: how many times slower today's way is. growth: seconds per byte here / at the smaller size (1.0 is linear).
wandb's export needs its server and is not measured: today's way for `.wandb` is the DataStore that wandb shipped up
to 0.29. The console has no tool of its own: a loop over lines with two regular expressions, which checks nothing."""


@dataclass(frozen=True)
class Cost:
    """What one way of reading took; `seconds` is None if it could not run."""

    seconds: float | None
    peak: float = 0.0
    """Megabytes (10^6 bytes)."""
    values: int = 0
    by: str = ""


def run(python: str, way: str, form: str, path: Path, repeat: int) -> Cost:
    """Measure one way in fresh processes; the fastest counts."""
    costs = [_run(python, way, form, path) for _ in range(repeat)]
    return min(costs, key=lambda cost: cost.seconds or 0.0)


def _run(python: str, way: str, form: str, path: Path) -> Cost:
    command = [python, str(HERE / "ingest_ways.py"), way, form, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout
        said = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        return Cost(None, by=f"failed ({child.returncode})")
    told = json.loads(said)
    if "missing" in told:
        return Cost(None, by=f"not installed ({told['missing']})")
    return Cost(told["seconds"], usage.ru_maxrss * _KIB / 1e6, told["values"], told["by"])


def generate(name: str, scale: float, folder: Path) -> tuple[str, Path]:
    """Write one input in a process of its own (a child's peak counts from its parent's size)."""
    code = "import sys; from pathlib import Path; import ingest_inputs as i; n, s, f = sys.argv[1:]; "
    code += "print(i.INPUTS[n][0]); print(i.write(n, float(s), Path(f)))"
    done = subprocess.run(
        [sys.executable, "-c", code, name, str(scale), str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    form, path = done.stdout.splitlines()
    return form, Path(path)


@dataclass(frozen=True)
class Result:
    """All ways of reading one input."""

    name: str
    size: int
    costs: dict[str, Cost]


def table(results: list[Result]) -> Iterator[str]:
    """Rows of a markdown table."""
    yield (
        "| input | MB | values | bytes s | today s | reader s | diagnose s | x bytes | today / reader "
        "| today / diagnose | peak MB: today | reader | diagnose | growth: reader | diagnose |"
    )
    yield "| --- |" + " ---: |" * 14
    smaller: dict[str, Result] = {}
    for result in results:
        took = [result.costs[way].seconds for way in WAYS]
        read, today, reader, diagnose = took
        before = smaller.setdefault(result.name, result)
        cells = [
            result.name,
            f"{result.size / 1e6:.0f}",
            f"{result.costs['reader'].values:,}",
            _cell(read, "{:.3f}"),
            *(_cell(seconds, "{:.2f}") for seconds in took[1:]),
            _cell(_ratio(reader, read), "{:.0f}"),
            *(_cell(_ratio(today, own), "{:.1f}") for own in (reader, diagnose)),
            *(_cell(c.peak if c.seconds else None, "{:.0f}") for c in map(result.costs.__getitem__, WAYS[1:])),
            *(_cell(None if before is result else _growth(before, result, way), "{:.2f}") for way in WAYS[2:]),
        ]
        yield "| " + " | ".join(cells) + " |"


def _cell(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _growth(before: Result, after: Result, way: str) -> float | None:
    times = _ratio(after.costs[way].seconds, before.costs[way].seconds)
    return None if times is None else times / (after.size / before.size)


def targets(results: list[Result], scale: float) -> Iterator[str]:
    """Where each target is met, and by how much not."""
    last = {r.name: r for r in results}
    first = {r.name: r for r in reversed(results)}
    for name, result in last.items():
        today = result.costs["today"]
        for way in ("reader", "diagnose"):
            cost = result.costs[way]
            faster, growth = _ratio(today.seconds, cost.seconds), _growth(first[name], result, way)
            slope = (cost.peak - first[name].costs[way].peak) / (scale - scale / PART)
            peak = cost.peak + slope * (1 - scale)
            if cost.seconds is None or faster is None or growth is None:
                yield f"{name}, {way}: {cost.by}; today's way: {today.by}"
                continue
            yield f"{name}, {way}: " + "; ".join(
                (
                    f"{faster:.1f} times as fast as {today.by} ({_met(faster >= FASTER)})",
                    f"growth {growth:.2f} ({_met(growth <= LINEAR)})",
                    f"peak at full size {peak:,.0f} MB{'' if scale == 1 else ', projected'} ({_met(peak <= PEAK_MB)})",
                )
            )
        yield from _disagreement(result)


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def _disagreement(result: Result) -> Iterator[str]:
    theirs, ours = result.costs["today"], result.costs["reader"]
    if theirs.seconds is not None and theirs.values != ours.values:
        yield f"{result.name}: today's way found {theirs.values:,} values, the reader {ours.values:,}"


@click.command(help=__doc__)
@click.option("--scale", default=0.05, show_default=True, help="share of the full size")
@click.option("--only", default=",".join(NAMES), show_default=True, help="inputs, joined by commas")
@click.option("--peer-python", default=sys.executable, help="interpreter with pandas, tensorboard, wandb < 0.30")
@click.option("--repeat", default=1, show_default=True, help="processes for each way; the fastest counts")
def main(scale: float, only: str, peer_python: str, repeat: int) -> None:
    """Print the table and the targets."""
    results: list[Result] = []
    for name in only.split(","):
        if name not in NAMES:
            raise click.BadParameter(f"{name}: not one of {', '.join(NAMES)}")
        for part in (scale / PART, scale):
            with tempfile.TemporaryDirectory() as folder:
                form, path = generate(name, part, Path(folder))
                costs = {
                    way: run(peer_python if way == "today" else sys.executable, way, form, path, repeat) for way in WAYS
                }
                results.append(Result(name, path.stat().st_size, costs))
            click.echo(f"{name} {part:g}: done", err=True)
    click.echo(f"Python {platform.python_version()}, {os.cpu_count()} cores, scale {scale:g}, seed fixed\n")
    for row in table(results):
        click.echo(row)
    click.echo(f"\n{NOTE}\n")
    for row in targets(results, scale):
        click.echo(row)


if __name__ == "__main__":
    main()
