"""A plan as CSV (all settings scanned) and as JSON (everything but the grid); never over a file that is not its own."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from verl_audit._version import __version__
from verl_audit.errors import AuditError
from verl_audit.plan.search import Choice, Plan
from verl_audit.plan.split import TERMS
from verl_audit.plan.trials import trials
from verl_audit.report.targets import head

SCHEMA_VERSION = "1"
COLUMNS = (
    "train_cards", "rollout_cards", "updates_per_sync", "theta", "cycle", "per_update", "relative", "per_card",
    "train_idle", "rollout_idle", "sync_share", "lag_versions", "lag_updates", "evicted", "waits_for",
)  # fmt: skip
HEADS = {
    ".csv": ",".join(COLUMNS).encode(),
    ".json": b'{\n  "schema_version": "1",\n  "tool": "verl-audit plan"',
    ".svg": b"<!-- verl-audit plan -->",
    ".html": b"<!-- verl-audit plan -->",
}
"""How a file of ours begins, by kind."""


def check_target(target: Path, kind: str) -> None:
    """Refuse to write over a file that an earlier plan did not write; a device such as /dev/null takes anything."""
    if target.is_file() and not head(target).startswith(HEADS[kind]):
        raise AuditError(f"{target}: it exists and no earlier plan wrote it; give another name or remove it")


def to_csv(plan: Plan) -> str:
    """Every setting scanned, one row each; seconds in the profile's unit, shares 0..1."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    grid, found = plan.grid, plan.predicted
    given = (grid.train_cards, grid.rollout_cards, grid.updates, grid.theta)
    names = COLUMNS[len(given) : -1]
    columns = [*given, *(getattr(found, name) for name in names)]
    for *values, term in zip(*(c.tolist() for c in columns), found.binds.tolist(), strict=True):
        rows.writerow([*(f"{v:.6g}" for v in values), TERMS[term]])
    return out.getvalue()


def to_json(plan: Plan) -> str:
    """Profile, limits, splits, shortlist and test plan; the same bytes for the same input."""
    profile, work = plan.profile, plan.profile.work
    tree = {
        "schema_version": SCHEMA_VERSION,
        "tool": "verl-audit plan",
        "tool_version": __version__,
        "profile": {
            "mode": work.mode,
            "unit": work.unit,
            "reference": asdict(work.reference),
            "rollout": asdict(work.rollout),
            "train": asdict(work.train),
            "sync_seconds": work.sync_seconds,
            "groups_per_update": work.groups,
            "group_size": work.group_size,
            "slots_per_card": work.slots_per_card,
            "durations": work.durations.source,
            "partial_rollout": work.partial,
            "resume_seconds": work.resume_seconds,
            "evict_above": work.evict_above,
            "wait_at": work.wait_at,
            "updates_per_sync": profile.updates,
            "theta": profile.theta,
            "noise": profile.noise,
            "measured": work.measured,
            "not_determined": [asdict(u) for u in work.unknown],
            "notes": work.notes,
        },
        "limits": asdict(plan.limits),
        "per_card_bound": plan.bound,
        "none_allowed": plan.none_allowed,
        "splits": [asdict(s) for s in plan.splits],
        "scenarios": plan.scenarios,
        "shortlist": [_choice(c) for c in plan.shortlist],
        "test_plan": [asdict(t) for t in trials(plan)],
    }
    return orjson.dumps(_plain(tree), option=orjson.OPT_INDENT_2).decode() + "\n"


def _choice(choice: Choice) -> dict[str, Any]:
    run = choice.simulated
    names = ("cycle", "se", "train_idle", "rollout_idle", "sync_share", "lag_versions", "age_versions", "evicted")
    return {
        "split": asdict(choice.split),
        "simulated": None if run is None else {name: getattr(run, name) for name in names},
        "relative": choice.relative,
        "low": choice.low,
        "high": choice.high,
        "good_in": choice.good_in,
    }


def _plain(tree: Any) -> Any:
    """Six significant digits, and null for what is not finite."""
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    if isinstance(tree, float):
        return float(f"{tree:.6g}") if math.isfinite(tree) else None
    return tree
