"""What the recorded log-prob sets determine: exact parts, what can be estimated, what cannot be known."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from verl_audit.trace.schema import LOG_PROBS

Later = Literal["prox_logp", "theta_logp"]
"""The later set of a gap that holds staleness."""
PATH = tuple(LOG_PROBS)
"""behave_logp, trainer_logp, prox_logp, theta_logp: each step on the way is one component."""
COMPONENTS = ("M", "S", "U")
BITS = {"U": 1, "S": 2, "M": 4}
NAMES = {"U": "update drift", "S": "staleness", "M": "mismatch"}
_RECORD = {
    "behave_logp": "the rollout engine's log-probs (verl: actor_rollout_ref.rollout.calculate_log_probs=true)",
    "trainer_logp": "the trainer's log-probs under the weights that sampled, right after a weight sync (trainer_logp)",
    "prox_logp": "the old policy's log-probs (verl: algorithm.rollout_correction.bypass_mode=false)",
    "theta_logp": "the log-probs the loss saw (theta_logp)",
}


@dataclass(frozen=True)
class Identity:
    """What can be said of U, S and M. Sums are written `S+M`."""

    recorded: tuple[str, ...]
    exact: tuple[str, ...]
    """Components, or sums of them, known for every token."""
    exact_at_zero: tuple[str, ...]
    """Components known on tokens trained with no update after they were sampled."""
    estimable: tuple[str, ...]
    """Moments and shares that need the model of `bracket`."""
    unknown: tuple[str, ...]
    reason: str
    wants: tuple[str, ...]
    """Recordings that would determine everything."""


def identify(recorded: Collection[str]) -> Identity:
    """What the sets named in `recorded` (columns of the trace schema) determine.

    Two sets next to each other on the path behave -> trainer -> prox -> theta give the sum of the components between
    them, per token and exactly; a sum is separable only through its growth with the lag, on average.
    """
    sets = tuple(name for name in PATH if name in recorded)
    joined = [_between(a, b) for a, b in pairwise(sets)]
    exact = tuple("+".join(reversed(parts)) for parts in joined)
    seen = {c for parts in joined for c in parts}
    at_zero = ("M",) if any("M" in parts and len(parts) > 1 for parts in joined) else ()
    split = [parts for parts in joined if "M" in parts and "S" in parts]
    unknown = tuple(NAMES[c] for c in reversed(COMPONENTS) if c not in seen)
    unknown += tuple(
        " against ".join(NAMES[c] for c in reversed(parts)) + ", token by token" for parts in joined if len(parts) > 1
    )
    return Identity(
        recorded=sets,
        exact=exact,
        exact_at_zero=at_zero,
        estimable=("E[M^2]", "mismatch share") if split else (),
        unknown=unknown,
        reason=_reason(sets, joined, seen),
        wants=tuple(_RECORD[name] for name in PATH if name not in sets) if unknown else (),
    )


def gap_end(recorded: Collection[str]) -> Later | None:
    """The later set of the gap that the kernel's strata hold; None where the recorded sets hold no staleness."""
    if "behave_logp" not in recorded:
        return None
    return "prox_logp" if "prox_logp" in recorded else "theta_logp" if "theta_logp" in recorded else None


def component_bits(name: str) -> int:
    """Bits of a component or a sum: `S+M` is 6."""
    return sum(BITS[part] for part in name.split("+"))


def component_name(bits: int) -> str:
    """Name of a bit mask: 6 is `S+M`."""
    return "+".join(name for name, bit in BITS.items() if bits & bit)


def _between(earlier: str, later: str) -> tuple[str, ...]:
    return COMPONENTS[PATH.index(earlier) : PATH.index(later)]


def _reason(sets: tuple[str, ...], joined: list[tuple[str, ...]], seen: set[str]) -> str:
    if len(sets) < 2:
        return "a difference needs two sets of log-probs of the same tokens" + (
            f"; only {sets[0]} was recorded" if sets else "; none was recorded"
        )
    words = [
        f"the {' and the '.join(NAMES[c] for c in reversed(parts))} enter the same difference"
        + (": only mismatch is there at lag 0, and only the rest grows with lag" if "M" in parts else "")
        for parts in joined
        if len(parts) > 1
    ]
    lost = [c for c in reversed(COMPONENTS) if c not in seen]
    if lost:
        words.append(f"a set at one end of the {' and the '.join(NAMES[c] for c in lost)} was not recorded")
    return "; ".join(words) if words else "every step from the rollout's log-prob to the loss's was recorded"
