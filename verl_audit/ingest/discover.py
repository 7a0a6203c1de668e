"""Finds the files of a run that can be read, by what is in them; any other file is listed with the reason.

Content decides; a suffix does so only for formats that are never opened, and for what content leaves open.

Links are looked at last, so that `wandb/latest-run` never hides the directory it points to, and no file or
directory is visited twice.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl_audit.ingest import (
    areal,
    clearml,
    dict_console,
    jsonl,
    mlflow,
    sqlite_copy,
    swanlab,
    trace_areal,
    trace_nemo_rl,
    trace_parquet,
    trace_prime_rl,
    trace_recorder,
    trl,
    unpack,
    wandb_export,
)
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
    ".trash": "deleted runs",
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
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
EVENTS = "JSON events of a kind that is not known"
_DIRECTORY_OF: dict[Format, Callable[[Path], Path]] = {
    "dump": lambda path: path.parent,
    "wandb_parquet": lambda path: path.parent,
    "trace": trace_parquet.home,
    "trace_nemo_rl": lambda path: path.parent,
    "trace_prime_rl": lambda path: path.parents[3],
    "trace_areal": lambda path: path.parents[2],
}
"""Formats whose files are one source, and the directory that stands for it."""
_TEXT_FORMATS: frozenset[Format] = frozenset(
    {
        "verl_console",
        "dict_console",
        "areal_console",
        "verl_jsonl",
        "jsonl",
        "trl_state",
        "wandb_export",
        "wandb_chart",
    }
)
"""Formats that are read from a compressed file as well."""
STDIN = Path("-")
_CONSOLE_MARK = re.compile(
    rb"step:-?\d+ - [^\n]{0,400}/|\(\w[\w:. -]{0,120} pid=\d+(?:, ip=[^)\s]+)?\)|\[validate_config\]"
    rb"|Traceback \(most recent call last\)|Training Progress: "
)
_CONSOLE_WORDS = (b"step:", b" pid=", b"[validate_config]", b"Traceback (most", b"Training Progress: ")
_LONGEST_SEARCH = 1 << 30
_CONTROL = bytes({*range(1, 32)} - {*b"\t\n\v\f\r\b\x1b"})
_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_ROWS = 64
_JSON_START = re.compile(rb"\{\s*\"|\[\s*\{")
_BLANK = b"\0 \r\n\t"
_DUMP_START = re.compile(rb'\{"(?:input|output)": ?"')
_LOGGER_START = re.compile(rb'\{"step": ?-?\d+, ?"data": ?\{')
_RECORD_MARK = re.compile(rb"step:-?\d+ - [^\n]{0,400}/")
_WEAK_SEARCH = 64 << 20
"""How far to look on for a step line once only a mark of Ray or verl was seen."""
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
    paths = [_spooled() if path == STDIN else path for path in paths]
    walk = _Walk(frozenset(paths))
    for path in paths:
        path.stat()
    for path in paths:
        _visit(path, walk)
    while walk.links:
        _follow(walk.links.popleft(), paths, walk)
    _keep_newest_states(walk)
    return Discovery(
        files=tuple(sorted(walk.files, key=lambda f: str(f.path))),
        skipped=tuple(sorted(walk.skipped, key=lambda s: str(s.path))),
        problems=tuple(walk.problems),
    )


def _spooled() -> Path:
    """Standard input as a file, kept until the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="verl-audit-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "stdin" / "stdin"
    path.parent.mkdir()
    with path.open("wb") as stream:
        shutil.copyfileobj(sys.stdin.buffer, stream)
    return path


def _keep_newest_states(walk: _Walk) -> None:
    """Of the trainer states of one run, keep the one that went furthest: it holds the history of the others."""
    runs: dict[Path, list[Path]] = {}
    for found in walk.files:
        if found.format == "trl_state":
            runs.setdefault(trl.run_directory(found.path), []).append(found.path)
    for states in runs.values():
        kept = trl.newest(states)
        for path in states:
            if path != kept:
                walk.files.remove(Found(path, "trl_state"))
                walk.skip(path, f"the history in {kept.parent.name}/{kept.name} goes further")


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
        walk.skip(path, _SKIPPED_DIRS[name])
    elif mlflow.is_run(path):
        walk.add(path, "mlflow_files")
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
    if path.name.endswith(".parquet.tmp"):
        walk.skip(path, "parquet that is being written, or was left half-written")
        return
    if path.stat().st_size == 0:
        walk.skip(path, "empty", notable=bool(_LOG_NAME.search(path.as_posix())))
        return
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    verdict = _recognise(path, head)
    if isinstance(verdict, Skipped):
        walk.skipped.append(verdict)
    elif verdict.format in _DIRECTORY_OF and path not in walk.roots:
        walk.add(_DIRECTORY_OF[verdict.format](path), verdict.format)  # one source in several files
    else:
        walk.add(path, verdict.format)


def _recognise(path: Path, head: bytes) -> Found | Skipped:
    """The format of a file, told by its first bytes, then by its name, then by a search for console marks."""
    if magic := unpack.packing(head):
        return _recognise_packed(path, magic)
    if form := _by_signature(path, path.suffix.lower(), head):
        return Found(path, form)
    if reason := _binary_log(path, head):
        return reason if isinstance(reason, Skipped) else Found(path, reason)
    return _recognise_text(path, path, head)


def _recognise_packed(path: Path, magic: bytes) -> Found | Skipped:
    if not unpack.can_unpack(magic):
        return Skipped(path, unpack.NO_ZSTD, notable=True)
    with unpack.opened(path) as stream:
        head = stream.read(_HEAD)
    inner = path.with_name(unpack.inner_name(path))
    if not head or _is_binary(head) or _by_signature(inner, inner.suffix.lower(), head):
        log = bool(_LOG_NAME.search(inner.as_posix()))
        return Skipped(path, "compressed, and no text log: unpack it first", notable=log)
    verdict = _recognise_text(path, inner, head)
    if isinstance(verdict, Found) and verdict.format not in _TEXT_FORMATS:
        return Skipped(path, f"compressed {verdict.format}: unpack it first", notable=True)
    return verdict


def _recognise_text(path: Path, named: Path, head: bytes) -> Found | Skipped:
    """`named` is the path with the name the text has; its compressed file may be called otherwise."""
    suffix = named.suffix.lower()
    start = head.lstrip(_BLANK)
    reason = "no step line and no mark of verl or Ray in it"
    if suffix in _JSON_ENDINGS or _JSON_START.match(start):
        verdict = _named_trace(path, named) or _recognise_json(path, named, head)
        if isinstance(verdict, Found) or suffix in _JSON_ENDINGS:
            return verdict
        reason = verdict.reason  # unless it is a console that begins with a printed configuration
    if suffix in (".csv", ".tsv") or _is_table(head):
        return _recognise_csv(path, head)
    if other := _not_a_log(named, suffix, head):
        return Skipped(path, other)
    form = _console_kind(path)
    return Found(path, form) if form else Skipped(path, reason)


def _by_signature(path: Path, suffix: str, head: bytes) -> Format | None:
    if head.startswith(WANDB_MAGIC[:4]) or suffix == ".wandb":
        return "wandb"
    if head.startswith(swanlab.MAGIC[:4]) or suffix == ".swanlab":
        return "swanlab"
    if b"brain.Event:" in head[:64] or "tfevents" in path.name:
        return "tensorboard"
    return "hydra" if suffix in (".yaml", ".yml") and _is_config(head) else None


def _binary_log(path: Path, head: bytes) -> Format | Skipped | None:
    """What a database, an archive or a parquet file is; None if the file is none of them."""
    if head.startswith(sqlite_copy.MAGIC):
        names = sqlite_copy.tables(path)
        if names >= {"metrics", "runs", "experiments"}:
            return "mlflow"
        unknown = Skipped(path, "SQLite database of no known tracker", notable=True)
        return "trackio" if names >= {"metrics", "configs"} else unknown
    if head.startswith(b"PK\x03\x04"):
        return "clearml" if clearml.is_session(path) else Skipped(path, "zip, and no ClearML session: unpack it first")
    if head.startswith(b"PAR1"):
        if trace_parquet.is_trace(path):
            return "trace"
        is_history = wandb_export.is_history_parquet(path)
        return "wandb_parquet" if is_history else Skipped(path, "parquet: no metric history (no _step beside numbers)")
    return None


def _is_table(head: bytes) -> bool:
    """A chart or history without the ending .csv, such as one from standard input."""
    return head[:400].startswith((b'"Step"', b"Step,", b"_step,", b'"_step"', b"step,", b",_step,"))


def _recognise_csv(path: Path, head: bytes) -> Found | Skipped:
    match wandb_export.csv_kind(wandb_export.csv_header(head)):
        case "chart":
            return Found(path, "wandb_chart")
        case "history":
            return Found(path, "wandb_export")
        case "runs":
            return Skipped(path, wandb_export.RUNS_TABLE, notable=True)
    return Skipped(path, "CSV without a column for the step")


def _not_a_log(path: Path, suffix: str, head: bytes) -> str | None:
    """Why a file is not searched for console marks."""
    if suffix in (".yaml", ".yml"):
        return "not a verl configuration"
    if head.startswith(_PICKLES):
        return "pickle: never opened"
    if path.name.startswith("debug") and path.parent.name == "logs":
        return "wandb's own debug log"
    return "not a log" if suffix in _NOT_LOGS or _is_binary(head) else None


def _is_config(head: bytes) -> bool:
    keys = set(_CONFIG_KEYS.findall(head))
    return b"actor_rollout_ref" in keys or keys >= {b"trainer", b"algorithm"}


def _recognise_json(path: Path, named: Path, head: bytes) -> Found | Skipped:
    lines = re.split(rb"[\n\0]+", head)
    rows = [row for row in map(_row, lines[:_ROWS]) if row is not None]
    row = next((r for r in rows[:8] if isinstance(r, dict)), {})
    start = head.lstrip(_BLANK)  # tells even when the first line is torn, or longer than the head
    if (isinstance(row.get("data"), dict) and isinstance(row.get("step"), int)) or _LOGGER_START.match(start):
        return Found(path, "verl_jsonl")
    if DUMP_NAME.fullmatch(named.name) and ("input" in row or "output" in row or _DUMP_START.match(start)):
        return Found(path, "dump")
    if "event" in row:
        known = trace_recorder.is_event(row)
        return Found(path, "trace_recorder") if known else Skipped(path, EVENTS, notable=True)
    if trl.is_state(head) or named.name == trl.NAME:
        return Found(path, "trl_state")
    if any(clearml.is_events(r) for r in rows[:8]):
        return Found(path, "clearml")
    return _recognise_rows(path, [r for r in rows if isinstance(r, dict)], start)


def _named_trace(path: Path, named: Path) -> Found | Skipped | None:
    """Dumps of trajectories that their place tells: a first line may be longer than what is read of a file."""
    place = named.absolute().as_posix()
    if episodes := trace_prime_rl.NAME.fullmatch(place):
        trained = episodes[1] == "train"
        return Found(path, "trace_prime_rl") if trained else Skipped(path, "episodes of an evaluation")
    if trace_prime_rl.EXPORT.fullmatch(place):
        return Skipped(path, "token export: read with the episodes beside it")
    if trace_nemo_rl.NAME.fullmatch(named.name):
        return Found(path, "trace_nemo_rl")
    is_areal = trace_areal.DUMP.fullmatch(place) or trace_areal.SESSIONS.fullmatch(place)
    return Found(path, "trace_areal") if is_areal else None


def _recognise_rows(path: Path, rows: list[dict[str, Any]], start: bytes) -> Found | Skipped:
    """Metric rows: one a line, in one list, or by columns as pandas writes a table."""
    if start.startswith(b"[") or any(wandb_export.is_columns(row) for row in rows[:1]):
        listed = islice(wandb_export.objects_of_list(start.decode("utf-8", "replace")), _ROWS)
        reason = jsonl.refusal([row for _, row in listed]) if start.startswith(b"[") else None
        return Skipped(path, reason) if reason else Found(path, "wandb_export")
    reason = jsonl.refusal(rows)
    if reason:
        return Skipped(path, reason)
    return Found(path, "wandb_export" if all("_step" in row and "step" not in row for row in rows) else "jsonl")


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)  # takes bare NaN, which other writers leave
    except (ValueError, RecursionError):
        return None


def _is_binary(head: bytes) -> bool:
    text = head.replace(b"\0", b"")
    control = len(text) - len(text.translate(None, _CONTROL))
    return control > len(text) // 20


def _console_kind(path: Path) -> Format | None:
    """Search the whole file: sampled text can fill megabytes before the first step line."""
    searched, tail = 0, b""
    kind: Format | None = None
    with unpack.opened(path) as stream:
        while (chunk := stream.read(_CHUNK)) and searched < (_WEAK_SEARCH if kind else _LONGEST_SEARCH):
            text = tail + chunk
            if strong := _step_lines(text):
                return strong
            if kind is None and any(word in text for word in _CONSOLE_WORDS) and _CONSOLE_MARK.search(text):
                kind, searched = "verl_console", 0
            searched += len(chunk)
            tail = text[-1024:]
    return kind


def _step_lines(text: bytes) -> Format | None:
    """Whose step lines are in a text; marks of Ray and tracebacks are in the logs of all of them."""
    if b"step:" in text and _RECORD_MARK.search(text):
        return "verl_console"
    if areal.has_mark(text):
        return "areal_console"
    return "dict_console" if dict_console.has_mark(text) else None
