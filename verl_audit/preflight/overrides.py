"""The command line of a verl job: Hydra's overrides and options, and what they choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from verl_audit.errors import AuditError
from verl_audit.ingest.hydra import parse
from verl_audit.preflight.names import ENGINES, Engine, Entry

_ASSIGNED = re.compile(r"(?P<how>\+\+|\+|~)?(?P<key>[\w@/.\-]+)(?:=(?P<value>.*))?", re.DOTALL)
_COLON = re.compile(r"(?<=\w):(?=[^\s/])")
_TAKES_VALUE = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p")
_ELSEWHERE = ("--config-path", "-cp", "--config-dir", "-cd")
_OWN = re.compile(r"(?P<entry>fully_async_|one_step_off_)?ppo_(?P<engine>megatron_)?trainer(\.yaml)?")
"""verl's own configurations by name."""


@dataclass(frozen=True)
class Override:
    """One assignment: how Hydra is to make it, where, and what."""

    text: str
    how: Literal["", "+", "++", "~"]
    key: str
    value: Any = None

    @property
    def is_group(self) -> bool:
        """Whether it chooses a file of a config group, or is a setting of Hydra's own."""
        return "/" in self.key or "@" in self.key or self.key == "model_engine" or self.key.startswith("hydra.")


@dataclass(frozen=True)
class Line:
    """A command line taken apart."""

    overrides: tuple[Override, ...]
    engine: Engine | None
    """Engine that it chooses; None: it chooses none."""
    entry: Entry | None
    is_own: bool
    """Whether the configuration under the overrides is verl's own: of another's nothing is known."""


def line(arguments: Sequence[str]) -> Line:
    """Take a command line apart. Raises `AuditError` for what is no override."""
    options, rest = _options(arguments)
    overrides = tuple(_override(text) for text in rest)
    named = _OWN.fullmatch(next((v for k, v in options if k in ("--config-name", "-cn")), "ppo_trainer"))
    chosen = next((o.value for o in overrides if o.key == "model_engine"), None)
    engine = "megatron" if named and named["engine"] else chosen
    own = named is not None and not any(k in _ELSEWHERE for k, _ in options)
    grouped = any(o.is_group and o.key != "model_engine" and not o.key.startswith("hydra.") for o in overrides)
    return Line(
        overrides,
        engine if engine in ENGINES else None,
        _entry(named["entry"] if named else None, [o.key for o in overrides]),
        own and not grouped and (engine is None or engine in ENGINES),
    )


def _entry(named: str | None, keys: Sequence[str]) -> Entry | None:
    if named is not None:
        return "fully_async" if named.startswith("fully") else "one_step_off"
    if any(key.startswith("async_training.") for key in keys):
        return "fully_async"
    return "one_step_off" if any(key.startswith("rollout.") for key in keys) else None


def _options(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Hydra's options with their values, and the rest."""
    options, rest, waiting = list[tuple[str, str]](), list[str](), None
    for text in arguments:
        if waiting is not None:
            options.append((waiting, text))
            waiting = None
        elif text.startswith("-"):
            name, given, value = text.partition("=")
            if not given and name in _TAKES_VALUE:
                waiting = name
            else:
                options.append((name, value))
        else:
            rest.append(text)
    return options, rest


def _override(text: str) -> Override:
    match = _ASSIGNED.fullmatch(text)
    if match is None or (match["value"] is None and match["how"] != "~"):
        raise AuditError(f"override {text!r}: write key=value, +key=value or ~key")
    how: Any = match["how"] or ""
    return Override(text, how, match["key"], _value(text, match["value"]) if match["value"] else None)


def _value(override: str, text: str) -> Any:
    """A value by YAML's rules, which are Hydra's but for `{a:1}`: YAML wants a blank after the colon."""
    try:
        return parse(_COLON.sub(": ", text) if text.startswith(("{", "[{")) else text)
    except yaml.YAMLError:
        raise AuditError(f"override {override!r}: its value cannot be read") from None


def apply(tree: dict[str, Any], override: Override) -> None:
    """Make one assignment in a configuration."""
    if override.is_group:
        return
    *head, last = override.key.split(".")
    node: Any = tree
    for name in head:
        below_it = node.get(name)
        if not isinstance(below_it, dict):
            below_it = node[name] = {}
        node = below_it
    if override.how == "~":
        node.pop(last, None)
    else:
        node[last] = override.value
