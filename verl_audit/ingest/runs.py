"""Which sources belong to one run.

A unit is one process life in one source (a console may hold several runs one after another). Units are one run
when their values agree, when they name the same run, or, failing both, when a directory leaves no other choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verl_audit.ingest.model import Identity, Parsed

MIN_SHARED = 10
"""Fewest common (key, step) points on which two sources are compared: runs from one seed start alike."""
SAME, ROUNDED = 2e-6, 6e-4
"""Relative tolerance between float32 and float64 copies; absolute one for sources that print three decimals."""

_NAMELESS = {"jsonl", "wandb_export", "wandb_parquet"}
"""Formats that do not name their run."""

Unit = tuple[int, int]
"""(index of the Parsed, segment in it)."""


@dataclass(frozen=True)
class Run:
    """One run: its name, the units it consists of, and why they were put together."""

    name: str
    units: tuple[Unit, ...]
    because: tuple[str, ...] = ()

    @property
    def sources(self) -> list[int]:
        """Indices of the sources it has units in, in order."""
        return sorted({index for index, _ in self.units})


Points = Mapping[int, Mapping[tuple[str, int], float]]
"""Per segment of a source the values that can tell runs apart, by key and step."""
Prints = Callable[[int], Points]
"""The points of a source, given by its index; each source is gone through once, and only when asked for."""


class _Groups:
    """Union-find over units that remembers why."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.parent = {unit: unit for unit in units}
        self.why: dict[Unit, list[str]] = {}

    def find(self, unit: Unit) -> Unit:
        while self.parent[unit] != unit:
            unit = self.parent[unit]
        return unit

    def join(self, a: Unit, b: Unit, why: str) -> None:
        first, second = sorted((self.find(a), self.find(b)))
        if first == second:
            return
        self.parent[second] = first
        self.why.setdefault(first, []).extend([*self.why.pop(second, []), why])

    def members(self) -> dict[Unit, list[Unit]]:
        groups: dict[Unit, list[Unit]] = {}
        for unit in sorted(self.parent):
            groups.setdefault(self.find(unit), []).append(unit)
        return groups


def group_runs(parsed: Sequence[Parsed], root: Path) -> tuple[Run, ...]:
    """Put sources together into runs, in order of first appearance; names are unique."""
    units = [(i, s) for i, p in enumerate(parsed) for s in range(_segments(p))]
    groups, prints = _Groups(units), cache(lambda index: fingerprints(parsed[index]))
    _join_by_file(groups, parsed, units)
    _join_by_content(groups, parsed, units, prints)
    _join_by_identity(groups, parsed, units, prints)
    _join_lone_segments(groups, parsed, units)
    _join_named_traces(groups, parsed)
    _join_by_directory(groups, parsed, root, prints)
    named = [
        (_name(members, parsed, root), tuple(members), groups.why.get(key, []))
        for key, members in groups.members().items()
    ]
    return tuple(Run(name, members, tuple(why)) for name, members, why in _unique(named))


def _segments(parsed: Parsed) -> int:
    return parsed.metrics.lives


def fingerprints(parsed: Parsed) -> Points:
    """Per segment the values that can tell runs apart: finite, not whole numbers, last one per (key, step)."""
    buffer = parsed.metrics
    points: dict[int, dict[tuple[str, int], float]] = {}
    for key, segment, step, value in zip(buffer.key_id, buffer.segment, buffer.step, buffer.value, strict=True):
        if math.isfinite(value) and value != round(value):
            points.setdefault(segment, {})[buffer.keys[key], step] = value
    return points


def _join_by_content(groups: _Groups, parsed: Sequence[Parsed], units: Sequence[Unit], prints: Prints) -> None:
    if sum(len(p.metrics) > 0 for p in parsed) < 2:
        return  # nothing to compare with, and the values of a long run are many
    rounded = {i: "rounded" in p.metrics.kinds for i, p in enumerate(parsed)}
    bearing = [unit for unit in units if unit[1] in prints(unit[0])]
    for position, a in enumerate(bearing):
        for b in bearing[position + 1 :]:
            if a[0] != b[0] and _agree(_points(prints, a), _points(prints, b), rounded[a[0]] or rounded[b[0]]):
                groups.join(a, b, f"{parsed[a[0]].path.name} and {parsed[b[0]].path.name} hold the same values")


def _points(prints: Prints, unit: Unit) -> Mapping[tuple[str, int], float]:
    return prints(unit[0]).get(unit[1], {})


def _agree(a: Mapping[tuple[str, int], float], b: Mapping[tuple[str, int], float], rounded: bool) -> bool:
    shared = a.keys() & b.keys()
    if len(shared) < MIN_SHARED:
        return False
    near = sum(math.isclose(a[p], b[p], rel_tol=SAME, abs_tol=ROUNDED if rounded else 1e-12) for p in shared)
    return near >= 0.9 * len(shared)


def _strong(identity: Identity) -> tuple[str, ...] | None:
    """What names a run beyond doubt: the tracker's run id, or project and experiment."""
    if identity.project and identity.experiment:
        return (identity.project, identity.experiment)
    return ("id", identity.run_id) if identity.run_id else None


def _join_by_identity(groups: _Groups, parsed: Sequence[Parsed], units: Sequence[Unit], prints: Prints) -> None:
    seen: dict[tuple[str, ...], Unit] = {}
    for unit in units:
        source = parsed[unit[0]]
        if _segments(source) > 1 and source.format != "wandb":
            continue  # one announced name, several lives: only content can say whose they are
        by_id = ("id", source.identity.run_id) if source.identity.run_id else None
        for name in dict.fromkeys((_strong(source.identity), by_id)):
            if name is None:
                continue
            if name in seen:
                doubt = _doubt(parsed, seen[name], unit, prints)
                groups.join(seen[name], unit, f"both are named {'/'.join(name)}{doubt}")
            else:
                seen[name] = unit


def _doubt(parsed: Sequence[Parsed], a: Unit, b: Unit, prints: Prints) -> str:
    """What to add when two trackers of one name hold other values: one of them may have kept another execution."""
    trackers = [parsed[index] for index, _ in (a, b)]
    if trackers[0].format == trackers[1].format or not all(len(p.metrics) for p in trackers):
        return ""
    ours, theirs = (_points(prints, unit) for unit in (a, b))
    if len(ours.keys() & theirs.keys()) < MIN_SHARED or _agree(ours, theirs, rounded=True):
        return ""
    return ", though their values differ (a second execution under one name?)"


def _join_lone_segments(groups: _Groups, parsed: Sequence[Parsed], units: Sequence[Unit]) -> None:
    """A later process life that matches no other source continues the one before it in the same file."""
    sizes = {key: {u[0] for u in members} for key, members in groups.members().items()}
    for index, segment in units:
        if segment and len(sizes.get(groups.find((index, segment)), ())) == 1:
            groups.join(
                (index, segment - 1),
                (index, segment),
                f"{parsed[index].path.name}: step falls, a new process life",
            )
    first = {index for index, segment in units if segment and groups.find((index, 0)) == groups.find((index, segment))}
    for index in sorted(first):
        _join_named(groups, parsed, (index, 0))


def _join_named(groups: _Groups, parsed: Sequence[Parsed], unit: Unit) -> None:
    name = _strong(parsed[unit[0]].identity)
    for other in list(groups.parent):
        if name and other[0] != unit[0] and _strong(parsed[other[0]].identity) == name:
            groups.join(unit, other, f"both are named {'/'.join(name)}")


def _join_named_traces(groups: _Groups, parsed: Sequence[Parsed]) -> None:
    """A trace that names its run belongs to the one run of that name, wherever it lies."""
    for index, trace in enumerate(parsed):
        name = trace.identity.experiment
        if not trace.traces or name is None:
            continue
        same = {
            groups.find(unit)
            for unit in groups.parent
            if len(parsed[unit[0]].metrics) and parsed[unit[0]].identity.experiment == name
        }
        if len(same) == 1:
            groups.join(same.pop(), (index, 0), f"the trace in {trace.path.name} names its run {name}")


def _one_of_several(trace: Parsed, parsed: Sequence[Parsed]) -> bool:
    """Whether a directory holds traces of several runs, so that it cannot tell whose each is."""
    return bool(trace.traces) and sum(bool(p.traces) and p.path == trace.path for p in parsed) > 1


def _join_by_file(groups: _Groups, parsed: Sequence[Parsed], units: Sequence[Unit]) -> None:
    """A .wandb file, the console text inside it and the output.log beside it are one run."""
    homes: dict[Path, Unit] = {}
    for index, segment in units:
        path = parsed[index].path
        if parsed[index].format in ("wandb", "wandb_output"):
            home = path.parent
        elif path.name == "output.log" and path.parent.name == "files":
            home = path.parent.parent
        else:
            continue
        if home in homes:
            groups.join(homes[home], (index, segment), f"{path.name} lies in the directory of one wandb run")
        elif path.parent == home and path.parent.name.startswith(("run-", "offline-run-")):
            homes[home] = (index, segment)
        elif path.parent == home:
            _join_same_path(groups, parsed, (index, segment))


def _join_same_path(groups: _Groups, parsed: Sequence[Parsed], unit: Unit) -> None:
    for other in list(groups.parent):
        if other < unit and parsed[other[0]].path == parsed[unit[0]].path:
            groups.join(other, unit, f"{parsed[unit[0]].path.name} holds both")


def _join_by_directory(groups: _Groups, parsed: Sequence[Parsed], root: Path, prints: Prints) -> None:
    _attach(groups, parsed, root)
    for key, members in groups.members().items():
        sources = [parsed[i] for i, _ in members]
        if all(p.format in _NAMELESS and _strong(p.identity) is None for p in sources):
            _join_side_file(groups, parsed, key, root, prints)
    _attach(groups, parsed, root)  # where a side file looked like a second run


def _attach(groups: _Groups, parsed: Sequence[Parsed], root: Path) -> None:
    """Attach what carries no metrics to the one run near it, unless it names another run."""
    for key, members in groups.members().items():
        if any(len(parsed[i].metrics) or _one_of_several(parsed[i], parsed) for i, _ in members):
            continue
        target = _nearest(groups, parsed, members[0], root)
        if target is not None and not _other_name(members, groups.members()[target], parsed):
            groups.join(key, target, f"{parsed[members[0][0]].path.name} lies with no other run")


def _join_side_file(groups: _Groups, parsed: Sequence[Parsed], unit: Unit, root: Path, prints: Prints) -> None:
    """Rows in a format that names no run belong to the only run they lie with, if nothing contradicts."""
    target = _nearest(groups, parsed, unit, root)
    if target is None:
        return
    members = groups.members()
    sides = [sorted({i for i, _ in members[groups.find(u)]}) for u in (unit, target)]
    ours, theirs = ([parsed[i] for i in side] for side in sides)
    apart = {p.format for p in ours} & {p.format for p in theirs} or _counted(theirs)
    if any(len(p.metrics) for p in theirs) and not apart and not _share_points(sides, prints):
        groups.join(unit, target, f"{parsed[unit[0]].path.name} lies with no other run")


def _other_name(a: Sequence[Unit], b: Sequence[Unit], parsed: Sequence[Parsed]) -> bool:
    """Whether both sides name a run and not the same one; a JSONL is only named by its path, which may be moved."""
    ours, theirs = (
        {_strong(parsed[i].identity) for i, _ in side if parsed[i].format != "verl_jsonl"} - {None} for side in (a, b)
    )
    return bool(ours) and bool(theirs) and not ours & theirs


def _nearest(groups: _Groups, parsed: Sequence[Parsed], unit: Unit, root: Path) -> Unit | None:
    """The one other run below the closest directory above `unit` that has any."""
    mine = groups.find(unit)
    for directory in [parsed[unit[0]].path.parent, *parsed[unit[0]].path.parents]:
        others = {groups.find(u) for u in groups.parent if _below(parsed[u[0]].path, directory)} - {mine}
        bearing = {o for o in others if any(len(parsed[i].metrics) for i, _ in groups.members()[o])}
        if bearing or others:
            chosen = bearing or others
            return min(chosen) if len(chosen) == 1 else None
        if directory == root:
            return None
    return None


def _below(path: Path, directory: Path) -> bool:
    return directory in path.parents


def _counted(sources: Sequence[Parsed]) -> bool:
    """Whether steps are the order of printed lines: on no axis another source could share."""
    return any(p.format == "dict_console" and p.step_kind == "counter" and len(p.metrics) for p in sources)


def _share_points(sides: Sequence[Sequence[int]], prints: Prints) -> bool:
    """Whether two sides hold points in common; had they agreed, they would be one run already."""
    ours, theirs = ({p for i in side for segment in prints(i).values() for p in segment} for side in sides)
    return len(ours & theirs) >= MIN_SHARED


def _name(members: Sequence[Unit], parsed: Sequence[Parsed], root: Path) -> str:
    sources = [parsed[i] for i, _ in members]
    told = [p for p in sources if p.identity.experiment]
    logs = [p for p in told if not p.traces] or told  # a trace may call its run otherwise
    exact = [p for p in logs if p.format != "verl_console"] or logs
    named = [p.identity.experiment for p in exact if p.identity.experiment]
    if named:
        return max(sorted(set(named)), key=named.count)
    path = next((p.path for p in sources if len(p.metrics)), sources[0].path)
    directory = path.parent if path != root else path
    return path.stem if root in {directory, path} else directory.name


def _unique(
    named: Sequence[tuple[str, tuple[Unit, ...], list[str]]],
) -> list[tuple[str, tuple[Unit, ...], list[str]]]:
    counts: dict[str, int] = {}
    result = []
    for name, members, why in named:
        counts[name] = counts.get(name, 0) + 1
        result.append((name if counts[name] == 1 else f"{name}-{counts[name]}", members, why))
    return result
