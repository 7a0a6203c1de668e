"""Rows fetched and made in a thread of their own while the job goes on; what comes too late is dropped and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from verl_audit.record.guard import behind


class Ahead:
    """One such thread, and how many of its rows are not written yet."""

    def __init__(self, rows: int, work: Callable[[Ahead], None]) -> None:
        """`work` passes each of so many `rows` to `write`, and ends where that says so."""
        self._left, self._is_late, self._turn = rows, False, threading.Lock()
        self._thread = behind(work, self)

    def write(self, write: Callable[[Any], None], row: Any) -> bool:
        """Write a row; False if nobody waits for it any more."""
        with self._turn:
            if not self._is_late:
                write(row)
                self._left -= 1
            return not self._is_late

    def join(self, seconds: float | None = None) -> int:
        """Wait for the rows, at most so long; how many are missing then. No more are written."""
        self._thread.join(seconds)
        with self._turn:
            self._is_late = True
            return self._left

    def is_running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()
