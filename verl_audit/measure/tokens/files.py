"""Trace files where they are: on disk, or in an object store by URL (extra `remote`: fsspec and its driver)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from verl_audit.errors import AuditError

_CHANGES = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")
"""What file systems call the mark of a file's content, in the order in which it is believed."""


@dataclass(frozen=True)
class Fingerprint:
    """Size in bytes and when it was last changed: nanoseconds of a local file, the store's own mark elsewhere."""

    size: int
    changed: str


def is_remote(path: str) -> bool:
    """Whether a path is a URL (`s3://bucket/part.parquet`)."""
    return "://" in path


def fingerprint(path: str) -> Fingerprint:
    """What changes when the file does. Raises `OSError` if it is not there."""
    if not is_remote(path):
        stat = Path(path).stat()
        return Fingerprint(stat.st_size, str(stat.st_mtime_ns))
    info = _file_system(path).info(path)
    return Fingerprint(int(info["size"] or 0), next((str(info[key]) for key in _CHANGES if info.get(key)), ""))


@contextmanager
def opened(path: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """A parquet file; from an object store its columns are read in few requests.

    Page checksums are not verified: that would add a quarter to the time of decoding.
    """
    if not is_remote(path):
        with pq.ParquetFile(path, pre_buffer=False, **options) as file:
            yield file
        return
    with _file_system(path).open(path, "rb") as stream, pq.ParquetFile(stream, pre_buffer=True, **options) as file:
        yield file


def _file_system(path: str) -> Any:
    try:
        import fsspec  # noqa: PLC0415  # optional

        return fsspec.url_to_fs(path)[0]
    except ImportError as error:
        raise AuditError(
            f"{path}: to read it, install verl-audit[remote] and the driver it asks for: {error}"
        ) from error
