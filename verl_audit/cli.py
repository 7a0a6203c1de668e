"""The command line: a few lines over the public API for each command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verl_audit._version import __version__
from verl_audit.errors import AuditError, NothingToJudge

if TYPE_CHECKING:
    from collections.abc import Callable

    from duckdb import DuckDBPyConnection
    from rich.console import Console

    from verl_audit.diagnose.rules import Severity
    from verl_audit.settings import Settings

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
    --fail-on; 2 bad usage or unreadable input; 3 nothing could be judged.
    """


@main.command()
@run_argument
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="DIR[#RUN]",
    help="Synchronous run to compare with; repeat it to measure run-to-run variance.",
)
@run_option
@click.option("--json", "json_file", metavar="FILE", help="Also write audit.json; - prints it in place of the report.")
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also keep the DuckDB store, for your own SQL.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["low", "medium", "high", "critical"]),
    help="Exit 1 when a finding of this severity or above fired.",
)
@set_option
@rules_option
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings file [default: verl-audit.toml in the working directory].",
)
@click.option("--strict", is_flag=True, help="Exit 2 when any input was damaged or any rule is broken.")
@click.option("-v", "--verbose", is_flag=True, help="Also list insufficient rules, notes and sources.")
def diagnose(
    run_dir: Path,
    baselines: tuple[str, ...],
    run_name: str | None,
    json_file: str | None,
    db: Path | None,
    fail_on: Severity | None,
    pairs: tuple[str, ...],
    rule_dirs: tuple[Path, ...],
    config: Path | None,
    strict: bool,
    verbose: bool,
) -> None:
    """Say why the run in RUN_DIR (a directory, or one log file) learns slower, or what was not recorded."""
    from verl_audit.pipeline import audit

    with _errors():
        _check_targets(json_file, db)
    with _errors(), _progress() as progress:
        found = audit(
            run_dir,
            baselines=baselines,
            run=run_name,
            settings=_settings(pairs, rule_dirs, config),
            db=db,
            progress=progress,
        )
    if json_file == "-":
        click.echo(found.to_json(), nl=False)
    else:
        if json_file:
            _write(Path(json_file), found.to_json())
        _report(found.document, verbose=verbose)
    sys.exit(_exit_code(found.document, fail_on, strict=strict))


def _check_targets(json_file: str | None, db: Path | None) -> None:
    """Refuse to write over what is not ours before anything is read, a log above all."""
    from verl_audit.report.targets import check_db, check_json

    if json_file and json_file != "-":
        check_json(Path(json_file))
    if db is not None:
        check_db(db)
        if json_file and Path(json_file).resolve() == db.resolve():
            raise AuditError(f"{db}: given for both --json and --db")


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
@run_argument
@run_option
@set_option
def signals(run_dir: Path, run_name: str | None, pairs: tuple[str, ...]) -> None:
    """Show what was found in RUN_DIR, how it was mapped, what it contains, and what is inert and why."""
    from verl_audit.pipeline import load_all
    from verl_audit.report.signals_view import render_signals, signal_rows

    with _errors(), _progress() as progress:
        loaded = load_all(run_dir, run=run_name, facts=_settings(pairs).facts, progress=progress)
    render_signals(*signal_rows(loaded.store), console=_console())


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
