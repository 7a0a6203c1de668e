"""Tokens whose update drift, staleness and mismatch are known, and the kernel's tables of them in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Table = dict[str, NDArray[Any]]

SETS = ("behave_logp", "trainer_logp", "prox_logp", "theta_logp")
BITS = {"M": 4, "S": 2, "U": 1}
STEPS = ("M", "S", "U")
BIN_EDGES = -np.geomspace(1e-3, 10, 15)[::-1]
LN2 = float(np.log(2))


@dataclass(frozen=True)
class Setting:
    """How the parts of the log-ratio of one run are made. Standard deviations are those of a token of pi near 0."""

    mismatch: float = 0.0
    """sd of M."""
    drift: float = 0.0
    """sd of the drift after one optimizer update."""
    growth: float = 0.5
    """sd of the drift goes as s^growth: .5 random walk, 1 straight on."""
    correlation: float = 0.0
    """Of S and M, token by token."""
    flips: float | None = None
    """MoE: this share of tokens gets a mismatch of sd `mismatch`, the others a fifteenth of it."""
    lags: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Versions; drawn per trajectory, the later half of its tokens one lower if that is in the list."""
    k: int = 1
    """Optimizer updates per version."""
    shared: float = 0.5
    """Part of the drift's variance that the tokens of one trajectory share."""
    trajectories: int = 512
    tokens: int = 24
    seed: int = 0


@dataclass(frozen=True)
class Tokens:
    """Flat arrays over tokens."""

    parts: Mapping[str, Array]
    behave: Array
    lag: NDArray[np.int64]
    minibatch: NDArray[np.int64]
    cluster: NDArray[np.int64]
    step: NDArray[np.int64]
    advantage: Array
    updates_per_version: int
    eps: tuple[float, float] = field(default=(0.2, 0.28))

    def total(self, parts: Sequence[str] = STEPS) -> Array:
        """Sum of the named parts."""
        return sum((self.parts[p] for p in parts), np.zeros(len(self.behave)))

    def second_share(self) -> float:
        """E[M^2] / E[(S + M)^2]: what the bracket is about."""
        return float(np.mean(self.parts["M"] ** 2) / np.mean(self.total(["S", "M"]) ** 2))

    def covariance_share(self, part: str = "M", parts: Sequence[str] = STEPS) -> float:
        """Cov(X_i, X) / Var(X)."""
        x = self.total(parts)
        return float(np.cov(self.parts[part], x, bias=True)[0, 1] / x.var())


@lru_cache(maxsize=8)
def draw(setting: Setting) -> Tokens:
    """Groups of 4 trajectories, 16 groups a step; late tokens are surer (1 - pi is smaller) and fresher."""
    rng = np.random.default_rng(setting.seed)
    rows, length = setting.trajectories, setting.tokens
    group = np.repeat(np.arange(-(-rows // 4)), 4)[:rows]
    lags = np.asarray(setting.lags)
    first = rng.integers(0, len(lags), size=rows)
    place = np.broadcast_to(np.arange(length), (rows, length))
    index = np.where(place < length // 2, first[:, None], np.maximum(first[:, None] - 1, 0))
    lag, j = lags[index], np.broadcast_to(rng.integers(0, setting.k, size=rows)[:, None], (rows, length))
    behave = -rng.gamma(0.35, 1.2 * (1.3 - 0.6 * place / length))
    scale = -np.expm1(behave)
    own, common = rng.normal(size=(2, rows, length)), rng.normal(size=(rows, 2, 1))
    a, b = np.sqrt(setting.shared), np.sqrt(1 - setting.shared)
    unit = [b * own[i] + a * common[:, i] for i in (0, 1)]
    before, after = setting.k * lag, setting.k * lag + j
    drift = [scale * setting.drift * np.asarray(s, dtype=float) ** setting.growth for s in (before, after)]
    staleness = drift[0] * unit[0]
    straight = setting.growth > 0.5
    update = (drift[1] - drift[0]) * unit[0] if straight else np.sqrt(drift[1] ** 2 - drift[0] ** 2) * unit[1]
    noise = setting.correlation * unit[0] + np.sqrt(1 - setting.correlation**2) * rng.normal(size=(rows, length))
    size = np.full((rows, length), setting.mismatch)
    if setting.flips is not None:
        size = np.where(rng.random((rows, length)) < setting.flips, setting.mismatch, setting.mismatch / 15)
    flat = {"M": size * scale * noise, "S": staleness, "U": update}
    wide = np.broadcast_to(np.where(rng.random(rows) < 0.5, 1.0, -1.0)[:, None], (rows, length))
    cluster, step = (np.broadcast_to(x[:, None], (rows, length)) for x in (group * 37 % 64, group // 16))
    return Tokens(
        parts={name: np.ascontiguousarray(x).ravel() for name, x in flat.items()},
        behave=behave.ravel(),
        lag=lag.ravel(),
        minibatch=j.ravel(),
        cluster=cluster.ravel(),
        step=step.ravel(),
        advantage=wide.ravel(),
        updates_per_version=setting.k,
    )


def sums(d: Array, tokens: Tokens) -> dict[str, Array]:
    """Per-token values of every column that the kernel sums."""
    up, down = np.log1p(tokens.eps[1]), np.log1p(-tokens.eps[0])
    w = np.exp(d)
    return {
        "n": np.ones_like(d),
        "listed": np.ones_like(d),
        "clip_n": np.ones_like(d),
        "sum": d,
        "abs_sum": np.abs(d),
        "sq_sum": d * d,
        "k3_sum": np.expm1(d) - d,
        "w_sum": w,
        "w2_sum": w * w,
        "clip_low": ((d < down) & (tokens.advantage < 0)).astype(float),
        "clip_high": ((d > up) & (tokens.advantage > 0)).astype(float),
        "tail_ln2": (np.abs(d) > LN2).astype(float),
    }


def table(keys: Mapping[str, NDArray[Any]], values: Mapping[str, Array]) -> Table:
    """Sums of `values` over equal keys."""
    shape = [int(key.max()) + 1 for key in keys.values()]
    flat, code = np.unique(np.ravel_multi_index(tuple(keys.values()), shape), return_inverse=True)
    found: Table = dict(zip(keys, np.unravel_index(flat, shape), strict=True))
    for name, value in values.items():
        found[name] = np.bincount(code.ravel(), weights=value, minlength=len(flat))
    return found


def joined(recorded: Sequence[str]) -> list[tuple[str, ...]]:
    """Components between each recorded set and the next."""
    places = [SETS.index(name) for name in SETS if name in recorded]
    return [STEPS[a:b] for a, b in pairwise(places)]


def subsets(tokens: Tokens, recorded: Sequence[str] = SETS) -> Table:
    """The kernel's `subsets`: sums of every union of the components that the recorded sets tell apart."""
    players = joined(recorded)
    found = []
    for chosen in range(1, 1 << len(players)):
        parts = [p for i, player in enumerate(players) if chosen >> i & 1 for p in player]
        keys = {"cluster": tokens.cluster, "subset": np.full(len(tokens.lag), sum(BITS[p] for p in parts))}
        found.append(table(keys, sums(tokens.total(parts), tokens)))
    return {name: np.concatenate([t[name] for t in found]) for name in found[0]}


def strata(tokens: Tokens, parts: Sequence[str] = ("S", "M")) -> Table:
    """The kernel's `strata` of d = sum of `parts`."""
    values = sums(tokens.total(parts), tokens)
    keys = {
        "cluster": tokens.cluster,
        "lag": tokens.lag,
        "minibatch": tokens.minibatch,
        "bin": np.digitize(tokens.behave, BIN_EDGES),
    }
    return table(keys, {name: values[name] for name in ("n", "abs_sum", "sq_sum")})


def cells(tokens: Tokens, parts: Sequence[str] = ("S", "M")) -> Table:
    """The kernel's `cells` of d = sum of `parts`."""
    keys = {"step": tokens.step, "lag": tokens.lag, "minibatch": tokens.minibatch}
    return table(keys, sums(tokens.total(parts), tokens))


def histogram(tokens: Tokens, parts: Sequence[str] = ("S", "M")) -> Table:
    """The kernel's `histogram` of |d|."""
    bits = np.abs(tokens.total(parts)).astype(np.float32).view(np.uint32) >> 21
    return table({"lag": tokens.lag, "bucket": bits.astype(np.int64)}, {"count": np.ones(len(bits))})
