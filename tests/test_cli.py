"""The command line: exit codes, streams and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import duckdb
import pytest
from click.testing import CliRunner, Result

from tests.synthetic import OFF, row, rows, write_jsonl, write_run
from verl_audit import AuditError, audit, read_settings
from verl_audit.cli import main


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run and its baseline, a damaged run, and a directory of two."""
    top = tmp_path_factory.mktemp("runs")
    write_run(top / "base", rows(range(61), every=5, seed=1))
    write_run(top / "run", rows(range(61), every=5, lag=1.0), "separate_async")
    evicted = rows(range(61), every=5, lag=1.0, extra={f"{OFF}evicted_samples": 8.0})
    write_run(top / "evicting", evicted, "separate_async")
    write_jsonl(top / "two" / "p" / "one.jsonl", rows(range(41), seed=3))
    write_jsonl(top / "two" / "p" / "other.jsonl", rows(range(31), seed=4))
    torn = write_jsonl(top / "torn" / "p" / "x.jsonl", rows(range(41)))
    torn.write_text(torn.read_text() + '{"step":41,"da')
    (top / "empty").mkdir()
    return top


def document(*arguments: object) -> dict[str, Any]:
    result = call("diagnose", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# -- exit codes -------------------------------------------------------------------------------------------------


def test_done_is_0(folder: Path) -> None:
    result = call("diagnose", folder / "run", "--baseline", folder / "base")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(("level", "code"), [("low", 1), ("medium", 1), ("high", 1), ("critical", 0)], ids=str)
def test_fail_on(folder: Path, level: str, code: int) -> None:
    assert call("diagnose", folder / "evicting", "--fail-on", level).exit_code == code
    assert call("diagnose", folder / "evicting").exit_code == 0


def test_strict_is_2_on_damaged_input(folder: Path) -> None:
    assert call("diagnose", folder / "torn").exit_code == 0
    assert call("diagnose", folder / "torn", "--strict").exit_code == 2
    assert call("diagnose", folder / "run", "--strict").exit_code == 0


BROKEN = """
id: broken
step: 2
cause: staleness
title: broken
when: {when}
severity: high
explain: broken
"""


def test_a_broken_rule_is_an_error_and_strict_makes_it_2(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN.format(when="no_such_measure > 1"))
    arguments = (folder / "run", "--rules", tmp_path)
    found = {f["rule"]: f for f in document(*arguments)["findings"]}["broken"]
    assert found["status"] == "error" and "no_such_measure" in found["error"]
    assert call("diagnose", *arguments, "--strict").exit_code == 2
    assert call("diagnose", *arguments, "--fail-on", "high").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("absent",),
        ("run", "--baseline", "absent"),
        ("run", "--run", "nobody"),
        ("run", "--baseline", "run"),
        ("run", "--baseline", "base", "--baseline", "base"),
        ("two",),
        ("run", "--baseline", "two"),
        ("run", "--baseline", "two#nobody"),
        ("run", "--rules", "absent"),
        ("run", "--config", "absent.toml"),
        ("run", "--json", "absent/audit.json"),
        ("run", "--db", "absent/audit.db"),
        ("run", "--set", "nonsense=1"),
        ("run", "--set", "fact.trainer=["),
        ("run", "--set", "no-such-rule.x=1"),
        ("run", "--set", "staleness-lag-note.nope=1"),
        ("run", "--set", "sync-share.share=abc"),
        ("run", "--set", "fact.groups_per_step=-4"),
        ("run", "--rules", "empty"),
        ("run", "--db", "-"),
        ("run", "--db", "base"),
        ("run", "--db", "same", "--json", "same"),
        ("run", "--fail-on", "never"),
        (),
    ],
    ids=" ".join,
)
def test_bad_usage_is_2_and_said_on_stderr(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    result = call("diagnose", *arguments)
    assert result.exit_code == 2
    assert result.stderr and "Traceback" not in result.output


def test_nothing_to_judge_is_3(folder: Path) -> None:
    result = call("diagnose", folder / "empty")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "holds no metrics or logs" in result.stderr


def test_a_log_of_another_framework_beside_a_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(
        "trainer: {experiment_name: e}\nactor_rollout_ref: {}\nalgorithm: {}\n"
    )
    lines = [f"{{'loss': 0.1, 'reward': 0.{s}, 'kl': 0.01, 'epoch': {s}.0}}\n" for s in range(1, 9)]
    (tmp_path / "run.log").write_text("".join(lines))
    result = call("diagnose", tmp_path)
    assert result.exit_code == 3
    assert "none of its 4 metric names is known" in result.stderr, "read, but too little to tell the framework by"


def test_unknown_names_are_3(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p" / "x.jsonl", [(s, {"my/loss": 1.0 / s}) for s in range(1, 20)])
    result = call("diagnose", tmp_path)
    assert result.exit_code == 3 and "my/loss" in result.stderr


# -- what is written --------------------------------------------------------------------------------------------


def test_json_to_stdout_is_json_and_nothing_else(folder: Path) -> None:
    result = call("diagnose", folder / "run", "--baseline", folder / "base", "--json", "-", "-v")
    found = json.loads(result.stdout)
    assert found["verdict"]["outcome"] == "none"
    assert result.stderr == ""
    assert result.stdout == audit(folder / "run", baselines=[folder / "base"]).to_json()


def test_json_to_a_file_beside_the_report(folder: Path, tmp_path: Path) -> None:
    result = call("diagnose", folder / "run", "--json", tmp_path / "audit.json")
    assert result.exit_code == 0 and result.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["run"]["name"] == "exp"


def test_no_log_is_ever_written_over(folder: Path) -> None:
    log = folder / "run" / "toy" / "exp.jsonl"
    before = log.read_bytes()
    for option in ("--json", "--db"):
        result = call("diagnose", folder / "run", option, log)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "it exists and is no" in result.stderr
    with pytest.raises(AuditError):
        audit(folder / "run", db=log)
    assert log.read_bytes() == before


def test_its_own_files_are_written_again(folder: Path, tmp_path: Path) -> None:
    for _ in range(2):
        result = call("diagnose", folder / "run", "--json", tmp_path / "a.json", "--db", tmp_path / "a.db")
        assert result.exit_code == 0, result.stderr
    with duckdb.connect(str(tmp_path / "other.db")) as con:
        con.execute("CREATE TABLE meta (x INTEGER)")
    assert call("diagnose", folder / "run", "--db", tmp_path / "other.db").exit_code == 2


def program(*arguments: object, stdout: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from verl_audit.cli import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)


@pytest.mark.parametrize("arguments", [("diagnose",), ("sql", "select * from metrics"), ("rules", "list")], ids=str)
def test_a_reader_that_goes_away_ends_it_quietly(folder: Path, arguments: tuple[str, ...]) -> None:
    command, *rest = arguments
    words = (command, folder / "evicting", *rest) if command != "rules" else arguments
    read, write = os.pipe()
    os.close(read)
    process = program(*words, stdout=write)
    os.close(write)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [("rules", "list"), ("--help",)], ids=str)
def test_a_full_disk_is_2_and_one_sentence(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = program(*arguments, stdout=full)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said.decode().startswith("verl-audit: the output cannot be written: ") and said.count(b"\n") == 1


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"con\xff.jsonl")
    write_jsonl(tmp_path / "p" / name, rows(range(31)))
    found = document(tmp_path)
    assert [s["path"].rpartition("/")[2] for s in found["sources"]] == ["con\\xff.jsonl"]
    assert call("diagnose", tmp_path / "p" / name).exit_code == 0


def test_files_that_were_not_read_are_in_the_document(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path, rows(range(31)))
    (tmp_path / "happenings.jsonl").write_text('{"event":"lunch","step":1}\n')
    (tmp_path / "run-x.wandb").touch()
    (tmp_path / "train.py").write_text("print()\n")
    found = document(tmp_path)["skipped"]
    assert (found["count"], found["more"]) == (3, 0)
    assert [f["reason"] for f in found["files"]] == ["JSON events of a kind that is not known", "empty"]
    assert "2 files not read" in call("diagnose", tmp_path).stdout


def test_the_store_can_be_read_by_another_process(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "audit.db"
    assert call("diagnose", folder / "run", "--baseline", folder / "base", "--db", target).exit_code == 0
    with duckdb.connect(str(target), read_only=True) as con:
        assert con.execute("SELECT role FROM runs ORDER BY role").fetchall() == [("baseline",), ("run",)]
        assert con.execute("SELECT count(*) FROM steps WHERE lag_oldest_max IS NOT NULL").fetchall() == [(60,)]
        assert con.execute("SELECT count(*) FROM baseline_steps").fetchall() == [(61,)]


def test_nothing_is_written_into_the_run(folder: Path, tmp_path: Path) -> None:
    def listing() -> list[tuple[str, int]]:
        return sorted((str(p), p.stat().st_mtime_ns) for p in (folder / "run").rglob("*"))

    before = listing()
    call("diagnose", folder / "run", "--baseline", folder / "base", "--db", tmp_path / "a.db", "--json", tmp_path / "a")
    call("sql", folder / "run", "select 1")
    call("signals", folder / "run")
    assert listing() == before


def test_a_read_only_directory_is_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run", rows(range(31)))
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert call("diagnose", tmp_path / "run").exit_code == 0
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


# -- choosing ---------------------------------------------------------------------------------------------------


def test_a_directory_of_two_runs_lists_them_and_takes_one(folder: Path) -> None:
    result = call("diagnose", folder / "two")
    assert "  one: steps 0 to 40" in result.stderr or "  one: steps 1 to 40" in result.stderr
    assert "--run NAME" in result.stderr
    found = document(folder / "two", "--run", "other")
    assert (found["run"]["name"], found["run"]["last_step"]) == ("other", 30)


def test_a_baseline_out_of_a_directory_of_two(folder: Path) -> None:
    found = document(folder / "two", "--run", "other", "--baseline", f"{folder / 'two'}#one")
    assert (found["run"]["name"], [b["name"] for b in found["baselines"]]) == ("other", ["one"])


def test_paths_with_a_hash_and_other_letters(tmp_path: Path) -> None:
    for name in ("a#b", "läuft gut #2"):
        write_run(tmp_path / name, rows(range(31), seed=len(name)))
    first, second = tmp_path / "a#b", tmp_path / "läuft gut #2"
    assert [b["name"] for b in document(first, "--baseline", second)["baselines"]] == ["exp"]
    assert [b["name"] for b in document(second, "--baseline", f"{first}#exp")["baselines"]] == ["exp"]
    assert call("diagnose", first, "--baseline", f"{second}#nobody").exit_code == 2


def test_a_single_file_is_a_run(folder: Path) -> None:
    assert document(folder / "run" / "toy" / "exp.jsonl")["run"]["name"] == "exp"


# -- settings ---------------------------------------------------------------------------------------------------


def test_a_fact_set_by_the_user_reaches_what_follows_from_it(tmp_path: Path) -> None:
    write_run(tmp_path, [row(s) for s in range(1, 31)], None)
    facts = document(tmp_path)["run"]["facts"]
    assert facts["trainer"]["value"] is None
    assert facts["is_async"]["value"] is None
    pairs = ("fact.trainer=sync", "fact.groups_per_step=16", "fact.group_size=4")
    facts = document(tmp_path, *(a for p in pairs for a in ("--set", p)))["run"]["facts"]
    assert facts["trainer"] == {"value": "sync", "reason": "set by the user"}
    assert facts["is_async"]["value"] is False
    assert facts["samples_per_step"]["value"] == 64


def test_a_parameter_moves_a_threshold(folder: Path) -> None:
    def fired(*arguments: str) -> set[str]:
        found = document(folder / "evicting", *arguments)
        return {f["rule"] for f in found["findings"] if f["status"] == "fired"}

    assert "eviction-stale-groups" in fired()
    assert "eviction-stale-groups" not in fired("--set", "eviction-stale-groups.share=0.9")


def test_settings_are_on_record(folder: Path) -> None:
    found = document(folder / "run", "--set", "run_sd=0.2")
    assert found["tool"]["settings"] == {"run_sd": 0.2}
    assert audit(folder / "run", settings=read_settings(["run_sd=0.2"])).document == found


# -- rules ------------------------------------------------------------------------------------------------------


def test_rules_list_and_show() -> None:
    listed = call("rules", "list").stdout
    assert len(listed.splitlines()) > 40
    name = "eviction-stale-groups"
    assert name in listed
    assert call("rules", "show", name).stdout.startswith(f"id: {name}\n")
    unknown = call("rules", "show", "stale-groups")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "did you mean eviction-stale-groups" in unknown.stderr


def test_shipped_rules_pass_their_cases() -> None:
    result = call("rules", "test")
    assert result.exit_code == 0 and ", 0 failed" in result.stdout


def test_a_failing_case_is_1(tmp_path: Path) -> None:
    cases = "cases:\n  - {name: one, measures: {lag_mean: 3}, status: clear}\n"
    (tmp_path / "r.yaml").write_text(BROKEN.format(when="lag_mean > 1") + cases)
    result = call("rules", "test", tmp_path)
    assert result.exit_code == 1
    assert "FAIL broken: one: expected clear, got fired. lag_mean=3" in result.stdout


def test_a_rule_without_cases_is_a_failure_and_a_folder_without_rules_an_error(tmp_path: Path) -> None:
    empty = call("rules", "test", tmp_path)
    assert (empty.exit_code, empty.stdout) == (2, "")
    assert "no rule files" in empty.stderr
    (tmp_path / "r.yaml").write_text(BROKEN.format(when="lag_mean > 1"))
    result = call("rules", "test", tmp_path)
    assert result.exit_code == 1 and "FAIL broken: it has no case" in result.stdout


GOOD = BROKEN.format(when="lag_mean > 1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD.replace("title: broken\n", ""), "'title'"),
        (GOOD + "severty: low\n", "'severty'"),
        (GOOD.replace("high", "severe"), "severity"),
        (GOOD.replace("staleness", "old age"), "cause"),
        (GOOD.replace("step: 2", "step: two"), "step"),
        (GOOD + "params: [1]\n", "params"),
        (GOOD + "params: {x: 3}\n", "'x'"),
        (GOOD + "remedy: none\n", "remedy"),
        (GOOD + "remedy: [{set: a}]\n", "remedy"),
        (GOOD + "cases: {name: one}\n", "cases"),
        (GOOD + "cases: [{name: one, measures: [1], status: clear}]\n", "measures"),
        (GOOD + "cases: [{name: one, measures: {}, status: passed}]\n", "'one'"),
        (GOOD + "refs: text\n", "refs"),
        ("- a list\n", "mapping"),
        ("a: [\n", "YAML"),
        ("1: 2\n" + GOOD, "'1'"),
    ],
)
def test_a_bad_rule_file_names_file_and_field(folder: Path, tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    for arguments in (
        ("rules", "list", "--rules", tmp_path),
        ("rules", "test", tmp_path),
        ("diagnose", folder / "run", "--rules", tmp_path),
    ):
        result = call(*arguments)
        assert result.exit_code == 2, arguments
        assert str(tmp_path / "mine.yaml") in result.stderr and named in result.stderr


def test_a_rule_id_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text(GOOD)
    result = call("rules", "list", "--rules", tmp_path)
    assert result.exit_code == 2 and "already used by" in result.stderr


# -- sql and signals --------------------------------------------------------------------------------------------


def test_sql_formats(folder: Path) -> None:
    query = "select step, lag_oldest_max as lag from steps where step in (0, 1) order by step"
    as_json = call("sql", folder / "run", query, "--format", "json")
    lines = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert lines == [{"step": 0, "lag": None}, {"step": 1, "lag": 1.0}]
    as_csv = call("sql", folder / "run", query, "--format", "csv").stdout
    assert as_csv.split() == ["step,lag", "0,", "1,1.0"]
    assert "step" in call("sql", folder / "run", query).stdout


def test_sql_with_a_baseline(folder: Path) -> None:
    query = "select role, count(distinct step) as n from signals group by role order by role"
    result = call("sql", folder / "run", query, "--baseline", folder / "base", "--format", "json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [{"role": "baseline", "n": 61}, {"role": "run", "n": 61}]


WRITING = ("drop table metrics", "select 1; select 2", "delete from metrics", "copy (select 1) to 'x'", "set threads=1")


@pytest.mark.parametrize("query", ["describe steps", "show tables", "explain select 1", "with a as (select 1) from a"])
def test_what_reads_may_be_asked(folder: Path, query: str) -> None:
    assert call("sql", folder / "run", query).exit_code == 0


def test_sql_over_a_kept_store(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "a.db"
    assert call("diagnose", folder / "run", "--db", kept).exit_code == 0
    before = kept.read_bytes()
    query = "select count(*) as n from metrics"
    fresh = call("sql", folder / "run", query, "--format", "csv")
    assert call("sql", kept, query, "--format", "csv").stdout == fresh.stdout
    assert call("sql", kept, "drop table metrics").exit_code == 2
    assert call("sql", kept, "select * from '/etc/passwd'").exit_code == 2
    assert call("sql", kept, query, "--run", "exp").exit_code == 2
    assert kept.read_bytes() == before


@pytest.mark.parametrize(
    "query", ["select nonsense", "selec 1", "select * from '/etc/passwd'", "", "-- nothing", *WRITING]
)
def test_bad_sql_is_2_on_stderr(folder: Path, query: str) -> None:
    result = call("sql", folder / "run", query)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_signals(folder: Path) -> None:
    result = call("signals", folder / "run")
    assert result.exit_code == 0
    assert "gap_prob_mean" in result.stdout
    assert call("signals", folder / "absent").exit_code == 2


def test_a_narrow_terminal_and_no_colour_break_nothing(folder: Path) -> None:
    environment = {**os.environ, "COLUMNS": "40", "NO_COLOR": "1"}
    for arguments in (["diagnose", str(folder / "evicting"), "-v"], ["signals", str(folder / "run")]):
        assert CliRunner(env=environment).invoke(main, arguments).exit_code == 0


def test_click_is_asked_for_both_streams() -> None:
    """The tests above read stdout and stderr apart."""

    @click.command()
    def both() -> None:
        click.echo("out")
        click.echo("err", err=True)

    result = CliRunner().invoke(both)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


# -- report -----------------------------------------------------------------------------------------------------


FORMS = {"html": "<!doctype html>", "markdown": "<!-- verl-audit report -->", "junit": "<?xml"}


@pytest.mark.parametrize("form", FORMS)
def test_report_of_a_run_and_of_its_kept_audit_are_one(folder: Path, tmp_path: Path, form: str) -> None:
    kept, direct, again = tmp_path / "audit.json", tmp_path / "direct", tmp_path / "again"
    assert call("diagnose", folder / "run", "--baseline", folder / "base", "--json", kept).exit_code == 0
    made = call("report", folder / "run", "--baseline", folder / "base", "--format", form, "-o", direct)
    assert (made.exit_code, made.stdout) == (0, "")
    assert made.stderr == f"{direct}: {len(direct.read_bytes()):,} bytes\n"
    assert call("report", kept, "--format", form, "-o", again).exit_code == 0
    assert direct.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")
    assert direct.read_text(encoding="utf-8").startswith(FORMS[form])
    assert call("report", kept, "--format", form, "-o", again).exit_code == 0  # over one of its own


def test_diagnose_html_is_the_report(folder: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "page.html", tmp_path / "other.html"
    result = call("diagnose", folder / "run", "--html", page)
    assert result.exit_code == 0 and "The four steps" in result.output
    assert call("report", folder / "run", "-o", other).exit_code == 0
    assert page.read_text(encoding="utf-8") == other.read_text(encoding="utf-8")


def test_report_to_standard_output(folder: Path) -> None:
    assert call("report", folder / "run", "--format", "markdown").stdout.startswith(FORMS["markdown"])
    assert call("report", folder / "run", "--format", "github").stdout.startswith("::notice title=verl-audit")


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "run"),
        ("report", "run", "--format", "github", "-o", "x"),
        ("report", "absent", "-o", "x.html"),
        ("report", "audit.json", "-o", "x.html", "--baseline", "base"),
        ("report", "audit.json", "-o", "x.html", "--set", "run_sd=0.2"),
        ("report", "old.json", "-o", "x.html"),
        ("report", "torn.json", "-o", "x.html"),
        ("report", "lacking.json", "-o", "x.html"),
        ("diagnose", "run", "--html", "same", "--json", "same"),
    ],
    ids=" ".join,
)
def test_report_refuses_with_2(folder: Path, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "audit.json").exists():
        call("diagnose", "run", "--json", "audit.json")
        whole = (folder / "audit.json").read_text(encoding="utf-8")
        (folder / "old.json").write_text(whole.replace('"1.0"', '"0.1"', 1), encoding="utf-8")
        (folder / "torn.json").write_text(whole[:900], encoding="utf-8")
        lacking = {k: v for k, v in json.loads(whole).items() if k != "findings"}
        (folder / "lacking.json").write_text(json.dumps(lacking), encoding="utf-8")
    result = call(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("verl-audit: ")
    assert not Path("x").exists() and not Path("x.html").exists()


@pytest.mark.parametrize("form", FORMS)
def test_report_keeps_a_file_that_is_not_its_own(folder: Path, tmp_path: Path, form: str) -> None:
    precious = tmp_path / "notes"
    precious.write_text("<!doctype html><title>mine</title>", encoding="utf-8")
    result = call("report", folder / "run", "--format", form, "-o", precious)
    assert result.exit_code == 2 and "give another name" in result.stderr
    assert precious.read_text(encoding="utf-8") == "<!doctype html><title>mine</title>"


def test_report_with_plotly_and_text(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call("report", folder / "run", "-o", page, "--interactive", "--include-text").exit_code == 0
    assert 1_000_000 < page.stat().st_size < 1_500_000
