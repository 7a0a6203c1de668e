"""The configuration of a run that has not begun: a Hydra file or directory, command-line overrides, verl's defaults."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl_audit.errors import AuditError
from verl_audit.ingest.hydra import parse, resolve
from verl_audit.ingest.hydra import read as read_hydra
from verl_audit.preflight import doubts
from verl_audit.preflight.names import ENGINES, Engine, Entry, names
from verl_audit.preflight.overrides import Line, apply, line, merge

Tree = dict[str, Any]
_ENGINE_DEFAULTS: Mapping[Engine, Tree] = {
    "megatron": {"megatron": {"dtype": "bfloat16", "router_replay": {"mode": "disabled"}}},
    "veomni": {"veomni": {"router_replay": {"mode": "disabled"}}},
}
"""What verl 0.9.1's configurations of these engines give the actor, of the settings that are facts of a run."""


@dataclass(frozen=True)
class Configuration:
    """The tree with references filled in, in words what it was made of, and what in it looks misspelt."""

    tree: Tree
    sources: tuple[str, ...]
    problems: tuple[str, ...] = ()


def configuration(path: Path | None, overrides: Sequence[str]) -> Configuration:
    """A configuration file, a `.hydra` directory or one that holds it, with overrides on top.

    Without a file, or for keys that a file of few keys leaves out, verl 0.9.1's defaults stand. Raises `AuditError`
    for what is no configuration, and for overrides that cannot be read or that verl would refuse to start with.
    """
    given = _read(path) if path is not None else {}
    told = line(overrides)
    engine, entry = told.engine or _engine(given), _entry(given, told)
    made = _defaults(engine, entry)
    merge(made, given)
    for override in told.overrides:
        apply(made, override)
    tree = resolve(made)
    found = [
        *doubts.of_line(told, names((engine,), entry), given),
        *doubts.of_values(tree, told),
        *doubts.of_tree(given),
    ]
    if refused := [doubt.text for doubt in found if doubt.refused]:
        raise AuditError("\n  ".join(["verl would not start:", *refused]))
    sources = [f"verl 0.9.1's defaults{f' for {entry}' if entry else ''}{f' on {engine}' if engine != 'dp' else ''}"]
    sources += [str(path)] if path is not None else []
    sources += [f"{len(overrides)} override{'' if len(overrides) == 1 else 's'}"] if overrides else []
    return Configuration(tree, tuple(sources), tuple(doubt.text for doubt in found))


def _engine(given: Tree) -> Engine:
    """The engine that a configuration was composed for, by its actor."""
    strategy: Any = given
    for name in ("actor_rollout_ref", "actor", "strategy"):
        strategy = strategy.get(name) if isinstance(strategy, dict) else None
    return next((engine for engine in ENGINES if engine == strategy), "dp")


def _entry(given: Tree, told: Line) -> Entry | None:
    """The entry point of a configuration, whose sections an override cannot change; else what the line tells."""
    if "async_training" in given:
        return "fully_async"
    if "rollout" in given:
        return "one_step_off"
    trainer = given.get("trainer")
    return None if isinstance(trainer, dict) and "v1" in trainer else told.entry


def _defaults(engine: Engine, entry: Entry | None) -> Tree:
    """verl's defaults for the settings that are facts of a run."""
    made: Tree = {}
    for name in ["verl.yaml", *([f"{entry}.yaml"] if entry else [])]:
        merge(made, parse(files("verl_audit.preflight").joinpath(name).read_text(encoding="utf-8")))
    if engine != "dp":
        actor = made["actor_rollout_ref"]["actor"]
        del actor["fsdp_config"]
        actor["strategy"] = engine
        merge(actor, _ENGINE_DEFAULTS.get(engine, {}))
    return made


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
