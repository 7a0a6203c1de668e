"""Files that a command is about to write: never over something that is not its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

from verl_audit.errors import AuditError
from verl_audit.report.document import KEYS, SCHEMA_VERSION

_OURS = re.compile(rb'\s*\{\s*"schema_version":\s*"[^"]*",\s*"tool":\s*\{\s*"name":\s*"verl-audit"')
_COMPARISON = re.compile(_OURS.pattern[:-1] + b' compare"')
_DUCKDB = b"DUCK"
_REPORTS: Mapping[str, tuple[str, re.Pattern[bytes]]] = {
    "html": (
        "HTML report",
        re.compile(rb'<!doctype html>.{0,200}<meta name="generator" content="verl-audit ', re.DOTALL),
    ),
    "markdown": ("Markdown report", re.compile(rb"<!-- verl-audit report -->")),
    "junit": ("JUnit report", re.compile(rb'<\?xml[^>]*\?>\s*<testsuites name="verl-audit"')),
}
"""How a file of each form begins, with its name."""


def check_json(target: Path) -> None:
    """Refuse to write over a file that is not an `audit.json`; a device such as /dev/null takes anything."""
    if target.is_file() and not _OURS.match(head(target)):
        raise AuditError(f"{target}: it exists and is no audit.json of verl-audit; give another name or remove it")


def check_comparison(target: Path) -> None:
    """Refuse to write over a file that is not a kept comparison."""
    if target.is_file() and not _COMPARISON.match(head(target)):
        raise AuditError(f"{target}: it exists and is no comparison of verl-audit; give another name or remove it")


def check_report(target: Path, form: str) -> None:
    """Refuse to write a report over a file that is not one of the same form."""
    name, begins = _REPORTS[form]
    if target.is_file() and not begins.match(head(target)):
        raise AuditError(f"{target}: it exists and is no {name} of verl-audit; give another name or remove it")


def is_document(path: Path) -> bool:
    """Whether a file is an `audit.json` that `--json` wrote."""
    return path.is_file() and _OURS.match(head(path)) is not None


def read_document(path: Path) -> dict[str, Any]:
    """A kept `audit.json`; `AuditError` where it is damaged or of another version."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AuditError(f"{path}: {error}") from None
    if document["schema_version"] != SCHEMA_VERSION:
        raise AuditError(
            f"{path}: its schema_version is {document['schema_version']}, this version reads {SCHEMA_VERSION}"
        )
    lacks = [key for key in KEYS if key not in document]
    if lacks:
        raise AuditError(f"{path}: it lacks {', '.join(lacks)}; make it again with diagnose --json")
    return document


def check_db(target: Path) -> None:
    """Refuse to write over a file that is not a store of ours, to a device and to standard output."""
    if str(target) == "-":
        raise AuditError("--db -: a store cannot be printed; give a file name")
    if target.exists() and not is_store(target):
        raise AuditError(f"{target}: it exists and is no store of verl-audit; give another name or remove it")


def is_store(path: Path) -> bool:
    """Whether a file is a DuckDB store that `--db` wrote."""
    if not path.is_file() or head(path)[8:12] != _DUCKDB:
        return False
    try:
        with open_kept(path) as con:
            return con.execute("SELECT count(*) FROM meta").fetchone() is not None and bool(
                con.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'segments'").fetchone()
            )
    except duckdb.Error:
        return False


def open_kept(path: Path) -> duckdb.DuckDBPyConnection:
    """A store that was written before, opened to be read; it reaches no other file and no network."""
    return duckdb.connect(
        str(path), read_only=True, config={"enable_external_access": False, "lock_configuration": True}
    )


def head(path: Path) -> bytes:
    """The first bytes of a file; `AuditError` when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(512)
    except OSError as error:
        raise AuditError(f"{path}: {error.strerror or error}") from None
