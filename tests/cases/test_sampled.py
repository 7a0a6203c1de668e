"""A run of which only an export with a selection of its rows is left."""

from __future__ import annotations

import csv
from pathlib import Path

from tests import synthetic
from verl_audit import Audit, audit
from verl_audit.measure.run import SELECTION

STEPS = 1400
EVICTED = "training/off_policy/evicted_samples"


def export(path: Path, steps: list[int]) -> Path:
    """A history as `run.history()` gives it, for a run that evicts two groups in every second step."""
    rows = [synthetic.row(s, lag=1.0, extra={EVICTED: 2.0} if s % 2 else {}) for s in steps]
    keys = sorted({key for _, data in rows for key in data})
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["_step", *keys])
        writer.writeheader()
        writer.writerows({"_step": step, **data} for step, data in rows)
    return path


def statuses(found: Audit) -> dict[str, str]:
    return {f["rule"]: f["status"] for f in found.document["findings"]}


def test_no_rule_counts_steps_in_a_selection(tmp_path: Path) -> None:
    uneven = sorted({round(1 + i * (STEPS - 1) / 499 + (i % 3) * 0.7) for i in range(500)})
    picked = audit(export(tmp_path / "picked" / "history.csv", [*uneven, STEPS + 5, STEPS + 9][:500]))
    whole = audit(export(tmp_path / "whole" / "history.csv", list(range(1, STEPS + 1))))
    assert {s["precision"] for s in picked.document["sources"]} == {"sampled"}
    for name in ("stale_groups", "lag_oldest_max", "steps_logged", "nonfinite_steps"):
        assert picked.document["measures"][name]["value"] is None
        assert picked.document["measures"][name]["missing"] == SELECTION
        assert whole.document["measures"][name]["value"] is not None
    assert picked.document["ledger"]["fates"]["stale_groups"] is None
    assert whole.document["ledger"]["fates"]["stale_groups"] == STEPS
    changed = {rule: status for rule, status in statuses(picked).items() if status != statuses(whole)[rule]}
    assert changed and set(changed.values()) == {"insufficient"}
    assert statuses(picked)["health-nonfinite-updates"] == "insufficient"
    picked.store.close()
    whole.store.close()
