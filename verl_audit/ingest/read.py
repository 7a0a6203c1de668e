"""Reads every file a discovery found, each with the reader of its format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verl_audit.ingest import console, dumps, hydra, tfevents, verl_jsonl, wandb
from verl_audit.ingest.discover import Discovery, Found
from verl_audit.ingest.model import Parsed


def read_all(discovery: Discovery, progress: Callable[[Path, int], None] | None = None) -> list[Parsed]:
    """Parse all found files in order; `progress` hears of each file and the bytes read from it."""
    results: list[Parsed] = []
    for found in discovery.files:
        parsed = read_one(found)
        results.extend(parsed)
        if progress:
            progress(found.path, parsed[0].bytes_read if parsed else 0)
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
    match found.format:
        case "verl_console":
            return console.read(found.path)
        case "verl_jsonl":
            return verl_jsonl.read(found.path)
        case "wandb" | "wandb_output":
            return wandb.read(found.path)
        case "tensorboard":
            return tfevents.read(found.path)
        case "hydra":
            return hydra.read(found.path)
        case "dump":
            return dumps.read(found.path)
