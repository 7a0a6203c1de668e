"""Operating characteristics of `verl_audit.measure.symptom`: false alarms and power, measured again.

python benchmarks/symptom.py [--draws N]

Learning speed: score .7 - .6 exp(-t / 80), 200 updates, AR(1) noise of sd .05, one baseline; the clock of
each run is multiplied by exp(run sd * normal).  `slower` is the verdict; `within only` leaves the run-to-run
term out, to show what it is for.  Single run: the same noise, the switch at update 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import click
import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.symptom import Curve, Speed, learning_speed, single_run

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


@click.command(help=__doc__)
@click.option("--draws", default=200, show_default=True, help="simulated runs for each line")
def main(draws: int) -> None:
    """Print both tables."""
    click.echo(f"learning_speed, {draws} draws a line")
    click.echo(" phi  run sd     a  median a    slower  within only  testable")
    for row in speed_rows(draws):
        click.echo(row)
    click.echo(f"\nsingle_run: share called slowed, {draws} draws a line")
    click.echo("before                after       phi .3   phi .7")
    for row in single_rows(draws):
        click.echo(row)


if __name__ == "__main__":
    main()
