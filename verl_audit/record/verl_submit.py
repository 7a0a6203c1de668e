"""When each prompt was submitted, and which prompt it is: known to the driver at submission only."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

MANY = 1 << 20
"""Prompts remembered; the oldest is forgotten first. A buffer of a million waiting prompts is none."""


class Submissions:
    """Time and prompt by uid."""

    def __init__(self) -> None:
        """Empty."""
        self._known: OrderedDict[str, tuple[float, str | None]] = OrderedDict()

    def note(self, batch: Any, *_: Any, **__: Any) -> None:
        """A batch of prompts is handed to the rollout workers."""
        now, uids = time.time(), _listed(batch["uid"])
        prompts = _listed(batch["raw_prompt"]) if "raw_prompt" in batch else [None] * len(uids)
        for uid, prompt in zip(uids, prompts, strict=True):
            self._known[str(uid)] = now, prompt_key(prompt)
        while len(self._known) > MANY:
            self._known.popitem(last=False)

    def of(self, uid: str, *, forget: bool) -> tuple[float | None, str | None]:
        """Seconds since the epoch and the key of the prompt; to be forgotten when a uid is decided."""
        nothing = (None, None)
        return self._known.pop(uid, nothing) if forget else self._known.get(uid, nothing)


def prompt_key(prompt: Any) -> str | None:
    """A hash that is the same whenever the same prompt comes again; no text can be read from it."""
    if prompt is None:
        return None
    text = json.dumps(prompt, sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)
