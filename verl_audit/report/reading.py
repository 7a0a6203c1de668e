"""What a finished reading states on one line: bytes, records, values, what of them was lost, keys not understood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_audit.report.page import count


def stated(sources: Sequence[Mapping[str, Any]], unknown_keys: int) -> str:
    """The line for rows of `sources` in the audit document (path, format, bytes, records, values read and lost)."""
    if not sources:
        return "none read"
    files = f"{count(len({s['path'] for s in sources}), 'file')} ({_size(_bytes(sources))})"
    read = f"{count(_sum(sources, 'records'), 'record')}, {count(_sum(sources, 'values_read'), 'value')}"
    unknown = f", {count(unknown_keys, 'key')} unknown" if unknown_keys else ""
    return f"{files}, {read}, {_sum(sources, 'values_lost')} lost{unknown}"


def _bytes(sources: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the files: two readers may go through one file, and one reader may find several runs in it."""
    sizes: dict[str, dict[str, int]] = {}
    for s in sources:
        of_file = sizes.setdefault(s["path"], {})
        of_file[s["format"]] = of_file.get(s["format"], 0) + (s.get("bytes") or 0)
    return sum(max(of_file.values()) for of_file in sizes.values())


def _size(size: int) -> str:
    """Bytes with three digits in units of 1000."""
    amount = float(size)
    for unit in ("bytes", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(row.get(name) or 0 for row in rows)
