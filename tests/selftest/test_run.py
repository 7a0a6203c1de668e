"""End to end: two runs are simulated, judged, kept and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_audit.cli import main
from verl_audit.errors import AuditError
from verl_audit.reference import scenarios
from verl_audit.selftest import QUICK, WAYS, cases, judged
from verl_audit.selftest.records import code_digest, key, read, with_all, write
from verl_audit.selftest.score import Answer, Judged, Truth


def test_two_scenarios_are_judged_from_the_command_line_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "verdicts.json"
    asked = ["--scenarios", "async", "--scenarios", "fp4_sync_bypass", "--way", "metrics", "--way", "metrics+baseline"]
    done = CliRunner().invoke(main, ["selftest", *asked, "--workers", "1", "--json", str(kept)])
    assert done.exit_code == 0, done.output
    runs = read(kept, code_digest())
    assert [(r.scenario, r.way) for r in runs] == list(
        product(("async", "fp4_sync_bypass"), ("metrics+baseline", "metrics"))
    )
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


def test_a_run_is_judged_with_a_family_hidden_beside_the_verdict_with_everything() -> None:
    (case,) = cases(["async"], ["small"], 1, ["metrics+baseline"], ["gap", "queue"])
    blind, same = judged([case], workers=1)
    assert (blind.hidden, blind.answer.outcome, blind.silenced) == ("gap", "undetermined", True)
    assert "gap_prob_mean" in blind.answer.missing and "gap_prob_mean" in blind.answer.lacking
    assert blind.whole == same.whole == same.answer and same.answer.outcome == "none"


def test_records_come_back_as_they_were_and_say_of_hidden_answers_only_what_differs(tmp_path: Path) -> None:
    truth = Truth(frozenset({"sync"}), frozenset({"sync"}), None, 0.5, sets_in=21, behind=60)
    whole = Answer("cause", ("sync",), symptom="slower", speed=(0.5, 0.4, 0.6), onset=(9.0, 58.0))
    blind = Answer("undetermined", missing=("lag_mean",), symptom="slower", lacking=("lag_mean",))
    first = Judged("frozen_replicas", "wide", 0, "traces+baseline", truth, whole)
    runs = [first, replace(first, hidden="lag", answer=blind, whole=whole), replace(first, hidden="gap", whole=whole)]
    write(tmp_path / "kept.json", runs, "this")
    found = read(tmp_path / "kept.json")
    assert sorted(found, key=key) == sorted(runs, key=key)
    (row,) = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))["runs"]
    assert row["answers"]["traces+baseline-gap"] == {}
    assert row["answers"]["traces+baseline-lag"]["speed"] is None


def test_cases_come_seed_after_seed_in_the_order_of_the_environments() -> None:
    found = [(c.environment, c.seed, c.scenario) for c in cases(["sync", "async"], ["wide", "small"], 2, ["metrics"])]
    assert found == list(product(("wide", "small"), (0, 1), ("sync", "async")))


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "notes.json"
    other.write_text("{}", encoding="utf-8")
    done = CliRunner().invoke(main, ["selftest", "--json", str(other)])
    assert done.exit_code == 2 and other.read_text(encoding="utf-8") == "{}"


def test_unknown_names_are_told_before_anything_is_simulated() -> None:
    for names, env, way in (["nope"], "small", "metrics"), (["sync"], "nope", "metrics"), (["sync"], "small", "nope"):
        with pytest.raises(AuditError, match="nope"):
            cases(names, [env], 1, [way])
    with pytest.raises(AuditError, match="nope"):
        cases(["sync"], ["small"], 1, ["metrics"], ["nope"])


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


def test_a_way_with_several_baselines_is_given_those_of_every_seed_its_own_first() -> None:
    several, one, none = (
        cases(["async"], ["small"], 3, [way])[2].baselines for way in ("traces+baselines", "traces+baseline", "traces")
    )
    assert [seed for _, _, seed in several] == [102, 100, 101, 103, 104]
    assert (one, none) == (several[:1], [])
