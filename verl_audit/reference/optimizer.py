"""Adam with a global gradient clip, as verl's actors use it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl_audit.reference.numerics import Floats
from verl_audit.reference.policy import Weights

BETA1, BETA2, TINY, MAX_NORM = 0.9, 0.999, 1e-8, 1.0


@dataclass
class Adam:
    """Running moments of the gradient."""

    steps: int = 0
    mean: dict[str, Floats] = field(default_factory=dict)
    square: dict[str, Floats] = field(default_factory=dict)

    def step(self, weights: Weights, ascent: Weights, rate: float) -> tuple[Weights, float]:
        """New weights after one step along `ascent`, and its norm before clipping."""
        norm = float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in ascent.values())))
        shrink = np.float32(min(1.0, MAX_NORM / (norm + 1e-6)))
        self.steps += 1
        scale = np.float32(rate / (1 - BETA1**self.steps))
        moved = {}
        for name, weight in weights.items():
            g = ascent[name] * shrink
            mean = self.mean[name] = np.float32(BETA1) * self.mean.get(name, np.float32(0)) + np.float32(1 - BETA1) * g
            square = np.float32(BETA2) * self.square.get(name, np.float32(0)) + np.float32(1 - BETA2) * g * g
            self.square[name] = square
            bottom = np.sqrt(square / np.float32(1 - BETA2**self.steps)) + np.float32(TINY)
            moved[name] = weight + scale * mean / bottom
        return moved, norm
