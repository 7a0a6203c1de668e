"""Looking on: the call that is looked at returns what it returned, whatever the look does."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from verl_audit.record import guard
from verl_audit.record.guard import Missing, quietly, watch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_told", set())


class Trainer:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def step(self, a: int, *, b: int = 0) -> int:
        self.seen.append("step")
        return a + b

    async def abort(self) -> str:
        return "aborted"


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def test_looks_come_before_and_after_and_see_arguments_and_result() -> None:
    trainer, missing = Trainer(), Missing("verl 1")
    watch(
        trainer,
        "step",
        missing,
        before=lambda *args, **kwargs: trainer.seen.append(("before", args, kwargs)),
        after=lambda result, *_, **__: trainer.seen.append(("after", result)),
    )
    assert trainer.step(1, b=2) == 3
    assert trainer.seen == [("before", (1,), {"b": 2}), "step", ("after", 3)]


def test_a_look_that_raises_is_told_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    watch(trainer, "step", Missing("verl 1"), before=boom, after=boom)
    with caplog.at_level(logging.WARNING, "verl_audit.record"):
        assert [trainer.step(1), trainer.step(2)] == [1, 2]
    assert len(caplog.messages) == 1
    assert "boom" in caplog.messages[0]


def test_an_error_of_the_original_passes() -> None:
    trainer = Trainer()
    trainer.step = boom  # type: ignore[assignment]
    watch(trainer, "step", Missing("verl 1"), after=boom)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.step(1)


def test_a_coroutine_function_stays_one() -> None:
    trainer, seen = Trainer(), list[str]()
    watch(trainer, "abort", Missing("verl 1"), after=seen.append)
    assert asyncio.iscoroutinefunction(trainer.abort)
    assert asyncio.run(trainer.abort()) == "aborted"
    assert seen == ["aborted"]


def test_the_time_of_looks_is_counted_once_and_that_of_other_threads_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "spent", spent := guard.Spent())
    seen = list[float]()

    def outer() -> None:
        quietly(time.sleep, 0.02)  # within a look: part of it
        seen.append(spent.so_far())

    quietly(outer)
    assert 0.02 <= seen[0] <= spent.wall == spent.so_far()
    assert spent.processor <= spent.wall
    assert sum(spent.by.values()) == spent.wall
    assert [name.rpartition(".")[2] for name in spent.by] == ["outer"]
    wall = spent.wall
    guard.behind(lambda: quietly(sum, range(10**5))).join()
    assert spent.behind > 0
    assert spent.wall == wall


def test_looks_of_many_threads_at_once_are_all_counted_and_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "spent", spent := guard.Spent())
    raised = list[BaseException]()

    def clock() -> float:
        time.sleep(1e-5)  # another thread's turn, in the middle of a sum
        return time.perf_counter()

    def work() -> None:
        try:
            assert sum(quietly(lambda: 1) for _ in range(50)) == 50
        except BaseException as error:
            raised.append(error)

    monkeypatch.setattr(guard, "time", SimpleNamespace(perf_counter=clock, thread_time=time.thread_time))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert spent.wall == pytest.approx(sum(spent.by.values()))
    assert spent.wall > 200 * 1e-5  # each look takes a sleep of the clock


def test_a_look_in_another_thread_is_not_this_threads_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "spent", spent := guard.Spent())
    begun, done = threading.Event(), threading.Event()

    def look() -> None:
        begun.set()
        done.wait(5.0)

    thread = threading.Thread(target=quietly, args=(look,), daemon=True)
    thread.start()
    begun.wait()
    assert spent.so_far() == 0.0
    assert quietly(spent.so_far) > 0.0
    assert spent.so_far() == spent.wall == sum(spent.by.values())
    time.sleep(0.01)
    done.set()
    thread.join()
    assert spent.wall > 0.01
    assert [name.rpartition(".")[2] for name in spent.by] == ["so_far", "look"]


def test_neither_an_error_without_text_nor_lost_accounts_leave_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def look() -> None:
        raise Mute

    assert quietly(look) is None
    monkeypatch.setattr(guard.Spent, "add", boom)
    assert quietly(int, "3") == 3


def test_missing_hooks_are_told_together_and_once(caplog: pytest.LogCaptureFixture) -> None:
    missing = Missing("verl 7.0.0")
    watch(Trainer(), "prepare", missing)
    watch(Trainer(), "submit", missing)
    with caplog.at_level(logging.WARNING, "verl_audit.record"):
        missing.tell()
        missing.tell()
        Missing("verl 7.0.0").tell()
    [message] = caplog.messages
    assert "verl 7.0.0 lacks Trainer.prepare, Trainer.submit" in message


def test_what_a_quiet_call_returns() -> None:
    assert quietly(int, "3") == 3
    assert quietly(int, "x") is None
