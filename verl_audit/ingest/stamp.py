"""Whether a source is as it was: size, modification time and first bytes of every file its reader opens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path

from verl_audit.ingest.discover import Found
from verl_audit.ingest.model import Format

HEAD = 4096
"""Bytes at the start of a file that are compared as well, since a copy may keep size and time of another file."""


def place(found: Found) -> str:
    """Names a source by format and absolute path, hashed: where a run lies is nobody's business but its owner's."""
    return hashlib.sha256(f"{found.format}\0{found.path.absolute()}".encode("utf-8", "surrogateescape")).hexdigest()


def stamp(found: Found) -> str:
    """Changes when a file of the source, or the code that reads it, does; OSError when a file cannot be read."""
    seen = hashlib.sha256(readers().encode())
    for path in sorted(_opened(found)):
        with path.open("rb") as stream:
            state, head = path.stat(), stream.read(HEAD)
        seen.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
        seen.update(hashlib.sha256(head).digest())
    return seen.hexdigest()


@cache
def readers() -> str:
    """A hash of the readers' code."""
    seen = hashlib.sha256()
    for file in sorted(files("verl_audit.ingest").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            seen.update(file.read_bytes())
    return seen.hexdigest()


def _opened(found: Found) -> Iterable[Path]:
    """The files a reader opens, those that are there."""
    beside = _BESIDE.get(found.format)
    listed = [found.path] if beside is None else beside(found.path)
    return [path.absolute() for path in listed if path.is_file()]


def _database(path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in ("", "-wal", "-journal")]


def _folder(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() else [path]


_BESIDE: dict[Format, Callable[[Path], list[Path]]] = {
    "hydra": lambda path: [path, path.with_name("overrides.yaml")],
    "clearml": lambda path: [path, path.with_name("task.json")],
    "mlflow": _database,
    "trackio": _database,
    "mlflow_files": lambda path: [path.parent / "meta.yaml", *path.rglob("*")],
    "dump": _folder,
    "wandb_parquet": _folder,
}
"""Formats whose source is more than the one file."""
