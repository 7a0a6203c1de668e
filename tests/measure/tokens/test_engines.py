from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.measure.tokens.files import write_run
from verl_audit.measure.tokens import Failure, Spec, TokenSums, reduce_all
from verl_audit.measure.tokens.engines import Engine, Job, _in_order, shards, work
from verl_audit.measure.tokens.shard import Source

JOB = Job(Spec(), "numpy", None)


def same(a: TokenSums, b: TokenSums) -> bool:
    tables = all(a.tables()[name].equals(b.tables()[name]) for name in a.tables())
    return tables and a.trajectories == b.trajectories and a.noticed == b.noticed


@pytest.mark.parametrize(("engine", "workers"), [("local", 1), ("local", 3), ("processes", 2)])
def test_engines_and_workers_change_no_bit(engine: Engine, workers: int, tmp_path: Path) -> None:
    paths = write_run(tmp_path)
    one = reduce_all(paths, kernel="numpy", workers=1)
    other = reduce_all(paths[::-1], kernel="numpy", engine=engine, workers=workers)
    assert same(one.sums, other.sums)
    assert one.failures == ()
    assert list(one.sums.trajectories) == sorted(paths)


def test_shards_come_in_the_order_of_the_sources(tmp_path: Path) -> None:
    paths = write_run(tmp_path)[::-1]
    found = [list(s.trajectories) for s in shards(paths, workers=3) if isinstance(s, TokenSums)]
    assert found == [[path] for path in paths]


def test_what_cannot_be_read_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    good, torn, *_ = write_run(tmp_path)
    Path(torn).write_bytes(Path(torn).read_bytes()[:-100])
    gone, empty = tmp_path / "gone.parquet", tmp_path / "empty.parquet"
    empty.touch()
    found = reduce_all([torn, str(gone), good, str(empty)])
    assert list(found.sums.trajectories) == [good]
    assert [f.source for f in found.failures] == [torn, str(gone), str(empty)]
    assert found.failures[1].reason.startswith("FileNotFoundError")


def test_no_source_is_no_sum() -> None:
    assert reduce_all([]).sums.cells.num_rows == 0


def killed_once(source: Source, job: Job) -> TokenSums | Failure:
    """Die at the first source whose mark is not there yet."""
    mark = Path(f"{source}.mark")
    if not mark.exists() and "part-2" in str(source):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return work(source, job)


def killed_always(source: Source, job: Job) -> TokenSums | Failure:
    """Die at one source, each time."""
    if "part-2" in str(source):
        os.kill(os.getpid(), signal.SIGKILL)
    return work(source, job)


def pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("fork" if os.name == "posix" else "spawn"))


def test_a_lost_process_is_survived(tmp_path: Path) -> None:
    paths = write_run(tmp_path)
    found = list(_in_order(paths, JOB, pool, 2, killed_once))
    assert [list(s.trajectories) for s in found if isinstance(s, TokenSums)] == [[path] for path in paths]
    assert (tmp_path / "part-2.parquet.mark").exists()


def test_a_source_that_kills_every_worker_is_given_up_and_no_other(tmp_path: Path) -> None:
    paths = write_run(tmp_path)
    found = list(_in_order(paths, JOB, pool, 2, killed_always))
    assert found[1] == Failure(paths[1], "lost its worker 3 times")
    assert [isinstance(s, TokenSums) for s in found] == [True, False, True, True]
