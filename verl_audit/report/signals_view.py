"""What `verl-audit signals` shows: every canonical series found in a run, what it means and where it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verl_audit.report.page import Page, clean, count, listed, number
from verl_audit.report.reading import stated

if TYPE_CHECKING:
    import duckdb

MAX_UNKNOWN = 30
NUMBERS = ("points", "first_step", "last_step", "last")
_ROWS = """
SELECT s.signal, s.label, s.key, count(*) AS points, min(s.step) AS first_step, max(s.step) AS last_step,
       arg_max(s.value, s.step) AS last, bool_and(s.derived) AS derived, min(k.unit_kind) AS unit_kind,
       min(k.against) AS against, min(k.contains) AS contains,
       min(k.inert_because) AS inert_because, min(k.corrupt_because) AS corrupt_because
FROM signals s LEFT JOIN key_map k ON k.run = s.run AND k.key = s.key
WHERE s.role = 'run' GROUP BY s.signal, s.label, s.key
UNION ALL
SELECT k.signal, k.label, k.key, count(m.step), min(m.step), max(m.step), arg_max(m.value, m.step), false,
       k.unit_kind, k.against, k.contains, k.inert_because, k.corrupt_because
FROM key_map k JOIN runs r ON r.run = k.run AND r.role = 'run' LEFT JOIN metrics m ON m.run = k.run AND m.key = k.key
WHERE k.corrupt_because IS NOT NULL
GROUP BY k.signal, k.label, k.key, k.unit_kind, k.against, k.contains, k.inert_because, k.corrupt_because
ORDER BY ALL
"""
_KEYS = """
SELECT k.key FROM key_map k JOIN runs r ON r.run = k.run AND r.role = 'run' WHERE k.standing = ? ORDER BY k.key
"""


_SOURCES = """
SELECT DISTINCT path, format, bytes, records, values_read, values_lost, source_id
FROM sources JOIN segments USING (source_id) JOIN runs USING (run) WHERE role = 'run' ORDER BY ALL
"""


def read_line(store: duckdb.DuckDBPyConnection) -> str:
    """What was read for the audited run, on one line."""
    result = store.execute(_SOURCES)
    names = [column[0] for column in result.description or ()]
    sources = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    return stated(sources, len(store.execute(_KEYS, ["unknown"]).fetchall()))


def signal_rows(store: duckdb.DuckDBPyConnection) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Rows for `render_signals` from a store: signals, known keys, unknown keys, all of the audited run."""
    result = store.execute(_ROWS)
    names = [column[0] for column in result.description or ()]
    rows = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    known, unknown = ([key for (key,) in store.execute(_KEYS, [s]).fetchall()] for s in ("known", "unknown"))
    return rows, known, unknown


def render_signals(
    rows: Sequence[Mapping[str, Any]], known: Sequence[str], unknown: Sequence[str], console: Console, read: str = ""
) -> None:
    """Print one entry a signal, then the keys that are not signals, then what was `read`.

    A row holds `signal, label, key, points, first_step, last_step, last, derived, unit_kind, against, contains,
    inert_because, corrupt_because`; any of them may be None or absent. `derived`: zeros that were filled in, not read.
    Rows of one signal and label that came from several keys (one key a framework version) are entries of their own.
    """
    page = Page(console)
    standings = Counter(map(_standing, rows))
    page.item(count(len(rows), "signal"), ", ".join(f"{n} {s}" for s, n in standings.most_common()), style="bold")
    page.blank()
    if rows:
        _show_rows(page, rows)
    page.heading("Keys", f"{len(known)} known and not needed by any rule, {len(unknown)} unknown")
    if unknown:
        page.item("unknown", listed(unknown, MAX_UNKNOWN), indent=2, column=12)
    if read:
        page.heading("Files", read)


def _show_rows(page: Page, rows: Sequence[Mapping[str, Any]]) -> None:
    """The numbers stand in columns; what explains them is stacked under the name."""
    widths = (max(page.width - 50, 20), 8, 6, 6, 11, 9)
    page.row(("signal", "standing", "points", "first", "last step", "last"), widths, style="bold")
    for row in rows:
        page.row(_cells(row), widths)
        for line in _explained(row):
            page.para(line, indent=4, hang=2)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = clean(row.get("signal")) + (f" [{clean(row['label'])}]" if row.get("label") else "")
    return (name, _standing(row), *(number(row.get(n)) for n in NUMBERS))


def _standing(row: Mapping[str, Any]) -> str:
    if row.get("corrupt_because"):
        return "corrupt"
    if row.get("inert_because"):
        return "inert"
    return "derived" if row.get("derived") else "present"


def _explained(row: Mapping[str, Any]) -> list[str]:
    told = [("from", "key"), ("unit", "unit_kind"), ("against", "against"), ("contains", "contains")]
    parts = [f"{word} {_plain(row[name])}" for word, name in told if row.get(name)]
    reasons = [
        f"{word}: {clean(row[name])}"
        for word, name in (("corrupt", "corrupt_because"), ("inert", "inert_because"))
        if row.get(name)
    ]
    return [", ".join(parts)] * bool(parts) + reasons


def _plain(value: Any) -> str:
    return (
        clean(value)
        if isinstance(value, str)
        else ", ".join(map(clean, value))
        if isinstance(value, list | tuple)
        else clean(value)
    )
