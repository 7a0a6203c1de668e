"""A plan as terminal text: what is known, the splits, the shortlist, the test plan. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from verl_audit.plan.search import NEAR, Choice, Plan, Split
from verl_audit.plan.trials import RECORD, trials
from verl_audit.plan.workload import KNOB
from verl_audit.report.page import Page

MAX_SPLITS = 12
"""Splits shown without --all: those around the best one."""
SPLITS = (
    ("split", 7), ("k", 2), ("θ", 4), ("time", 4), ("s=0", 4), ("s=1", 4), ("/card", 5),
    ("T", 3), ("R", 3), ("sync", 4), ("lag", 8), ("waits for", 9),
)  # fmt: skip
SHORT = (
    ("", 2), ("split", 7), ("k", 2), ("θ", 4), ("formula", 7), ("simulated", 11), ("range", 9),
    ("T", 3), ("R", 3), ("lag", 4), ("best in", 7),
)  # fmt: skip


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
    _head(page, SPLITS)
    best = plan.shortlist[0].split.name
    shown = plan.splits if everything else _around(plan.splits, best)
    for split in shown:
        marks = "bold" if split.name == best else "" if split.allowed else "dim"
        _row(page, _split_cells(split), SPLITS, marks)
    if len(shown) < len(plan.splits):
        page.para(f"{len(plan.splits) - len(shown)} more with --all, all settings with --csv.", 2)
    if any(not s.allowed for s in shown) and not plan.none_allowed:
        page.para("* no setting of this split keeps the budget.", 2)
    _around_best(page, plan)
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


def _head(page: Page, columns: Sequence[tuple[str, int]]) -> None:
    page.row([n for n, _ in columns], [w for _, w in columns], 1, style="bold", right=_right(columns))


def _row(page: Page, cells: Sequence[str], columns: Sequence[tuple[str, int]], style: str = "") -> None:
    page.row(cells, [w for _, w in columns], 1, style=style, right=_right(columns))


def _right(columns: Sequence[tuple[str, int]]) -> list[bool]:
    return [name != "waits for" for name, _ in columns]


def _shortlist(page: Page, plan: Plan) -> None:
    simulated = any(c.simulated for c in plan.shortlist)
    page.heading("Shortlist", "time per update over the reference's" + (", simulated (seeded)" if simulated else ""))
    _head(page, SHORT)
    for i, choice in enumerate(plan.shortlist, 1):
        _row(page, _choice_cells(i, choice, len(plan.scenarios)), SHORT)
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
