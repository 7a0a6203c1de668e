"""The evaluator: TRUE fired, FALSE clear, NULL insufficient, broken is an error."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl_audit import load_rules
from verl_audit.diagnose.evaluate import Finding, RuleSet, flatten, render
from verl_audit.diagnose.rules import Rule, RuleError, parse
from verl_audit.measure.model import Measure


def rule(when: str, **fields: Any) -> Rule:
    base = {"id": "r", "step": 2, "cause": "staleness", "title": "t", "severity": "low"}
    return parse({**base, "explain": "ess is {ess:.1%}", "when": when, **fields})


def param(name: str, value: float) -> dict[str, Any]:
    return {name: {"value": value, "source": "a test"}}


def decide(when: str, measures: dict[str, Any], **fields: Any) -> Finding:
    (finding,) = RuleSet((rule(when, **fields),)).evaluate(measures)
    return finding


@pytest.mark.parametrize(
    ("when", "measures", "status"),
    [
        ("ess < 0.8", {"ess": 0.6}, "fired"),
        ("ess < 0.8", {"ess": 0.9}, "clear"),
        ("ess < 0.8", {}, "insufficient"),
        ("ess < 0.8", {"ess": None}, "insufficient"),
        ("ess < 0.8", {"ess": math.nan}, "insufficient"),
        ("ess < 0.8", {"ess": math.inf}, "insufficient"),
        ("ess < 0.8 or lag_mean > 2", {"lag_mean": 3}, "fired"),
        ("ess < 0.8 or lag_mean > 2", {"lag_mean": 1}, "insufficient"),
        ("ess < 0.8 and lag_mean > 2", {"lag_mean": 1}, "clear"),
        ("ess < 0.8 and lag_mean > 2", {"lag_mean": 3}, "insufficient"),
        ("lag_mean is null", {}, "fired"),
        ("not reward_admissible", {"reward_admissible": False}, "fired"),
        ("not reward_admissible", {}, "insufficient"),
        ("log_prob_mode = 'bypass'", {"log_prob_mode": "bypass"}, "fired"),
        ("log_prob_mode = 'bypass'", {}, "insufficient"),
    ],
)
def test_three_valued_truth(when: str, measures: dict[str, Any], status: str) -> None:
    assert decide(when, measures).status == status


def test_insufficient_names_what_is_missing() -> None:
    finding = decide("ess < 0.8 and lag_mean > lag", {"lag_mean": 3}, params=param("lag", 2))
    assert finding.missing == ("ess",)
    assert finding.measures == {"ess": None, "lag_mean": 3, "lag": 2}


def test_measure_brings_interval_and_count() -> None:
    ess = Measure("ess", 0.6, low=0.5, high=0.7, n=40)
    assert decide("ess_high < 0.8 and ess_low > 0.4 and ess_n >= 40", {"ess": ess}).status == "fired"
    assert flatten({"ess": ess}) == {"ess": 0.6, "ess_low": 0.5, "ess_high": 0.7, "ess_n": 40}


def test_measure_without_value_or_interval_is_null() -> None:
    assert decide("ess < 0.8", {"ess": Measure("ess", None)}).status == "insufficient"
    assert decide("ess_high < 0.8", {"ess": Measure("ess", 0.6)}).status == "insufficient"
    assert decide("ess < 0.8", {"ess": Measure("ess", math.nan)}).status == "insufficient"


def test_unknown_name_is_an_error_and_no_pass() -> None:
    finding = decide("no_such_measure > 1", {"ess": 0.9})
    assert finding.status == "error"
    assert "no_such_measure is no measure" in finding.error


def test_suffix_of_an_unknown_name_is_an_error() -> None:
    assert decide("no_such_measure_low > 1", {}).status == "error"


def test_names_of_the_caller_are_allowed() -> None:
    assert decide("queue_depth > 100", {"queue_depth": 120}).status == "fired"
    assert decide("queue_depth > 100", {"queue_depth": None}).status == "insufficient"


@pytest.mark.parametrize("when", ["ess <", "ess < 'abc'", "no_function(ess)", "ess; select 1"])
def test_broken_sql_is_an_error(when: str) -> None:
    finding = decide(when, {"ess": 0.9})
    assert finding.status == "error"
    assert finding.error


def test_a_broken_rule_does_not_stop_the_others() -> None:
    rules = RuleSet((rule("ess <"), rule("ess < 0.8", id="s")))
    assert [f.status for f in rules.evaluate({"ess": 0.5})] == ["error", "fired"]


def test_a_rule_cannot_read_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n", encoding="utf-8")
    for when in (
        f"(select count(*) from read_text('{secret}')) > 0",
        f"(select count(*) from '{secret}') > 0",
        f"exists (select * from read_csv('{secret}'))",
    ):
        assert decide(when, {}).status == "error"


def test_applies_false_null_and_true() -> None:
    applies = "log_prob_mode = 'bypass'"
    other = decide("ess < 0.8", {"ess": 0.5, "log_prob_mode": "decoupled"}, applies=applies)
    assert other.status == "not_applicable"
    unknown = decide("ess < 0.8", {"ess": 0.5}, applies=applies)
    assert (unknown.status, unknown.missing) == ("insufficient", ("log_prob_mode",))
    assert decide("ess < 0.8", {"ess": 0.5, "log_prob_mode": "bypass"}, applies=applies).status == "fired"


def test_broken_applies_is_an_error() -> None:
    assert decide("ess < 0.8", {"ess": 0.5}, applies="mode_of_nothing = 'x'").status == "error"


def test_parameters_can_be_overridden() -> None:
    rules = RuleSet((rule("ess < bad", params=param("bad", 0.8)),))
    assert rules.evaluate({"ess": 0.9})[0].status == "clear"
    assert rules.with_params({"r.bad": 0.95}).evaluate({"ess": 0.9})[0].status == "fired"
    assert rules.evaluate({"ess": 0.9})[0].status == "clear"


def test_unknown_parameter_is_refused() -> None:
    with pytest.raises(RuleError, match="it has: bad"):
        RuleSet((rule("ess < bad", params=param("bad", 0.8)),)).with_params({"r.worse": 1.0})


def test_condition_without_names_is_evaluated() -> None:
    assert decide("1 = 1", {}).status == "fired"


def test_same_values_same_findings() -> None:
    rules = RuleSet((rule("ess < 0.8"), rule("lag_mean > 2", id="s")))
    assert rules.evaluate({"ess": 0.5}) == rules.evaluate({"ess": 0.5})


def test_explanation_is_filled() -> None:
    assert decide("ess < 0.8", {"ess": 0.61}).explain == "ess is 61.0%"
    values = {"a": 12.0, "b": 0.012345, "c": 1.5, "d": None}
    assert render("{a} {b} {c:.2f} {d}", values) == "12 0.0123 1.50 not recorded"
    assert render("{nothing:.1%}", {}) == "not recorded"


@pytest.mark.parametrize("value", [10**400, [1.0], {"a": 1}, object(), b"x"])
def test_a_value_of_no_use_is_null_and_raises_nothing(value: object) -> None:
    found = {f.rule: f for f in load_rules().evaluate({"sync_share": value, "sync_seconds": 31.0})}
    assert found["sync-share"].status == "insufficient"
    assert "sync_share" in found["sync-share"].missing


def test_names_that_no_rule_and_no_measure_has_are_listed() -> None:
    rules = load_rules()
    given = {
        "sync_shard": 0.2,
        "timing_s/update_weights": 3.0,
        "sync_share": 0.2,
        "sync_share_low": 0.1,
        "trainer": "v0",
    }
    assert rules.unknown(given) == ("sync_shard", "timing_s/update_weights")
    assert rules.unknown({"sync_share": 0.2}) == ()


def test_threads_may_evaluate_at_the_same_time() -> None:
    rules = load_rules()
    given = [{"sync_share": 0.01 * n, "sync_seconds": 31.0} for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rules.evaluate, given)) == [rules.evaluate(m) for m in given]
