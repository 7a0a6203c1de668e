"""Runs side by side, from files to terminal, tree and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from tests.report.html.pages import REAL, ROOT, comparison
from tests.synthetic import rows, write_jsonl, write_run
from verl_audit import AuditError
from verl_audit.cli import main
from verl_audit.compare import INCIDENTAL, compare
from verl_audit.report.document import to_json

SCHEMA = json.loads((ROOT / "docs" / "compare.schema.json").read_text(encoding="utf-8"))


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["compare", *(str(a) for a in arguments)], env={"COLUMNS": "100"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def problems(tree: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(json.loads(to_json(tree)))
    return [f"{e.json_path}: {e.message[:200]}" for e in found]


def test_the_tree_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert problems(comparison()) == []
    tree = compare([REAL / "sync_baseline", REAL / "async_mild", REAL / "async_drop_bias", REAL / "fp8_mismatch"])
    assert problems(tree) == []
    assert problems({**tree, "extra": 1}) != []


def test_real_runs_side_by_side() -> None:
    tree = compare([REAL / "sync_baseline", REAL / "async_drop_bias"])
    differs = {d["key"]: d["values"] for d in tree["configuration"]["differs"]}
    assert differs["trainer.v1.sampler.max_off_policy_threshold"] == ["8", "3"]
    assert differs["trainer.v1.trainer_mode"] == ["sync", "separate_async"]
    assert "trainer.experiment_name" not in differs and not any(k.endswith("_dir") for k in differs)
    assert tree["sweep"]["keys"][0] == "trainer.v1.sampler.max_off_policy_threshold"
    sync, dropped = tree["sweep"]["rows"]
    assert (sync["evicted_groups"], dropped["evicted_groups"]) == (0, 140)
    assert dropped["evicted_share"] == pytest.approx(140 / 1100)
    assert (sync["lag"], dropped["reward_admissible"]) == (0, False)
    lag = next(d for d in tree["divergence"] if d["quantity"] == "lag" and d["clock"] == "update")
    assert lag["direction"] == "above" and lag["low"] <= 5
    assert tree["speed"][0] is None and tree["speed"][1]["state"] == "untested"
    assert tree["interventions"] == []


def test_reward_parts_where_the_slow_run_falls_behind() -> None:
    found = {(d["run"], d["clock"]): d for d in comparison()["divergence"] if d["quantity"] == "validation"}
    assert found["lagging", "update"]["direction"] == "below"
    assert found["lagging", "update"]["high"] <= 40
    assert found["lowered", "update"]["low"] is None


def test_numbers_are_compared_as_numbers_and_incidental_keys_do_not_count(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", rows(range(41), seed=1), threshold="4", lr="1e-4")
    b = write_run(tmp_path / "b", rows(range(41), seed=2), threshold="4.0", lr="0.0001")
    tree = compare([a, b])
    assert tree["configuration"]["differs"] == []
    for key in ("trainer.experiment_name", "trainer.default_local_dir", "data.seed", "trainer.test_freq"):
        assert INCIDENTAL.search(key)
    for key in ("actor_rollout_ref.model.path", "data.train_files", "trainer.total_epochs", "algorithm.seed_kl"):
        assert not INCIDENTAL.search(key)


def test_without_configuration_facts_are_compared(tmp_path: Path) -> None:
    known = write_run(tmp_path / "a", rows(range(41)), name="known")
    bare = write_jsonl(tmp_path / "b" / "toy" / "bare.jsonl", rows(range(41), lag=1.0))
    found = compare([known, bare.parent.parent])["configuration"]
    assert (found["source"], found["unknown"]) == ("facts", ["bare"])
    assert {"fact.is_async", "fact.trainer"} & {d["key"] for d in found["differs"]} or found["differs"]
    assert compare([known, bare.parent.parent])["interventions"] == []


def test_the_same_bytes_twice() -> None:
    paths = [REAL / "sync_baseline", REAL / "async_mild"]
    assert to_json(compare(paths)) == to_json(compare(paths))
    assert str(ROOT) not in to_json(compare(paths))


def test_terminal(tmp_path: Path) -> None:
    result = call(REAL / "sync_baseline", REAL / "async_mild", "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    for words in ("the reference", "1.05 (0.64 to 1.72) per update", "Runs side by side", "Where they part first"):
        assert words in result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    again = call(REAL / "sync_baseline", REAL / "async_mild", "--html", tmp_path / "page.html")
    assert again.exit_code == 0


def test_files_that_are_not_ours_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("precious", encoding="utf-8")
    for option in ("--html", "--json"):
        result = call(REAL / "sync_baseline", REAL / "async_mild", option, log)
        assert (result.exit_code, log.read_text(encoding="utf-8")) == (2, "precious")


@pytest.mark.parametrize("given", [["sync_baseline"], ["sync_baseline", "sync_baseline"], ["sync_baseline", "absent"]])
def test_bad_usage_is_2(given: list[str]) -> None:
    assert call(*(REAL / name for name in given)).exit_code == 2


def test_which_run_to_choose_is_said_in_the_words_of_this_command(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "two" / "p" / "one.jsonl", rows(range(41), seed=3))
    write_jsonl(tmp_path / "two" / "p" / "other.jsonl", rows(range(31), seed=4))
    result = call(tmp_path / "two", REAL / "sync_baseline")
    assert result.exit_code == 2 and "two#NAME'" in result.stderr and "--run" not in result.stderr
    assert call(f"{tmp_path / 'two'}#one", REAL / "sync_baseline").exit_code == 0


def test_too_many_runs() -> None:
    with pytest.raises(AuditError, match="2 to 8"):
        compare([REAL / "sync_baseline"] * 9)


@pytest.mark.parametrize("given", [("crash_hybrid_off", "sync_baseline"), ("sync_baseline", "crash_hybrid_off")])
def test_a_run_that_died_is_compared_as_far_as_it_got(given: tuple[str, str], tmp_path: Path) -> None:
    result = call(*(REAL / name for name in given), "--html", tmp_path / "page.html")
    assert result.exit_code == 0 and "verdict: other" in result.output
    assert "whether it slowed was not testable" in result.output
    assert "TypeError: Logger._log()" in (tmp_path / "page.html").read_text(encoding="utf-8")
