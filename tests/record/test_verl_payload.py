"""What a sync sends, counted on engines that behave as verl's, in the worker and asked for by the driver."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl_audit.record import guard, verl_payload
from verl_audit.record.verl_payload import Payloads, Tally, answered, install, take, told


class Tensor:
    """As much of a torch tensor as is used."""

    def __init__(self, values: Any, kind: str = "float32") -> None:
        self.values, self.kind = np.asarray(values, kind), kind
        self.nbytes = self.values.nbytes

    def detach(self) -> Tensor:
        return self


class Scalar(float):
    def square(self) -> float:
        return float(self) ** 2


def vector_norm(tensor: Tensor, dtype: Any) -> Scalar:
    if tensor.kind.startswith("int"):
        raise RuntimeError("linalg.vector_norm: Expected a floating point")
    return Scalar(np.linalg.norm(tensor.values.astype(dtype)))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch = SimpleNamespace(float64=np.float64, linalg=SimpleNamespace(vector_norm=vector_norm))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(guard, "_told", set())
    take()
    yield
    take()


class Engine:
    """verl's base class of engines."""


def engines(monkeypatch: pytest.MonkeyPatch) -> type:
    class Base(Engine):
        pass

    class Fsdp(Base):
        def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
            return ((f"w{i}", Tensor([3.0, 4.0])) for i in range(kwargs.get("n", 2))), None

    class Turbo(Fsdp):
        def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
            return super().get_per_tensor_param(**kwargs)

    for name in ("verl", "verl.workers", "verl.workers.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("verl.workers.engine.base")
    module.BaseEngine = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.workers.engine.base", module)
    return Turbo


def test_what_an_engine_yields_is_counted_once_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(monkeypatch)()
    assert install() == install() == 2
    weights, config = engine.get_per_tensor_param(n=4)
    assert config is None
    assert [name for name, _ in weights] == ["w0", "w1", "w2", "w3"]
    assert take() == {"payload_count": 4, "payload_bytes": 32, "payload_norm": pytest.approx(10.0)}
    assert take() == {}
    weights, _ = engine.get_per_tensor_param()
    next(weights)
    weights.close()  # a transfer that is broken off closes the generator behind
    assert list(weights) == []
    assert take()["payload_count"] == 1


def test_a_payload_without_a_norm_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    tally.note(Tensor([1.0]))
    tally.note(Tensor([1, 2], "int8"))
    assert (tally.count, tally.size, tally.norm()) == (2, 6, None)
    nan = Tally()
    nan.note(Tensor([math.nan]))
    assert nan.norm() is None
    slow = Tally()
    monkeypatch.setattr(verl_payload, "NORM_SECONDS", -1.0)
    slow.note(Tensor([1.0]))
    assert (slow.count, slow.norm()) == (1, None)


def test_a_count_that_fails_does_not_stop_the_transfer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def boom(*_: Any) -> None:
        raise TypeError("no bytes")

    engine = engines(monkeypatch)()
    install()
    monkeypatch.setattr(Tally, "note", boom)
    assert len(list(engine.get_per_tensor_param()[0])) == 2
    assert len(caplog.messages) == 1


def test_the_driver_asks_the_first_worker_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()

    class Group:
        def execute_rank_zero_async(self, name: str, function: Callable[[], Any]) -> Any:
            asked.append((name, function.__name__))
            return function

    engines(monkeypatch)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda ref, timeout: ref()))
    payloads = Payloads(Group())
    assert answered(payloads.installed if isinstance(payloads.installed, dict) else payloads.ask()) == {}
    assert asked == [("execute_func_rank_zero", "install"), ("execute_func_rank_zero", "take")]


def test_a_sparse_transfer_tells_its_bytes_itself() -> None:
    assert told({"checkpoint_engine/payload_mbytes": 1.5}) == {"payload_bytes": 3 << 19}
    assert told({"other": 1}) == told(None) == {}
