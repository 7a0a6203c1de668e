"""Print the rows of a query: a table, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import sys

import duckdb
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from verl_audit.errors import AuditError
from verl_audit.report.page import clean, wrap

READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
"""Types of SELECT, WITH, FROM, VALUES, DESCRIBE, SHOW, SUMMARIZE and EXPLAIN."""


def print_rows(store: duckdb.DuckDBPyConnection, query: str, form: str, console: Console) -> None:
    """Run `query`, one statement that reads, and print what it returns; `form` is table, csv or json lines."""
    statements = store.extract_statements(query)
    if len(statements) != 1 or statements[0].type not in READING:
        raise AuditError("the query must be one statement: SELECT, WITH, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN")
    result = store.execute(query)
    names = [column[0] for column in result.description or ()]
    rows = result.fetchall()
    if form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
    elif form == "json":
        for row in rows:
            console.out(json.dumps(dict(zip(names, row, strict=True)), default=str), highlight=False)
    elif statements[0].type == duckdb.StatementType.EXPLAIN:
        for line in "\n".join(str(row[-1]) for row in rows).splitlines():
            _emit(line, console)
    else:
        _print_table(names, rows, console)


def _print_table(names: list[str], rows: list[tuple[object, ...]], console: Console) -> None:
    """Columns side by side where they fit whole; else one record per block, so that no number is ever broken."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(cell_len, [name, *column])) for name, *column in zip(names, *cells, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:
        right = [any(isinstance(v, int | float) for v in column) for column in zip(*rows, strict=True)] or [
            False
        ] * len(names)
        for row in [names, *cells]:
            line = "  ".join(_padded(*cell) for cell in zip(row, widths, right, strict=True))
            _emit(line.rstrip(), console, style="bold" if row is names else "")
    else:
        for number, row in enumerate(cells, 1):
            _print_block(f"row {number}", names, row, console)
    _emit(f"{len(rows)} row{'s' * (len(rows) != 1)}", console)


def _print_block(title: str, names: list[str], cells: list[str], console: Console) -> None:
    _emit(title, console, style="bold")
    column = max(map(cell_len, names)) + 4
    for name, cell in zip(names, cells, strict=True):
        room = max(console.width - column, 24)
        for i, line in enumerate(wrap(cell, room)):
            _emit(f"{_padded(f'  {name}' if i == 0 else '', column, right=False)}{line}".rstrip(), console)


def _emit(line: str, console: Console, style: str = "") -> None:
    console.print(Text(line, style, no_wrap=True, overflow="ignore"), soft_wrap=True)


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(value)
