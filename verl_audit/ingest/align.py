"""Gives the lines of a console without steps the steps of another source that holds the same values.

TRL prints no step. Where a `trainer_state.json` or another log of the run was read as well, equal values tell
which step a line belongs to; lines between matched ones follow if the steps are evenly spaced.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from verl_audit.ingest.model import Identity, Parsed

_AXES = ("train/global_step", "training/global_step", "global_step")
_ENOUGH = 3
"""Fewest equal values, none of them whole, that place a line."""


def align(parsed: Sequence[Parsed]) -> None:
    """Replace counted steps of consoles by logged ones, where another source tells them all."""
    for console in parsed:
        if console.format != "dict_console" or console.step_kind != "counter":
            continue
        logged = (p for p in parsed if p is not console and (p.step_kind == "logged" or _axis(p)) and len(p.metrics))
        for source, steps in ((source, _steps(console, source)) for source in logged):
            if steps:
                _restep(console, steps, source)
                break


def _restep(console: Parsed, steps: Mapping[int, int], source: Parsed) -> None:
    console.counted_steps = console.metrics.step
    console.metrics.step = array("q", (steps[step] for step in console.metrics.step))
    console.step_kind = "logged"
    console.problems = [p for p in console.problems if p.kind != "steps_counted"]
    if console.identity == Identity():
        console.identity = source.identity
    console.note("steps_aligned", f"no step is printed: steps are those of equal values in {source.path.name}", 0)


def _steps(console: Parsed, source: Parsed) -> dict[int, int] | None:
    """The logged step of every counted one; None if some cannot be told."""
    digits = 4 if "rounded" in console.metrics.kinds else 6
    where: dict[tuple[str, float], set[int]] = {}
    for key, step, value in _telling(source, digits):
        where.setdefault((key, value), set()).add(step)
    votes: dict[int, Counter[int]] = {}
    asked: Counter[int] = Counter()
    known = {_plain(key) for key in source.metrics.keys}
    for key, step, value in _telling(console, digits):
        asked[step] += key in known
        votes.setdefault(step, Counter()).update(where.get((key, value), ()))
    best = {step: vote.most_common(1)[0] for step, vote in votes.items() if vote}
    matched = {s: to for s, (to, n) in sorted(best.items()) if n >= _ENOUGH and 2 * n >= asked[s]}
    return _complete(sorted(set(console.metrics.step)), matched)


def _telling(parsed: Parsed, digits: int) -> Iterator[tuple[str, int, float]]:
    """Values that can tell a line: finite and not whole, shortened to what the shorter source prints."""
    buffer, axis = parsed.metrics, _axis(parsed)
    names = [_plain(key) for key in buffer.keys]
    for key, record, step, value in zip(buffer.key_id, buffer.record, buffer.step, buffer.value, strict=True):
        if math.isfinite(value) and value != round(value):
            yield names[key], axis.get(record, step), float(f"{value:.{digits}g}")


def _axis(parsed: Parsed) -> dict[int, int]:
    """The step each record tells by itself, where a tracker numbers records on its own."""
    buffer = parsed.metrics
    ids = {buffer.keys.index(key) for key in _AXES if key in buffer.keys}
    points = zip(buffer.key_id, buffer.record, buffer.value, strict=True) if ids else ()
    return {record: int(value) for key, record, value in points if key in ids and math.isfinite(value)}


def _plain(key: str) -> str:
    """The key as the console prints it: trackers of transformers put `train/` before it."""
    return key.removeprefix("train/")


def _complete(counted: Sequence[int], matched: Mapping[int, int]) -> dict[int, int] | None:
    pairs = sorted(matched.items())
    if not pairs or any(a[1] >= b[1] for a, b in pairwise(pairs)):
        return None
    if len(pairs) == len(counted):
        return dict(matched)
    slopes = {(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(pairs)}
    if len(slopes) != 1 or (slope := slopes.pop()) != int(slope):
        return None
    first, at = pairs[0]
    return {step: at + int(slope) * (step - first) for step in counted}
