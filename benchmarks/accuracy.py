"""How often the verdict is right, over all scenarios, environments and ways of judging: writes docs/accuracy.json.

python benchmarks/accuracy.py [--env NAME ...] [--seeds N] [--way NAME ...] [--hide all|NAME ...] [--workers N]

One environment is done after the other, in the order of --env, and the held-out one is first by default. With --hide,
the verdicts of seed 0 with one family of signals hidden follow when all others are there (by default those with a
baseline). Goes on where it was stopped: what was judged by the same code is not judged again. `docs/generate.py` makes
docs/accuracy.md and the statement of the HTML report from the file. The environment `wide` is held out: it is only for
reporting, and no rule, threshold or verdict may be changed for what it shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import click

from verl_audit.reference import environments, scenarios
from verl_audit.selftest import HELD_OUT, WAYS, Case, Judged, cases, families, judged
from verl_audit.selftest.records import Key, code_digest, key, read, with_all, write

RECORDS = Path(__file__).parents[1] / "docs" / "accuracy.json"
ENVIRONMENTS = (HELD_OUT, *(env for env in environments() if env != HELD_OUT))
EVERY_SECONDS = 60.0
"""How often the file is written and progress told."""


@click.command(help=__doc__)
@click.option("--env", "envs", multiple=True, type=click.Choice(ENVIRONMENTS), default=ENVIRONMENTS)
@click.option("--seeds", default=5, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS))
@click.option("--hide", "hidden", multiple=True, type=click.Choice(["all", *families()]))
@click.option("--scenario", "names", multiple=True)
@click.option("--workers", type=int)
@click.option("--out", default=RECORDS, type=click.Path(path_type=Path), show_default=True)
def main(
    envs: tuple[str, ...],
    seeds: int,
    ways: tuple[str, ...],
    hidden: tuple[str, ...],
    names: tuple[str, ...],
    workers: int | None,
    out: Path,
) -> None:
    """Judge what is not judged yet."""
    digest, every = code_digest(), names or tuple(s.name for s in scenarios())
    known = read(out, digest)
    have = {key(run) for run in known}
    gone = tuple(families()) if "all" in hidden else hidden
    parts = [left(cases(every, [env], seeds, ways or WAYS), have) for env in envs]
    parts += [left(cases(every, [env], 1, ways or WAYS[:2], gone), have) for env in envs] if gone else []
    todo = [part for part in parts if part]
    total = sum(_verdicts(case) for part in todo for case in part)
    for run in told((run for part in todo for run in judged(part, workers)), total):
        known = with_all(known, run)
        write(out, known, digest)
    write(out, known, digest)


def left(todo: Sequence[Case], have: Collection[Key]) -> list[Case]:
    """The cases with the verdicts that are not there yet; one with something hidden is made again as a whole."""
    found = []
    for case in todo:
        where = case.environment, case.scenario, case.seed
        if case.hidden:
            open_ = tuple(h for h in case.hidden if any((*where, way, h) not in have for way in case.ways))
            found += [replace(case, hidden=open_)] if open_ else []
        else:
            ways = tuple(way for way in case.ways if (*where, way, "") not in have)
            found += [replace(case, ways=ways)] if ways else []
    return found


def _verdicts(case: Case) -> int:
    return len(case.ways) * max(1, len(case.hidden))


def told(runs: Iterator[Judged], total: int) -> Iterator[list[Judged]]:
    """The runs in portions, with a line of progress for each."""
    began = last = monotonic()
    done, portion = 0, list[Judged]()
    for run in runs:
        portion.append(run)
        done, now = done + 1, monotonic()
        if now - last >= EVERY_SECONDS or done == total:
            rate = done / (now - began)
            rest = (total - done) / rate / 60
            where = f"{run.environment} {run.scenario} seed {run.seed}{f' without {run.hidden}' if run.hidden else ''}"
            click.echo(
                f"{done} of {total} verdicts, {60 * rate:.0f} a minute, {rest:.0f} minutes left ({where})", err=True
            )
            yield portion
            last, portion = now, []


if __name__ == "__main__":
    main()
