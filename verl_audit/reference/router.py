"""A top-2 mixture-of-experts layer: its router really flips when it is computed in low precision.

The two experts with the largest router logits are used, weighted by their sigmoids, normalised (as in DeepSeek-V3,
arXiv 2412.19437): weights that hardly change while the choice holds. Where the second and the
third are nearly tied, rounding the router's inputs and weights chooses another expert: for few tokens, but then the
whole output differs, which gives mismatch its heavy tail. Router replay takes the choice of the rollout engine over
into the trainer, so that only the smooth part of the difference is left (Ma et al., arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.numerics import Floats

Routes = NDArray[np.int64]
"""Chosen experts of each context, (contexts, 2)."""


@dataclass(frozen=True)
class Mixed:
    """Output of the layer and what its gradient needs."""

    logits: Floats
    routes: Routes
    gates: Floats
    slopes: Floats
    """Derivative of each unnormalised gate over the sum of both, (contexts, 2)."""
    chosen: Floats
    """Outputs of the two chosen experts, (contexts, 2, vocabulary)."""


def choose(router_logits: Floats) -> Routes:
    """The two largest, the larger first."""
    top = np.argpartition(router_logits, -2, axis=1)[:, -2:]
    order = np.take_along_axis(router_logits, top, 1)[:, :1] >= np.take_along_axis(router_logits, top, 1)[:, 1:]
    return np.where(order, top, top[:, ::-1])


def mix(router_logits: Floats, outputs: Floats, routes: Routes | None = None) -> Mixed:
    """Mix expert outputs (contexts, experts, vocabulary); `routes` replays choices made elsewhere."""
    routes = choose(router_logits) if routes is None else routes
    open_ = 1 / (1 + np.exp(-np.take_along_axis(router_logits, routes, 1)))
    total = open_.sum(axis=1, keepdims=True)
    gates = open_ / total
    chosen = np.take_along_axis(outputs, routes[:, :, None], 1)
    return Mixed((gates[:, :, None] * chosen).sum(axis=1), routes, gates, open_ * (1 - open_) / total, chosen)


def mix_gradient(mixed: Mixed, d_logits: Floats, experts: int) -> tuple[Floats, Floats]:
    """Gradients of router logits (contexts, experts) and expert outputs (contexts, experts, vocabulary)."""
    n, vocabulary = d_logits.shape
    rows = np.arange(n)[:, None]
    d_outputs = np.zeros((n, experts, vocabulary), np.float32)
    d_outputs[rows, mixed.routes] = mixed.gates[:, :, None] * d_logits[:, None, :]
    d_gates = (mixed.chosen * d_logits[:, None, :]).sum(axis=2)
    d_router = np.zeros((n, experts), np.float32)
    centred = d_gates - (mixed.gates * d_gates).sum(axis=1, keepdims=True)
    d_router[rows, mixed.routes] = mixed.slopes * centred
    return d_router, d_outputs
