"""Copies of a run in which one family of signals was never recorded: neither in its log nor in its traces.

The families are data in `hidden.toml`. A copy is poorer and nothing else: no value changes, and what stays stands where
it stood.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl_audit.errors import AuditError
from verl_audit.ingest.adapters import KeyMap, entry_matches, load_adapters
from verl_audit.trace.write import write

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


@dataclass(frozen=True)
class Family:
    """Signals that are recorded together or not at all; `hidden.toml` says what the fields mean."""

    name: str
    title: str
    signals: tuple[str, ...]
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def has(self, signal: str) -> bool:
        """Whether a canonical signal, or another name a verdict calls missing, is in it."""
        return any(fnmatchcase(signal, pattern) for pattern in self.signals)

    def hides(self, key: str) -> bool:
        """Whether a logged key tells a signal of the family, whatever the mode of the run."""
        return key.startswith(self.keys) or any(
            self.has(entry.signal) for entry in _entries() if entry_matches(entry, key)
        )

    def in_table(self, table: str) -> tuple[str, ...]:
        """Its columns of one trace table, COLUMN or COLUMN.FIELD."""
        return tuple(column.removeprefix(f"{table}.") for column in self.columns if column.startswith(f"{table}."))


@cache
def families() -> Mapping[str, Family]:
    """Every family by name, in the order of the file."""
    return {
        name: Family(name, row["title"], **{k: tuple(v) for k, v in row.items() if k != "title"})
        for name, row in _file()["family"].items()
    }


def kept() -> tuple[str, ...]:
    """Signals that no family hides."""
    return tuple(_file()["kept"])


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(files(__package__).joinpath("hidden.toml").read_text(encoding="utf-8"))
    return found


def family(name: str) -> Family:
    """One by name; `AuditError` for an unknown one."""
    if name not in families():
        raise AuditError(f"no family of signals {name!r}; one of {', '.join(families())}")
    return families()[name]


@cache
def _entries() -> tuple[KeyMap, ...]:
    """What the reference loop logs is verl's, so verl's adapter says which key is which signal."""
    return next(adapter for adapter in load_adapters() if adapter.framework == "verl").maps


def poorer(run: Path, out: Path, hidden: Family) -> Path:
    """Copy the run into the new directory `out` without the family."""
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        where = path.relative_to(run)
        if any(where.match(pattern) for pattern in hidden.files):
            continue
        target = out / where
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            target.write_bytes(_log(path.read_bytes().splitlines(), hidden))
        elif path.suffix == ".parquet":
            write(_table(pq.read_table(path), path.stem, hidden), target)
        else:
            shutil.copyfile(path, target)
    return out


def _log(lines: Iterable[bytes], hidden: Family) -> bytes:
    """Rows of the `file` logger without the keys of the family; a row left empty would not have been written."""
    gone: dict[str, bool] = {}
    rows = [orjson.loads(line) for line in lines]
    for row in rows:
        gone |= {key: hidden.hides(key) for key in row["data"] if key not in gone}
        row["data"] = {key: value for key, value in row["data"].items() if not gone[key]}
    return b"".join(orjson.dumps(row) + b"\n" for row in rows if row["data"])


def _table(found: pa.Table, name: str, hidden: Family) -> pa.Table:
    if hidden.only and "fate" in found.column_names:
        found = found.filter(pc.is_in(pc.cast(found["fate"], pa.string()), value_set=pa.array(hidden.only)))
    for column in hidden.in_table(name):
        outer, _, inner = column.partition(".")
        i = found.column_names.index(outer)
        kind = found.schema.field(i)
        parts = [_without(chunk, inner) if inner else pa.nulls(len(chunk), kind.type) for chunk in found[i].chunks]
        found = found.set_column(i, kind, pa.chunked_array(parts, kind.type))
    return found


def _without(segments: pa.ListArray, name: str) -> pa.ListArray:
    """A list of structs with one field null; null lists stay null."""
    inner = segments.values
    fields = list(segments.type.value_type)
    arrays = [pa.nulls(len(inner), f.type) if f.name == name else inner.field(i) for i, f in enumerate(fields)]
    structs = pa.StructArray.from_arrays(arrays, fields=fields)
    return pa.ListArray.from_arrays(segments.offsets, structs, segments.type, mask=segments.is_null())
