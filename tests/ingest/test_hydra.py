from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ingest.writers import REAL_RUNS, problem_kinds
from verl_audit.ingest import hydra
from verl_audit.ingest.model import Parsed


def parse(tmp_path: Path, text: str) -> Parsed:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return hydra.read(path)[0]


def tree(tmp_path: Path, text: str) -> Any:
    return parse(tmp_path, text).configs[0].tree


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_run() -> None:
    (parsed,) = hydra.read(REAL_RUNS / "sync_baseline/hydra/.hydra")
    (config,) = parsed.configs
    assert not parsed.problems
    assert (parsed.identity.project, parsed.identity.experiment) == ("toy_map", "sync_baseline")
    assert config.overrides[0] == "algorithm.adv_estimator=grpo"
    parts = config.tree["actor_rollout_ref"]
    assert parts["ref"]["strategy"] == parts["actor"]["strategy"] == "fsdp2"
    assert parts["actor"]["checkpoint"]["load_contents"] == ["model", "optimizer", "extra"]
    assert parts["actor"]["rollout_n"] == parts["rollout"]["n"] == 6
    assert parts["actor"]["optim"]["lr"] == 1e-4


def test_references(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        """
a: {b: 3, c: [x, {d: 7}], e: "${a.b}", up: "${.b}"}
whole: ${a}
number: ${a.e}
text: "run-${a.b}-${missing}"
listed: ${a.c.1.d}
bracket: ${a.c[1].d}
env: ${oc.env:HOME}
lost: ${no.such.key}
loop1: ${loop2}
loop2: ${loop1}
inner: {deep: {x: "${..near}"}, near: 5}
""",
    )
    assert found["number"] == found["a"]["e"] == found["a"]["up"] == 3
    assert found["text"] == "run-3-${missing}"
    assert found["listed"] == found["bracket"] == 7
    assert found["env"] == "${oc.env:HOME}"
    assert found["lost"] == "${no.such.key}"
    assert found["loop1"] == "${loop2}"
    assert found["inner"]["deep"]["x"] == 5


def test_selections_take_the_value_or_the_default(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        """
a: {b: 3, none: null, near: "${oc.select:.b,1}"}
there: ${oc.select:a.b,7}
null_there: ${oc.select:a.none,7}
default: "${oc.select:a.no,7}"
nothing: ${oc.select:a.no}
flag: "${oc.select:no.such.key,False}"
listed: "${oc.select:a.no,[]}"
mapping: "${oc.select:a.no,{}}"
second: "${oc.select:a.no,${oc.select:a.b,null}}"
by: ${there}
env: "${oc.select:a.no,${oc.env:HOME}}"
torn: "${oc.select:a.no,[}"
""",
    )
    assert (found["there"], found["null_there"], found["default"], found["nothing"]) == (3, None, 7, None)
    assert (found["flag"], found["listed"], found["mapping"], found["second"]) == (False, [], {}, 3)
    assert found["by"] == found["a"]["near"] == 3
    assert found["env"] == "${oc.select:a.no,${oc.env:HOME}}"
    assert found["torn"] == "${oc.select:a.no,[}"


def test_numbers_and_dates_as_omegaconf_reads_them(tmp_path: Path) -> None:
    found = tree(tmp_path, "lr: 1e-06\nx: 1.5e3\ny: .5\nday: 2025-01-02\nn: 3\nt: true\nz: null\ni: .inf\ns: '1e-6'\n")
    assert found["lr"] == 1e-6
    assert (found["x"], found["y"], found["n"], found["t"], found["z"]) == (1500.0, 0.5, 3, True, None)
    assert found["day"] == "2025-01-02"
    assert found["s"] == "1e-6"


def test_tracker_config_is_unwrapped(tmp_path: Path) -> None:
    text = "_wandb: {value: {}}\ntrainer: {desc: null, value: {project_name: p, experiment_name: e}}\n"
    parsed = parse(tmp_path, text)
    assert parsed.configs[0].origin == "wandb"
    assert parsed.configs[0].tree == {"trainer": {"project_name": "p", "experiment_name": "e"}}
    assert parsed.identity.experiment == "e"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a: [1, 2", "bad_yaml"),
        ("- 1\n- 2\n", "not_a_config"),
        ("a: &x [1]\nb: *x\n", "bad_yaml"),
        ("a: !!python/object/apply:os.system [ls]\n", "bad_yaml"),
        ("a: " + "[" * 3000, "bad_yaml"),
        ("\x00\x01", "bad_yaml"),
    ],
)
def test_bad_files_are_problems(tmp_path: Path, text: str, kind: str) -> None:
    parsed = parse(tmp_path, text)
    assert not parsed.configs
    assert problem_kinds(parsed) == [kind]


def test_missing_file(tmp_path: Path) -> None:
    assert problem_kinds(hydra.read(tmp_path / "config.yaml")[0]) == ["unreadable"]


def test_overrides_belong_to_a_hydra_directory_only(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    for place in (tmp_path, tmp_path / ".hydra"):
        (place / "config.yaml").write_text("trainer: {project_name: p}\n")
        (place / "overrides.yaml").write_text("- a.b=1\n- +c=2\n")
    assert hydra.read(tmp_path / ".hydra")[0].configs[0].overrides == ("a.b=1", "+c=2")
    assert hydra.read(tmp_path / "config.yaml")[0].configs[0].overrides == ()
