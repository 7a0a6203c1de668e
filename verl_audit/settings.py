"""What a user may set: rule parameters, facts, and the few numbers of the symptom."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from verl_audit.errors import AuditError
from verl_audit.ingest.adapters import TRAINERS
from verl_audit.measure.model import Scalar, catalog
from verl_audit.measure.symptom import RUN_SD

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

FILE_NAME = "verl-audit.toml"
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "trainer": tuple(sorted(TRAINERS)),
    "log_prob_mode": ("bypass", "decoupled"),
    "staleness_strategy": ("drop", "wait"),
}
"""Facts in text that the rules compare with these words and no others."""
LEAST: Mapping[str, float] = {"top_k": -1, "staleness_threshold": 0, "fa_staleness_share": 0, "temperature": 0}
"""Smallest values of the facts that may be 0 or -1 (off); any other number is above 0."""


@dataclass(frozen=True)
class Settings:
    """Overrides: `params` by `rule-id.parameter`, `facts` by name, and numbers of the symptom."""

    params: Mapping[str, Scalar] = field(default_factory=dict)
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    run_sd: float = RUN_SD
    switch_step: float | None = None
    rule_dirs: tuple[Path, ...] = ()

    def as_given(self) -> dict[str, Scalar]:
        """The overrides in the form in which `--set` takes them, for the record."""
        given: dict[str, Scalar] = {**self.params, **{f"fact.{k}": v for k, v in self.facts.items()}}
        if self.run_sd != RUN_SD:
            given["run_sd"] = self.run_sd
        if self.switch_step is not None:
            given["switch_step"] = self.switch_step
        return dict(sorted(given.items()))


def read_settings(pairs: Sequence[str] = (), rule_dirs: Sequence[Path] = (), file: Path | None = None) -> Settings:
    """Settings from `verl-audit.toml` (given, else the working directory's) and `key=value` pairs, which win."""
    path = file if file is not None else Path(FILE_NAME)
    raw = _read_file(path) if file is not None or path.is_file() else {}
    unknown = set(raw) - {"set", "rules"}
    if unknown:
        raise AuditError(
            f"{path}: unknown entry {min(unknown)!r}; it holds a table [set] and a list `rules` of folders"
        )
    values = {**_flat(raw.get("set", {})), **dict(_pair(p) for p in pairs)}
    folders = raw.get("rules", [])
    if not isinstance(folders, list):
        raise AuditError(f"{path}: `rules` is a list of folders")
    dirs = tuple(path.parent / str(d) for d in folders)
    return _sorted_out(values, (*dirs, *rule_dirs))


def _read_file(path: Path) -> dict[str, object]:
    try:
        read: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
        return read
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AuditError(f"{path}: {error}") from None


def _flat(table: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(table, Mapping):
        return {prefix.rstrip("."): table}
    return {name: value for key, inner in table.items() for name, value in _flat(inner, f"{prefix}{key}.").items()}


def _pair(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise AuditError(f"--set {text!r}: write key=value, e.g. fact.trainer=sync or RULE.PARAMETER=3")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise AuditError(f"--set {text!r}: {value!r} is no number, text or boolean") from None


def _sorted_out(values: Mapping[str, object], rule_dirs: tuple[Path, ...]) -> Settings:
    params, facts, numbers = {}, {}, {}
    for key, value in values.items():
        if not isinstance(value, int | float | str | bool):
            raise AuditError(f"setting {key}: {value!r} is no number, text or boolean")
        if key in ("run_sd", "switch_step"):
            numbers[key] = _number(key, value)
        elif key.startswith("fact."):
            facts[_fact(key, value)] = float(value) if type(value) is int else value
        elif "." in key:
            params[key] = value
        else:
            raise AuditError(f"setting {key!r} is not known: it is run_sd, switch_step, fact.NAME or RULE.PARAMETER")
    return Settings(params, facts, numbers.get("run_sd", RUN_SD), numbers.get("switch_step"), rule_dirs)


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise AuditError(f"setting {key}: {value!r} is no positive number")
    return float(value)


def _fact(key: str, value: Scalar) -> str:
    name = key.removeprefix("fact.")
    if name not in catalog() or catalog()[name].unit != "fact":
        known = ", ".join(n for n, d in catalog().items() if d.unit == "fact")
        raise AuditError(f"setting {key}: no such fact (known: {known})")
    kind = "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"
    if kind != catalog()[name].type:
        raise AuditError(f"setting {key}: {value!r} is a {kind}; the fact is a {catalog()[name].type}")
    if name in ALLOWED and value not in ALLOWED[name]:
        raise AuditError(f"setting {key}: {value!r} is none of {', '.join(ALLOWED[name])}")
    if kind == "number" and not _in_range(name, float(value)):
        least = f"{LEAST[name]:g} or more" if name in LEAST else "a number above 0"
        raise AuditError(f"setting {key}: {value!r} is out of range; it must be {least}")
    return name


def _in_range(name: str, value: float) -> bool:
    least = LEAST.get(name)
    return math.isfinite(value) and (value > 0 if least is None else value >= least)
