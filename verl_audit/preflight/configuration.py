"""The configuration of a run that has not begun: a Hydra file or directory, command-line overrides, verl's defaults."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from verl_audit.errors import AuditError
from verl_audit.ingest.hydra import parse, resolve
from verl_audit.ingest.hydra import read as read_hydra

Tree = dict[str, Any]
_ASSIGNED = re.compile(r"(?P<how>\+\+|\+|~)?(?P<key>[\w@/.\-]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Configuration:
    """The tree with references filled in, and in words what it was made of."""

    tree: Tree
    sources: tuple[str, ...]


def configuration(path: Path | None, overrides: Sequence[str]) -> Configuration:
    """A configuration file, a `.hydra` directory or one that holds it, with overrides on top.

    Without a file, or for keys that a file of few keys leaves out, verl 0.9.1's defaults stand. Raises `AuditError`
    for what is no configuration and for an override that cannot be read.
    """
    given = _read(path) if path is not None else {}
    top = _tree_of(overrides)
    names = ["verl.yaml"]
    if "async_training" in given or "async_training" in top:
        names.append("fully_async.yaml")
    made: Tree = {}
    for name in names:
        text = files("verl_audit.preflight").joinpath(name).read_text(encoding="utf-8")
        merge(made, parse(text))
    merge(made, given)
    for text in overrides:
        _apply(made, text)
    sources = [f"verl 0.9.1's defaults{' for fully_async' if len(names) > 1 else ''}"]
    sources += [str(path)] if path is not None else []
    sources += [f"{len(overrides)} override{'' if len(overrides) == 1 else 's'}"] if overrides else []
    return Configuration(resolve(made), tuple(sources))


def _read(path: Path) -> Tree:
    found = next((p for p in (path / ".hydra", path / "hydra" / ".hydra") if p.is_dir()), path)
    if found.is_dir() and not (found / "config.yaml").is_file():
        below = sorted(found.rglob(".hydra/config.yaml"))
        if len(below) != 1:
            many = f"{len(below)} configurations: name one" if below else "no .hydra/config.yaml"
            raise AuditError(f"{path}: {many}")
        found = below[0].parent
    if not found.exists():
        raise AuditError(f"{path}: no such file or directory")
    [parsed] = read_hydra(found)
    if not parsed.configs:
        why = "; ".join(problem.detail for problem in parsed.problems)
        raise AuditError(f"{path}: no configuration{f' ({why})' if why else ''}")
    tree = parsed.configs[0].tree
    if not isinstance(tree, Mapping) or not {"actor_rollout_ref", "trainer", "algorithm", "data"} & set(tree):
        raise AuditError(f"{path}: none of verl's sections (actor_rollout_ref, trainer, algorithm, data) is in it")
    return copy.deepcopy(dict(tree))


def _tree_of(overrides: Sequence[str]) -> Tree:
    made: Tree = {}
    for text in overrides:
        _apply(made, text)
    return made


def _apply(tree: Tree, text: str) -> None:
    """One override of Hydra: `key=value`, `+key=value`, `++key=value`, `~key`; its options are passed over."""
    if text.startswith("--"):
        return
    match = _ASSIGNED.fullmatch(text)
    if match is None or (match["value"] is None and match["how"] != "~"):
        raise AuditError(f"override {text!r}: write key=value, +key=value or ~key")
    *head, last = match["key"].split(".")
    if "/" in match["key"] or "@" in match["key"] or head[:1] == ["hydra"]:
        return  # a choice of a config group, or a setting of Hydra's own
    node: Any = tree
    for name in head:
        below = node.get(name)
        if not isinstance(below, dict):
            below = node[name] = {}
        node = below
    if match["how"] == "~":
        node.pop(last, None)
        return
    node[last] = _value(text, match["value"])


def _value(override: str, text: str) -> Any:
    try:
        return parse(text) if text else None
    except yaml.YAMLError:
        raise AuditError(f"override {override!r}: its value cannot be read") from None


def merge(tree: Tree, more: Mapping[str, Any]) -> None:
    """Put `more` into `tree`, mapping by mapping; what is no mapping replaces."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value
