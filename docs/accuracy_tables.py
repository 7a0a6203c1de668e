"""The page accuracy.md and the statement of the HTML report, from the verdicts in accuracy.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from verl_audit.reference import environments, scenarios
from verl_audit.selftest import (
    BASELINES,
    BY_CAUSE,
    BY_NEARNESS,
    BY_SPEED,
    DATED,
    HELD_OUT,
    HIDDEN,
    RATES,
    WAYS,
    Judged,
    Rate,
    amiss,
    counted,
    error,
    families,
    matrix,
    words,
)
from verl_audit.selftest.records import read

RECORDS = Path(__file__).parent / "accuracy.json"
LIMITS = """
## What keeps the share of right causes down

Most of what is missed is slowed by less than one run beside one baseline can show. Repeats of one configuration that
differ by their seed alone are taken to differ in speed by 0.15 (standard deviation of the logarithm; 0.1 to 0.2 was
measured), and validation adds its noise: a slowdown to about 0.6 is seen 4 times in 5, one to 0.75 seldom. Equal runs
of this loop differ by 0.05 to 0.07 only, which no single baseline can tell. Five can: their variation is measured, a
slowdown to about 0.7 is seen, and the columns `traces+baselines` and `metrics+baselines` say what that is worth (seeds
0 to 4 share the same five). The tables count runs by their true speed; `diagnose` states what the runs it was given
could have shown. What five baselines cost are runs just above the limit: no test tells a speed of 0.81 from one of
0.79, so a run that a mechanism slows to 0.8 to 0.9 is often called slowed by it, which it is, if by less than the limit
that makes it harmed. Those false alarms are counted with the others and apart.

The rest lacks signals that metrics do not hold: which groups were evicted when lengths do not follow prompts
(`drop_mild`, `overflow`), the age of samples in fully_async (`stale_fully_async`), what each replica was sent where
half of the weights arrive (`partial_sync`). Those verdicts are undetermined and name the signal. Damage is measured on
what the optimiser sees, so nucleus sampling (`top_p_bypass`), which narrows what is explored and clips little, stays a
risk. Without a baseline nothing tells a slow run from a fast one, so no cause is named, and a run with a learning rate
too low looks sound.
"""
WAY_WORDS = {
    "traces+baseline": "with traces and a baseline",
    "metrics+baseline": "from metrics with a baseline",
    "traces": "with traces, without a baseline",
    "metrics": "from metrics, without a baseline",
    "traces+baselines": f"with traces and {BASELINES} baselines",
    "metrics+baselines": f"from metrics with {BASELINES} baselines",
}
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]
INTRO = """# Accuracy

How often the verdict is right on runs of the [reference loop](reference-loop.md), whose cause is known. Made again by
`python benchmarks/accuracy.py --hide all` (hours for all of it; it goes on where it stopped); `verl-audit selftest`
judges a dozen runs in a minute.

Each run is judged as a user would: its log in verl's `file` format and its configuration, with or without traces for
each trajectory, with one baseline run of another seed, with five or without. The truth stands outside the run
directory, where no reader sees it.

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

Shares stand with their 95 % interval: Wilson's, in which a scenario counts once however many seeds were run, since the
seeds of one are alike (a design effect of as many as there are seeds; Kish 1965, and Franco, Little, Louis and Slud
2019 for its place in Wilson's interval). It says what scenarios not tried may show, and is too wide for other seeds of
these.

With *one family hidden* none of its signals is in the log of the run, of its baseline or in the traces, as if they had
never been recorded; the families are in
[verl_audit/selftest/hidden.toml](../verl_audit/selftest/hidden.toml). Only seed 0 is judged so. What was evicted is
hidden as a recorder at the trainer would: the traces hold what was trained. verl leaves the key of an eviction count
out where it is 0, so a log without the keys cannot be told from a run without evictions; a verdict can then not name
them.

*Onset* is in logged steps, and an interval holds a true step if it ends at most one step beside it. That of a slowdown
is to hold the step at which the run began to fall behind in 9 of 10 runs. Until its mechanism sets in, the exact reward
of a run is that of the same run without it, so that is the true step, and 0 for a mechanism that acts from the start.
The interval is wide, as equal runs of two seeds differ: it ends at the latest step at which the fall can have begun,
and starts at 0 unless a stretch without one is shown. A run is *surely behind* from the step on from which its exact
reward stays below that of a baseline run two run-to-run standard deviations slow: how far from there the interval ends
(+ is later) says how late a fall is told, not whether it is dated right.

Two things count against the verdict that it is not wrong about: `sync_saturated` is stated as harmless; that its task
is solved is true, and is scored as *false other*. And `saturated`, the same task trained asynchronously, is stated as
flattened by its ceiling: where it is as fast as its baseline, as saturated, *none* is true and counts as a miss.

"""


def page(table: Table, note: str) -> str:
    """The page; `table` renders head and rows, `note` says where it is from."""
    found = read(RECORDS)
    runs, poor = [r for r in found if not r.hidden], [r for r in found if r.hidden]
    parts = [note, INTRO, _how_many(runs, poor), "\n\n## Targets\n\n", _targets(runs, poor), LIMITS]
    parts += [_tables(here, [r for r in poor if r.environment == env], env, table) for env, here in _by_env(runs)]
    return "".join([*parts, _mistakes(found)])


def _by_env(runs: Sequence[Judged]) -> Iterator[tuple[str, list[Judged]]]:
    """Environments with what was judged in them, the held-out one first."""
    for env in (HELD_OUT, *(e for e in environments() if e != HELD_OUT)):
        if here := [r for r in runs if r.environment == env]:
            yield env, here


def statement() -> dict[str, list[str]]:
    """Sentences for the HTML report: held-out figures where there are some."""
    runs = _held([r for r in read(RECORDS) if not r.hidden])
    return {"statement": [s for way in WAYS[:2] if (s := _sentence(_of(runs, way), way))]}


def _held(runs: Sequence[Judged]) -> list[Judged]:
    """Runs of the held-out environment once every scenario was run in it, else all but those."""
    held = [r for r in runs if r.environment == HELD_OUT]
    whole = len({r.scenario for r in held}) == len(scenarios())
    return held if whole else [r for r in runs if r.environment != HELD_OUT]


def _of(runs: Iterable[Judged], way: str) -> list[Judged]:
    return [r for r in runs if r.way == way]


def _ways(runs: Iterable[Judged]) -> list[str]:
    found = {r.way for r in runs}
    return [way for way in WAYS if way in found]


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


def _how_many(runs: Sequence[Judged], poor: Sequence[Judged]) -> str:
    """What was run, so that nobody takes it for more."""
    parts = []
    for env in environments():
        here, hidden = [r for r in runs if r.environment == env], [r for r in poor if r.environment == env]
        parts.append(f"- `{env}`{' (held out)' if env == HELD_OUT else ''}: {_span(here) or '-'}")
        parts += (
            [f"  - with one of {len({r.hidden for r in hidden})} families hidden: {_span(hidden)}"] if hidden else []
        )
    held = f"`{HELD_OUT}` was not looked at while rules and thresholds were chosen; it is only for reporting."
    return "What was run:\n\n" + "\n".join(parts) + f"\n\n{held}"


def _span(runs: Sequence[Judged]) -> str:
    if not runs:
        return ""
    seeds, names = sorted({r.seed for r in runs}), {r.scenario for r in runs}
    told = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{len(names)} of {len(scenarios())} scenarios, {told}, {', '.join(_ways(runs))}"


def _targets(runs: Sequence[Judged], poor: Sequence[Judged]) -> str:
    """A line for each target, on the held-out environment once it was run."""
    held = _held(runs)
    whole = bool(held) and held[0].environment == HELD_OUT
    where = f"On `{HELD_OUT}`" if whole else f"Not every scenario was run in `{HELD_OUT}` yet; on the others"
    hidden = [r for r in poor if (r.environment == HELD_OUT) == whole]
    lines = [_target(rate, way, _of(held, way)) for way in WAYS for rate in RATES]
    lines += [_target(rate, way, _of(hidden, way), "one family hidden, ") for way in WAYS for rate in HIDDEN]
    return f"{where}:\n\n" + "\n".join(line for line in lines if line) + "\n"


def _target(rate: Rate, way: str, runs: Sequence[Judged], lead: str = "") -> str:
    found = counted(rate, runs)
    said = rate.judged(way, found)
    if not said:
        return ""
    told = said.replace("missed", "**missed**")
    return f"- {told}; {lead}{WAY_WORDS[way]}: {rate.name}: {found.words()}; {rate.target(way)}"


def _tables(runs: Sequence[Judged], poor: Sequence[Judged], env: str, table: Table) -> str:
    ways = _ways(runs)
    by_way = [_of(runs, way) for way in ways]
    shares = (
        [rate.name, rate.short(ways), *(counted(rate, r).short() for r in by_way)]
        for rate in (*RATES, *BY_NEARNESS, *BY_SPEED, *BY_CAUSE)
    )
    onsets = ([f"onset of {d.name}", "", *(words(error(d, r)) for r in by_way)] for d in DATED)
    parts = [
        f"\n## `{env}`{', held out' if env == HELD_OUT else ''}\n\nShares: hits/runs, share (interval) in %.\n\n",
        table(["share", "target", *ways], [*shares, *(row for row in onsets if any(row[2:]))]),
        _hidden(poor, table) if poor else "",
        "\n",
        table(["scenario", "truth", *ways], _matrix(by_way)),
    ]
    return "".join(parts)


def _hidden(poor: Sequence[Judged], table: Table) -> str:
    """A row for each hidden family: mistakes, and whether a verdict that became undetermined names it."""
    ways = _ways(poor)
    names = [name for name in families() if any(r.hidden == name for r in poor)]
    rows = [
        [families()[name].title, *(_lost([r for r in _of(poor, way) if r.hidden == name]) for way in ways)]
        for name in names
    ]
    return "\nWith one family hidden:\n\n" + table(["hidden", *ways], rows)


def _lost(runs: Sequence[Judged]) -> str:
    wrong, alarm, named, in_verdict = (counted(rate, runs) for rate in HIDDEN)
    told = f"{wrong.hits} wrong, {alarm.hits} false alarms of {len(runs)}"
    if not named.runs:
        return told
    return f"{told}; {named.runs} became undetermined, {named.hits} name it ({in_verdict.hits} in the verdict)"


def _matrix(by_way: Sequence[Sequence[Judged]]) -> Iterator[Sequence[str]]:
    found = [{name: (kinds, said) for name, kinds, said in matrix(runs)} for runs in by_way]
    for name in [s.name for s in scenarios()]:
        kinds = next((one[name][0] for one in found if name in one), None)
        if kinds is not None:
            yield [f"`{name}`", kinds, *(one.get(name, ("", ""))[1] for one in found)]


def _mistakes(runs: Sequence[Judged]) -> str:
    """Every wrong verdict, except those of the held-out environment, which is not to be looked into."""
    lines = [f"- {line}\n" for line in amiss([r for r in runs if r.environment != HELD_OUT])]
    head = "\n## Verdicts that were wrong, or left a harmed run without every cause\n\n"
    note = f"Those of `{HELD_OUT}` are counted above and not told. Without a baseline, only those that were wrong.\n\n"
    return f"{head}{note}{''.join(lines)}" if lines else ""
