"""The command line: a few lines over the public API for each command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verl_audit._version import __version__
from verl_audit.errors import AuditError, NothingToJudge
from verl_audit.plan.command import plan_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from duckdb import DuckDBPyConnection
    from rich.console import Console

    from verl_audit.diagnose.rules import Severity
    from verl_audit.measure.tokens.engines import Engine
    from verl_audit.pipeline import TokenWork
    from verl_audit.reference import Environment, Scenario
    from verl_audit.settings import Settings
    from verl_audit.store.kept import Reading

OK, FOUND, BAD, NOTHING = 0, 1, 2, 3
"""Exit codes: done; a finding at or above --fail-on; bad usage or unreadable input; nothing could be judged."""
BROKEN_PIPE = 141
"""Exit code when the reader of the output went away, as a shell reports it (128 + SIGPIPE)."""

run_argument = click.argument("run_dir", type=click.Path(path_type=Path))
run_option = click.option("--run", "run_name", metavar="NAME", help="Which run, when RUN_DIR holds several.")
rules_option = click.option(
    "--rules",
    "rule_dirs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of your own rules; may be repeated.",
)
set_option = click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="RULE.PARAMETER, fact.NAME, run_sd or switch_step; may be repeated.",
)
baseline_option = click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="DIR[#RUN]",
    help="Synchronous run to compare with; repeat it to measure run-to-run variance.",
)
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings file [default: verl-audit.toml in the working directory].",
)
interactive_option = click.option(
    "--interactive", is_flag=True, help="Embed plotly for zoom and hover (HTML only; 1.2 MB more)."
)


engine_option = click.option(
    "--engine",
    type=click.Choice(["local", "processes", "ray"]),
    default="local",
    show_default=True,
    help="Where the log-prob lists of traces are summed; the result is the same.",
)
workers_option = click.option("--workers", type=click.IntRange(1), help="How many at a time; default: all processors.")


class _Program(click.Group):
    """Commands whose output may end early: a closed pipe ends quietly, a full disk with a sentence."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program; --help and --version print before any command is chosen."""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            _output_failed(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and flush what it printed, so that a failure shows here and not at interpreter exit."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            _output_failed(error)


def _output_failed(error: OSError) -> None:
    with suppress(OSError, ValueError):  # what is left in the buffer goes nowhere, or exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        sys.exit(BROKEN_PIPE)
    what = error.filename or "the output cannot be written"
    _stop(AuditError(f"{what}: {error.strerror or error}"), BAD)


@click.group(cls=_Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="verl-audit")
def main() -> None:
    """Why did reward get slower after going asynchronous?

    Reads what an RL post-training run left on disk and tells staleness, train-inference mismatch, eviction bias
    and weight-sync faults apart, or says what was not recorded. Exit codes: 0 done; 1 a finding at or above
    --fail-on; 2 bad usage or unreadable input; 3 nothing could be judged; 141 the reader of the output went away.
    """


@main.command()
@run_argument
@baseline_option
@run_option
@click.option("--json", "json_file", metavar="FILE", help="Also write audit.json; - prints it in place of the report.")
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also keep the DuckDB store, for your own SQL; given again, only new and changed files are read.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["low", "medium", "high", "critical"]),
    help="Exit 1 when a finding of this severity or above fired.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the HTML report.",
)
@set_option
@rules_option
@config_option
@engine_option
@workers_option
@click.option("--strict", is_flag=True, help="Exit 2 when any input was damaged or any rule is broken.")
@click.option("-v", "--verbose", is_flag=True, help="Also list insufficient rules, notes and sources.")
def diagnose(
    run_dir: Path,
    baselines: tuple[str, ...],
    run_name: str | None,
    json_file: str | None,
    db: Path | None,
    fail_on: Severity | None,
    html: Path | None,
    pairs: tuple[str, ...],
    rule_dirs: tuple[Path, ...],
    config: Path | None,
    engine: Engine,
    workers: int | None,
    strict: bool,
    verbose: bool,
) -> None:
    """Say why the run in RUN_DIR (a directory, or one log file) learns slower, or what was not recorded."""
    from verl_audit.pipeline import audit

    with _errors():
        _check_targets(json_file, db, html)
    with _errors(), _progress() as progress:
        found = audit(
            run_dir,
            baselines=baselines,
            run=run_name,
            settings=_settings(pairs, rule_dirs, config),
            db=db,
            progress=progress,
            tokens=_token_work(run_dir, engine, workers),
        )
    if json_file == "-":
        click.echo(found.to_json(), nl=False)
    else:
        if json_file:
            _write(Path(json_file), found.to_json())
        _report(found.document, verbose=verbose)
    if html is not None:
        from verl_audit.report.html.page import render

        _write(html, render(found.document))
    if found.reading is not None:
        _told(found.reading)
    sys.exit(_exit_code(found.document, fail_on, strict=strict))


def _told(reading: Reading) -> None:
    """Say on stderr what was parsed; the report is the same whether a file was read now or before."""
    new = f"{reading.sources_read} read ({reading.bytes_read:,} bytes)"
    click.echo(f"sources: {new}, {reading.sources_kept} unchanged ({reading.bytes_kept:,} bytes)", err=True)


def _check_targets(json_file: str | None, db: Path | None, html: Path | None) -> None:
    """Refuse to write over what is not ours before anything is read, a log above all."""
    from verl_audit.report.targets import check_db, check_json, check_report

    if json_file and json_file != "-":
        check_json(Path(json_file))
    if db is not None:
        check_db(db)
    if html is not None:
        check_report(html, "html")
    given = {"--json": json_file and json_file != "-" and Path(json_file), "--db": db, "--html": html}
    taken: dict[Path, str] = {}
    for option, path in given.items():
        if path and (other := taken.setdefault(path.resolve(), option)) != option:
            raise AuditError(f"{path}: given for both {other} and {option}")


def _report(document: dict[str, Any], *, verbose: bool) -> None:
    from verl_audit.report.terminal import render

    render(document, _console(), verbose=verbose)


def _exit_code(document: dict[str, Any], fail_on: Severity | None, *, strict: bool) -> int:
    from verl_audit.diagnose.rules import SEVERITIES

    fired = [f["severity"] for f in document["findings"] if f["status"] == "fired"]
    if strict and (document["problems"] or any(f["status"] == "error" for f in document["findings"])):
        return BAD
    if fail_on and any(SEVERITIES.index(s) >= SEVERITIES.index(fail_on) for s in fired):
        return FOUND
    return OK


@main.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="RUN_DIR|AUDIT_JSON")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where to write it."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "markdown", "junit", "github"]),
    default="html",
    show_default=True,
    help="github prints annotations, and appends to the file named by GITHUB_STEP_SUMMARY.",
)
@interactive_option
@click.option("--include-text", is_flag=True, help="Also show text of the model in evidence (HTML only).")
@baseline_option
@run_option
@set_option
@rules_option
@config_option
def report(
    source: Path,
    output: Path | None,
    form: str,
    interactive: bool,
    include_text: bool,
    baselines: tuple[str, ...],
    run_name: str | None,
    pairs: tuple[str, ...],
    rule_dirs: tuple[Path, ...],
    config: Path | None,
) -> None:
    """Write the report of a run, or of an audit.json kept with `diagnose --json`, for people or for CI.

    Without -o it goes to standard output, except HTML, which needs a file.
    """
    from verl_audit.report.forms import append_job_summary, rendered
    from verl_audit.report.targets import check_report, is_document, read_document

    with _errors():
        if form == "html" and output is None:
            raise AuditError("an HTML report needs a file: -o report.html")
        if form == "github" and output is not None:
            raise AuditError("--format github prints annotations and takes no -o")
        if output is not None:
            check_report(output, form)
        if is_document(source):
            if baselines or run_name is not None or pairs or rule_dirs or config:
                raise AuditError(f"{source} is a finished audit: baselines, run and settings were chosen for it")
            document = read_document(source)
        else:
            document = _audited(source, baselines, run_name, _settings(pairs, rule_dirs, config))
        text = rendered(document, form, interactive=interactive, include_text=include_text)
        if form == "github":
            append_job_summary(document)
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        click.echo(f"{output}: {len(text.encode()):,} bytes", err=True)


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN_DIR[#RUN] RUN_DIR[#RUN]...")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write an HTML page."
)
@click.option("--json", "json_file", metavar="FILE", help="Also write the tree; - prints it in place of the table.")
@interactive_option
@set_option
@rules_option
@config_option
def compare(
    runs: tuple[str, ...],
    html: Path | None,
    json_file: str | None,
    interactive: bool,
    pairs: tuple[str, ...],
    rule_dirs: tuple[Path, ...],
    config: Path | None,
) -> None:
    """Set runs side by side: what differs, where they part first, and how fast each learned against the first.

    For two runs that differ in one configuration key it says whether learning speed recovered.
    """
    from verl_audit.compare import compare as compared
    from verl_audit.report.compare_view import render_comparison
    from verl_audit.report.document import to_json
    from verl_audit.report.targets import check_comparison, check_report

    with _errors():
        if html is not None:
            check_report(html, "html")
        if json_file and json_file != "-":
            check_comparison(Path(json_file))
    with _errors(), _progress() as progress:
        tree = compared(runs, settings=_settings(pairs, rule_dirs, config), progress=progress)
    if json_file == "-":
        click.echo(to_json(tree), nl=False)
    else:
        if json_file:
            _write(Path(json_file), to_json(tree))
        render_comparison(tree, _console())
    if html is not None:
        from verl_audit.report.html.comparison import render_comparison as page

        _write(html, page(tree, interactive=interactive))


def _audited(source: Path, baselines: tuple[str, ...], run: str | None, settings: Settings) -> dict[str, Any]:
    from verl_audit.pipeline import audit

    with _progress() as progress:
        return audit(source, baselines=baselines, run=run, settings=settings, progress=progress).document


@main.command()
@run_argument
@run_option
@set_option
def signals(run_dir: Path, run_name: str | None, pairs: tuple[str, ...]) -> None:
    """Show what was found in RUN_DIR, how it was mapped, what it contains, and what is inert and why."""
    from verl_audit.pipeline import load_all
    from verl_audit.report.signals_view import read_line, render_signals, signal_rows

    with _errors(), _progress() as progress:
        loaded = load_all(run_dir, run=run_name, facts=_settings(pairs).facts, progress=progress)
    render_signals(*signal_rows(loaded.store), console=_console(), read=read_line(loaded.store))


@main.command()
@run_argument
@click.option("--baseline", "baselines", multiple=True, metavar="DIR[#RUN]", help="A run to compare the loss with.")
@run_option
@click.option("--export", type=click.Path(path_type=Path), metavar="FILE", help="Write a row a trajectory as parquet.")
@engine_option
@workers_option
def traces(
    run_dir: Path,
    baselines: tuple[str, ...],
    run_name: str | None,
    export: Path | None,
    engine: Engine,
    workers: int | None,
) -> None:
    """Print what the per-trajectory traces of RUN_DIR tell: ledger, selection, lag, and whose the log-prob gap is.

    RUN_DIR may be a run with its traces or a folder that holds traces only.
    """
    from verl_audit.pipeline import audit
    from verl_audit.report.export import check_export, export_trajectories
    from verl_audit.report.page import Page
    from verl_audit.report.traces_view import show_traces

    with _errors():
        if export is not None:
            check_export(export)
    with _errors(), _progress() as progress:
        work = _token_work(run_dir, engine, workers)
        found = audit(run_dir, baselines=baselines, run=run_name, progress=progress, tokens=work)
        if found.document["traces"] is None:
            raise NothingToJudge(f"{run_dir}: no per-trajectory trace in it; docs/trace-schema.md says what one is")
        if export is not None:
            export_trajectories(found.store, export)
    show_traces(Page(_console()), found.document)


def _token_work(run_dir: Path, engine: Engine, workers: int | None) -> TokenWork:
    """Sums are kept in the user's cache, unless that lies in what is audited, which is never written to."""
    from verl_audit.measure.tokens.cache import default_folder
    from verl_audit.pipeline import TokenWork

    folder = default_folder().resolve()
    return TokenWork(engine, workers, None if run_dir.resolve() in folder.parents else folder)


@main.command()
@run_argument
@click.argument("query")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="DIR[#RUN]",
    help="Also load this run, as role 'baseline'.",
)
@run_option
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
def sql(run_dir: Path, query: str, baselines: tuple[str, ...], run_name: str | None, form: str) -> None:
    """Run a query over the store of RUN_DIR, e.g. 'select step, lag_oldest_mean from steps'.

    RUN_DIR may also be a file that `diagnose --db` wrote; it is only read.
    """
    from verl_audit.report.rows import print_rows

    with _errors():
        store = _store(run_dir, baselines, run_name)
        print_rows(store, query, form, _console())


def _store(run_dir: Path, baselines: tuple[str, ...], run_name: str | None) -> DuckDBPyConnection:
    from verl_audit.pipeline import load_all
    from verl_audit.report.targets import is_store, open_kept

    if not is_store(run_dir):
        with _progress() as progress:
            return load_all(run_dir, baselines, run=run_name, progress=progress).store
    if baselines or run_name is not None:
        raise AuditError(f"{run_dir} is a kept store: --baseline and --run were chosen when it was written")
    return open_kept(run_dir)


@main.command()
@plan_options
def plan(**asked: Any) -> None:
    """Say how many cards should train, how many roll out, and how often to sync.

    The work is measured from RUN_DIR, or given: --cards 128 --baseline-cards 32 --rollout 3 --train 1. Prints the
    splits with what is expected of each, a simulated shortlist, and which runs to try first.
    """
    from verl_audit.plan.command import check_targets, planned, write_files
    from verl_audit.plan.export import to_json
    from verl_audit.plan.view import render_plan

    with _errors():
        check_targets(asked)
    with _errors(), _progress() as progress:
        found = planned(asked, progress)
    with _errors():
        write_files(found, asked)
    if asked["json_file"] == "-":
        click.echo(to_json(found), nl=False)
    else:
        render_plan(found, _console(), everything=asked["everything"])


@main.command()
@click.argument("name", metavar="SCENARIO", required=False)
@click.option("--list", "listed", is_flag=True, help="List scenarios and environments.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="DIR", help="Directory to write; must be empty.")
@click.option("--env", default="small", show_default=True, metavar="NAME", help="Sizes and pace of the run.")
@click.option("--seed", default=0, show_default=True, help="Runs with the same seed are the same, byte by byte.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Change a setting; may be repeated.")
@click.option("--no-traces", is_flag=True, help="Write logs and configuration only.")
@click.option(
    "--trace-sets",
    default="behave,trainer,prox,theta",
    show_default=True,
    metavar="NAMES",
    help="Log-prob sets in the traces.",
)
@click.option(
    "--trace-lists", default=0.1, show_default=True, metavar="SHARE", help="Share of groups with token lists."
)
def simulate(
    name: str | None,
    listed: bool,
    out: Path | None,
    env: str,
    seed: int,
    pairs: tuple[str, ...],
    no_traces: bool,
    trace_sets: str,
    trace_lists: float,
) -> None:
    """Write the files of a simulated run whose true cause is known, to learn from and to test with."""
    for threads in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(threads, "1")  # small matrices: more threads only wait, and sums keep one order
    with _errors():
        from verl_audit import reference

        if listed:
            click.echo(_scenario_list(reference.scenarios(), reference.environments()), nl=False)
            return
        if name is None or out is None:
            raise AuditError("give a SCENARIO and -o DIR, or --list")
        traces = None if no_traces else reference.trace_options(trace_sets, trace_lists)
        given = _assignments(pairs)
        reference.settings_of(reference.scenario(name), env, given)  # a bad name is told before anything is written
        written = reference.simulate(name, env, seed, out, traces=traces, **given)
    click.echo(f"{written}: {reference.scenario(name).title}; the truth is in {reference.truth_path(written)}")


@main.command()
@click.option("--env", "envs", multiple=True, metavar="NAME", help="small, wide or long; may be repeated [small].")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="Runs of each scenario.")
@click.option("--scenarios", "names", multiple=True, metavar="NAME", help="May be repeated; `all` [a dozen of 67].")
@click.option(
    "--way",
    "ways",
    multiple=True,
    metavar="NAME",
    help="traces+baseline, metrics+baseline, traces or metrics; may be repeated [both with baseline].",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes [one a processor].")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Keep every verdict.")
def selftest(
    envs: tuple[str, ...],
    seeds: int,
    names: tuple[str, ...],
    ways: tuple[str, ...],
    workers: int | None,
    json_file: Path | None,
) -> None:
    """Simulate runs whose cause is known, judge them, and print how often the verdict is right."""
    with _errors():
        from verl_audit.selftest import QUICK, WAYS, cases, judged, text
        from verl_audit.selftest.records import check, code_digest, in_order, write

        if json_file is not None:
            check(json_file)
        chosen = [s.name for s in _all_scenarios()] if "all" in names else names or QUICK
        todo = cases(chosen, envs or ("small",), seeds, ways or WAYS[:2])
        found = in_order(judged(todo, workers))
        if json_file is not None:
            write(json_file, found, code_digest())
    click.echo(text(found))


def _all_scenarios() -> Sequence[Scenario]:
    from verl_audit.reference import scenarios

    return scenarios()


def _assignments(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise AuditError(f"--set {pair}: expected KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _scenario_list(scenarios: Sequence[Scenario], environments: Mapping[str, Environment]) -> str:
    lines = [f"{s.family:<10} {s.name:<23} {s.title}" for s in scenarios]
    lines += ["", *(f"--env {e.name:<6} {e.text}" for e in environments.values())]
    return "\n".join(lines) + "\n"


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A finished synchronous run of the same model: predict lag and the length above which answers are dropped.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["low", "medium", "high", "critical"]),
    help="Exit 1 when a finding of this severity or above fired: for training scripts.",
)
@set_option
@rules_option
def preflight(
    config: Path | None,
    overrides: tuple[str, ...],
    profile: Path | None,
    fail_on: Severity | None,
    pairs: tuple[str, ...],
    rule_dirs: tuple[Path, ...],
) -> None:
    """Say before a run what an audit of it could decide, what to add, and what its settings get wrong.

    CONFIG is a Hydra configuration file, a .hydra directory or a run directory; OVERRIDES are those of the command
    line, which may also stand alone: verl-audit preflight -- trainer.v1.trainer_mode=separate_async ...
    Overrides that verl would not start with are refused, with exit code 2.
    """
    from verl_audit.diagnose.rules import SEVERITIES
    from verl_audit.pipeline import load_rules
    from verl_audit.preflight import preflight as judge
    from verl_audit.preflight.view import render

    if config is not None and "=" in str(config) and not config.exists():
        config, overrides = None, (str(config), *overrides)
    with _errors():
        settings = _settings(pairs, rule_dirs)
        rules_used = load_rules(settings.rule_dirs).with_params(settings.params)
        found = judge(config, overrides, rules_used, settings, profile)
    render(found, _console())
    sys.exit(FOUND if fail_on and found.worst() >= SEVERITIES.index(fail_on) else OK)


@main.group()
def rules() -> None:
    """List, show and test rules."""


@rules.command("list")
@rules_option
def rules_list(rule_dirs: tuple[Path, ...]) -> None:
    """One line a rule: step, id, severity, title."""
    from verl_audit.pipeline import load_rules

    with _errors():
        for rule in load_rules(rule_dirs).rules:
            click.echo(f"{rule.step}  {rule.id:<34} {rule.severity:<9} {rule.title}")


@rules.command("show")
@click.argument("rule_id", metavar="ID")
@rules_option
def rules_show(rule_id: str, rule_dirs: tuple[Path, ...]) -> None:
    """Print the rule ID as its file holds it."""
    from verl_audit.pipeline import load_rules

    with _errors():
        known = {rule.id: rule for rule in load_rules(rule_dirs).rules}
        if rule_id not in known:
            near = [name for name in known if rule_id in name]
            raise AuditError(
                f"no rule {rule_id!r}"
                + (f"; did you mean {', '.join(near)}?" if near else "; see `verl-audit rules list`")
            )
        click.echo(Path(known[rule_id].file).read_text(encoding="utf-8"), nl=False)


@rules.command("test")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
def rules_test(paths: tuple[Path, ...]) -> None:
    """Run the cases in rule files: those shipped, or those under PATH. A rule without cases fails."""
    from verl_audit.diagnose.cases import missing_kinds, run_cases
    from verl_audit.pipeline import load_rules

    with _errors():
        loaded = load_rules(paths, builtin=not paths).rules
        results = run_cases(loaded)
    failed = [r for r in results if not r.ok]
    for result in failed:
        click.echo(
            f"FAIL {result.rule}: {result.case}: expected {result.expected}, got {result.got}. {result.detail}".rstrip()
        )
    untested = [rule for rule in loaded if not rule.cases]
    for rule in untested:
        click.echo(f"FAIL {rule.id}: it has no case")
    for rule in loaded:
        if rule.cases and (lacks := missing_kinds(rule)):
            click.echo(f"note {rule.id}: no case that is {', '.join(lacks)}")
    click.echo(f"{len(loaded)} rules, {len(results)} cases, {len(failed) + len(untested)} failed")
    sys.exit(FOUND if failed or untested else OK)


def _settings(pairs: tuple[str, ...], rule_dirs: tuple[Path, ...] = (), config: Path | None = None) -> Settings:
    from verl_audit.settings import read_settings

    return read_settings(pairs, rule_dirs, config)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        _stop(AuditError(f"{path}: {error.strerror or error}"), BAD)


def _console() -> Console:
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader went away")  # rich would exit 1, the code of a finding

    return Output(highlight=False, soft_wrap=False)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors meant for the user into a message on stderr and an exit code."""
    import duckdb

    from verl_audit.diagnose.rules import RuleError

    try:
        yield
    except NothingToJudge as error:
        _stop(error, NOTHING)
    except (AuditError, RuleError, duckdb.Error) as error:
        _stop(error, BAD)


def _stop(error: Exception, code: int) -> None:
    click.echo(f"verl-audit: {error}", err=True)
    sys.exit(code)


@contextmanager
def _progress() -> Iterator[Callable[[Path, int], None] | None]:
    """A bar on stderr while files are read; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} MB"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("files", total=None)

        def seen(path: Path, size: int) -> None:
            bar.update(task, advance=size / 1e6, description=path.name)

        yield seen
