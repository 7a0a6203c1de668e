"""Submission cohorts: which groups may be compared, because the fate of everything submitted with them is known.

Two calendar windows hold different cohorts (a window said -.56 where the cohorts said -.43, and +.02 where nothing was
evicted), so trained is compared with generated among groups submitted at the same step, and only in cohorts of which
every group is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import duckdb
import numpy as np

from verl_audit.measure.stats import Array
from verl_audit.measure.trace_groups import EVICTIONS, FATE_NAMES, MIXED, Codes, Groups, Mask

AGE_QUANTILE = 0.995
"""Cohorts younger than this quantile of the age at decision are taken as open where the trace has no in_flight rows:
at most 1 group in 200 of a cohort just old enough is then still unseen."""
BLOCK_GROUPS = 32
"""Groups in a block of neighbouring cohorts: with 1 in 10 trained, 3 % of blocks (.9^32) have no trained group."""

BLIND = "only trained trajectories were recorded: what was evicted is not known"

BASES: Mapping[str, tuple[str, str]] = {
    "submit_step": ("submit_step", "decided_step"),
    "submit_version": ("submit_version", "train_version"),
    "first_version": ("first_version", "train_version"),
}
"""Clock of submission and of decision, best first. Versions are weaker: those evicted have no training version, and
the version of the first token is later than submission for groups that waited."""


@dataclass(frozen=True)
class Cohorts:
    """Which groups are compared and in which cohort each is (arrays over G groups)."""

    basis: str
    """Clock of submission that was used; empty: none known, the whole run is one cohort."""
    weaker: str
    """Why the comparison is weaker than by submission step; empty when it is not."""
    blind: str
    """Why trained and generated cannot be compared at all; empty when they can."""
    resolved: Mask
    """Groups in cohorts of which all groups are decided."""
    block: Codes
    """Block of neighbouring cohorts, for the groups that are resolved; -1 for the others."""
    total: int
    open: int
    """Cohorts left out for a group in flight, or of unknown fate."""
    edge: int
    """Cohorts left out at the ends of the record: submitted before it began, or too young at its end."""
    unplaced: int
    """Groups left out because their own submission is unknown."""


def cohorts(groups: Groups, *, outstanding: int | None = None, evicted_recorded: bool = True) -> Cohorts:
    """Cohorts by submission step, by version where steps are unknown, else the whole run as one.

    `outstanding`: groups that were submitted and not decided when the record ended, as counted by the buffer; where it
    is unknown and no in_flight row was written, the youngest cohorts are left out. `evicted_recorded`: whether the
    writer would have left a row for an evicted group; a dump of training batches does not.
    """
    blind = "" if evicted_recorded or (groups.trained_rows < groups.rows).any() else BLIND
    basis = next((b for b in BASES if np.isfinite(getattr(groups, b)).mean() > 0.5), "") if len(groups) else ""
    if not basis:
        return _one_cohort(groups, blind)
    submitted, decided = (np.asarray(getattr(groups, column)) for column in BASES[basis])
    known = np.isfinite(submitted)
    cohort = np.full(len(groups), -1)
    clock, cohort[known] = np.unique(submitted[known], return_inverse=True)
    is_open = np.bincount(cohort[known], groups.open[known], len(clock)) > 0
    edge = (
        _edges(clock, submitted, decided, closed=_closed(groups, outstanding), left=basis == "submit_step") & ~is_open
    )
    resolved = known & ~(is_open | edge)[cohort]
    return Cohorts(
        basis,
        "" if basis == "submit_step" else f"submission steps are unknown: cohorts by {basis.replace('_', ' ')}",
        blind,
        resolved,
        _blocks(cohort, resolved),
        len(clock),
        int(is_open.sum()),
        int(edge.sum()),
        int((~known).sum()),
    )


def leave_out(where: Cohorts, groups: Groups, reasons: Collection[str]) -> Cohorts:
    """The cohorts without the groups that these reasons alone evicted.

    What a reward filter takes out is intended; without it, the rest shows what else selected.
    """
    bits = sum(1 << EVICTIONS.index(r) for r in set(reasons))
    only = (groups.reasons != 0) & (groups.reasons & ~bits == 0) & (groups.trained_rows == 0)
    return replace(where, resolved=where.resolved & ~only, block=np.where(only, -1, where.block))


def evicted_recorded(con: duckdb.DuckDBPyConnection, run: str) -> bool:
    """Whether every source of trajectories can tell a fate other than trained, by the store's `trace_sources`."""
    row = con.execute(
        """SELECT coalesce(bool_and(fates IS NULL OR len(list_filter(fates, lambda f: f <> 'trained')) > 0), true)
        FROM trace_sources WHERE run = ? AND "table" = 'trajectories'""",
        [run],
    ).fetchone()
    return bool(row and row[0])


def outstanding(con: duckdb.DuckDBPyConnection, run: str) -> int | None:
    """Groups pending, running, finished or failed at the last count of the buffer; None where it was not counted."""
    row = con.execute(
        "SELECT coalesce(pending, 0) + coalesce(running, 0) + coalesce(finished, 0) + coalesce(failed, 0) "
        "FROM buffer_depth WHERE run = ? AND coalesce(pending, running, finished, failed) IS NOT NULL "
        "ORDER BY step DESC, t DESC NULLS LAST LIMIT 1",
        [run],
    ).fetchone()
    return None if row is None else int(row[0])


def _one_cohort(groups: Groups, blind: str) -> Cohorts:
    decided = ~groups.open
    return Cohorts(
        "",
        "neither submission steps nor versions are known: the run is one cohort, its last groups may be missing",
        blind,
        decided,
        np.where(decided, 0, -1),
        int(len(groups) > 0),
        0,
        0,
        0,
    )


def _closed(groups: Groups, left: int | None) -> bool:
    """Whether every group that was submitted has a row."""
    in_flight = int(((groups.fate == FATE_NAMES.index("in_flight")) | (groups.fate == MIXED) & groups.open).sum())
    return (left is None or left <= in_flight) if in_flight else left == 0


def _edges(clock: Array, submitted: Array, decided: Array, *, closed: bool, left: bool) -> Mask:
    """Cohorts submitted before the record began, or (unless `closed`) younger at its end than decisions usually are."""
    age = decided - submitted
    age = age[np.isfinite(age)]
    if not len(age):
        return np.zeros(len(clock), dtype=bool)
    early = clock < np.nanmin(decided) if left else np.zeros(len(clock), dtype=bool)
    young = clock > np.nanmax(decided) - np.quantile(age, AGE_QUANTILE, method="higher")
    return early if closed else early | young


def _blocks(cohort: Codes, resolved: Mask) -> Codes:
    """Neighbouring cohorts joined until a block holds about `BLOCK_GROUPS` groups."""
    block = np.full(len(cohort), -1)
    if not resolved.any():
        return block
    sizes = np.bincount(cohort[resolved])
    before = np.cumsum(sizes) - sizes
    block[resolved] = np.unique((before // BLOCK_GROUPS)[cohort[resolved]], return_inverse=True)[1]
    return block
