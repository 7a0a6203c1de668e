"""Recording verl's fully_async and one_step_off trainers, which take no custom sampler: a plugin of verl.

verl loads entry points of the group `verl.plugins` in every process that imports it. This one does nothing unless
`VERL_AUDIT_DIR` is set there; then it waits for two modules of verl to be imported and looks on from their classes.
On one machine Ray's processes inherit the variable; elsewhere give it as
`+ray_kwargs.ray_init.runtime_env.env_vars.VERL_AUDIT_DIR=DIR`. v1 trainers are recorded by the sampler, not by this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from verl_audit.record.guard import quietly

Patch = Callable[[ModuleType], None]


def _watch_clients(module: ModuleType) -> None:
    _patches().watch_clients(module)


def _watch_trainer(module: ModuleType) -> None:
    _patches().watch_trainer(module)


def _patches() -> ModuleType:
    return import_module("verl_audit.record.verl_separate")


PATCHES: dict[str, Patch] = {
    "verl.workers.rollout.llm_server": _watch_clients,
    "verl.experimental.separation.ray_trainer": _watch_trainer,
}


class _After(Loader):
    """A module's own loader, and a patch once the module is complete."""

    def __init__(self, loader: Loader, patch: Patch) -> None:
        self.loader, self.patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        quietly(self.patch, module)


class _Finder(MetaPathFinder):
    """Finds the modules to patch where Python finds them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = PATCHES.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if patch is not None else None
        if spec is not None and spec.loader is not None and patch is not None:
            spec.loader = _After(spec.loader, patch)
        return spec


def install() -> None:
    """Look on from the modules that are there, and from the others when they come."""
    for name in [n for n in PATCHES if n in sys.modules]:
        quietly(PATCHES[name], sys.modules[name])
    sys.meta_path.insert(0, _Finder())


if os.environ.get("VERL_AUDIT_DIR"):
    quietly(install)
