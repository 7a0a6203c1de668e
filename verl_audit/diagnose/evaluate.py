"""Evaluate rules: TRUE fired, FALSE clear, NULL insufficient; a broken rule is an error, never a pass."""

from __future__ import annotations

import json
import math
import os
import string
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb

from verl_audit.diagnose.rules import (
    SEVERITIES,
    Cause,
    Clock,
    Confidence,
    Rule,
    RuleCause,
    RuleError,
    Severity,
    Status,
)
from verl_audit.measure.model import Level, Measure, MeasureType, Scalar, catalog

Values = Mapping[str, Scalar | None]
_SQL_TYPE: dict[MeasureType, str] = {"number": "DOUBLE", "bool": "BOOLEAN", "text": "VARCHAR"}
SUFFIXES = ("_low", "_high", "_n")


@dataclass(frozen=True)
class Finding:
    """One rule's outcome on one set of measures."""

    rule: str
    step: int
    cause: RuleCause
    title: str
    status: Status
    severity: Severity
    confidence: Confidence
    measures: Mapping[str, Scalar | None] = field(default_factory=dict)
    """The measures and parameters that the condition names, with the values it saw."""
    missing: tuple[str, ...] = ()
    """Names that were NULL, when the status is insufficient."""
    explain: str = ""
    decisive: str = ""
    confirm: str = ""
    evidence: str = ""
    remedy: tuple[Mapping[str, str], ...] = ()
    refs: tuple[str, ...] = ()
    onset: tuple[float, float] | None = None
    """Interval of the step at which what it reports began, where the rule names a measure that dates it."""
    follows: tuple[Cause, ...] = ()
    """Causes whose consequence it can be."""
    clock: Clock = "update"
    """`hour`: it costs time only."""
    error: str = ""
    level: Level = "metrics"
    """`traces` where a measure that its condition names was computed from traces."""


def fired_for(findings: Sequence[Finding], cause: str, least: Severity = "medium") -> list[Finding]:
    """The rules of a cause that fired at this severity or above."""
    bar = SEVERITIES.index(least)
    return [f for f in findings if f.cause == cause and f.status == "fired" and SEVERITIES.index(f.severity) >= bar]


def rule_fired(findings: Sequence[Finding], rule: str) -> Finding | None:
    """The finding of one rule, if it fired."""
    return next((f for f in findings if f.rule == rule and f.status == "fired"), None)


@dataclass(frozen=True)
class RuleSet:
    """Rules ready to be evaluated against any mapping of measures."""

    rules: tuple[Rule, ...]

    def evaluate(self, measures: Mapping[str, Any]) -> list[Finding]:
        """One finding a rule, in rule order.

        `measures` maps names to numbers, booleans, text, None or `Measure`. A name that is absent, None, not
        finite or of another type is NULL. Names outside the measure catalogue are allowed (`unknown` lists
        them); a rule that names one which is neither there nor in the catalogue is an `error`. Prints nothing
        and raises nothing of its own; threads may call it at the same time.
        """
        values = flatten(measures)
        traced = _traced(measures)
        con = _connection()
        found = [_evaluate(con, rule, values) for rule in self.rules]
        return [replace(f, level="traces") if traced.intersection(f.measures) else f for f in found]

    def unknown(self, measures: Iterable[str]) -> tuple[str, ...]:
        """Names that are no measure and that no rule uses: a typo, or a framework's own metric key."""
        used = {name for rule in self.rules for name in _names_in(rule)}
        return tuple(sorted(str(n) for n in measures if n not in used and _known_type(str(n)) is None))

    def with_params(self, overrides: Mapping[str, Scalar]) -> RuleSet:
        """Replace parameters, keyed `rule-id.parameter`."""
        by_rule: dict[str, dict[str, Scalar]] = {}
        for key, value in overrides.items():
            rule_id, _, name = key.rpartition(".")
            by_rule.setdefault(rule_id, {})[name] = value
        unknown = set(by_rule) - {rule.id for rule in self.rules}
        if unknown:
            raise RuleError(f"no rule {min(unknown)!r} to set a parameter of; see `verl-audit rules list`")
        return RuleSet(tuple(r.with_params(by_rule[r.id]) if r.id in by_rule else r for r in self.rules))


def flatten(measures: Mapping[str, Any]) -> dict[str, Scalar | None]:
    """Measures as plain values, with `_low`, `_high` and `_n` beside each `Measure`; non-finite becomes None."""
    values: dict[str, Scalar | None] = {}
    for name, item in measures.items():
        if isinstance(item, Measure):
            values[name] = _clean(item.value)
            values.update({name + s: _clean(v) for s, v in zip(SUFFIXES, (item.low, item.high, item.n), strict=True)})
        else:
            values[name] = _clean(item)
    return values


def _traced(measures: Mapping[str, Any]) -> set[str]:
    """Names of the values that come from traces."""
    names = (name for name, m in measures.items() if isinstance(m, Measure) and m.level == "traces")
    return {name + suffix for name in names for suffix in ("", *SUFFIXES)}


def _clean(value: object) -> Scalar | None:
    if value is None or isinstance(value, bool | str):
        return value
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_kept = threading.local()


def _connection() -> duckdb.DuckDBPyConnection:
    """An empty database of this thread: opening one costs more than a rule, and none survives a fork."""
    if getattr(_kept, "process", None) != os.getpid():
        _kept.process = os.getpid()
        _kept.con = duckdb.connect(":memory:", config={"enable_external_access": False, "threads": 1})
    con: duckdb.DuckDBPyConnection = _kept.con
    return con


def _names_in(rule: Rule) -> tuple[str, ...]:
    """Names that the expressions of a rule use; none where one does not parse, which `evaluate` reports."""
    try:
        return tuple(n for text in (rule.when, rule.applies) if text for n in columns_of(_connection(), text))
    except (ValueError, duckdb.Error):
        return ()


def _evaluate(con: duckdb.DuckDBPyConnection, rule: Rule, values: Values) -> Finding:
    try:
        return _decide(con, rule, {**values, **{name: p.value for name, p in rule.params.items()}})
    except (duckdb.Error, KeyError, ValueError, TypeError, OverflowError) as error:
        return _finding(rule, "error", error=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _decide(con: duckdb.DuckDBPyConnection, rule: Rule, values: Values) -> Finding:
    if rule.applies:
        applies, seen = _boolean(con, rule.applies, values)
        if applies is False:
            return _finding(rule, "not_applicable", seen)
        if applies is None:
            return _finding(rule, "insufficient", seen, missing=_nulls(seen))
    outcome, seen = _boolean(con, rule.when, values)
    status: Status = "insufficient" if outcome is None else "fired" if outcome else "clear"
    missing = _nulls(seen) if outcome is None else ()
    return _finding(rule, status, seen, missing=missing, filled=values if status == "fired" else None)


def _nulls(seen: Values) -> tuple[str, ...]:
    return tuple(name for name, value in seen.items() if value is None)


def _finding(
    rule: Rule,
    status: Status,
    seen: Values | None = None,
    *,
    missing: tuple[str, ...] = (),
    filled: Values | None = None,
    error: str = "",
) -> Finding:
    return Finding(
        rule=rule.id,
        step=rule.step,
        cause=rule.cause,
        title=rule.title,
        status=status,
        severity=rule.severity,
        confidence=rule.confidence,
        measures=seen or {},
        missing=missing,
        explain=render(rule.explain, filled) if filled else "",
        decisive=render(rule.decisive or rule.title, filled) if filled else "",
        confirm=rule.confirm,
        evidence=rule.evidence,
        remedy=tuple({"framework": r.framework, "set": r.set, "price": r.price} for r in rule.remedy),
        refs=rule.refs,
        onset=_onset(rule, filled) if filled else None,
        follows=rule.follows,
        clock=rule.clock,
        error=error,
    )


def _onset(rule: Rule, values: Values) -> tuple[float, float] | None:
    low, high = (values.get(f"{rule.onset}{suffix}") for suffix in ("_low", "_high"))
    dated = isinstance(low, int | float) and isinstance(high, int | float)
    return (float(low), float(high)) if dated and low is not None and high is not None else None


def _boolean(
    con: duckdb.DuckDBPyConnection, expression: str, values: Values
) -> tuple[bool | None, dict[str, Scalar | None]]:
    """Evaluate one expression; returns its three-valued result and the names it used with their values."""
    names = columns_of(con, expression)
    seen = {name: values.get(name) for name in names}
    columns = [f'?::{_sql_type(name, seen[name], name in values)} AS "{name}"' for name in names] or ["1 AS one"]
    row = con.execute(
        f"SELECT ({expression})::BOOLEAN FROM (SELECT {', '.join(columns)})", list(seen.values())
    ).fetchone()
    assert row is not None
    return row[0], seen


def columns_of(con: duckdb.DuckDBPyConnection, expression: str) -> list[str]:
    """Names an SQL expression refers to, in order of appearance; ValueError when it does not parse."""
    if expression not in _columns:
        _columns[expression] = _parsed(con, expression)
    return list(_columns[expression])


_columns: dict[str, tuple[str, ...]] = {}
"""Names by expression: parsing one costs more than evaluating it."""


def _parsed(con: duckdb.DuckDBPyConnection, expression: str) -> tuple[str, ...]:
    row = con.execute("SELECT json_serialize_sql(?)", [f"SELECT ({expression})"]).fetchone()
    assert row is not None
    tree = json.loads(row[0])
    if tree["error"]:
        raise ValueError(f"{tree['error_message']} in {expression!r}")
    names: list[str] = []
    _collect(tree, names)
    return tuple(dict.fromkeys(names))


def _collect(node: object, names: list[str]) -> None:
    if isinstance(node, dict):
        if node.get("type") == "COLUMN_REF":
            names.append(node["column_names"][-1])
        for child in node.values():
            _collect(child, names)
    elif isinstance(node, list):
        for child in node:
            _collect(child, names)


def _sql_type(name: str, value: Scalar | None, given: bool) -> str:
    if value is not None:
        return _SQL_TYPE["bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"]
    known = _known_type(name)
    if known is None and not given:
        raise KeyError(f"{name} is no measure, fact or parameter")
    return _SQL_TYPE[known or "number"]


def _known_type(name: str) -> MeasureType | None:
    """Type of a catalogued name, its `_low`, `_high` and `_n` included; None for a name nobody knows."""
    if name in catalog():
        return catalog()[name].type
    stem = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), None)
    return "number" if stem in catalog() else None


class _Formatter(string.Formatter):
    """Fills `{name}`, `{name:.1%}` and `{this|else_that}`.

    A value that is None reads "at least LOW" or "at most HIGH" where a bound is known, else "not recorded".
    """

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        names = str(key).split("|")
        value = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
        return _bound(names[0], kwargs) if value is None else value

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "not recorded"
        if isinstance(value, tuple):
            return f"{value[0]} {self.format_field(value[1], format_spec)}"
        if isinstance(value, float) and not format_spec:
            return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.3g}"
        return str(format(value, format_spec))


def _bound(name: str, values: Mapping[str, Any]) -> tuple[str, Any] | None:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return ("at least", low) if low is not None else ("at most", high) if high is not None else None


def render(template: str, values: Values) -> str:
    """A rule's text with measures filled in; numbers show three significant digits unless a format is given."""
    return " ".join(_Formatter().vformat(template, (), dict(values)).split())
