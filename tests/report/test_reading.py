from __future__ import annotations

from typing import Any

from verl_audit.report.reading import stated


def source(path: str, form: str = "wandb", **changes: Any) -> dict[str, Any]:
    counts = {"path": path, "format": form, "bytes": 1500, "records": 3, "values_read": 30, "values_lost": 0}
    return counts | changes


def test_bytes_records_values_and_what_is_lost_or_unknown() -> None:
    assert stated([source("a"), source("b", values_lost=2)], 4) == (
        "2 files (3 kB), 6 records, 60 values, 2 lost, 4 keys unknown"
    )
    assert stated([source("a", bytes=999)], 0) == "1 file (999 bytes), 3 records, 30 values, 0 lost"
    assert stated([], 0) == "none read"


def test_a_file_that_two_readers_went_through_counts_once() -> None:
    both = [source("a"), source("a", "wandb_output", bytes=200)]
    assert stated(both, 0).startswith("1 file (1.5 kB), 6 records")


def test_the_runs_of_one_console_share_its_bytes() -> None:
    assert stated([source("a"), source("a", bytes=2_000_000_000)], 0).startswith("1 file (2 GB)")
