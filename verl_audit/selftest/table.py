"""Judged runs as text: a matrix of scenarios by result, the shares, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from verl_audit.selftest.onsets import DATED, error, words
from verl_audit.selftest.score import Judged
from verl_audit.selftest.shares import BY_CAUSE, RATES, counted

AMISS = ("wrong", "false alarm", "false other", "missed", "beside", "error")
"""Results that are mistakes."""


def matrix(runs: Sequence[Judged]) -> list[tuple[str, str, str]]:
    """Scenario, its kinds, and its results, in the order of the runs; with their counts where there are several."""
    names = dict.fromkeys(run.scenario for run in runs)
    return [(name, *_results([run for run in runs if run.scenario == name])) for name in names]


def _results(runs: Sequence[Judged]) -> tuple[str, str]:
    kinds = Counter[str](run.truth.kind for run in runs)
    results = Counter[str](run.score.result for run in runs)
    return _tallied(kinds), _tallied(results) if len(runs) == 1 else _each(results)


def _tallied(counts: Counter[str]) -> str:
    """The one there is, or each with its count."""
    return next(iter(counts)) if len(counts) == 1 else _each(counts)


def _each(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.most_common())


def amiss(runs: Iterable[Judged]) -> Iterator[str]:
    """A line for each verdict that is a mistake, or that left harm without a cause; seeds that say the same in one.

    Without a baseline a slowdown cannot be shown, so there only mistakes are told; and so with something hidden.
    """
    alike: dict[tuple[object, ...], list[Judged]] = {}
    for run in runs:
        result = run.score.result
        short = run.truth.kind == "harmful" and result != "right" and "+" in run.way and not run.hidden
        if result in AMISS or short:
            where = run.environment, run.scenario, run.way, run.hidden
            alike.setdefault((*where, result, run.answer.said, run.answer.other), []).append(run)
    for same in alike.values():
        seeds = ", ".join(str(run.seed) for run in same[1:])
        yield f"{same[0].score.result}: {told(same[0])}{f'; likewise seed {seeds}' if seeds else ''}"


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
    way = f"{run.way} without {run.hidden}" if run.hidden else run.way
    return f"{run.scenario} {run.environment} seed {run.seed} [{way}]: {true}{speed}; said {answer}"


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
    return ["Verdicts that were wrong, or left a harmed run without every cause:", *(f"  {line}" for line in found)]


def _rate_lines(way: str, runs: Sequence[Judged]) -> Iterator[str]:
    for rate in (*RATES, *BY_CAUSE):
        found = counted(rate, runs)
        if found.share is not None:
            said = rate.judged(way, found)
            target = f"; {rate.target(way)}: {said.replace('missed', 'MISSED')}" if said else ""
            yield f"  {rate.name}: {found.words()}{target}"
    for dated in DATED:
        if said := words(error(dated, runs)):
            yield f"  onset of {dated.name}: {said}"
