"""Sums of a source kept beside the run's own files, never among them: a growing run reads only what is new.

One file for each source, settings, kernel and reducer version. It is parquet with page checksums, written aside and
renamed, and holds the fingerprint of the source it was made from: another fingerprint or damage means that it is made
anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_audit.errors import AuditError
from verl_audit.ingest.model import Problem
from verl_audit.measure.tokens.exact import LIMBS
from verl_audit.measure.tokens.files import fingerprint, is_remote
from verl_audit.measure.tokens.kernel import Kernel
from verl_audit.measure.tokens.shard import Source, name_of
from verl_audit.measure.tokens.spec import REDUCER_VERSION, Spec
from verl_audit.measure.tokens.sums import LAYOUTS, TRAJECTORIES, Grouped, TokenSums

_KEY = b"verl_audit.tokens"
DAMAGE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)
"""What a damaged entry raises."""


def default_folder() -> Path:
    """`verl-audit/tokens` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-audit" / "tokens"


def checked_folder(folder: Path, sources: list[Source]) -> Path:
    """The folder, if no source lies in or below it. Raises `AuditError`: a run's directory is not written to."""
    whole = folder.resolve()
    for source in sources:
        path = source if isinstance(source, str) else str(source.path)
        home = Path(path).resolve().parent
        if not is_remote(path) and (whole == home or home in whole.parents):
            raise AuditError(f"{folder}: the cache would lie in the run's directory {home}; name another one")
    return whole


def get(folder: Path, source: Source, spec: Spec, kernel: Kernel) -> TokenSums | None:
    """The kept sums of a source as it is now; None if there are none, or only of another state, or damaged."""
    try:
        table = pq.read_table(_entry(folder, source, spec, kernel), page_checksum_verification=True)
        if (table.schema.metadata or {}).get(_KEY) != state_of(source):
            return None
        blobs = dict(zip(table["name"].to_pylist(), table["ipc"].to_pylist(), strict=True))
        return _unpacked(name_of(source), {name: pa.ipc.open_stream(blob).read_all() for name, blob in blobs.items()})
    except DAMAGE:
        return None


def put(folder: Path, source: Source, spec: Spec, kernel: Kernel, sums: TokenSums, state: bytes) -> None:
    """Keep the sums that were made of a source in `state`, in the place of older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = _packed(name_of(source), sums)
    blobs = [_ipc(table) for table in tables.values()]
    table = pa.table({"name": list(tables), "ipc": pa.array(blobs, pa.large_binary())}).replace_schema_metadata(
        {_KEY: state}
    )
    entry = _entry(folder, source, spec, kernel)
    aside = entry.with_suffix(f".{uuid4().hex}.tmp")
    pq.write_table(table, aside, compression="zstd", use_dictionary=False, write_page_checksum=True)
    aside.replace(entry)


def state_of(source: Source) -> bytes:
    """What an entry must have been made from to be taken. Raises `OSError` if the source is not there."""
    if isinstance(source, str):
        marks: object = asdict(fingerprint(source))
    else:
        files = [source.path] if source.path.is_file() else sorted(p for p in source.path.rglob("*") if p.is_file())
        marks = {str(path): asdict(fingerprint(str(path))) for path in files}
    return json.dumps(marks, sort_keys=True).encode()


def _entry(folder: Path, source: Source, spec: Spec, kernel: Kernel) -> Path:
    if isinstance(source, str):
        told: object = source if is_remote(source) else str(Path(source).resolve())
    else:
        told = {**asdict(source), "path": str(source.path.resolve()), "dropped": sorted(source.dropped), "problems": 0}
    key = json.dumps([REDUCER_VERSION, kernel, asdict(spec), told], sort_keys=True, default=str)
    return folder / f"{sha256(key.encode()).hexdigest()[:32]}.parquet"


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _packed(name: str, sums: TokenSums) -> dict[str, pa.Table]:
    tables = {
        key: pa.table(
            [pa.array(_flat(array), pa.list_(_type(array))) for array in arrays],
            _ARRAYS,
        )
        for key, part in sums.groups.items()
        for arrays in [(part.keys, part.counts, part.limbs, part.maxima)]
    }
    noticed = pa.table({"name": list(sums.noticed), "count": pa.array(list(sums.noticed.values()), pa.int64())})
    problems = pa.Table.from_pylist([asdict(problem) for problem in sums.problems], _PROBLEM)
    return {**tables, "trajectories": sums.trajectories[name], "noticed": noticed, "problems": problems}


_PROBLEM = pa.schema(
    [
        *((name, pa.string()) for name in ("file", "kind", "detail")),
        *((name, pa.int64()) for name in ("offset", "count")),
    ]
)
_ARRAYS = ["keys", "counts", "limbs", "maxima"]


def _flat(array: np.ndarray) -> list[np.ndarray]:
    """One list a row; none where a source has no row, whose width numpy cannot tell."""
    return list(array.reshape(len(array), -1)) if len(array) else []


def _type(array: np.ndarray) -> pa.DataType:
    return pa.float64() if array.dtype.kind == "f" else pa.int64()


def _unpacked(name: str, tables: dict[str, pa.Table]) -> TokenSums:
    groups = {}
    for key, layout in LAYOUTS.items():
        rows, width = len(tables[key]), layout.width
        shapes = (
            (rows, len(layout.keys)),
            (rows, len(layout.counts), width),
            (rows, len(layout.sums), width, LIMBS),
            (rows, len(layout.maxima)),
        )
        arrays = [_array(tables[key][column], shape) for column, shape in zip(_ARRAYS, shapes, strict=True)]
        groups[key] = Grouped(layout, *arrays)
    if tables["trajectories"].schema != TRAJECTORIES:
        raise ValueError("another schema")
    noticed = dict(zip(tables["noticed"]["name"].to_pylist(), tables["noticed"]["count"].to_pylist(), strict=True))
    problems = tuple(Problem(**row) for row in tables["problems"].to_pylist())
    return TokenSums(groups, {name: tables["trajectories"]}, noticed, problems)


def _array(column: pa.ChunkedArray, shape: tuple[int, ...]) -> np.ndarray:
    flat = column.combine_chunks().flatten()
    dtype = np.float64 if pa.types.is_floating(flat.type) else np.int64
    buffer = flat.buffers()[1]
    values = np.frombuffer(buffer, dtype, len(flat)) if buffer is not None and len(flat) else np.zeros(0, dtype)
    return values.reshape(shape)
