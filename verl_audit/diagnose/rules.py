"""Rules as data: one YAML file a rule, an SQL condition over measures, cases in the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from verl_audit.measure.model import Scalar

Severity = Literal["info", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Confidence = Literal["low", "medium", "high"]
Cause = Literal["mismatch", "staleness", "eviction", "sync"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
RuleCause = Literal["mismatch", "staleness", "eviction", "sync", "health", "resources", "config"]
Clock = Literal["update", "hour"]
Status = Literal["fired", "clear", "insufficient", "not_applicable", "error"]


class RuleError(ValueError):
    """A rule file that cannot be used; the message names the file and the field."""


@dataclass(frozen=True)
class Param:
    """A number in a rule: its value and where it comes from."""

    value: Scalar
    source: str


@dataclass(frozen=True)
class Remedy:
    """What to change: exact configuration keys of one framework, and what it costs."""

    framework: str
    set: str
    price: str = ""


@dataclass(frozen=True)
class Case:
    """Measures in, status out. `confusable` names what this neighbour could be mistaken for."""

    name: str
    measures: Mapping[str, Scalar | None]
    status: Status
    confusable: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule. `when` and `applies` are DuckDB boolean expressions over measures, facts and `params`."""

    id: str
    step: int
    cause: RuleCause
    title: str
    when: str
    severity: Severity
    confidence: Confidence
    explain: str
    confirm: str = ""
    decisive: str = ""
    """The decisive numbers in a few words, with measures filled in; stands in the verdict and the four-step table."""
    onset: str = ""
    """A measure that dates what the rule reports: its low and high ends are the interval of the step."""
    clock: Clock = "update"
    """`hour`: what the rule reports costs time and leaves an update worth as much."""
    follows: tuple[Cause, ...] = ()
    """Causes whose consequence the reported event can be: while one of them is at work it explains nothing."""
    applies: str = ""
    evidence: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    remedy: tuple[Remedy, ...] = ()
    refs: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    file: str = ""

    def with_params(self, overrides: Mapping[str, Scalar]) -> Rule:
        """The same rule with some parameters replaced; unknown names raise RuleError."""
        unknown = set(overrides) - set(self.params)
        if unknown:
            known = ", ".join(sorted(self.params)) or "none"
            raise RuleError(f"rule {self.id} has no parameter {min(unknown)!r} (it has: {known})")
        for name, value in overrides.items():
            _check_type(f"{self.id}.{name}", value, self.params[name].value)
        changed = {name: Param(value, "set by the user") for name, value in overrides.items()}
        return replace(self, params={**self.params, **changed})


def _check_type(key: str, value: Scalar, default: Scalar) -> None:
    """A parameter keeps the type of its default, and a number is finite."""
    kind, wanted = _kind(value), _kind(default)
    if kind != wanted:
        raise RuleError(f"parameter {key}: {value!r} is {kind}; it must be {wanted}, as its default {default!r} is")


def _kind(value: Scalar) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "text"
    return "a number" if abs(value) < 1e300 else "no finite number"  # NaN compares false


REQUIRED = ("id", "step", "cause", "title", "when", "severity", "explain")
OPTIONAL = (
    "confidence",
    "confirm",
    "decisive",
    "onset",
    "follows",
    "clock",
    "applies",
    "evidence",
    "params",
    "remedy",
    "refs",
    "cases",
)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same language nine times as fast, where PyYAML was built with libyaml."""


def builtin_dir() -> Path:
    """Folder of the rules shipped with the package."""
    return Path(str(files("verl_audit.rules")))


def load_files(paths: Iterable[Path]) -> tuple[Rule, ...]:
    """Rules of the given files and folders (searched for `*.yaml`), in path order; a double id raises RuleError."""
    rules: dict[str, Rule] = {}
    for file in _yaml_files(paths):
        rule = load_file(file)
        if rule.id in rules:
            raise RuleError(f"{file}: rule id {rule.id!r} is already used by {rules[rule.id].file}")
        rules[rule.id] = rule
    return tuple(rules.values())


def _yaml_files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise RuleError(f"{path}: no such file or folder of rules")
        below = sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")]) if path.is_dir() else [path]
        if not below:
            raise RuleError(f"{path}: no rule files (*.yaml) in it")
        found += below
    return found


def load_file(file: Path) -> Rule:
    """One rule from its YAML file."""
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RuleError(f"{file}: not readable as YAML: {error}") from None
    if not isinstance(raw, dict):
        raise RuleError(f"{file}: a rule file holds one mapping, with the keys {', '.join(REQUIRED)}")
    return parse(raw, str(file))


def parse(raw: Mapping[str, Any], file: str = "<rule>") -> Rule:
    """A rule from its parsed YAML; every mistake is a RuleError naming file and field."""
    for name in REQUIRED:
        if raw.get(name) in (None, ""):
            raise RuleError(f"{file}: field {name!r} is missing")
    unknown = {str(name) for name in raw} - {*REQUIRED, *OPTIONAL}
    if unknown:
        raise RuleError(f"{file}: unknown field {min(unknown)!r}")
    _check_shapes(raw, file)
    return Rule(
        id=str(raw["id"]),
        step=raw["step"],
        cause=_one_of(raw["cause"], get_args(RuleCause), file, "cause"),
        title=str(raw["title"]),
        when=str(raw["when"]),
        severity=_one_of(raw["severity"], SEVERITIES, file, "severity"),
        confidence=_one_of(raw.get("confidence", "medium"), get_args(Confidence), file, "confidence"),
        explain=str(raw["explain"]).strip(),
        confirm=str(raw.get("confirm", "")).strip(),
        decisive=str(raw.get("decisive", "")).strip(),
        onset=str(raw.get("onset", "")),
        clock=_one_of(raw.get("clock", "update"), get_args(Clock), file, "clock"),
        follows=tuple(_one_of(c, CAUSES, file, "follows") for c in raw.get("follows") or ()),
        applies=str(raw.get("applies", "")),
        evidence=str(raw.get("evidence", "")).strip(),
        params={name: _param(name, value, file) for name, value in (raw.get("params") or {}).items()},
        remedy=tuple(_remedy(item, file) for item in raw.get("remedy") or ()),
        refs=tuple(str(ref) for ref in raw.get("refs") or ()),
        cases=tuple(_case(item, file) for item in raw.get("cases") or ()),
        file=file,
    )


def _check_shapes(raw: Mapping[str, Any], file: str) -> None:
    if type(raw["step"]) is not int:
        raise RuleError(f"{file}: step is {raw['step']!r}; it must be a whole number")
    for name, kind, words in (
        ("params", dict, "a mapping"),
        ("remedy", list, "a list"),
        ("refs", list, "a list"),
        ("follows", list, "a list"),
        ("cases", list, "a list"),
    ):
        if raw.get(name) is not None and not isinstance(raw[name], kind):
            raise RuleError(f"{file}: {name} is {raw[name]!r}; it must be {words}")


def _one_of(value: object, allowed: Sequence[str], file: str, field: str) -> Any:
    if value not in allowed:
        raise RuleError(f"{file}: {field} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def _param(name: str, raw: object, file: str) -> Param:
    if not isinstance(raw, dict) or set(raw) != {"value", "source"}:
        raise RuleError(f"{file}: parameter {name!r} needs exactly `value` and `source` (where the number is from)")
    return Param(raw["value"], str(raw["source"]))


def _remedy(raw: object, file: str) -> Remedy:
    if not isinstance(raw, dict) or not {"framework", "set"} <= set(raw) <= {"framework", "set", "price"}:
        raise RuleError(f"{file}: a remedy has `framework`, `set` and optionally `price`")
    return Remedy(str(raw["framework"]), str(raw["set"]), str(raw.get("price", "")))


def _case(raw: object, file: str) -> Case:
    if not isinstance(raw, dict) or not {"name", "measures", "status"} <= set(raw):
        raise RuleError(f"{file}: a case has `name`, `measures` and `status`")
    status = _one_of(raw["status"], get_args(Status), file, f"status of case {raw['name']!r}")
    if not isinstance(raw["measures"] or {}, dict):
        raise RuleError(f"{file}: measures of case {raw['name']!r} must be a mapping")
    return Case(str(raw["name"]), dict(raw["measures"] or {}), status, str(raw.get("confusable", "")))
