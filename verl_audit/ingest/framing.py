"""The LevelDB-style block log that wandb (`:W&B`) and SwanLab (`:SWL`) write.

A 7-byte file header, then blocks of 32 KiB counted from the start of the file. A chunk is
`u32 crc32(type, data), u16 length, u8 type, data`; a record is one full chunk, or first, middle..., last.
A chunk never crosses a block edge, so after damage the next block is a safe place to go on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import BinaryIO

BLOCK = 32_768
HEADER = 7
_CHUNK = Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

Note = Callable[[str, str, int], None]
"""Called with kind, detail and file offset for each piece of damage."""


def payloads(stream: BinaryIO, note: Note) -> Iterator[tuple[int, bytes]]:
    """File offset and bytes of every intact record after the file header.

    An empty payload marks a gap: at least one record before it was lost. The caller reads the header first.
    """
    assembler = _Assembler(note)
    start = 0
    first = HEADER
    while block := _rest_of_block(stream, BLOCK - first):
        for pos, kind, data in _chunks(block, start + first, assembler.damage):
            yield from assembler.add(pos, kind, data)
        yield from assembler.flush_gap()
        start, first = start + BLOCK, 0
    if assembler.parts:
        note("torn_record", "the last record is incomplete", assembler.started)


def _rest_of_block(stream: BinaryIO, size: int) -> bytes:
    """`size` bytes, fewer only at the end of the file (a raw read may return less)."""
    data = stream.read(size)
    while 0 < len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _chunks(block: bytes, base: int, damage: Note) -> Iterator[tuple[int, int, bytes]]:
    """Offset, type and data of the intact chunks of one block; past damage, of those that pass their CRC."""
    pos, end = 0, len(block)
    cut_off = "torn_record" if base % BLOCK + end < BLOCK else "damaged_block"
    while pos + HEADER <= end:
        crc, length, kind = _CHUNK.unpack_from(block, pos)
        stop = pos + HEADER + length
        if crc == length == kind == 0:
            damage("zeros", "zero bytes where records should be", base + pos)
            return
        if stop > end:
            damage(cut_off, "a record runs past its block", base + pos)
            return
        if zlib.crc32(block[pos + 6 : stop]) != crc or not _FULL <= kind <= _LAST:
            damage("damaged_block", "checksum does not match", base + pos)
        else:
            yield base + pos, kind, block[pos + HEADER : stop]
        pos = stop
    if pos < end and any(block[pos:]):
        damage(cut_off, "bytes in the padding of a block", base + pos)


@dataclass
class _Assembler:
    """Joins chunks to records, and drops a record that has lost a part."""

    note: Note
    parts: list[bytes] = field(default_factory=list)
    started: int = 0
    lost: bool = False

    def damage(self, kind: str, detail: str, offset: int) -> None:
        self.note(kind, detail, offset)
        self.parts.clear()
        self.lost = True

    def add(self, offset: int, kind: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        continues = kind in (_MIDDLE, _LAST)
        if continues != bool(self.parts):
            # a part without its beginning, or a beginning without its end; after damage that is no news
            if not self.lost:
                self.note("unfinished_record", "a record lacks a part", offset)
            self.parts.clear()
            self.lost = True
        if continues and not self.parts:
            return
        yield from self.flush_gap()
        if not self.parts:
            self.started = offset
        self.parts.append(data)
        if kind in (_FULL, _LAST):
            yield self.started, b"".join(self.parts)
            self.parts.clear()

    def flush_gap(self) -> Iterator[tuple[int, bytes]]:
        if self.lost:
            self.lost = False
            yield self.started, b""
