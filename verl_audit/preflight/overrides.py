"""The command line of a verl job: Hydra's overrides and options, and what they choose."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from verl_audit.errors import AuditError
from verl_audit.ingest.hydra import parse
from verl_audit.preflight.names import ENGINES, Engine, Entry

_ASSIGNED = re.compile(r"(?P<how>\+\+|\+|~)?(?P<key>[\w@/.\-]+)(?:=(?P<value>.*))?", re.DOTALL)
_COLON = re.compile(r"(?<=\w):(?=[^\s/])")
_TAKES_VALUE = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p")
_SWEEP = re.compile(r"(?:choice|range|interval|glob)\(.*\)", re.DOTALL)
_QUOTED = re.compile(r"\\.|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_BRACKETED = re.compile(r"\[[^][{}()]*\]|\{[^][{}()]*\}|\([^][{}()]*\)")
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
    """Entry point that it is for, as far as it tells by itself."""
    is_own: bool
    """Whether the configuration under the overrides is verl's own: of another's nothing is known."""


def line(arguments: Sequence[str]) -> Line:
    """Take a command line apart. Raises `AuditError` for what is no override."""
    options, rest = _options(arguments)
    if not any(k in ("--multirun", "-m") for k, _ in options):
        _refuse_sweeps(rest)
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
    """By name, else by a section that only one entry point's configuration has.

    Beside settings of the v1 trainers such a section is no sign of another trainer: verl has no key of that name.
    """
    if named is not None:
        return "fully_async" if named.startswith("fully") else "one_step_off"
    if any(key == "trainer.v1" or key.startswith("trainer.v1.") for key in keys):
        return None
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


def _refuse_sweeps(texts: Sequence[str]) -> None:
    """Raise `AuditError` for values that Hydra 1.3 takes for several, one a run."""
    for text in texts:
        key, _, value = text.partition("=")
        bare = _QUOTED.sub("", value)
        while (shorter := _BRACKETED.sub("", bare)) != bare:
            bare = shorter
        is_list = "," in bare and not set(bare) & set("[]{}()'\"")
        if is_list or _SWEEP.fullmatch(value.strip()):
            quoted = f"; for one value write {key}=\"'{value}'\", for a list [{value}]" if is_list else ""
            raise AuditError(
                f"verl would not start: `{text}` is a sweep, which Hydra takes with --multirun only{quoted}"
            )


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
    elif isinstance(override.value, dict) and isinstance(node.get(last), dict):
        merge(node[last], override.value)
    else:
        node[last] = override.value


def merge(tree: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put `more` into `tree`, mapping by mapping, as OmegaConf does; what is no mapping replaces."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value
