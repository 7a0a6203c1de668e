"""Write the generated pages and the README image: `python docs/generate.py`; `--check` only says what is stale.

rules.md comes from rules/, measures.md from the measure catalogue, signals.md from the signal adapters, store.md from
the schema, img/diagnose.svg from a diagnosis of a fixture, the tables of formats in README.md and formats.md from
the list beside the readers, the tables of plan.md from the planner, scenarios.md and img/scenarios.svg from the
scenarios and docs/reference-runs.json (written by docs/reference_runs.py), accuracy.md and the statement of the HTML
report from docs/accuracy.json (written by benchmarks/accuracy.py), the clock's tables of plan.md from
docs/plan-clock.json (written by benchmarks/plan_clock.py). Nothing here reads a clock.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import accuracy_tables
import plan_tables
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from verl_audit import audit, load_rules
from verl_audit.diagnose.evaluate import SUFFIXES
from verl_audit.diagnose.rules import Rule
from verl_audit.ingest.adapters import Adapter, KeyMap, Remark, load_adapters, load_signals
from verl_audit.measure.model import catalog
from verl_audit.reference import Scenario, environments, scenarios
from verl_audit.report.terminal import render
from verl_audit.trace.schema import BLOB, COLUMNS, FATES, LOG_PROBS, SEGMENT, SUMS, TABLES, Column

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parent
REAL = DOCS.parent / "fixtures" / "real"
NOTE = "<!-- Written by docs/generate.py from {source}; do not edit by hand. -->\n"
HEADINGS = {
    "health": "Health of the run",
    "mismatch": "Step 1: train-inference mismatch",
    "staleness": "Step 2: staleness",
    "eviction": "Step 3: eviction bias",
    "sync": "Step 4: weight sync",
    "resources": "Resources",
    "config": "Configuration",
}
WIDTH = 88
MARKS = (
    "<!-- formats: written by docs/generate.py from verl_audit/ingest/formats.toml -->",
    "<!-- end of formats -->",
)


def main() -> None:
    """Write every page, or with --check list those that differ from what would be written."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: python docs/generate.py [--check]")
    stale = {path: text for path, text in pages().items() if not _same(path, text)}
    if check and stale:
        sys.exit(f"stale: {', '.join(os.path.relpath(p, DOCS) for p in stale)}; run `python docs/generate.py`")
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """Every generated file and its text."""
    return {
        DOCS / "rules.md": rules_page(),
        DOCS / "measures.md": measures_page(),
        DOCS / "signals.md": signals_page(),
        DOCS / "store.md": store_page(),
        DOCS / "trace-schema.md": trace_schema_page(),
        DOCS / "plan.md": plan_page(),
        DOCS / "scenarios.md": scenarios_page(),
        DOCS / "accuracy.md": accuracy_tables.page(_table, NOTE.format(source="accuracy.json")),
        DOCS.parent / "verl_audit" / "report" / "accuracy.json": json.dumps(accuracy_tables.statement(), indent=2)
        + "\n",
        DOCS / "img" / "scenarios.svg": curves_image(),
        DOCS / "img" / "diagnose.svg": image(),
        DOCS.parent / "README.md": _with_table(DOCS.parent / "README.md", support_table()),
        DOCS / "formats.md": _with_table(DOCS / "formats.md", formats_table()),
    }


def _with_table(path: Path, table: str) -> str:
    """A page written by hand, with the table between its marks replaced."""
    head, start, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not start or not end:
        sys.exit(f"{path.name}: the marks of the table are gone: {MARKS[0]} ... {MARKS[1]}")
    return f"{head}{start}\n\n{table}\n{end}{tail}"


def _formats(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(
        files("verl_audit.ingest").joinpath("formats.toml").read_text(encoding="utf-8")
    )[kind]
    return found


def support_table() -> str:
    """The formats in short: what is read, and whether NaN and infinities come out."""
    rows = [f"| {s['title']} | {s['files']} | {s['kept']} |\n" for s in _formats("source")]
    beside = [f"| {s['title']} | {s['files']} | |\n" for s in _formats("beside")]
    return "| source | files | NaN, inf kept |\n| --- | --- | --- |\n" + "".join([*rows, *beside])


def formats_table() -> str:
    """The formats in full."""
    names = [", its console text ".join(f"`{name}`" for name in s["formats"]) for s in _formats("source")]
    rows = [
        f"| {s['title']} | {name} | {s['nonfinite']} | {s['lacks'] or '-'} | {s['damage']} |\n"
        for s, name in zip(_formats("source"), names, strict=True)
    ]
    head = "| format | name in reports | NaN and infinities | what it cannot say | after damage |\n"
    return head + "| --- | --- | --- | --- | --- |\n" + "".join(rows)


def _same(path: Path, text: str) -> bool:
    """Whether a file says the same; of an image only the words count, since its drawing changes with rich."""
    if not path.exists():
        return False
    old = path.read_text(encoding="utf-8")
    return _words(old) == _words(text) if path.suffix == ".svg" else old == text


def _words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(c) for c in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _anchor(title: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# ---------------------------------------------------------------------------------------------- rules.md


def rules_page() -> str:
    """Every rule: what it detects, when, its numbers and their source, how to refute it, what to change."""
    rules = load_rules().rules
    parts = [NOTE.format(source="rules/"), "# Rules\n\n", _RULES_INTRO.format(n=len(rules))]
    table = ([f"[{r.id}](#{_anchor(r.id)})", str(r.step), r.severity, r.confidence, r.title] for r in rules)
    parts.append(_table(["rule", "step", "severity", "confidence", "detects"], table))
    for cause, group in groupby(rules, lambda r: r.cause):
        parts.append(f"\n## {HEADINGS[cause]}\n")
        parts += [_rule(rule) for rule in group]
    return "".join(parts)


_RULES_INTRO = """{n} rules. Each is one file in [rules/](../rules), an SQL condition over [measures](measures.md): true
means fired, false clear, NULL insufficient (the finding then names what was not recorded). Every number is a
parameter: `--set RULE.PARAMETER=VALUE`, or `verl-audit.toml`, changes it. A rule decides nothing alone: how findings
become a verdict is in [verdict.md](verdict.md), how to write your own in [writing-rules.md](writing-rules.md).

"""


def _rule(rule: Rule) -> str:
    parts = [f"\n### {rule.id}\n\n**{rule.title}.** Severity {rule.severity}, confidence {rule.confidence}.\n"]
    parts.append(f"\n{_explained(rule.explain)}\n")
    parts.append(f"\nWhen:\n\n```sql\n{rule.when.strip()}\n```\n")
    if rule.applies:
        parts.append(f"\nApplies where `{' '.join(rule.applies.split())}`.\n")
    if rule.params:
        numbers = ([_code(name), str(p.value), p.source] for name, p in rule.params.items())
        parts.append("\n" + _table(["number", "value", "from"], numbers))
    parts.append(f"\nReads: {', '.join(_measure_link(m) for m in _measures(rule))}.\n")
    confusable = list(dict.fromkeys(case.confusable for case in rule.cases if case.confusable))
    if confusable:
        parts.append(f"\nNot to be confused with: {', '.join(_code(c) for c in confusable)} (a case in the file).\n")
    if rule.confirm:
        parts.append(f"\nConfirm: {_explained(rule.confirm)}\n")
    if rule.remedy:
        rows = ([r.framework, _code(r.set), r.price] for r in rule.remedy)
        parts.append("\n" + _table(["framework", "set", "price"], rows))
    if rule.refs:
        parts.append("\nReferences: " + ", ".join(f"<{r}>" if "://" in r else _code(r) for r in rule.refs) + ".\n")
    return "".join(parts)


def _explained(text: str) -> str:
    """Text of a rule with its placeholders as names."""
    named = re.sub(r"\{(\w+)[^}]*\}", r"`\1`", " ".join(text.split()))
    return textwrap.fill(named, 116, break_long_words=False, break_on_hyphens=False)


def _measures(rule: Rule) -> list[str]:
    """Measures that a rule names, in the order of its text."""
    words = re.findall(r"[a-z_][a-z0-9_]*", re.sub(r"'[^']*'", "", f"{rule.when} {rule.applies}"))
    return list(dict.fromkeys(m for m in (_stem(w) for w in words) if m in catalog()))


def _stem(word: str) -> str:
    return next((word.removesuffix(s) for s in SUFFIXES if word.endswith(s) and word not in catalog()), word)


def _measure_link(name: str) -> str:
    return f"[{name}](measures.md#{'facts' if catalog()[name].unit == 'fact' else name})"


# ------------------------------------------------------------------------------------------- measures.md


def measures_page() -> str:
    """Every measure: unit, definition, signals it needs."""
    parts = [NOTE.format(source="verl_audit/measure/catalog.toml"), "# Measures\n", _MEASURES_INTRO]
    numbers = [d for d in catalog().values() if d.unit != "fact"]
    parts += [f"\n### {d.name}\n\n{d.definition}\n\nUnit: {d.unit}. {_needs(d.needs, d.baseline)}\n" for d in numbers]
    facts = ([f"`{d.name}`", d.type, d.definition] for d in catalog().values() if d.unit == "fact")
    parts.append("\n## Facts\n\nRead from the configuration, else inferred from the keys; `--set fact.NAME=VALUE`")
    parts.append(" sets one.\n\n" + _table(["fact", "type", "meaning"], facts))
    return "".join(parts)


_MEASURES_INTRO = """
A measure is a quantity computed from [signals](signals.md) over all judged steps unless its definition says
otherwise. Rules name them in SQL. A number also brings `NAME_low` and `NAME_high` (95 % interval unless said) and
`NAME_n` (points used). A measure without value is NULL, and the report says for want of which signal.
"""


def _needs(needs: Sequence[Sequence[str]], baseline: bool) -> str:
    wanted = [" or ".join(_code(s) for s in alternatives) for alternatives in needs]
    wanted += ["a baseline run"] if baseline else []
    return f"Needs: {'; '.join(wanted)}." if wanted else "Needs no signal."


# -------------------------------------------------------------------------------------------- signals.md


def signals_page() -> str:
    """Canonical signals, and for each framework the keys they come from."""
    parts = [NOTE.format(source="verl_audit/ingest/signals/"), "# Signals\n", _SIGNALS_INTRO]
    rows = (
        [
            f"`{s.name}`",
            s.unit,
            f"{s.reducer} over {s.weight}s",
            "" if s.on_policy is None else f"{s.on_policy:g}",
            s.description,
        ]
        for s in load_signals().values()
    )
    parts.append(_table(["signal", "unit", "taken as", "on-policy value", "meaning"], rows))
    parts += [_adapter(adapter) for adapter in load_adapters()]
    return "".join(parts)


_SIGNALS_INTRO = """
A signal is a metric series under one name, whatever framework logged it. The *on-policy value* is what a run with
lag 0 and no mismatch would show. `verl-audit signals RUN_DIR` shows the signals of a run. Keys that no adapter knows
stay in the table `metrics` and are counted.

"""


def _adapter(adapter: Adapter) -> str:
    parts = [f"\n## {adapter.framework}\n\nCovers {adapter.covers}.\n\n"]
    rows = ([_key(m), f"`{m.signal}`", m.against, ", ".join(m.contains), _remarks(m)] for m in adapter.maps)
    parts.append(_table(["key", "signal", "against", "contains", "remarks"], rows))
    settings = {m.signal: m.record for m in adapter.maps if m.record} | dict(adapter.unrecorded)
    if settings:
        parts.append("\nWhat records them:\n\n" + _table(["signal", "setting"], _pairs(settings)))
    if adapter.known:
        known = ([_code(k.pattern.pattern), k.note] for k in adapter.known)
        parts.append("\nUnderstood, and no signal:\n\n" + _table(["keys", "what they are"], known))
    return "".join(parts)


def _pairs(settings: Mapping[str, str]) -> list[list[str]]:
    return [[_code(name), text] for name, text in sorted(settings.items())]


def _key(entry: KeyMap) -> str:
    return _code(entry.key or (entry.pattern.pattern if entry.pattern else ""))


def _remarks(entry: KeyMap) -> str:
    """Where an entry holds, and when its value is inert or corrupt."""
    said = [f"only {', '.join(sorted(entry.trainers))}" if entry.trainers else ""]
    said += [f"not {', '.join(sorted(entry.not_trainers))}" if entry.not_trainers else ""]
    said += [f"since {entry.since}" if entry.since else "", f"until {entry.until}" if entry.until else ""]
    said += [f"where {_condition(entry.when)}" if entry.when else ""]
    said += [f"0 where it is left out and `{entry.zero_with}` is logged" if entry.zero_with else ""]
    said += [f"**inert** {_remark(r)}" for r in entry.inert]
    said += [f"**corrupt** {_remark(r)}" for r in entry.corrupt]
    return "; ".join(s for s in said if s)


def _remark(remark: Remark) -> str:
    return f"{f'where {_condition(remark.when)}: ' if remark.when else ''}{remark.because}"


def _condition(when: Mapping[str, Sequence[object]]) -> str:
    return " and ".join(f"{fact} is {' or '.join(str(v) for v in values)}" for fact, values in when.items())


# ---------------------------------------------------------------------------------------------- store.md


def store_page() -> str:
    """The tables as the schema documents them, and queries to begin with."""
    schema = files("verl_audit.store").joinpath("schema.sql").read_text(encoding="utf-8").strip()
    return (
        NOTE.format(source="verl_audit/store/schema.sql")
        + _STORE_INTRO
        + f"\n## Tables and views\n\n```sql\n{schema}\n```\n"
        + "\n## Example queries\n"
        + "".join(f"\n{title}:\n\n```sql\n{query}\n```\n" for title, query in QUERIES.items())
    )


_STORE_INTRO = """# The store

Everything read from a run stands in one DuckDB database: in memory, or kept with `diagnose --db FILE`. Query it with

    verl-audit sql RUN_DIR 'select step, lag_oldest_mean from steps'
    verl-audit sql RUN_DIR --baseline SYNC_DIR --format csv 'select ...'

from Python with `audit(...).sql(query)`, or with any DuckDB client on the file. DuckDB locks a database while a process
writes it; `--db` writes the file aside and renames it, so it is whole whenever it is there. A query can neither open
files nor load extensions.

## Again with the same file

`diagnose --db FILE` on a run that has gone on parses only files that are new or changed; the rows of the others come
from FILE, and the outcome is that of reading everything. What was parsed is told on stderr and by `audit(...).reading`.

- A file is unchanged if its absolute path, size, modification time and first 4 KiB are the same. An edit that keeps
  the size is told by its time alone; if something sets times back, remove FILE.
- A file that has grown is read again from its start: what a line means may depend on those before it. A folder of
  dumps, of parquet parts or of one MLflow run is one source, and so is a database with its journal.
- Every file is still opened to tell its format; a console is searched up to its first step line.
- A store that another version wrote, or that is damaged, is built anew. FILE grows by the rows of other runs found
  beside the one judged. It holds no path of the machine but those the views show.
"""

QUERIES = {
    "Trained reward and evictions beside each other": (
        "SELECT step, reward_trained, validation, stale_groups FROM steps ORDER BY step"
    ),
    "How each logged key was understood": (
        "SELECT standing, key, signal, inert_because, corrupt_because FROM key_map ORDER BY standing, key"
    ),
    "Gap on steps without lag, by run": (
        "SELECT role, run, avg(g.value) AS gap, count(*) AS steps\n"
        "FROM signals g JOIN signals l USING (run, role, step)\n"
        "WHERE g.signal = 'gap_prob_mean' AND l.signal = 'lag_oldest_max' AND l.value = 0\n"
        "GROUP BY ALL ORDER BY ALL"
    ),
    "Values that are not finite": ("SELECT run, key, step, kind FROM metrics WHERE kind <> 'finite' ORDER BY ALL"),
    "Where two files of one run differ": "SELECT * FROM differences ORDER BY ALL LIMIT 20",
    "What could not be read": "SELECT * FROM problems ORDER BY ALL",
    "Why the run is taken for what it is": "SELECT fact, value, reason FROM facts ORDER BY ALL",
}
"""Queries of the page; the tests run them."""


# ---------------------------------------------------------------------------------------------- plan.md


def plan_page() -> str:
    """The page as it stands, with its tables and its example computed again."""
    text = (DOCS / "plan.md").read_text(encoding="utf-8")
    for name, (head, rows) in plan_tables.tables().items():
        text = _between(text, f"table {name}", _table(head, rows))
    return _between(text, "example", f"```text\n{plan_tables.example()}```\n")


def _between(text: str, mark: str, new: str) -> str:
    """The text with what stands between `<!-- mark -->` and `<!-- end -->` replaced; the mark must be there once."""
    found = re.findall(rf"<!-- {mark} -->\n.*?<!-- end -->\n", text, re.DOTALL)
    if len(found) != 1:
        sys.exit(f"plan.md: {len(found)} marks <!-- {mark} -->, not 1")
    return text.replace(found[0], f"<!-- {mark} -->\n\n{new}\n<!-- end -->\n")


# ---------------------------------------------------------------------------------------- scenarios.md


def scenarios_page() -> str:
    """Every scenario with its truth, stated and measured."""
    runs = _reference_runs()
    parts = [NOTE.format(source="verl_audit/reference/scenarios.toml and reference-runs.json"), _SCENARIOS_INTRO]
    parts += [f"- `--env {e.name}`: {e.text}\n" for e in environments().values()]
    head = ["scenario", "what happens", "slows it", "at work", *(f"{env}" for env in runs)]
    for family, group in groupby(scenarios(), lambda s: s.family):
        parts.append(f"\n## {FAMILIES[family]}\n\n")
        rows = ([*_truth(s), *(_speeds(runs[env].get(s.name)) for env in runs)] for s in group)
        parts.append(_table(head, rows))
    return "".join(parts)


def _reference_runs() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Measured runs by environment, in the order of the scenario file, and scenario."""
    found = json.loads((DOCS / "reference-runs.json").read_text(encoding="utf-8"))
    return {env: found[env] for env in environments()}


FAMILIES = {
    "baseline": "Baselines",
    "harmless": "Harmless asynchrony",
    "mismatch": "Mismatch",
    "staleness": "Staleness",
    "eviction": "Eviction",
    "sync": "Weight sync",
    "two": "Two causes",
    "other": "None of the four",
}
_SCENARIOS_INTRO = """# Scenarios

Runs that `verl-audit simulate SCENARIO -o DIR` writes, and what is true of them. How they come about is told in
[reference-loop.md](reference-loop.md).

*Slows it* is what makes learning slow; *at work* are mechanisms that are present, harmful or not. The last columns are
measured: learning speed per update against the baseline of the scenario in that environment (1 = as fast), and after
the slash the updates the baseline needs for what the run reaches at its end, as a share of those the run took, which
shows a plateau. Means over the seeds (3 in `small`, 1 to 3 elsewhere); a dash where the baseline itself hardly learns,
nothing where it was not measured. Both come from the exact expected reward of the policy, not from a metric. Written
by `python docs/reference_runs.py`.

"""


def _truth(s: Scenario) -> list[str]:
    slows = ", ".join(s.causes) or (s.other or "")
    slows += " (per hour only)" if s.per_hour else ""
    fixes = f" Fixes `{s.fixes}`." if s.fixes else ""
    return [f"`{s.name}`", f"{s.title}.{fixes}", slows, ", ".join(s.at_work)]


def _speeds(found: Mapping[str, list[float | None]] | None) -> str:
    if found is None:
        return ""
    if None in found["speed_per_update"]:
        return "–"
    means = [sum(v or 0 for v in found[key]) / len(found[key]) for key in ("speed_per_update", "speed_to_end")]
    return " / ".join(f"{mean:.2f}" for mean in means)


CURVES = {
    "A cause each": ("sync", "fp4_bypass", "stale_bypass", "drop", "frozen_unlabelled"),
    "The same, with its fix": ("sync", "fp4_tis", "async_admission", "async_wait", "async"),
    "None of the four": ("sync", "entropy_collapse", "rate_decayed", "reward_hacking", "truncation"),
}
COLOURS = ("#222222", "#d55e00", "#0072b2", "#009e73", "#cc79a7")
PANEL, GAP, TOP, HEIGHT = 300, 36, 34, 220


def curves_image() -> str:
    """Exact expected reward over updates in the first environment, three panels."""
    env, runs = next(iter(_reference_runs().items()))
    width = len(CURVES) * (PANEL + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 118}" '
        'font-family="system-ui, sans-serif" font-size="12">\n',
        '<rect width="100%" height="100%" fill="#ffffff"/>\n',
    ]
    for i, (title, names) in enumerate(CURVES.items()):
        parts.append(_panel(GAP + i * (PANEL + GAP), title, {n: runs[n] for n in names}))
    parts.append(f'<text x="{GAP}" y="{TOP + HEIGHT + 34}">optimizer updates ({env}); expected reward 0 to 1</text>\n')
    return "".join(parts) + "</svg>\n"


def _panel(left: int, title: str, found: Mapping[str, Mapping[str, list[float]]]) -> str:
    end = max(max(run["updates"]) for run in found.values())
    parts = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}</text>\n']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<path d="M{left} {y:.0f}h{PANEL}" stroke="#dddddd"/>\n')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end" fill="#666666">{share:g}</text>\n')
    for share in (0, 0.5, 1):
        x = left + PANEL * share
        parts.append(f'<text x="{x:.0f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{end * share:g}</text>\n')
    for i, (name, run) in enumerate(found.items()):
        points = zip(run["updates"], run["reward"], strict=True)
        line = " ".join(f"{left + PANEL * u / end:.1f},{TOP + HEIGHT * (1 - r):.1f}" for u, r in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>\n')
        x, y = left + (i % 2) * PANEL // 2, TOP + HEIGHT + 58 + 20 * (i // 2)
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{COLOURS[i]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{name}</text>\n')
    return "".join(parts)


# ------------------------------------------------------------------------------------------ the image


def trace_schema_page() -> str:
    """The tables between the marks of docs/trace-schema.md, whose other text is written by hand."""
    path = DOCS / "trace-schema.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(_TRACE_BEGIN)
    _, _, after = rest.partition(_TRACE_END)
    return f"{before}{_TRACE_BEGIN}\n\n{_trace_tables()}\n{_TRACE_END}{after}"


_TRACE_BEGIN = "<!-- from here to the end mark: written by docs/generate.py from verl_audit/trace/schema.py -->"
_TRACE_END = "<!-- end -->"


def _trace_tables() -> str:
    parts = [
        "## Fates\n\n" + _table(["fate", "meaning"], [[_code(name), text] for name, text in FATES.items()]),
        *(
            f"## {t.capitalize()}\n\n{_table(['column', 'type', 'meaning'], map(_trace_row, COLUMNS[t]))}"
            for t in TABLES
        ),
        "## Fields of `segments`\n\n" + _table(["field", "type"], [[_code(f.name), str(f.type)] for f in SEGMENT]),
        "## Fields of `sums`\n\n" + _table(["field", "type"], [[_code(f.name), str(f.type)] for f in SUMS]),
    ]
    return "\n".join(parts)


def _trace_row(column: Column) -> list[str]:
    """Name, type and meaning; long types by the name of their section."""
    kind = re.sub(r"element: | not null|values=|, tz=UTC", "", str(column.type))
    kind = {"fate": "string, as a dictionary", "segments": "list<struct>", "sums": "list<struct>"}.get(
        column.name, kind
    )
    blob = f" (or `{column.name}{BLOB}`)" if column.name in LOG_PROBS else ""
    return [_code(column.name) + blob, kind, column.meaning + ("; required" if column.required else "")]


def image() -> str:
    """The head of a real report: verdict, the four steps, the first finding."""
    os.environ.pop("NO_COLOR", None)
    drawn = Console(
        file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    found = audit(REAL / "async_drop_bias", baselines=[REAL / "sync_baseline"])
    render(found.document, drawn)
    assert isinstance(drawn.file, io.StringIO)
    canvas = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    canvas.print(Text("$ verl-audit diagnose async_drop_bias/ --baseline sync_baseline/\n", style="bold"))
    canvas.print(Text.from_ansi("\n".join(_head(drawn.file.getvalue().splitlines()))))
    svg = canvas.export_svg(title="verl-audit", theme=MONOKAI, unique_id="diagnose")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _head(lines: list[str]) -> list[str]:
    """The lines up to the second finding."""
    findings = [i for i, line in enumerate(lines) if re.match(r"\s+(INFO|LOW|MEDIUM|HIGH|CRITICAL)\b", _bare(line))]
    return lines[: findings[1]] if len(findings) > 1 else lines


def _bare(line: str) -> str:
    return html.unescape(re.sub(r"\x1b\[[0-9;]*m", "", line))


if __name__ == "__main__":
    main()
