"""The page accuracy.md and the statement of the HTML report, from the verdicts in accuracy.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from verl_audit.reference import environments, scenarios
from verl_audit.selftest import RATES, WAYS, Count, Judged, Rate, amiss, matrix
from verl_audit.selftest.records import read
from verl_audit.selftest.table import counted

RECORDS = Path(__file__).parent / "accuracy.json"
HELD_OUT = "wide"
WAY_WORDS = {
    "traces+baseline": "with traces and a baseline",
    "metrics+baseline": "from metrics with a baseline",
    "traces": "with traces, without a baseline",
    "metrics": "from metrics, without a baseline",
}
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]
INTRO = """# Accuracy

How often the verdict is right on runs of the [reference loop](reference-loop.md), whose cause is known. Made again by
`python benchmarks/accuracy.py` (hours for all of it; it goes on where it stopped); `verl-audit selftest` judges a dozen
runs in a minute.

Each run is judged as a user would: its log in verl's `file` format and its configuration, with or without traces for
each trajectory, with or without one baseline run of another seed. The truth stands outside the run directory, where no
reader sees it.

What the words mean:

- *harmed*: the true learning speed per update, from the exact expected reward of the policy, is below 0.8 of the
  baseline's, and at least one of the four mechanisms is at work. The measured speed decides, not the scenario's label.
- *mild*: the scenario states a cause, but this run is not that slow. *per hour*: only the clock is slower.
- *right*: every true cause is named and nothing that is not at work; *part*: one of two. *beside*: what is named is at
  work, but something else slows the run. *wrong*: what is named is not there.
- *false alarm*: one of the four is named though the run is harmless, or is slowed by something else.
- *missed*: the run is slow and the verdict sees no slowdown. *none*: no slowdown is seen, and there is none to see (or
  one of less than a fifth).
- *undetermined* is for the right reason when a mechanism that is present is told as a risk, or a missing signal is
  named.
- *other*: something else is named, for a run that something else slows; whether the words fit is not scored.
  *false other*: the same for a run that is harmless or slowed by one of the four.

Shares stand with their 95 % Wilson interval. Runs of one scenario with several seeds are alike, so the intervals are
narrower than they should be for scenarios not tried. Not measured: how far the onset of a cause is off, and what the
verdict does with one family of signals hidden.

Two things count against the verdict that it cannot know or is not wrong about. The rollout engine answers the
validation prompts, as in verl, so with nucleus sampling (`top_p_bypass`) validation is better than the policy whose
reward the true speed is taken from. And `sync_saturated` is stated as harmless; that its task is solved is true, and is
scored as *false other*.

"""


def page(table: Table, note: str) -> str:
    """The page; `table` renders head and rows, `note` says where it is from."""
    runs = read(RECORDS)
    tables = "".join(_tables(runs, table))
    return f"{note}{INTRO}{_how_many(runs)}\n\n## Targets\n\n{_targets(runs)}{tables}{_mistakes(runs)}"


def statement() -> dict[str, list[str]]:
    """Sentences for the HTML report: held-out figures where there are some."""
    runs = _held(read(RECORDS))
    return {"statement": [s for way in WAYS[:2] if (s := _sentence(_of(runs, way), way))]}


def _held(runs: Sequence[Judged]) -> list[Judged]:
    """Runs of the held-out environment once every scenario was run in it, else all but those."""
    held = [r for r in runs if r.environment == HELD_OUT]
    whole = len({r.scenario for r in held}) == len(scenarios())
    return held if whole else [r for r in runs if r.environment != HELD_OUT]


def _of(runs: Iterable[Judged], way: str, env: str | None = None) -> list[Judged]:
    return [r for r in runs if r.way == way and env in (None, r.environment)]


def _sentence(runs: Sequence[Judged], way: str) -> str:
    if not runs:
        return ""
    right, _, wrong, alarm = (counted(rate, runs) for rate in RATES[:4])
    held = " of an environment no rule was tuned on" if runs[0].environment == HELD_OUT else ""
    where = f"On {len(runs)} simulated runs{held}, judged {WAY_WORDS[way]}"
    return (
        f"{where}: the cause was named in {right.hits} of {right.runs} runs it slowed, a wrong one in {wrong.hits} of "
        f"{wrong.runs}; a cause was named in {alarm.hits} of {alarm.runs} harmless runs."
    )


def _how_many(runs: Sequence[Judged]) -> str:
    """What was run, so that nobody takes it for more."""
    parts = []
    for env in environments():
        here = [r for r in runs if r.environment == env]
        seeds, names = {r.seed for r in here}, {r.scenario for r in here}
        ways = [w for w in WAYS if _of(here, w)]
        words = (
            f"{len(names)} of {len(scenarios())} scenarios, seeds {_seeds(seeds)}, {', '.join(ways)}" if here else "-"
        )
        parts.append(f"- `{env}`{' (held out)' if env == HELD_OUT else ''}: {words}")
    held = f"`{HELD_OUT}` was not looked at while rules and thresholds were chosen; it is only for reporting."
    return "What was run:\n\n" + "\n".join(parts) + f"\n\n{held}"


def _seeds(seeds: set[int]) -> str:
    return f"0 to {max(seeds)}" if len(seeds) > 1 else ", ".join(map(str, seeds))


def _targets(runs: Sequence[Judged]) -> str:
    """A line for each target, on the held-out environment once it was run."""
    held = _held(runs)
    whole = bool(held) and held[0].environment == HELD_OUT
    where = f"On `{HELD_OUT}`" if whole else f"Not every scenario was run in `{HELD_OUT}` yet; on the others"
    lines = [line for way in WAYS for rate in RATES if (line := _target(rate, way, _of(held, way)))]
    return f"{where}:\n\n" + "\n".join(lines) + "\n"


def _target(rate: Rate, way: str, runs: Sequence[Judged]) -> str:
    found = counted(rate, runs)
    said = rate.judged(way, found)
    if not said:
        return ""
    return (
        f"- {said.replace('missed', '**missed**')}; {WAY_WORDS[way]}: {rate.name}: {found.words()}; {rate.target(way)}"
    )


def _tables(runs: Sequence[Judged], table: Table) -> Iterator[str]:
    for env in environments():
        ways = [w for w in WAYS if _of(runs, w, env)]
        if not ways:
            continue
        yield f"\n## `{env}`{', held out' if env == HELD_OUT else ''}\n\n"
        yield table(
            ["share", *ways], ([rate.name, *(_cell(rate, w, _of(runs, w, env)) for w in ways)] for rate in RATES)
        )
        yield "\n"
        yield table(["scenario", "truth", *ways], _matrix(runs, env, ways))


def _cell(rate: Rate, way: str, runs: Sequence[Judged]) -> str:
    found: Count = counted(rate, runs)
    target = rate.target(way)
    return f"{found.words()}{f'; target {target}' if target and found.runs else ''}"


def _matrix(runs: Sequence[Judged], env: str, ways: Sequence[str]) -> Iterator[Sequence[str]]:
    by_way = {way: {name: (kinds, said) for name, kinds, said in matrix(_of(runs, way, env))} for way in ways}
    for name in [s.name for s in scenarios()]:
        kinds = next((found[name][0] for found in by_way.values() if name in found), None)
        if kinds is not None:
            yield [f"`{name}`", kinds, *(by_way[way].get(name, ("", ""))[1] for way in ways)]


def _mistakes(runs: Sequence[Judged]) -> str:
    """Every wrong verdict, except those of the held-out environment, which is not to be looked into."""
    lines = [f"- {line}\n" for line in amiss([r for r in runs if r.environment != HELD_OUT])]
    head = "\n## Verdicts that were wrong, or left a harmed run without every cause\n\n"
    return f"{head}Those of `{HELD_OUT}` are counted above and not told.\n\n{''.join(lines)}" if lines else ""
