"""`verl-audit plan`: what the command line asks, turned into a plan and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verl_audit.errors import AuditError

if TYPE_CHECKING:
    from verl_audit.pipeline import Progress
    from verl_audit.plan.profile import Given, Profile
    from verl_audit.plan.search import Limits, Plan
    from verl_audit.plan.tail import Durations

POSITIVE = click.FloatRange(min=0, min_open=True)
CARDS = click.IntRange(min=1)
SHARE = click.FloatRange(0, 1)


def _numbers(least: float, *, whole: bool = False) -> Any:
    """A click callback: numbers separated by commas, none below `least`, ascending."""

    def convert(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[float, ...]:
        try:
            numbers = sorted({float(part) for part in text.split(",")})
        except ValueError:
            raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4") from None
        if any(not least <= n < 1e6 or (whole and n != int(n)) for n in numbers):
            raise click.BadParameter(f"{text!r}: each must be {'a whole number ' * whole}of at least {least:g}")
        return tuple(int(n) if whole else n for n in numbers)

    return convert


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    """A click callback: ranges let NaN and infinity pass."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number to plan with")
    return value


def _option(*names: str, **how: Any) -> Any:
    if isinstance(how.get("type"), click.FloatRange):
        how["callback"] = _finite
    return click.option(*names, **how)


OPTIONS = (
    click.argument("run_dir", required=False, type=click.Path(path_type=Path)),
    _option("--cards", type=click.IntRange(2, 1_000_000), help="Cards to divide [default: those of the run]."),
    _option("--baseline", metavar="DIR[#RUN]", help="Synchronous run that tells the rollout time."),
    _option("--run", "run_name", metavar="NAME", help="Which run, when RUN_DIR holds several."),
    _option("--set", "pairs", multiple=True, metavar="fact.NAME=VALUE", help="A fact of the run; may be repeated."),
    _option("--rollout", type=POSITIVE, help="Time of a step's rollouts, without their final drain."),
    _option("--train", type=POSITIVE, help="Time of a step's training: everything but rollouts and weight sync."),
    _option("--sync", type=click.FloatRange(min=0), help="Time of one weight sync, in the same unit."),
    _option("--baseline-cards", type=CARDS, help="Cards on which both took turns in these times."),
    _option("--train-cards", type=CARDS, help="Trainer cards of the run, where its configuration does not say."),
    _option("--rollout-cards", type=CARDS, help="Rollout cards of the run, where its configuration does not say."),
    _option("--updates", type=CARDS, help="Optimizer updates of a step."),
    _option("--groups", type=POSITIVE, help="Groups (prompts) of a step."),
    _option("--group-size", type=click.FloatRange(min=1), help="Trajectories of a group."),
    _option("--slots", type=POSITIVE, help="Trajectories that one rollout card generates at a time."),
    _option(
        "--lengths",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Response lengths, one a line.",
    ),
    _option("--sigma", type=click.FloatRange(0, 3), help="Spread of lengths: log-sd of a log-normal."),
    _option("--cap", type=click.FloatRange(min=1), help="Longest length over the mean, with --sigma [default: 4]."),
    _option("--rollout-exponent", type=click.FloatRange(0, 1.5), help="Rollout time falls as cards^-E [default: 1]."),
    _option("--train-exponent", type=click.FloatRange(0, 1.5), help="Training time falls as cards^-E [default: 1]."),
    _option(
        "--mode",
        type=click.Choice(["separate_async", "fully_async", "one_step_off"]),
        help="Trainer to plan for [default: that of the run, else separate_async].",
    ),
    _option("--threshold", type=POSITIVE, help="max_off_policy_threshold with strategy drop: predicts evictions."),
    _option(
        "--train-multiple",
        type=CARDS,
        help="Training cards come in these (TP x PP x CP) [default: 8, 4 or 2, if it leaves 7 splits].",
    ),
    _option("--rollout-multiple", type=CARDS, help="Rollout cards come in these (TP) [default: as for training]."),
    _option(
        "--k",
        "ks",
        metavar="N,...",
        callback=_numbers(1, whole=True),
        help="Updates per sync to try.",
        default="1,2,4,8,16",
        show_default=True,
    ),
    _option(
        "--theta",
        "thetas",
        metavar="X,...",
        callback=_numbers(0),
        help="Extra groups under way to try, over a cycle's.",
        default="0,0.1,0.2,0.3,0.5,0.75,1,1.5,2,3",
        show_default=True,
    ),
    _option(
        "--lag-budget",
        type=click.FloatRange(min=0),
        help="Mean lag allowed, in updates.",
        default=8.0,
        show_default=True,
    ),
    _option("--sync-budget", type=SHARE, help="Sync share allowed.", default=0.1, show_default=True),
    _option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the simulation."),
    _option("--no-simulation", is_flag=True, help="Closed forms only."),
    _option("--all", "everything", is_flag=True, help="Show every split."),
    _option("--csv", "csv_file", type=click.Path(path_type=Path), metavar="FILE", help="All settings scanned."),
    _option("--json", "json_file", metavar="FILE", help="The plan; - prints it in place of the text."),
    _option("--figures", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Three SVG figures."),
    _option(
        "--html", type=click.Path(path_type=Path), metavar="FILE", help="Interactive figures in one file (plotly)."
    ),
)


def plan_options(command: Any) -> Any:
    """All options of the command, in the order of its help."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def planned(asked: Mapping[str, Any], progress: Progress | None = None) -> Plan:
    """The plan that the options ask for. AuditError and NothingToJudge say what is missing."""
    from verl_audit.plan.search import make_plan

    profile = _profile(asked, progress)
    return make_plan(profile, _limits(asked, profile), simulated=not asked["no_simulation"], seed=asked["seed"])


def _profile(asked: Mapping[str, Any], progress: Progress | None) -> Profile:
    from verl_audit.pipeline import load_all
    from verl_audit.plan.measured import from_run
    from verl_audit.plan.profile import from_numbers
    from verl_audit.settings import read_settings

    given = _given(asked)
    if asked["run_dir"] is None:
        if asked["baseline"] or asked["run_name"] or asked["pairs"]:
            raise AuditError("--baseline, --run and --set are about a run: give RUN_DIR")
        return from_numbers(given)
    baselines = [asked["baseline"]] if asked["baseline"] else []
    facts = read_settings(asked["pairs"], (), None).facts
    return from_run(load_all(asked["run_dir"], baselines, run=asked["run_name"], facts=facts, progress=progress), given)


def _given(asked: Mapping[str, Any]) -> Given:
    from verl_audit.plan.profile import Given

    names = {f.name for f in fields(Given)} - {"durations", "theta"}
    return Given(durations=_durations(asked), **{name: asked[name] for name in names})


def _durations(asked: Mapping[str, Any]) -> Durations | None:
    from verl_audit.plan.profile import ASSUMED_CAP
    from verl_audit.plan.tail import from_sample, lognormal

    if asked["lengths"] is not None:
        return from_sample(_lengths(asked["lengths"]), f"{asked['lengths'].name}")
    if asked["sigma"] is not None:
        return lognormal(asked["sigma"], asked["cap"] or ASSUMED_CAP)
    if asked["cap"] is not None:
        raise AuditError("--cap needs --sigma")
    return None


def _lengths(path: Path) -> list[float]:
    """Numbers of a file, one a line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
    numbers = []
    for n, line in enumerate(lines, 1):
        try:
            value = float(line) if line.strip() else None
        except ValueError:
            raise AuditError(f"{path}:{n}: {line[:40]!r} is no length") from None
        if value is not None and not 0 <= value < 1e12:
            raise AuditError(f"{path}:{n}: {line[:40]!r} is no length")
        numbers += [] if value is None else [value]
    if not any(numbers):
        raise AuditError(f"{path}: it holds no length above 0")
    return numbers


MAX_SPLITS = 128
"""Splits scanned unless multiples are given."""


def _limits(asked: Mapping[str, Any], profile: Profile) -> Limits:
    from verl_audit.plan.search import Limits

    cards = asked["cards"] or profile.cards
    if cards < 2:
        raise AuditError("the run has 1 card, which cannot be split; give --cards")
    usual = next(m for m in (8, 4, 2, 1) if cards % m == 0 and (cards >= 8 * m or m == 1))
    while cards // usual > MAX_SPLITS:
        usual *= 2
    train = asked["train_multiple"] or usual
    return Limits(
        cards,
        train,
        asked["rollout_multiple"] or train,
        asked["ks"],
        asked["thetas"],
        asked["lag_budget"],
        asked["sync_budget"],
    )


FIGURES = ("step-time.svg", "per-card.svg", "timeline.svg")


def check_targets(asked: Mapping[str, Any]) -> None:
    """Refuse to write over what is not ours before anything is read."""
    from verl_audit.plan.export import check_target

    for kind, target in _targets(asked):
        check_target(target, kind)


def _targets(asked: Mapping[str, Any]) -> list[tuple[str, Path]]:
    found = [(".csv", asked["csv_file"]), (".html", asked["html"])]
    found += [(".json", Path(asked["json_file"]))] if asked["json_file"] not in (None, "-") else []
    found += [(".svg", asked["figures"] / name) for name in FIGURES] if asked["figures"] else []
    return [(kind, target) for kind, target in found if target is not None]


def write_files(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Write the files asked for."""
    from verl_audit.plan.export import to_csv, to_json
    from verl_audit.plan.figures import heatmaps, timeline
    from verl_audit.plan.page import to_html
    from verl_audit.plan.svg import heatmap_svg, timeline_svg

    if asked["csv_file"]:
        _write(asked["csv_file"], to_csv(plan))
    if asked["json_file"] not in (None, "-"):
        _write(Path(asked["json_file"]), to_json(plan))
    if asked["html"]:
        _write(asked["html"], to_html(plan))
    if asked["figures"]:
        lanes = timeline(plan)
        drawn = [heatmap_svg(figure) for figure in heatmaps(plan)] + ([timeline_svg(lanes)] if lanes else [])
        for name, text in zip(FIGURES, drawn, strict=False):
            _write(asked["figures"] / name, text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
