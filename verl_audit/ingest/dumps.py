"""Generation dumps: `rollout_data/<step>.jsonl` and `val_data/<step>.jsonl`, one row a trajectory.

Lengths are kept, in characters, and text is not. A directory holds one split: its name tells which (`val`,
`validation`, `eval`, `test` against `rollout`, `train`); when it does not, rows with a `reward` field, which
verl writes for validation only, do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import orjson

from verl_audit.ingest.model import Parsed, Sample

Split = Literal["train", "validation"]
_VALIDATION = {"val", "valid", "validation", "eval", "evaluation", "test"}
_TRAIN = {"train", "training", "rollout", "rollouts"}
FILE_NAME = re.compile(r"(-?\d{1,18})\.jsonl")


def read(path: Path) -> list[Parsed]:
    """Read a directory of dumps (or one dump) to one `Parsed`; never raises."""
    parsed = Parsed(path, "dump")
    try:
        found = sorted(files(path)) if path.is_dir() else [(step_of(path), path)]
    except OSError as error:
        parsed.note("unreadable", str(error))
        return [parsed]
    named = _split_by_name(path.name if path.is_dir() else path.absolute().parent.name)
    for step, file in found:
        _file(file, step, named, parsed)
    return [parsed]


def files(directory: Path) -> list[tuple[int, Path]]:
    """The dumps in a directory with the step each is of."""
    return [(step_of(p), p) for p in directory.iterdir() if FILE_NAME.fullmatch(p.name) and p.is_file()]


def step_of(path: Path) -> int:
    """The step in a dump's name."""
    match = FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _split_by_name(name: str) -> Split | None:
    words = set(re.findall(r"[a-z]+", name.lower()))
    validation, train = bool(words & _VALIDATION), bool(words & _TRAIN)
    if validation == train:
        return None
    return "validation" if validation else "train"


def _file(path: Path, step: int, split: Split | None, parsed: Parsed) -> None:
    try:
        with path.open("rb") as stream:
            for line in stream:
                if text := line.strip(b"\0 \r\n\t"):
                    _row(text, step, split, parsed, file=path.name, torn=not line.endswith(b"\n"))
                parsed.bytes_read += len(line)
    except OSError as error:
        parsed.note("unreadable", f"{path.name}: {error}")


def _row(text: bytes, step: int, split: Split | None, parsed: Parsed, *, file: str, torn: bool) -> None:
    try:
        parsed.samples.append(_sample(text, step, split))
    except (ValueError, RecursionError) as error:
        parsed.note("torn_line" if torn else "bad_line", f"{file}: {str(error)[:100]}")


def _sample(line: bytes, step: int, split: Split | None) -> Sample:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = json.loads(line)  # takes bare NaN
    if not isinstance(row, dict) or not ("input" in row or "output" in row):
        raise ValueError("not a row of a generation dump")
    written, uid, source = row.get("step"), row.get("uid"), row.get("data_source")
    return Sample(
        split=split or ("validation" if "reward" in row else "train"),
        step=written if type(written) is int and abs(written) < 1 << 63 else step,
        uid=None if uid is None else str(uid),
        score=score(row.get("score")),
        input_chars=_length(row.get("input")),
        output_chars=_length(row.get("output")),
        padding=isinstance(uid, str) and uid.startswith("pad"),
        data_source=None if source is None else str(source),
    )


def score(value: Any) -> float | None:
    """Older verl writes numpy numbers as strings."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)\s*", value):
        return float(value)
    return None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, str) else None
