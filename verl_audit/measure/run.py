"""One run as the measures see it: its canonical series, facts, and which signals are present, inert or corrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
from numpy.typing import NDArray

from verl_audit.measure.model import Measure, MeasureDef, Scalar, catalog
from verl_audit.measure.stats import Array, Estimate, ar1_mean

BASELINE = "baseline"
"""Stands among the wanted signals of a measure that needs a baseline run."""
TRACES = "traces"
"""Stands among the wanted signals of a measure that needs per-trajectory traces."""


@dataclass(frozen=True)
class Series:
    """A signal over steps, finite values only, mean over labels; sorted by step."""

    step: Array
    value: Array

    def at(self, keep: Callable[[Array], NDArray[np.bool_]]) -> Series:
        """The points whose steps `keep` selects."""
        mask = keep(self.step)
        return Series(self.step[mask], self.value[mask])

    def __len__(self) -> int:
        """Number of points."""
        return len(self.step)


EMPTY = Series(np.array([]), np.array([]))


def aligned(one: Series, other: Series) -> tuple[Array, Array, Array]:
    """Steps that both hold, with the values of each at them; of a step that stands twice the first."""
    steps, at, beside = np.intersect1d(one.step, other.step, return_indices=True)
    return steps, one.value[at], other.value[beside]


@dataclass(frozen=True)
class RunData:
    """Everything the measures know of one run."""

    name: str
    series: Mapping[str, Series]
    labels: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    nonfinite: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Signal to the steps at which it was NaN, infinite, or a null that stands for one."""
    inert: Mapping[str, str] = field(default_factory=dict)
    corrupt: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Scalar | None] = field(default_factory=dict)
    sampled: frozenset[str] = frozenset()
    """Signals with points from a source that holds a selection of the rows."""

    def get(self, *names: str) -> Series:
        """The first of these signals that has points, else an empty series."""
        return next((self.series[n] for n in names if n in self.series and len(self.series[n])), EMPTY)

    def has(self, name: str) -> bool:
        """Whether the signal has finite points."""
        return len(self.get(name)) > 0

    def number(self, fact: str) -> float | None:
        """A numeric fact, or None when unknown."""
        value = self.facts.get(fact)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def blind(self, signal: str) -> bool:
        """Whether the signal is logged but cannot answer here; a lag that is 0 by construction does answer."""
        return signal in self.inert and not signal.startswith(("lag_", "span_"))

    def picked(self, *names: str) -> bool:
        """Whether `get` of these signals gives a selection of what was logged."""
        return next((n in self.sampled for n in names if self.has(n)), False)

    @property
    def all_picked(self) -> bool:
        """Whether every series is a selection, so that nothing tells how many steps there were."""
        return bool(self.sampled) and self.sampled >= {name for name, s in self.series.items() if len(s)}

    @property
    def train_steps(self) -> Array:
        """Steps at which the trainer logged anything of its own, step 0 left out (validation only)."""
        own = [s.step for name, s in self.series.items() if not name.startswith("validation")]
        steps = np.unique(np.concatenate(own)) if own else np.array([])
        # verl logs validation alone at step 0; others count from 0, and so does the version of a fully_async row
        from_1 = self.facts.get("framework") in (None, "verl") and self.facts.get("trainer") != "fully_async"
        return steps[steps > 0] if from_1 else steps


def load(con: duckdb.DuckDBPyConnection, run: str, facts: Mapping[str, Scalar | None]) -> RunData:
    """Read one run's signals out of the store."""
    names = con.execute(f"SELECT signal, label FROM ({_NAMES}) ORDER BY n", [run]).fetchall()
    # numbers in place of names, since millions of rows may pass
    columns = con.execute(
        f"SELECT n, step::DOUBLE AS step, value FROM signals JOIN ({_NAMES}) USING (signal, label) WHERE run = ? "
        "ORDER BY n, step",
        [run, run],
    ).fetchnumpy()
    number, step, value = (np.asarray(columns[name], dtype=float) for name in ("n", "step", "value"))
    edges = np.searchsorted(number, np.arange(len(names) + 1))
    labels: dict[str, dict[str, Series]] = {}
    nonfinite: dict[str, tuple[int, ...]] = {}
    for (name, label), start, stop in zip(names, edges[:-1], edges[1:], strict=True):
        at, seen = step[start:stop], value[start:stop]
        ok = np.isfinite(seen)
        labels.setdefault(name, {})[label] = Series(at[ok], seen[ok])
        bad = {*nonfinite.get(name, ()), *(int(s) for s in at[~ok])}
        nonfinite[name] = tuple(sorted(bad))
    series = {name: _mean_over_labels(list(parts.values())) for name, parts in labels.items()}
    standing = con.execute(
        "SELECT signal, min(inert_because), min(corrupt_because) FROM key_map "
        "WHERE run = ? AND signal IS NOT NULL GROUP BY signal ORDER BY signal",
        [run],
    ).fetchall()
    inert = {s: why for s, why, _ in standing if why}
    corrupt = {s: why for s, _, why in standing if why and s not in series}
    return RunData(
        run, series, labels, {k: v for k, v in nonfinite.items() if v}, inert, corrupt, dict(facts), _sampled(con, run)
    )


def _sampled(con: duckdb.DuckDBPyConnection, run: str) -> frozenset[str]:
    """Signals of sampled sources, and zeros that were filled in beside them."""
    keys = con.execute(
        "SELECT DISTINCT key FROM metrics WHERE run = ? AND source_id IN "
        "(SELECT source_id FROM sources WHERE precision = 'sampled')",
        [run],
    ).fetchall()
    if not keys:
        return frozenset()
    rows = con.execute(
        "SELECT DISTINCT signal FROM signals WHERE run = ? AND (derived OR key IN (SELECT unnest(?)))",
        [run, [key for (key,) in keys]],
    ).fetchall()
    return frozenset(signal for (signal,) in rows)


_NAMES = """
SELECT signal, label, row_number() OVER (ORDER BY signal, label) - 1 AS n
FROM (SELECT DISTINCT signal, label FROM signals WHERE run = ?)
"""


def _mean_over_labels(parts: Sequence[Series]) -> Series:
    if len(parts) == 1:
        return parts[0]
    step, value = np.concatenate([p.step for p in parts]), np.concatenate([p.value for p in parts])
    steps, where = np.unique(step, return_inverse=True)
    return Series(
        steps, np.bincount(where, value, len(steps)) / np.maximum(np.bincount(where, minlength=len(steps)), 1)
    )


def grown(total: Array) -> float:
    """What a cumulative count reached in all; a fall is a restart that begins at 0 again."""
    if not len(total):
        return 0.0
    steps = np.diff(total)
    return float(total[0] + np.where(steps < 0, total[1:], steps).sum())


def measured(
    name: str,
    found: Estimate | float | bool | None,
    *,
    n: int | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Measure:
    """A catalogued measure from an estimate or a plain value; None becomes a measure without value or reason yet."""
    unit = catalog()[name].unit
    if isinstance(found, Estimate):
        return Measure(name, found.value, unit, found.low, found.high, found.n)
    return Measure(name, found, unit, low, high, n)


def mean_of(values: Array) -> Estimate | float | None:
    """Mean with an AR(1) interval, or the plain mean when too few points allow one; None when there are none."""
    estimate = ar1_mean(values)
    return estimate if estimate is not None else float(values.mean()) if len(values) else None


def mean_measure(name: str, values: Array) -> Measure:
    """`mean_of` as a measure that also says how many points it rests on."""
    return measured(name, mean_of(values), n=len(values))


def without_value(definition: MeasureDef, run: RunData, *, has_baseline: bool, why: str = "") -> Measure:
    """The measure as not computed, with the signals that would have given it a value."""
    wants = [alternatives[0] for alternatives in definition.needs if not any(_usable(run, s) for s in alternatives)]
    if definition.baseline and not has_baseline:
        wants.append(BASELINE)
    if definition.traces:
        wants.append(TRACES)
    reasons = [why] if why else [_why(run, w) for w in wants]
    return Measure(
        definition.name,
        None,
        definition.unit,
        missing="; ".join(dict.fromkeys(reasons)) or "not computable from what was logged",
        wants=tuple(wants),
    )


SELECTION = (
    "the export holds only sampled points; export the history instead (run.scan_history), or give the .wandb file"
)
"""Why a measure that needs every step has no value."""


def _picked(definition: MeasureDef, run: RunData) -> bool:
    """Whether a selection of the steps is all there is of the signals it needs."""
    return any(run.picked(*alternatives) for alternatives in definition.needs) if definition.needs else run.all_picked


def _usable(run: RunData, signal: str) -> bool:
    return run.has(signal) and not run.blind(signal)


def _why(run: RunData, signal: str) -> str:
    if signal == BASELINE:
        return "no baseline run was given"
    if signal == TRACES:
        return "no per-trajectory trace tells it"
    if signal in run.corrupt:
        return f"{signal}: {run.corrupt[signal]}"
    if run.blind(signal):
        return f"{signal} is inert: {run.inert[signal]}"
    return f"{signal} was not logged"


def complete(found: Iterable[Measure], run: RunData, *, has_baseline: bool) -> dict[str, Measure]:
    """All catalogued measures: those found, and the rest with the reason why they have no value."""
    result = {m.name: m for m in found}
    for name, definition in catalog().items():
        have = result.get(name)
        if definition.every_step and _picked(definition, run):
            low = have.number() if have is not None and name == "steps_logged" else None
            result[name] = Measure(name, None, definition.unit, low=low, missing=SELECTION)
        elif definition.unit == "fact":
            value = run.facts.get(name)
            result[name] = Measure(
                name,
                value,
                "fact",
                missing="" if value is not None else "not known from configuration or keys",
            )
        elif have is None or (have.value is None and not have.missing):
            blank = without_value(definition, run, has_baseline=has_baseline)
            bounds = {} if have is None else {"low": have.low, "high": have.high, "n": have.n}
            result[name] = Measure(name, None, blank.unit, missing=blank.missing, wants=blank.wants, **bounds)  # type: ignore[arg-type]
    return {name: result[name] for name in catalog()}
