"""Operating characteristics of the eviction and ordering statistics: false alarms and power, measured again.

python benchmarks/eviction.py [--draws N] [--scale]

Groups of 16 trajectories, log length normal with sd .6 and intraclass correlation .7, reward falling with length.
`found` is the rule's condition (upper limit of the length shift within cohorts below -.05), `below 0` the bare
interval. Ordering: mini-batch means as an AR(1) series, period 4, the amplitude in sd of the series.
`--scale` times one million trajectories through the store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import click
import duckdb
import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.clustered import shift
from verl_audit.measure.cohorts import cohorts, outstanding
from verl_audit.measure.ipw import generated_reward
from verl_audit.measure.ledger import ledger, read_depth
from verl_audit.measure.phase import known_period, unknown_period
from verl_audit.measure.reasons import parts_by_reason
from verl_audit.measure.replicas import delivery, replicas
from verl_audit.measure.survival import (
    length_bias,
    reward_bias,
    survival_by_difficulty,
    survival_by_length,
    truncation_point,
)
from verl_audit.measure.trace_groups import Groups, Sums, group_up, read_rows, rows
from verl_audit.measure.trace_lag import lag_kinds

Array = NDArray[np.float64]
Evict = Callable[[np.random.Generator, Array], NDArray[np.bool_]]
"""From lengths (groups by trajectories) to evicted groups."""

SIZE, ICC, SD = 16, 0.7, 0.6
FOUND = -0.05
PER_STEP = 8
PERIOD = 4


def lengths(rng: np.random.Generator, groups: int) -> Array:
    """Log-normal lengths, groups by trajectories."""
    shared, own = rng.normal(size=(groups, 1)), rng.normal(size=(groups, SIZE))
    return np.asarray(np.ceil(500 * np.exp(SD * (math.sqrt(ICC) * shared + math.sqrt(1 - ICC) * own))))


def longest(share: float) -> Evict:
    """Evict the groups with the longest responses; ties with the removed share are rounded up."""

    def evict(rng: np.random.Generator, length: Array) -> NDArray[np.bool_]:
        count = math.ceil(share * len(length))
        return np.asarray(np.argsort(np.argsort(-length.max(axis=1))) < count)

    return evict


def at_random(share: float) -> Evict:
    """Evict groups whatever they hold."""
    return lambda rng, length: np.asarray(rng.random(len(length)) < share)


def in_bursts(share: float) -> Evict:
    """Evict at random, in the second half of the run only."""
    return lambda rng, length: np.asarray(
        (rng.random(len(length)) < 2 * share) & (np.arange(len(length)) >= len(length) / 2)
    )


def traces(length: Array, evicted: NDArray[np.bool_]) -> Groups:
    """Groups as the statistics take them: eight submitted a step, decided three steps later."""
    n = len(length)
    group = np.repeat(np.arange(n), SIZE)
    step = group // PER_STEP + 1
    return group_up(
        rows(
            group,
            np.where(np.repeat(evicted, SIZE), "stale", "trained"),
            session=np.tile(np.arange(SIZE), n),
            response_length=length.ravel(),
            submit_step=step,
            decided_step=step + 3 * (group % PER_STEP > 0),
        )
    )


DESIGNS: dict[str, tuple[Evict, bool]] = {
    "longest 10 %": (longest(0.1), False),
    "longest 5 %": (longest(0.05), False),
    "random 20 %": (at_random(0.2), False),
    "random 50 %": (at_random(0.5), False),
    "random 20 %, late, length grows": (in_bursts(0.2), True),
}
"""What is evicted, and whether lengths double over the run."""


def eviction_rows(draws: int) -> Iterator[str]:
    """One line for each design and number of groups."""
    for name, (evict, grows) in DESIGNS.items():
        for groups in (20, 50, 100, 200):
            rng = np.random.default_rng(0)
            found = [_draw(rng, evict, groups, grows) for _ in range(draws)]
            total, within, pooled = (np.array(x) for x in zip(*found, strict=True))
            yield (
                f"{name:32} {groups:6d} {np.mean(within[:, 0]):8.3f} {np.mean(within[:, 2] < FOUND):7.3f} "
                f"{np.mean(within[:, 2] < 0):8.3f} {np.mean(within[:, 1] > 0):8.3f} "
                f"{np.mean(total[:, 2] < FOUND):12.3f} {np.mean(pooled < FOUND):17.3f}"
            )


def _draw(rng: np.random.Generator, evict: Evict, groups: int, grows: bool) -> tuple[Array, Array, float]:
    length = lengths(rng, groups)
    if grows:
        length = length * np.linspace(1, 2, groups)[:, None]
    made = traces(length, evict(rng, length))
    where = cohorts(made, outstanding=0)
    bias = length_bias(made, where)
    ends = [np.array([m.value, m.low, m.high], dtype=float) for m in (bias.total, bias.within)]
    return ends[0], ends[1], _as_trajectories(length, made)


def _as_trajectories(length: Array, groups: Groups) -> float:
    """Upper limit if every trajectory were independent: what the design effect costs."""
    trained = np.repeat(groups.trained, SIZE).astype(float)
    x = length.ravel()
    found = shift(Sums(x, np.ones(len(x)), x * trained, trained), np.zeros(len(x), dtype=np.int64), log=True)
    return math.nan if found is None else found.total.high


def series(rng: np.random.Generator, n: int, phi: float, amplitude: float) -> Array:
    """AR(1) of unit variance around 10, plus a sine of period 4."""
    noise, last = np.empty(n), rng.normal()
    for i, kick in enumerate(rng.normal(size=n) * math.sqrt(1 - phi**2)):
        last = phi * last + kick
        noise[i] = last
    return np.asarray(10 + noise + amplitude * np.sin(2 * np.pi * np.arange(n) / PERIOD))


def order_rows(draws: int) -> Iterator[str]:
    """One line for each autocorrelation and amplitude: 160 mini-batches, 40 cycles."""
    for phi in (-0.3, 0.0, 0.4, 0.8):
        for amplitude in (0.0, 0.3, 0.6):
            rng = np.random.default_rng(0)
            drawn = [series(rng, 160, phi, amplitude) for _ in range(draws)]
            known = np.array([known_period(x, PERIOD).p.value for x in drawn], dtype=float)
            unknown = np.array([unknown_period(x).p.value for x in drawn], dtype=float)
            rates = " ".join(f"{np.mean(p < level):9.3f}" for p in (known, unknown) for level in (0.05, 0.01))
            yield f"{phi:5.1f} {amplitude:9.1f} {rates}"


def scale_rows() -> Iterator[str]:
    """Seconds for each statistic on 1 M trajectories of 125 k groups, with two million segments."""
    con = duckdb.connect()
    con.execute(_MILLION)
    clock = time.perf_counter()

    def took(label: str) -> str:
        nonlocal clock
        line = f"{label:28} {time.perf_counter() - clock:6.2f} s"
        clock = time.perf_counter()
        return line

    data = read_rows(con, "run")
    yield took("read rows")
    groups = group_up(data)
    where = cohorts(groups, outstanding=outstanding(con, "run"))
    yield took("groups and cohorts")
    ledger(data, groups, depth=read_depth(con, "run"))
    yield took("ledger")
    length_bias(groups, where), reward_bias(groups, where), truncation_point(groups, where)
    survival_by_length(groups, where), survival_by_difficulty(groups, where)
    yield took("shifts and survival")
    generated_reward(groups, where), parts_by_reason(groups, where)
    yield took("weights and reasons")
    lag_kinds(con, "run")
    yield took("lag")
    replicas(con, "run"), delivery(con, "run")
    yield took("replicas")


_MILLION = """
SELECT setseed(0.5);
CREATE TABLE trajectories AS SELECT 'run' AS run, i::INTEGER AS trajectory_id, md5((i // 8)::VARCHAR) AS "group",
    (i % 8)::INTEGER AS session, 0 AS turn, CASE WHEN (i // 8) % 7 = 0 THEN 'stale' ELSE 'trained' END AS fate,
    ['stale'] AS reasons, (i // 8000 + 1)::INTEGER AS submit_step, (i // 8000 + 3)::INTEGER AS decided_step,
    (i // 8000)::INTEGER AS submit_version, (i // 8000)::INTEGER AS first_version,
    (i // 8000 + 1)::INTEGER AS last_version, (i // 8000 + 2)::INTEGER AS train_version, 0 AS train_minibatch,
    (500 * exp(random()))::INTEGER AS response_length, 400 AS loss_tokens, false AS truncated, random() AS reward,
    ((i // 8) % 5000)::VARCHAR AS prompt_key, 1.0 AS lag_newest, 2.0 AS lag_oldest, 1.5 AS lag_mean,
    1.5 AS lag_updates, 2 AS span, 1.0 AS lag_in_flight, 1.0 AS lag_in_queue FROM range(1000000) t(i);
CREATE TABLE trajectory_segments AS SELECT 'run' AS run, trajectory_id, j::INTEGER AS segment,
    (first_version + j)::INTEGER AS version, 'server ' || trajectory_id % 16 AS server,
    (first_version + j)::DOUBLE + random() AS t0 FROM trajectories, range(2) s(j);
CREATE TABLE syncs AS SELECT 'run' AS run, i::INTEGER AS version,
    NULL::VARCHAR AS replica, i::INTEGER AS replica_version,
    i::DOUBLE AS t0, 1 AS payload_count, i::DOUBLE AS payload_norm FROM range(125) t(i);
CREATE TABLE buffer_depth AS SELECT 'run' AS run, i::DOUBLE AS t, i::INTEGER AS step, 0 AS pending, 2000 AS running,
    0 AS finished, 0 AS failed FROM range(1, 128) t(i);
"""


@click.command(help=__doc__)
@click.option("--draws", default=400, show_default=True, help="simulated runs for each line")
@click.option("--scale", is_flag=True, help="time one million trajectories as well")
def main(draws: int, scale: bool) -> None:
    """Print the tables."""
    click.echo(f"length shift, {draws} draws a line")
    click.echo(f"{'evicted':32} groups    shift   found  below 0  above 0  found, total  as trajectories")
    for row in eviction_rows(draws):
        click.echo(row)
    click.echo(f"\nordering, {draws} draws a line: known period at .05 and .01, unknown period at .05 and .01")
    click.echo("  phi amplitude   known .05 known .01 unkn. .05 unkn. .01")
    for row in order_rows(draws):
        click.echo(row)
    if scale:
        click.echo("\none million trajectories, two million segments")
        for row in scale_rows():
            click.echo(row)


if __name__ == "__main__":
    main()
