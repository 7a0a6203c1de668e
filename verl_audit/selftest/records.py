"""Judged runs kept as JSON, a line for each, with the code that judged them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from verl_audit.errors import AuditError
from verl_audit.reference import environments, scenario, scenarios
from verl_audit.selftest.run import WAYS
from verl_audit.selftest.score import Answer, Judged, Truth

JUDGES = ("rules", "ingest", "store", "measure", "diagnose", "reference", "trace")
"""Packages whose code or data decides what is answered."""
_SUFFIXES = (".py", ".toml", ".yaml", ".sql", ".json")


def code_digest() -> str:
    """Hash over everything that decides a verdict; verdicts of other code are not mixed with new ones."""
    found = hashlib.sha256(Path(str(files("verl_audit").joinpath("pipeline.py"))).read_bytes())
    for package in JUDGES:
        folder = Path(str(files(f"verl_audit.{package}")))
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES):
            content = path.read_bytes()
            found.update(f"{package}/{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def to_json(runs: Sequence[Judged], digest: str) -> str:
    """The records in order; the same bytes for the same runs."""
    lines = ",\n".join(json.dumps(_row(run), separators=(",", ":")) for run in in_order(runs))
    return f'{{"judged_by":"{digest}","runs":[\n{lines}\n]}}\n'


def in_order(runs: Iterable[Judged]) -> list[Judged]:
    """By environment, scenario, seed and way."""
    return sorted(runs, key=_order)


def check(path: Path) -> None:
    """Refuse to write over a file that holds no such records."""
    if path.is_file() and b'{"judged_by":' not in path.read_bytes()[:20]:
        raise AuditError(f"{path}: it exists and holds no verdicts of a self-test; give another name or remove it")


def write(path: Path, runs: Sequence[Judged], digest: str) -> None:
    """Put them into a file, whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(to_json(runs, digest), encoding="utf-8")
    beside.replace(path)


def read(path: Path, digest: str | None = None) -> list[Judged]:
    """The records of a file; none where it is absent, or with `digest` where other code judged them."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if digest is not None and found["judged_by"] != digest:
        return []
    return [_judged(row) for row in found["runs"]]


def with_all(known: Iterable[Judged], new: Iterable[Judged]) -> list[Judged]:
    """Both, a new one in the place of an older one of the same run and way."""
    return list({_order(run): run for run in (*known, *new)}.values())


def _order(run: Judged) -> tuple[int, int, int, int]:
    names, envs = [s.name for s in scenarios()], list(environments())
    return envs.index(run.environment), names.index(run.scenario), run.seed, WAYS.index(run.way)


def _row(run: Judged) -> dict[str, Any]:
    answer = {key: value for key, value in asdict(run.answer).items() if value not in (None, (), "")}
    if run.answer.speed is not None:
        answer["speed"] = [float(f"{value:.4g}") for value in run.answer.speed]
    where = {"scenario": run.scenario, "environment": run.environment, "seed": run.seed, "way": run.way}
    return {**where, "true_speed": run.truth.speed, "answer": answer}


def _judged(row: dict[str, Any]) -> Judged:
    stated, answer = scenario(row["scenario"]), row["answer"]
    truth = Truth(frozenset(stated.causes), frozenset(stated.at_work), stated.other, row["true_speed"], stated.per_hour)
    found = Answer(
        answer["outcome"],
        tuple(answer.get("causes", ())),
        tuple(answer.get("risks", ())),
        answer.get("other"),
        tuple(answer.get("missing", ())),
        answer.get("symptom", ""),
        tuple(answer["speed"]) if "speed" in answer else None,
    )
    return Judged(row["scenario"], row["environment"], row["seed"], row["way"], truth, found)
