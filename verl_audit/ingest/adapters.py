"""Which canonical signal a logged key carries, and whether its value can move and be believed.

Everything framework-specific is data in `signals/*.toml`; this module reads, checks and applies it. An entry
can depend on facts of the run (`detect.py`): the same key means generation in one trainer and waiting in
another, and a clip share that is 0 by construction is *inert*.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

SIGNAL_DIR = Path(__file__).parent / "signals"
UNIT_KINDS = frozenset({
    "probability", "log_prob", "ratio", "share", "score", "versions", "groups", "trajectories", "tokens",
    "seconds", "count", "version", "other",
})  # fmt: skip
WEIGHTS = frozenset({"token", "trajectory", "group", "step"})
REDUCERS = frozenset({"mean", "max", "min", "std", "sum", "last"})
CAUSES = frozenset({"mismatch", "staleness", "update"})
ANCHORS = frozenset({"newest", "oldest", "admission", "batch_start", "token", "unknown"})
FAMILIES: Mapping[str, frozenset[str]] = {
    "v1": frozenset({"sync", "colocate_async", "separate_async"}),
    "v0": frozenset({"v0"}),
    "fully_async": frozenset({"fully_async"}),
    "one_step_off": frozenset({"one_step_off"}),
}
TRAINERS: frozenset[str] = frozenset().union(*FAMILIES.values())
SYNC_TRAINERS = frozenset({"sync", "v0"})
CONDITION_FACTS = frozenset({
    "trainer", "trainer_family", "is_async", "log_prob_mode", "calculate_log_probs", "on_policy_updates",
    "correction", "rejection", "loss_mode", "staleness_strategy", "dapo_enabled", "dapo_effective",
    "partial_rollout", "router_replay", "three_decimals", "clip_always_zero", "gap_estimator", "lag_labels",
})  # fmt: skip
UNKNOWN = "unknown"

Condition = Mapping[str, tuple[object, ...]]


class AdapterError(ValueError):
    """A definition file is wrong; the message names the file and the entry."""


@dataclass(frozen=True)
class SignalDef:
    """What one canonical signal means; `on_policy` is its value at lag 0 without mismatch.

    `anchor` says from where a lag is counted, None for everything that is no lag.
    """

    name: str
    title: str
    unit: str
    unit_kind: str
    weight: str
    reducer: str
    on_policy: float | None
    description: str
    anchor: str | None = None


@dataclass(frozen=True)
class Remark:
    """A reason that holds when every fact in `when` has one of the listed values."""

    when: Condition
    because: str


@dataclass(frozen=True)
class KeyMap:
    """One mapping of a key, or of every key a pattern matches, to a signal."""

    key: str | None
    pattern: re.Pattern[str] | None
    signal: str
    against: str
    contains: tuple[str, ...]
    weight: str | None
    reducer: str | None
    scale: float
    offset: float
    trainers: frozenset[str]
    not_trainers: frozenset[str]
    when: Condition
    unless: str | None
    since: str | None
    until: str | None
    zero_with: str | None
    zero_trainers: frozenset[str]
    inert: tuple[Remark, ...]
    corrupt: tuple[Remark, ...]
    record: str | None
    version_unit: str | None = None


@dataclass(frozen=True)
class FactRule:
    """A fact that holds when all of its evidence is there: `fact` = `value`, since `because`.

    Keys are written without the adapter's optional prefix; settings are looked up by their last name, wherever in
    the configuration they are.
    """

    fact: str
    value: str | bool
    because: str
    logs: tuple[re.Pattern[str], ...] = ()
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    smallest_zero: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    settings_above: Mapping[str, float] = field(default_factory=dict)
    when: Condition = field(default_factory=dict)


@dataclass(frozen=True)
class KnownKeys:
    """Keys that are understood and carry no canonical signal."""

    pattern: re.Pattern[str]
    note: str


@dataclass(frozen=True)
class Adapter:
    """The keys of one framework.

    `axis_key` names the counter that says which version a row belongs to where rows are logged one version
    late; keys matching `axis_unshifted` are not late. `modes` are the framework's own trainers, true where
    generation overlaps training (empty: verl's); `facts` say what tells them and other facts. `record` is the
    setting that makes the framework log an entry that names none.
    """

    framework: str
    adapter_version: int
    covers: str
    distinctive: tuple[re.Pattern[str], ...]
    maps: tuple[KeyMap, ...]
    known: tuple[KnownKeys, ...]
    unrecorded: Mapping[str, str]
    staleness_free: frozenset[str] = frozenset()
    axis_key: str | None = None
    axis_unshifted: tuple[re.Pattern[str], ...] = ()
    optional_prefix: str = ""
    modes: Mapping[str, bool] = field(default_factory=dict)
    facts: tuple[FactRule, ...] = ()
    record: str | None = None

    def bare(self, key: str) -> str:
        """The key without the prefix some trackers put before it."""
        return key.removeprefix(self.optional_prefix)

    def is_shifted(self, key: str) -> bool:
        """Whether rows holding `key` are late by one version in a run that logs `axis_key`."""
        return self.axis_key is not None and not any(p.fullmatch(key) for p in self.axis_unshifted)


@dataclass(frozen=True)
class Mapped:
    """A logged key as a canonical signal in this run; a canonical value is `value * scale + offset`."""

    key: str
    signal: str
    label: str | None
    unit_kind: str
    against: str
    contains: tuple[str, ...]
    weight: str
    reducer: str
    on_policy: float | None
    scale: float
    offset: float
    inert_because: str | None
    corrupt_because: str | None
    record: str | None
    zero_with: str | None
    anchor: str | None = None
    version_unit: str | None = None


@dataclass(frozen=True)
class KeyMapping:
    """Every key of a run, sorted into mapped, known and unknown.

    `implied` are keys the run never logged although it would have, had they not been 0 throughout.
    """

    mapped: tuple[Mapped, ...]
    known: tuple[str, ...]
    unknown: tuple[str, ...]
    implied: tuple[Mapped, ...] = ()


# ------------------------------------------------------------------ applying


def candidates(facts: Mapping[str, object], modes: Mapping[str, bool] | None = None) -> frozenset[str]:
    """The trainers that are possible, given what is known; `modes` are those of a framework other than verl."""
    trainer, family = facts.get("trainer"), facts.get("trainer_family")
    if isinstance(trainer, str):
        return frozenset({trainer})
    if modes:
        return frozenset(m for m, is_async in modes.items() if facts.get("is_async") in (None, is_async))
    options = FAMILIES.get(family, TRAINERS) if isinstance(family, str) else TRAINERS
    if facts.get("is_async") is True:
        return options - SYNC_TRAINERS
    return options & SYNC_TRAINERS if facts.get("is_async") is False else options


def holds(when: Condition, facts: Mapping[str, object]) -> bool:
    """Whether every fact has one of its listed values; an unknown fact only matches "unknown"."""
    return all(_matches(name, allowed, facts) for name, allowed in when.items())


def _matches(name: str, allowed: tuple[object, ...], facts: Mapping[str, object]) -> bool:
    if name == "trainer" and candidates(facts) <= set(allowed):
        return True
    value = facts.get(name)
    return (UNKNOWN if value is None else value) in allowed


def choose_adapter(keys: Collection[str]) -> tuple[Adapter | None, str]:
    """The adapter whose distinctive keys are logged, and the reason.

    First counts what no other framework logs, then everything distinctive; verl comes first among equals.
    """
    adapters = load_adapters()
    scores = [0] * len(adapters)
    owned = [0] * len(adapters)
    for key in keys:
        for i, alone in _claims(key):
            scores[i] += 1
            owned[i] += alone
    best = max(range(len(adapters)), key=lambda i: (owned[i], scores[i]))
    if not scores[best]:
        names = ", ".join(adapter.framework for adapter in adapters)
        return None, f"none of the {len(keys)} keys is distinctive of {names}"
    reason = f"{scores[best]} of {len(keys)} keys are distinctive of {adapters[best].framework}"
    return adapters[best], reason if owned[best] else f"{reason}, all of them used by other frameworks too"


@lru_cache(maxsize=20_000)
def _claims(key: str) -> tuple[tuple[int, bool], ...]:
    """Adapters of which a key is distinctive, by their place, and whether no other maps it."""
    adapters = load_adapters()
    return tuple(
        (i, not any(_is_mapped(other, key) for j, other in enumerate(adapters) if j != i))
        for i, adapter in enumerate(adapters)
        if _is_distinctive(adapter, key)
    )


def _is_distinctive(adapter: Adapter, key: str) -> bool:
    return any(p.fullmatch(adapter.bare(key)) for p in adapter.distinctive)


def _is_mapped(adapter: Adapter, key: str) -> bool:
    return _is_distinctive(adapter, key) or any(entry_matches(e, adapter.bare(key)) for e in adapter.maps)


def map_keys(adapter: Adapter, keys: Collection[str], facts: Mapping[str, object]) -> KeyMapping:
    """Sort `keys` into mapped, known and unknown under the facts of the run (name -> plain value)."""
    bare = {adapter.bare(key) for key in keys}
    mapped: list[Mapped] = []
    known: list[str] = []
    unknown: list[str] = []
    for key in sorted(keys):
        found = _find(adapter, adapter.bare(key), bare, facts)
        if found is not None:
            mapped.append(_apply(adapter, key, *found, facts))
        else:
            (known if _is_known(adapter, adapter.bare(key)) else unknown).append(key)
    return KeyMapping(tuple(mapped), tuple(known), tuple(unknown), tuple(_implied(adapter, bare, facts)))


def _find(
    adapter: Adapter, key: str, present: Collection[str], facts: Mapping[str, object]
) -> tuple[KeyMap, str | None] | None:
    for entry in adapter.maps:
        match = entry_matches(entry, key)
        if match and _valid(adapter, entry, present, facts):
            return entry, match[1]
    return None


def entry_matches(entry: KeyMap, key: str) -> tuple[bool, str | None] | None:
    """Whether a key is this entry's, with the label its pattern finds in it; None if not."""
    if entry.pattern is None:
        return (True, None) if entry.key == key else None
    match = entry.pattern.fullmatch(key)
    return (True, match.groupdict().get("label")) if match else None


def _valid(adapter: Adapter, entry: KeyMap, present: Collection[str], facts: Mapping[str, object]) -> bool:
    possible = candidates(facts, adapter.modes)
    if entry.trainers and not possible <= entry.trainers:
        return False
    if entry.not_trainers and possible <= entry.not_trainers:
        return False
    return entry.unless not in present and holds(entry.when, facts)


def _is_known(adapter: Adapter, key: str) -> bool:
    """Whether a key carries no signal in this run: a known family, or a mapped key that does not apply."""
    return any(k.pattern.fullmatch(key) for k in adapter.known) or any(
        entry_matches(entry, key) for entry in adapter.maps
    )


def _apply(adapter: Adapter, key: str, entry: KeyMap, label: str | None, facts: Mapping[str, object]) -> Mapped:
    signal = load_signals()[entry.signal]
    possible = candidates(facts, adapter.modes)
    fresh = possible <= adapter.staleness_free
    zero = entry.zero_with if possible <= entry.zero_trainers else None
    return Mapped(
        key=key,
        signal=signal.name,
        label=label,
        unit_kind=signal.unit_kind,
        against=entry.against,
        contains=tuple(c for c in entry.contains if not (fresh and c == "staleness")),
        weight=entry.weight or signal.weight,
        reducer=entry.reducer or signal.reducer,
        on_policy=signal.on_policy,
        scale=entry.scale,
        offset=entry.offset,
        inert_because=_first(entry.inert, facts),
        corrupt_because=_first(entry.corrupt, facts),
        record=entry.record or setting_for(signal.name, adapter),
        zero_with=zero,
        anchor=signal.anchor,
        version_unit=entry.version_unit,
    )


def _first(remarks: Sequence[Remark], facts: Mapping[str, object]) -> str | None:
    return next((r.because for r in remarks if holds(r.when, facts)), None)


def _implied(adapter: Adapter, present: Collection[str], facts: Mapping[str, object]) -> Iterator[Mapped]:
    logged = {e.signal for e in adapter.maps if e.key in present}
    for entry in adapter.maps:
        if entry.key is None or entry.signal in logged or entry.zero_with not in present or entry.until:
            continue
        mapped = _apply(adapter, entry.key, entry, None, facts)
        if mapped.zero_with is not None and _valid(adapter, entry, present, facts):
            yield mapped


def setting_for(signal: str, adapter: Adapter) -> str | None:
    """The setting that makes the framework log `signal`, or why none does; None if the adapter cannot say."""
    recorded = (entry.record for entry in adapter.maps if entry.signal == signal and entry.record)
    mapped = any(entry.signal == signal for entry in adapter.maps)
    return next(recorded, adapter.unrecorded.get(signal) or (adapter.record if mapped else None))


# ------------------------------------------------------------------ loading


@cache
def load_signals() -> dict[str, SignalDef]:
    """The canonical signals by name, in the order of the file."""
    return read_signals(SIGNAL_DIR / "signals.toml")


@cache
def load_adapters() -> tuple[Adapter, ...]:
    """The adapters that come with the package, verl first."""
    files = sorted(SIGNAL_DIR.glob("*.toml"), key=lambda p: (p.stem != "verl", p.stem))
    return tuple(read_adapter(p, load_signals()) for p in files if p.stem != "signals")


def read_signals(path: Path) -> dict[str, SignalDef]:
    """Read and check a file of signal definitions."""
    return {
        name: _signal(f"{path.name}, [signal.{name}]", name, raw) for name, raw in _toml(path).get("signal", {}).items()
    }


def _signal(where: str, name: str, raw: Mapping[str, Any]) -> SignalDef:
    _fields(where, raw, required="title unit unit_kind weight reducer description", optional="on_policy anchor")
    _one_of(where, "unit_kind", raw["unit_kind"], UNIT_KINDS)
    _one_of(where, "weight", raw["weight"], WEIGHTS)
    _one_of(where, "reducer", raw["reducer"], REDUCERS)
    if "anchor" in raw:
        _one_of(where, "anchor", raw["anchor"], ANCHORS)
    on_policy = raw.get("on_policy")
    return SignalDef(name=name, **{**raw, "on_policy": None if on_policy is None else float(on_policy)})


def read_adapter(path: Path, signals: Mapping[str, SignalDef]) -> Adapter:
    """Read and check one adapter against the signal definitions."""
    raw = _toml(path)
    optional = "map known unrecorded staleness_free axis_key axis_unshifted optional_prefix modes fact record"
    _fields(path.name, raw, required="framework adapter_version covers distinctive", optional=optional)
    for name in raw.get("unrecorded", {}):
        _one_of(f"{path.name}, [unrecorded]", "signal", name, signals)
    modes = raw.get("modes", {})
    maps = [m for i, e in enumerate(raw.get("map", [])) for m in _maps(path.name, i, e, signals, modes)]
    return Adapter(
        framework=raw["framework"],
        adapter_version=raw["adapter_version"],
        covers=raw["covers"],
        distinctive=_patterns(f"{path.name}, distinctive", raw["distinctive"]),
        maps=tuple(maps),
        known=tuple(_known(path.name, i, entry) for i, entry in enumerate(raw.get("known", []))),
        unrecorded=raw.get("unrecorded", {}),
        staleness_free=_trainers(path.name, raw.get("staleness_free", []), modes),
        axis_key=raw.get("axis_key"),
        axis_unshifted=_patterns(f"{path.name}, axis_unshifted", raw.get("axis_unshifted", [])),
        optional_prefix=raw.get("optional_prefix", ""),
        modes=modes,
        facts=tuple(_fact(path.name, i, entry, modes) for i, entry in enumerate(raw.get("fact", []))),
        record=raw.get("record"),
    )


def _fact(file: str, index: int, raw: Mapping[str, Any], modes: Mapping[str, bool]) -> FactRule:
    where = f"{file}, [[fact]] number {index + 1} ({raw.get('fact', 'no fact')})"
    names = "logs positive negative zero smallest_zero settings settings_above when"
    _fields(where, raw, required="fact value because", optional=names)
    _one_of(where, "fact", raw["fact"], CONDITION_FACTS)
    if raw["fact"] == "trainer":
        _one_of(where, "mode", raw["value"], modes)
    return FactRule(
        fact=raw["fact"],
        value=raw["value"],
        because=raw["because"],
        logs=_patterns(where, raw.get("logs", [])),
        positive=tuple(raw.get("positive", [])),
        negative=tuple(raw.get("negative", [])),
        zero=tuple(raw.get("zero", [])),
        smallest_zero=tuple(raw.get("smallest_zero", [])),
        settings=raw.get("settings", {}),
        settings_above=raw.get("settings_above", {}),
        when=_condition(where, raw.get("when", {})),
    )


_MAP_FIELDS = (
    "key pattern against contains weight reducer scale offset trainers not_trainers when unless since until"
    " zero_if_absent_with zero_if_trainers inert corrupt record version_unit"
)


def _maps(
    file: str, index: int, raw: Mapping[str, Any], signals: Mapping[str, SignalDef], modes: Mapping[str, bool]
) -> Iterator[KeyMap]:
    where = f"{file}, [[map]] number {index + 1} ({raw.get('key', raw.get('pattern', 'no key'))})"
    _fields(where, raw, required="signal", optional=_MAP_FIELDS)
    if ("key" in raw) == ("pattern" in raw):
        raise AdapterError(f"{where}: needs either key or pattern")
    names = expand(raw["signal"])
    keys: list[str | None] = [*expand(raw["key"])] if "key" in raw else [None]
    if len(keys) != len(names):
        raise AdapterError(f"{where}: key stands for {len(keys)} names, signal for {len(names)}")
    for key, name in zip(keys, names, strict=True):
        _one_of(where, "signal", name, signals)
        yield _map(where, key, name, raw, modes)


def _map(where: str, key: str | None, signal: str, raw: Mapping[str, Any], modes: Mapping[str, bool]) -> KeyMap:
    for cause in raw.get("contains", []):
        _one_of(where, "contains", cause, CAUSES)
    if "weight" in raw:
        _one_of(where, "weight", raw["weight"], WEIGHTS)
    if "reducer" in raw:
        _one_of(where, "reducer", raw["reducer"], REDUCERS)
    return KeyMap(
        key=key,
        pattern=_pattern(where, raw["pattern"]) if key is None else None,
        signal=signal,
        against=raw.get("against", ""),
        contains=tuple(raw.get("contains", [])),
        weight=raw.get("weight"),
        reducer=raw.get("reducer"),
        scale=float(raw.get("scale", 1)),
        offset=float(raw.get("offset", 0)),
        trainers=_trainers(where, raw.get("trainers", []), modes),
        not_trainers=_trainers(where, raw.get("not_trainers", []), modes),
        when=_condition(where, raw.get("when", {})),
        unless=raw.get("unless"),
        since=raw.get("since"),
        until=raw.get("until"),
        zero_with=raw.get("zero_if_absent_with"),
        zero_trainers=_trainers(where, raw.get("zero_if_trainers", []), modes),
        inert=_remarks(f"{where}, inert", raw.get("inert", [])),
        corrupt=_remarks(f"{where}, corrupt", raw.get("corrupt", [])),
        record=raw.get("record"),
        version_unit=raw.get("version_unit"),
    )


def expand(text: str) -> list[str]:
    """`a/{x,y}` as `a/x` and `a/y`; text without braces as itself."""
    head, brace, rest = text.partition("{")
    if not brace:
        return [text]
    inside, _, tail = rest.partition("}")
    return [f"{head}{part.strip()}{tail}" for part in inside.split(",")]


def _known(file: str, index: int, raw: Mapping[str, Any]) -> KnownKeys:
    where = f"{file}, [[known]] number {index + 1} ({raw.get('pattern', 'no pattern')})"
    _fields(where, raw, required="pattern note")
    return KnownKeys(_pattern(where, raw["pattern"]), raw["note"])


def _remarks(where: str, raw: Sequence[Mapping[str, Any]]) -> tuple[Remark, ...]:
    for remark in raw:
        _fields(where, remark, required="when because")
    return tuple(Remark(_condition(where, r["when"]), r["because"]) for r in raw)


def _condition(where: str, raw: Mapping[str, Any]) -> Condition:
    for name, allowed in raw.items():
        _one_of(where, "fact", name, CONDITION_FACTS)
        if not isinstance(allowed, list):
            raise AdapterError(f"{where}: the values of {name} must be a list")
    return {name: tuple(allowed) for name, allowed in raw.items()}


def _trainers(where: str, names: Sequence[str], modes: Mapping[str, bool]) -> frozenset[str]:
    for name in names:
        _one_of(where, "trainer", name, modes or TRAINERS)
    return frozenset(names)


def _patterns(where: str, texts: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(where, text) for text in texts)


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise AdapterError(f"{where}: {text!r} is no regular expression: {error}") from error


def _fields(where: str, raw: Mapping[str, Any], required: str, optional: str = "") -> None:
    needed, allowed = required.split(), optional.split()
    for name in needed:
        if name not in raw:
            raise AdapterError(f"{where}: {name} is missing")
    for name in raw:
        if name not in needed and name not in allowed:
            raise AdapterError(f"{where}: {name} is not a field")


def _one_of(where: str, field: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise AdapterError(f"{where}: {field} {value!r} does not exist")


def _toml(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise AdapterError(f"{path.name}: {error}") from error
    return raw
