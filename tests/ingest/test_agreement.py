"""The same runs as seven trackers kept them: what each holds, and what each cannot say (docs/formats.md)."""

from __future__ import annotations

import math
import struct
from functools import cache
from pathlib import Path

import pytest

from tests.ingest.writers import REAL_RUNS
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import KINDS, Parsed
from verl_audit.ingest.read import read_all
from verl_audit.ingest.runs import Run, group_runs

ROOT = REAL_RUNS / "mismatch_probe"
pytestmark = pytest.mark.skipif(not ROOT.exists(), reason="real runs are not here")

Points = dict[tuple[str, int], tuple[float, str]]
ALL = {"verl_console", "verl_jsonl", "tensorboard", "trackio"}
FORMATS = {
    "fp32": ALL,
    "bf16": ALL | {"wandb", "wandb_output", "swanlab", "swanlab_output"},
    "fp8": ALL | {"wandb", "wandb_output", "swanlab", "swanlab_output", "mlflow_files"},
    "int8": ALL,
    "int4": ALL,
}


@cache
def everything() -> tuple[tuple[Parsed, ...], dict[str, Run]]:
    parsed = tuple(read_all(discover([ROOT])))
    return parsed, {run.name: run for run in group_runs(parsed, ROOT)}


def points(run: Run) -> dict[str, Points]:
    """Per format of a run: value and kind of each key and step."""
    parsed, _ = everything()
    result: dict[str, Points] = {}
    for index, segment in run.units:
        m = parsed[index].metrics
        mine = result.setdefault(parsed[index].format, {})
        for key, seg, step, value, kind in zip(m.key_id, m.segment, m.step, m.value, m.kind_id, strict=True):
            if seg == segment:
                mine[m.keys[key], step] = (value, KINDS[kind])
    return result


def float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def test_seven_copies_are_one_run() -> None:
    _, runs = everything()
    assert {name: set(points(run)) for name, run in runs.items()} == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_what_the_console_printed(name: str) -> None:
    copies = points(everything()[1][name])
    console = copies["verl_console"]
    assert len(console) == 545
    copies.pop("mlflow_files", None)
    for form, copy in copies.items():
        if form == "swanlab_output":  # SwanLab cuts console lines
            assert copy.keys() < console.keys()
        else:
            assert copy.keys() == console.keys(), form
        for point, (value, kind) in copy.items():
            truth, true_kind = console[point]
            if form == "tensorboard" and true_kind == "finite":
                assert value == float32(truth)
            elif form == "verl_jsonl" and true_kind != "finite":
                assert kind == "nonfinite_unknown"
                assert math.isnan(value)
            else:
                assert same(value, truth), (form, point)
                assert kind == true_kind


def test_mlflow_kept_another_execution_of_that_name() -> None:
    """MLflow refused the folder in these runs (console.log says so): what lies there is a run made later."""
    run = everything()[1]["fp8"]
    copies = points(run)
    console, mlflow = copies["verl_console"], copies["mlflow_files"]
    assert mlflow.keys() == console.keys()
    assert {p for p, (_, kind) in mlflow.items() if kind != "finite"} == {
        p for p, (_, kind) in console.items() if kind != "finite"
    }
    assert sum(value != console[p][0] for p, (value, kind) in mlflow.items() if kind == "finite") > 300
    assert any("values differ" in why for why in run.because)


@pytest.mark.parametrize("name", FORMATS)
def test_the_edge_cases_are_there(name: str) -> None:
    kinds = [kind for _, kind in points(everything()[1][name])["verl_console"].values()]
    assert "nan" in kinds
    assert "inf" in kinds


def table() -> str:
    """The agreement table of docs/formats.md."""
    lines = [
        "| format | runs | values | same | as float32 | NaN | infinite | NaN or infinite | other value | not there |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    counted: dict[str, list[int]] = {}
    for run in everything()[1].values():
        copies = points(run)
        for form, copy in copies.items():
            row = counted.setdefault(form, [0] * 9)
            row[0] += 1
            row[1] += len(copy)
            row[8] += len(copies["verl_console"]) - len(copy)
            for point, (value, kind) in copy.items():
                truth = copies["verl_console"][point][0]
                if kind == "finite":
                    row[2 if value == truth else 3 if value == float32(truth) else 7] += 1
                else:
                    row[{"nan": 4, "inf": 5, "nonfinite_unknown": 6}[kind]] += 1
    lines += [f"| `{form}` | {' | '.join(f'{n:,}' for n in row)} |" for form, row in counted.items()]
    return "\n".join(lines)


def test_the_table_in_the_docs_is_measured() -> None:
    docs = Path(__file__).parents[2] / "docs" / "formats.md"
    assert table() in docs.read_text(encoding="utf-8")
