"""Durations of a weight sync, taken from managers that behave as verl's do."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from verl_audit.record.guard import Missing
from verl_audit.record.verl_rows import utc
from verl_audit.record.verl_sync import SyncLog


def auto_await(function: Callable[..., Any]) -> Callable[..., Any]:
    """As verl's: a coroutine for a caller that is one, else its result."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        if frame.f_back.f_code.co_flags & inspect.CO_COROUTINE:
            return made
        return asyncio.run(made)

    return wrapper


class Replica:
    async def abort_all_requests(self) -> dict[str, int]:
        return {"aborted_count": 3}


class Manager:
    def __init__(self, naive: bool = False) -> None:
        self.replicas = [Replica(), Replica()]
        self.naive = naive
        self.calls: list[str] = []

    @auto_await
    async def abort_replicas(self) -> None:
        await asyncio.sleep(0.02)
        await asyncio.gather(*[r.abort_all_requests() for r in self.replicas])
        self.calls.append("abort")

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        self.calls.append("kv")

    @auto_await
    async def resume_generation_replicas(self) -> None:
        await asyncio.sleep(0.02)
        self.calls.append("resume")

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, int]:
        if not self.naive:
            await self.abort_replicas()
        await asyncio.sleep(0.02)
        self.calls.append("update")
        if not self.naive:
            await self.resume_kv_cache_replicas()
            await self.resume_generation_replicas()
        return {"sent": 7}


def watched(manager: Manager) -> SyncLog:
    log, missing = SyncLog(lambda: 5, auto_await), Missing("verl 1")
    log.watch_manager(manager, missing)
    assert missing.names == []
    return log


def test_a_standalone_sync_is_one_row_with_its_phases() -> None:
    manager = Manager()
    log = watched(manager)
    assert manager.update_weights(4) == {"sent": 7}
    assert manager.calls == ["abort", "update", "kv", "resume"]
    [row] = log.drain()
    assert (row["version"], row["step"], row["aborted"]) == (4, 5, 6)
    assert row["abort_s"] > 0
    assert row["transfer_s"] > 0
    assert row["resume_s"] > 0
    assert (row["t1"] - row["t0"]).total_seconds() >= row["abort_s"] + row["transfer_s"] + row["resume_s"] - 1e-3
    assert log.drain() == []


def test_a_colocated_sync_takes_the_abort_before_it_and_the_resume_after() -> None:
    manager = Manager(naive=True)
    log = watched(manager)
    manager.abort_replicas()
    manager.update_weights(global_steps=4)
    ended = log._open[-1]["t1"]
    manager.resume_generation_replicas()
    [row] = log.drain()
    assert row["abort_s"] > 0
    assert row["resume_s"] > 0
    assert row["t1"] > ended
    assert row["aborted"] == 6


def test_reinstalling_the_same_weights_is_no_sync() -> None:
    log = watched(manager := Manager())
    manager.update_weights()
    assert log.drain() == []


def test_a_version_of_verl_without_a_phase_is_noted() -> None:
    class Old:
        replicas = ()

        def update_weights(self, global_steps: int) -> str:
            return "done"

    manager, missing = Old(), Missing("verl 0.7")
    log = SyncLog(lambda: 1, auto_await)
    log.watch_manager(manager, missing)
    assert manager.update_weights(2) == "done"
    assert len(missing.names) == 3
    assert [row["version"] for row in log.drain()] == [2]


def test_a_replica_left_behind_is_told_once_for_each_sync() -> None:
    log = SyncLog(lambda: 9, auto_await)
    log._published = [(100.0, 101.0, 7), (200.0, 201.0, 8)]

    def segment(server: str, version: int | None, begun: float | None) -> dict[str, Any]:
        return {"server": server, "version": version, "t0": utc(begun)}

    rows = log.replicas(
        [
            segment("a", 7, 110.0),
            segment("a", 7, 120.0),  # told already
            segment("a", 7, 201.5),  # within another length of the sync: clocks may differ
            segment("a", 8, 210.0),
            segment("b", 7, 220.0),  # left behind
            segment("c", None, 220.0),
            segment("d", 8, None),
            segment("e", 6, 50.0),
            segment("f", 8, 110.0),  # held up until the next version
            segment("f", 8, 210.0),
        ]
    )
    told = [(r["replica"], r["version"], r["replica_version"]) for r in rows]
    assert told == [("a", 7, 7), ("a", 8, 8), ("b", 8, 7), ("f", 8, 8)]
