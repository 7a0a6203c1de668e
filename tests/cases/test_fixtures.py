"""Every fixture gives the verdict that its expected.json states."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verl_audit import NothingToJudge, audit
from verl_audit.cli import main
from verl_audit.reference import scenario

ROOT = Path(__file__).parents[2]
FIXTURES = sorted(p.parent for p in (ROOT / "fixtures").rglob("expected.json"))
SEVERE = ("medium", "high", "critical")


def paths(argv: list[str]) -> tuple[Path, list[Path]]:
    """The run and its baselines of a `diagnose` command."""
    assert argv[0] == "diagnose"
    assert all(option == "--baseline" for option in argv[2::2])
    return ROOT / argv[1], [ROOT / value for value in argv[3::2]]


def said(document: dict[str, Any]) -> str:
    """Everything the document states, as against what it lists."""
    fired = [f for f in document["findings"] if f["status"] == "fired"]
    parts = [document["verdict"]["sentence"], *(c["because"] for c in document["causes"].values())]
    parts += [f"{f['title']} {f['explain']}" for f in fired] + [json.dumps(document["run"]["last_error"])]
    return "\n".join(parts)


def claimed(document: dict[str, Any]) -> set[str]:
    """Causes that the document blames or suspects."""
    verdict = document["verdict"]
    fired = {f["cause"] for f in document["findings"] if f["status"] == "fired" and f["severity"] in SEVERE}
    return {*verdict["causes"], *verdict["risks"], *fired}


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda p: p.name)
def test_fixture(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    run, baselines = paths(expected["argv"])
    if expected["exit_code"] == 3:
        with pytest.raises(NothingToJudge) as caught:
            audit(run, baselines=baselines)
        assert all(text in str(caught.value) for text in expected["must_cite"])
        return
    document = audit(run, baselines=baselines).document
    verdict = document["verdict"]
    assert (verdict["outcome"], verdict["causes"], verdict["risks"]) == (
        expected["outcome"],
        expected["causes"],
        expected["risks"],
    )
    assert {c for c, judged in document["causes"].items() if judged["status"] == "cleared"} >= set(expected["cleared"])
    assert set(verdict["missing"]) >= set(expected["missing"])
    assert [text for text in expected["must_cite"] if text not in said(document)] == []
    assert claimed(document) & set(expected["must_not_claim"]) == set()
    assert [f["rule"] for f in document["findings"] if f["status"] == "error"] == []


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda p: p.name)
def test_exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, [*expected["argv"], "--json", "-"])
    assert result.exit_code == expected["exit_code"], result.output


def test_a_run_without_a_step_clears_nothing() -> None:
    """No training step, no measurement: a green tick there would stand over an unread log."""
    for name in ("real/crash_hybrid_off", "public/maze_crash"):
        document = audit(ROOT / "fixtures" / name).document
        assert {c: j["because"] for c, j in document["causes"].items() if j["status"] == "cleared"} == {}, name


def test_every_format_of_one_run_gives_the_same_signals_and_verdict() -> None:
    probe = ROOT / "fixtures" / "real" / "probe_bf16"
    copies = {name: audit(probe / name) for name in ("console.log", "file_logger", "tensorboard", "wandb")}
    query = "SELECT signal, coalesce(label, ''), step, kind, value FROM signals ORDER BY ALL"
    want = copies["file_logger"].sql(query)
    assert len(want) > 150
    for name, got in copies.items():
        rows = got.sql(query)
        assert [r[:3] for r in rows] == [r[:3] for r in want], name
        for one, other in zip(rows, want, strict=True):
            same = one[4] == pytest.approx(other[4], rel=1e-6, abs=1e-12)
            assert same or not (isfinite(one[4]) or isfinite(other[4])), (
                name,
                one,
                other,
            )  # null stands for any of them
        assert got.document["verdict"] == copies["file_logger"].document["verdict"], name


def test_nonfinite_edge_cases_of_the_probe_are_kept_as_such() -> None:
    found = audit(ROOT / "fixtures" / "real" / "probe_bf16" / "file_logger")
    kinds = dict(found.sql("SELECT kind, count(*) FROM metrics WHERE step >= 11 GROUP BY kind"))
    assert set(kinds) - {"finite"}
    assert found.sql("SELECT count(*) FROM metrics WHERE step < 11 AND kind <> 'finite'") == [(0,)]


@pytest.mark.parametrize("folder", [f for f in FIXTURES if f.parent.name == "simulated"], ids=lambda p: p.name)
def test_what_is_expected_of_a_simulated_run_was_at_work(folder: Path) -> None:
    expected, truth = json.loads((folder / "expected.json").read_text(encoding="utf-8")), scenario(folder.name)
    assert set(expected["causes"]) <= {*truth.causes}
    assert set(truth.causes) <= {*expected["causes"], *expected["risks"]}
    assert (expected["outcome"] == "other") == bool(truth.other)
