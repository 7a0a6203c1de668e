"""How fast token lists are reduced, beside merely decoding them and beside what a user does today.

python benchmarks/tokens.py [--steps 20] [--repeat 5] [--large] [--skip-peers]

Seeded traces go into a temporary folder: small (20 steps x 100 trajectories x mean 500 tokens, 1 M tokens) and medium
(100 x 1000 x 2000; `--steps 100` is the whole of its 199 M tokens and needs 1.6 GB of disk, the default a fifth).
`--large` adds 4 steps of 3300 trajectories of mean 8000 tokens. Times are CPU seconds (user and system) of one thread,
medians of repetitions in which the ways take turns, after one that is not counted; the page cache is warm. Memory is
measured in processes of their own.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import duckdb
import pyarrow.parquet as pq
from tokens_inputs import SIZES, Size, write

from verl_audit.measure.tokens import reduce_all, shards

TARGETS = {
    "numba / floor": (1.4, "at most"),
    "numpy / floor": (2.2, "at most"),
    "duckdb / numba": (2.3, "at least"),
    "duckdb / numpy": (1.6, "at least"),
    "row loop / numba": (4.0, "at least"),
    "row loop / numpy": (3.0, "at least"),
    "explode / numba": (40.0, "at least"),
}
EXPLODE_ON = "small"
"""The only size at which exploded lists fit into memory: about 150 bytes a token."""
PEAK_MB, FLAT, LINEAR, THREADS = 150.0, 1.2, 1.3, 1.7
"""Megabytes over the base; growth of them, and of the time a token, from a part to the whole; two threads to one."""
FLOOR = ("behave_logp", "theta_logp", "loss_mask")
DUCKDB = """
    WITH tokens AS (
        SELECT filename, file_row_number AS row, advantage, unnest(behave_logp) AS b, unnest(theta_logp) AS q,
               unnest(loss_mask) AS counts
        FROM read_parquet(?, filename = true, file_row_number = true)
    ), differences AS (SELECT *, q - b AS d, exp(q - b) AS w FROM tokens WHERE counts)
    SELECT filename, row, count(*), sum(d), sum(abs(d)), max(abs(d)), sum(d * d), sum(w - 1 - d), sum(w), sum(w * w),
           count(*) FILTER (abs(d) > 0.6931), count(*) FILTER (abs(d) > 1),
           count(*) FILTER (advantage < 0 AND w < 0.8), count(*) FILTER (advantage > 0 AND w > 1.2)
    FROM differences GROUP BY ALL
"""
Way = Callable[[Sequence[str]], object]


def floor(paths: Sequence[str]) -> None:
    """Decode the three token columns and throw them away."""
    for path in paths:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            for index in range(file.num_row_groups):
                file.read_row_group(index, list(FLOOR), use_threads=False)


def sql(paths: Sequence[str]) -> object:
    """Per-trajectory sums alone, in SQL."""
    con = duckdb.connect(":memory:", config={"threads": 1})
    return con.execute(DUCKDB, [list(paths)]).fetchall()


def row_loop(paths: Sequence[str]) -> list[tuple[Any, ...]]:
    """Per-trajectory sums and two quantiles, a row at a time."""
    pd, np = import_module("pandas"), import_module("numpy")
    out = []
    for path in paths:
        frame = pd.read_parquet(path, columns=[*FLOOR, "advantage"])
        for b, q, mask, advantage in frame.itertuples(index=False):
            d = (q - b)[mask.astype(bool)].astype(np.float64)
            if not len(d):
                continue
            a, w = np.abs(d), np.exp(np.clip(d, -20, 20))
            clipped = (w > 1.2).sum() if advantage > 0 else (w < 0.8).sum()
            sums = d.sum(), a.sum(), a.max(), (d * d).sum(), (w - 1 - d).sum(), w.sum(), (w * w).sum()
            out.append((len(d), *sums, (a > 0.6931).sum(), (a > 1).sum(), clipped, *np.quantile(a, [0.5, 0.99])))
    return out


def explode(paths: Sequence[str]) -> object:
    """Per-trajectory sums and two quantiles, a row of a data frame for each token."""
    pd = import_module("pandas")
    parts = []
    for path in paths:
        frame = pd.read_parquet(path, columns=list(FLOOR)).explode(list(FLOOR))
        frame = frame[frame["loss_mask"].astype(bool)]
        d = frame["theta_logp"].astype(float) - frame["behave_logp"].astype(float)
        groups = d.abs().groupby(level=0)
        parts.append(groups.agg(["size", "sum", "max", lambda x: x.quantile(0.5), lambda x: x.quantile(0.99)]))
    return pd.concat(parts)


def tool(kernel: Any) -> Way:
    """Every table of the token sums."""
    return lambda paths: reduce_all(paths, kernel=kernel, workers=1)


def ways(name: str, peers: bool) -> dict[str, Way]:
    """What is measured on an input of that name."""
    found: dict[str, Way] = {"floor": floor}
    found |= {k: tool(k) for k in ("numba", "numpy") if k == "numpy" or find_spec("numba")}
    if peers:
        found["duckdb"] = sql
        if find_spec("pandas"):
            found["row loop"] = row_loop
            found |= {"explode": explode} if name == EXPLODE_ON else {}
    return found


@dataclass(frozen=True)
class Result:
    """CPU seconds of each way, by name."""

    name: str
    tokens: int
    files: int
    seconds: Mapping[str, float]


def measure(name: str, tokens: int, paths: Sequence[str], repeat: int, peers: bool) -> Result:
    """Medians of interleaved repetitions."""
    mine = ways(name, peers)
    spent: dict[str, list[float]] = {way: [] for way in mine}
    for turn in range(repeat + 1):
        for way, run in mine.items():
            start = time.process_time()
            run(paths)
            if turn:
                spent[way].append(time.process_time() - start)
    return Result(name, tokens, len(paths), {way: statistics.median(s) for way, s in spent.items()})


def peak_over_base(paths: Sequence[str]) -> float:
    """MB that two threads need beyond the imports and the compiled kernel, in this process."""
    reduce_all(paths[:1], workers=1)
    base = resident()
    for _ in shards(paths, workers=2):
        pass
    return resident("VmHWM") - base


def resident(field: str = "VmRSS") -> float:
    """MB that this process holds now, or held at most (`VmHWM`); `ru_maxrss` would begin at the parent's size."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024 / 1e6


def memory(paths: Sequence[str]) -> float:
    """`peak_over_base` in a new process."""
    code = "import sys, tokens; print(tokens.peak_over_base(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    return float(done.stdout)


def two_threads(paths: Sequence[str], repeat: int) -> tuple[float, float]:
    """Wall time of one thread over that of two (best of pairs), and cores that two kept busy."""
    best, busy = 0.0, 0.0
    for _ in range(repeat):
        start = time.perf_counter()
        reduce_all(paths, workers=1)
        middle, cpu = time.perf_counter(), time.process_time()
        reduce_all(paths, workers=2)
        end = time.perf_counter()
        best = max(best, (middle - start) / (end - middle))
        busy = max(busy, (time.process_time() - cpu) / (end - middle))
    return best, busy


def table(results: Sequence[Result]) -> Iterator[str]:
    """Rows of a markdown table: nanoseconds of CPU a token."""
    names = list(dict.fromkeys(way for r in results for way in r.seconds))
    yield "| input | tokens | files | " + " | ".join(f"{n} ns" for n in names) + " |"
    yield "| --- |" + " ---: |" * (len(names) + 2)
    for r in results:
        cells = [f"{r.seconds[n] / r.tokens * 1e9:.1f}" if n in r.seconds else "-" for n in names]
        yield f"| {r.name} | {r.tokens:,} | {r.files} | " + " | ".join(cells) + " |"


def ratios(result: Result) -> Iterator[str]:
    """The ratios of one input against their targets; fixed costs rule the small one."""
    for name, (limit, sense) in TARGETS.items():
        over, under = name.split(" / ")
        small_only = over == "explode"
        if (result.name == EXPLODE_ON) != small_only or not {over, under} <= result.seconds.keys():
            continue
        ratio = result.seconds[over] / result.seconds[under]
        met = ratio <= limit if sense == "at most" else ratio >= limit
        yield f"{result.name}: {name} {ratio:.2f} ({sense} {limit:g}: {'met' if met else 'missed'})"


def growth(results: Sequence[Result]) -> Iterator[str]:
    """Time a token of each size beside that of medium."""
    base = next((r for r in results if r.name == "medium"), None)
    for r in results:
        for kernel in ("numba", "numpy"):
            if base and r is not base and kernel in r.seconds:
                factor = r.seconds[kernel] / r.tokens / (base.seconds[kernel] / base.tokens)
                yield f"{r.name}, {kernel}: {factor:.2f} times the time a token of medium"


def inputs(folder: Path, steps: int, large: bool) -> Iterator[tuple[str, int, list[str]]]:
    """Name, tokens and files of each input, written when it is asked for."""
    medium = Size(steps, SIZES["medium"].trajectories, SIZES["medium"].mean)
    plan: list[tuple[str, Size, dict[str, Any]]] = [
        ("small", SIZES["small"], {}),
        ("small, a file a step", SIZES["small"], {"steps_a_file": 1}),
        ("medium", medium, {}),
        ("medium, single turn", medium, {"single_turn": True}),
    ]
    plan += [("large", Size(4, SIZES["large"].trajectories, SIZES["large"].mean), {})] * large
    for name, size, options in plan:
        place = folder / name.replace(", ", "-").replace(" ", "-")
        tokens = write(size, place, **options)
        yield name, tokens, sorted(map(str, place.glob("*.parquet")))


def report_memory(name: str, paths: Sequence[str]) -> Iterator[str]:
    """Peak of a part and of the whole."""
    part, whole = memory(paths[: max(2, len(paths) // 5)]), memory(paths)
    flat = whole <= FLAT * part or whole - part <= PEAK_MB / 10
    yield (
        f"{name}: {part:.0f} MB over the base for {max(2, len(paths) // 5)} files, {whole:.0f} MB for {len(paths)} "
        f"(at most {PEAK_MB:g}: {'met' if whole <= PEAK_MB else 'missed'}; flat: {'met' if flat else 'missed'})"
    )


@click.command(help=__doc__)
@click.option("--steps", default=20, show_default=True, help="steps of medium, which has 100")
@click.option("--repeat", default=5, show_default=True, help="repetitions of each way")
@click.option("--large", is_flag=True, help="add a slice of large: 104 M tokens, 0.8 GB")
@click.option("--skip-peers", is_flag=True, help="only the floor and the kernels")
def main(steps: int, repeat: int, large: bool, skip_peers: bool) -> None:
    """Print the table, the ratios and the targets."""
    results, notes = [], []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, tokens, paths in inputs(Path(folder), steps, large):
            results.append(measure(name, tokens, paths, repeat, not skip_peers and name != "large"))
            if name in ("medium", "large"):
                notes += report_memory(name, paths)
            if name == "medium":
                faster, busy = two_threads(paths, repeat)
                notes.append(
                    f"two threads: {faster:.2f} times as fast as one, {busy:.2f} cores busy "
                    f"(at least {THREADS:g} on an idle machine; load before the run {load:.1f})"
                )
            for path in paths:
                Path(path).unlink()
            click.echo(f"{name}: done", err=True)
    click.echo(f"Python {platform.python_version()}, {os.cpu_count()} cores, seed fixed, CPU time of one thread\n")
    for line in (*table(results), "", *(x for r in results for x in ratios(r)), *growth(results), *notes):
        click.echo(line)


if __name__ == "__main__":
    main()
