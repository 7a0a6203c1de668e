"""Write the generated pages and the README image: `python docs/generate.py`; `--check` only says what is stale.

rules.md comes from rules/, measures.md from the measure catalogue, signals.md from the signal adapters, store.md from
the schema, img/diagnose.svg from a diagnosis of a fixture. Nothing here reads a clock.
"""

from __future__ import annotations

import html
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from verl_audit import audit, load_rules
from verl_audit.diagnose.evaluate import SUFFIXES
from verl_audit.diagnose.rules import Rule
from verl_audit.ingest.adapters import Adapter, KeyMap, Remark, load_adapters, load_signals
from verl_audit.measure.model import catalog
from verl_audit.report.terminal import render

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


def main() -> None:
    """Write every page, or with --check list those that differ from what would be written."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: python docs/generate.py [--check]")
    stale = {path: text for path, text in pages().items() if not _same(path, text)}
    if check and stale:
        sys.exit(f"stale: {', '.join(str(p.relative_to(DOCS)) for p in stale)}; run `python docs/generate.py`")
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
        DOCS / "img" / "diagnose.svg": image(),
    }


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


# ------------------------------------------------------------------------------------------ the image


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
