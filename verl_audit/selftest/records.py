"""Judged runs kept as JSON, a line for each run with all its answers, and the code that judged them.

Of an answer with a family of signals hidden only what differs from that with everything is written: `{}` where nothing
does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_audit.errors import AuditError
from verl_audit.reference import environments, scenario, scenarios
from verl_audit.selftest.hide import families
from verl_audit.selftest.run import WAYS
from verl_audit.selftest.score import Answer, Judged, Truth

JUDGES = ("rules", "ingest", "store", "measure", "diagnose", "reference", "trace")
"""Packages whose code or data decides what is answered."""
HERE = ("run.py", "hide.py", "hidden.toml")
"""Files of this package that do."""
_SUFFIXES = (".py", ".toml", ".yaml", ".sql", ".json")


def code_digest() -> str:
    """Hash over everything that decides a verdict; verdicts of other code are not mixed with new ones."""
    top = Path(str(files("verl_audit")))
    places = [path for package in JUDGES for path in sorted(_folder(package).rglob("*")) if path.suffix in _SUFFIXES]
    places += [top / "pipeline.py", *(top / "selftest" / name for name in HERE)]
    found = hashlib.sha256()
    for path in places:
        content = path.read_bytes()
        found.update(f"{path.parent.name}/{path.name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def _folder(package: str) -> Path:
    return Path(str(files(f"verl_audit.{package}")))


def to_json(runs: Sequence[Judged], digest: str) -> str:
    """The records in order; the same bytes for the same runs."""
    rows = [_row(list(of_run)) for _, of_run in groupby(in_order(runs), lambda run: _order(run)[:3])]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{"judged_by":"{digest}","runs":[\n{lines}\n]}}\n'


def in_order(runs: Iterable[Judged]) -> list[Judged]:
    """By environment, scenario, seed, what is hidden and way."""
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
    return [run for row in found["runs"] for run in _judged(row)]


def with_all(known: Iterable[Judged], new: Iterable[Judged]) -> list[Judged]:
    """Both, a new one in the place of an older one of the same run and way."""
    return list({key(run): run for run in (*known, *new)}.values())


Key = tuple[str, str, int, str, str]


def key(run: Judged) -> Key:
    """What makes a verdict another: environment, scenario, seed, way and what is hidden."""
    return run.environment, run.scenario, run.seed, run.way, run.hidden


def _order(run: Judged) -> tuple[int, ...]:
    names, envs, hidden = [s.name for s in scenarios()], list(environments()), ["", *families()]
    where = envs.index(run.environment), names.index(run.scenario), run.seed
    return (*where, hidden.index(run.hidden), WAYS.index(run.way))


def _row(runs: Sequence[Judged]) -> dict[str, Any]:
    first = runs[0]
    truth = {name: getattr(first.truth, name) for name in _MEASURED}
    where = {"scenario": first.scenario, "environment": first.environment, "seed": first.seed}
    whole = {run.way: _fields(run.answer) for run in runs if not run.hidden}
    answers = {_view(run): _fields(run.answer, whole.get(run.way) if run.hidden else None) for run in runs}
    return {**where, **{name: value for name, value in truth.items() if value is not None}, "answers": answers}


def _view(run: Judged) -> str:
    """The way, and after a dash what is hidden."""
    return f"{run.way}-{run.hidden}" if run.hidden else run.way


_MEASURED = ("speed", "sets_in", "behind")
"""What is true of one run; the rest is true of its scenario."""
_EMPTY = Answer("")


def _fields(answer: Answer, whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an answer says, or what of it is not as in `whole`; intervals to four digits."""
    told = {name: _short(value) for name, value in asdict(answer).items()}
    usual = {name: _short(value) for name, value in asdict(_EMPTY).items()} | dict(whole or {})
    return {name: value for name, value in told.items() if value != usual[name]}


def _short(value: Any) -> Any:
    return [float(f"{v:.4g}") if isinstance(v, float) else v for v in value] if isinstance(value, tuple) else value


def _judged(row: Mapping[str, Any]) -> list[Judged]:
    stated = scenario(row["scenario"])
    measured = [row.get(name) for name in _MEASURED]
    truth = Truth(
        frozenset(stated.causes), frozenset(stated.at_work), stated.other, measured[0], stated.per_hour, *measured[1:]
    )
    where = row["scenario"], row["environment"], row["seed"]
    found = []
    for name, fields in row["answers"].items():
        way, _, hidden = name.partition("-")
        whole = row["answers"].get(way, {}) if hidden else {}
        before = _answer(whole) if whole else None
        found.append(Judged(*where, way, truth, _answer({**whole, **fields}), hidden, before))
    return found


def _answer(fields: Mapping[str, Any]) -> Answer:
    known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Answer(**known)
