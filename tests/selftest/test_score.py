"""What counts as right and wrong, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_audit.selftest.score import HARMFUL, Answer, Kind, Result, Truth, score


def truth(
    *causes: str,
    at_work: tuple[str, ...] = (),
    other: str | None = None,
    speed: float | None = 0.5,
    per_hour: bool = False,
) -> Truth:
    return Truth(frozenset(causes), frozenset(at_work or causes), other, speed, per_hour)


def cause(*names: str, risks: tuple[str, ...] = ()) -> Answer:
    return Answer("cause", names, risks)


STALE = truth("staleness")
TWO = truth("mismatch", "sync")
STALE_AND_MORE = truth("staleness", at_work=("staleness", "mismatch"))
HARMLESS = truth(at_work=("mismatch",), speed=0.97)
COLLAPSED = truth(other="entropy collapse", at_work=("mismatch",))


@pytest.mark.parametrize(
    ("true", "kind"),
    [
        (STALE, "harmful"),
        (truth("staleness", speed=HARMFUL), "mild"),
        (truth("staleness", speed=None), "mild"),
        (truth("sync", speed=1.0, per_hour=True), "per hour"),
        (HARMLESS, "harmless"),
        (truth(at_work=("mismatch",), speed=0.6), "harmful"),  # the measured speed decides, not the label
        (truth(speed=0.6), "harmless"),
        (COLLAPSED, "other"),
    ],
)
def test_the_kind_of_a_run_is_that_of_its_measured_speed(true: Truth, kind: Kind) -> None:
    assert true.kind == kind


@pytest.mark.parametrize(
    ("true", "answer", "result"),
    [
        (STALE, cause("staleness"), "right"),
        (STALE, cause("mismatch"), "wrong"),
        (STALE, cause("staleness", "mismatch"), "wrong"),
        (STALE_AND_MORE, cause("staleness", "mismatch"), "right"),
        (STALE_AND_MORE, cause("mismatch"), "beside"),
        (TWO, cause("sync", "mismatch"), "right"),
        (TWO, cause("sync"), "part"),
        (truth(at_work=("mismatch",), speed=0.6), cause("mismatch"), "right"),
        (truth("sync", speed=1.0, per_hour=True), cause("sync"), "right"),
        (HARMLESS, cause("mismatch"), "false alarm"),
        (HARMLESS, Answer("none"), "none"),
        (HARMLESS, Answer("other", other="NaN"), "false other"),
        (COLLAPSED, cause("mismatch"), "false alarm"),
        (COLLAPSED, Answer("other", other="entropy fell"), "other"),
        (COLLAPSED, Answer("undetermined"), "undetermined"),
        (COLLAPSED, Answer("none"), "missed"),
        (STALE, Answer("other", other="NaN"), "false other"),
        (STALE, Answer("none"), "missed"),
        (STALE, Answer("undetermined"), "undetermined"),
        (STALE, Answer("error", other="no"), "error"),
    ],
)
def test_the_result_of_a_verdict(true: Truth, answer: Answer, result: Result) -> None:
    assert score(true, answer).result == result


def test_a_mechanism_counts_when_it_is_named_or_a_risk_and_only_where_one_is_present() -> None:
    assert score(TWO, cause("sync", risks=("mismatch",))).mechanism is True
    assert score(TWO, cause("sync")).mechanism is False
    assert score(truth(speed=1.0), Answer("none")).mechanism is None


def test_undetermined_has_its_reason_in_a_true_risk_or_a_missing_signal() -> None:
    assert score(STALE, Answer("undetermined", risks=("staleness",))).reason is True
    assert score(STALE, Answer("undetermined", missing=("lag_mean",))).reason is True
    assert score(STALE, Answer("undetermined", risks=("eviction",))).reason is False
    assert score(STALE, Answer("none")).reason is None


def test_an_interval_covers_the_true_speed_or_not() -> None:
    assert score(STALE, Answer("none", speed=(0.6, 0.4, 0.7))).covered is True
    assert score(STALE, Answer("none", speed=(0.6, 0.55, 0.7))).covered is False
    assert score(STALE, Answer("none")).covered is None


def test_truth_and_answer_are_read_from_the_trees_that_are_written() -> None:
    tree = {"causes": ["sync"], "at_work": ["sync"], "other": None, "speed_per_update": 0.4, "per_hour_only": False}
    onset = {"sets_in": 21, "behind": 60}
    assert Truth.of({**tree, "onset": onset}) == replace(truth("sync", speed=0.4), sets_in=21, behind=60)
    verdict = {"outcome": "cause", "causes": ["sync"], "risks": [], "other": None, "missing": ["lag_mean"]}
    speed = {"value": 0.5, "low": 0.4, "high": 0.6, "interval": "two-sided 90 %"}
    symptom = {"state": "slower", "speed": {"per_update": speed}, "onset": {"low": 20.0, "high": 50.0}}
    entries = [{"signal": name, "standing": s} for name, s in (("ess", "inert"), ("lag_mean", "derivable"))]
    rest = {"coverage": {"causes": {"staleness": entries, "sync": entries}}, "findings": []}
    assert Answer.of({"verdict": verdict, "symptom": symptom, **rest}) == Answer(
        "cause", ("sync",), (), None, ("lag_mean",), "slower", (0.5, 0.4, 0.6), (20.0, 50.0), None, ("ess",)
    )


def test_the_event_of_another_verdict_is_that_of_the_finding_it_names() -> None:
    found = [
        {"title": "Entropy collapsed", "status": "fired", "cause": "health", "onset": {"low": 3.0, "high": 9.0}},
        {"title": "The rate fell", "status": "fired", "cause": "health", "onset": {"low": 41.0, "high": 41.0}},
    ]
    verdict = {"outcome": "other", "causes": [], "risks": [], "other": "the rate fell", "missing": []}
    symptom = {"state": "untested", "speed": {"per_update": None}, "onset": None}
    tree = {"verdict": verdict, "symptom": symptom, "coverage": {"causes": {}}, "findings": found}
    assert Answer.of(tree).event == (41.0, 41.0)
