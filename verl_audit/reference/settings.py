"""Everything that can be set in a simulated run, with the verl setting it stands for where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from verl_audit.errors import AuditError
from verl_audit.reference.numerics import Format, Scaling

Trainer = Literal["sync", "colocate_async", "separate_async", "fully_async"]
Correction = Literal["none", "token", "sequence"]
Rejection = Literal["none", "token_k1", "seq_mean_k1"]


@dataclass(frozen=True)
class Settings:
    """One run. Times are seconds of the simulated clock; lengths are tokens."""

    # the task and the policy
    classes: int = 16
    vocabulary: int = 8
    features: int = 192
    experts: int = 0
    """0: a dense policy; else a top-2 router over so many."""
    lengths: tuple[int, ...] = (4, 10, 22, 40)
    positions: int = 48
    limit_share: float = 1.0
    """Response limit as a share of `positions`."""
    task_seed: int = 0
    """Data and initial weights: runs of one environment share them and differ in what they sample."""
    skill: float = 1.0
    """Nats by which the initial policy favours the right token."""
    # optimisation
    updates: int = 200
    group_size: int = 8
    groups: int = 16
    """Prompt groups per optimizer update (ppo_mini_batch_size)."""
    learning_rate: float = 0.03
    rate_factor: float = 1.0
    """Factor on the learning rate, whatever the environment's."""
    decay_from: int = 0
    """Update from which the learning rate is `decay_to` times itself; 0: never."""
    decay_to: float = 0.03
    entropy_coeff: float = 0.0
    clip: float = 0.2
    weight_decay: float = 0.0
    hack_pays: float = 0.0
    """What the trained reward adds for a response of nothing but the last token; grows with its share squared."""
    train_classes: float = 1.0
    """Share of the prompt classes in the training data; validation asks all."""
    prompts: int = 100_000
    """Prompts in the training data; each pass over them is an epoch."""
    # asynchrony
    trainer: Trainer = "sync"
    """colocate_async: trainer and engine take turns on the same cards, and the engine keeps what it had begun."""
    updates_per_sync: int = 1
    """parameter_sync_step; fully_async: trigger_parameter_sync_step."""
    warmup: float = 2.0
    """num_warmup_batches: batches of prompts submitted ahead, all at step 1."""
    threshold: int = 8
    """max_off_policy_threshold on prompt age in steps; 0: null."""
    strategy: Literal["drop", "wait"] = "drop"
    admission: int = -1
    """AReaL's max_head_offpolicyness in place of verl's submission; -1: off."""
    order: Literal["oldest", "completion"] = "oldest"
    """Which finished groups are trained first; `completion` needs a custom sampler in verl v1."""
    filter_groups: bool = False
    failure: float = 0.0
    """Chance that a response as long as the longest answer fails on the way (a timeout, a tool): its group is lost."""
    straggler: float = 0.0
    """Chance that a response is written `straggler_factor` times slower than the others (a tool, an environment)."""
    straggler_factor: float = 10.0
    staleness_share: float = 0.5
    """fully_async: async_training.staleness_threshold, extra prompts per cycle as a share."""
    queue: float = 0.0
    """fully_async: batches of `groups` the message queue holds before it discards the oldest; 0: as verl 0.9.1, all
    that may be submitted."""
    partial_rollout: bool = True
    # log-probs and loss
    bypass: bool = False
    rollout_is: Correction = "none"
    rollout_is_threshold: float = 2.0
    rollout_rs: Rejection = "none"
    rollout_rs_threshold: float = 2.0
    # numerics of the rollout engine; the trainer computes in fp32 at temperature 1
    rollout_format: Format = "bf16"
    router_format: Format = "bf16"
    """Precision of the engine's router."""
    scaling: Scaling = "channel"
    temperature: float = 1.0
    """Temperature the engine applies and the trainer does not know of (a default of the engine's own)."""
    top_p: float = 1.0
    """Nucleus sampling; the engine renormalises its log-probs, the trainer uses the whole softmax."""
    router_replay: bool = False
    # weight sync
    replicas: int = 4
    frozen: int = 0
    """Replicas that no longer receive weights from `fault_from` or `onset` on."""
    delivered: float = 1.0
    """Share of the features whose weights a sync delivers from `fault_from` on; 0: none (an adapter never merged)."""
    fault_from: int = 1
    labelled: bool = True
    """Whether a replica that missed a sync still reports its old version; else it reports the new one."""
    sync_seconds: float = 0.08
    onset: float = 0.0
    """Share of the updates before which the engine is sound: `frozen`, `delivered`, its formats and sampling, and
    `failure` hold from then on, as after a restart with other arguments."""
    # clock
    slots: int = 640
    token_seconds: float = 0.06
    slowness: float = 1.0
    """Factor on the time of a token: a slower engine, longer reasoning."""
    prefill_seconds: float = 0.1
    update_seconds: float = 0.8
    log_prob_seconds: float = 0.2
    # validation
    test_freq: int = 5
    validation_samples: int = 4
    """Responses per prompt class."""

    @property
    def response_limit(self) -> int:
        """Most tokens of a response (data.max_response_length)."""
        return max(1, round(self.limit_share * self.positions))

    @property
    def rate(self) -> float:
        """Learning rate before any decay (actor.optim.lr)."""
        return self.learning_rate * self.rate_factor

    @property
    def is_async(self) -> bool:
        """Whether rollouts overlap training."""
        return self.trainer != "sync"

    @property
    def v1_async(self) -> bool:
        """Whether the replay buffer is that of verl v1's asynchronous trainers."""
        return self.trainer in ("colocate_async", "separate_async")

    @property
    def group_batch(self) -> int:
        """Groups trained between two weight syncs."""
        return self.groups * self.updates_per_sync

    @property
    def faulty(self) -> bool:
        """Whether a replica ever holds other weights than those published."""
        return self.frozen > 0 or self.delivered < 1

    @property
    def queue_groups(self) -> int:
        """Groups the message queue holds; 0: no limit of its own."""
        return round(self.queue * self.groups)

    @property
    def onset_version(self) -> int:
        """First weights that are published after `onset`."""
        return round(self.onset * self.updates / self.updates_per_sync)

    @property
    def faulty_from(self) -> int:
        """First version that a sync fault touches."""
        return max(self.fault_from, self.onset_version)

    @property
    def onset_update(self) -> int | None:
        """Updates done when what slows the run sets in; None: it is there from the start."""
        found = [self.onset_version * self.updates_per_sync] if self.onset_version else []
        found += [self.faulty_from * self.updates_per_sync] if self.faulty and self.faulty_from > 1 else []
        found += [self.decay_from] if self.decay_from else []
        return min(found, default=None)


def with_overrides(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """`settings` with values set by name; text is read as the setting's type. Raises `AuditError` for a bad one."""
    known = {f.name for f in fields(Settings)}
    if unknown := sorted(set(given) - known):
        raise AuditError(f"no such setting: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    hints = get_type_hints(Settings)
    return checked(replace(settings, **{name: _read(name, value, hints[name]) for name, value in given.items()}))


def _read(name: str, value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if kind == tuple[int, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(int(part) for part in parts)
    if choices:
        if value not in choices:
            raise AuditError(f"{name}={value}: one of {', '.join(map(str, choices))}")
        return value
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        return kind(value)
    except (KeyError, ValueError):
        raise AuditError(f"{name}={value}: not of type {kind.__name__}") from None


def checked(s: Settings) -> Settings:
    """`s`, or `AuditError` naming the settings that contradict each other."""
    for bad, why in (
        (s.positions % 2 or any(n % 2 for n in s.lengths), "lengths and positions must be even"),
        (max(s.lengths) >= s.positions, "positions must exceed the longest of lengths"),
        (not 0 < s.limit_share <= 1, "limit_share must lie within 0 and 1"),
        (s.frozen > s.replicas, "frozen exceeds replicas"),
        (s.frozen > 0 and s.delivered < 1, "frozen and delivered are two faults; set one"),
        (s.experts in (1, 2) or s.experts < 0, "experts must be 0 or at least 3"),
        (s.router_replay and not s.experts, "router_replay needs experts"),
        (min(s.updates, s.groups, s.updates_per_sync, s.replicas, s.slots) < 1, "a size is below 1"),
        (s.group_size < 2, "group_size must be at least 2"),
        (not 0 <= s.onset < 1, "onset is a share of the updates, from 0 to below 1"),
        (0 < s.queue < 1, "the queue must hold a batch"),
        (s.straggler_factor < 1, "straggler_factor must be at least 1"),
        (s.trainer == "colocate_async" and s.admission >= 0, "admission needs an engine that runs while training"),
        (s.updates % s.updates_per_sync != 0, "updates must be a multiple of updates_per_sync"),
        (s.bypass and s.rollout_is != "none", "verl's trainer ignores rollout_is in bypass mode"),
        (s.test_freq < 1, "test_freq must be at least 1"),
    ):
        if bad:
            raise AuditError(why)
    return s
