"""Rows of the trace from what verl's TransferQueue says of a trajectory: tags, fields and the recorder's own segments.

Facts of verl 0.9.0 and 0.9.1: trajectory keys are `{uid}_{session}_{index}`; the weights after the update of step g
have the label g, so step g trains with policy g - 1; a prompt submitted in step s meets version s - 1 or newer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_audit.record.sums import log_prob_sums

SEGMENTS = "audit_segments"
"""Name of the recorder's own entry in a trajectory's extra_fields."""
ABORTED = ("abort", "aborted")
Tag = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """What the driver knows of a prompt group: steps, seconds since the epoch, and a hash of the prompt."""

    submit_step: int | None = None
    t_submit: float | None = None
    t_enqueue: float | None = None
    prompt_key: str | None = None


@dataclass(frozen=True)
class Fate:
    """What was decided of a group, why, at which trainer step and when."""

    reasons: tuple[str, ...]
    step: int
    t: float | None


@dataclass(frozen=True)
class Trained:
    """What training adds to a row: the token lists of one trajectory, as long as its response."""

    minibatch: int | None = None
    behave: NDArray[np.float32] | None = None
    prox: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None
    kept: NDArray[np.bool_] | None = None
    """The mask after rejection sampling."""
    advantages: NDArray[np.float32] | None = None


def utc(seconds: float | None) -> datetime | None:
    """Seconds since the epoch as the schema's times."""
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)


def parts_of(key: str) -> tuple[str, int | None, int | None]:
    """Group, session and turn of a trajectory key `{uid}_{session}_{index}`; of any other key the key itself."""
    uid, *rest = key.rsplit("_", 2)
    if len(rest) < 2 or not all(part.isdigit() for part in rest):
        return key, None, None
    return uid, int(rest[0]), int(rest[1])


def group_row(uid: str, group: Group, fate: Fate, session: int | None = None) -> dict[str, Any]:
    """A row for a group, or a session of one, of which nothing was generated that is known."""
    return {
        "group": uid,
        "session": session,
        "fate": fate.reasons[0],
        "reasons": list(fate.reasons),
        "submit_step": group.submit_step,
        "submit_version": None if group.submit_step is None else group.submit_step - 1,
        "decided_step": fate.step,
        "t_submit": utc(group.t_submit),
        "t_enqueue": utc(group.t_enqueue),
        "t_decided": utc(fate.t),
        "response_length": 0,
        "prompt_key": group.prompt_key,
    }


def row(key: str, tag: Tag, fields: Mapping[str, Any], group: Group, fate: Fate, limit: int | None) -> dict[str, Any]:
    """The row of one trajectory. `limit` is the configured response length, in tokens."""
    uid, session, turn = parts_of(key)
    length = int(tag.get("response_len") or 0)
    made = group_row(uid, group, fate, session)
    extra = fields.get("extra_fields")
    extra = extra if isinstance(extra, Mapping) else {}
    found = segments(extra.get(SEGMENTS), length, one_turn=not turn)
    made.update(
        turn=turn,
        prompt_length=tag.get("prompt_len"),
        response_length=length,
        first_version=tag.get("min_global_steps"),
        last_version=tag.get("max_global_steps"),
        reward=_total(fields.get("rm_scores")),
        reward_parts=_numbers(extra.get("reward_extra_info")),
        turns=_turns(fields.get("num_turns")),
        truncated=None if limit is None else length >= limit,
    )
    if found:
        made.update(_from_segments(found))
    return made


def _from_segments(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sampled = [s for s in found if s["length"] and s["version"] is not None]
    told: dict[str, Any] = {
        "segments": [{**s, "t0": utc(s["t0"]), "t1": utc(s["t1"])} for s in found],
        "t_done": utc(found[-1]["t1"]),
    }
    if sampled:  # an attempt stopped before its first token moves verl's own label and sampled nothing
        told.update(first_version=sampled[0]["version"], last_version=sampled[-1]["version"])
    if found[-1]["stop"] == "length":
        told["truncated"] = True
    return told


def segments(calls: object, length: int, *, one_turn: bool = True) -> list[dict[str, Any]]:
    """Generate calls as segments of the response, cut to its `length`; empty if they cannot be told apart from others'.

    A call's place is how much longer its prompt was than the first's: what came before it, tool output included.
    `one_turn` is false for later outputs of a session that yields several, whose prompts share no beginning.
    """
    if not isinstance(calls, list) or not calls or not one_turn:
        return []
    first = calls[0]["prefill"]
    found = []
    for call in calls:
        start = call["prefill"] - first
        if start < 0 or start > length:
            break
        found.append({**call, "start": start, "length": min(call["length"], length - start)})
    return found


def trained_row(made: dict[str, Any], step: int, trained: Trained, version: int | None = None) -> dict[str, Any]:
    """The row of a trajectory that step `step` trained on, with its token lists.

    `version` is that of the policy when the step began; without it v1's, which is step - 1.
    """
    version = step - 1 if version is None else version
    made.update(train_version=version, train_minibatch=trained.minibatch)
    mask = trained.mask
    if mask is not None:
        made.update(loss_mask=mask, loss_tokens=int(mask.sum()))
        if trained.kept is not None:
            made["rejected_tokens"] = int((mask & ~trained.kept).sum())
    counted = mask if mask is not None else trained.kept
    if trained.advantages is not None and counted is not None and counted.any():
        made["advantage"] = float(trained.advantages[counted].mean())
    made.update(behave_logp=trained.behave, prox_logp=trained.prox)
    return {**made, **probe(made, trained.behave, trained.prox, mask, version)}


def probe(
    made: Mapping[str, Any],
    behave: NDArray[np.float32] | None,
    prox: NDArray[np.float32] | None,
    mask: NDArray[np.bool_] | None,
    version: int,
) -> dict[str, Any]:
    """The mismatch probe: the trainer's log-probs under the weights that sampled, where that is what prox_logp is.

    verl recomputes prox_logp with version `version`, so at tokens that version sampled it is `trainer_logp`. If only
    some tokens are, their sums stand for them: `n` of that entry is less than `loss_tokens`.
    """
    if behave is None or prox is None:
        return {}
    fresh = _sampled_by(version, made, len(prox))
    if fresh is None or not fresh.any():
        return {}
    if fresh.all():
        return {"trainer_logp": prox}
    where = fresh if mask is None else fresh & mask
    entry = log_prob_sums("trainer_logp", "behave_logp", {"trainer_logp": prox, "behave_logp": behave}, where)
    return {"sums": [entry]} if entry else {}


def _sampled_by(version: int, made: Mapping[str, Any], length: int) -> NDArray[np.bool_] | None:
    """Which tokens of a response this version sampled; None if that is not known."""
    found = made.get("segments")
    if found:
        fresh = np.zeros(length, bool)
        for segment in found:
            if segment["version"] == version:
                fresh[segment["start"] : segment["start"] + segment["length"]] = True
        return fresh
    if made.get("first_version") is None or made["first_version"] != made.get("last_version"):
        return None
    return np.full(length, made["first_version"] == version)


def missing_sessions(uid: str, have: set[int], expected: int, group: Group, step: int) -> list[dict[str, Any]]:
    """Rows of the sessions of a group that ended in an error and left nothing."""
    fate = Fate(("failed",), step, group.t_enqueue)
    return [group_row(uid, group, fate, session) for session in range(expected) if session not in have]


def _total(scores: Any) -> float | None:
    return None if scores is None else float(np.sum(scores))


def _turns(messages: Any) -> int | None:
    """verl's num_turns counts messages from both sides: 2 is one prompt and one answer."""
    return None if messages is None else max(1, int(np.asarray(messages).reshape(-1)[0]) // 2)


def _numbers(parts: object) -> dict[str, float] | None:
    """Named parts of a reward that are numbers; texts are left out."""
    if not isinstance(parts, Mapping):
        return None
    kinds = (int, float, bool, np.number, np.bool_)
    numbers = {str(name): float(value) for name, value in parts.items() if isinstance(value, kinds)}
    return numbers or None
