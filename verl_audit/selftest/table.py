"""Judged runs counted: rates beside their targets, a matrix of scenarios by result, and what went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl_audit.selftest.score import Judged, Score

NORMAL_95 = 1.959964
"""97.5 % point of the normal distribution."""
AMISS = ("wrong", "false alarm", "false other", "missed", "beside", "error")
"""Results that are mistakes."""


@dataclass(frozen=True)
class Rate:
    """A share of the runs it speaks of, and the target for it by way."""

    name: str
    among: Callable[[Judged], bool]
    hit: Callable[[Score], bool]
    at_least: Mapping[str, float] | None = None
    at_most: float | None = None

    def target(self, way: str) -> str:
        """The target in words, "" where there is none."""
        if self.at_most is not None:
            return f"at most {self.at_most:.0%}"
        return f"at least {self.at_least[way]:.0%}" if self.at_least and way in self.at_least else ""

    def met(self, way: str, share: float) -> bool | None:
        """Whether a share meets the target; None without one."""
        if self.at_most is not None:
            return share <= self.at_most
        return share >= self.at_least[way] if self.at_least and way in self.at_least else None

    def judged(self, way: str, found: Count) -> str:
        """`met`, `missed`, or `met so far` where more runs could still miss it; "" without a target."""
        met = None if found.share is None else self.met(way, found.share)
        if met is None:
            return ""
        sure = met and all(self.met(way, end) for end in found.interval)
        return "met" if sure else "met so far, too few runs to be sure" if met else "missed"


@dataclass(frozen=True)
class Count:
    """Hits among runs, with the Wilson interval at 95 %."""

    hits: int
    runs: int

    @property
    def share(self) -> float | None:
        """Hits over runs."""
        return self.hits / self.runs if self.runs else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share of many more runs would be."""
        return wilson(self.hits, self.runs)

    def words(self) -> str:
        """As tables show it."""
        if not self.runs:
            return "no run"
        low, high = self.interval
        return f"{self.hits}/{self.runs} = {self.share:.1%} ({low:.0%} to {high:.0%})"


def wilson(hits: int, runs: int, z: float = NORMAL_95) -> tuple[float, float]:
    """Score interval of a binomial share (Wilson 1927); (0, 1) without runs."""
    if not runs:
        return 0.0, 1.0
    share, square = hits / runs, z * z / runs
    middle = share + square / 2
    half = z * math.sqrt(share * (1 - share) / runs + square / (4 * runs))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def _of(*kinds: str) -> Callable[[Judged], bool]:
    return lambda run: run.truth.kind in kinds


def _is(*results: str) -> Callable[[Score], bool]:
    return lambda score: score.result in results


def _two(run: Judged) -> bool:
    return run.truth.kind == "harmful" and len(run.truth.causes) == 2


_WITH_BASELINE = {"traces+baseline": 0.90, "metrics+baseline": 0.75}
_BOTH = dict.fromkeys(_WITH_BASELINE, 0.80)
_EVERY = dict.fromkeys((*_WITH_BASELINE, "traces", "metrics"), 0.97)
_MECHANISM = dict.fromkeys(_WITH_BASELINE, 0.97)
RATES = (
    Rate("right cause, of harmed runs", _of("harmful"), _is("right", "part"), _WITH_BASELINE),
    Rate("both causes named, of harmed runs with two", _two, _is("right"), _BOTH),
    Rate("wrong cause, of runs with a cause", _of("harmful", "mild", "per hour"), _is("wrong"), at_most=0.01),
    Rate("false alarm, of harmless runs", _of("harmless"), _is("false alarm"), at_most=0.02),
    Rate(
        "`other` or undetermined, of runs slowed by something else", _of("other"), _is("other", "undetermined"), _EVERY
    ),
    Rate("one of the four named, of runs slowed by something else", _of("other"), _is("false alarm")),
    Rate("every mechanism named or a risk, of harmed runs", _of("harmful"), lambda s: s.mechanism is True, _MECHANISM),
    Rate("undetermined, of harmed runs", _of("harmful"), _is("undetermined")),
    Rate(
        "for the right reason, of undetermined harmed runs",
        lambda run: run.truth.kind == "harmful" and run.score.result == "undetermined",
        lambda s: s.reason is True,
    ),
    Rate("no slowdown seen, of harmed runs", _of("harmful"), _is("missed")),
    Rate("`other` named where a cause or nothing slows it", lambda r: r.truth.kind != "other", _is("false other")),
    Rate(
        "90 % interval of the learning speed holds the true one",
        lambda run: run.score.covered is not None,
        lambda s: s.covered is True,
    ),
)


def counted(rate: Rate, runs: Iterable[Judged]) -> Count:
    """Hits of a rate among judged runs."""
    hits = [rate.hit(run.score) for run in runs if rate.among(run)]
    return Count(sum(hits), len(hits))


def matrix(runs: Sequence[Judged]) -> list[tuple[str, str, str]]:
    """Scenario, its kinds, and its results with their counts, in the order of the runs."""
    names = dict.fromkeys(run.scenario for run in runs)
    return [(name, *_results([run for run in runs if run.scenario == name])) for name in names]


def _results(runs: Sequence[Judged]) -> tuple[str, str]:
    kinds, results = Counter(run.truth.kind for run in runs), Counter(run.score.result for run in runs)
    return ", ".join(kinds), ", ".join(r if len(runs) == 1 else f"{r} {n}" for r, n in results.most_common())


def amiss(runs: Iterable[Judged]) -> Iterator[str]:
    """A line for each verdict that is a mistake, or that left harm without a cause."""
    for run in runs:
        result = run.score.result
        if result in AMISS or (run.truth.kind == "harmful" and result != "right"):
            yield f"{result}: {told(run)}"


def told(run: Judged) -> str:
    """Which run, what is true of it and what was answered."""
    present = f"{' and '.join(sorted(run.truth.at_work))} at work" if run.truth.at_work else "nothing slows it"
    true = " and ".join(sorted(run.truth.causes)) or run.truth.other or present
    speed = "" if run.truth.speed is None else f", true speed {run.truth.speed:.2f}"
    said = [run.answer.outcome, " and ".join(run.answer.causes), run.answer.other or ""]
    risks = f"; risks {', '.join(run.answer.risks)}" if run.answer.risks else ""
    missing = f"; missing {', '.join(run.answer.missing)}" if run.answer.missing else ""
    found = f", measured {run.answer.speed[0]:.2f}" if run.answer.speed else ""
    answer = f"{' '.join(s for s in said if s)} ({run.answer.symptom}{found}{risks}{missing})"
    return f"{run.scenario} {run.environment} seed {run.seed} [{run.way}]: {true}{speed}; said {answer}"


def text(runs: Sequence[Judged]) -> str:
    """Matrix, rates and mistakes, as `verl-audit selftest` prints them."""
    parts = []
    for way in dict.fromkeys(run.way for run in runs):
        chosen = [run for run in runs if run.way == way]
        rows = matrix(chosen)
        width = max(len(name) for name, _, _ in rows)
        parts += [f"{way}, {len(chosen)} runs", *(f"  {n:<{width}}  {k:<9} {r}" for n, k, r in rows)]
        parts += ["", *_rate_lines(way, chosen), ""]
    return "\n".join([*parts, *_amiss_lines(list(amiss(runs)))])


def _amiss_lines(found: Sequence[str]) -> Sequence[str]:
    if not found:
        return ["No verdict was wrong, none left a harmed run without its cause."]
    return [f"{len(found)} verdicts wrong, or without every cause of a harmed run:", *(f"  {line}" for line in found)]


def _rate_lines(way: str, runs: Sequence[Judged]) -> Iterator[str]:
    for rate in RATES:
        found = counted(rate, runs)
        if found.share is not None:
            said = rate.judged(way, found)
            target = f"; {rate.target(way)}: {said.replace('missed', 'MISSED')}" if said else ""
            yield f"  {rate.name}: {found.words()}{target}"
