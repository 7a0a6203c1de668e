"""End to end: two runs are simulated, judged, kept and read again."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_audit.cli import main
from verl_audit.errors import AuditError
from verl_audit.reference import scenarios
from verl_audit.selftest import QUICK, WAYS, cases, judged
from verl_audit.selftest.records import code_digest, read, with_all, write


def test_two_scenarios_are_judged_from_the_command_line_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "verdicts.json"
    asked = ["--scenarios", "async", "--scenarios", "fp4_sync_bypass", "--way", "metrics", "--way", "metrics+baseline"]
    done = CliRunner().invoke(main, ["selftest", *asked, "--workers", "1", "--json", str(kept)])
    assert done.exit_code == 0, done.output
    runs = read(kept, code_digest())
    assert [(r.scenario, r.way) for r in runs] == list(product(("async", "fp4_sync_bypass"), WAYS[1::2]))
    assert {r.scenario: r.truth.kind for r in runs} == {"async": "harmless", "fp4_sync_bypass": "harmful"}
    assert all((r.answer.speed is not None) == ("baseline" in r.way) for r in runs)
    assert not [r for r in runs if r.score.result in ("wrong", "false alarm", "error")]
    assert "metrics, 2 runs" in done.output and "fp4_sync_bypass" in done.output


def test_records_of_other_code_are_not_gone_on_with_and_a_new_verdict_replaces_an_old_one(tmp_path: Path) -> None:
    (run,) = judged(cases(["async"], ["small"], 1, ["traces"]), workers=1)
    kept = tmp_path / "kept.json"
    write(kept, with_all([run], [run]), "this")
    assert read(kept, "this") == [run] and read(kept, "that") == [] and read(tmp_path / "none.json") == []
    assert kept.read_text(encoding="utf-8").count("\n") == 3


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "notes.json"
    other.write_text("{}", encoding="utf-8")
    done = CliRunner().invoke(main, ["selftest", "--json", str(other)])
    assert done.exit_code == 2 and other.read_text(encoding="utf-8") == "{}"


def test_unknown_names_are_told_before_anything_is_simulated() -> None:
    for names, env, way in (["nope"], "small", "metrics"), (["sync"], "nope", "metrics"), (["sync"], "small", "nope"):
        with pytest.raises(AuditError, match="nope"):
            cases(names, [env], 1, [way])


def test_the_quick_choice_is_holds_a_scenario_of_each_kind() -> None:
    known = {s.name: s for s in scenarios()}
    assert {known[name].family for name in QUICK} >= {
        "harmless",
        "mismatch",
        "staleness",
        "eviction",
        "sync",
        "two",
        "other",
    }
    assert len(cases(QUICK, ["small"], 1, WAYS)) == len(QUICK)
