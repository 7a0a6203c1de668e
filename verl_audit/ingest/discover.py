"""Finds the files of a run that can be read, by what is in them; any other file is listed with the reason.

Content decides; a suffix does so only for formats that are never opened, and for what content leaves open.

Links are looked at last, so that `wandb/latest-run` never hides the directory it points to, and no file or
directory is visited twice.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_audit.ingest.dumps import FILE_NAME as DUMP_NAME
from verl_audit.ingest.model import Format, Problem
from verl_audit.ingest.wandb import MAGIC as WANDB_MAGIC

_HEAD = 256 << 10
_CHUNK = 4 << 20

_SKIPPED_DIRS = {
    ".git": "version control",
    "__pycache__": "byte code",
    "node_modules": "installed packages",
    "site-packages": "installed packages",
    "mlruns": "MLflow file store: not read yet; export the run's metrics or use another source",
}
_CHECKPOINT = re.compile(r"global_step_\d+$")
_NEVER_OPENED = {
    **dict.fromkeys((".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"), "pickle: never opened"),
    **dict.fromkeys((".safetensors", ".distcp", ".gguf", ".npy", ".npz"), "model or tensor data"),
}
_NOT_LOGS = {
    ".py",
    ".pyc",
    ".md",
    ".rst",
    ".sh",
    ".ipynb",
    ".html",
    ".js",
    ".css",
    ".toml",
    ".cfg",
    ".ini",
    ".c",
    ".cu",
    ".svg",
    ".pdf",
}
_LOG_NAME = re.compile(r"\.(?:wandb|jsonl|ndjson|log|db|swanlab)$|tfevents|(?:^|/)(?:output|console|train)\.txt$")
_UNREAD: tuple[tuple[bytes, str], ...] = (
    (b":SWL", "SwanLab log: not read yet; use the run's console log or another tracker"),
    (b"SQLite format 3\0", "SQLite database (trackio, MLflow): not read yet; use another source of the run"),
    (b"\x1f\x8b", "gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd: unpack it first"),
)
"""First bytes of formats that hold what a run logged, or may hold it, and are not read."""
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "zip archive, as saved models are: unpack it first if it holds logs"),
    (b"PAR1", "parquet: not a metric log"),
    (b"\x80\x02", "pickle: never opened"),
    (b"\x80\x03", "pickle: never opened"),
    (b"\x80\x04", "pickle: never opened"),
    (b"\x80\x05", "pickle: never opened"),
)
TRACE = "per-trajectory trace: not read by this version"
_VERL_MARK = re.compile(rb"step:-?\d+ - [^\n]{0,400}/|\[validate_config\]|Training Progress: ")
_VERL_WORDS = (b"step:", b"[validate_config]", b"Training Progress: ")
_ANY_MARK = re.compile(rb"\(\w[\w:. -]{0,120} pid=\d+(?:, ip=[^)\s]+)?\)|Traceback \(most recent call last\)")
_ANY_WORDS = (b" pid=", b"Traceback (most")
_DICT_LINE = re.compile(
    rb"(?P<slime>\b(?:perf|step|rollout|eval|train) \d+: \{'[\w./-]+': )"
    rb"|\{'(?:loss|reward|num_tokens|train_loss|train_runtime|eval_\w+)': ['\d-]"
)
"""Metrics printed as a Python dict: slime puts a word and a number before it, TRL nothing."""
_LONGEST_SEARCH = 1 << 30
_CONTROL = bytes({*range(1, 32)} - {*b"\t\n\v\f\r\b\x1b"})
_BLANK = b"\0 \r\n\t"
_DUMP_START = re.compile(rb'\{"(?:input|output)": ?"')
_LOGGER_START = re.compile(rb'\{"step": ?-?\d+, ?"data": ?\{')
_CHART = "W&B chart export (may be sampled): not read yet; give the .wandb file"
_TABLE = "CSV: not read yet; give the files the logger wrote"
_CONFIG_KEYS = re.compile(rb"^(actor_rollout_ref|trainer|algorithm):", re.MULTILINE)


@dataclass(frozen=True)
class Found:
    """A file (for dumps and `.hydra`: a directory) and the format its content shows."""

    path: Path
    format: Format


@dataclass(frozen=True)
class Skipped:
    """A file or directory that is not read, and why."""

    path: Path
    reason: str
    notable: bool = False
    """Whether it may hold what the run logged, so that a report names it; the others are only counted."""


@dataclass(frozen=True)
class Discovery:
    """What is under the given paths."""

    files: tuple[Found, ...]
    skipped: tuple[Skipped, ...]
    problems: tuple[Problem, ...]


@dataclass
class _Walk:
    """State of one walk: what was found, what was visited, and links still to follow."""

    roots: frozenset[Path]
    files: list[Found] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    links: deque[Path] = field(default_factory=deque)

    def skip(self, path: Path, reason: str, *, notable: bool = False) -> None:
        self.skipped.append(Skipped(path, reason, notable))

    def add(self, path: Path, form: Format) -> None:
        found = Found(path, form)
        if found not in self.files:
            self.files.append(found)


def discover(paths: Sequence[Path]) -> Discovery:
    """Look at files and walk directories, in sorted order; a missing path raises FileNotFoundError."""
    walk = _Walk(frozenset(paths))
    for path in paths:
        path.stat()
    for path in paths:
        _visit(path, walk)
    while walk.links:
        _follow(walk.links.popleft(), paths, walk)
    return Discovery(
        files=tuple(sorted(walk.files, key=lambda f: str(f.path))),
        skipped=tuple(sorted(walk.skipped, key=lambda s: str(s.path))),
        problems=tuple(walk.problems),
    )


def _follow(link: Path, roots: Sequence[Path], walk: _Walk) -> None:
    """Visit what a link points to, unless that leads back above where the walk began."""
    target = os.path.realpath(link)
    if any(Path(os.path.realpath(root)).is_relative_to(target) for root in roots):
        walk.skip(link, "link to a directory that contains this one")
    elif not Path(target).exists():
        walk.skip(link, "broken link")
    else:
        _visit(link, walk)


def _visit(path: Path, walk: _Walk) -> None:
    try:
        real = os.path.realpath(path)
        mode = path.stat().st_mode
        if real in walk.seen:
            return
        walk.seen.add(real)
        if stat.S_ISDIR(mode):
            _directory(path, walk)
        elif stat.S_ISREG(mode):
            _file(path, walk)
        else:
            walk.skip(path, "not a regular file")
    except OSError as error:
        walk.problems.append(Problem(str(path), "unreadable", error.strerror or str(error)))


def _directory(path: Path, walk: _Walk) -> None:
    name = Path(os.path.realpath(path)).name
    if _CHECKPOINT.match(name):
        walk.skip(path, "checkpoint")
    elif name in _SKIPPED_DIRS:
        walk.skip(path, _SKIPPED_DIRS[name], notable=name == "mlruns")
    elif name == ".hydra" and (path / "config.yaml").is_file():
        walk.add(path / "config.yaml", "hydra")
    else:
        for entry in sorted(path.iterdir()):
            if entry.is_symlink():
                walk.links.append(entry)
            else:
                _visit(entry, walk)


def _file(path: Path, walk: _Walk) -> None:
    if reason := _NEVER_OPENED.get(path.suffix.lower()):
        walk.skip(path, reason)
        return
    if path.stat().st_size == 0:
        walk.skip(path, "empty", notable=bool(_LOG_NAME.search(path.as_posix())))
        return
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    verdict = _recognise(path, head)
    if isinstance(verdict, Skipped):
        walk.skipped.append(verdict)
    elif verdict.format == "dump" and path not in walk.roots:
        walk.add(path.parent, "dump")
    else:
        walk.add(path, verdict.format)


def _recognise(path: Path, head: bytes) -> Found | Skipped:
    """The format of a file, told by its first bytes, then by its name, then by a search for console marks."""
    suffix = path.suffix.lower()
    if form := _by_signature(path, suffix, head):
        return Found(path, form)
    if reason := next((reason for magic, reason in _UNREAD if head.startswith(magic)), None):
        return Skipped(path, reason, notable=True)
    if suffix in (".jsonl", ".ndjson", ".json") or head.lstrip(_BLANK).startswith(b'{"'):
        return _recognise_json(path, head)
    if suffix in (".csv", ".tsv"):
        chart = head.startswith(b'"Step",')
        return Skipped(path, _CHART if chart else _TABLE, notable=chart)
    if reason := _not_a_log(path, suffix, head):
        return Skipped(path, reason)
    return _recognise_console(path)


def _by_signature(path: Path, suffix: str, head: bytes) -> Format | None:
    if head.startswith(WANDB_MAGIC[:4]) or suffix == ".wandb":
        return "wandb"
    if b"brain.Event:" in head[:64] or "tfevents" in path.name:
        return "tensorboard"
    return "hydra" if suffix in (".yaml", ".yml") and _is_config(head) else None


def _not_a_log(path: Path, suffix: str, head: bytes) -> str | None:
    """Why a file is not searched for console marks."""
    if magic := next((reason for magic, reason in _MAGICS if head.startswith(magic)), None):
        return magic
    if suffix in (".yaml", ".yml"):
        return "not a verl configuration"
    if path.name.startswith("debug") and path.parent.name == "logs":
        return "wandb's own debug log"
    return "not a log" if suffix in _NOT_LOGS or _is_binary(head) else None


def _is_config(head: bytes) -> bool:
    keys = set(_CONFIG_KEYS.findall(head))
    return b"actor_rollout_ref" in keys or keys >= {b"trainer", b"algorithm"}


def _recognise_json(path: Path, head: bytes) -> Found | Skipped:
    rows = (_row(line) for line in re.split(rb"[\n\0]+", head)[:8])
    row = next((r for r in rows if r is not None), {})
    start = head.lstrip(_BLANK)  # tells even when the first line is torn, or longer than the head
    if (isinstance(row.get("data"), dict) and isinstance(row.get("step"), int)) or _LOGGER_START.match(start):
        return Found(path, "verl_jsonl")
    if DUMP_NAME.fullmatch(path.name) and ("input" in row or "output" in row or _DUMP_START.match(start)):
        return Found(path, "dump")
    if "event" in row:
        return Skipped(path, TRACE, notable=True)
    if path.name == "trainer_state.json":
        return Skipped(path, "TRL trainer state: not read yet", notable=True)
    return Skipped(path, "JSON of a kind that is not known")


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)  # takes bare NaN, which other writers leave
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_binary(head: bytes) -> bool:
    text = head.replace(b"\0", b"")
    control = len(text) - len(text.translate(None, _CONTROL))
    return control > len(text) // 20


def _recognise_console(path: Path) -> Found | Skipped:
    """Search the whole file: sampled text can fill megabytes before the first step line.

    Ray prefixes and tracebacks are in the logs of other frameworks too, so lines that are dicts outweigh them.
    """
    other, framework = False, None
    searched, tail = 0, b""
    with path.open("rb") as stream:
        while (chunk := stream.read(_CHUNK)) and searched < _LONGEST_SEARCH:
            text = tail + chunk
            if _holds(text, _VERL_WORDS, _VERL_MARK):
                return Found(path, "verl_console")
            if framework is None and b"{'" in text and (line := _DICT_LINE.search(text)):
                framework = "slime" if line["slime"] else "TRL"
            other = other or _holds(text, _ANY_WORDS, _ANY_MARK)
            searched += len(chunk)
            tail = text[-1024:]
    if framework:
        return Skipped(path, f"holds lines of {framework} (a dict per line), not read by this version", notable=True)
    return Found(path, "verl_console") if other else Skipped(path, "no step line and no mark of verl or Ray in it")


def _holds(text: bytes, words: tuple[bytes, ...], mark: re.Pattern[bytes]) -> bool:
    """Whether the mark is in the text; the words, one of which is in every mark, are found much faster."""
    return any(word in text for word in words) and mark.search(text) is not None
