"""Text logs that were compressed: gzip and zstd, told by their first bytes, unpacked while they are read.

Offsets of problems found in such a file are positions in the unpacked text.
"""

from __future__ import annotations

import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
NO_ZSTD = "zstd: install verl-audit[zstd] to read it (Python 3.14 needs nothing), or unpack it"
_PIECE = 8 << 10
_BUFFER = 1 << 20

Note = Callable[[str, str, int], None]
"""Called with kind, detail and offset in the packed file for each piece of damage."""


def packing(head: bytes) -> bytes | None:
    """The magic of a compressed file, if it is one."""
    return next((magic for magic in (GZIP, ZSTD) if head.startswith(magic)), None)


def can_unpack(magic: bytes) -> bool:
    """Whether a decompressor for this kind is installed."""
    return _factory(magic) is not None


def inner_name(path: Path) -> str:
    """The file's name without the ending compression gave it."""
    name = path.name
    for ending in (".gz", ".zst", ".zstd"):
        name = name.removesuffix(ending)
    return name


@contextmanager
def opened(path: Path, note: Note | None = None) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked if it is compressed; damage ends the stream and is noted."""
    with path.open("rb") as stream:
        magic = packing(stream.read(4))
        stream.seek(0)
        factory = _factory(magic) if magic else None
        if magic and factory is None and note:
            note("cannot_unpack", NO_ZSTD, 0)
        if factory is None:
            yield stream
        else:
            yield io.BufferedReader(_Unpacker(stream, factory, note or _ignore), _BUFFER)


def _ignore(kind: str, detail: str, offset: int) -> None:
    pass


def _factory(magic: bytes) -> Callable[[], Any] | None:
    """Makes decompressors with `decompress`, `eof` and `unused_data`, one for each member of a file."""
    if magic == GZIP:
        return lambda: zlib.decompressobj(31)
    for name in ("zstandard", "compression.zstd"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            return lambda: module.ZstdDecompressor().decompressobj()
        factory: Callable[[], Any] = module.ZstdDecompressor
        return factory
    return None


class _Unpacker(io.RawIOBase):
    """A raw stream of unpacked bytes; files glued together are read one after another."""

    def __init__(self, stream: BinaryIO, factory: Callable[[], Any], note: Note) -> None:
        self._stream, self._factory, self._note = stream, factory, note
        self._member: Any = None
        self._ready = b""
        self._packed = b""
        self._done = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._done:
            self._ready = self._next()
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def _next(self) -> bytes:
        """Some more unpacked bytes; none does not mean the end."""
        packed, self._packed = self._packed or self._stream.read(_PIECE), b""
        if not packed:
            self._end("torn_archive", "the compressed file ends early; what came before was read")
            return b""
        if self._member is None:
            packed = packed.lstrip(b"\0")  # padding between members
            if not packed:
                return b""
            self._member = self._factory()
        before = self._member.copy() if hasattr(self._member, "copy") else None
        try:
            data: bytes = self._member.decompress(packed)
            if self._member.eof:
                self._packed, self._member = self._member.unused_data, None
        except Exception as error:  # each library has an error class of its own
            detail = f"{str(error)[:100]}; nothing is read from here on, and values just before may be wrong"
            self._end("damaged_archive", detail, force=True)
            return _up_to_damage(before, packed)
        return data

    def _end(self, kind: str, detail: str, force: bool = False) -> None:
        self._done = True
        if force or self._member is not None:
            self._note(kind, detail, self._stream.tell())


def _up_to_damage(member: Any, packed: bytes) -> bytes:
    """What a member still gives of a damaged piece, byte by byte."""
    data = bytearray()
    with suppress(Exception):  # the damage itself, already noted
        for at in range(len(packed) if member is not None else 0):
            data += member.decompress(packed[at : at + 1])
    return bytes(data)
