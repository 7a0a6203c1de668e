"""Everything the traces of one run tell: what the store's tables hold becomes measures and the tables of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import duckdb
import numpy as np
import pyarrow as pa

from verl_audit.measure.cohorts import Cohorts, cohorts, evicted_recorded, leave_out, outstanding
from verl_audit.measure.decompose.bracket import Bracket, Growth, growth, mismatch_bracket, verdict_of
from verl_audit.measure.decompose.damage import Damage, damage
from verl_audit.measure.decompose.identity import Identity, gap_end, identify
from verl_audit.measure.decompose.per_lag import LagRow, per_lag
from verl_audit.measure.decompose.shapley import Split, shapley
from verl_audit.measure.decompose.tables import Refused, numbers
from verl_audit.measure.decompose.tails import Tails, disagreement, tails
from verl_audit.measure.eviction import ADMISSIBLE
from verl_audit.measure.ipw import GeneratedReward, generated_reward
from verl_audit.measure.ledger import Expected, Ledger, ledger, read_depth
from verl_audit.measure.model import Measure, Scalar, catalog
from verl_audit.measure.phase import phase, read_series
from verl_audit.measure.reasons import ReasonPart, parts_by_reason
from verl_audit.measure.replicas import Delivery, Replicas, delivery, replicas
from verl_audit.measure.stats import Estimate, fraction
from verl_audit.measure.survival import (
    Survival,
    evicted_share,
    evicted_trajectories,
    length_bias,
    prompt_age,
    reward_bias,
    survival_by_difficulty,
    survival_by_length,
    truncation,
    truncation_point,
)
from verl_audit.measure.trace_groups import FATE_NAMES, Groups, group_up, read_rows
from verl_audit.measure.trace_lag import LagKind, lag_kinds, queue_share

LOST = ("stale", "failed", "aborted")
"""Fates that take signal away; filtered groups carry none, surplus ones were not needed."""
LEFT_OUT = frozenset({"filtered", "surplus"})
SHARES = {"stale_groups_share": "stale", "filtered_share": "filtered", "failed_share": "failed"}
LAGS = {"lag_newest_mean": "newest", "lag_oldest_mean": "oldest", "lag_mean": "token_mean", "lag_updates": "updates"}
"""Measures that traces know exactly, to the kind of lag."""
SATISFIES = {
    "evicted_lengths": ("trace_length_shift_within",),
    "replica_versions": ("trace_replicas_behind", "trace_sync_behind"),
    "stale_groups": ("stale_groups_share",),
    "failed_groups": ("failed_share",),
    "groups_per_step": ("evicted_share",),
    "lag_newest_mean": ("lag_newest_mean",),
    "lag_oldest_mean": ("lag_oldest_mean",),
    "gap_logp_abs": ("gap_logp_mean",),
    "gap_at_lag0": ("gap_logp_lag0", "mismatch_share"),
    "ess": ("off_policy_loss",),
    "clip_share": ("off_policy_loss",),
}
"""Needed signal to the measures, any of which says that the traces hold it."""
COMPONENTS = {"M": "mismatch", "S": "staleness", "U": "update"}
GAUGES = {"clip": "clip", "neg_log_ess": "ess", "chi2": "chi2", "second": "second"}


@dataclass(frozen=True)
class Tokens:
    """What the log-probs of traced tokens tell."""

    identity: Identity
    lags: tuple[LagRow, ...]
    splits: Mapping[str, Split]
    bracket: Bracket | Refused
    growth: Growth | Refused
    tails: Tails | Refused
    damage: Damage | Refused
    later_over_first: float | None
    """Mean squared log-ratio after the first step over that of the first step."""


@dataclass(frozen=True)
class Traced:
    """What the traces of one run tell."""

    rows: int
    ledger: Ledger
    where: Cohorts
    survival: tuple[Survival, ...]
    reasons: tuple[ReasonPart, ...]
    lags: Mapping[str, LagKind]
    replicas: Replicas
    tokens: Tokens | None
    """None where no log-probs were recorded."""
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @property
    def recorded(self) -> frozenset[str]:
        """Needed signals that these traces satisfy, by the names coverage uses."""
        return frozenset(name for name, measures in SATISFIES.items() if any(map(self._knows, measures)))

    def _knows(self, name: str) -> bool:
        return name in self.measures and self.measures[name].value is not None


def read(
    con: duckdb.DuckDBPyConnection, run: str, facts: Mapping[str, Scalar | None], floor: float = 0.0
) -> Traced | None:
    """The traces of a run in the store; None when there are none.

    `floor`: off-policy loss of an on-policy baseline, (1 - ESS) / 2, which is nobody's damage.
    """
    data = read_rows(con, run)
    groups = group_up(data)
    if not len(groups.rows):
        return None
    rows = int(groups.rows.sum())
    where = cohorts(groups, outstanding=outstanding(con, run), evicted_recorded=evicted_recorded(con, run))
    book = ledger(data, groups, expected=Expected(group_size=_group_size(facts)), depth=read_depth(con, run))
    lags, engines, arrived = lag_kinds(con, run), replicas(con, run), delivery(con, run)
    tokens = _tokens(con, run, facts, floor)
    found = [
        *_selection(groups, where),
        *_reward(generated_reward(groups, where)),
        *_book(book),
        *_lag(lags),
        *_order(con, run),
        *_syncs(engines, arrived),
        *(_token_measures(tokens) if tokens else ()),
    ]
    survived = survival_by_length(groups, where), survival_by_difficulty(groups, where)
    known = {m.name: replace(m, level="traces", unit=catalog()[m.name].unit) for m in found if m.name in catalog()}
    return Traced(rows, book, where, survived, parts_by_reason(groups, where), lags, engines, tokens, known)


def _group_size(facts: Mapping[str, Scalar | None]) -> int | None:
    samples, groups = facts.get("samples_per_step"), facts.get("groups_per_step")
    if not isinstance(samples, int | float) or not isinstance(groups, int | float) or not groups:
        return None
    return round(samples / groups)


# -- selection ---------------------------------------------------------------------------------------------


def _selection(groups: Groups, where: Cohorts) -> Iterator[Measure]:
    """What the run trained on against what it generated."""
    length, reward = length_bias(groups, where), reward_bias(groups, where)
    cut = truncation(groups, where)
    yield from (length.total, length.within, length.composition, reward.total, reward.within)
    yield from (cut.trained, cut.evicted, cut.difference, truncation_point(groups, where))
    yield from (evicted_share(groups, where), evicted_trajectories(groups, where), *prompt_age(groups))
    yield from _shares(groups, where)
    yield from _loss_by_selection(groups, where)


def _shares(groups: Groups, where: Cohorts) -> Iterator[Measure]:
    """Shares of decided groups by fate, under the names the metrics use."""
    if where.blind:
        return
    decided = ~groups.open
    for name, fate in SHARES.items():
        yield _fraction(name, int((groups.fate == FATE_NAMES.index(fate))[decided].sum()), int(decided.sum()))
    lost = sum(int((groups.fate == FATE_NAMES.index(fate))[decided].sum()) for fate in LOST)
    share = _fraction("evicted_share", lost, int(decided.sum()))
    yield share
    value = share.number()
    yield Measure("reward_admissible", None if value is None else value <= ADMISSIBLE)


def _fraction(name: str, part: int, whole: int) -> Measure:
    found = fraction(part, whole)
    return Measure(name, None) if found is None else Measure(name, found.value, "", found.low, found.high, found.n)


def _loss_by_selection(groups: Groups, where: Cohorts) -> Iterator[Measure]:
    """1 - exp(min(ln length ratio, 0)) among groups that were lost or trained, within cohorts."""
    shift = length_bias(groups, leave_out(where, groups, LEFT_OUT)).within
    yield replace(shift, name="trace_kept_length_shift")
    value = shift.number()
    if value is None or shift.low is None or shift.high is None:
        yield Measure("damage_eviction", None, missing=shift.missing)
        return
    lost, worst, least = (1 - math.exp(min(x, 0.0)) for x in (value, shift.low, shift.high))
    yield Measure("damage_eviction", lost, "", least, worst, shift.n)


def _reward(found: GeneratedReward) -> Iterator[Measure]:
    yield from (found.trained, found.generated, found.weighted, found.ess, found.lost)


def _book(book: Ledger) -> Iterator[Measure]:
    yield from (book.lost_groups, book.residual_trajectories, book.undelivered, book.duplicates)


# -- lag, order, sync --------------------------------------------------------------------------------------


def _lag(kinds: Mapping[str, LagKind]) -> Iterator[Measure]:
    for name, kind in LAGS.items():
        mean = kinds[kind].mean
        if mean.value is not None:
            yield replace(mean, name=name)
    yield queue_share(kinds)


def _order(con: duckdb.DuckDBPyConnection, run: str) -> Iterator[Measure]:
    found = phase(*read_series(con, run))
    yield from (found.p, found.amplitude, found.period)


def _syncs(engines: Replicas, arrived: Delivery) -> Iterator[Measure]:
    yield from (engines.behind, engines.frozen, engines.worst_slope, arrived.delivered, arrived.partial)
    yield from (arrived.undelivered, arrived.behind, arrived.unchanged, arrived.empty)


# -- tokens ------------------------------------------------------------------------------------------------


def _tokens(
    con: duckdb.DuckDBPyConnection, run: str, facts: Mapping[str, Scalar | None], floor: float
) -> Tokens | None:
    cells, strata, subsets, histogram = (_table(con, f"token_{name}", run) for name in PARTS)
    sets = _sets(con, run)
    if not len(cells) or len(sets) < 2:
        return None
    end, k = gap_end(sets), _updates(con, run, facts)
    tail = tails(cells, histogram)
    heavy = isinstance(tail, Tails) and tail.dominate
    bracket: Bracket | Refused = Refused("the recorded log-probs hold no gap to the rollout engine")
    grown: Growth | Refused = Refused("the recorded log-probs hold no gap to the rollout engine")
    if end is not None:
        count = _trajectories(con, run)
        bracket = mismatch_bracket(strata, later=end, trajectories=count, updates_per_version=k, heavy_tailed=heavy)
        grown = growth(strata, later=end, updates_per_version=k)
    splits = shapley(subsets)
    lost = damage(
        subsets,
        mode="bypass" if facts.get("log_prob_mode") == "bypass" else "decoupled",
        bracket=bracket,
        tails=None if isinstance(tail, Refused) else tail,
        baseline_loss=floor,
        updates_per_version=k,
    )
    rows = per_lag(cells, strata, updates_per_version=k)
    parts = {} if isinstance(splits, Refused) else splits
    return Tokens(identify(sets), rows, parts, bracket, grown, tail, lost, _later_over_first(cells))


FIRST_TOKENS = 300
"""Fewest tokens of the first step from which its level is read (20 % error of a mean square)."""


def _later_over_first(cells: pa.Table) -> float | None:
    """The first step is sampled from the initial weights by every replica, so its gap is that of the numerics alone."""
    step, n, square = (numbers(cells, name) for name in ("step", "n", "sq_sum"))
    first = step == np.nanmin(step) if np.isfinite(step).any() else np.zeros(len(step), dtype=bool)
    early, late = float(n[first].sum()), float(n[~first].sum())
    if early < FIRST_TOKENS or late < FIRST_TOKENS:
        return None
    level = max(float(square[first].sum()) / early, TINY)
    return float(square[~first].sum()) / late / level


TINY = 1e-8
"""nats^2; a gap of 1e-4 nats, below what bf16 pairs show, counts as none."""


PARTS = ("cells", "strata", "subsets", "histogram")


def _table(con: duckdb.DuckDBPyConnection, name: str, run: str) -> pa.Table:
    rows = con.cursor().sql(f"SELECT * EXCLUDE (run) FROM {name} WHERE run = ? ORDER BY ALL", params=[run])
    return rows.to_arrow_table()


def _sets(con: duckdb.DuckDBPyConnection, run: str) -> tuple[str, ...]:
    """Log-prob columns that any source of the run holds."""
    rows = con.execute(
        "SELECT DISTINCT unnest(log_probs) AS name FROM trace_sources WHERE run = ? ORDER BY name", [run]
    ).fetchall()
    return tuple(name for (name,) in rows)


def _updates(con: duckdb.DuckDBPyConnection, run: str, facts: Mapping[str, Scalar | None]) -> int | None:
    """Optimizer updates per version, where all sources agree; else as configured."""
    rows = con.execute(
        "SELECT DISTINCT updates_per_version FROM trace_sources WHERE run = ? AND \"table\" = 'trajectories'", [run]
    ).fetchall()
    if len(rows) == 1 and rows[0][0] is not None:
        return int(rows[0][0])
    configured = facts.get("updates_per_version")
    return round(configured) if isinstance(configured, int | float) and len(rows) <= 1 else None


def _trajectories(con: duckdb.DuckDBPyConnection, run: str) -> int:
    row = con.execute("SELECT count(*) FROM token_trajectories WHERE run = ? AND n > 0", [run]).fetchone()
    return int(row[0]) if row else 0


def _token_measures(found: Tokens) -> Iterator[Measure]:
    yield from _gap(found)
    if isinstance(found.growth, Growth):
        for name, part in (
            ("gap_growth", found.growth.slope),
            ("gap_intercept", found.growth.intercept),
            ("gap_intercept_slow", found.growth.intercept_slow),
        ):
            yield _estimated(name, part)
    yield from _share_of_mismatch(found)
    yield from _split_measures(found.splits)
    if isinstance(found.tails, Tails):
        yield from _tail_measures(found.tails)
    yield from _damages(found.damage)
    yield Measure("gap_after_first_step", found.later_over_first)
    words = disagreement(found.splits)
    yield (
        Measure("gauges_name_different_causes", bool(words))
        if found.splits
        else Measure("gauges_name_different_causes", None)
    )


def _gap(found: Tokens) -> Iterator[Measure]:
    rows = [r for r in found.lags if r.tokens]
    tokens = sum(r.tokens for r in rows)
    if not tokens:
        return
    mean = sum(r.mean_abs.value * r.tokens for r in rows) / tokens
    yield Measure("gap_logp_mean", mean, n=tokens)
    fresh = [r for r in rows if r.lag == 0]
    if fresh and (found.identity.recorded[-1] != "theta_logp" or "prox_logp" in found.identity.recorded):
        yield _estimated("gap_logp_lag0", fresh[0].mean_abs)


def _share_of_mismatch(found: Tokens) -> Iterator[Measure]:
    part = found.splits["second"].part("M") if "second" in found.splits else None
    exact = part is not None and "S" in {p.component for p in found.splits["second"].parts}
    if exact and part is not None and part.share is not None:
        yield _estimated("mismatch_share", part.share)
        value, low, high = part.share.value, part.share.low, part.share.high
        yield Measure("mismatch_share_verdict", verdict_of(low, high) if math.isfinite(value) else None)
    elif isinstance(found.bracket, Bracket):
        b = found.bracket
        yield Measure("mismatch_share", b.value, "", b.low, b.high, b.trajectories)
        yield Measure("mismatch_share_verdict", b.verdict)
    else:
        yield Measure("mismatch_share", None, missing=found.bracket.reason)


def _split_measures(splits: Mapping[str, Split]) -> Iterator[Measure]:
    for functional, short in GAUGES.items():
        split = splits.get(functional)
        for part in split.parts if split else ():
            if part.component in COMPONENTS and part.share is not None:
                yield _estimated(f"{short}_share_{COMPONENTS[part.component]}", part.share)
    if "neg_log_ess" in splits:
        yield Measure("loss_concentration", _finite(splits["neg_log_ess"].concentration))


def _tail_measures(found: Tails) -> Iterator[Measure]:
    yield _estimated("tail_share", found.tail_share)
    for name, (low, high) in (("gap_p99", found.p99), ("gap_p999", found.p999)):
        yield Measure(name, (low + high) / 2, "", low, high)
    yield Measure("tail_square_share", _finite(found.far_square_share))
    yield Measure("tails_dominate", found.dominate)
    if found.expert_agreement is not None:
        yield _estimated("expert_agreement", found.expert_agreement)


def _damages(found: Damage | Refused) -> Iterator[Measure]:
    if isinstance(found, Refused):
        return
    yield _estimated("off_policy_loss", found.loss)
    for name, part in (("damage_mismatch", found.mismatch), ("damage_staleness", found.staleness)):
        if part is not None:
            yield _estimated(name, part)


def _estimated(name: str, found: Estimate) -> Measure:
    return Measure(name, _finite(found.value), "", _finite(found.low), _finite(found.high), found.n)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def overlay(found: Mapping[str, Measure], traced: Traced | None) -> dict[str, Measure]:
    """Measures with those that traces know in their place; a trace without a value leaves what metrics say.

    So does one that holds fewer evicted groups than the metrics counted: the writer missed some.
    """
    known: Mapping[str, Measure] = {} if traced is None else traced.measures
    result = dict(found)
    for name, m in known.items():
        have = result.get(name)
        if m.value is None and have is not None and have.value is not None:
            continue
        if have is None or not _counts_more(name, have, m):
            result[name] = m
    return result


def _counts_more(name: str, metrics: Measure, traces: Measure) -> bool:
    if name == "reward_admissible":
        return metrics.value is False
    counted = name in SHARES or name == "evicted_share"
    return counted and (metrics.number() or 0.0) > (traces.number() or 0.0)
