"""Operating characteristics of `verl_audit.measure.symptom`: false alarms, power and coverage, measured again.

python benchmarks/symptom.py [--draws N]

Learning speed: score .7 - .6 exp(-t / 80), 200 updates, AR(1) noise of sd .05, one baseline; the clock of
each run is multiplied by exp(run sd * normal).  `slower` is the verdict; `within only` leaves the run-to-run
term out, to show what it is for.  Single run: the same noise, the switch at update 100.  Onset: run sd .15,
phi .3, the clock slows at update 0, 40, 80 or 120; of the runs found slower, how many intervals hold that update
(to one), are too late or too early, and their median width in updates; 200 points, or every fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import click
import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.symptom import Curve, Speed, learning_speed, onset, single_run

Array = NDArray[np.float64]
Shape = Callable[[Array], Array]

UPDATES = np.arange(1, 201, dtype=np.float64)
NOISE = 0.05
SHAPES: dict[str, Shape] = {
    "exponential, tau 80": lambda t: 0.7 - 0.6 * np.exp(-t / 80),
    "exponential, tau 300": lambda t: 0.7 - 0.6 * np.exp(-t / 300),
    "power": lambda t: 0.75 - 0.65 / np.sqrt(1 + t / 30),
    "straight": lambda t: 0.2 + 0.002 * t,
    "sigmoid at 50": lambda t: 0.1 + 0.6 / (1 + np.exp(-(t - 50) / 25)),
    "sigmoid at 100": lambda t: 0.1 + 0.6 / (1 + np.exp(-(t - 100) / 25)),
}
AFTER: dict[str, Shape] = {
    "as before": lambda t: t,
    "speed .5": lambda t: np.where(t < 100, t, 100 + 0.5 * (t - 100)),
    "full stop": lambda t: np.minimum(t, 100),
    "reversal": lambda t: np.where(t < 100, t, 200 - t),
}
SLOWED: dict[str, Callable[[Array], Array]] = {
    "speed .5": lambda since: 0.5 * since,
    "speed .25": lambda since: 0.25 * since,
    "full stop": lambda since: 0 * since,
    "reversal": lambda since: -0.3 * since,
    "builds up": lambda since: np.where(since < 60, since - since**2 / 150, 0.2 * since + 24),
}
"""Progress since the onset; the last falls from full speed to .2 over 60 updates."""
ONSETS = (0, 40, 80, 120)


def ar1_noise(rng: np.random.Generator, n: int, phi: float) -> Array:
    """Stationary AR(1) series of sd NOISE."""
    kicks = rng.normal(size=n) * math.sqrt(1 - phi**2)
    noise = np.empty(n)
    last = rng.normal()
    for i, kick in enumerate(kicks):
        last = phi * last + kick
        noise[i] = NOISE * last
    return noise


def curve(rng: np.random.Generator, clock: Array, phi: float, shape: Shape) -> Curve:
    """A noisy run that stands at shape(clock) after each update."""
    return Curve(UPDATES, shape(clock) + ar1_noise(rng, len(UPDATES), phi))


def speed_rows(draws: int) -> Iterator[str]:
    """One line for each noise, run-to-run sd and true ratio."""
    shape = SHAPES["exponential, tau 80"]
    for phi in (0.0, 0.3, 0.6):
        for run_sd in (0.0, 0.15):
            for a in (1.0, 0.8, 0.6, 0.4):
                rng = np.random.default_rng(0)
                clocks = np.exp(run_sd * rng.normal(size=(draws, 2)))
                found = [
                    learning_speed(
                        curve(rng, a * mine * UPDATES, phi, shape), [curve(rng, theirs * UPDATES, phi, shape)]
                    )
                    for mine, theirs in clocks
                ]
                yield f"{phi:4.1f} {run_sd:7.2f} {a:5.1f} {_summary(found)}"


def _summary(found: Sequence[object]) -> str:
    speeds = [s for s in found if isinstance(s, Speed)]
    slower = sum(s.slower for s in speeds) / len(found)
    within = sum(s.value < 0.8 and math.log(s.value) < -1.645 * s.se_within for s in speeds) / len(found)
    median = np.median([s.value for s in speeds])
    return f"{median:9.2f} {slower:9.2f} {within:12.2f} {len(speeds) / len(found):9.2f}"


def single_rows(draws: int) -> Iterator[str]:
    """One line for each shape and what happens at the switch."""
    for name, shape in SHAPES.items():
        for label, after in AFTER.items():
            rates = []
            for phi in (0.3, 0.7):
                rng = np.random.default_rng(0)
                runs = [single_run(curve(rng, after(UPDATES), phi, shape), 100) for _ in range(draws)]
                rates.append(sum(r.slowed for r in runs) / draws)
            yield f"{name:21} {label:10} {rates[0]:8.2f} {rates[1]:8.2f}"


def onset_rows(draws: int) -> Iterator[str]:
    """One line for each spacing of points and kind of slowing, and one for each onset over all kinds."""
    for every, fewest in ((1, 40), (5, 8)):
        told = {
            (name, t0): list(_onsets(after, t0, draws, every, fewest))
            for name, after in SLOWED.items()
            for t0 in ONSETS
        }
        for name in SLOWED:
            yield f"{every:5} {name:21} {_held([p for (n, _), pairs in told.items() if n == name for p in pairs])}"
        for t0 in ONSETS:
            since = [p for (_, t), pairs in told.items() if t == t0 for p in pairs]
            yield f"{every:5} {f'from update {t0}':21} {_held(since)}"
        yield f"{every:5} {'all':21} {_held([p for pairs in told.values() for p in pairs])}"


Told = tuple[int, tuple[float, float] | None]
"""The true onset and the interval of a run found slower."""


def _onsets(after: Callable[[Array], Array], t0: int, draws: int, every: int, fewest: int) -> Iterator[Told]:
    rng = np.random.default_rng([t0, every, list(SLOWED.values()).index(after)])  # other clocks in each cell
    slowed = np.where(t0 > UPDATES, UPDATES, np.maximum(0.0, t0 + after(np.maximum(UPDATES - t0, 0.0))))
    for shape in (SHAPES["exponential, tau 80"], SHAPES["exponential, tau 300"]):
        for mine, theirs in np.exp(0.15 * rng.normal(size=(draws, 2))):
            whole = curve(rng, mine * slowed, 0.3, shape), curve(rng, theirs * UPDATES, 0.3, shape)
            run, base = (Curve(c.x[every - 1 :: every], c.y[every - 1 :: every]) for c in whole)
            speed = learning_speed(run, [base], min_points=fewest)
            if isinstance(speed, Speed) and speed.slower:
                yield t0, onset(run, base, min_points=fewest)


def _held(told: Sequence[Told]) -> str:
    dated = [(t0, *found) for t0, found in told if found is not None]
    late = sum(low > t0 + 1 for t0, low, _ in dated) / max(len(dated), 1)
    early = sum(high < t0 - 1 for t0, _, high in dated) / max(len(dated), 1)
    width = float(np.median([high - low for _, low, high in dated])) if dated else math.nan
    return f"{len(told):7} {len(dated):6} {1 - late - early:6.2f} {late:6.2f} {early:6.2f} {width:6.0f}"


@click.command(help=__doc__)
@click.option("--draws", default=200, show_default=True, help="simulated runs for each line")
def main(draws: int) -> None:
    """Print the three tables."""
    click.echo(f"learning_speed, {draws} draws a line")
    click.echo(" phi  run sd     a  median a    slower  within only  testable")
    for row in speed_rows(draws):
        click.echo(row)
    click.echo(f"\nsingle_run: share called slowed, {draws} draws a line")
    click.echo("before                after       phi .3   phi .7")
    for row in single_rows(draws):
        click.echo(row)
    click.echo(f"\nonset, {draws} draws for each kind, onset and shape")
    click.echo("every slowing                 slower  dated  holds   late  early  width")
    for row in onset_rows(draws):
        click.echo(row)


if __name__ == "__main__":
    main()
