"""How often the verdict is right, over all scenarios, environments and ways of judging: writes docs/accuracy.json.

python benchmarks/accuracy.py [--env NAME ...] [--seeds N] [--way NAME ...] [--workers N]

Goes on where it was stopped: a run that was judged by the same code is not judged again. `docs/generate.py` makes
docs/accuracy.md and the statement of the HTML report from the file. The environment `wide` is held out: it is only for
reporting, and no rule, threshold or verdict may be changed for what it shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from verl_audit.reference import environments, scenarios
from verl_audit.selftest import WAYS, cases, judged
from verl_audit.selftest.records import code_digest, read, with_all, write

RECORDS = Path(__file__).parents[1] / "docs" / "accuracy.json"


@click.command(help=__doc__)
@click.option("--env", "envs", multiple=True, type=click.Choice(list(environments())))
@click.option("--seeds", default=5, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS))
@click.option("--scenario", "names", multiple=True)
@click.option("--workers", type=int)
@click.option("--out", default=RECORDS, type=click.Path(path_type=Path), show_default=True)
def main(
    envs: tuple[str, ...], seeds: int, ways: tuple[str, ...], names: tuple[str, ...], workers: int | None, out: Path
) -> None:
    """Judge what is not judged yet."""
    digest, every = code_digest(), names or tuple(s.name for s in scenarios())
    known = read(out, digest)
    have = {(r.scenario, r.environment, r.seed, r.way) for r in known}
    todo = []
    for case in cases(every, envs or tuple(environments()), seeds, ways or WAYS):
        left = tuple(w for w in case.ways if (case.scenario, case.environment, case.seed, w) not in have)
        todo += [replace(case, ways=left)] if left else []
    for done, run in enumerate(judged(todo, workers)):
        known = with_all(known, [run])
        if done % 20 == 19:
            write(out, known, digest)
            click.echo(f"{done + 1} verdicts", err=True)
    write(out, known, digest)


if __name__ == "__main__":
    main()
