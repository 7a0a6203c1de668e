"""Writes the names that verl's configurations have, and the values that it takes: verl_audit/preflight/verl_names.json.

    pip download --no-deps verl==0.9.0 verl==0.9.1 && python docs/verl_keys.py verl-0.9.*.whl

Read are, in each wheel, the configurations that verl itself generates for its four engines, those of fully_async and
one_step_off on top, the fields of the dataclasses that `_target_` names (what `+` can add), and the registries and
checks named in `REGISTRIES` and `CHECKS`. Names and values are taken, no text.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "verl_audit" / "preflight" / "verl_names.json"
ENGINES = {"dp": "", "megatron": "_megatron", "torchtitan": "_torchtitan", "veomni": "_veomni"}
ENTRIES = {
    "fully_async": "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
    "one_step_off": "experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
}
DATACLASSES = ("workers/config/", "trainer/config/")
REGISTRIES = {  # key: (file, pattern with the name as its group); a plugin may add to these
    "trainer.v1.trainer_mode": ("trainer/ppo/v1/trainer_", r'@register_trainer\("(\w+)"\)'),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("trainer/ppo/core_algos.py", r'@register_policy_loss\("(\w+)"\)'),
    "algorithm.adv_estimator": ("trainer/ppo/core_algos.py", r'^    [A-Z_]+ = "(\w+)"$'),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": (
        "checkpoint_engine/",
        r'@CheckpointEngineRegistry\.register\("(\w+)"\)',
    ),
    "actor_rollout_ref.rollout.name": ("workers/rollout/replica.py", r'RolloutReplicaRegistry\.register\("(\w+)"'),
}
ROUTER = ["disabled", "R2", "R3"]
KL = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
CHECKS = {  # key: (file, values); what verl raises an error for otherwise
    "trainer.v1.sampler.max_off_policy_strategy": ("trainer/ppo/v1/replay_buffer.py", ["drop", "wait"]),
    "algorithm.rollout_correction.rollout_is": ("trainer/ppo/rollout_corr_helper.py", ["token", "sequence"]),
    "algorithm.rollout_correction.rollout_rs": (
        "trainer/ppo/rollout_corr_helper.py",
        [
            *(f"{over}_k{i}" for over in ("token", "seq_sum", "seq_mean") for i in (1, 2, 3)),
            *(f"seq_max_k{i}" for i in (2, 3)),
        ],
    ),
    "algorithm.rollout_correction.loss_type": ("trainer/ppo/core_algos.py", ["ppo_clip", "reinforce"]),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "workers/config/actor.py",
        ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    ),
    "actor_rollout_ref.actor.megatron.router_replay.mode": ("workers/config/engine.py", ROUTER),
    "actor_rollout_ref.actor.veomni.router_replay.mode": ("workers/config/engine.py", ROUTER),
    "actor_rollout_ref.actor.kl_loss_type": ("trainer/ppo/core_algos.py", [*KL, *(f"{k}+" for k in KL)]),
    "trainer.logger": (
        "utils/tracking.py",
        [
            *("wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "console", "clearml", "trackio", "file"),
            *("rl_insight", "tracking"),
        ],
    ),
}
Tree = dict[str, Any]


class Wheel:
    """One release of verl."""

    def __init__(self, path: Path) -> None:
        """`path` is a wheel; its name tells the version."""
        self.version = path.name.split("-")[1]
        self.files = zipfile.ZipFile(path)
        self.names = [n.removeprefix("verl/") for n in self.files.namelist() if n.startswith("verl/")]

    def text(self, name: str) -> str:
        """A file of the package."""
        return self.files.read(f"verl/{name}").decode("utf-8")

    def config(self, engine: str) -> Tree:
        """What verl composes for an engine."""
        loaded: Tree = yaml.safe_load(self.text(f"trainer/config/_generated_ppo{ENGINES[engine]}_trainer.yaml"))
        return loaded

    def entry(self, name: str) -> Tree:
        """What an asynchronous entry point lays over that."""
        loaded: Tree = yaml.safe_load(self.text(ENTRIES[name]))
        return {key: value for key, value in loaded.items() if key not in ("hydra", "defaults")}

    def sources(self, start: str) -> Iterator[str]:
        """Python files whose path starts so."""
        return (self.text(n) for n in self.names if n.startswith(start) and n.endswith(".py"))

    def fields(self) -> dict[str, dict[str, str]]:
        """Fields and bases of the classes that configurations are turned into, with the type of each as written."""
        found: dict[str, dict[str, str]] = {}
        bases: dict[str, list[str]] = {}
        for start in DATACLASSES:
            for text in self.sources(start):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ClassDef):
                        own = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
                        found[node.name] = {n.target.id: ast.unparse(n.annotation) for n in own}  # type: ignore[union-attr]
                        bases[node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)]
        for name, own_bases in bases.items():
            for base in own_bases:
                found[name] = {**found.get(base, {}), **found[name]}
        return found


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and kind of each leaf: `{}` for an empty mapping, `0` for null or a reference, else nothing."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            is_null = value is None or (isinstance(value, str) and "${" in value)
            yield f"{path}{key}", "{}" if value == {} else "0" if is_null else ""


def addable(tree: Tree, fields: dict[str, dict[str, str]], path: str = "") -> Iterator[str]:
    """Fields of the dataclasses that the configuration leaves out."""
    if isinstance(tree.get("_target_"), str):
        for name in fields.get(tree["_target_"].rpartition(".")[2], {}):
            if name not in tree and not name.startswith("_"):
                yield f"{path}{name}"
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from addable(value, fields, f"{path}{key}.")


def known(wheels: list[Wheel]) -> dict[str, str]:
    """Each key with its kind, and the configurations that have it as `engine@version`; none where all engines do.

    Kinds: `{}` an empty mapping, `0` null or a reference in one of them, `+` only a field that can be added.
    """
    where: dict[str, set[str]] = defaultdict(set)
    kind: dict[str, str] = {}
    everywhere = {f"{engine}@{wheel.version}" for wheel in wheels for engine in ENGINES}
    for wheel in wheels:
        fields = wheel.fields()
        for engine in ENGINES:
            tree = wheel.config(engine)
            for path, how in leaves(tree):
                where[path].add(f"{engine}@{wheel.version}")
                kind[path] = how if kind.get(path) in (None, "", "+") else kind[path]
            for path in addable(tree, fields):
                kind.setdefault(path, "+")
        for entry in ENTRIES:
            for path, how in leaves(wheel.entry(entry)):
                if path not in kind:
                    where[path].add(f"{entry}@{wheel.version}")
                    kind[path] = how
                elif set(where[path]) <= {f"{e}@{w.version}" for e in ENTRIES for w in wheels}:
                    where[path].add(f"{entry}@{wheel.version}")
    where["model_engine"], kind["model_engine"] = everywhere, ""  # the choice of the engine is a key, too
    versions = {wheel.version for wheel in wheels}
    return {path: f"{kind[path]} {_short(where[path], everywhere, versions)}".strip() for path in sorted(kind)}


def _short(found: set[str], everywhere: set[str], versions: set[str]) -> str:
    if found == everywhere or not found:
        return ""
    by_engine: dict[str, set[str]] = defaultdict(set)
    for one in found:
        engine, _, version = one.partition("@")
        by_engine[engine].add(version)
    engines = sorted(by_engine)
    told = next(iter(by_engine.values()))
    if set(engines) == set(ENGINES) and all(v == told for v in by_engine.values()):
        return " ".join(f"@{v}" for v in sorted(told))
    return " ".join(e if by_engine[e] == versions else f"{e}@{'@'.join(sorted(by_engine[e]))}" for e in engines)


def choices(wheels: list[Wheel]) -> dict[str, Any]:
    """Allowed values by key; `open` where code outside verl can register more."""
    made: dict[str, Any] = {}
    for key, (start, pattern) in REGISTRIES.items():
        found = {name for w in wheels for text in w.sources(start) for name in re.findall(pattern, text, re.MULTILINE)}
        made[key] = {"values": sorted(found), "open": True}
    for key, (file, values) in CHECKS.items():
        for wheel in wheels:
            text = wheel.text(file)
            if lacking := [v for v in values if f'"{v.removesuffix("+")}"' not in text]:
                raise SystemExit(f"{file} of {wheel.version} does not name {lacking}")
        made[key] = {"values": values, "open": False}
    return made


def main() -> None:
    """Write the file."""
    wheels = sorted((Wheel(Path(name)) for name in sys.argv[1:]), key=lambda w: w.version)
    if not wheels:
        raise SystemExit(__doc__)
    versions = ", ".join(w.version for w in wheels)
    made = {
        "source": f"names in the configurations of verl {versions} (Apache-2.0), by docs/verl_keys.py",
        "values": choices(wheels),
        "keys": known(wheels),
    }
    TARGET.write_text(json.dumps(made, indent=0, separators=(",", ": ")) + "\n", encoding="utf-8")
    print(f"{TARGET.name}: {len(made['keys'])} keys")  # noqa: T201


if __name__ == "__main__":
    main()
