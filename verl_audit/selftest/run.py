"""Scenarios in, judged runs out: each is simulated once and judged in every way asked for, on several processes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_audit.errors import AuditError
from verl_audit.pipeline import audit
from verl_audit.reference import TraceOptions, environments, scenario, simulate, truth_path
from verl_audit.selftest.hide import Family, family, poorer
from verl_audit.selftest.score import Answer, Judged, Truth

WAYS = ("traces+baseline", "metrics+baseline", "traces", "metrics", "traces+baselines", "metrics+baselines")
"""What the auditor is given: metrics alone or with per-trajectory traces; a baseline run, none or `BASELINES`."""
BASELINES = 5
"""Baseline runs of the ways with several, from which run-to-run variation is measured."""
HELD_OUT = "wide"
"""Environment that is only for reporting: no rule, threshold or verdict may be changed for what it shows."""
QUICK = (
    "async", "async_fp8", "async_wait", "fp4_bypass", "temperature_bypass", "fp4_tis", "stale_bypass", "drop",
    "frozen_replicas", "stale_and_fp4", "rate_decayed", "reward_hacking",
)  # fmt: skip
"""A run or more of each kind, for a look in less than a minute."""
BASELINE_SEEDS = 100
"""The baseline of seed n is made with seed n + 100: another run, as that of a user would be. Several are that one and
those of the other seeds below `BASELINES`, so that they are made once."""
TRACES = "traces"
"""Folder of a run that holds its traces."""
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


Baseline = tuple[str, str, int]
"""Scenario, environment and seed of a baseline run."""


def _baselines(way: str) -> int:
    """How many baseline runs a way is given."""
    return {"": 0, "baseline": 1, "baselines": BASELINES}[way.partition("+")[2]]


@dataclass(frozen=True)
class Case:
    """One run to make, and the ways to judge it: each with everything, or with each of `hidden` hidden in turn."""

    scenario: str
    environment: str
    seed: int
    ways: tuple[str, ...]
    hidden: tuple[str, ...] = ()

    @property
    def baselines(self) -> list[Baseline]:
        """The runs it is compared with, the only one of the ways with one first; none where no way wants any."""
        most = max((_baselines(way) for way in self.ways), default=0)
        others = (seed for seed in range(BASELINES) if seed != self.seed)
        name = scenario(self.scenario).baseline
        return [(name, self.environment, seed + BASELINE_SEEDS) for seed in (self.seed, *others)][:most]


def cases(
    names: Sequence[str], envs: Sequence[str], seeds: int, ways: Sequence[str], hidden: Sequence[str] = ()
) -> list[Case]:
    """Every scenario in every environment with seeds 0 to `seeds` - 1; `AuditError` for an unknown name.

    In the order of `envs`, and in each seed after seed, so that a part of the list is a smaller look at everything.
    """
    for env in envs:
        if env not in environments():
            raise AuditError(f"no environment {env!r}; one of {', '.join(environments())}")
    for way in ways:
        if way not in WAYS:
            raise AuditError(f"no way {way!r}; one of {', '.join(WAYS)}")
    chosen, gone = [scenario(name).name for name in names], tuple(family(name).name for name in hidden)
    return [Case(name, env, seed, tuple(ways), gone) for env, seed, name in product(envs, range(seeds), chosen)]


def judged(todo: Sequence[Case], workers: int | None = None) -> Iterator[Judged]:
    """Simulate and judge, in the order in which the runs finish; the runs are removed at once.

    `workers`: processes, by default one for each processor. Even one is a process of its own, with one thread of
    linear algebra, so that a run is the same however many there are.
    """
    for name in THREADS:
        os.environ.setdefault(name, "1")
    wanted = sorted({which for case in todo for which in case.baselines})
    count = min(workers or os.cpu_count() or 1, max(len(todo), 1))
    with (
        TemporaryDirectory(prefix="verl-audit-selftest-") as made,
        ProcessPoolExecutor(count, get_context("spawn")) as pool,
    ):
        for ready in [pool.submit(make_baseline, which, Path(made)) for which in wanted]:
            ready.result()
        waiting = [pool.submit(judge, case, Path(made)) for case in todo]
        try:
            for found in as_completed(waiting):
                yield from found.result()
        finally:  # interrupted: what has not begun is not begun
            pool.shutdown(cancel_futures=True)


def make_baseline(which: Baseline, folder: Path) -> None:
    """Simulate a baseline below `folder`."""
    simulate(*which, _place(which, folder), logs=("file",))


def _place(which: Baseline, folder: Path) -> Path:
    return folder / "-".join(("baseline", *map(str, which)))


def judge(case: Case, folder: Path) -> list[Judged]:
    """Simulate a run below `folder`, judge it each way, and remove it.

    With something hidden the verdict with everything is made again, to compare with, and not returned.
    """
    bases = [_place(which, folder) for which in case.baselines]
    with TemporaryDirectory(dir=folder) as made:
        run = Path(made) / "run"
        traced = TraceOptions() if any(way.startswith(TRACES) for way in case.ways) else None
        simulate(case.scenario, case.environment, case.seed, run, logs=("file",), traces=traced)
        truth = Truth.of(json.loads(truth_path(run).read_text(encoding="utf-8")))
        whole = _answers(case.ways, run, bases)
        if not case.hidden:
            return [_judged(case, way, truth, said) for way, said in whole.items()]
        return [
            _judged(case, way, truth, said, gone, whole[way])
            for gone in map(family, case.hidden)
            for way, said in _without(gone, case.ways, run, bases, Path(made) / gone.name).items()
        ]


def _judged(
    case: Case, way: str, truth: Truth, said: Answer, hidden: Family | None = None, whole: Answer | None = None
) -> Judged:
    """A verdict to keep: of what coverage lacks only what it lacks because it was hidden."""
    where = case.scenario, case.environment, case.seed, way, truth
    if hidden is None or whole is None:
        return Judged(*where, replace(said, lacking=()))
    new = tuple(signal for signal in said.lacking if hidden.has(signal) and signal not in whole.lacking)
    return Judged(*where, replace(said, lacking=new), hidden.name, replace(whole, lacking=()))


def _without(hidden: Family, ways: Sequence[str], run: Path, bases: Sequence[Path], folder: Path) -> dict[str, Answer]:
    """The answers for a run of which, as of its baselines, one family was not recorded."""
    poor = [poorer(base, folder / base.name, hidden) for base in bases]
    found = _answers(ways, poorer(run, folder / "run", hidden), poor)
    shutil.rmtree(folder)
    return found


def _answers(ways: Sequence[str], run: Path, bases: Sequence[Path]) -> dict[str, Answer]:
    bare = run.parent / "bare" / run.name
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns(TRACES))
    given = {way: run if way.partition("+")[0] == TRACES else bare for way in ways}
    return {way: _answer(given[way], bases[: _baselines(way)]) for way in ways}


def _answer(run: Path, bases: Sequence[Path]) -> Answer:
    try:
        found = audit(run, baselines=bases)
    except AuditError as error:  # an audit that gives up is counted, and the rest goes on
        return Answer("error", other=str(error))
    with found.store:
        return Answer.of(found.document)
