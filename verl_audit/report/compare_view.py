"""A comparison as terminal text: speed first, then what differs and where runs part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from verl_audit.report.head_block import OUTCOMES, STATES
from verl_audit.report.markdown import ratio_of
from verl_audit.report.page import Page, clean, count, number, percent, table

Comparison = Mapping[str, Any]
CLOCKS: Mapping[str, str] = {"update": "updates", "sample": "samples", "hour": "hours"}
MOST_KEYS = 12
SWEEP: Mapping[str, str] = {
    "lag": "lag",
    "gap": "gap",
    "evicted_groups": "evicted groups",
    "trained_length": "trained length",
    "reward": "reward",
    "step_seconds": "s per step",
}
"""Columns of the calibration table that every comparison has."""
MEASURES = (
    "gap_prob_mean", "gap_prob_lag0", "gap_kl_mean", "ess", "lag_mean", "lag_oldest_max", "evicted_share",
    "prompt_length_shift", "sync_share", "step_seconds", "trainer_idle", "rollout_idle", "entropy_ratio",
)  # fmt: skip
"""Measures shown in short; all of them stand in the tree and in the HTML."""


def render_comparison(tree: Comparison, console: Console) -> None:
    """Print a comparison; the first run is the reference of every speed."""
    page = Page(console)
    names = [clean(run["name"]) for run in tree["runs"]]
    _show_runs(page, tree)
    _show_changes(page, tree)
    _show_sweep(page, tree)
    _show_configuration(page, tree, names)
    page.heading("Where they part first", f"from {names[0]}, by clock")
    for line in parting(tree):
        page.para(line, indent=2, hang=2)
    _show_measures(page, tree, names)


def _show_runs(page: Page, tree: Comparison) -> None:
    for run, speed in zip(tree["runs"], tree["speed"], strict=True):
        word = OUTCOMES.get(run["outcome"], (clean(run["outcome"]),))[0]
        page.item(clean(run["name"]), f"{describe(run)}; verdict: {word.lower()}", style="bold", column=4)
        page.para(speed_line(speed), indent=4, hang=2)


def describe(run: Mapping[str, Any]) -> str:
    """Framework, trainer, mode and steps of a run."""
    mode = {True: "asynchronous", False: "synchronous"}.get(run["is_async"], "mode not known")
    kind = " ".join(clean(v) for v in (run["framework"], run["trainer"]) if v is not None)
    steps = "no step" if run["first_step"] is None else f"steps {run['first_step']} to {run['last_step']}"
    return f"{kind or 'framework not recognised'} ({mode}), {steps}"


def speed_line(speed: Mapping[str, Any] | None) -> str:
    """The learning speed of a run against the first, on each clock."""
    if speed is None:
        return "the reference"
    known = [f"{ratio_of(speed[name])} {name.replace('_', ' ')}" for name in _SPEEDS if speed[name]]
    state = STATES.get(speed["state"], clean(speed["state"]))
    return f"{state}: {', '.join(known)}" if known else f"{state}: {clean(speed['because'])}"


_SPEEDS = ("per_update", "per_sample", "per_hour")


def _show_changes(page: Page, tree: Comparison) -> None:
    if tree["interventions"]:
        page.heading("One key changed")
    for change in tree["interventions"]:
        page.para(f"{clean(change['before'])} to {clean(change['after'])}: {clean(change['sentence'])}", 2, hang=2)


def _show_sweep(page: Page, tree: Comparison) -> None:
    head, rows = sweep_table(tree)
    page.heading("Runs side by side")
    table(page, [dict(zip(head, row, strict=True)) for row in rows], head, 2)
    page.para(f"{reward_note(tree)}.", indent=2)


def sweep_table(tree: Comparison, most_keys: int = 1) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the calibration: what was varied (its last name), and what it cost."""
    sweep = tree["sweep"]
    keys = [clean(k).rpartition(".")[2] for k in sweep["keys"][:most_keys]]
    rows = [
        [clean(row["run"]), *("not set" if v is None else clean(v) for v in row["values"][:most_keys]), *_costs(row)]
        for row in sweep["rows"]
    ]
    return ["run", *keys, *SWEEP.values()], rows


def _costs(row: Mapping[str, Any]) -> Iterator[str]:
    for name in SWEEP:
        share = row["evicted_share"] if name == "evicted_groups" else None
        yield number(row[name]) + (f" ({percent(share)})" if isinstance(share, int | float) and row[name] else "")


def reward_note(tree: Comparison) -> str:
    """What the column of rewards holds."""
    of = next((row["reward_of"] for row in tree["sweep"]["rows"] if row["reward_of"]), None)
    told = f"reward: {clean(of).replace('_', ' ')}, mean of the last third" if of else "reward: not logged by all"
    refused = [clean(row["run"]) for row in tree["sweep"]["rows"] if row["reward_admissible"] is False]
    if of == "trained_reward" and refused:
        told += f"; lifted by eviction in {', '.join(refused)}"
    return f"{told}; lag, gap and length: means over all steps"


def _show_configuration(page: Page, tree: Comparison, names: Sequence[str]) -> None:
    found = tree["configuration"]
    of = "configuration" if found["source"] == "configuration" else "detected facts (a configuration is not known)"
    page.heading(count(len(found["differs"]), "key"), f"differ in {of}; {found['same']} are the same")
    for entry in found["differs"][:MOST_KEYS]:
        page.item(clean(entry["key"]), _each(names, entry["values"]), indent=2)
    if len(found["differs"]) > MOST_KEYS:
        page.para(f"and {len(found['differs']) - MOST_KEYS} more (--html or --json)", indent=2)
    if found["incidental"]:
        page.para(
            f"not counted: {count(len(found['incidental']), 'key')} of names, places, logging and seeds", indent=2
        )


def _each(names: Sequence[str], values: Sequence[str | None]) -> str:
    told = zip(names, values, strict=True)
    return ", ".join(f"{name}: {'not set' if value is None else clean(value)}" for name, value in told)


def parting(tree: Comparison) -> Iterator[str]:
    """One line a run and clock: the quantities in the order in which they part."""
    for run in tree["runs"][1:]:
        for clock, word in CLOCKS.items():
            own = [d for d in tree["divergence"] if d["run"] == run["name"] and d["clock"] == clock]
            apart = sorted((d for d in own if d["low"] is not None), key=lambda d: (d["low"], d["quantity"]))
            if own:
                told = "; ".join(_apart(d) for d in apart) or "nothing parts beyond the noise within the runs"
                yield f"{clean(run['name'])}, by {word}: {told}"


def _apart(found: Mapping[str, Any]) -> str:
    return f"{clean(found['title'])} {found['direction']} from {stretch(found)}"


def stretch(found: Mapping[str, Any]) -> str:
    """The stretch of a clock, hours in the unit that suits them."""
    low, high = float(found["low"]), float(found["high"])
    if found["clock"] != "hour":
        return f"{number(low)} to {number(high)}"
    scale, unit = (1.0, "h") if high >= 2 else (60.0, "min") if high >= 2 / 60 else (3600.0, "s")
    return f"{number(low * scale)} to {number(high * scale)} {unit}"


def _show_measures(page: Page, tree: Comparison, names: Sequence[str]) -> None:
    known = {m["measure"]: m for m in tree["measures"]}
    page.heading("Measures")
    rows = [_measure_row(known[name], names) for name in MEASURES if name in known]
    if rows:
        table(page, rows, ["measure", *names], 2)


def _measure_row(measure: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    values = (v["value"] for v in measure["values"])
    return {"measure": measure["measure"], **dict(zip(names, values, strict=True))}
