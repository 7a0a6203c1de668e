"""A plan as terminal text: what is known, the splits, the shortlist, the test plan. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console

from verl_audit.plan.search import NEAR, Choice, Plan, Split
from verl_audit.plan.trials import RECORD, trials
from verl_audit.plan.workload import KNOB
from verl_audit.report.page import Page

MAX_SPLITS = 12
"""Splits shown without --all: those around the best one."""
STARVED = 0.3
"""Idle share of both pools at which a plan says that its batch is small for the cards."""
SPLITS = ("split", "k", "θ", "time", "s=0", "s=1", "/card", "T", "R", "sync", "lag", "waits for")
SHORT = ("", "split", "k", "θ", "formula", "simulated", "range", "T", "R", "lag", "best in")
SPARED = ("s=0", "s=1", "sync", "formula", "/card", "range")
"""Columns left out, in this order, where a terminal is too narrow."""


def render_plan(plan: Plan, console: Console, *, everything: bool = False) -> None:
    """Print a plan; no line is wider than the console."""
    page = Page(console)
    _profile(page, plan)
    _splits(page, plan, everything=everything)
    _shortlist(page, plan)
    _trials(page, plan)
    _unknown(page, plan)


def _profile(page: Page, plan: Plan) -> None:
    work, limits = plan.profile.work, plan.limits
    page.item("Profile", work.reference.name, column=11, style="bold")
    unit = f" {work.unit}" if work.unit else ""
    for line in work.measured:
        page.item("", line, column=11)
    costs = f"rollouts {work.rollout.card_seconds:.4g}, training {work.train.card_seconds:.4g}"
    page.item(
        "",
        f"an update: {costs} card-{'seconds' if unit else 'units'}; weight sync {work.sync_seconds:.3g}{unit}; "
        f"lengths: {work.durations.source}",
        column=11,
    )
    for note in work.notes:
        page.item("note", note, column=11)
    page.item(
        "Budget",
        f"{limits.cards} cards in {work.mode}, lag up to {limits.lag_budget:g} updates, sync up to "
        f"{limits.sync_share:.0%} of a cycle, evicted up to {limits.evicted:.0%}",
        column=11,
        style="bold",
    )
    theta = (
        f"extra groups under way, over a cycle's ({KNOB[work.mode].rpartition('.')[2]})" if work.mode in KNOB else "1"
    )
    page.item(
        "Columns",
        f"split: training to rollout cards; k: updates per sync; θ: {theta}; time: per update, over the reference's; "
        f"s=0, s=1: the same at no and full overlap; /card: throughput per card over the reference's, {plan.bound:.2f} "
        "at most; T, R: idle share of trainer and rollouts; lag: mean, in versions/updates",
        column=11,
        style="bold",
    )


def _splits(page: Page, plan: Plan, *, everything: bool) -> None:
    page.heading("Splits", f"the best setting of each; {len(plan.grid)} settings scanned")
    if plan.none_allowed:
        page.para(f"No setting keeps the budget ({plan.none_allowed}); the fastest ones are shown.", 2)
    best = plan.shortlist[0].split.name
    shown = plan.splits if everything else _around(plan.splits, best)
    styles = ["bold" if split.name == best else "" if split.allowed else "dim" for split in shown]
    _table(page, SPLITS, [_split_cells(split) for split in shown], styles)
    if len(shown) < len(plan.splits):
        page.para(f"{len(plan.splits) - len(shown)} more with --all, all settings with --csv.", 2)
    if any(not s.allowed for s in shown) and not plan.none_allowed:
        page.para("* no setting of this split keeps the budget.", 2)
    _around_best(page, plan)
    first, per_update = plan.shortlist[0].split, plan.profile.work.per_update
    if min(first.train_idle, first.rollout_idle) > STARVED:
        page.para(
            f"Both pools idle even in the first choice: {per_update:.0f} trajectories an update are few for "
            f"{plan.limits.cards} cards. Fewer cards, a larger batch or a lower limit on length come before any split.",
            2,
        )
    if plan.now is not None:
        now = plan.now
        page.para(
            f"The run as it is, {now.name} with k = {now.updates} and θ = {now.theta:g}: trainer waiting "
            f"{now.train_idle:.0%}, rollouts idle {now.rollout_idle:.0%}, sync {now.sync_share:.0%}, lag "
            f"{now.lag_versions:.1f}/{now.lag_updates:.1f}; it waits for {now.binds}.",
            2,
        )
    evicting = [s for s in shown if s.evicted >= 0.005]
    if evicting:
        page.para("Evicted as stale: " + ", ".join(f"{s.name} {s.evicted:.0%}" for s in evicting) + ".", 2)


def _around_best(page: Page, plan: Plan) -> None:
    """What moving cards to either side of the first choice would do."""
    at = next(i for i, s in enumerate(plan.splits) if s.name == plan.shortlist[0].split.name)
    best = plan.splits[at]
    sides = ((at + 1, "training"), (at - 1, "rollouts"))
    moves = [(plan.splits[i], where) for i, where in sides if 0 <= i < len(plan.splits)]
    said = [
        f"{abs(other.train_cards - best.train_cards)} cards to {where} ({other.name}): "
        f"{other.per_update / best.per_update - 1:+.0%}"
        for other, where in moves
    ]
    if said:
        page.para(f"Time per update if {best.name} gave {'; '.join(said)}.", 2)


def _around(splits: Sequence[Split], best: str) -> Sequence[Split]:
    at = next(i for i, s in enumerate(splits) if s.name == best)
    start = max(0, min(at - MAX_SPLITS // 2, len(splits) - MAX_SPLITS))
    return splits[start : start + MAX_SPLITS]


def _split_cells(split: Split) -> tuple[str, ...]:
    return (
        split.name + ("" if split.allowed else "*"),
        str(split.updates),
        f"{split.theta:g}",
        f"{split.relative:.2f}",
        f"{split.no_overlap:.2f}",
        f"{split.full_overlap:.2f}",
        f"{split.per_card:.2f}",
        f"{split.train_idle:.0%}",
        f"{split.rollout_idle:.0%}",
        f"{split.sync_share:.0%}",
        f"{split.lag_versions:.1f}/{split.lag_updates:.1f}",
        split.binds,
    )


def _table(page: Page, names: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """Columns as wide as their cells, numbers to the right; the spared ones left out until a line fits."""
    columns = zip(names, *rows, strict=True)
    widths = {column[0]: max(map(cell_len, column)) for column in columns}
    kept = list(names)
    for name in SPARED:
        if sum(widths[n] for n in kept) + 2 * (len(kept) - 1) + 1 <= page.width:
            break
        kept = [n for n in kept if n != name]
    right = [name != "waits for" for name in kept]
    for cells, style in zip((names, *rows), ("bold", *styles), strict=True):
        by_name = dict(zip(names, cells, strict=True))
        page.row([by_name[n] for n in kept], [widths[n] for n in kept], 1, style=style, right=right)


def _shortlist(page: Page, plan: Plan) -> None:
    simulated = any(c.simulated for c in plan.shortlist)
    page.heading("Shortlist", "time per update over the reference's" + (", simulated (seeded)" if simulated else ""))
    cells = [_choice_cells(i, choice, len(plan.scenarios)) for i, choice in enumerate(plan.shortlist, 1)]
    _table(page, SHORT, cells, [""] * len(cells))
    page.para(
        f"Range: over {len(plan.scenarios)} scenarios, one uncertain number moved at a time: "
        f"{'; '.join(plan.scenarios)}. "
        f"Best in: scenarios in which the split is within {NEAR:.0%} of the fastest.",
        2,
    )


def _choice_cells(rank: int, choice: Choice, stories: int) -> tuple[str, ...]:
    split, run = choice.split, choice.simulated
    idle = (split.train_idle, split.rollout_idle) if run is None else (run.train_idle, run.rollout_idle)
    error = None if run is None else 2 * run.se / run.cycle * choice.relative
    return (
        f"{rank}.",
        split.name,
        str(split.updates),
        f"{split.theta:g}",
        f"{split.relative:.3f}",
        "-" if run is None else f"{choice.relative:.3f}±{error:.3f}",
        f"{choice.low:.2f}-{choice.high:.2f}",
        f"{idle[0]:.0%}",
        f"{idle[1]:.0%}",
        f"{split.lag_versions if run is None else run.lag_versions:.1f}",
        f"{choice.good_in} of {stories}",
    )


def _trials(page: Page, plan: Plan) -> None:
    page.heading("Test plan", "one change at a time, same data order and seed")
    for i, trial in enumerate(trials(plan), 1):
        page.item(f"{i}.", f"{trial.what}, {trial.split}: {trial.why}.", indent=2, column=5)
        for line in trial.settings:
            page.item("", line, column=7)
        page.item("", f"{trial.steps} steps, the first {trial.skip} left out. Expect {trial.expect}.", column=5)
        for line in trial.then:
            page.item(
                "-",
                f"If {line}." if line.startswith(("trainer", "rollouts", "both", "equal")) else f"{line}.",
                indent=5,
            )
    page.item("Record", "in every run:", indent=2)
    for line in RECORD[plan.profile.work.mode]:
        page.item("-", line, indent=5)


def _unknown(page: Page, plan: Plan) -> None:
    work = plan.profile.work
    if not work.unknown:
        return
    page.heading("Not determined by the profile")
    for item in work.unknown:
        page.item("-", f"{item.what}: taken as {item.taken}. Measure: {item.measure}.", indent=2)
