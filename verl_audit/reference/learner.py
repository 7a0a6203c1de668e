"""The trainer's side: log-probs of sampled tokens, one update, and what is published to the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.batch import Trajectories
from verl_audit.reference.clock import Loaded, loaded
from verl_audit.reference.loss import Pushed, Weighted, correction, push
from verl_audit.reference.numerics import Floats
from verl_audit.reference.optimizer import Adam
from verl_audit.reference.policy import Forward, Numerics, Policy, Weights
from verl_audit.reference.settings import Settings

TRAINER = Numerics()
SOUND = Numerics("bf16", "bf16")
"""An engine without a fault."""
Passes = dict[int, Forward]
"""Forward passes by the number of the loaded weights whose expert choices they replay; -1: choices of its own."""


@dataclass(frozen=True)
class Updated:
    """One mini-batch as the update saw it; log-probs are (trajectories, positions)."""

    trajectories: Trajectories
    minibatch: int
    advantage: Floats
    old: Floats
    """What the loss took as pi_old."""
    prox: Floats | None
    """pi_old recomputed by the trainer; None in bypass mode."""
    theta: Floats
    entropy: Floats
    """Of each token's context under the weights that computed `prox`."""
    fix: Weighted
    pushed: Pushed
    grad_norm: float
    rate: float


class Learner:
    """Weights, optimizer, and a table of the trainer's log-probs for every weights that were ever published."""

    def __init__(self, settings: Settings, policy: Policy, weights: Weights) -> None:
        """Before the first update; version 0 is published by `publish(0)`."""
        self.settings, self.policy, self.weights = settings, policy, weights
        self.engine_weights = weights
        """What the rollout engine last received whole."""
        self.optimizer = Adam()
        self.updates = 0
        self.sources: list[Loaded] = []
        self.trainer_tables: list[Floats] = []
        """Trainer's log-probs for the version each loaded weights are labelled with."""
        self.labels: list[int] = []
        self.agreements: list[NDArray[np.bool_]] = []
        """Whether engine and trainer choose the same experts in each context; empty arrays without experts."""

    # -- publishing

    def publish(self, version: int, before: list[Loaded]) -> list[Loaded]:
        """What each replica holds after a sync of this version, given what it held; here sync faults happen."""
        s = self.settings
        if version == 0 or version < s.faulty_from or not s.faulty:
            return [self._load(version, self.weights)] * s.replicas
        if s.delivered < 1:
            return [self._load(version, self._partly_delivered())] * s.replicas
        new = self._load(version, self.weights)
        stuck = before[0] if s.labelled else self._relabel(before[0], version)
        return [stuck] * s.frozen + [new] * (s.replicas - s.frozen)

    def _load(self, version: int, weights: Weights) -> Loaded:
        """Weights in the numerics of the rollout engine."""
        s = self.settings
        sound = version < s.onset_version
        engine = SOUND if sound else Numerics(s.rollout_format, s.router_format, s.scaling, s.temperature, s.top_p)
        forward = self.policy.forward(weights, engine)
        whole = self.policy.forward(weights, replace(engine, top_p=1.0)).logp if engine.top_p < 1 else None
        made = loaded(len(self.sources), version, forward.logp, forward.routes, whole)
        self.sources.append(made)
        self.labels.append(version)
        self._compare(made)
        if version == 0 or not s.faulty or version < s.faulty_from:
            self.engine_weights = dict(weights)
        return made

    def _relabel(self, held: Loaded, version: int) -> Loaded:
        """The same weights under a new version: the engine was told a version, and loaded nothing."""
        made = replace(held, number=len(self.sources), label=version)
        self.sources.append(made)
        self.labels.append(version)
        self._compare(made)
        return made

    def _compare(self, made: Loaded) -> None:
        """The trainer's own pass over the version that loaded weights are labelled with."""
        own = self.policy.forward(self.weights, TRAINER, made.routes if self.settings.router_replay else None)
        self.trainer_tables.append(own.logp)
        same = (own.routes == made.routes).all(axis=1) if own.routes is not None else np.zeros(0, np.bool_)
        self.agreements.append(same)

    def _partly_delivered(self) -> Weights:
        """Rows of the weights beyond the delivered share stay as the engine has had them since the fault began."""
        rows = round(self.settings.delivered * self.policy.features.shape[1])
        return {n: np.concatenate([w[:rows], self.engine_weights[n][rows:]]) for n, w in self.weights.items()}

    # -- log-probs

    def passes(self, batch: Trajectories) -> Passes:
        """Forward passes that the tokens of a batch need: one, or with router replay one for each source."""
        if not self.settings.router_replay:
            return {-1: self.policy.forward(self.weights, TRAINER)}
        numbers = np.unique(batch.source[batch.mask]).tolist()
        return {n: self.policy.forward(self.weights, TRAINER, self.sources[n].routes) for n in numbers}

    def sampled_by(self, batch: Trajectories) -> Floats:
        """Trainer's log-probs of the tokens under the version that sampled them, by the engine's label."""
        numbers = np.unique(batch.source[batch.mask]).tolist()
        result = np.zeros_like(batch.behave)
        for number in numbers:
            table = self.trainer_tables[number]
            result = np.where(batch.source == number, table[batch.context, batch.tokens], result)
        return result

    # -- updating

    def update(self, batch: Trajectories, minibatch: int, prox: Passes | None) -> Updated:
        """One optimizer update; `prox` are the passes of pi_old, None in bypass mode."""
        s = self.settings
        now = self.passes(batch)
        theta = token_values(batch, {n: f.logp for n, f in now.items()})
        old_table = token_values(batch, {n: f.logp for n, f in prox.items()}) if prox is not None else None
        old = batch.behave if old_table is None else old_table
        fix = correction(s, old, batch.behave, batch.mask)
        each = np.broadcast_to(batch.advantage(s.group_size)[:, None], theta.shape)
        pushed = push(s, theta, old, each, fix)
        ascent = self._ascent(batch, now, pushed.push, max(1, int(fix.kept.sum())))
        rate = self.rate()
        self.weights, norm = self.optimizer.step(self.weights, ascent, rate)
        self.updates += 1
        entropy = _entropies(batch, prox if prox is not None else now)
        return Updated(batch, minibatch, each, old, old_table, theta, entropy, fix, pushed, norm, rate)

    def rate(self) -> float:
        """Learning rate of the next update."""
        s = self.settings
        return s.rate * (s.decay_to if s.decay_from and self.updates >= s.decay_from else 1.0)

    def _ascent(self, batch: Trajectories, passes: Passes, pushes: Floats, tokens: int) -> Weights:
        total: Weights = {}
        for number, forward in passes.items():
            mine = batch.mask if number < 0 else batch.mask & (batch.source == number)
            d_logits = self._d_logits(batch, forward.logp, np.where(mine, pushes, 0), mine, tokens)
            for name, g in self.policy.gradient(forward, d_logits).items():
                total[name] = total[name] + g if name in total else g
        return total

    def _d_logits(
        self,
        batch: Trajectories,
        logp: Floats,
        pushes: Floats,
        mine: NDArray[np.bool_],
        tokens: int,
    ) -> Floats:
        """From pushes on sampled tokens to the table's logits, entropy bonus included."""
        contexts, vocabulary = logp.shape
        cells = (batch.context * vocabulary + batch.tokens)[mine]
        pushed = np.bincount(cells, pushes[mine], contexts * vocabulary).reshape(logp.shape).astype(np.float32)
        prob = np.exp(logp)
        d: Floats = pushed - prob * pushed.sum(axis=1, keepdims=True)
        if self.settings.entropy_coeff:
            visits = np.bincount(batch.context[mine], minlength=contexts).astype(np.float32)[:, None] / tokens
            entropy = -(prob * logp).sum(axis=1, keepdims=True)
            d -= np.float32(self.settings.entropy_coeff) * visits * prob * (logp + entropy)
        return d


def token_values(batch: Trajectories, tables: dict[int, Floats]) -> Floats:
    """Table entries of the sampled tokens; tables by source, or one for all under -1."""
    if -1 in tables:
        return np.asarray(tables[-1][batch.context, batch.tokens])
    result = np.zeros_like(batch.behave)
    for number, table in tables.items():
        result = np.where(batch.source == number, table[batch.context, batch.tokens], result)
    return result


def _entropies(batch: Trajectories, passes: Passes) -> Floats:
    result = np.zeros_like(batch.behave)
    for number, forward in passes.items():
        table = -(np.exp(forward.logp) * forward.logp).sum(axis=1)
        result = np.where((batch.source == number) | (number < 0), table[batch.context], result)
    return result
