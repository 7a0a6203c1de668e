"""Shares of judged runs beside their targets, each with an interval that takes a scenario for one observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl_audit.reference.scenarios import Cause
from verl_audit.selftest.hide import family
from verl_audit.selftest.score import HARMFUL, Judged

NORMAL_95 = 1.959964
"""97.5 % point of the normal distribution."""


@dataclass(frozen=True)
class Rate:
    """A share of the runs it speaks of, and the target for it by way."""

    name: str
    among: Callable[[Judged], bool]
    hit: Callable[[Judged], bool]
    at_least: Mapping[str, float] | None = None
    at_most: float | None = None

    def target(self, way: str) -> str:
        """The target in words, "" where there is none."""
        if self.at_most is not None:
            return f"at most {self.at_most:.0%}"
        return f"at least {self.at_least[way]:.0%}" if self.at_least and way in self.at_least else ""

    def short(self, ways: Sequence[str]) -> str:
        """The targets of several ways, for a table: one where all have the same."""
        sign = "≤" if self.at_most is not None else "≥"
        each = [self.at_most if self.at_most is not None else (self.at_least or {}).get(way) for way in ways]
        told = ["–" if value is None else f"{sign} {value:.0%}" for value in each]
        return "" if set(told) == {"–"} else told[0] if len(set(told)) == 1 else " / ".join(told)

    def met(self, way: str, share: float) -> bool | None:
        """Whether a share meets the target; None without one."""
        if self.at_most is not None:
            return share <= self.at_most
        return share >= self.at_least[way] if self.at_least and way in self.at_least else None

    def judged(self, way: str, found: Count) -> str:
        """`met`, `missed`, or `met so far` where more scenarios could still miss it; "" without a target."""
        met = None if found.share is None else self.met(way, found.share)
        if met is None:
            return ""
        sure = met and all(self.met(way, end) for end in found.interval)
        return "met" if sure else "met so far, too few scenarios to be sure" if met else "missed"


@dataclass(frozen=True)
class Count:
    """Hits among runs of so many different scenarios, with the interval at 95 %.

    Seeds of one scenario are alike, so the interval is Wilson's with the scenarios in the place of the runs: n / (1 +
    (m - 1) rho) for m seeds each (Kish 1965, Survey Sampling, 5.4) at the intraclass correlation rho = 1, put into the
    score interval as Franco, Little, Louis and Slud do (2019, J. Survey Statistics and Methodology 7, 334-364). It is
    too wide where seeds differ, and never too narrow for scenarios not tried.
    """

    hits: int
    runs: int
    scenarios: int

    @property
    def share(self) -> float | None:
        """Hits over runs."""
        return self.hits / self.runs if self.runs else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share of many more scenarios would be."""
        return wilson(self.hits / self.runs, self.scenarios) if self.runs else (0.0, 1.0)

    def words(self) -> str:
        """As tables show it."""
        if not self.runs:
            return "no run"
        low, high = self.interval
        return f"{self.hits}/{self.runs} = {self.share:.1%} ({low:.0%} to {high:.0%})"

    def short(self) -> str:
        """The same for a table of many."""
        low, high = self.interval
        return f"{self.hits}/{self.runs}, {self.share:.0%} ({low * 100:.0f}–{high * 100:.0f})" if self.runs else ""


def wilson(share: float, observations: float, z: float = NORMAL_95) -> tuple[float, float]:
    """Score interval of a binomial share (Wilson 1927)."""
    square = z * z / observations
    middle = share + square / 2
    half = z * math.sqrt(share * (1 - share) / observations + square / (4 * observations))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def _of(*kinds: str) -> Callable[[Judged], bool]:
    return lambda run: run.truth.kind in kinds


def _is(*results: str) -> Callable[[Judged], bool]:
    return lambda run: run.score.result in results


def _two(run: Judged) -> bool:
    return run.truth.kind == "harmful" and len(run.truth.causes) == 2


def _harmed_by(cause: Cause) -> Callable[[Judged], bool]:
    return lambda run: run.truth.kind == "harmful" and cause in (run.truth.causes or run.truth.at_work)


def _slowed(low: float, high: float) -> Callable[[Judged], bool]:
    return lambda run: run.truth.kind == "harmful" and run.truth.speed is not None and low <= run.truth.speed < high


def _near(run: Judged) -> bool:
    speed = run.truth.speed
    return run.truth.kind == "harmless" and bool(run.truth.mechanisms) and speed is not None and speed < NEAR


def _names(cause: Cause) -> Callable[[Judged], bool]:
    return lambda run: cause in run.answer.causes and run.score.result in ("right", "part")


def _told(run: Judged) -> bool:
    """Whether the verdict calls a signal of the hidden family missing."""
    return any(family(run.hidden).has(signal) for signal in run.answer.missing)


_RIGHT_AT = {"traces": 0.90, "metrics": 0.75}
_WITH_BASELINE = {f"{given}+{base}": at for given, at in _RIGHT_AT.items() for base in ("baseline", "baselines")}
_BOTH = dict.fromkeys(_WITH_BASELINE, 0.80)
_EVERY = dict.fromkeys((*_WITH_BASELINE, "traces", "metrics"), 0.97)
_MECHANISM = dict.fromkeys(_WITH_BASELINE, 0.97)
RIGHT = Rate("right cause, of harmed runs", _of("harmful"), _is("right", "part"), _WITH_BASELINE)
WRONG = Rate("wrong cause, of runs with a cause", _of("harmful", "mild", "per hour"), _is("wrong"), at_most=0.01)
ALARM = Rate("false alarm, of harmless runs", _of("harmless"), _is("false alarm"), at_most=0.02)
RATES = (
    RIGHT,
    Rate("both causes named, of harmed runs with two", _two, _is("right"), _BOTH),
    WRONG,
    ALARM,
    Rate(
        "`other` or undetermined, of runs slowed by something else", _of("other"), _is("other", "undetermined"), _EVERY
    ),
    Rate("one of the four named, of runs slowed by something else", _of("other"), _is("false alarm")),
    Rate(
        "every mechanism named or a risk, of harmed runs",
        _of("harmful"),
        lambda r: r.score.mechanism is True,
        _MECHANISM,
    ),
    Rate("undetermined, of harmed runs", _of("harmful"), _is("undetermined")),
    Rate(
        "for the right reason, of undetermined harmed runs",
        lambda run: run.truth.kind == "harmful" and run.score.result == "undetermined",
        lambda r: r.score.reason is True,
    ),
    Rate("no slowdown seen, of harmed runs", _of("harmful"), _is("missed")),
    Rate("`other` named where a cause or nothing slows it", lambda r: r.truth.kind != "other", _is("false other")),
    Rate(
        "90 % interval of the learning speed holds the true one",
        lambda run: run.score.covered is not None,
        lambda r: r.score.covered is True,
    ),
)
"""Of verdicts with everything a way gives."""
BY_CAUSE = tuple(
    Rate(f"{cause} named, of runs it harms", _harmed_by(cause), _names(cause))
    for cause in ("mismatch", "staleness", "eviction", "sync")
)
"""`RIGHT` by the true cause; a run with two counts for both."""
SPEEDS = (0.0, 0.4, 0.6, 0.7, HARMFUL)
"""Bounds of true learning speed between which harmed runs are counted apart."""
BY_SPEED = tuple(
    Rate(f"right cause, of runs at {low:.1f} to {high:.1f} of the speed", _slowed(low, high), RIGHT.hit)
    for low, high in pairwise(SPEEDS)
)
"""`RIGHT` by how much a run is slowed: what one run beside one baseline can show depends on it."""
NEAR = 0.9
"""True learning speed below which a run with a mechanism at work is slowed by it, though less than `HARMFUL` says."""
BY_NEARNESS = (
    Rate(f"false alarm, of those at {HARMFUL} to {NEAR} with a mechanism at work", _near, ALARM.hit),
    Rate("false alarm, of all others", lambda run: ALARM.among(run) and not _near(run), ALARM.hit),
)
"""`ALARM` by whether the run is just above the limit: no test tells 0.81 from 0.79."""
HIDDEN = (
    Rate("wrong cause, of runs with a cause", WRONG.among, WRONG.hit, at_most=0.0),
    Rate("false alarm, of runs that none of the four slows", _of("harmless", "other"), _is("false alarm"), at_most=0.0),
    Rate(
        "hidden signal named, of verdicts that became undetermined",
        lambda run: run.silenced,
        lambda run: _told(run) or bool(run.answer.lacking),
        dict.fromkeys(_WITH_BASELINE, 1.0),
    ),
    Rate("in the verdict itself, of verdicts that became undetermined", lambda run: run.silenced, _told),
)
"""Of verdicts with one family of signals hidden."""


def counted(rate: Rate, runs: Iterable[Judged]) -> Count:
    """Hits of a rate among judged runs."""
    among = [run for run in runs if rate.among(run)]
    return Count(sum(map(rate.hit, among)), len(among), len({run.scenario for run in among}))
