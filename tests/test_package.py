"""The package as users get it: a light import, help for each command, the same bytes twice, data files shipped."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner

import verl_audit
from verl_audit import audit
from verl_audit.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

ROOT = Path(__file__).parents[1]
REAL = ROOT / "fixtures" / "real"
SCHEMA = json.loads((ROOT / "docs" / "audit.schema.json").read_text(encoding="utf-8"))
HEAVY = ("polars", "duckdb", "pyarrow", "rich", "yaml", "numpy", "click")


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_import_is_light() -> None:
    loaded = python("import sys, verl_audit; print(*sys.modules)").split()
    assert "verl_audit" in loaded
    assert set(HEAVY) & set(loaded) == set()


def test_public_names_resolve() -> None:
    for name in verl_audit.__all__:
        assert getattr(verl_audit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = verl_audit.nonsense


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group below one, as words."""
    found = [path]
    for name, command in group.commands.items():
        found += commands(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


@pytest.mark.parametrize("words", commands(main), ids=" ".join)
def test_help(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")
    assert len(result.output.splitlines()) > 4


def test_every_option_has_help() -> None:
    for name, command in main.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name != "form":
                assert parameter.help, f"{name} {parameter.opts}"


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"verl-audit, version {verl_audit.__version__}\n"


def test_audit_json_is_the_same_twice() -> None:
    """Several times in two processes, since the order of an unordered query differs only now and then."""
    code = """
from verl_audit import audit
for _ in range(4):
    print(audit("fixtures/real/async_drop_bias", baselines=["fixtures/real/sync_baseline"]).to_json(), end="\\0")
"""
    texts = [text for seed in ("1", "271828") for text in python(code, PYTHONHASHSEED=seed).split("\0")[:-1]]
    assert len(texts) == 8
    assert len(texts[0]) > 10_000
    assert [i for i, text in enumerate(texts) if text != texts[0]] == []


def test_audit_json_holds_no_machine_path() -> None:
    text = audit(REAL / "async_mild", baselines=[REAL / "sync_baseline"]).to_json()
    assert str(ROOT) not in text
    assert str(Path.home()) + os.sep not in text


DOCUMENTS = [
    ("sync_baseline", []),
    ("async_mild", ["sync_baseline"]),
    ("async_drop_bias", ["sync_baseline"]),
    ("fp8_mismatch", ["sync_baseline", "async_mild"]),
    ("crash_hybrid_off", []),
    ("probe_bf16", []),
    ("rb_drop", []),
]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("run", "baselines"), DOCUMENTS, ids=[run for run, _ in DOCUMENTS])
def test_audit_json_is_valid(run: str, baselines: list[str]) -> None:
    document = json.loads(audit(REAL / run, baselines=[REAL / b for b in baselines]).to_json())
    errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)
    assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == []


def test_the_schema_is_strict() -> None:
    document = json.loads(audit(REAL / "probe_bf16").to_json())
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for change in ({"extra": 1}, {"schema_version": "0"}, {"verdict": {**document["verdict"], "outcome": "fine"}}):
        assert not validator.is_valid({**document, **change})


def project() -> dict[str, Any]:
    """pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def folder_of(package: str) -> Path:
    """Where the sources of a package are, as setuptools' package-dir says."""
    elsewhere: dict[str, str] = project()["tool"]["setuptools"]["package-dir"]
    return ROOT / elsewhere.get(package, package.replace(".", "/"))


def test_every_package_is_listed() -> None:
    listed = {folder_of(name) for name in project()["tool"]["setuptools"]["packages"]}
    there = {init.parent for top in ("verl_audit", "rules") for init in (ROOT / top).rglob("__init__.py")}
    assert there == listed


def test_every_data_file_is_shipped() -> None:
    data: dict[str, list[str]] = project()["tool"]["setuptools"]["package-data"]
    shipped = {file for name, patterns in data.items() for p in patterns for file in folder_of(name).glob(p)}
    there = {
        file
        for top in ("verl_audit", "rules")
        for file in (ROOT / top).rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }
    assert there == shipped
    assert len(fnmatch.filter([f.name for f in shipped], "*.yaml")) >= 20
    assert {".toml", ".sql", ".yaml"} <= {f.suffix for f in shipped}


def test_data_files_are_found_from_the_installed_package() -> None:
    assert files("verl_audit.store").joinpath("schema.sql").is_file()
    assert files("verl_audit.measure").joinpath("catalog.toml").is_file()
    assert files("verl_audit.ingest").joinpath("signals").joinpath("verl.toml").is_file()
    assert files("verl_audit.rules").joinpath("1-mismatch").is_dir()
