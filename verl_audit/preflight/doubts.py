"""What verl would refuse, and what looks misspelt: keys by verl's configurations, values by its own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl_audit.preflight.names import (
    MANY,
    Names,
    below,
    choices,
    free,
    has,
    meant,
    of_every_trainer,
    refused_value,
    unknown,
)
from verl_audit.preflight.overrides import Line, Override

PLUGINS = (
    "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES",
)
"""Settings that load code which may add to verl's registries."""


@dataclass(frozen=True)
class Doubt:
    """A sentence, and whether verl does not start because of it."""

    text: str
    refused: bool = False


def of_line(given: Line, known: Names, also: Mapping[str, Any]) -> Iterator[Doubt]:
    """Keys of a command line; `also` is a configuration that it is laid over.

    As Hydra 1.3 has it: what is assigned must exist, `+` adds only what does not exist or is null, `~` deletes only
    what exists. Where the configuration is not verl's own, nothing is known of its keys.
    """
    if not given.is_own:
        return
    added: set[str] = set()
    for override in (o for o in given.overrides if not o.is_group):
        key = override.key
        there = has(known, key) or key in added or _in(also, key)
        if override.how == "":
            new = [k for k in _new(override, known, also) if k not in added] if there else [key]
            yield from (Doubt(f"unknown key `{k}`{_advice(known, k)}", refused=True) for k in new)
        elif override.how == "~" and not there:
            yield Doubt(f"`~{key}`: there is no such key{_advice(known, key)}", refused=True)
        elif override.how == "+" and _is_set(override, known, also, added):
            yield Doubt(f"`+{key}`: the key exists, write it without +", refused=True)
        elif override.how in ("+", "++"):
            new = [*(() if there else (key,)), *_new(override, known, also)]
            yield from (doubt for k in new for doubt in _added(override.how, k, known))
        if override.how in ("+", "++"):
            added.update(_paths(override))


def _added(how: str, key: str, known: Names) -> Iterator[Doubt]:
    """A key that verl does not read, if it is like one that it does; `how` is the sign that adds it."""
    if below(key, known.addable) or below(key, known.open) or free(key):
        return
    like = meant(known, key)
    if like is not None:
        yield Doubt(f"`{how}{key}` adds a key that verl does not read; did you mean `{like}`?")


def of_tree(tree: Mapping[str, Any]) -> Iterator[Doubt]:
    """Keys of a saved configuration that no trainer or engine of verl 0.9.0 or 0.9.1 has."""
    known = of_every_trainer()
    found = sorted(set.intersection(*(set(unknown(one, tree)) for one in known)))
    if len(found) > MANY:
        listed = ", ".join(f"`{key}`" for key in found[:3])
        yield Doubt(f"{len(found)} keys are not verl 0.9's, such as {listed}: the configuration of another version?")
        return
    for key in found:
        like = _meant_by_any(known, key)
        yield Doubt(f"unknown key `{key}`" + (f", did you mean `{like}`?" if like else ": verl 0.9 does not have it"))


def of_values(tree: Mapping[str, Any], given: Line) -> Iterator[Doubt]:
    """Values that verl's code does not take, in a configuration whose references are filled in.

    Code of the user's own may register more values for some keys. If no setting loads such code, a value on the
    command line that is like one of verl's is taken for a misspelling.
    """
    assigned = {path for override in given.overrides if override.how != "~" for path in _paths(override)}
    has_plugin = any(_get(tree, key) for key in PLUGINS)
    for key in choices():
        found = refused_value(key, _get(tree, key))
        if found is None:
            continue
        value, allowed, is_open = found
        near = get_close_matches(value, allowed, n=1)
        if is_open and has_plugin and not near:
            continue
        guess = f", did you mean `{near[0]}`?" if near else "."
        refused = key in assigned and (not is_open or (bool(near) and not has_plugin))
        loader = (
            f"if code of yours registers it, name that in {PLUGINS[0]}" if refused else "code of yours may register it"
        )
        which = f"none of verl's own ({loader})" if is_open else "not taken by verl"
        yield Doubt(f"{key}: `{value}` is {which}{guess} Allowed: {', '.join(allowed)}", refused)


def _new(override: Override, known: Names, also: Mapping[str, Any]) -> Iterator[str]:
    """Keys that a mapping given as a value would add."""
    for key in _inside(override.value, override.key):
        if not has(known, key) and not _in(also, key):
            yield key


def _is_set(override: Override, known: Names, also: Mapping[str, Any], added: set[str]) -> bool:
    key = override.key
    if isinstance(override.value, (dict, list)):  # merged, whatever is there
        return False
    if key in added or _get(also, key) is not None:
        return True
    return has(known, key) and key not in known.null and key not in known.open


def _paths(override: Override) -> Iterator[str]:
    parts = override.key.split(".")
    for i in range(len(parts)):
        yield ".".join(parts[: i + 1])
    yield from _inside(override.value, override.key)


def _inside(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, more in value.items():
            yield f"{path}.{name}"
            yield from _inside(more, f"{path}.{name}")


def _get(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _in(tree: Mapping[str, Any], key: str) -> bool:
    head, _, last = key.rpartition(".")
    parent = _get(tree, head) if head else tree
    return isinstance(parent, Mapping) and last in parent


def _advice(known: Names, key: str) -> str:
    if below(key, known.addable):
        return f": verl reads it, and its configuration leaves it out: write +{key}=..."
    if below(key, known.open) or below(key, known.null):
        return f": its place is empty in verl's configuration, write +{key}=..."
    like = meant(known, key)
    if like is not None:
        return f", did you mean `{like}`?"
    everywhere = of_every_trainer()
    if any(has(other, key) for other in everywhere):
        return ": another trainer or engine has it, not this one"
    like = _meant_by_any(everywhere, key)
    return f"; another trainer has `{like}`" if like is not None else ""


def _meant_by_any(known: Sequence[Names], key: str) -> str | None:
    return next((like for one in known if (like := meant(one, key)) is not None), None)
