"""How much of the training signal each cause costs, in one unit, and when that is evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_audit.diagnose.evaluate import Finding, fired_for
from verl_audit.diagnose.rules import Cause
from verl_audit.measure.model import Measure

D0: Mapping[Cause, float] = {"mismatch": 0.015, "staleness": 0.03, "eviction": 0.10, "sync": 0.03}
"""Damage at which the evidence for a cause is even, share of the training signal (docs/verdict.md)."""
EVIDENCE = 0.6
"""Evidence from which a damage explains a slowdown; reached at 1.18 D0."""
FIRST_LOSS = "loss_first_step"
"""Measure of what was lost before the first sync."""
CLEARLY_BELOW = 0.5
"""Share of D0 up to which a bound on the damage excludes a cause: the evidence is then at most 0.15."""


def evidence(damage: float, cause: Cause) -> float:
    """sigmoid(2.5 ln(D / D0)): 0.5 at D0, 0.6 at 1.18 D0, 0.85 at 2 D0."""
    if damage <= 0:
        return 0.0
    return float(1 / (1 + (D0[cause] / damage) ** 2.5))


def in_even_evidence(damage: tuple[float, float, float] | None, cause: Cause) -> float:
    """A damage in units of what is even evidence for its cause, so that causes compare."""
    return 0.0 if damage is None else damage[0] / D0[cause]


def damage_of(
    measures: Mapping[str, Measure], findings: Sequence[Finding], cause: Cause
) -> tuple[float, float, float] | None:
    """Damage of one cause. A sync fault explains the off-policy loss it makes: the other two keep a fifth of theirs,
    or of a mismatch what was there before the first sync."""
    broken = bool(fired_for(findings, "sync", "high"))
    if cause == "sync":
        return _sync_damage(measures, broken=broken)
    found = measures[f"damage_{cause}"]
    if broken and cause == "mismatch" and measures[FIRST_LOSS].number() is not None:
        found = measures[FIRST_LOSS]
        broken = False
    value = found.number()
    if value is None:
        return None
    keep = 0.2 if broken and cause in ("mismatch", "staleness") else 1.0
    low, high = (value if bound is None else bound for bound in (found.low, found.high))
    return keep * value, keep * low, keep * high


def _sync_damage(measures: Mapping[str, Measure], *, broken: bool) -> tuple[float, float, float] | None:
    """Without a fault 0, if anything that could have shown one was measured."""
    loss = measures["off_policy_loss"].number()
    if broken:
        return None if loss is None else (loss, 0.0, loss)
    seen = any(measures[name].number() is not None for name in ("sync_share", "lag_max_slope", "gap_after_first_sync"))
    return (0.0, 0.0, 0.0) if seen else None
