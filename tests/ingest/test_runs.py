"""Which sources are one run."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_audit.ingest.model import ConfigFound, Format, Identity, Parsed
from verl_audit.ingest.runs import Run, group_runs

ROOT = Path("/runs")


def parsed(
    name: str, form: Format = "verl_jsonl", *lives: Sequence[int], seed: float = 0.0, digits: int = 12, **more: str
) -> Parsed:
    """A source whose values depend on seed, step and key only."""
    found = Parsed(ROOT / name, form, identity=Identity(**more))  # type: ignore[arg-type]
    for number, life in enumerate(lives):
        for step in life:
            found.metrics.next_record(step)
            for key in ("a", "b", "c"):
                value = math.sin(1 + step + 10 * ord(key) + 100 * (seed + number))
                found.metrics.add(key, round(value, digits))
    if digits == 3:
        found.metrics.mark_rounded()
    return found


def groups(runs: Sequence[Run], sources: Sequence[Parsed]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset((sources[i].path.name, s) for i, s in run.units) for run in runs}


def test_copies_of_one_run_are_joined_by_what_they_hold() -> None:
    sources = [
        parsed("x.jsonl", "verl_jsonl", range(1, 9), experiment="x", project="p"),
        parsed("deep/er/console.log", "verl_console", range(1, 9), digits=3),
        parsed("tb/events", "tensorboard", range(1, 9)),
    ]
    (run,) = group_runs(sources, ROOT)
    assert (run.name, len(run.units)) == ("x", 3)
    assert any("hold the same values" in why for why in run.because)


def test_other_values_are_another_run_even_under_one_name() -> None:
    sources = [
        parsed("a/x.jsonl", "verl_jsonl", range(1, 9)),
        parsed("b/x.jsonl", "verl_jsonl", range(1, 9), seed=7),
    ]
    assert len(group_runs(sources, ROOT)) == 2


def test_too_few_common_points_prove_nothing() -> None:
    sources = [parsed("a/x.jsonl", "verl_jsonl", range(1, 4)), parsed("b/y.jsonl", "verl_jsonl", range(1, 4))]
    assert len(group_runs(sources, ROOT)) == 2


def test_one_announced_name_joins() -> None:
    sources = [
        parsed("w/run.wandb", "wandb", range(1, 4), project="p", experiment="e"),
        parsed("t/events", "tensorboard", range(50, 60), project="p", experiment="e"),
        parsed("u/run.wandb", "wandb", range(90, 95), project="p", experiment="other"),
    ]
    runs = group_runs(sources, ROOT)
    assert [run.name for run in runs] == ["e", "other"]
    assert runs[0].because == ("both are named p/e",)


def test_one_tracker_id_joins_the_files_of_a_resumed_run() -> None:
    sources = [
        parsed("w1/run.wandb", "wandb", range(1, 20), run_id="abc"),
        parsed("w2/run.wandb", "wandb", range(10, 30), seed=3, run_id="abc"),
    ]
    assert len(group_runs(sources, ROOT)) == 1


def test_several_runs_in_one_console_go_to_their_own_logs() -> None:
    console = parsed("console.log", "verl_console", range(1, 9), range(1, 9), digits=3)
    first = parsed("a/one.jsonl", "verl_jsonl", range(1, 9), experiment="one")
    second = parsed("b/two.jsonl", "verl_jsonl", range(1, 9), seed=1, experiment="two")
    sources = [console, first, second]
    assert groups(group_runs(sources, ROOT), sources) == {
        frozenset({("console.log", 0), ("one.jsonl", 0)}),
        frozenset({("console.log", 1), ("two.jsonl", 0)}),
    }


def test_a_resumed_console_alone_is_one_run() -> None:
    sources = [parsed("console.log", "verl_console", range(1, 30), range(20, 40), digits=3)]
    (run,) = group_runs(sources, ROOT)
    assert run.units == ((0, 0), (0, 1))


def test_a_configuration_goes_to_the_only_run_below_it() -> None:
    hydra = Parsed(ROOT / "x" / ".hydra" / "config.yaml", "hydra", configs=[ConfigFound({}, "hydra")])
    sources = [hydra, parsed("x/p/x.jsonl", "verl_jsonl", range(1, 9))]
    (run,) = group_runs(sources, ROOT)
    assert len(run.units) == 2


def test_a_configuration_above_two_runs_belongs_to_neither() -> None:
    hydra = Parsed(ROOT / ".hydra" / "config.yaml", "hydra", configs=[ConfigFound({}, "hydra")])
    sources = [
        hydra,
        parsed("x/x.jsonl", "verl_jsonl", range(1, 9)),
        parsed("y/y.jsonl", "verl_jsonl", range(1, 9), seed=5),
    ]
    assert frozenset({("config.yaml", 0)}) in groups(group_runs(sources, ROOT), sources)


def test_two_file_logs_in_one_directory_are_two_runs() -> None:
    sources = [
        parsed("p/x.jsonl", "verl_jsonl", range(1, 9), project="p", experiment="x"),
        parsed("p/y.jsonl", "verl_jsonl", range(1, 9), seed=2, project="p", experiment="y"),
    ]
    assert [run.name for run in group_runs(sources, ROOT)] == ["x", "y"]


def test_lone_logs_side_by_side_are_not_joined_for_want_of_a_contradiction() -> None:
    sources = [parsed("p/x.jsonl", "verl_jsonl", range(1, 9)), parsed("p/events", "tensorboard", range(101, 109))]
    assert len(group_runs(sources, ROOT)) == 2


def test_the_console_of_a_wandb_directory_belongs_to_its_run() -> None:
    home = "wandb/run-20260101_000000-abc"
    sources = [
        parsed(f"{home}/run-abc.wandb", "wandb", [], run_id="abc", experiment="e"),
        parsed(f"{home}/files/output.log", "verl_console", range(2), digits=3),
    ]
    (run,) = group_runs(sources, ROOT)
    assert run.name == "e"


def test_a_run_that_names_itself_is_not_swallowed_by_its_neighbour() -> None:
    died = Parsed(ROOT / "new" / "console.log", "verl_console", identity=Identity(project="p", experiment="new"))
    sources = [parsed("old/console.log", "verl_console", range(1, 9), project="p", experiment="old"), died]
    assert sorted(run.name for run in group_runs(sources, ROOT)) == ["new", "old"]


def test_a_moved_file_log_keeps_the_configuration_near_it() -> None:
    hydra = Parsed(ROOT / ".hydra" / "config.yaml", "hydra", identity=Identity(project="p", experiment="named"))
    sources = [hydra, parsed("metrics.jsonl", "verl_jsonl", range(1, 9), project="runs", experiment="metrics")]
    assert len(group_runs(sources, ROOT)) == 1


def test_logs_side_by_side_that_contradict_each_other_are_two_runs() -> None:
    sources = [
        parsed("p/x.jsonl", "verl_jsonl", range(1, 9)),
        parsed("p/events", "tensorboard", range(1, 9), seed=4),
    ]
    assert len(group_runs(sources, ROOT)) == 2


def test_names_are_unique() -> None:
    sources = [parsed(f"{i}/x.jsonl", "verl_jsonl", range(1, 9), seed=i, experiment="x") for i in range(3)]
    assert [run.name for run in group_runs(sources, ROOT)] == ["x", "x-2", "x-3"]


def test_nothing_is_no_run() -> None:
    assert group_runs([], ROOT) == ()


MIXED = (
    parsed("c.log", "verl_console", range(1, 9), range(1, 9), digits=3),
    parsed("a/one.jsonl", "verl_jsonl", range(1, 9), experiment="one"),
    parsed("b/two.jsonl", "verl_jsonl", range(1, 9), seed=1, experiment="two"),
    parsed("t/events", "tensorboard", range(1, 9), seed=9),
    Parsed(ROOT / "t" / ".hydra" / "config.yaml", "hydra"),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(MIXED)))))
def test_the_order_of_the_input_changes_nothing(order: tuple[int, ...]) -> None:
    sources = [MIXED[i] for i in order]
    assert groups(group_runs(sources, ROOT), sources) == groups(group_runs(MIXED, ROOT), MIXED)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["verl_jsonl", "wandb"]))))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_every_unit_is_in_exactly_one_run(spec: list[tuple[str, int, Format]]) -> None:
    sources = [
        parsed(f"{folder}/{i}", form, range(1, 8), range(3, 9), seed=seed)
        for i, (folder, seed, form) in enumerate(spec)
    ]
    runs = group_runs(sources, ROOT)
    units = [unit for run in runs for unit in run.units]
    assert sorted(units) == [(i, s) for i in range(len(sources)) for s in (0, 1)]
    assert len({run.name for run in runs}) == len(runs)


def test_the_reason_does_not_depend_on_the_hash_seed() -> None:
    code = """
from pathlib import Path
from verl_audit.ingest.model import Identity, Parsed
from verl_audit.ingest.runs import group_runs
named = Identity(project="p", experiment="e", run_id="abc")
print(group_runs([Parsed(Path(f"/r/{i}"), "wandb", identity=named) for i in range(2)], Path("/r"))[0].because)
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3", "4", "5", "6")
    }
    assert len(said) == 1
