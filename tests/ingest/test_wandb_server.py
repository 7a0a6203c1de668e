"""A run on a server, through a stand-in for wandb's client."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from tests import synthetic
from tests.ingest.writers import table
from verl_audit import AuditError, audit
from verl_audit.cli import main
from verl_audit.ingest.wandb_server import INSTALL, Address, address, read

WHERE = Address(None, "team", "toy", "abc123")
ROWS: list[dict[str, Any]] = [
    {"_step": step, "_timestamp": 1e9 + step, "_runtime": 3, **data}
    for step, data in (synthetic.row(s, lag=1.0) for s in range(1, 31))
]


class Run:
    name = "separate_async"

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.config = {"_wandb": {}, "trainer": {"total_epochs": 3}}

    def scan_history(self) -> Iterator[dict[str, Any]]:
        yield from self.rows


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `wandb` whose runs hold `rows`; `asked` notes what it was asked for."""
    module: Any = ModuleType("wandb")
    module.rows, module.asked = ROWS, []

    class Api:
        def __init__(self, **given: Any) -> None:
            module.asked.append(given)

        def run(self, path: str) -> Run:
            module.asked.append(path)
            if path.endswith("gone"):
                raise ValueError("Could not find run <Run team/toy/gone (not found)>")
            return Run(module.rows)

    module.Api = Api
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("wandb:team/toy/abc123", None),
        ("https://wandb.ai/team/toy/runs/abc123", "https://api.wandb.ai"),
        ("https:/wandb.ai/team/toy/runs/abc123/overview?nw=x", "https://api.wandb.ai"),
        ("http://wandb.example.org:8080/team/toy/runs/abc123?workspace=u", "http://wandb.example.org:8080"),
    ],
)
def test_addresses(text: str, server: str | None) -> None:
    assert address(text) == address(str(Path(text))) == Address(server, "team", "toy", "abc123")


@pytest.mark.parametrize("text", ["run_dir", "wandb/run-1", "wandb:team/toy", "https://wandb.ai/team/toy", "C:/a/b/c"])
def test_other_paths_are_no_address(text: str) -> None:
    assert address(text) is None


def test_rows_as_a_wandb_file_gives_them(client: Any) -> None:
    client.rows = [
        {"_step": 0, "a": 1, "b": "NaN", "c": None, "text": "x", "n": {"x": 2.5}, "img": {"_type": "image", "w": 3}},
        {"_step": 4, "a": "-Infinity", "yes": True},
        {"a": 1.0},
    ]
    (parsed,) = read(WHERE, Path("wandb:team/toy/abc123"))
    found = table(parsed)
    assert math.isnan(found.pop(("b", 0)))
    assert found == {("a", 0): 1.0, ("n.x", 0): 2.5, ("a", 4): -math.inf, ("yes", 4): 1.0}
    assert [p.kind for p in parsed.problems] == ["no_step"]
    assert parsed.identity.run_id == "abc123" and dict(parsed.configs[0].tree) == {"trainer": {"total_epochs": 3}}


def test_a_run_is_audited_by_its_address(client: Any) -> None:
    found = audit("https://wandb.example.org/team/toy/runs/abc123")
    assert found.document["run"]["steps_logged"] == 30
    assert client.asked == [{"overrides": {"base_url": "https://wandb.example.org"}}, "team/toy/abc123"]
    assert [(s["path"], s["format"]) for s in found.document["sources"]] == [("abc123", "wandb")]
    found.store.close()


def test_the_key_is_left_to_the_client(client: Any) -> None:
    read(WHERE, Path("x"))
    assert client.asked[0] == {}


def test_what_the_server_says_is_the_error(client: Any) -> None:
    with pytest.raises(AuditError, match="wandb team/toy/gone: Could not find run"):
        audit("wandb:team/toy/gone")


def test_without_the_extra_the_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = CliRunner().invoke(main, ["diagnose", "wandb:team/toy/abc123"])
    assert done.exit_code == 2 and INSTALL in done.stderr


def test_a_directory_of_that_name_is_read(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb:a" / "b" / "c").mkdir(parents=True)
    with pytest.raises(AuditError, match="holds no metrics"):
        audit("wandb:a/b/c")
    assert client.asked == []
