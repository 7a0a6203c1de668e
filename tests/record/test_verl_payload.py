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

    def __init__(self, values: Any, kind: str | None = None, device: str = "cuda:0") -> None:
        self.values, self.device = np.asarray(values, kind), device
        self.nbytes = self.values.nbytes

    def detach(self) -> Tensor:
        return self

    def numel(self) -> int:
        return int(self.values.size)

    def dim(self) -> int:
        return self.values.ndim

    def size(self, at: int) -> int:
        return int(self.values.shape[at])

    def is_contiguous(self) -> bool:
        return self.values.flags.c_contiguous

    def view(self, shape: int) -> Tensor:
        assert self.is_contiguous()
        return Tensor(self.values.reshape(shape), device=self.device)

    def split(self, size: int) -> list[Tensor]:
        return [Tensor(self.values[i : i + size], device=self.device) for i in range(0, len(self.values), size)]

    def chunk(self, count: int, at: int) -> list[Tensor]:
        return [Tensor(part, device=self.device) for part in np.array_split(self.values, count, at)]

    def square(self) -> Tensor:
        return Tensor(self.values**2)

    def sum(self) -> Tensor:
        return Tensor(self.values.sum())

    def __float__(self) -> float:
        waited.append(self)
        return float(self.values)


taken = list[Tensor]()
"""Of what a norm was taken."""
waited = list[Tensor]()
"""Scalars that were read from their device."""


def vector_norm(tensor: Tensor, dtype: Any) -> Tensor:
    if tensor.values.dtype.kind == "i":
        raise RuntimeError("linalg.vector_norm: Expected a floating point")
    taken.append(tensor)
    return Tensor(np.linalg.norm(tensor.values.astype(dtype)), device=tensor.device)


def stack(tensors: list[Tensor]) -> Tensor:
    assert len({tensor.device for tensor in tensors}) == 1
    return Tensor(np.array([tensor.values for tensor in tensors]))


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch = SimpleNamespace(float64=np.float64, stack=stack, linalg=SimpleNamespace(vector_norm=vector_norm))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(guard, "_told", set())
    take()
    taken.clear()
    waited.clear()
    yield
    take()


class Engine:
    """verl's base class of engines."""


def engines(monkeypatch: pytest.MonkeyPatch) -> type:
    class Base(Engine):
        pass

    class Fsdp(Base):
        def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
            return ((f"w{i}", Tensor([3.0, 4.0], "float32")) for i in range(kwargs.get("n", 2))), None

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
    tally.note(Tensor([1.0], "float32"))
    tally.note(Tensor([1, 2], "int8"))
    assert (tally.count, tally.size, tally.norm()) == (2, 6, None)
    nan = Tally()
    nan.note(Tensor([math.nan]))
    assert nan.norm() is None
    slow = Tally()
    monkeypatch.setattr(verl_payload, "NORM_SECONDS", -1.0)
    monkeypatch.setattr(verl_payload, "PIECE", 2)
    taken.clear()
    slow.note(Tensor(np.ones(9)))
    slow.note(Tensor(np.ones(9)))
    assert (slow.count, slow.norm()) == (2, None)
    assert len(taken) == 1  # of a large tensor no more than a piece, and of the next nothing


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_norm_copies_no_more_than_a_piece_and_waits_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(verl_payload, "PIECE", 100)
    rng, tally = np.random.default_rng(0), Tally()
    wide = rng.normal(size=(30, 50)).astype("float32")
    sent = [
        wide,
        wide.T,
        wide[:, 3:40],
        rng.normal(size=(3, 7, 11)).transpose(2, 0, 1),
        np.float32(2.0),
        np.ones((0, 4)),
    ]
    for values in sent:
        taken.clear()
        tally.note(Tensor(values, device=device))
        assert sum(piece.numel() for piece in taken) == np.size(values)
        assert all(piece.numel() <= 100 for piece in taken)
        assert all(np.shares_memory(piece.values, values) for piece in taken if np.size(values) > 1)
    tally.note(Tensor([1.0]))
    assert waited == []
    total = 1.0 + sum(float(np.square(values, dtype="float64").sum()) for values in sent)
    assert tally.norm() == pytest.approx(math.sqrt(total), rel=1e-12)
    assert len(waited) == len({device, "cuda:0"})


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
