"""Many sources to their sums: on threads, on processes or on a Ray cluster, always by the same pure `reduce_shard`.

Every engine yields the shards in the order of the sources, with no more than a few waiting; the sums add exactly, so
the results are equal to the bit. A source that cannot be read is a `Failure`; the rest goes on. So is one that lost
its worker three times.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from verl_audit.errors import AuditError
from verl_audit.measure.tokens import cache as kept
from verl_audit.measure.tokens.kernel import Kernel, available
from verl_audit.measure.tokens.shard import Source, name_of, reduce_shard
from verl_audit.measure.tokens.spec import Spec
from verl_audit.measure.tokens.sums import TokenSums, merge

Engine = Literal["local", "processes", "ray"]

LIVES = 3
"""Workers that a source may lose before it is given up."""
_AHEAD = 2
"""Shards in work or waiting to be taken, for each worker."""
MERGE_AT = 32
"""Shards added at a time: adding costs a sort of them all."""
UNREADABLE = (OSError, pa.ArrowException, ValueError, TypeError, MemoryError)
"""What a damaged source raises; anything else is a fault of the program."""


@dataclass(frozen=True)
class Failure:
    """A source without sums, and why; or (another `kind`) one of whose token lists some had to be left out."""

    source: str
    reason: str
    kind: str = "tokens_unreadable"
    count: int = 1


@dataclass(frozen=True)
class Job:
    """What a worker needs beside the source."""

    spec: Spec
    kernel: Kernel
    folder: Path | None


Work: TypeAlias = Callable[[Source, Job], "TokenSums | Failure"]


@dataclass(frozen=True)
class Reduced:
    """The sums of all sources that could be read, and those that could not."""

    sums: TokenSums
    failures: tuple[Failure, ...]


def reduce_all(
    sources: Sequence[Source],
    spec: Spec | None = None,
    *,
    engine: Engine = "local",
    workers: int | None = None,
    kernel: Kernel | None = None,
    cache: Path | None = None,
) -> Reduced:
    """Sums over all sources; see `shards`. Per-trajectory tables stay in memory: 84 bytes a trajectory."""
    total, waiting, failures = merge([]), [], []
    for shard in shards(sources, spec, engine=engine, workers=workers, kernel=kernel, cache=cache):
        if isinstance(shard, Failure):
            failures.append(shard)
            continue
        waiting.append(shard)
        if len(waiting) >= MERGE_AT:
            total, waiting = merge([total, *waiting]), []
    return Reduced(merge([total, *waiting]), tuple(failures))


def shards(
    sources: Sequence[Source],
    spec: Spec | None = None,
    *,
    engine: Engine = "local",
    workers: int | None = None,
    kernel: Kernel | None = None,
    cache: Path | None = None,
) -> Iterator[TokenSums | Failure]:
    """The sums of each source, in order.

    `workers`: threads, processes, or Ray tasks at a time; by default the processors of this machine or cluster.
    `kernel`: chosen here, so that all workers take the same. `cache`: directory of sums from earlier calls (for Ray one
    that every node sees); None: none. Raises `AuditError` for a cache inside a run, or an engine that is not installed.
    """
    folder = None if cache is None else kept.checked_folder(cache, list(sources))
    job = Job(spec or Spec(), kernel or available(), folder)
    if engine == "ray":
        from verl_audit.measure.tokens import engine_ray  # noqa: PLC0415  # optional

        return engine_ray.run(sources, job, workers)
    count = workers or os.cpu_count() or 1
    if engine == "processes":
        return _in_order(sources, job, lambda n: ProcessPoolExecutor(n, get_context("spawn")), count, work)
    return _in_order(sources, job, ThreadPoolExecutor, count, work)


def work(source: Source, job: Job) -> TokenSums | Failure:
    """One source: its kept sums if they are those of the file as it is, else new ones, kept for the next time."""
    try:
        if job.folder is None:
            return reduce_shard(source, job.spec, job.kernel)
        state = kept.state_of(source)
        sums = kept.get(job.folder, source, job.spec, job.kernel)
        if sums is None:
            sums = reduce_shard(source, job.spec, job.kernel)
            with suppress(OSError):  # a full disk costs the next call time, not this one its result
                kept.put(job.folder, source, job.spec, job.kernel, sums, state)
        return sums
    except UNREADABLE as error:
        return Failure(name_of(source), f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _in_order(
    sources: Sequence[Source], job: Job, pool_of: Callable[[int], Executor], workers: int, task: Work
) -> Iterator[TokenSums | Failure]:
    """Results in the order of the sources. A pool that lost a worker is replaced; its unfinished sources start again,
    the oldest alone, since any of them may have been the one that killed it."""
    left, lost = deque(sources), dict.fromkeys(range(len(sources)), 0)
    first = 0
    while left:
        pool = pool_of(1 if lost.get(first) else workers)
        running: deque[Future[TokenSums | Failure]] = deque()
        try:
            ahead = 1 if lost.get(first) else _AHEAD * workers
            while left:
                while len(running) < min(ahead, len(left)):
                    running.append(pool.submit(task, left[len(running)], job))
                result = running.popleft().result()
                yield result
                left.popleft()
                first += 1
                if ahead == 1:
                    break
        except BrokenProcessPool:
            lost[first] += 1
            if lost[first] >= LIVES:
                yield Failure(name_of(left.popleft()), f"lost its worker {LIVES} times")
                first += 1
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def no_ray(error: ImportError) -> AuditError:
    """What to tell a user without Ray."""
    return AuditError(f"--engine ray needs the extra of that name: pip install verl-audit[ray] ({error})")


def capped(workers: int | None, most: Any) -> int:
    """Tasks at a time on a cluster with `most` processors."""
    return _AHEAD * (workers or int(most) or 1)
