"""What a weight sync of verl sends, counted tensor by tensor where it is sent.

The sender is the first training worker, a process of its own. verl's workers run any function that they can import
(`Worker.execute_func_rank_zero`), so the driver has `install` run there once, and `take` after each sync. What is
counted is what the engine's `get_per_tensor_param` hands to the transfer: whole tensors under their Hugging Face names,
of an adapter alone where only that is sent. `delta_sharded` takes its weights elsewhere and tells its bytes itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any

from verl_audit.record.guard import quietly

NORM_SECONDS = 0.1
"""Spent on a sync's norm at most, by this process's clock; a norm that would take longer is left out. On a GPU that is
the time to queue some thousand kernels, which then run in the stream beside the transfer."""
PIECE = 1 << 24
"""Values whose norm is taken at once. PyTorch copies them to double precision: 128 MB on the device at most, and not
four times the embedding of a large vocabulary. Smaller pieces would take longer to queue: 70e9 values are 4200."""
METHOD = "get_per_tensor_param"
DELTA_MBYTES = "checkpoint_engine/payload_mbytes"
"""Metric that `delta_sharded` returns from a sync, in units of 2^20 bytes."""
WAIT_SECONDS = 2.0
"""Waited at most for a count at the end of a step; the sync is long over by then."""


# ------------------------------------------------------------------ in the first training worker


@dataclass
class Tally:
    """Tensors and bytes sent since the last sync, and norms of their pieces, by device."""

    count: int = 0
    size: int = 0
    norms: dict[Any, list[Any]] | None = field(default_factory=dict)
    norm_s: float = 0.0

    def note(self, tensor: Any) -> None:
        """One tensor is on its way."""
        self.count += 1
        self.size += int(tensor.nbytes)
        begun = time.perf_counter()
        if self.norms is not None:
            self.norms = _with(self.norms, tensor, begun + NORM_SECONDS - self.norm_s)
        self.norm_s += time.perf_counter() - begun

    def norm(self) -> float | None:
        """L2 norm of all that was sent; None if it was not taken or is no number. Waits for each device once."""
        if not self.count or self.norms is None:
            return None
        stack = import_module("torch").stack
        total = math.sqrt(sum(float(stack(norms).square().sum()) for norms in self.norms.values()))
        return total if math.isfinite(total) else None


def _with(norms: dict[Any, list[Any]], tensor: Any, until: float) -> dict[Any, list[Any]] | None:
    """The norms and this tensor's, on its device; None if it has none, as packed weights, or not by `until`.

    Nothing waits for the device here.
    """
    torch = import_module("torch")
    try:
        for piece in _pieces(tensor.detach()):
            # In double precision, so that no update is too small to move it.
            norm = torch.linalg.vector_norm(piece, dtype=torch.float64)
            norms.setdefault(piece.device, []).append(norm)
            if time.perf_counter() > until:
                return None
    except RuntimeError:
        return None
    return norms


def _pieces(tensor: Any) -> Iterator[Any]:
    """Views of at most `PIECE` values that make up the tensor: whatever its strides, nothing is copied."""
    if tensor.numel() <= PIECE:
        yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(PIECE)
    else:
        for half in tensor.chunk(2, max(range(tensor.dim()), key=tensor.size)):
            yield from _pieces(half)


class Counted(Iterator[Any]):
    """The same pairs of name and tensor, each counted as it passes."""

    def __init__(self, weights: Iterator[Any], tally: Callable[[Any], None]) -> None:
        """`tally` is called with each tensor."""
        self.weights, self.tally = weights, tally

    def __next__(self) -> Any:
        """The next pair."""
        pair = next(self.weights)
        quietly(lambda: self.tally(pair[1]))
        return pair

    def close(self) -> None:
        """Close the generator behind it, if it is one."""
        close = getattr(self.weights, "close", None)
        if close is not None:
            close()


_tally = Tally()


def _noted(tensor: Any) -> None:
    _tally.note(tensor)


def _counted(weights: Any) -> Any:
    if isinstance(weights, Counted) or not isinstance(weights, Iterator):  # a subclass's call of its base is counted
        return weights
    return Counted(weights, _noted)


def _looked_at(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_per_tensor_param(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not isinstance(result, tuple) or not result:
            return result
        weights = quietly(_counted, result[0])
        return result if weights is None else (weights, *result[1:])

    get_per_tensor_param.verl_audit = True  # type: ignore[attr-defined]
    return get_per_tensor_param


def install() -> int:
    """Count what all engines of this process send from now on; how many classes of engines are looked at."""
    base = import_module("verl.workers.engine.base").BaseEngine
    found = 0
    for cls in _below(base):
        original = cls.__dict__.get(METHOD)
        if callable(original):
            found += 1
            if not hasattr(original, "verl_audit"):
                setattr(cls, METHOD, _looked_at(original))
    return found


def _below(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


def take() -> dict[str, Any]:
    """What was sent since the last call, as columns of the syncs table."""
    global _tally
    done, _tally = _tally, Tally()
    if not done.count:
        return {}
    return {"payload_count": done.count, "payload_bytes": done.size, "payload_norm": done.norm()}


# ------------------------------------------------------------------ in the driver


class Payloads:
    """Asks the first worker of a worker group what each sync sent, without waiting for the answer."""

    def __init__(self, group: Any) -> None:
        """`group` is verl's RayWorkerGroup of the actor; its first worker begins to count."""
        self.group = group
        self.installed = self._run(install)

    def ask(self) -> Any:
        """A reference to the count of the sync that has just ended."""
        return self._run(take)

    def _run(self, function: Callable[[], Any]) -> Any:
        return self.group.execute_rank_zero_async("execute_func_rank_zero", function)


def answered(reference: Any) -> dict[str, Any]:
    """The count behind a reference; empty if it is not there in time. Raises what the worker raised."""
    found: Mapping[str, Any] = import_module("ray").get(reference, timeout=WAIT_SECONDS)
    return dict(found)


def told(result: Any) -> dict[str, Any]:
    """What a sync's own metrics tell of its payload."""
    size = result.get(DELTA_MBYTES) if isinstance(result, Mapping) else None
    return {} if size is None else {"payload_bytes": round(float(size) * (1 << 20))}
