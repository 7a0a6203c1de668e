"""Weight syncs of verl's checkpoint managers: durations by phase, aborted requests, what each replica runs after."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from inspect import isawaitable
from typing import Any

from verl_audit.record.guard import Missing, quietly, watch
from verl_audit.record.verl_rows import utc

Step = Callable[[], int]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class SyncLog:
    """Collects the syncs of all checkpoint managers of a run; `step` tells the trainer's step."""

    def __init__(self, step: Step, auto_await: Decorator) -> None:
        """`auto_await` is verl's decorator of that name. Nothing is watched until `watch_manager`."""
        self.step, self.auto_await = step, auto_await
        self._open: list[dict[str, Any]] = []
        self._inner: dict[str, float] | None = None
        self._abort_before: float | None = None
        self._aborted: int | None = None
        self._published: list[tuple[float, float, int]] = []
        self._seen: set[tuple[int, str]] = set()

    def watch_manager(self, manager: Any, missing: Missing) -> None:
        """Take the time of a manager's phases.

        verl's manager methods look whether their caller is a coroutine to decide what to return; `_timed` is seen as
        one exactly where verl's own code would be.
        """
        for name, phase in (
            ("update_weights", "total"),
            ("abort_replicas", "abort"),
            ("resume_kv_cache_replicas", "resume"),
            ("resume_generation_replicas", "resume"),
        ):
            _time(manager, name, phase, self, missing)
        for replica in getattr(manager, "replicas", ()):
            watch(replica, "abort_all_requests", missing, after=self._count_aborted)

    def _count_aborted(self, result: Any, *_: Any, **__: Any) -> None:
        if isinstance(result, Mapping) and "aborted_count" in result:
            self._aborted = (self._aborted or 0) + int(result["aborted_count"])

    def began(self, phase: str) -> None:
        """A phase begins; what aborts and resumes within an update is part of it."""
        if phase == "total":
            self._inner = {}

    def ended(self, phase: str, begun: float, ended: float, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A phase is over. An abort before an update, and a resume after it (colocate_async), are counted with it."""
        took = ended - begun
        if phase == "total":
            self._update(begun, ended, kwargs.get("global_steps", args[0] if args else None))
        elif self._inner is not None:
            self._inner[phase] = self._inner.get(phase, 0.0) + took
        elif phase == "abort":
            self._abort_before = (self._abort_before or 0.0) + took
        elif self._open:
            self._open[-1]["resume_s"] = (self._open[-1]["resume_s"] or 0.0) + took
            self._open[-1]["t1"] = utc(ended)

    def _update(self, begun: float, ended: float, version: int | None) -> None:
        inner, self._inner = self._inner or {}, None
        before, self._abort_before = self._abort_before, None
        aborted, self._aborted = self._aborted, None
        if version is None:  # the same weights again, as after a validation
            return
        self._published.append((begun, ended, int(version)))
        self._open.append(
            {
                "version": int(version),
                "step": self.step(),
                "t0": utc(begun),
                "t1": utc(ended),
                "abort_s": inner.get("abort", 0.0) + (before or 0.0) if "abort" in inner or before else None,
                "transfer_s": max(0.0, ended - begun - sum(inner.values())),
                "resume_s": inner.get("resume"),
                "aborted": aborted,
            }
        )

    def drain(self) -> list[dict[str, Any]]:
        """The syncs since the last call."""
        done, self._open = self._open, []
        return done

    def replicas(self, segments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows telling which version a replica was first seen to run after a sync; one for each sync and replica.

        A request that began after a sync had ended must be answered by that version or a newer one; by a newer one if
        it was held up, which tells of that one. Clocks of worker and driver may differ, so requests that began within
        another length of the sync after its end tell nothing.
        """
        rows = []
        ends = [end + (end - begin) for begin, end, _ in self._published]
        for segment in segments:
            server, version, begun = segment.get("server"), segment.get("version"), segment.get("t0")
            if server is None or version is None or begun is None:
                continue
            at = bisect_right(ends, begun.timestamp()) - 1
            published = max(self._published[at][2], version) if at >= 0 else None
            if published is None or (published, server) in self._seen:
                continue
            self._seen.add((published, server))
            rows.append({"version": published, "replica": server, "replica_version": version, "step": self.step()})
        return rows


def _time(manager: Any, name: str, phase: str, log: SyncLog, missing: Missing) -> None:
    original = getattr(manager, name, None)
    if not callable(original):
        missing.names.append(f"{type(manager).__name__}.{name}")
        return

    @log.auto_await
    async def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.time()
        quietly(log.began, phase)
        result = original(*args, **kwargs)
        if isawaitable(result):
            result = await result
        quietly(log.ended, phase, begun, time.time(), args, kwargs)
        return result

    setattr(manager, name, timed)
