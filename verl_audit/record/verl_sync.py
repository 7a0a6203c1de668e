"""Weight syncs of verl's checkpoint managers: duration by phase, payload, what was interrupted, what runs after."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from verl_audit.record.guard import Missing, quietly, watch
from verl_audit.record.verl_payload import Payloads, answered, told
from verl_audit.record.verl_rows import ABORTED, utc

Step = Callable[[], int]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Row = dict[str, Any]


@dataclass
class _Sync:
    """A row under way, what the sync's own metrics tell of its payload, and a reference to the sender's count."""

    row: Row
    told: Row
    sent: Any


class SyncLog:
    """Collects the syncs of all checkpoint managers of a run; `step` tells the trainer's step."""

    def __init__(self, step: Step, auto_await: Decorator) -> None:
        """`auto_await` is verl's decorator of that name. Nothing is watched until `watch_manager`."""
        self.step, self.auto_await = step, auto_await
        self._open: list[_Sync] = []
        self._inner: dict[str, float] | None = None
        self._abort_before: float | None = None
        self._aborted: int | None = None
        self._tells_aborted = False
        self._versions: list[int] = []
        self._clear_from: list[float] = []
        """Of each sync published so far: its version, and the time from which requests surely began after it."""
        self._seen: set[tuple[int, str]] = set()
        self._normed: set[int] = set()
        self._broken: dict[tuple[int, str], Row] = defaultdict(dict)
        self._payloads: Payloads | None = None

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
        group = getattr(manager, "actor_wg", None)
        if self._payloads is None and group is not None:
            self._payloads = quietly(Payloads, group)

    def _count_aborted(self, result: Any, *_: Any, **__: Any) -> None:
        if isinstance(result, Mapping) and "aborted_count" in result:
            self._tells_aborted = True
            self._aborted = (self._aborted or 0) + int(result["aborted_count"])

    def began(self, phase: str) -> None:
        """A phase begins; what aborts and resumes within an update is part of it."""
        if phase == "total":
            self._inner = {}

    def ended(self, phase: str, begun: float, ended: float, version: int | None, result: Any) -> None:
        """A phase is over. An abort before an update, and a resume after it (colocate_async), are counted with it."""
        took = ended - begun
        if phase == "total":
            self._update(begun, ended, version, result)
        elif self._inner is not None:
            self._inner[phase] = self._inner.get(phase, 0.0) + took
        elif phase == "abort":
            self._abort_before = (self._abort_before or 0.0) + took
        elif self._open:
            row = self._open[-1].row
            row["resume_s"] = (row["resume_s"] or 0.0) + took
            row["t1"] = utc(ended)

    def _update(self, begun: float, ended: float, version: int | None, result: Any) -> None:
        inner, self._inner = self._inner or {}, None
        before, self._abort_before = self._abort_before, None
        aborted, self._aborted = self._aborted, None
        # Asked after every update, so that what one sent is not counted with the next.
        sent = None if self._payloads is None else quietly(self._payloads.ask)
        if version is None:  # the same weights again, as after a validation
            return
        self._versions.append(int(version))
        self._clear_from.append(ended + (ended - begun))
        row = {
            "version": int(version),
            "step": self.step(),
            "t0": utc(begun),
            "t1": utc(ended),
            "abort_s": inner.get("abort", 0.0) + (before or 0.0) if "abort" in inner or before else None,
            "transfer_s": max(0.0, ended - begun - sum(inner.values())),
            "resume_s": inner.get("resume"),
            "aborted": aborted,
        }
        self._open.append(_Sync(row, told(result), sent))

    def drain(self) -> list[Row]:
        """The syncs since the last call, and what earlier ones are known by now to have interrupted."""
        done, self._open = self._open, []
        broken, self._broken = self._broken, defaultdict(dict)
        rows = [self._with_payload(sync) for sync in done]
        for (version, server), counts in sorted(broken.items()):
            rows.append({"version": version, "replica": server, "step": self.step(), **counts})
        return rows

    def _with_payload(self, sync: _Sync) -> Row:
        sent = None if sync.sent is None else quietly(answered, sync.sent)
        if sent is None:  # who did not answer is not asked again, lest each step wait for it
            self._payloads = None
        row = {**sync.row, **(sent or {}), **sync.told}
        # Two pools of replicas get the same weights one after the other: one norm a version, or the second sync would
        # look like one that sent nothing new.
        if row["version"] in self._normed:
            row["payload_norm"] = None
        elif row.get("payload_norm") is not None:
            self._normed.add(row["version"])
        return row

    def interrupted(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """Count what syncs did to one request, given its calls in order: aborts, and tokens prefilled again.

        A call that was stopped ran the version before the sync, so the next version that was published is the sync's.
        The prompt and all that was sampled are prefilled again by the call that resumes it; had the call sampled
        nothing, it may have been waiting, and nothing counts. Resumed by the same version it was stopped by no sync.
        """
        for stopped, resumed in zip(calls, [*calls[1:], {}], strict=False):
            version, server = stopped.get("version"), stopped.get("server")
            if version is None or server is None or stopped.get("stop") not in ABORTED:
                continue
            by = self._published_after(version, resumed.get("version"))
            if by is None:
                continue
            if not self._tells_aborted:
                _add(self._broken[by, server], "aborted", 1)
            if stopped.get("length") and resumed.get("prefill") and resumed.get("server") is not None:
                _add(self._broken[by, resumed["server"]], "prefill_tokens", int(resumed["prefill"]))

    def _published_after(self, version: int, resumed_by: int | None) -> int | None:
        """The version published next after `version`; None if no sync is known to have stopped the call."""
        if resumed_by is not None and resumed_by <= version:
            return None
        at = bisect_right(self._versions, version)
        return self._versions[at] if at < len(self._versions) else resumed_by

    def replicas(self, segments: Iterable[Mapping[str, Any]]) -> list[Row]:
        """Rows telling which version a replica was first seen to run after a sync; one for each sync and replica.

        A request that began after a sync had ended must be answered by that version or a newer one; by a newer one if
        it was held up, which tells of that one. Clocks of worker and driver may differ, so requests that began within
        another length of the sync after its end tell nothing.
        """
        rows = []
        for segment in segments:
            server, version, begun = segment.get("server"), segment.get("version"), segment.get("t0")
            if server is None or version is None or begun is None:
                continue
            at = bisect_right(self._clear_from, begun.timestamp()) - 1
            published = max(self._versions[at], version) if at >= 0 else None
            if published is None or (published, server) in self._seen:
                continue
            self._seen.add((published, server))
            rows.append({"version": published, "replica": server, "replica_version": version, "step": self.step()})
        return rows


def _add(counts: Row, name: str, more: int) -> None:
    counts[name] = counts.get(name, 0) + more


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
        version = kwargs.get("global_steps", args[0] if args else None)
        quietly(log.ended, phase, begun, time.time(), version, result)
        return result

    setattr(manager, name, timed)
