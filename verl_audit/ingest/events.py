"""Reading the events that readers leave: which tracebacks stopped something."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from verl_audit.ingest.model import Event


def errors(events: Iterable[tuple[str, Event]]) -> list[dict[str, Any]]:
    """Tracebacks that stopped something, in order: exception, last frames, file, byte offset.

    `events` are (path as shown, event).
    """
    told = [(path, event, json.loads(event.detail)) for path, event in events if event.kind == "traceback"]
    return [
        {"exception": t["exception"], "frames": t["frames"], "path": path, "offset": event.offset}
        for path, event, t in told
        if t["exception"] and not t["ignored"]
    ]
