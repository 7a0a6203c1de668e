"""How often the bracket of the mismatch share holds the truth, how often it blames what is not there, and Shapley.

python -m benchmarks.decompose [--draws N] [--trajectories N]

Seeded synthetic tokens with known parts (tests/measure/token_draws.py): about 24 tokens a trajectory, groups of 4, late
tokens surer and fresher. `truth` is the mean over draws of E[M^2] / E[(S+M)^2]; `cov` that of Cov(M, S+M) / Var(S+M);
both are cut to [0, 1] before the bracket is asked for them. `fits` is the mean of the two fits' shares, `bracket` the
mean bounds. `mm` and `st` are the shares of draws called "mismatch dominates" and "staleness dominates"; `at work` are
those in which the growth of E[d^2] (staleness) or its level at 0 (mismatch; `sure`: on the square root of s, too) has
a 95 % interval above 0.
Second table: how often the 95 % interval of an exact Shapley share holds the share of 40 000 other trajectories; `few`
is how often a few tokens decide (Split.concentration above FRAGILE).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import click
import numpy as np

from tests.measure.token_draws import STEPS, Setting, cells, draw, histogram, strata, subsets
from verl_audit.measure.decompose.bracket import Bracket, Growth, growth, mismatch_bracket
from verl_audit.measure.decompose.shapley import FRAGILE, shapley
from verl_audit.measure.decompose.tables import Refused
from verl_audit.measure.decompose.tails import Tails, tails

SETTINGS: dict[str, Setting] = {
    "dense, mismatch only": Setting(mismatch=0.3),
    "dense, both alike": Setting(mismatch=0.3, drift=0.2),
    "dense, mismatch most": Setting(mismatch=0.4, drift=0.1),
    "dense, staleness most": Setting(mismatch=0.1, drift=0.25),
    "staleness only, walk": Setting(drift=0.2),
    "staleness only, straight": Setting(drift=0.1, growth=1.0),
    "both, straight": Setting(mismatch=0.3, drift=0.12, growth=1.0),
    "both, corr -.3": Setting(mismatch=0.3, drift=0.2, correlation=-0.3),
    "both, no lag 0": Setting(mismatch=0.3, drift=0.2, lags=(2, 3, 4, 5, 6)),
    "staleness, no lag 0": Setting(drift=0.2, lags=(2, 3, 4, 5, 6)),
    "both, k 4": Setting(mismatch=0.3, drift=0.1, k=4),
    "MoE, mismatch only": Setting(mismatch=1.5, flips=0.03),
    "MoE, both": Setting(mismatch=1.5, flips=0.03, drift=0.15),
    "MoE, staleness most": Setting(mismatch=0.8, flips=0.03, drift=0.25),
    "slower than a walk": Setting(mismatch=0.15, drift=0.3, growth=0.25),
    "staleness only, slower": Setting(drift=0.3, growth=0.25),
}
"""The last two break the model: E[d^2] is concave in s."""


OVER_CYCLE: dict[str, Setting] = {
    "staleness only, k 4": Setting(drift=0.1, k=4),
    "both, k 4": Setting(mismatch=0.3, drift=0.1, k=4),
    "mismatch only, k 4": Setting(mismatch=0.3, drift=0.02, k=4),
}
"""d = theta - behave; the baseline is a run of the same k and drift at lag 0 without mismatch."""
EXACT: dict[str, Setting] = {
    "dense, k 4": Setting(mismatch=0.3, drift=0.1, k=4, correlation=-0.3),
    "MoE": Setting(mismatch=1.0, flips=0.03, drift=0.25),
}


@dataclass
class Draws:
    """What the draws of one setting gave."""

    truth: list[float]
    cov: list[float]
    found: list[Bracket | Refused]
    growths: list[Growth]
    heavy: list[bool]


def bracket_row(name: str, setting: Setting, draws: int, *, over_cycle: bool = False) -> str:
    """One line for a setting: d = prox - behave, or theta - behave with a baseline's intercept subtracted."""
    parts = STEPS if over_cycle else ("S", "M")
    later = "theta_logp" if over_cycle else "prox_logp"
    got = Draws([], [], [], [], [])
    for seed in range(draws):
        tokens = draw(replace(setting, seed=seed))
        table, x = strata(tokens, parts), tokens.total(parts)
        got.truth.append(min(float(np.mean(tokens.parts["M"] ** 2) / np.mean(x**2)), 1.0))
        got.cov.append(float(np.clip(tokens.covariance_share("M", parts), 0, 1)))
        options = {"later": later, "updates_per_version": setting.k}
        got.found.append(
            mismatch_bracket(
                table,
                trajectories=setting.trajectories,
                baseline_intercept=_baseline(setting, seed) if over_cycle else None,
                **options,
            )
        )
        got.growths.append(growth(table, **options))
        tail = tails(cells(tokens, parts), histogram(tokens, parts))
        got.heavy.append(isinstance(tail, Tails) and tail.dominate)
    return f"{name:25} {_line(got.truth, got.cov, got.found)} {_growth(got.growths)} {np.mean(got.heavy):6.2f}"


def _baseline(setting: Setting, seed: int) -> float:
    calm = draw(replace(setting, mismatch=0.0, lags=(0,), seed=seed + 10_000))
    found = growth(strata(calm, STEPS), later="theta_logp", updates_per_version=setting.k)
    return max(0.0, found.intercept.value)


def exact_rows(draws: int) -> Iterator[str]:
    """One line for each setting and functional."""
    for name, setting in EXACT.items():
        whole = shapley(subsets(draw(replace(setting, trajectories=40_000, seed=10**6))))
        splits = [shapley(subsets(draw(replace(setting, seed=seed)))) for seed in range(draws)]
        for functional in ("clip", "k3", "chi2", "neg_log_ess", "second", "variance"):
            truth = whole[functional].part("M").share.value
            shares = [s[functional].part("M").share for s in splits]
            known = [x for x in shares if x is not None]
            held = np.mean([x.low <= truth <= x.high for x in known])
            few = np.mean([s[functional].concentration > FRAGILE for s in splits])
            sd = np.std([x.value for x in known])
            yield f"{name:12} {functional:12} {truth:6.2f} {sd:7.3f} {held:7.2f} {few:6.2f}"


def _line(truth: list[float], cov: list[float], found: list[Bracket | Refused]) -> str:
    got = [(t, c, b) for t, c, b in zip(truth, cov, found, strict=True) if isinstance(b, Bracket)]
    if not got:
        return "refused"
    true, covariance = (np.array(x) for x in zip(*((t, c) for t, c, _ in got), strict=True))
    low, high, walk, straight = np.array([(b.low, b.high, b.random_walk, b.ballistic) for *_, b in got]).T
    held = [np.mean((low <= x + 1e-12) & (x <= high + 1e-12)) for x in (true, covariance)]
    said = [np.mean([b.verdict == f"{v} dominates" for *_, b in got]) for v in ("mismatch", "staleness")]
    return (
        f"{true.mean():5.2f} {covariance.mean():5.2f}  {walk.mean():4.2f} {straight.mean():4.2f}  "
        f"{low.mean():4.2f} {high.mean():4.2f}  {held[0]:5.2f} {held[1]:5.2f}  {said[0]:4.2f} {said[1]:4.2f}"
    )


def _growth(found: list[Growth]) -> str:
    """Shares of draws in which staleness, and mismatch, is called at work."""
    stale = np.mean([g.slope.low > 0 for g in found])
    mismatch = np.mean([g.intercept.low > 0 and not g.bends_down for g in found])
    certain = np.mean([g.intercept_slow.low > 0 for g in found])
    return f"{stale:7.2f} {mismatch:5.2f} {certain:5.2f}"


@click.command(help=__doc__)
@click.option("--draws", default=100, show_default=True, help="seeded runs for each line")
@click.option("--trajectories", default=512, show_default=True, help="trajectories a run")
def main(draws: int, trajectories: int) -> None:
    """Print the tables."""
    click.echo(f"{draws} draws a line, {trajectories} trajectories")
    click.echo(f"{'':25}     truth     fits       bracket     holds          says      at work           tails")
    click.echo(f"{'':25} share   cov   s   s^2   low  high  share   cov    mm   st    stale  mism  sure dominate")
    for settings in (SETTINGS, OVER_CYCLE):
        if settings is OVER_CYCLE:
            click.echo("over the cycle: d = theta - behave, less the intercept of a baseline")
        for name, setting in settings.items():
            sized = replace(setting, trajectories=trajectories)
            click.echo(bracket_row(name, sized, draws, over_cycle=settings is OVER_CYCLE))
    click.echo(f"\nexact Shapley share of M, {draws} draws of 512 trajectories\n{'':26} truth      sd   holds    few")
    for row in exact_rows(draws):
        click.echo(row)


if __name__ == "__main__":
    main()
