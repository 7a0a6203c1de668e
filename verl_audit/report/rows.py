"""Print the rows of a query: a table, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import sys

import duckdb
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_rows(store: duckdb.DuckDBPyConnection, query: str, form: str, console: Console) -> None:
    """Run `query` and print what it returns; `form` is table, csv or json (one object a line)."""
    if not store.extract_statements(query):
        raise duckdb.InvalidInputException("the query holds no statement")
    result = store.execute(query)
    names = [column[0] for column in result.description or ()]
    rows = result.fetchall()
    if form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
    elif form == "json":
        for row in rows:
            console.out(json.dumps(dict(zip(names, row, strict=True)), default=str), highlight=False)
    else:
        console.print(_table(names, rows))
        console.print(f"{len(rows)} row{'s' * (len(rows) != 1)}")


def _table(names: list[str], rows: list[tuple[object, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
