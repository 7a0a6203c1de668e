"""The cases in rule files: measures in, status out; run by `verl-audit rules test`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl_audit.diagnose.evaluate import Finding, RuleSet
from verl_audit.diagnose.rules import Case, Rule, Status

KINDS = ("fired", "clear", "insufficient", "confusable")


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one case of one rule; `detail` says why it is not `ok`."""

    rule: str
    case: str
    expected: Status
    got: Status
    ok: bool
    detail: str = ""


def run_cases(rules: Iterable[Rule]) -> list[CaseResult]:
    """Evaluate every case of every rule on its own, in order."""
    return [_run(rule, case) for rule in rules for case in rule.cases]


def missing_kinds(rule: Rule) -> tuple[str, ...]:
    """Which of fired, clear, insufficient and confusable the rule has no case for.

    A confusable case is a neighbour that the rule must not mistake for its own, so it counts only with a
    status other than fired.
    """
    present = {case.status for case in rule.cases}
    confusable = any(case.confusable and case.status in ("clear", "insufficient") for case in rule.cases)
    return tuple(kind for kind in KINDS if not (confusable if kind == "confusable" else kind in present))


def _run(rule: Rule, case: Case) -> CaseResult:
    finding = RuleSet((rule,)).evaluate(case.measures)[0]
    ok = finding.status == case.status
    return CaseResult(rule.id, case.name, case.status, finding.status, ok, "" if ok else _reason(finding))


def _reason(finding: Finding) -> str:
    """What the condition saw: its error, or the values of the names it uses."""
    if finding.error:
        return finding.error
    return ", ".join(f"{name}={_show(value)}" for name, value in finding.measures.items())


def _show(value: object) -> str:
    return "NULL" if value is None else str(value)
