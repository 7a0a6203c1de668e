"""Damage in one unit, the share of the training signal lost, and whose it is.

Loss = clip share in excess of the baseline's, or (1 - ESS)/2, whichever is larger: a clipped token gives no gradient,
and weights of effective sample size ESS make the batch worth that share of it. In decoupled mode clipping is taken
against a fresh pi_old and sees neither mismatch nor staleness, so only ESS counts, of w = e^(S+M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_audit.measure.decompose.bracket import Bracket
from verl_audit.measure.decompose.identity import component_bits
from verl_audit.measure.decompose.shapley import FRAGILE, FUNCTIONALS, Game, concentration, game, shapley_values
from verl_audit.measure.decompose.tables import Refused, Table, jackknife, ratio
from verl_audit.measure.decompose.tails import Tails
from verl_audit.measure.stats import Array, Estimate

Mode = Literal["bypass", "decoupled"]
Gauge = Literal["clip", "ess"]

TRANSFER, TRANSFER_HEAVY = 0.07, 0.5
"""Error of using the share of E[d^2] for that of a gauge: .05 to .07 for dense noise, up to .5 with MoE tails. Between
them it is taken as the tail's part of sum d^2: clipping hardly counts those few tokens, the weights' variance counts
them most, and all of them may belong to one component."""
FEW = "a few tokens decide: more traced trajectories may change it"
_FUNCTIONAL = {"clip": FUNCTIONALS["clip"], "ess": FUNCTIONALS["neg_log_ess"]}


@dataclass(frozen=True)
class Damage:
    """Share of the training signal lost, by component; `None`: cannot be told."""

    gauge: Gauge
    loss: Estimate
    """All of it, baseline not subtracted."""
    mismatch: Estimate | None
    staleness: Estimate | None
    update: Estimate | None
    """What the updates inside a cycle lose by themselves; on-policy training has it too."""
    basis: Literal["exact", "bracket"]
    note: str = ""


def damage(
    subsets: Table,
    *,
    mode: Mode,
    bracket: Bracket | Refused | None = None,
    tails: Tails | None = None,
    baseline_clip: float = 0.0,
    baseline_loss: float = 0.0,
    updates_per_version: int | None = None,
) -> Damage | Refused:
    """Damage of mismatch and staleness from the kernel's `subsets`.

    With S and M apart: exact Shapley parts of the gauge that shows the larger loss. With S + M (or U + S + M) as one:
    that part times `bracket`, widened by the error of carrying a share of E[d^2] over to the gauge (the largest where
    `tails` are not known). With U + S as one and M apart that part is staleness: all of it where a version is one
    update (`updates_per_version` 1: there is no drift inside a cycle), else at most. `baseline_clip` and
    `baseline_loss`, (1 - ESS)/2, are an on-policy run's: mismatch and staleness together never exceed what is lost
    beyond them.
    """
    found = _game(subsets, mode)
    if isinstance(found, Refused):
        return found
    if not any("M" in name or "S" in name for name in found.names):
        return Refused("neither mismatch nor staleness is in the recorded log-probs", "the rollout engine's log-probs")
    gauge, floor = _gauge(found, mode, baseline_clip, baseline_loss)
    loss, *parts = _parts(found, gauge, floor)
    by_name = dict(zip(found.names, parts, strict=True))
    if {"S", "M"} <= set(by_name):
        note = FEW if concentration(found, _FUNCTIONAL[gauge]) > FRAGILE else ""
        return Damage(gauge, loss, by_name["M"], by_name["S"], by_name.get("U"), "exact", note)
    joined = next((name for name in found.names if "S" in name and "M" in name), None)
    if joined is None:
        return _drifted(gauge, loss, by_name, updates_per_version)
    return _bracketed(gauge, loss, joined, by_name, bracket, _transfer(tails))


def _drifted(gauge: Gauge, loss: Estimate, parts: dict[str, Estimate], k: int | None) -> Damage:
    """M apart, and the drift since sampling as one."""
    drift = parts.get("U+S")
    if drift is None or k == 1:
        return Damage(gauge, loss, parts.get("M"), drift, None, "exact")
    most = Estimate(drift.value, 0.0, drift.high, drift.n, drift.se)
    return Damage(gauge, loss, parts.get("M"), most, None, "exact", "update drift is counted as staleness")


def _game(subsets: Table, mode: Mode) -> Game | Refused:
    """The components of the ratio: all in bypass mode; in decoupled mode S + M where U was recorded apart."""
    if mode == "bypass":
        return game(subsets)
    inner = game(subsets, component_bits("S+M"))
    return game(subsets) if isinstance(inner, Refused) else inner


def _loss(gauge: Gauge, totals: Array) -> Array:
    """Loss of the whole from totals (batch, coalition, SUMS)."""
    value = _FUNCTIONAL[gauge].value(totals[:, -1])
    return value if gauge == "clip" else (1 - np.exp(-value)) / 2


def _gauge(found: Game, mode: Mode, clip: float, loss: float) -> tuple[Gauge, float]:
    """The gauge with the larger loss beyond its baseline, and that baseline."""
    total = found.sums.sum(axis=0)[None]
    excess = {"ess": float(_loss("ess", total)[0]) - loss}
    if mode == "bypass":
        excess["clip"] = float(_loss("clip", total)[0]) - clip
    return ("clip", clip) if excess.get("clip", -math.inf) > excess["ess"] else ("ess", loss)


def _parts(found: Game, gauge: Gauge, floor: float) -> list[Estimate]:
    """Loss, then each player's part in [0, 1]; all but update drift are held to the loss beyond `floor`."""
    values = shapley_values(found, _FUNCTIONAL[gauge])
    foreign = np.array([name != "U" for name in found.names])

    def statistic(totals: Array) -> Array:
        loss = _loss(gauge, totals)
        per_unit = np.nan_to_num(ratio(loss, _FUNCTIONAL[gauge].value(totals[:, -1])))
        amounts = np.maximum(values(totals) * per_unit[:, None], 0.0)
        ours = (amounts * foreign).sum(axis=1)
        keep = np.minimum(1.0, np.nan_to_num(ratio(np.maximum(loss - floor, 0.0), ours)))
        return np.concatenate([loss[:, None], amounts * np.where(foreign, keep[:, None], 1.0)], axis=1)

    return jackknife(found.sums, statistic, found.tokens, bounds=(0, 1))


def _bracketed(
    gauge: Gauge,
    loss: Estimate,
    joined: str,
    parts: dict[str, Estimate],
    bracket: Bracket | Refused | None,
    transfer: float,
) -> Damage:
    whole, update = parts[joined], parts.get("U")
    if not isinstance(bracket, Bracket):
        reason = bracket.reason if bracket else "no bracket of the mismatch share"
        return Damage(gauge, loss, None, None, update, "bracket", reason)
    low, high = max(0.0, bracket.low - transfer), min(1.0, bracket.high + transfer)
    if bracket.low == bracket.high == 1:
        low = high = 1.0
    mismatch = _times(whole, bracket.value, low, high)
    staleness = _times(whole, 1 - bracket.value, 1 - high, 1 - low)
    note = ""
    if "U" in joined:
        staleness = Estimate(staleness.value, 0.0, staleness.high, staleness.n, staleness.se)
        note = "update drift was not recorded apart and is counted as staleness"
    return Damage(gauge, loss, mismatch, staleness, update, "bracket", note)


def _transfer(tails: Tails | None) -> float:
    if tails is None:
        return TRANSFER_HEAVY
    return min(TRANSFER_HEAVY, max(TRANSFER, tails.far_square_share))


def _times(whole: Estimate, share: float, low: float, high: float) -> Estimate:
    """A damage times a share known within bounds; the bounds multiply."""
    return Estimate(whole.value * share, whole.low * low, whole.high * high, whole.n, math.nan)
