"""Reads every file a discovery found, each with the reader of its format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from verl_audit.ingest import (
    areal,
    clearml,
    console,
    dict_console,
    hydra,
    jsonl,
    mlflow,
    swanlab,
    tfevents,
    traces,
    trackio,
    trl,
    verl_jsonl,
    wandb,
    wandb_export,
)
from verl_audit.ingest.align import align
from verl_audit.ingest.discover import Discovery, Found
from verl_audit.ingest.model import Format, Parsed


class Memory(Protocol):
    """Knows what an earlier call read from files that have not changed since."""

    def recall(self, found: Found) -> list[Parsed] | None:
        """What it read from this source; None if it must be read (again)."""

    def remember(self, found: Found, parsed: Sequence[Parsed]) -> None:
        """Hear what was read or recalled."""


def read_all(
    discovery: Discovery, progress: Callable[[Path, int], None] | None = None, memory: Memory | None = None
) -> list[Parsed]:
    """Parse all found files in order; `progress` hears of each file and the bytes read from it."""
    results: list[Parsed] = []
    for found in discovery.files:
        recalled = memory.recall(found) if memory else None
        parsed = read_one(found) if recalled is None else recalled
        if memory:
            memory.remember(found, parsed)
        results.extend(parsed)
        if progress:
            progress(found.path, parsed[0].bytes_read if parsed else 0)
    align(results)
    return results


def read_one(found: Found) -> list[Parsed]:
    """Parse one file; a fault in its reader is reported as a problem of that file, and the rest goes on."""
    try:
        return _read(found)
    except Exception as error:
        broken = Parsed(found.path, found.format)
        broken.note("reader_crashed", f"{type(error).__name__}: {error}")
        return [broken]


def _read(found: Found) -> list[Parsed]:
    module, name = _READERS[found.format]
    parsed: list[Parsed] = getattr(module, name)(found.path)
    return parsed


_READERS: dict[Format, tuple[ModuleType, str]] = {
    "verl_console": (console, "read"),
    "dict_console": (dict_console, "read"),
    "areal_console": (areal, "read"),
    "verl_jsonl": (verl_jsonl, "read"),
    "jsonl": (jsonl, "read"),
    "trl_state": (trl, "read"),
    "wandb": (wandb, "read"),
    "wandb_output": (wandb, "read"),
    "wandb_export": (wandb_export, "read"),
    "wandb_chart": (wandb_export, "read_chart"),
    "wandb_parquet": (wandb_export, "read_parquet"),
    "tensorboard": (tfevents, "read"),
    "swanlab": (swanlab, "read"),
    "swanlab_output": (swanlab, "read"),
    "mlflow": (mlflow, "read"),
    "mlflow_files": (mlflow, "read_files"),
    "trackio": (trackio, "read"),
    "clearml": (clearml, "read"),
    "hydra": (hydra, "read"),
    "dump": (traces, "read_verl"),
    "trace": (traces, "read"),
    "trace_recorder": (traces, "read_recorder"),
    "trace_nemo_rl": (traces, "read_nemo_rl"),
    "trace_prime_rl": (traces, "read_prime_rl"),
    "trace_areal": (traces, "read_areal"),
}
"""The module of each format and its reader in it, looked up when it is used."""
