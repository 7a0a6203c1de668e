"""Looking on without touching: what a look raises is told once, and the call that is looked at goes its way."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

log = logging.getLogger("verl_audit.record")
Look = Callable[..., None]
_told: set[str] = set()
_here = threading.local()


@dataclass
class Spent:
    """Seconds inside the recorder's looks in this process: those that the job waited for, and those behind its back."""

    wall: float = 0.0
    processor: float = 0.0
    """The part of `wall` that this process computed; the rest was waiting."""
    behind: float = 0.0
    """Processor seconds of the recorder's own threads."""
    by: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The part of `wall` by look."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def so_far(self) -> float:
        """`wall`, a look of this thread that is under way included."""
        begun = getattr(_here, "begun", None)
        with self._lock:
            return self.wall + (0.0 if begun is None else time.perf_counter() - begun)

    def add(self, look: str, wall: float, processor: float) -> None:
        """A look that the job waited for is over."""
        with self._lock:
            self.by[look] += wall
            self.wall += wall
            self.processor += processor

    def add_behind(self, processor: float) -> None:
        """A thread of the recorder's own is over."""
        with self._lock:
            self.behind += processor


spent = Spent()


def tell_once(kind: str, message: str) -> None:
    """A warning of this kind, the first time in this process."""
    if kind not in _told:
        _told.add(kind)
        log.warning("verl-audit recorder: %s (said once; training goes on)", message)


def quietly(look: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `look` returns; None if it raised, which is told once. Its time is added to `spent`."""
    if getattr(_here, "inside", False):  # its time is part of the outer look's
        return _caught(look, args, kwargs)
    _here.inside, processor = True, time.thread_time()
    _here.begun = begun = time.perf_counter()
    try:
        return _caught(look, args, kwargs)
    finally:
        with suppress(Exception):
            spent.add(_name(look), time.perf_counter() - begun, time.thread_time() - processor)
        _here.inside, _here.begun = False, None


def _caught(look: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return look(*args, **kwargs)
    except Exception as error:
        with suppress(Exception):  # an error may not even have a text
            name = _name(look)
            tell_once(name, f"{name} failed and records nothing: {type(error).__name__}: {error}")
        return None


def _name(look: Callable[..., Any]) -> str:
    return str(getattr(look, "__qualname__", repr(look)))


def behind(look: Callable[..., Any], *args: Any) -> threading.Thread:
    """The same in a thread of its own, while the job goes on."""

    def work() -> None:
        _here.inside = True
        _caught(look, args, {})
        with suppress(Exception):
            spent.add_behind(time.thread_time())

    thread = threading.Thread(target=work, name="verl-audit-look", daemon=True)
    thread.start()
    return thread


class Missing:
    """Hooks that this version of the framework lacks, told together."""

    def __init__(self, framework: str) -> None:
        """`framework` is its name and version, for the message."""
        self.framework, self.names = framework, list[str]()

    def tell(self) -> None:
        """One warning that lists them, if there are any."""
        if self.names:
            listed = ", ".join(self.names)
            tell_once(f"missing {listed}", f"{self.framework} lacks {listed}: what they tell is not recorded")


def watch(owner: Any, name: str, missing: Missing, *, before: Look | None = None, after: Look | None = None) -> None:
    """Put a method in front of `owner.name` that calls `before(*args)`, the original, and `after(result, *args)`.

    A method that is a coroutine function stays one. A missing method is noted.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        missing.names.append(f"{type(owner).__name__}.{name}")
        return

    def begin(args: Any, kwargs: Any) -> None:
        if before is not None:
            quietly(before, *args, **kwargs)

    def end(result: Any, args: Any, kwargs: Any) -> None:
        if after is not None:
            quietly(after, result, *args, **kwargs)

    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def watched_coroutine(*args: Any, **kwargs: Any) -> Any:
            begin(args, kwargs)
            result = await original(*args, **kwargs)
            end(result, args, kwargs)
            return result

        setattr(owner, name, watched_coroutine)
        return

    @wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        begin(args, kwargs)
        result = original(*args, **kwargs)
        end(result, args, kwargs)
        return result

    setattr(owner, name, watched)
