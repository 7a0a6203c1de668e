"""The audit document: the tree of `audit.json`, which every renderer reads and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from verl_audit._version import __version__
from verl_audit.diagnose.causes import Judgement
from verl_audit.diagnose.coverage import Entry
from verl_audit.diagnose.evaluate import Finding
from verl_audit.diagnose.rules import Cause
from verl_audit.diagnose.verdict import Verdict
from verl_audit.ingest.detect import Fact
from verl_audit.ingest.discover import Skipped
from verl_audit.ingest.events import errors
from verl_audit.ingest.model import Event
from verl_audit.measure.eviction import ledger
from verl_audit.measure.ledger import Ledger
from verl_audit.measure.model import Measure, Scalar
from verl_audit.measure.run import RunData
from verl_audit.measure.series import Drawn
from verl_audit.measure.speed import Symptom
from verl_audit.measure.symptom import Speed
from verl_audit.measure.traced import Traced
from verl_audit.report.series import series_tree
from verl_audit.report.traces_tree import tree
from verl_audit.store.database import count
from verl_audit.store.load import RunInput

SCHEMA_VERSION = "1.0"
EVIDENCE_ROWS = 12
"""Rows of evidence kept in the document; the SQL beside them gives the rest."""
UNKNOWN_KEYS = 50
KEYS = (
    "schema_version", "tool", "run", "baselines", "sources", "skipped", "problems", "coverage", "symptom", "findings",
    "causes", "verdict", "ledger", "measures", "series",
)  # fmt: skip
"""Keys at the top of every document."""
_NUMBERS = re.compile(r"\[\n[\s\d,.eE+-]+\]")
"""A list of nothing but numbers, which goes on one line; a text never holds a bare line break."""
SKIPPED_FILES = 20


@dataclass(frozen=True)
class Outcome:
    """Everything an audit found out, before it becomes a document."""

    run: RunInput
    baselines: tuple[RunInput, ...]
    data: RunData
    measures: Mapping[str, Measure]
    symptom: Symptom
    findings: tuple[Finding, ...]
    causes: Mapping[Cause, Judgement]
    verdict: Verdict
    coverage: Mapping[str, tuple[Entry, ...]]
    events: tuple[tuple[str, Event], ...]
    """(path as shown, event)."""
    settings: Mapping[str, Scalar]
    drawn: Drawn
    command: tuple[str, ...] = ()
    """The command that makes this audit, without machine paths."""
    skipped: tuple[Skipped, ...] = ()
    """Files that were not read, with paths as shown."""
    traced: Traced | None = None


def build(outcome: Outcome, store: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """The document as plain JSON types, in a fixed order."""
    document: dict[str, Any] = plain_types(
        {
            "schema_version": SCHEMA_VERSION,
            "tool": _tool(outcome),
            "run": _run(outcome, store),
            "baselines": [{"name": b.name, "facts": _facts(b.facts)} for b in outcome.baselines],
            "sources": _rows(store, _SOURCES),
            "skipped": _skipped(outcome.skipped),
            "problems": _rows(store, _PROBLEMS),
            "coverage": _coverage(outcome, store),
            "symptom": _symptom(outcome.symptom),
            "findings": [_finding(f, outcome.measures, store) for f in outcome.findings],
            "causes": {cause: _cause(j) for cause, j in outcome.causes.items()},
            "verdict": _verdict(outcome.verdict),
            "ledger": _ledger(outcome.data, outcome.traced),
            "traces": None if outcome.traced is None else tree(outcome.traced),
            "measures": {name: _measure(m) for name, m in outcome.measures.items()},
            "series": series_tree(outcome.drawn),
        }
    )
    return document


def _tool(outcome: Outcome) -> dict[str, Any]:
    own = {"name": "verl-audit", "version": __version__, "command": list(outcome.command)}
    return {**own, "settings": dict(outcome.settings)}


_SOURCES = """
SELECT path, format, string_agg(DISTINCT run, ', ' ORDER BY run) AS runs, min(role) AS role, precision, step_kind,
       count(DISTINCT segment) AS segments, any_value(records) AS records, any_value(values_read) AS values_read,
       any_value(values_lost) AS values_lost, any_value(bytes) AS bytes
FROM sources JOIN segments USING (source_id) JOIN runs USING (run)
GROUP BY source_id, path, format, precision, step_kind ORDER BY path, format
"""
_PROBLEMS = 'SELECT path, "offset", kind, detail, count FROM problems ORDER BY ALL'


def _skipped(skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Files that may hold what the run logged, by name; the ordinary ones only in the count."""
    told = [{"path": str(s.path), "reason": s.reason} for s in skipped if s.notable]
    return {"count": len(skipped), "files": told[:SKIPPED_FILES], "more": max(len(told) - SKIPPED_FILES, 0)}


def to_json(document: Mapping[str, Any]) -> str:
    """The document as text, the same bytes for the same document."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def _rows(store: duckdb.DuckDBPyConnection, query: str, limit: int | None = None) -> list[dict[str, Any]]:
    result = store.execute(query)
    names = [column[0] for column in result.description or ()]
    fetched = result.fetchall() if limit is None else result.fetchmany(limit)
    return [dict(zip(names, row, strict=True)) for row in fetched]


def plain_types(value: Any) -> Any:
    """JSON types only: non-finite numbers become text, since JSON has none; floats keep 10 significant digits."""
    if isinstance(value, Mapping):
        return {str(k): plain_types(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_types(v) for v in value]
    if isinstance(value, float):
        return (
            float(f"{value:.10g}")
            if math.isfinite(value)
            else "nan"
            if math.isnan(value)
            else "inf"
            if value > 0
            else "-inf"
        )
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _run(outcome: Outcome, store: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    data, steps = outcome.data, outcome.data.train_steps
    reconciled = {name: count(store, name, outcome.run.run) for name in ("differences", "rewritten")}
    return {
        "name": outcome.run.name,
        "put_together_because": list(dict.fromkeys(outcome.run.because)),
        "facts": _facts(outcome.run.facts),
        "first_step": int(steps[0]) if len(steps) else None,
        "last_step": int(steps[-1]) if len(steps) else None,
        "steps_logged": len(steps),
        "reconciled": reconciled,
        "ended": _ended(outcome),
        "last_error": _last_error(outcome),
        "inert": dict(data.inert),
        "corrupt": dict(data.corrupt),
    }


def _facts(facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {name: {"value": fact.value, "reason": fact.reason} for name, fact in facts.items()}


def _ended(outcome: Outcome) -> str:
    """finished, died_before_step1, crashed (an error and steps missing) or unknown."""
    steps, total = outcome.data.train_steps, outcome.data.number("total_steps")
    marks = [e for _, e in outcome.events if e.kind == "progress" and e.detail.count("/") == 1]
    done = steps[-1] >= total if total is not None and len(steps) else _is_full(marks[-1:])
    if done and len(steps):
        return "finished"
    if _last_error(outcome) is None:
        return "unknown"
    return "crashed" if len(steps) else "died_before_step1"


def _is_full(marks: Sequence[Event]) -> bool:
    """Whether the last progress bar reached its end; a restarted run has one for each process life."""
    return any(a == b for a, b in (m.detail.split("/") for m in marks))


def _last_error(outcome: Outcome) -> dict[str, Any] | None:
    return next(iter(reversed(errors(outcome.events))), None)


def _coverage(outcome: Outcome, store: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    counts = dict(
        store.execute(
            "SELECT standing, count(*) FROM key_map WHERE run = ? GROUP BY standing ORDER BY standing",
            [outcome.run.run],
        ).fetchall()
    )
    unknown = store.execute(
        "SELECT key FROM key_map WHERE run = ? AND standing = 'unknown' ORDER BY key", [outcome.run.run]
    ).fetchall()
    return {
        "keys": {standing: counts.get(standing, 0) for standing in ("mapped", "known", "unknown")},
        "unknown_keys": [key for (key,) in unknown[:UNKNOWN_KEYS]],
        "causes": {cause: [asdict(entry) for entry in entries] for cause, entries in outcome.coverage.items()},
    }


def _symptom(symptom: Symptom) -> dict[str, Any]:
    return {
        "state": symptom.state,
        "because": symptom.because,
        "evidence": symptom.evidence,
        "speed": {
            "per_update": speed_tree(symptom.per_update),
            "per_sample": speed_tree(symptom.per_sample),
            "per_hour": speed_tree(symptom.per_hour),
        },
        "smallest_detectable": None if symptom.per_update is None else symptom.per_update.smallest_detectable,
        "run_sd": None if symptom.per_update is None else symptom.per_update.run_sd_used,
        "end_gap": None if symptom.end_gap is None else asdict(symptom.end_gap),
        "onset": None if symptom.onset is None else {"low": symptom.onset[0], "high": symptom.onset[1]},
        "single_run": None if symptom.single is None else asdict(symptom.single),
        "caveats": list(symptom.caveats),
    }


def speed_tree(speed: Speed | None) -> dict[str, Any] | None:
    """A learning speed as the document holds it."""
    return (
        None
        if speed is None
        else {"value": speed.value, "low": speed.low, "high": speed.high, "interval": "two-sided 90 %"}
    )


def _measure(m: Measure) -> dict[str, Any]:
    return {
        "value": m.value,
        "low": m.low,
        "high": m.high,
        "n": m.n,
        "unit": m.unit,
        "level": m.level,
        "missing": m.missing or None,
    }


def _finding(f: Finding, measures: Mapping[str, Measure], store: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    return {
        "rule": f.rule,
        "step": f.step,
        "cause": f.cause,
        "status": f.status,
        "severity": f.severity,
        "confidence": f.confidence,
        "level": f.level,
        "title": f.title,
        "onset": None if f.onset is None else {"low": f.onset[0], "high": f.onset[1]},
        "follows": list(f.follows),
        "explain": f.explain,
        "decisive": f.decisive,
        "measures": dict(f.measures),
        "missing": _missing(f, measures),
        "evidence": _evidence(f, store),
        "confirm": f.confirm,
        "remedy": [dict(r) for r in f.remedy],
        "refs": list(f.refs),
        "error": f.error or None,
    }


def _missing(f: Finding, measures: Mapping[str, Measure]) -> list[dict[str, str]]:
    """Why a rule is insufficient: measures without value, or else an interval on both sides of the threshold."""
    if f.status == "insufficient" and not f.missing:
        return [{"measure": name, "because": "its interval includes the threshold"} for name in list(f.measures)[:1]]
    return [{"measure": name, "because": _why(name, measures)} for name in f.missing]


def _why(name: str, measures: Mapping[str, Measure]) -> str:
    stem = next((name.removesuffix(s) for s in ("_low", "_high", "_n") if name.endswith(s)), name)
    found = measures.get(name) or measures.get(stem)
    if found is None:
        return "not recorded"
    return found.missing or "too few points for an interval"


def _evidence(f: Finding, store: duckdb.DuckDBPyConnection) -> dict[str, Any] | None:
    """The rule's SQL, with its first rows where the rule fired; SQL that fails says so beside itself."""
    if not f.evidence:
        return None
    if f.status != "fired":
        return {"sql": f.evidence}
    store.execute("BEGIN")  # rolled back: evidence reads, whatever a user's rule says
    try:
        rows = _rows(store, f.evidence, EVIDENCE_ROWS + 1)
    except duckdb.Error as error:
        return {"sql": f.evidence, "error": str(error).splitlines()[0]}
    finally:
        store.execute("ROLLBACK")
    return {"sql": f.evidence, "rows": rows[:EVIDENCE_ROWS], "more": len(rows) > EVIDENCE_ROWS}


def _cause(j: Judgement) -> dict[str, Any]:
    return {
        "status": j.status,
        "risk": j.risk,
        "damage": None if j.damage is None else dict(zip(("estimate", "low", "high"), j.damage, strict=True)),
        "evidence_level": j.evidence_level,
        "because": j.because,
        "missing": list(j.missing),
        "at_work": list(j.at_work),
    }


def _verdict(v: Verdict) -> dict[str, Any]:
    return {
        "outcome": v.outcome,
        "causes": list(v.causes),
        "risks": list(v.risks),
        "other": v.other,
        "confidence": v.confidence,
        "because": v.because,
        "sentence": v.sentence,
        "missing": list(v.missing),
    }


def _ledger(data: RunData, traced: Traced | None) -> dict[str, Any]:
    """Groups by fate: from traces where they tell what was lost, else from counts, without a generated total."""
    counts = ledger(data)
    if traced is not None and not traced.where.blind:
        return _traced_ledger(traced.ledger, counts)
    decided = counts.pop("decided")
    return {
        "unit": "groups",
        "fates": counts,
        "decided": decided,
        "generated": None,
        "residual": None,
        "level": "metrics",
    }


def _traced_ledger(book: Ledger, counted: Mapping[str, float | None]) -> dict[str, Any]:
    """Groups by fate from the rows, or from the metrics where those counted more; `residual` adds the differences."""
    fates = {f"{line.fate}_groups": line.groups.number() or 0.0 for line in book.lines}
    missed = {name: max(0.0, (counted.get(name) or 0.0) - n) for name, n in fates.items() if name != "trained_groups"}
    fates = {name: n + missed.get(name, 0.0) for name, n in fates.items()}
    undecided = fates["in_flight_groups"] + fates["unknown_groups"]
    total = sum(fates.values())
    lacking = sum(missed.values())
    return {
        "unit": "groups",
        "fates": fates,
        "decided": total - undecided,
        "generated": total + (book.open_groups.number() or 0),
        "residual": lacking + (book.residual_groups.number() or 0.0),
        "level": "traces",
    }


__all__: Sequence[str] = ("Outcome", "build", "to_json")
