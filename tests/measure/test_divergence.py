"""Where runs part: found soon after it happens, and rarely where nothing happens."""

from __future__ import annotations

import numpy as np
import pytest

from verl_audit.measure.divergence import Divergence, NoDivergence, first_divergence
from verl_audit.measure.stats import Array

Curve = tuple[Array, Array]


def noise(rng: np.random.Generator, n: int, phi: float = 0.0) -> Array:
    made = np.zeros(n)
    draws = rng.normal(size=n)
    for i in range(n):
        made[i] = draws[i] + (phi * made[i - 1] if i else 0.0)
    return made


def curve(rng: np.random.Generator, n: int = 240, *, phi: float = 0.0, jump: float = 0.0, at: int = 0) -> Curve:
    """A saturating curve with noise of sd .02 a point, and a jump from a step on."""
    x = np.arange(1.0, n + 1)
    return x, 0.8 - 0.6 * np.exp(-x / 60) + 0.02 * noise(rng, n, phi) + jump * (x >= at)


@pytest.mark.parametrize(("phi", "most"), [(0.0, 0.02), (0.5, 0.03), (0.8, 0.05)])
def test_false_reports_are_rare(phi: float, most: float) -> None:
    rng = np.random.default_rng(1)
    found = [first_divergence(curve(rng, phi=phi), curve(rng, phi=phi)) for _ in range(300)]
    assert np.mean([isinstance(f, Divergence) for f in found]) <= most


@pytest.mark.parametrize(("jump", "direction"), [(0.05, "above"), (-0.05, "below")])
def test_a_jump_is_found_where_it_happens(jump: float, direction: str) -> None:
    rng = np.random.default_rng(2)
    found = [first_divergence(curve(rng), curve(rng, jump=jump, at=121)) for _ in range(50)]
    hits = [f for f in found if isinstance(f, Divergence)]
    assert len(hits) >= 48
    assert np.median([f.low for f in hits]) == pytest.approx(121, abs=20)
    assert {f.direction for f in hits} == {direction}
    assert np.median([f.difference for f in hits]) == pytest.approx(jump, abs=0.02)


def test_curves_on_other_points_of_the_clock_are_interpolated() -> None:
    x1, x2 = np.arange(0.0, 100, 2), np.arange(0.0, 100, 3)
    rng = np.random.default_rng(3)
    y1, y2 = (x + rng.normal(0, 0.1, len(x)) for x in (x1, x2))
    same = first_divergence((x1, y1), (x2, y2))
    assert isinstance(same, NoDivergence) and "beyond noise" in same.because
    apart = first_divergence(
        (x1, x1 + rng.normal(0, 0.1, len(x1))), (x2, x2 + 3 * (x2 > 50) + rng.normal(0, 0.1, len(x2)))
    )
    assert isinstance(apart, Divergence) and 40 < apart.low < 65


def test_few_points_are_said_to_be_few() -> None:
    x = np.arange(8.0)
    found = first_divergence((x, x), (x, x + 5))
    assert found == NoDivergence("8 common points, 15 are needed")
    nothing = first_divergence((x, x), (x + 100, x))
    assert nothing == NoDivergence("0 common points, 15 are needed")
    assert isinstance(first_divergence((x[:0], x[:0]), (x, x)), NoDivergence)


def test_a_spike_alone_is_no_divergence() -> None:
    rng = np.random.default_rng(4)
    x, y = curve(rng)
    spiked = y.copy()
    spiked[100:112] += 0.3
    assert isinstance(first_divergence(curve(rng), (x, spiked)), NoDivergence)
