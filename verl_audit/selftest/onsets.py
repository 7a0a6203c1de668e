"""Whether the interval of a slowdown's or an event's onset holds the true step, and how wide it is, in logged steps."""

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
    width: float | None
    """Median width of the interval, in steps."""
    after: float | None
    """Median distance of the interval's end from the step from which a run is surely behind, in steps."""


def _harmed(run: Judged) -> bool:
    return run.truth.kind == "harmful" and run.answer.symptom == "slower"


def _other(run: Judged) -> bool:
    return run.truth.kind == "other" and run.answer.outcome == "other"


def _from_start(run: Judged) -> int | None:
    return 0 if run.truth.sets_in is None else None


DATED = (
    Dated(
        "slowdown, where the mechanism sets in midway",
        _harmed,
        lambda run: run.truth.sets_in,
        lambda run: run.answer.onset,
    ),
    Dated("slowdown, where the mechanism acts from the start", _harmed, _from_start, lambda run: run.answer.onset),
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
    widths = [high - low for _, _, (low, high) in told]
    after = [high - run.truth.behind for run, _, (_, high) in told if _harmed(run) and run.truth.behind is not None]
    count = Count(holds, len(told), len({run.scenario for run, _, _ in told}))
    return Error(len(known), count, median(widths) if widths else None, median(after) if after else None)


def words(found: Error) -> str:
    """As tables show it, "" where no run has a true onset."""
    if not found.runs:
        return ""
    dated = f"{found.holds.runs} of {found.runs} dated"
    if found.width is None:
        return dated
    end = f", ends {found.after:+.0f} from surely behind" if found.after is not None else ""
    return f"{dated}, {found.holds.hits} hold it; width {found.width:.0f}{end}"
