"""A run's Hydra configuration: `.hydra/config.yaml` with `overrides.yaml` beside it, or a lone config file.

Hydra leaves `${a.b}` unresolved. References inside the tree are filled in here, and `${oc.select:a.b,default}`; other
resolvers, such as `${oc.env:X}`, and references that lead nowhere stay as written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from verl_audit.ingest.console_blocks import identity
from verl_audit.ingest.model import ConfigFound, Parsed

_LARGEST = 8 << 20
_DEEPEST = 100
_REFERENCE = re.compile(r"\$\{(\.*[\w-]+(?:\.[\w-]+|\[\d+\])*)\}")
_SELECTION = re.compile(r"\$\{oc\.select:\s*(\.*[\w-]+(?:\.[\w-]+)*)\s*(?:,(.*))?\}", re.DOTALL)
_PART = re.compile(r"[\w-]+")


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: `1e-6` is a number, a date is text. Aliases are refused."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not expected in a run configuration")
        return super().compose_node(parent, index)


_FLOAT = re.compile(
    r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
    r"|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read(path: Path) -> list[Parsed]:
    """Read a config file or a `.hydra` directory; never raises."""
    if path.is_dir():
        path /= "config.yaml"
    parsed = Parsed(path, "hydra")
    tree = _load(path, parsed)
    if isinstance(tree, dict):
        tree, tracker = _unwrapped(tree)
        overrides = _load(path.with_name("overrides.yaml"), parsed) if path.parent.name == ".hydra" else None
        given = tuple(str(line) for line in overrides) if isinstance(overrides, list) else ()
        resolved = resolve(tree)
        parsed.configs.append(ConfigFound(resolved, "wandb" if tracker else "hydra", given))
        parsed.identity = identity(resolved)
    elif tree is not None:
        parsed.note("not_a_config", "the file holds no mapping")
    return [parsed]


def parse(text: str | bytes) -> Any:
    """YAML as OmegaConf reads it. Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with its references filled in; those that lead nowhere stay as written."""
    return {key: _resolve(value, tree, (str(key),)) for key, value in tree.items()}


def _load(path: Path, parsed: Parsed) -> Any:
    try:
        size = path.stat().st_size
        if size > _LARGEST:
            parsed.note("too_large", f"{path.name} has {size} bytes, which is no run configuration")
            return None
        parsed.bytes_read += size
        return parse(path.read_bytes())
    except FileNotFoundError as error:
        if path.name == "config.yaml":
            parsed.note("unreadable", str(error))
    except OSError as error:
        parsed.note("unreadable", str(error))
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        parsed.note("bad_yaml", f"{path.name}: {' '.join(str(error).split())[:200]}")
    return None


def _unwrapped(tree: dict[Any, Any]) -> tuple[dict[str, Any], bool]:
    """Undo the `key: {value: ...}` form of wandb's `files/config.yaml`."""
    bodies = {str(k): v for k, v in tree.items() if k not in ("_wandb", "wandb_version")}
    if bodies and all(isinstance(v, dict) and "value" in v for v in bodies.values()):
        return {k: v["value"] for k, v in bodies.items()}, True
    return {str(k): v for k, v in tree.items()}, False


def _resolve(node: Any, root: dict[str, Any], place: tuple[str, ...]) -> Any:
    """`node` with its references filled in; `place` is the path of keys that leads to it."""
    if isinstance(node, dict):
        return {key: _resolve(value, root, (*place, str(key))) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, root, (*place, str(i))) for i, value in enumerate(node)]
    if not isinstance(node, str) or "${" not in node or len(place) > _DEEPEST:
        return node
    whole = _REFERENCE.fullmatch(node)
    if whole:
        found, value = _follow(whole[1], root, place)
        return value if found else node
    if selection := _SELECTION.fullmatch(node):
        found, value = _select(selection, root, place)
        return value if found else node
    return _REFERENCE.sub(lambda m: _as_text(m, root, place), node)


def _as_text(match: re.Match[str], root: dict[str, Any], place: tuple[str, ...]) -> str:
    found, value = _follow(match[1], root, place)
    return str(value) if found and not isinstance(value, (dict, list)) else match[0]


def _follow(reference: str, root: dict[str, Any], place: tuple[str, ...], hops: int = 0) -> tuple[bool, Any]:
    """Whether a reference leads to a value, and that value, itself resolved; leading dots count upwards."""
    target = _target(reference, place)
    node: Any = root
    for name in target:
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return False, None
    if isinstance(node, str) and (again := _REFERENCE.fullmatch(node)):
        return _follow(again[1], root, target, hops + 1) if hops < _DEEPEST else (False, None)
    if isinstance(node, str) and (selection := _SELECTION.fullmatch(node)):
        return _select(selection, root, target, hops + 1) if hops < _DEEPEST else (False, None)
    return not isinstance(node, str) or "${" not in node, node


def _select(match: re.Match[str], root: dict[str, Any], place: tuple[str, ...], hops: int = 0) -> tuple[bool, Any]:
    """As OmegaConf's `oc.select`: the value at a path, or the default where there is none."""
    if _leads(match[1], root, place):  # null is a value
        return _follow(match[1], root, place, hops)
    try:
        default = None if match[2] is None else parse(match[2])
    except yaml.YAMLError:
        return False, None
    value = _resolve(default, root, place)
    return not isinstance(value, str) or "${" not in value, value


def _leads(reference: str, root: dict[str, Any], place: tuple[str, ...]) -> bool:
    *parents, last = _target(reference, place)
    node: Any = root
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    return isinstance(node, dict) and last in node


def _target(reference: str, place: tuple[str, ...]) -> tuple[str, ...]:
    """The path from the root; leading dots count upwards from the place of the reference."""
    names = tuple(_PART.findall(reference))
    dots = len(reference) - len(reference.lstrip("."))
    return (*place[:-dots], *names) if dots else names
