"""The five rooms joined: paths in, an `Audit` out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb

from verl_audit.diagnose.causes import weigh
from verl_audit.diagnose.coverage import coverage
from verl_audit.diagnose.evaluate import Finding, RuleSet
from verl_audit.diagnose.rules import RuleError, builtin_dir, load_files
from verl_audit.diagnose.verdict import decide
from verl_audit.errors import AuditError, NothingToJudge
from verl_audit.ingest import wandb_server
from verl_audit.ingest.adapters import Adapter, KeyMapping, choose_adapter, map_keys, setting_for
from verl_audit.ingest.detect import detect, plain
from verl_audit.ingest.discover import Discovery, Skipped, discover
from verl_audit.ingest.events import errors
from verl_audit.ingest.model import ConfigFound, Event, MetricBuffer, Parsed, Problem
from verl_audit.ingest.read import read_all
from verl_audit.ingest.runs import Run, group_runs
from verl_audit.ingest.trace_source import TraceSource
from verl_audit.measure.compute import Context, compute
from verl_audit.measure.lag import on_policy_loss
from verl_audit.measure.model import Scalar
from verl_audit.measure.recipe import differences
from verl_audit.measure.run import load as load_run_data
from verl_audit.measure.series import draw
from verl_audit.measure.tokens.engines import Engine, shards
from verl_audit.measure.tokens.load import load as load_token_sums
from verl_audit.measure.tokens.shard import name_of
from verl_audit.measure.tokens.spec import Spec
from verl_audit.measure.traced import read as read_traces
from verl_audit.report.document import Outcome, build, to_json
from verl_audit.report.targets import check_db, open_kept
from verl_audit.settings import Settings
from verl_audit.store.database import count, lock_down, open_store, publish
from verl_audit.store.kept import Memory, Reading
from verl_audit.store.load import (
    RunInput,
    finish,
    key_ranges,
    load_facts,
    load_key_map,
    load_problems,
    load_run,
    load_sources,
    shift_axis,
)
from verl_audit.store.traces import load_traces

Progress = Callable[[Path, int], None]
ORIGINS: tuple[str, ...] = ("wandb", "tracker", "console", "hydra")
"""Where a configuration is taken from, best first: wandb holds it after verl's own edits, Hydra before any."""


@dataclass(frozen=True)
class Source:
    """Everything read under one path given by the user."""

    root: Path
    discovery: Discovery
    parsed: tuple[Parsed, ...]
    runs: tuple[Run, ...]

    def shown(self, path: Path) -> str:
        """A path as reports show it: below the name of the given directory, no machine path before it."""
        top = self.root.resolve().name if self.root.name in ("", ".", "..") else self.root.name
        return printable(
            top
            if path == self.root
            else f"{top}/{path.relative_to(self.root)}"
            if path.is_relative_to(self.root)
            else path.name
        )

    def skipped(self) -> tuple[Skipped, ...]:
        """What was not read, with paths as shown."""
        return tuple(replace(s, path=Path(self.shown(s.path))) for s in self.discovery.skipped)

    def forget(self) -> None:
        """Let go of the metric rows, once a store holds them."""
        for parsed in self.parsed:
            parsed.metrics = MetricBuffer()

    def names(self) -> list[str]:
        """Shown paths of the parsed files."""
        return [self.shown(p.path) for p in self.parsed]

    def candidates(self) -> list[Run]:
        """Runs that can be judged: those with a metric value, and those that name themselves and died of an error."""
        return [run for run in self.runs if self._has_metrics(run) or self._died(run)] or list(self.runs)

    def _has_metrics(self, run: Run) -> bool:
        return any(len(self.parsed[i].metrics) for i in run.sources)

    def _died(self, run: Run) -> bool:
        sources = [self.parsed[i] for i in run.sources]
        return any(p.identity.experiment for p in sources) and bool(errors(("", e) for p in sources for e in p.events))


@dataclass(frozen=True)
class Audit:
    """A finished audit: `document` is the tree of `audit.json`, `store` the DuckDB behind it."""

    document: dict[str, Any]
    store: duckdb.DuckDBPyConnection
    reading: Reading | None = None
    """With `db`: how much was parsed, and how much was known from an earlier call."""

    def to_json(self) -> str:
        """`audit.json`: the same bytes for the same input."""
        return to_json(self.document)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query over the store's tables and views."""
        return self.store.execute(query).fetchall()


@dataclass(frozen=True)
class TokenWork:
    """How the token lists of traces are summed; the sums are equal to the bit whatever the engine.

    `workers`: by default the processors of the machine or cluster. `cache`: directory in which the sums of each file
    are kept for the next time, so that a growing run re-reads only what is new; None: none.
    """

    engine: Engine = "local"
    workers: int | None = None
    cache: Path | None = None


@dataclass(frozen=True)
class Loaded:
    """A store filled from run and baselines, before anything is judged."""

    store: duckdb.DuckDBPyConnection
    run: RunInput
    baselines: tuple[RunInput, ...]
    adapters: Mapping[str, Adapter]
    events: Mapping[str, tuple[tuple[str, Event], ...]]
    skipped: tuple[Skipped, ...] = ()
    """Files below the audited path that were not read."""
    traces: Mapping[str, tuple[TraceSource, ...]] = field(default_factory=dict)
    """Per run the sources of its trajectories, from which token lists can be read."""
    reading: Reading | None = None
    """With `db`: how much was parsed, and how much was known from an earlier call."""


def printable(text: str) -> str:
    """Bytes of a file name that are no UTF-8 as `\\xff`, since no store and no report takes them as they are."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def read_source(path: Path, progress: Progress | None = None, memory: Memory | None = None) -> Source:
    """Find and read everything under one path; what `memory` has of unchanged files is not read again."""
    if (where := wandb_server.address(str(path))) is not None and not path.exists():
        fetched = tuple(wandb_server.read(where, path))
        return Source(path, Discovery((), (), ()), fetched, group_runs(fetched, path))
    try:
        discovery = discover([path])
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
    parsed = tuple(read_all(discovery, progress, memory))
    return Source(path, discovery, parsed, group_runs(parsed, path))


def choose_run(source: Source, name: str | None, *, option: str) -> Run:
    """The run asked for, else the only one; the error message is the list to choose from."""
    runs = source.candidates()
    if name is not None:
        runs = [run for run in source.runs if run.name == name]
    if len(runs) == 1:
        return runs[0]
    if not source.runs:
        raise NothingToJudge(_nothing_found(source))
    listed = "\n".join(f"  {run.name}: {_described(source, run)}" for run in source.runs)
    lead = f"no run is named {name!r} in {source.root}" if name is not None else f"{source.root} holds {len(runs)} runs"
    raise AuditError(f"{lead}; choose one with {option}:\n{listed}")


def _described(source: Source, run: Run) -> str:
    parsed = [source.parsed[i] for i in run.sources]
    steps = [step for p in parsed for step in p.metrics.span or ()]
    span = f"steps {min(steps)} to {max(steps)}" if steps else "no metrics"
    formats = sorted({p.format for p in parsed})
    where = next((p.path for p in parsed if len(p.metrics)), parsed[0].path)
    return f"{span} from {', '.join(formats)} ({source.shown(where)})"


def _nothing_found(source: Source) -> str:
    telling = sorted(source.discovery.skipped, key=lambda s: not s.notable)
    looked = [f"  {source.shown(s.path)}: {s.reason}" for s in telling[:8]]
    more = len(source.discovery.skipped) - 8
    lines = "\n".join([*looked, *([f"  and {more} more"] if more > 0 else [])]) or "  it is empty"
    return (
        f"{source.root} holds no metrics or logs that verl-audit can read. Looked at:\n{lines}\n"
        "Expected: console logs, JSONL rows, .wandb files or exports, TensorBoard event files, MLflow, trackio, "
        "SwanLab or ClearML stores, trainer states, or traces; the README lists them."
    )


def load_all(
    path: Path,
    baselines: Sequence[str | Path] = (),
    *,
    run: str | None = None,
    facts: Mapping[str, Scalar] | None = None,
    db: Path | None = None,
    progress: Progress | None = None,
    tokens: TokenWork | None = None,
    compared: bool = False,
) -> Loaded:
    """Read the run and its baselines into a store, reconciled and mapped to signals.

    `db` also writes it to a file; where that holds an earlier store, files that have not changed are not parsed again.
    With `compared` all of them are arguments of one command, and the advice which run to choose says so.
    """
    memory = _memory(db)
    store = open_store()
    wanted = [(path, run, "run"), *((root, name, "baseline") for root, name in map(dir_and_run, baselines))]
    inputs: list[RunInput] = []
    mappings: dict[str, KeyMapping] = {}
    adapters: dict[str, Adapter] = {}
    events: dict[str, tuple[tuple[str, Event], ...]] = {}
    traces: dict[str, tuple[TraceSource, ...]] = {}
    base, seen = 0, set[tuple[Path, int]]()
    skipped: tuple[Skipped, ...] = ()
    for root, name, role in wanted:
        source = read_source(root, progress, memory)
        place = f"'{source.root}#NAME'"
        option = place if compared else "--run NAME" if role == "run" else f"--baseline {place}"
        chosen = choose_run(source, name, option=option)
        seen |= _lives(source, chosen, seen)
        given = _run_input(source, chosen, role, {i.run for i in inputs})
        names = source.names()
        load_sources(store, source.parsed, names, base, only=chosen.sources, keep=memory is not None)
        load_problems(store, [replace(p, file=source.shown(Path(p.file))) for p in source.discovery.problems])
        load_run(store, given, source.parsed, names, base)
        found = [trace for i in chosen.sources for trace in source.parsed[i].traces]
        first = sum(map(len, traces.values()))
        traces[given.run] = load_traces(store, given.run, found, source.shown)
        _load_tokens(store, given, traces[given.run], first, source.shown, tokens or TokenWork())
        if memory is not None:
            memory.save(store, base)
        source.forget()
        base += len(source.parsed)
        events[given.run] = tuple((names[i], e) for i in chosen.sources for e in source.parsed[i].events)
        given, adapter, mapping = _understand(
            store, source, chosen, given, events[given.run], facts if role == "run" else None
        )
        if adapter is not None:
            adapters[given.run], mappings[given.run] = adapter, mapping
        inputs.append(given)
        skipped = skipped if role == "baseline" else source.skipped()
    finish(store, mappings)
    if db is not None and memory is not None:
        memory.close()
        publish(store, db)
    lock_down(store)
    reading = None if memory is None else memory.reading
    return Loaded(store, inputs[0], tuple(inputs[1:]), adapters, events, skipped, traces, reading)


def _memory(db: Path | None) -> Memory | None:
    """What an earlier store at `db` remembers; nothing if it cannot be opened."""
    if db is None:
        return None
    check_db(db)
    try:
        return Memory(open_kept(db) if db.exists() else None)
    except duckdb.Error:
        return Memory()


def _load_tokens(
    store: duckdb.DuckDBPyConnection,
    run: RunInput,
    sources: Sequence[TraceSource],
    first: int,
    shown: Callable[[Path], str],
    how: TokenWork,
) -> None:
    """Sum the log-probs of a run's traces, numbered from `first`, into the store; what cannot be read is a problem."""
    told = [s for s in sources if s.table == "trajectories" and (s.has_log_probs or s.format == "parquet")]
    if not told:
        return
    spec = Spec(*_clip(run.config))
    found = shards(told, spec, engine=how.engine, workers=how.workers, cache=how.cache)
    ids = {name_of(source): source_id for source_id, source in enumerate(sources, first)}
    failures = load_token_sums(store, run.run, found, ids)
    paths = {name_of(source): shown(source.path) for source in told}
    load_problems(store, [Problem(paths[f.source], f.kind, f.reason, count=f.count) for f in failures])


def _clip(config: Mapping[str, tuple[str, str]]) -> tuple[float, float]:
    """Lower and upper eps of the clipped loss, as configured; 0.2 each where they are not known (verl's default)."""
    values = []
    for side in ("low", "high"):
        keys = (f"actor_rollout_ref.actor.clip_ratio_{side}", "actor_rollout_ref.actor.clip_ratio")
        told = (config[key][0] for key in keys if key in config)
        values.append(next((float(v) for v in told if _NUMBER.fullmatch(v)), 0.2))
    return min(values[0], 0.99), values[1]


_NUMBER = re.compile(r"\d*\.?\d+(?:[eE]-?\d+)?")


def _lives(source: Source, run: Run, seen: set[tuple[Path, int]]) -> set[tuple[Path, int]]:
    """The process lives with metrics of a run; compared with itself, any run looks harmless."""
    lives = {(source.parsed[i].path.resolve(), s) for i, s in run.units if len(source.parsed[i].metrics)}
    if lives & seen:
        raise AuditError(f"{source.root}: the run {run.name!r} is given twice; a baseline is another run, given once")
    return lives


def dir_and_run(given: str | Path) -> tuple[Path, str | None]:
    """`DIR` or `DIR#RUN`."""
    text = str(given)
    if Path(text).exists() or "#" not in text:
        return Path(text), None
    root, _, name = text.rpartition("#")
    return Path(root), name


def _run_input(source: Source, run: Run, role: str, taken: set[str]) -> RunInput:
    shown = printable(run.name)
    name = shown if shown not in taken else next(f"{shown}~{n}" for n in range(2, 99) if f"{shown}~{n}" not in taken)
    config = _config(source, run)
    flat = {} if config is None else {key: (value, config.origin) for key, value in _flatten(config.tree)}
    return RunInput(name, role, shown, run.units, tuple(map(printable, run.because)), config=flat)


def _config(source: Source, run: Run) -> ConfigFound | None:
    found = [c for i in run.sources for c in source.parsed[i].configs]
    return min(found, key=lambda c: ORIGINS.index(c.origin), default=None)


def _flatten(tree: object, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        return [
            pair for key, value in tree.items() for pair in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, "null" if tree is None else str(tree).lower() if isinstance(tree, bool) else str(tree))]


def _understand(
    store: duckdb.DuckDBPyConnection,
    source: Source,
    run: Run,
    given: RunInput,
    events: Sequence[tuple[str, Event]],
    facts: Mapping[str, Scalar] | None,
) -> tuple[RunInput, Adapter | None, KeyMapping]:
    """Detect the facts of a run, map its keys, and put its rows on one axis."""
    rows = key_ranges(store, given.run)
    config, keys = _config(source, run), [key for key, _, _ in rows]
    values = {key: (low, high) for key, low, high in rows if low is not None and high is not None}
    found = detect(
        keys,
        config.tree if config else None,
        [e.detail for _, e in events if e.kind == "announce"],
        values,
        facts,
    )
    load_facts(store, given.run, found)
    adapter, _ = choose_adapter(keys)
    mapping = map_keys(adapter, keys, plain(found)) if adapter else KeyMapping((), (), tuple(keys))
    load_key_map(store, given.run, mapping)
    if adapter is not None:
        shift_axis(store, given.run, adapter)
    return replace(given, facts=found), adapter, mapping


def load_rules(paths: Sequence[Path] = (), *, builtin: bool = True) -> RuleSet:
    """The shipped rules and those of the given files and folders; `RuleError` names file and field of a mistake."""
    return RuleSet(load_files([*([builtin_dir()] if builtin else []), *paths]))


def audit(
    path: str | Path,
    *,
    baselines: Sequence[str | Path] = (),
    run: str | None = None,
    settings: Settings | None = None,
    db: Path | None = None,
    progress: Progress | None = None,
    tokens: TokenWork | None = None,
) -> Audit:
    """Audit one run directory (or file) against baseline runs; `db` also writes the store to a file.

    Raises `NothingToJudge` when nothing in it can be used and `AuditError` on bad usage. Reads only.
    """
    settings = settings or Settings()
    rules = _rules(settings)
    loaded = load_all(Path(path), baselines, run=run, facts=settings.facts, db=db, progress=progress, tokens=tokens)
    data = [load_run_data(loaded.store, i.run, plain(i.facts)) for i in (loaded.run, *loaded.baselines)]
    stopped = errors(loaded.events[loaded.run.run])
    died = not len(data[0].train_steps) and bool(stopped)
    _require_something(loaded, died=died)
    apart, rewritten = (count(loaded.store, t, loaded.run.run) for t in ("differences", "rewritten"))
    recipe = differences(values_of(loaded.run), [values_of(base) for base in loaded.baselines])
    context = Context(died, apart, rewritten, settings.run_sd, settings.switch_step, recipe)
    traced = read_traces(loaded.store, loaded.run.run, data[0].facts, on_policy_loss(data[1:]))
    measures, symptom = compute(data[0], data[1:], context, traced)
    findings = rules.evaluate(measures)
    judged = weigh(measures, findings, symptom)
    adapter = loaded.adapters.get(loaded.run.run)
    outcome = Outcome(
        run=loaded.run,
        baselines=loaded.baselines,
        data=data[0],
        measures=measures,
        symptom=symptom,
        findings=tuple(findings),
        causes=judged,
        verdict=decide(judged, findings, symptom, measures, error=stopped[-1]["exception"] if stopped else ""),
        coverage=coverage(
            data[0],
            lambda signal: setting_for(signal, adapter) if adapter else None,
            recorded=traced.recorded if traced else frozenset(),
        ),
        traced=traced,
        events=loaded.events[loaded.run.run],
        skipped=loaded.skipped,
        settings=settings.as_given(),
        drawn=draw(data[0], data[1:], symptom),
        command=_command(Path(path), run, baselines, settings),
    )
    return Audit(build(outcome, loaded.store), loaded.store, loaded.reading)


def values_of(run: RunInput) -> dict[str, str]:
    """Its configuration without where each value stands."""
    return {key: value for key, (value, _) in run.config.items()}


def _command(path: Path, run: str | None, baselines: Sequence[str | Path], settings: Settings) -> tuple[str, ...]:
    """The command that makes an audit, with the names of folders and no machine path before them."""
    words = ["verl-audit", "diagnose", named(path), *(["--run", printable(run)] if run is not None else [])]
    for root, name in map(dir_and_run, baselines):
        words += ["--baseline", named(root) + (f"#{printable(name)}" if name else "")]
    words += [word for folder in settings.rule_dirs for word in ("--rules", named(folder))]
    given = settings.as_given().items()
    return (*words, *(word for key, value in given for word in ("--set", f"{key}={value}")))


def named(path: Path) -> str:
    """The name of a folder or file, without the machine path before it."""
    return printable(path.resolve().name if path.name in ("", ".", "..") else path.name)


def _rules(settings: Settings) -> RuleSet:
    try:
        return load_rules(settings.rule_dirs).with_params(settings.params)
    except RuleError as error:
        raise AuditError(str(error)) from None


def _require_something(loaded: Loaded, *, died: bool) -> None:
    row = loaded.store.execute(
        "SELECT count(*), count(DISTINCT key) FROM metrics WHERE run = ?", [loaded.run.run]
    ).fetchone()
    values, keys = row or (0, 0)
    signals = count(loaded.store, "signals", loaded.run.run)
    if signals or died or count(loaded.store, "trajectories", loaded.run.run):
        return
    if not values:
        raise NothingToJudge(
            f"{loaded.run.name}: logs were found, but they hold no metric line and no error to explain it. "
            + (
                "".join(f"\n  not read: {s.path}: {s.reason}" for s in loaded.skipped if s.notable)
                or "If the run is young, wait for its first step; else give the directory the logger wrote to."
            )
        )
    known = loaded.store.execute(
        "SELECT DISTINCT key FROM metrics WHERE run = ? ORDER BY key LIMIT 5", [loaded.run.run]
    ).fetchall()
    raise NothingToJudge(
        f"{loaded.run.name}: none of its {keys} metric names is known ({', '.join(k for (k,) in known)}, ...). "
        "`verl-audit signals` shows them; names of other frameworks need an adapter."
    )


__all__ = ["Audit", "Finding", "Loaded", "audit", "load_all", "load_rules"]
