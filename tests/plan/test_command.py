"""`verl-audit plan`: on numbers and on real runs, its outputs, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from tests.synthetic import row, write_run
from verl_audit.cli import main
from verl_audit.plan.page import CONFIG

REAL = Path(__file__).parents[2] / "fixtures" / "real"
NUMBERS = ("--cards", "128", "--baseline-cards", "32", "--rollout", "3", "--train", "1")


def call(*arguments: object, columns: int = 80) -> Result:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def splits(result: Result) -> dict[str, list[str]]:
    """Rows of the table of splits, by split."""
    rows = re.findall(r"^ +(\d+:\d+\*?) +(.*)$", result.stdout.partition("Shortlist")[0], re.MULTILINE)
    return {name: cells.split() for name, cells in rows}


def test_numbers_of_the_classic_example() -> None:
    result = call(*NUMBERS, "--all")
    assert (result.exit_code, result.stderr) == (0, "")
    found = splits(result)
    assert len(found) == 15
    for name, none, full in (("32:96", "0.50", "0.25"), ("40:88", "0.47", "0.27"), ("48:80", "0.47", "0.30")):
        assert found[name][3:5] == [none, full]
    assert found["32:96"][5] == "1.00", "per card"
    assert re.search(r"^ 1\. +32:96", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lines = call(*NUMBERS, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        ("async_mild", ()),
        ("async_mild", ("--cards", 16, "--mode", "fully_async")),
        ("async_mild", ("--baseline", REAL / "sync_baseline")),
        ("sync_baseline", ("--cards", 8)),
        ("sync_baseline", ("--cards", 8, "--mode", "one_step_off")),
        ("async_drop_bias", ()),
    ],
    ids=str,
)
def test_real_runs(run: str, arguments: tuple[object, ...]) -> None:
    result = call(REAL / run, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("Profile", "Splits", "Shortlist", "Test plan", "Record", "Not determined by the profile"):
        assert part in result.stdout
    assert "nan" not in result.stdout and "inf" not in result.stdout


def test_a_run_that_cannot_be_split_says_so() -> None:
    result = call(REAL / "sync_baseline")
    assert result.exit_code == 2
    assert "give --cards" in result.stderr


def test_the_same_input_gives_the_same_bytes() -> None:
    first, second = (call(*NUMBERS, "--json", "-").stdout for _ in range(2))
    assert first == second
    found = json.loads(first)
    assert [s["train_cards"] for s in found["splits"]] == list(range(8, 128, 8))
    assert found["shortlist"][0]["split"]["train_cards"] == 32
    assert found["test_plan"][0]["steps"] >= 20
    assert {u["what"] for u in found["profile"]["not_determined"]} >= {"weight-sync time", "spread of durations"}


def test_files(tmp_path: Path) -> None:
    targets = ("--csv", tmp_path / "grid.csv", "--json", tmp_path / "plan.json", "--figures", tmp_path / "figures")
    for _ in range(2):  # its own files are written again
        assert call(*NUMBERS, *targets).exit_code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "grid.csv").read_text())))
    assert len(rows) == 15 * 5 * 10
    assert {r["waits_for"] for r in rows} == {"rollout", "trainer", "batches", "admission"}
    for name in ("step-time", "per-card", "timeline"):
        text = (tmp_path / "figures" / f"{name}.svg").read_text()
        ElementTree.fromstring(text)
        assert "nan" not in text and not re.search(r"(?:href|src|url)\b", text)
        assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}


def test_html_loads_nothing_and_sends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    target = tmp_path / "plan.html"
    assert call(*NUMBERS, "--html", target).exit_code == 0
    text = target.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=", text)
    buttons = {name for group in CONFIG["modeBarButtons"] for name in group}  # type: ignore[attr-defined]
    assert buttons == {"toImage", "zoom2d", "pan2d", "resetScale2d"}


@pytest.mark.parametrize("option", ["--csv", "--json", "--html"])
def test_no_log_is_written_over(option: str, tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text("step:1 - x:1\n")
    result = call(*NUMBERS, option, log)
    assert result.exit_code == 2 and "no earlier plan wrote it" in result.stderr
    assert log.read_text() == "step:1 - x:1\n"


def test_budgets_that_nothing_keeps_are_named() -> None:
    result = call(*NUMBERS, "--sync", "400", "--sync-budget", "0.01", "--k", "1,2")
    assert result.exit_code == 0
    assert "No setting keeps the budget (a sync share of 1%)" in result.stdout


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n200\n\n900\n")
    assert "lengths: lengths.txt" in call(*NUMBERS, "--lengths", file).stdout
    file.write_text("100\nabc\n")
    result = call(*NUMBERS, "--lengths", file)
    assert result.exit_code == 2 and f"{file}:2: 'abc' is no length" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--rollout", "3"),
        ("absent", "--cards", "8"),
        (*NUMBERS, "--k", "0"),
        (*NUMBERS, "--k", "1.5"),
        (*NUMBERS, "--k", "a"),
        (*NUMBERS, "--theta", "-1"),
        (*NUMBERS, "--theta", "nan"),
        (*NUMBERS, "--rollout", "nan"),
        (*NUMBERS, "--train-multiple", "200"),
        (*NUMBERS, "--cap", "4"),
        (*NUMBERS, "--lengths", "absent.txt"),
        (*NUMBERS, "--mode", "sync"),
        (*NUMBERS, "--cards", "1"),
        (*NUMBERS, "--set", "fact.trainer=sync"),
        (*NUMBERS, "--cards", "100000", "--train-multiple", "1"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_2_and_said_on_stderr(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr and "Traceback" not in result.output


def test_a_short_run_of_wild_steps(tmp_path: Path) -> None:
    wild = [
        row(n, lag=1.0, extra={"timing_s/step": 2.0 + 3.0**n % 97, "timing_s/gen": 1.0 + 3.0**n % 97 * 0.9})
        for n in range(1, 13)
    ]
    run = write_run(tmp_path, wild, "separate_async")
    result = call(run, "--train-cards", 8, "--rollout-cards", 8)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "nan" not in result.stdout and "inf" not in result.stdout


def test_a_very_large_machine() -> None:
    result = call(*NUMBERS, "--cards", 16384)
    assert result.exit_code == 0
    assert set(splits(result)) and all(int(name.partition(":")[0]) % 128 == 0 for name in splits(result))
    assert "512 trajectories an update are few for 16384 cards" in " ".join(result.stdout.split())


def test_without_simulation_it_says_so() -> None:
    result = call(*NUMBERS, "--no-simulation")
    assert result.exit_code == 0 and "simulated (seeded)" not in result.stdout
