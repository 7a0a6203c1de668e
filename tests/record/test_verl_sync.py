"""Durations of a weight sync, taken from managers that behave as verl's do."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

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
    ended = log._open[-1].row["t1"]
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
    log.ended("total", 100.0, 101.0, 7, None)
    log.ended("total", 200.0, 201.0, 8, None)

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


def test_a_payload_is_asked_for_after_each_update_and_its_norm_told_once_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(answer: Any, timeout: float) -> Any:
        if answer["payload_count"] > 2:
            raise TimeoutError
        return answer

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))

    class Group:
        sent, count = 0, 2

        def execute_rank_zero_async(self, name: str, function: Callable[[], Any]) -> Any:
            self.sent += function.__name__ == "take"
            return {"payload_count": self.count, "payload_bytes": 8 * self.sent, "payload_norm": 1.5}

    manager = Manager()
    manager.actor_wg = Group()  # type: ignore[attr-defined]
    log = watched(manager)
    for version in (0, 0, None, 1):
        manager.update_weights(version)
    rows = log.drain()
    found = [(r["version"], r["payload_count"], r["payload_bytes"], r["payload_norm"]) for r in rows]
    assert found == [(0, 2, 8, 1.5), (0, 2, 16, None), (1, 2, 32, 1.5)]
    manager.actor_wg.count = 3  # type: ignore[attr-defined]
    manager.update_weights(2)
    [row] = log.drain()
    assert "payload_count" not in row
    manager.update_weights(3)
    assert manager.actor_wg.sent == 5  # type: ignore[attr-defined]  # who did not answer is not asked again


def call(version: int, length: int, prefill: int, stop: str, server: str = "a") -> dict[str, Any]:
    return {"version": version, "length": length, "prefill": prefill, "stop": stop, "server": server}


def test_what_a_sync_interrupted_is_told_by_the_calls_it_stopped() -> None:
    log = SyncLog(lambda: 9, auto_await)
    for version in (3, 4, 6):
        log.ended("total", 100.0 * version, 100.0 * version + 1, version, None)
    log.drain()
    log.interrupted([call(3, 5, 10, "abort"), call(4, 0, 15, "abort"), call(6, 7, 15, "stop", "b")])
    log.interrupted([call(3, 2, 20, "aborted"), call(6, 2, 22, "stop")])  # it waited for 6; 4 had stopped it
    log.interrupted([call(4, 2, 30, "abort"), call(4, 1, 32, "stop")])  # resumed by the same version: no sync
    log.interrupted([call(6, 2, 40, "abort"), call(7, 1, 42, "stop")])  # a sync that was not seen
    log.interrupted([call(3, 1, 5, "abort")])  # never resumed
    assert log.drain() == [
        {"version": 4, "replica": "a", "step": 9, "aborted": 3, "prefill_tokens": 15 + 22},
        {"version": 6, "replica": "a", "step": 9, "aborted": 1},
        {"version": 7, "replica": "a", "step": 9, "aborted": 1, "prefill_tokens": 42},
    ]
    log._tells_aborted = True
    log.interrupted([call(3, 2, 20, "abort"), call(4, 2, 22, "stop")])
    assert log.drain() == [{"version": 4, "replica": "a", "step": 9, "prefill_tokens": 22}]
