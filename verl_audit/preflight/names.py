"""The keys that verl's configurations have and the values it takes, and what is misspelt where others are given.

`verl_names.json` is written by docs/verl_keys.py from verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Engine = Literal["dp", "megatron", "torchtitan", "veomni"]
Entry = Literal["fully_async", "one_step_off"]
ENGINES: tuple[Engine, ...] = ("dp", "megatron", "torchtitan", "veomni")
CLOSE = 0.7
"""Likeness (difflib's ratio) above which a name is taken for another misspelt: one or two letters of ten."""
FREE = re.compile(r"override_\w+|\w+_kwargs")
"""Mappings that verl hands on to other code as they are: what may stand below is not verl's to say."""
MANY = 20
"""Unknown keys in one configuration above which it is taken for another version's, and they are not listed."""


@dataclass(frozen=True)
class Names:
    """What one composition of verl's configuration holds."""

    leaves: Collection[str]
    open: Collection[str]
    """Mappings that are empty or handed on: anything may be added below them."""
    null: Collection[str]
    """Leaves that are null or a reference: `+` may set them."""
    addable: Collection[str]
    """Fields that verl reads and its configuration leaves out: `+` adds them, and what is below."""
    nodes: Mapping[str, Collection[str]]
    """Children by mapping; the root is the empty name."""


@cache
def _data() -> Mapping[str, Any]:
    text = files("verl_audit.preflight").joinpath("verl_names.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


@cache
def names(engines: tuple[Engine, ...] = ENGINES, entry: Entry | None = None) -> Names:
    """The keys of the trainers with one of these engines, and of an entry point of its own."""
    wanted = {*engines, *([entry] if entry else [])}
    leaves, open_, null, addable = set[str](), set[str](), set[str](), set[str]()
    for key, marks in _data()["keys"].items():
        kinds, where = _parsed(marks)
        if "+" in kinds:
            addable.add(key)
        if where is not None and not where & wanted:
            continue
        if "+" in kinds and where is None:
            continue
        leaves.add(key)
        open_.update([key] if "{}" in kinds else [])
        open_.update(free(key))
        null.update([key] if "0" in kinds else [])
    return Names(leaves, open_, null, addable, _nodes({*leaves, *addable}))


def of_every_trainer() -> tuple[Names, ...]:
    """The keys of the v1 trainers with any engine, and of each entry point of its own."""
    return names(), names(entry="fully_async"), names(entry="one_step_off")


def free(key: str) -> list[str]:
    """The parts of a path that verl hands on to other code."""
    parts = key.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if FREE.fullmatch(part)]


def _parsed(marks: str) -> tuple[set[str], set[str] | None]:
    """Kinds of a key, and the engines and entry points that have it; None: all engines."""
    parts = marks.split()
    kinds = {part for part in parts if part in ("{}", "0", "+")}
    where = {part.partition("@")[0] for part in parts} - kinds
    return kinds, where - {""} or None


def _nodes(keys: Collection[str]) -> Mapping[str, Collection[str]]:
    made: dict[str, set[str]] = {"": set()}
    for key in keys:
        parts = key.split(".")
        for i, part in enumerate(parts):
            made.setdefault(".".join(parts[:i]), set()).add(part)
    return made


def has(known: Names, key: str) -> bool:
    """Whether the configuration has this key, a leaf or a mapping."""
    return key in known.leaves or key in known.nodes


def below(key: str, places: Collection[str]) -> bool:
    """Whether a key lies at or under one of the places."""
    parts = key.split(".")
    return any(".".join(parts[: i + 1]) in places for i in range(len(parts)))


def meant(known: Names, key: str) -> str | None:
    """The key that this one may be a misspelling of: name by name along its path, else a like name elsewhere."""
    return _along(known, key) or _elsewhere(known, key)


def _along(known: Names, key: str) -> str | None:
    path = ""
    for part in key.split("."):
        children = known.nodes.get(path)
        if children is None:
            return path if path in known.open or below(path, known.open) else None
        if part not in children:
            like = get_close_matches(part, sorted(children), n=1, cutoff=CLOSE)
            if not like:
                return None
            part = like[0]  # noqa: PLW2901
        path = f"{path}.{part}" if path else part
    return path if path != key else None


def _elsewhere(known: Names, key: str) -> str | None:
    last = key.rpartition(".")[2]
    by_last: dict[str, list[str]] = {}
    for one in sorted(known.leaves):
        by_last.setdefault(one.rpartition(".")[2], []).append(one)
    like = get_close_matches(last, sorted(by_last), n=1, cutoff=0.8)
    found = by_last[like[0]] if like else []
    return found[0] if len(found) == 1 else None


def unknown(known: Names, tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The topmost keys of a configuration that verl does not have."""
    for name, value in tree.items():
        key = f"{path}.{name}" if path else str(name)
        if key in known.open or key in known.addable:
            continue
        if not has(known, key):
            yield key
        elif isinstance(value, Mapping) and key in known.nodes:
            yield from unknown(known, value, key)


def refused_value(key: str, value: Any) -> tuple[str, tuple[str, ...], bool] | None:
    """The part of a value that verl's own code does not take, what it takes, and whether a plugin may add to that.

    None where the value is taken, or is not one of those that are known.
    """
    choice = _data()["values"].get(key)
    if choice is None or value is None or (isinstance(value, str) and "${" in value):
        return None
    allowed = tuple(choice["values"])
    for part in _parts(value):
        if part not in allowed:
            return part, allowed, bool(choice["open"])
    return None


def choices() -> Collection[str]:
    """The keys whose values are known."""
    found: Collection[str] = _data()["values"].keys()
    return found


def _parts(value: Any) -> list[str]:
    """A list, or several names with commas between, one by one."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    return [part for part in re.split(r"\s*,\s*", str(value).strip()) if part]
