"""The driver's side of recording verl: it is told of every decision of the sampler and the trainer, and writes rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from verl.utils.ray_utils import auto_await

from verl_audit.record.ahead import Ahead
from verl_audit.record.guard import Missing, quietly, spent, tell_once, watch
from verl_audit.record.verl_client import audited
from verl_audit.record.verl_rows import (
    Fate,
    Group,
    Tag,
    Trained,
    group_row,
    missing_sessions,
    parts_of,
    row,
    trained_row,
    utc,
)
from verl_audit.record.verl_submit import Submissions
from verl_audit.record.verl_sync import SyncLog
from verl_audit.record.writer import TraceWriter

TRAIN = "train"
CHUNK_TOKENS = 1 << 20
"""Response tokens fetched at once: with 20 to 28 bytes a token, and twice in memory for a moment, some 50 MB."""
OPEN_SECONDS = 30.0
"""Least time between two records of the groups that are not decided yet."""
EVICTED_FIELDS = ("rm_scores", "extra_fields", "num_turns")
ROWS_SECONDS = 2.0
"""Waited at most for a batch's rows at the end of a step; the actor was updated since they were asked for."""
TRAINED_FIELDS = (
    *EVICTED_FIELDS,
    "rollout_log_probs",
    "old_log_probs",
    "response_mask",
    "advantages",
)
log = logging.getLogger("verl_audit.record")


@dataclass
class _Taken:
    """Groups that the trainer took and whose rows are not written yet: when, and what is known of each."""

    at: dict[str, float] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)


class VerlRecorder:
    """Watches one v1 trainer and its sampler. Every method may raise: who calls them guards them."""

    def __init__(self, buffer: Any, trainer: Any, options: Mapping[str, Any], missing: Missing) -> None:
        """`options` are the sampler's keywords; what the trainer lacks is noted in `missing` and told once."""
        self.buffer, self.trainer, self.missing = buffer, trainer, missing
        config = trainer.config
        directory = options.get("audit_dir") or os.environ.get("VERL_AUDIT_DIR")
        directory = Path(directory or Path(str(config.trainer.get("default_local_dir") or ".")) / "audit")
        self.group_size = int(config.actor_rollout_ref.rollout.n)
        self.limit = _number(config.data.get("max_response_length"))
        self.updates = _updates_per_version(trainer)
        self.writer = TraceWriter(
            directory,
            run=_text(config.trainer.get("experiment_name")),
            updates_per_version=self.updates,
            log_prob_sample=float(options.get("log_prob_sample", 0.05)),
            limit_bytes=int(options.get("limit_mb", 128)) << 20,
        )
        self.submissions = Submissions()
        self.syncs = SyncLog(lambda: int(self.trainer.global_steps), auto_await)
        self._first_seen: dict[str, float] = {}
        self._taken = _Taken()
        self._written: set[str] = set()
        self._chosen: set[str] = set()
        self._ahead: Ahead | None = None
        self._late: Ahead | None = None
        self._opened = time.monotonic()
        self._steps = 0
        self._evicting: set[str] = set()
        self._wait_began: float | None = None
        self._is_first_poll = False
        self._watch()
        log.info("verl-audit records to %s", directory.absolute())

    def _watch(self) -> None:
        trainer, missing = self.trainer, self.missing
        watch(trainer, "_submit_batch_to_rollout", missing, before=self.submissions.note)
        watch(trainer, "_update_actor", missing, before=self.update_begins)
        watch(trainer, "_compute_metrics", missing, before=self.step_ended)
        watch(trainer, "on_init_end", missing, before=self._managers_made)
        watch(trainer, "get_llm_client", missing, after=lambda client: audited(client) and None)

    def _managers_made(self) -> None:
        found = [getattr(self.trainer, f"{name}checkpoint_manager", None) for name in ("", "standalone_")]
        for manager in filter(None, found):
            quietly(self.syncs.watch_manager, manager, self.missing)
        self.missing.tell()

    # ------------------------------------------------------------------ the sampler tells

    def sample_began(self, partition: str) -> None:
        """The trainer begins to wait for a batch."""
        if partition == TRAIN:
            self._wait_began, self._is_first_poll = time.time(), True

    def polled(self) -> None:
        """The sampler read the state of all groups; from now on terminal ones are known to be complete."""
        now = time.time()
        for uid in self.buffer.finished_keys[TRAIN] | self.buffer.failure_keys[TRAIN]:
            self._first_seen.setdefault(uid, now)
        if self._is_first_poll:
            self._is_first_poll = False
            self.writer.buffer([self._depth(now)])

    def _depth(self, now: float, wait_s: float | None = None) -> dict[str, Any]:
        names = {"pending": "pending", "running": "running", "finished": "finished", "failure": "failed"}
        counts = {column: len(getattr(self.buffer, f"{name}_keys")[TRAIN]) for name, column in names.items()}
        return {"t": utc(now), "step": int(self.trainer.global_steps), "wait_s": wait_s, **counts}

    def evicted(self, step: int, partition: str, reasons: Sequence[Any]) -> None:
        """Groups are about to be thrown away: stale, filtered, failed; a group may be several of these."""
        if partition != TRAIN:
            return
        named = dict(zip(("stale", "filtered", "failed"), reasons, strict=False))
        self._evicting = set().union(*named.values())
        now = time.time()
        why = {uid: tuple(n for n, uids in named.items() if uid in uids) for uid in sorted(self._evicting)}
        self._write_untrained({uid: Fate(reasons, int(step), now) for uid, reasons in why.items()})

    def cleared(self, partition: str, uids: Iterable[str]) -> None:
        """Groups are removed; those that were not evicted are what the synchronous filter made too many."""
        if partition != TRAIN:
            return
        surplus, self._evicting = sorted(set(uids) - self._evicting), set()
        if surplus:
            fate = Fate(("surplus",), int(self.trainer.global_steps), time.time())
            self._write_untrained(dict.fromkeys(surplus, fate))

    def selected(self, partition: str, uids: Iterable[str]) -> None:
        """A batch was chosen; its rows are written when it has been trained on."""
        if partition != TRAIN:
            return
        now = time.time()
        wait = None if self._wait_began is None else now - self._wait_began
        self.writer.buffer([self._depth(now, wait)])
        for uid in uids:
            self._chosen.add(uid)
            self._taken.at[uid], self._taken.groups[uid] = now, self._group(uid, forget=True)
            self._first_seen.pop(uid, None)

    # ------------------------------------------------------------------ the trainer tells

    def update_begins(self, batch: Any, *_: Any, **__: Any) -> None:
        """A batch has all its fields now, and stays in the queue until the step is over.

        The trainer waits for its workers from here on: the rows are fetched and made meanwhile.
        """
        self._joined()
        tags = _real(batch)
        taken, self._taken = self._taken, _Taken()
        self._written.update(tags)
        step = int(self.trainer.global_steps)
        if self._late is not None and self._late.is_running():  # one that hangs is enough, and each step would wait
            self._drop(len(tags))
            return
        minibatch = self._minibatch()
        self._ahead = Ahead(len(tags), lambda ahead: self._write_trained(step, tags, taken, minibatch, ahead))

    def _joined(self) -> None:
        if self._ahead is not None:
            self._late, self._ahead = self._ahead, None
            self._drop(self._late.join(ROWS_SECONDS))

    def _drop(self, rows: int) -> None:
        if rows:
            self.writer.drop(rows)
            tell_once(
                "late", f"rows of a batch were not to be had within {ROWS_SECONDS:g} s of its step: dropped and counted"
            )

    def _minibatch(self) -> int | None:
        """Updates since the last sync before this one; None where verl cuts the batch further and tells not how."""
        if self.updates is None or not (self.trainer.trainer_mode == "separate_async" or self.updates == 1):
            return None
        return int(self.trainer.local_trigger_step) * _epochs(self.trainer)

    def step_ended(self, batch: Any, *_: Any, **__: Any) -> None:
        """A step is over and its batch still in the queue: its rows, its syncs, and then the files."""
        step = int(self.trainer.global_steps)
        is_last = step >= int(self.trainer.total_training_steps)
        quietly(self._joined)
        rest = {key: tag for key, tag in _real(batch).items() if key not in self._written}
        if rest or self._taken.at:  # no update was made, as in a critic's warm-up
            quietly(self._write_trained, step, rest, self._taken, None)
        self._taken, self._written = _Taken(), set()
        quietly(self._write_open, step, is_last)
        self.writer.syncs(self.syncs.drain())
        self._chosen = set()
        self._steps += 1
        self.writer.seconds = spent.so_far()
        self.writer.step_done(step)
        if is_last:
            self.writer.close()
            self._tell_cost()

    def _tell_cost(self) -> None:
        by = sorted(spent.by.items(), key=lambda one: -one[1])[:5]
        dearest = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in by)
        log.info(
            "verl-audit: the trainer waited %.3f s for its recorder in %d steps, %.3f s of it computing (%s); "
            "%.3f processor seconds were spent behind it",
            *(spent.so_far(), self._steps, spent.processor, dearest, spent.behind),
        )

    def _write_trained(
        self, step: int, tags: Mapping[str, Tag], taken: _Taken, minibatch: int | None, ahead: Ahead | None = None
    ) -> None:
        is_bypass = _correction(self.trainer.config, "bypass_mode")
        # Only rejection makes the two masks differ.
        rejects = _correction(self.trainer.config, "rollout_rs")
        fields_wanted = (*TRAINED_FIELDS, "loss_mask") if rejects else TRAINED_FIELDS
        have: dict[str, set[int]] = {uid: set() for uid in taken.at}
        for key, tag, fields in self._fetched(tags, fields_wanted):
            uid, session, _ = parts_of(key)
            have.setdefault(uid, set()).add(session or 0)
            fate = Fate(("trained",), step, taken.at.get(uid))
            made = row(key, tag, fields, taken.groups.get(uid, Group()), fate, self.limit)
            lists = _token_lists(fields, made["response_length"], minibatch, is_bypass)
            made = trained_row(made, step, lists)
            if ahead is None:
                self._write(made)
            elif not ahead.write(self._write, made):
                return
        for uid, sessions in have.items():
            group = taken.groups.get(uid, Group())
            self.writer.trajectories(missing_sessions(uid, sessions, self.group_size, group, step))

    def _write_open(self, step: int, is_last: bool) -> None:
        """Groups that are submitted and not decided: at the end of the run, and now and then, lest it be killed.

        In between the tags say enough, which the last poll has read: nothing is fetched.
        """
        now = time.monotonic()
        if not is_last and now - self._opened < OPEN_SECONDS:
            return
        self._opened = now
        if is_last:
            self.buffer._sync_metadata_from_transfer_queue()
        fate = Fate(("in_flight",), step, None)
        groups = {uid: self._group(uid) for uid in sorted(set(self.buffer.prompt_global_steps[TRAIN]) - self._chosen)}
        tags = {key: tag for key, tag in self.buffer.partitions[TRAIN].items() if parts_of(key)[0] in groups}
        if not is_last:
            told: list[tuple[str, Tag, Mapping[str, Any]]] = [(key, dict(tag), {}) for key, tag in tags.items()]
            self.writer.standing(partial(_open_rows, told, groups, fate, self.limit), step)
            return
        rows = list(_open_rows(self._fetched(tags, EVICTED_FIELDS), groups, fate, self.limit))
        for made in rows:
            self.syncs.interrupted(made.get("segments") or ())
        self.writer.standing(lambda: rows, step)

    # ------------------------------------------------------------------ rows

    def _group(self, uid: str, *, forget: bool = False) -> Group:
        submitted = self.buffer.prompt_global_steps[TRAIN].get(uid)
        t_submit, prompt_key = self.submissions.of(uid, forget=forget)
        return Group(submitted, t_submit, self._first_seen.get(uid), prompt_key)

    def _write_untrained(self, fates: Mapping[str, Fate]) -> None:
        """Rows of groups that are not trained on: one a trajectory, or one for all where none is known."""
        groups = {uid: self._group(uid, forget=True) for uid in fates}
        have: dict[str, set[int]] = {uid: set() for uid in fates}
        partition = self.buffer.partitions[TRAIN]
        tags = {key: tag for key, tag in partition.items() if parts_of(key)[0] in have}
        for key, tag, fields in self._fetched(tags, EVICTED_FIELDS):
            uid, session, _ = parts_of(key)
            have[uid].add(session or 0)
            self._write(row(key, tag, fields, groups[uid], fates[uid], self.limit))
        for uid, fate in fates.items():
            self._first_seen.pop(uid, None)
            if not have[uid]:
                self.writer.trajectories([group_row(uid, groups[uid], fate)])
            elif "failed" in fate.reasons:
                self.writer.trajectories(missing_sessions(uid, have[uid], self.group_size, groups[uid], fate.step))

    def _write(self, made: dict[str, Any]) -> None:
        segments = made.get("segments")
        if segments:
            self.syncs.interrupted(segments)
            self.writer.syncs(self.syncs.replicas(segments))
        self.writer.trajectories([made])

    def _fetched(self, tags: Mapping[str, Tag], fields: Sequence[str]) -> Iterable[tuple[str, Tag, Mapping[str, Any]]]:
        """Key, tag and the fields that are there, trajectory by trajectory; tags alone where the queue fails."""
        for chunk in _chunks(tags):
            data = quietly(tq.kv_batch_get, keys=chunk, partition_id=TRAIN, select_fields=list(fields))
            columns = {} if data is None else {name: _column(data, name, len(chunk)) for name in fields if name in data}
            for at, key in enumerate(chunk):
                yield key, tags[key], {name: values[at] for name, values in columns.items() if values is not None}


def _real(batch: Any) -> dict[str, Tag]:
    """Trajectories of a batch, without the rows that verl pads it with."""
    return {k: t for k, t in zip(batch.keys, batch.tags, strict=True) if not t.get("is_padding", False)}


def _open_rows(
    found: Iterable[tuple[str, Tag, Mapping[str, Any]]], groups: Mapping[str, Group], fate: Fate, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Rows of undecided groups: one a finished trajectory, or one for a group of which none is."""
    seen = set()
    for key, tag, fields in found:
        uid = parts_of(key)[0]
        seen.add(uid)
        yield row(key, tag, fields, groups[uid], fate, limit)
    for uid, group in groups.items():
        if uid not in seen:
            yield group_row(uid, group, fate)


def _chunks(tags: Mapping[str, Tag]) -> Iterator[list[str]]:
    """Keys in pieces of about `CHUNK_TOKENS` response tokens."""
    chunk: list[str] = []
    size = 0
    for key, tag in tags.items():
        chunk.append(key)
        size += int(tag.get("response_len") or 0)
        if size >= CHUNK_TOKENS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _column(data: Any, name: str, count: int) -> Sequence[Any] | None:
    """A field of the queue as one entry a trajectory: arrays for tensors (jagged or not), else plain objects."""
    return quietly(_unbound, data[name], count)  # type: ignore[no-any-return]


def _unbound(values: Any, count: int) -> Sequence[Any]:
    if hasattr(values, "unbind") and hasattr(values, "dtype"):
        return [_array(one) for one in values.unbind()]
    listed: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(listed) != count:
        raise ValueError(f"{len(listed)} values for {count} trajectories")
    return listed


def _array(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _token_lists(fields: Mapping[str, Any], length: int, minibatch: int | None, is_bypass: bool) -> Trained:
    def tokens(name: str, kind: type) -> Any:
        values = fields.get(name)
        return None if values is None or np.ndim(values) != 1 or len(values) < length else values[:length].astype(kind)

    kept = tokens("response_mask", bool)
    mask = tokens("loss_mask", bool)
    return Trained(
        minibatch=minibatch,
        behave=tokens("rollout_log_probs", np.float32),
        # In bypass mode verl copies the rollout's log-probs there: no trainer's log-prob exists.
        prox=None if is_bypass else tokens("old_log_probs", np.float32),
        mask=kept if mask is None else mask,
        kept=kept,
        advantages=tokens("advantages", np.float32),
    )


def _correction(config: Any, name: str) -> bool:
    correction = config.algorithm.get("rollout_correction", None)
    return bool(correction and correction.get(name, None))


def _epochs(trainer: Any) -> int:
    return int(trainer.config.actor_rollout_ref.actor.get("ppo_epochs", 1) or 1)


def _updates_per_version(trainer: Any) -> int | None:
    """Optimizer updates between two syncs: those of a batch, times the epochs over it."""
    config = trainer.config
    mini = _number(config.actor_rollout_ref.actor.get("ppo_mini_batch_size"))
    return None if not mini else max(1, -(-int(config.data.train_batch_size) // mini)) * _epochs(trainer)


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
