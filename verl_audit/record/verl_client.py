"""Clients of verl's rollout servers that note each generate call: server, version, tokens, times.

They run in the agent-loop workers and reach the driver in a trajectory's extra_fields. Nothing of verl is replaced:
each method calls verl's own and looks at what it returns.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from verl_audit.record.guard import quietly, tell_once
from verl_audit.record.verl_rows import SEGMENTS

Calls = list[dict[str, Any]]
MANY = 65536
"""Requests whose calls are remembered, for conversations; the oldest is forgotten first."""
_server: ContextVar[str | None] = ContextVar("verl_audit_server", default=None)
_calls: ContextVar[Calls | None] = ContextVar("verl_audit_calls", default=None)


class SegmentMixin(LLMServerClient):
    """Notes the server that was acquired and each call to it."""

    async def _acquire_server(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        acquired = await super()._acquire_server(request_id, *args, **kwargs)
        quietly(lambda: _server.set(str(acquired[0])))
        return acquired

    async def generate(self, request_id: Any, **kwargs: Any) -> Any:
        """verl's generate; the call is noted in the list of the request that is open in this task."""
        begun = time.time()
        output = await super().generate(request_id, **kwargs)
        quietly(_note, output, len(kwargs.get("prompt_ids") or ()), begun)
        return output


def _note(output: Any, prefill: int, begun: float) -> None:
    calls = _calls.get()
    if calls is None:
        return
    version = output.extra_fields.get("global_steps")
    calls.append(
        {
            "version": None if version is None else int(version),
            "start": 0,
            "length": len(output.token_ids),
            "server": _server.get(),
            "t0": begun,
            "t1": time.time(),
            "prefill": prefill,
            "stop": None if output.stop_reason is None else str(output.stop_reason),
        }
    )


class _Remembering:
    """Opens the list of a request around verl's generate, and hands it out with the output."""

    async def generate(self, request_id: Any, **kwargs: Any) -> Any:
        """verl's generate, and the request's calls so far in the output's extra_fields."""
        calls = quietly(self._list_of, request_id)
        token = _calls.set(calls)
        try:
            output = await super().generate(request_id, **kwargs)  # type: ignore[misc]
        finally:
            _calls.reset(token)
        if calls is not None:
            quietly(output.extra_fields.__setitem__, SEGMENTS, calls)
        return output

    def _list_of(self, request_id: Any) -> Calls:
        """One list for all turns of a conversation, since agent loops keep the extra_fields of the first turn only.

        Under full determinism names of requests repeat from step to step, so turns cannot be joined.
        """
        lists: OrderedDict[Any, Calls] = self.__dict__.setdefault("_audit_lists", OrderedDict())
        if str(request_id).startswith("det-"):
            return []
        calls = lists.setdefault(request_id, [])
        while len(lists) > MANY:
            lists.popitem(last=False)
        return calls


class AuditFullyAsyncClient(_Remembering, FullyAsyncLLMServerClient, SegmentMixin):
    """The resuming client of the asynchronous trainers: a segment for each attempt."""


class AuditClient(_Remembering, SegmentMixin):
    """The client of the synchronous trainer."""


_CLASSES: dict[type, type] = {LLMServerClient: AuditClient, FullyAsyncLLMServerClient: AuditFullyAsyncClient}


def audited(client: Any) -> Any:
    """The same client, noting its calls from now on; a client of another class is left as it is."""
    wanted = _CLASSES.get(type(client))
    if wanted is not None:
        client.__class__ = wanted
    elif type(client) not in _CLASSES.values():
        tell_once("client", f"rollout client {type(client).__name__} is not verl's own: no segments are recorded")
    return client
