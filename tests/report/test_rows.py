from __future__ import annotations

import io

import duckdb
import pytest
from rich.cells import cell_len
from rich.console import Console

from verl_audit.report.rows import print_rows


def shown(query: str, width: int = 80) -> list[str]:
    out = io.StringIO()
    with duckdb.connect() as con:
        print_rows(con, query, "table", Console(file=out, width=width))
    return out.getvalue().splitlines()


def test_columns_that_fit_stand_side_by_side_numbers_to_the_right() -> None:
    assert shown("select 7 as step, 0.25::double as share, 'a' as name union all select 12, null, 'bc' order by 1") == [
        "step  share  name",
        "   7   0.25  a",
        "  12         bc",
        "2 rows",
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_and_no_header_is_broken_where_they_do_not_fit(width: int) -> None:
    columns = ", ".join(f"{n}1234567 as a_long_name_of_column_{n}" for n in range(1, 9))
    lines = shown(f"select {columns} union all select {columns}", width)
    assert lines[:2] == ["row 1", "  a_long_name_of_column_1  11234567"]
    assert lines[9] == "row 2" and lines[-1] == "2 rows"
    assert max(map(cell_len, lines)) <= width


def test_no_rows() -> None:
    assert shown("select 1 as x where false") == ["x", "0 rows"]


def test_text_of_a_log_is_shown_without_its_codes() -> None:
    assert shown("select chr(27) || '[31mred[/]' as x") == ["x", "red[/]", "1 row"]
