"""The shipped rules keep their own promises."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from verl_audit.diagnose.cases import CaseResult, missing_kinds, run_cases
from verl_audit.diagnose.evaluate import SUFFIXES, RuleSet, columns_of
from verl_audit.diagnose.rules import Rule, RuleError, load_files, parse
from verl_audit.ingest.adapters import load_signals
from verl_audit.measure.model import catalog
from verl_audit.store.database import open_store

RULES_DIR = Path(__file__).parents[2] / "rules"
RULES = load_files([RULES_DIR])
FOLDER_STEP = {path.name: int(path.name[0]) for path in RULES_DIR.glob("[0-9]-*")} | {"config": 0}
CAUSES = {"health", "mismatch", "staleness", "eviction", "sync", "resources", "config"}

SIGNALS = sorted(load_signals())
RAW = {
    "id": "x", "step": 1, "cause": "mismatch", "title": "t", "severity": "low",
    "when": "ess < 1", "explain": "e",
}  # fmt: skip


def ids(rule: Rule) -> str:
    return rule.id


@pytest.fixture(scope="module")
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    """The store's tables, empty, and the two views with a column a signal."""
    numbers = ", ".join(f"{name} DOUBLE" for name in SIGNALS)
    with open_store() as con:
        con.execute(f"CREATE TABLE steps (step BIGINT, {numbers})")
        con.execute(f"CREATE TABLE baseline_steps (run VARCHAR, step BIGINT, {numbers})")
        yield con


def test_ids_are_unique_and_equal_to_file_names() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert [rule.id for rule in RULES] == [Path(rule.file).stem for rule in RULES]


def test_enough_rules_for_the_four_steps() -> None:
    assert sum(1 <= rule.step <= 4 for rule in RULES) >= 22


@pytest.mark.parametrize("result", run_cases(RULES), ids=lambda r: f"{r.rule}: {r.case}")
def test_case(result: CaseResult) -> None:
    assert result.ok, f"expected {result.expected}, got {result.got} with {result.detail}"


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_rule_sits_in_the_folder_of_its_step_and_cause(rule: Rule) -> None:
    assert FOLDER_STEP[Path(rule.file).parent.name] == rule.step
    assert rule.cause == Path(rule.file).parent.name.rpartition("-")[2]
    assert rule.id.startswith(f"{rule.cause}-")


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_rule_has_every_kind_of_case(rule: Rule) -> None:
    assert missing_kinds(rule) == ()
    assert len({case.name for case in rule.cases}) == len(rule.cases)


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_confusable_names_a_rule_or_a_cause(rule: Rule) -> None:
    known = {r.id for r in RULES} - {rule.id} | CAUSES
    assert {case.confusable for case in rule.cases if case.confusable} <= known


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_every_number_is_a_parameter_with_a_source(rule: Rule) -> None:
    assert all(len(param.source) > 10 for param in rule.params.values())
    assert not set(rule.params) & known_names(), "a parameter would hide a measure"
    literals = re.findall(r"(?<![\w.])\d+\.?\d*", re.sub(r"'[^']*'", "", f"{rule.when} {rule.applies}"))
    assert {float(n) for n in literals} <= {0, 1, 2}, "thresholds belong in params"


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_names_are_catalogued(rule: Rule, con: duckdb.DuckDBPyConnection) -> None:
    allowed = known_names() | set(rule.params)
    used = set(columns_of(con, rule.when)) | (set(columns_of(con, rule.applies)) if rule.applies else set())
    texts = f"{rule.explain} {rule.decisive}"
    told = {part for _, name, _, _ in string.Formatter().parse(texts) if name for part in name.split("|")}
    assert used <= allowed
    assert told <= allowed
    assert set(rule.params) <= used | told, "unused parameter"
    assert {name for case in rule.cases for name in case.measures} <= known_names()


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_explanation_is_filled_in_fired_cases(rule: Rule) -> None:
    fired = [RuleSet((rule,)).evaluate(c.measures)[0] for c in rule.cases if c.status == "fired"]
    filled = [text for finding in fired for text in (finding.explain, finding.decisive)]
    assert filled
    assert not [text for text in filled if not text or "not recorded" in text or "{" in text]


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_words_are_there(rule: Rule) -> None:
    assert 2 <= len(re.findall(r"[.?!](?:\s|$)", rule.explain)) <= 6
    assert rule.confirm
    assert len(rule.title) <= 100


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_evidence_runs_on_the_views(rule: Rule, con: duckdb.DuckDBPyConnection) -> None:
    row = con.execute("SELECT json_serialize_sql(?)", [rule.evidence]).fetchone()
    assert row is not None
    tree = json.loads(row[0])
    assert not tree["error"], tree.get("error_message")
    assert len(tree["statements"]) == 1
    assert re.search(r"limit 50\s*$", rule.evidence)
    assert tables(tree) <= {
        "steps",
        "baseline_steps",
        "differences",
        "events",
        "problems",
        "rewritten",
        "facts",
        "config",
        "runs",
        "trajectories",
        "trajectory_segments",
        "syncs",
        "token_cells",
        "token_strata",
        "token_subsets",
    }
    con.execute(rule.evidence).fetchall()


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_nothing_recorded_never_fires_nor_clears(rule: Rule) -> None:
    assert RuleSet((rule,)).evaluate({})[0].status == "insufficient"


def test_enough_rules_for_what_configuration_alone_decides() -> None:
    assert sum(rule.cause == "config" for rule in RULES) >= 25


CONFIG_RULES = [rule for rule in RULES if rule.cause == "config"]


@pytest.mark.parametrize("rule", CONFIG_RULES, ids=ids)
def test_configuration_rules_use_facts_and_name_exact_keys_with_a_price(
    rule: Rule, con: duckdb.DuckDBPyConnection
) -> None:
    used = {*columns_of(con, rule.when), *(columns_of(con, rule.applies) if rule.applies else ())} - set(rule.params)
    assert {catalog()[name].unit for name in used} == {"fact"}
    assert rule.remedy
    assert all(("=" in remedy.set and remedy.price) for remedy in rule.remedy)
    assert not [f for f in used if f"'{f}'" not in rule.evidence and f != "trainer"], "evidence shows what decided"


def test_configuration_implicates_no_cause() -> None:
    assert {rule.step for rule in CONFIG_RULES} == {0}
    assert not {rule.cause for rule in CONFIG_RULES} & {"mismatch", "staleness", "eviction", "sync"}


def test_severities_keep_their_meaning() -> None:
    """A lag alone never alarms, resources never implicate a cause."""
    severity = {rule.id: rule.severity for rule in RULES}
    assert severity["staleness-lag-note"] == "low"
    assert {rule.severity for rule in RULES if rule.step == 5} <= {"low", "info"}


HEALTHY_SYNC: dict[str, Any] = {
    "framework": "verl", "trainer": "sync", "is_async": False, "log_prob_mode": "decoupled", "correction":
    "none", "rejection": "none", "rollout_quantization": "none", "top_p": 1.0, "top_k": -1, "lag0_steps":
    60, "gap_prob_mean": 0.0041, "gap_prob_lag0": 0.0041, "gap_prob_lag0_low": 0.0040, "gap_kl_lag0":
    0.0002, "gap_kl_lag0_low": 0.0, "gap_trend_lag0": 0.9, "gap_trend_lag0_low": 0.8,
    "gap_after_first_sync": 0.94, "pearson_lag0": 0.9992, "ess": 0.999, "ess_lag0": 0.999,
    "off_policy_loss": 0.0005, "damage_mismatch": 0.0005, "damage_staleness": 0.0, "lag_mean": 0,
    "lag_updates": 0, "lag_min": 0, "lag_first_step": 0, "lag_trend": 0, "lag_trend_low": 0, "span_mean":
    1, "gauge_contradiction": 0.13, "sync_share": 0.008, "gen_share": 0.73, "entropy_ratio": 0.72,
    "steps_logged": 60, "validation_points": 13, "nonfinite_steps": 0, "died_before_step1": False,
    "reward_flat_steps": 0, "length_constant_steps": 0, "source_differences": 0, "rewritten_values": 0,
}  # fmt: skip
MILD_ASYNC = {
    **HEALTHY_SYNC, "trainer": "separate_async", "is_async": True, "staleness_strategy": "drop",
    "staleness_threshold": 8, "lag0_steps": 1, "gap_prob_mean": 0.0119, "gap_prob_ratio": 2.9,
    "gap_prob_lag0": 0.0051, "gap_prob_lag0_low": None, "gap_prob_lag0_ratio": 1.24, "gap_kl_ratio": 18,
    "ess": 0.99, "off_policy_loss": 0.0052, "damage_staleness": 0.004, "lag_mean": 0.86, "lag_updates":
    0.86, "lag_oldest_mean": 0.97, "span_mean": 1.1, "lag_max_slope": 0.0, "lag_max_slope_low": -0.01,
    "lag_max_slope_n": 50, "sync_share": 0.051, "gen_share": 0.42, "stale_groups": 0,
    "stale_groups_share": 0, "failed_share": 0, "evicted_share": 0, "reward_admissible": True,
    "prompt_length_shift": -0.003, "prompt_length_shift_high": 0.03, "batch_clumping_low": 0.6,
}  # fmt: skip
FP8 = {
    **HEALTHY_SYNC, "gap_prob_mean": 0.0129, "gap_prob_lag0": 0.0129, "gap_prob_lag0_low": 0.0122,
    "gap_prob_lag0_ratio": 3.12, "gap_prob_lag0_ratio_low": 2.95, "gap_kl_lag0": 0.0035, "pearson_lag0":
    0.9938, "gauge_contradiction": 0.2, "gap_after_first_sync": 1.06, "ess": 0.9958, "ess_lag0": 0.9958,
    "off_policy_loss": 0.0021, "damage_mismatch": 0.0016,
}  # fmt: skip
DROP = {
    **MILD_ASYNC, "staleness_threshold": 3, "gap_prob_mean": 0.0145, "gap_prob_lag0": 0.0023, "ess":
    0.986, "lag_mean": 1.23, "lag_updates": 1.23, "lag_oldest_mean": 1.51, "span_mean": 1.54,
    "stale_groups": 140, "stale_groups_share": 0.127, "evicted_share": 0.127, "reward_admissible": False,
    "sync_share": 0.058,
}  # fmt: skip


@pytest.mark.parametrize(
    ("run", "causes"),
    [(HEALTHY_SYNC, set()), (MILD_ASYNC, set()), (FP8, {"mismatch"}), (DROP, {"eviction"})],
    ids=["sync", "mild async", "fp8", "drop"],
)
def test_measured_runs_alarm_on_their_own_cause_only(run: dict[str, Any], causes: set[str]) -> None:
    findings = RuleSet(RULES).evaluate(run)
    assert not [f for f in findings if f.status == "error"]
    alarms = {f.cause for f in findings if f.status == "fired" and f.severity in ("medium", "high", "critical")}
    assert alarms == causes


def test_missing_kinds_names_what_is_missing() -> None:
    assert missing_kinds(parse(RAW)) == ("fired", "clear", "insufficient", "confusable")
    case = {"name": "a", "measures": {"ess": 0.5}, "status": "fired", "confusable": "staleness"}
    assert missing_kinds(parse({**RAW, "cases": [case]})) == ("clear", "insufficient", "confusable")


def test_failing_case_says_what_it_saw() -> None:
    case = {"name": "a", "measures": {"ess": 0.5}, "status": "clear"}
    (result,) = run_cases([parse({**RAW, "cases": [case]})])
    assert (result.ok, result.got, result.detail) == (False, "fired", "ess=0.5")
    (result,) = run_cases([parse({**RAW, "when": "ess <", "cases": [case]})])
    assert result.got == "error"
    assert "ess <" in result.detail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"severity": "loud"}, "severity"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"when": ""}, "field 'when' is missing"),
        ({"params": {"a": 3}}, "source"),
    ],
)
def test_mistakes_in_a_rule_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse({**RAW, **change})


def test_a_double_id_is_refused(tmp_path: Path) -> None:
    text = Path(RULES[0].file).read_text(encoding="utf-8")
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RuleError, match="already used"):
        load_files([tmp_path])


def known_names() -> set[str]:
    numbers = {name + s for name, d in catalog().items() if d.type == "number" for s in SUFFIXES}
    return set(catalog()) | numbers


def tables(node: object) -> set[str]:
    """Tables that a serialised statement reads."""
    if isinstance(node, dict):
        own = {node["table_name"]} if node.get("type") == "BASE_TABLE" else set()
        return own.union(*(tables(child) for child in node.values()))
    if isinstance(node, list):
        return set().union(*(tables(child) for child in node))
    return set()
