"""How far the dated onset of a slowdown or of an event is from the true one, in logged steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from verl_audit.selftest.score import Interval, Judged
from verl_audit.selftest.shares import Count

SLACK = 1
"""Steps an interval may end beside the true one: a step that begins before a change ends after it."""


@dataclass(frozen=True)
class Dated:
    """What an interval is to hold, and where both are found; None where the run has none."""

    name: str
    among: Callable[[Judged], bool]
    true: Callable[[Judged], int | None]
    found: Callable[[Judged], Interval | None]


@dataclass(frozen=True)
class Error:
    """Of the runs with a true onset: how many were dated, and of those how well."""

    runs: int
    holds: Count
    """Of the dated ones: the interval holds the true step, to `SLACK`."""
    median: float | None
    """Median distance of the interval's middle from the true step, in steps."""
    width: float | None
    """Median width of the interval, in steps."""


def _harmed(run: Judged) -> bool:
    return run.truth.kind == "harmful" and run.answer.symptom == "slower"


def _other(run: Judged) -> bool:
    return run.truth.kind == "other" and run.answer.outcome == "other"


DATED = (
    Dated(
        "slowdown, where the mechanism sets in midway",
        _harmed,
        lambda run: run.truth.sets_in,
        lambda run: run.answer.onset,
    ),
    Dated(
        "slowdown, against the step from which the run is surely behind",
        _harmed,
        lambda run: run.truth.behind,
        lambda run: run.answer.onset,
    ),
    Dated(
        "event named as `other`, where it sets in midway", _other, lambda r: r.truth.sets_in, lambda r: r.answer.event
    ),
)


def error(dated: Dated, runs: Iterable[Judged]) -> Error:
    """Count and measure among judged runs."""
    known = [
        (run, true, dated.found(run)) for run in runs if dated.among(run) and (true := dated.true(run)) is not None
    ]
    told = [(run, true, found) for run, true, found in known if found is not None]
    holds = sum(low - SLACK <= true <= high + SLACK for _, true, (low, high) in told)
    apart = [abs((low + high) / 2 - true) for _, true, (low, high) in told]
    widths = [high - low for _, _, (low, high) in told]
    count = Count(holds, len(told), len({run.scenario for run, _, _ in told}))
    return Error(len(known), count, median(apart) if apart else None, median(widths) if widths else None)


def words(found: Error) -> str:
    """As tables show it, "" where no run has a true onset."""
    if not found.runs:
        return ""
    dated = f"{found.holds.runs} of {found.runs} dated"
    if found.median is None or found.width is None:
        return dated
    return f"{dated}, {found.holds.hits} hold it; off by {found.median:.0f} of width {found.width:.0f}"
