"""The Ray engine (extra `ray`): plain tasks that Ray starts again when it loses their node.

Takes the cluster that is already joined, else the one that RAY_ADDRESS names, else starts one on this machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from verl_audit.measure.tokens.engines import LIVES, Failure, Job, capped, no_ray, work
from verl_audit.measure.tokens.shard import Source, name_of
from verl_audit.measure.tokens.sums import TokenSums

try:
    import ray
except ImportError as missing:
    raise no_ray(missing) from missing


def run(sources: Sequence[Source], job: Job, workers: int | None) -> Iterator[TokenSums | Failure]:
    """Results in the order of the sources; a cluster that was started here is stopped again."""
    own = not ray.is_initialized()
    if own:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        resources: Any = ray.cluster_resources
        yield from _in_order(sources, job, capped(workers, resources().get("CPU", 1)))
    finally:
        if own:
            ray.shutdown()


def _in_order(sources: Sequence[Source], job: Job, ahead: int) -> Iterator[TokenSums | Failure]:
    task = ray.remote(num_cpus=1, max_retries=LIVES)(work)
    running: deque[Any] = deque()
    started = 0
    for source in sources:
        while started < len(sources) and len(running) < ahead:
            running.append(task.remote(sources[started], job))
            started += 1
        yield _taken(running.popleft(), source)


def _taken(reference: Any, source: Source) -> TokenSums | Failure:
    try:
        found: TokenSums | Failure = ray.get(reference)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError) as error:
        return Failure(name_of(source), f"lost its worker: {type(error).__name__}")
    return found
