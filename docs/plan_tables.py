"""The tables of plan.md, computed by the planner: what `docs/generate.py` puts between its marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from verl_audit.cli import main
from verl_audit.plan.des import Setting, Simulated, setting_of, simulate
from verl_audit.plan.split import (
    best_ratio,
    fluid_cycle,
    one,
    overlap,
    predict,
    sync_share,
)
from verl_audit.plan.tail import lognormal, makespan
from verl_audit.plan.workload import Workload, two_pools

Rows = Iterable[Sequence[str]]


def tables() -> Mapping[str, tuple[Sequence[str], Rows]]:
    """Head and rows of every table, by the name of its mark."""
    return {
        "overlap": (("cards", "train:rollout", "s = 0", "s = 1", "per card, s = 0", "per card, s = 1"), _overlap()),
        "optimum": (("overlap s", "rollout cards per training card", "of 128", "A(s)", "A(s) at 3:1"), _optimum()),
        "sync": (("T_mb / T", "k = 1", "k = 2", "k = 4", "k = 8"), _sync()),
        "makespan": (("sigma", "trajectories", "slots", "simulated", "formula", "error", "drain's share"), _makespan()),
        "cycle": (
            ("a, b", "k", "theta", "G", "simulated", "without tails", "error", "with tails", "error"),
            _cycle(),
        ),
        "errors": (("formula", "median error", "19 of 20 within", "largest", "there"), _errors()),
        "lag": (("a, b", "k", "theta", "G", "lag, simulated", "predicted", "Little: under way / Q - 1"), _lag()),
        "eviction": (("a, b", "theta", "threshold", "evicted, simulated", "predicted"), _eviction()),
        "clock": (
            (
                "T:R cards",
                "k",
                "theta",
                "rule",
                "waits for",
                "step",
                "formula",
                "simulated",
                "lag",
                "formula",
                "simulated",
                "kink",
            ),
            _clock(),
        ),
        "clock_errors": (
            (
                "profile from",
                "cells",
                "of",
                "step: formula within 10 %",
                "largest",
                "simulation within 10 %",
                "largest",
                "lag: formula within 10 %",
                "largest",
                "simulation within 10 %",
                "largest",
            ),
            _clock_errors(),
        ),
        "one_step": (("engine", "measured step", "predicted", "error", "measured wait", "predicted wait"), _one_step()),
        "staleness": (
            ("theta", "measured cycle", "without tails", "error", "256 slots", "error", "950 slots", "error"),
            _staleness(),
        ),
        "moe": (("from the synchronous row", "predicted", "measured", "error"), _moe()),
        "checkpoint": (("model", "engine", "T, s", "least k T_mb for a share of 10 %, s"), _checkpoint()),
    }


# -- the simple model ------------------------------------------------------------------------------------------


def _overlap() -> Rows:
    """A synchronous step of 3 + 1 on 32 cards, split otherwise."""
    for cards, train in ((64, 16), (64, 24), (64, 32), (128, 32), (128, 40), (128, 48), (128, 64)):
        a, b = 3 * 32 / (cards - train), 1 * 32 / train
        times = [float(overlap(a, b, s)) / 4 for s in (0, 1)]
        cells = [f"{t:.3f}" for t in times] + [f"{32 / cards / t:.2f}x" for t in times]
        yield (str(cards), f"{train}:{cards - train}", *cells)


def _optimum() -> Rows:
    for s in (0.0, 0.25, 0.5, 2 / 3, 0.8, 1.0):
        r = best_ratio(3, 1, s)
        rollout = round(128 * r / (1 + r))
        best = float(overlap(96 / rollout, 32 / (128 - rollout), s)) / 4
        three = float(overlap(1, 1, s)) / 4
        yield (f"{s:.2f}", f"{r:.2f}", f"{128 - rollout}:{rollout}", f"{best:.3f}", f"{three:.3f}")


def _sync() -> Rows:
    for ratio in (4, 10):
        yield (str(ratio), *(f"{float(sync_share(ratio, 1, k)):.0%}" for k in (1, 2, 4, 8)))


# -- against the simulation ------------------------------------------------------------------------------------

MEAN = 0.93
"""Mean duration of the tables: a cycle of 512 trajectories then takes 3.72 on 128 slots."""
SYNC = 0.18


def _workload(a: float, b: float, k: float, size: float, evict_above: float | None = None) -> Workload:
    """512 trajectories a cycle on 128 slots; a and b are times of a cycle."""
    return two_pools(
        slots=128,
        groups=512 / size / k,
        group_size=size,
        mean_duration=a * 128 / 512,
        update_seconds=b / k,
        sync_seconds=SYNC,
        durations=lognormal(1.0, 4),
        evict_above=evict_above,
    )


def simulated(work: Workload, k: float, theta: float) -> Simulated:
    """The simulation of a table's row."""
    return simulate(setting_of(work, 1, 1, k, theta), work.durations.values)


def _makespan() -> Rows:
    for sigma, (n, slots) in product((0.5, 1.0), ((512, 512), (2048, 512), (8192, 512), (512, 128))):
        lengths = lognormal(sigma, 4)
        setting = Setting(slots, n, 1, 1, 0.0, 0.0, 0.0, 1.0, cycles=min(45, 5 + 80_000 // n), warm_up=5)
        found, said = simulate(setting, lengths.values).cycle, float(makespan(lengths, n, slots))
        share = 1 - n / slots / said
        yield (
            f"{sigma:g}", str(n), str(slots), f"{found:.2f}", f"{said:.2f}", f"{said / found - 1:+.1%}", f"{share:.0%}"
        )  # fmt: skip


CYCLES = (
    (4, 4, 1, 0.0), (4, 4, 1, 0.5), (4, 4, 4, 0.0), (4, 4, 4, 0.1), (4, 4, 4, 0.3), (4, 4, 4, 1.0),
    (4, 2, 4, 0.1), (4, 2, 4, 0.3), (2, 4, 4, 0.0), (2, 4, 4, 0.3),
)  # fmt: skip
"""a and b in mean durations, k, theta."""


def _cycle() -> Rows:
    for (a, b, k, theta), size in product(CYCLES, (1, 8)):
        work = _workload(a * MEAN, b * MEAN, k, size)
        found = simulated(work, k, theta).cycle
        fluid = float(fluid_cycle(a * MEAN, b * MEAN, k, theta, SYNC))
        said = float(predict(work, one(1, 1, k, theta)).cycle[0])
        yield (
            f"{a * MEAN:.2f}, {b * MEAN:.2f}", str(k), f"{theta:g}", str(size), f"{found:.2f}",
            f"{fluid:.2f}", f"{fluid / found - 1:+.0%}", f"{said:.2f}", f"{said / found - 1:+.1%}",
        )  # fmt: skip


def _errors() -> Rows:
    """Both formulas over a grid of settings."""
    loads, thetas = ((4, 4), (4, 2), (2, 4)), (0.0, 0.1, 0.3, 0.5, 1.0, 2.0)
    off: dict[str, list[tuple[float, str]]] = {"without tails": [], "with tails": []}
    for (a, b), k, theta, size in product(loads, (1, 4), thetas, (1, 8)):
        work = _workload(a * MEAN, b * MEAN, k, size)
        found = simulated(work, k, theta).cycle
        there = f"a = {a * MEAN:.2f}, b = {b * MEAN:.2f}, k = {k}, theta = {theta:g}, G = {size}"
        fluid = float(fluid_cycle(a * MEAN, b * MEAN, k, theta, SYNC))
        off["without tails"].append((fluid / found - 1, there))
        off["with tails"].append((float(predict(work, one(1, 1, k, theta)).cycle[0]) / found - 1, there))
    for name, errors in off.items():
        sizes = np.abs([e for e, _ in errors])
        worst, there = max(errors, key=lambda e: abs(e[0]))
        middle, most = np.quantile(sizes, (0.5, 0.95))
        yield (f"{name}, {len(errors)} settings", f"{middle:.1%}", f"{most:.1%}", f"{worst:+.1%}", there)


def _lag() -> Rows:
    for (a, b, k, theta), size in product(((4, 2, 1, 1.0), (4, 2, 4, 1.0), (2, 4, 1, 2.0), (4, 4, 4, 0.3)), (1, 8)):
        work = _workload(a * MEAN, b * MEAN, k, size)
        run = simulated(work, k, theta)
        said = float(predict(work, one(1, 1, k, theta)).lag_versions[0])
        carried = run.under_way / (512 / size) - 1
        yield (
            f"{a * MEAN:.2f}, {b * MEAN:.2f}", str(k), f"{theta:g}", str(size), f"{run.lag_versions:.2f}",
            f"{said:.2f}", f"{carried:.2f}",
        )  # fmt: skip


def _eviction() -> Rows:
    for (a, b), (theta, threshold) in product(((2, 4), (6.5, 4)), ((1.0, 4.0), (2.0, 3.0), (2.0, 2.0), (3.0, 2.0))):
        work = _workload(a * MEAN, b * MEAN, 1, 8, evict_above=threshold)
        run = simulated(work, 1, theta)
        said = float(predict(work, one(1, 1, 1, theta)).evicted[0])
        yield (
            f"{a * MEAN:.2f}, {b * MEAN:.2f}", f"{theta:g}", f"{threshold:g}", f"{run.evicted:.1%}", f"{said:.1%}"
        )  # fmt: skip


# -- against the clock of the reference loop -------------------------------------------------------------------

WAYS = {
    "fixed": "traces, lengths fixed",
    "learning": "traces, policy learns",
    "log alone": "log alone, lengths fixed",
}
"""What benchmarks/plan_clock.py ran, as the page calls it."""
SHOWN = "small"
"""Environment whose cells are shown one by one."""


def _cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(__file__).parent / "plan-clock.json").read_text(encoding="utf-8"))
    return found


def _off(row: Mapping[str, Any], name: str) -> float | None:
    found = row["found"][name.removeprefix("simulated_")]
    return row[name] / found - 1 if found else None


def _clock() -> Rows:
    """The cells of one environment, lengths fixed."""
    for row in _cells():
        if (row["way"], row["env"]) == ("fixed", SHOWN):
            rule = f"{row['strategy']} {row['threshold'] or ''}".strip() if row["strategy"] else ""
            rule = rule or (f"sync {row['sync']:g} s" if row["sync"] != 0.1 else "")
            errors = {n: _off(row, n) for n in ("step", "simulated_step", "lag", "simulated_lag")}
            shown = {n: "" if e is None else f"{e:+.0%}" for n, e in errors.items()}
            yield (
                f"{row['train']}:{row['rollout']}", str(row["k"]), f"{row['theta']:g}", rule, row["binds"],
                f"{row['found']['step']:.2f} s", shown["step"], shown["simulated_step"],
                f"{row['found']['lag']:.2f}" if row["found"]["lag"] else "", shown["lag"], shown["simulated_lag"],
                "kink" if row["kink"] else "",
            )  # fmt: skip


def _clock_errors() -> Rows:
    """How far off both are, over all environments."""
    for (way, said), (where, fits) in product(WAYS.items(), KINDS.items()):
        rows = [row for row in _cells() if row["way"] == way and fits(row)]
        cells = [said, str(len(rows)), where]
        for name in ("step", "simulated_step", "lag", "simulated_lag"):
            errors = np.abs([e for row in rows if (e := _off(row, name)) is not None])
            cells += [f"{np.mean(errors <= 0.1):.0%}", f"{errors.max():.0%}"]
        yield cells


KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "away from kinks, no drop": lambda row: not row["kink"] and row["strategy"] != "drop",
    "at kinks, no drop": lambda row: row["kink"] and row["strategy"] != "drop",
    "drop": lambda row: row["strategy"] == "drop",
}


# -- against published tables ----------------------------------------------------------------------------------

ONE_STEP = (("FSDP2", 321, 247, 520, 45, 458), ("Megatron", 207, 162, 566, 59, 501))
"""verl docs, one_step_off.md, 7B, 32 cards: sync gen, generate_sequences; one-step step, wait, generate_sequences."""
STALENESS = ((0.0, 231.34, 128.47), (0.1, 171.30, 58.17), (0.3, 146.11, 38.88), (0.5, 150.63, 33.14))
"""verl docs, fully_async.md, 7B on 128 cards: staleness_threshold, step (a cycle of 4 updates), gen (the wait)."""
CHECKPOINT = (
    ("7B", "no", 0.12), ("7B", "yes", 0.02), ("30B-A3B", "no", 15.76), ("30B-A3B", "yes", 4.38),
    ("235B-A22B", "no", 58.57), ("235B-A22B", "yes", 23.70),
)  # fmt: skip
"""verl docs, fully_async.md: seconds of one weight sync without and with the checkpoint engine."""


def _signed(said: float, found: float) -> str:
    return f"{said / found - 1:+.0%}"


def _one_step() -> Rows:
    for engine, gen, sequences, step, wait, theirs in ONE_STEP:
        rollout, training = theirs + gen - sequences, step - wait
        said = max(rollout, training)
        yield (
            engine, f"{step} s", f"{said} s", _signed(said, step), f"{wait} s", f"{max(0, rollout - training)} s"
        )  # fmt: skip


def _staleness() -> Rows:
    a = STALENESS[-1][1]
    b = a - STALENESS[-1][2]
    for theta, cycle, _ in STALENESS:
        fluid = float(fluid_cycle(a, b, 4, theta))
        cells = [f"{fluid:.0f} s", _signed(fluid, cycle)]
        for slots in (256, 950):
            work = two_pools(
                slots=slots,
                groups=128,
                group_size=16,
                mean_duration=a * slots / 8192,
                update_seconds=b / 4,
                sync_seconds=0.0,
                durations=lognormal(1.0, 4),
                mode="fully_async",
            )
            said = float(predict(work, one(1, 1, 4, theta)).cycle[0])
            cells += [f"{said:.0f} s", _signed(said, cycle)]
        yield (f"{theta:g}", f"{cycle:.0f} s", *cells)


def _moe() -> Rows:
    gen, update, reference, step = 348.05, 86.27, 20.86, 282.75
    a, b = gen * 128 / 96, (update + reference) * 4
    yield ("rollouts on 96 cards, exponent 1, drain included", f"{a:.0f} s", f"at most {step:.0f} s", _signed(a, step))
    yield ("updates and reference on 32 cards, exponent 1", f"{b:.0f} s", "257 s", _signed(b, 206.63 + 50.05))
    yield ("step, max of both", f"{max(a, b):.0f} s", f"{step:.0f} s", _signed(max(a, b), step))
    e = np.log(206.63 / update) / np.log(4)
    c = (update + reference) * 4**e
    yield (
        f"step, if rollouts are hidden and training has exponent {e:.2f}",
        f"{c:.0f} s",
        f"{step:.0f} s",
        _signed(c, step),
    )


def _checkpoint() -> Rows:
    for model, engine, seconds in CHECKPOINT:
        yield (model, engine, f"{seconds:g}", f"{9 * seconds:.0f}" if seconds > 1 else f"{9 * seconds:.1f}")


# -- the command -----------------------------------------------------------------------------------------------

EXAMPLE = ("--cards", "128", "--baseline-cards", "32", "--rollout", "300", "--train", "100", "--sync", "10",
           "--groups", "128", "--group-size", "16", "--slots", "32")  # fmt: skip


def example() -> str:
    """What the command prints in a terminal of 80 columns."""
    done = CliRunner().invoke(main, ["plan", *EXAMPLE], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.output


__all__ = ["EXAMPLE", "example", "simulated", "tables"]
