"""The policy: a softmax over fixed random features of (prompt class, position), dense or with experts.

There are fewer features than contexts, so that every update also moves contexts it did not see: old samples mislead
and noise spreads, as in a network. One table of log-probs (contexts x vocabulary) is all of a weight version:
sampling is a look-up and training one matrix product, which is why a run takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl_audit.reference.numerics import Floats, Format, Scaling, round_to
from verl_audit.reference.router import Mixed, Routes, mix, mix_gradient
from verl_audit.reference.task import STOP, Task

Weights = dict[str, Floats]
"""Named tensors: `out` (features, vocabulary), or `router` (features, experts) and `experts` (features, e * v)."""


@dataclass(frozen=True)
class Numerics:
    """How an engine computes and samples."""

    form: Format = "fp32"
    router_form: Format = "fp32"
    scaling: Scaling = "channel"
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Forward:
    """Log-probs (contexts, vocabulary) of one forward pass, and what its gradient needs."""

    logp: Floats
    routes: Routes | None
    mixed: Mixed | None


@dataclass(frozen=True)
class Policy:
    """Features and shape; the weights are handed in."""

    features: Floats
    vocabulary: int
    experts: int
    rounded: dict[tuple[Format, Scaling], Floats] = field(default_factory=dict, compare=False)
    """Features in the numerics that were asked for before; they never change."""

    def forward(self, weights: Mapping[str, Floats], numerics: Numerics, routes: Routes | None = None) -> Forward:
        """Log-probs of every context in the given numerics; `routes` replays expert choices."""
        if not self.experts:
            return Forward(processed(self._product(weights["out"], numerics.form, numerics), numerics), None, None)
        outputs = self._product(weights["experts"], numerics.form, numerics)
        router = self._product(weights["router"], numerics.router_form, numerics)
        mixed = mix(router, outputs.reshape(len(outputs), self.experts, self.vocabulary), routes)
        return Forward(processed(mixed.logits, numerics), mixed.routes, mixed)

    def _product(self, weight: Floats, form: Format, numerics: Numerics) -> Floats:
        """Features times weight, both rounded."""
        key = (form, numerics.scaling)
        if key not in self.rounded:
            self.rounded[key] = round_to(self.features, *key)
        return self.rounded[key] @ round_to(weight, *key)

    def gradient(self, forward: Forward, d_logits: Floats) -> Weights:
        """Gradient of the weights from that of the logits; `forward` is a pass in fp32 at temperature 1."""
        if forward.mixed is None:
            return {"out": self.features.T @ d_logits}
        d_router, d_outputs = mix_gradient(forward.mixed, d_logits, self.experts)
        flat = d_outputs.reshape(len(d_logits), -1)
        return {"router": self.features.T @ d_router, "experts": self.features.T @ flat}


def processed(logits: Floats, numerics: Numerics) -> Floats:
    """Log-probs after temperature and top-p, as an engine with processed log-probs records them.

    top-p keeps the most likely tokens up to that mass and renormalises; the others get -inf.
    """
    logp = log_softmax(logits / np.float32(numerics.temperature))
    if numerics.top_p >= 1:
        return logp
    order = np.argsort(-logp, axis=1)
    sorted_p = np.exp(np.take_along_axis(logp, order, 1))
    kept = np.cumsum(sorted_p, axis=1) - sorted_p < numerics.top_p
    mask = np.zeros_like(kept)
    np.put_along_axis(mask, order, kept, 1)
    return log_softmax(np.where(mask, logp, -np.inf).astype(np.float32))


def log_softmax(logits: Floats) -> Floats:
    """Along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def make_policy(task: Task, features: int, experts: int, skill: float, seed: int) -> tuple[Policy, Weights]:
    """A policy and weights that already favour the right token by about `skill` nats, as a pretrained model does."""
    rng = np.random.default_rng([seed, 2])
    contexts = task.classes * task.positions
    table = rng.standard_normal((contexts, features), dtype=np.float32) / np.float32(np.sqrt(features))
    right = np.eye(task.vocabulary, dtype=np.float32)[task.answer.reshape(-1)] - np.float32(1 / task.vocabulary)
    right[task.answer.reshape(-1) == STOP] *= np.float32(0.3)  # knows what to write better than when to stop
    out = np.float32(skill) * (table.T @ right) / np.float32(max(1.0, contexts / features) ** 0.5)
    policy = Policy(table, task.vocabulary, experts)
    if not experts:
        return policy, {"out": out}
    noise = rng.standard_normal((features, experts, task.vocabulary), dtype=np.float32)
    each = out[:, None, :] + np.float32(0.8) * noise
    router = rng.standard_normal((features, experts), dtype=np.float32)
    return policy, {"router": router, "experts": np.ascontiguousarray(each.reshape(features, -1))}
