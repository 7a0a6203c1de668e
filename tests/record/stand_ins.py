"""Modules in the place of verl's and TransferQueue's, for tests and benchmarks of the recorder."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def stand_ins(buffer: type, clients: tuple[type, type], fetch: Any, auto_await: Any) -> dict[str, ModuleType]:
    """The modules that the recorder imports verl's and TransferQueue's parts from, by name.

    `clients` are verl's client and the one that resumes.
    """
    given: dict[str, dict[str, Any]] = {
        "verl": {"__version__": "0.9.1"},
        "verl.utils": {},
        "verl.utils.ray_utils": {"auto_await": auto_await},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.ppo.v1": {},
        "verl.trainer.ppo.v1.replay_buffer": {"ReplayBuffer": buffer, "ReplayBufferAsync": buffer},
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.llm_server": dict(
            zip(("LLMServerClient", "FullyAsyncLLMServerClient"), clients, strict=True)
        ),
        "transfer_queue": {"kv_batch_get": fetch},
    }
    made = {name: ModuleType(name) for name in given}
    for name, values in given.items():
        made[name].__dict__.update(values)
    return made
