"""What a user may set, in a file or on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_audit import AuditError, RuleError, Settings, load_rules, read_settings


def test_pairs_are_sorted_by_what_they_set() -> None:
    found = read_settings(
        ["staleness-lag-note.note=9", "fact.trainer=sync", "fact.group_size=8", "run_sd=.2", "switch_step=120"]
    )
    assert found.params == {"staleness-lag-note.note": 9}
    assert found.facts == {"trainer": "sync", "group_size": 8.0}
    assert (found.run_sd, found.switch_step) == (0.2, 120.0)


def test_as_given_is_what_set_takes() -> None:
    pairs = ["a-rule.x=1", "fact.is_async=true", "fact.trainer=sync", "run_sd=0.3"]
    given = read_settings(pairs).as_given()
    assert given == {"a-rule.x": 1, "fact.is_async": True, "fact.trainer": "sync", "run_sd": 0.3}
    assert list(given) == sorted(given)
    assert Settings().as_given() == {}


@pytest.mark.parametrize(
    "pair",
    [
        "novalue",
        "=1",
        "unknown=1",
        "fact.nonsense=1",
        "fact.trainer=",
        "fact.trainer=[a, b]",
        "fact.trainer=[",
        'fact.trainer="',
        "fact.trainer=7",
        "fact.group_size=many",
        "fact.group_size=true",
        "fact.is_async=sync",
        "run_sd=0",
        "run_sd=-1",
        "run_sd=.nan",
        "run_sd=.inf",
        "run_sd=true",
        "run_sd=wide",
        "switch_step=never",
        "a-rule.x=2026-01-01",
        "a-rule.x={a: 1}",
        "fact.trainer=banana",
        "fact.log_prob_mode=none",
        "fact.staleness_strategy=evict",
        "fact.groups_per_step=-4",
        "fact.group_size=0",
        "fact.total_steps=.nan",
        "fact.learning_rate=.inf",
        "fact.top_k=-2",
    ],
)
def test_a_bad_pair_is_an_error_that_names_it(pair: str) -> None:
    with pytest.raises(AuditError) as caught:
        read_settings([pair])
    assert pair.partition("=")[0] in str(caught.value)


def test_a_refused_value_comes_with_those_allowed() -> None:
    with pytest.raises(AuditError, match="colocate_async, fully_async, one_step_off, separate_async, sync, v0"):
        read_settings(["fact.trainer=banana"])
    with pytest.raises(AuditError, match="a number above 0"):
        read_settings(["fact.groups_per_step=-4"])


def test_facts_that_are_off_at_0_or_below() -> None:
    found = read_settings(["fact.top_k=-1", "fact.staleness_threshold=0", "fact.temperature=0"])
    assert found.facts == {"top_k": -1.0, "staleness_threshold": 0.0, "temperature": 0.0}


def write(folder: Path, text: str) -> Path:
    path = folder / "verl-audit.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_pairs_win_over_the_file_and_folders_are_relative_to_it(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'rules = ["mine"]\n[set]\nrun_sd = 0.3\n"a-rule.x" = 1\n[set.fact]\ntrainer = "v0"\n[set.other-rule]\ny = 2\n',
    )
    found = read_settings(["run_sd=0.1"], [Path("more")], path)
    assert found.run_sd == 0.1
    assert found.params == {"a-rule.x": 1, "other-rule.y": 2}
    assert found.facts == {"trainer": "v0"}
    assert found.rule_dirs == (tmp_path / "mine", Path("more"))


def test_the_file_of_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[set]\nrun_sd = 0.3\n")
    assert read_settings().run_sd == 0.15
    monkeypatch.chdir(tmp_path)
    assert read_settings().run_sd == 0.3


@pytest.mark.parametrize("text", ["[set", "[unknown]\n", 'rules = "mine"\n', "[set]\nnonsense = 1\n", "\udcff"])
def test_a_bad_file_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "verl-audit.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(AuditError):
        read_settings(file=path)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=r"absent\.toml") as caught:
        read_settings(file=tmp_path / "absent.toml")
    assert str(caught.value).count("absent.toml") == 1


def test_a_parameter_of_no_rule_is_refused() -> None:
    rules = load_rules()
    with pytest.raises(RuleError, match="staleness-lag-noet"):
        rules.with_params({"staleness-lag-noet.note": 3})
    with pytest.raises(RuleError, match="it has: note"):
        rules.with_params({"staleness-lag-note.nope": 3})
    changed = {r.id: r for r in rules.with_params({"staleness-lag-note.note": 3}).rules}
    assert changed["staleness-lag-note"].params["note"].value == 3


@pytest.mark.parametrize("value", ["abc", True, float("nan"), float("inf"), 10**400])
def test_a_parameter_keeps_the_type_of_its_default(value: float | str) -> None:
    with pytest.raises(RuleError, match=r"sync-share\.share.* must be a number"):
        load_rules().with_params({"sync-share.share": value})
