"""Makes the CPU plugin's rollout known in every process: fully_async starts rollouts where no model is loaded."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

TARGET = "verl.workers.rollout.replica"


def _load() -> Any:
    from verl_cpu.rollout import CPUReplica  # type: ignore[import-not-found]

    return CPUReplica


class _Finder(MetaPathFinder):
    """Adds the rollout to the registry once the module that holds it is there."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Only for the one module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == TARGET else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.RolloutReplicaRegistry.register("cpu_hf", _load)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
