"""Compressed text logs, and standard input."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ingest.writers import REAL_RUNS, block_log, problem_kinds, table, wandb_row
from verl_audit.ingest import unpack
from verl_audit.ingest.discover import STDIN, discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all

ROWS = range(1, 400)
TEXTS: dict[str, tuple[str, str]] = {
    "verl_console": ("run.log", "".join(f"step:{s} - a/b:{s}.5 - a/c:{s * 7}.25\n" for s in ROWS)),
    "verl_jsonl": ("m.jsonl", "".join(json.dumps({"step": s, "data": {"a/b": s + 0.5}}) + "\n" for s in ROWS)),
    "jsonl": ("m.jsonl", "".join(json.dumps({"step": s, "a/b": s + 0.5}) + "\n" for s in ROWS)),
    "wandb_export": ("h.csv", "_step,a/b\n" + "".join(f"{s},{s}.5\n" for s in ROWS)),
    "wandb_chart": ("c.csv", '"Step","r - a/b"\n' + "".join(f'"{s}","{s}.5"\n' for s in ROWS)),
    "dict_console": ("j.log", "".join(f"step {s}: {{'a/b': {s}.5}}\n" for s in ROWS)),
    "trl_state": ("trainer_state.json", json.dumps({"log_history": [{"step": s, "a/b": s + 0.5} for s in ROWS]})),
}


def pack(kind: str, data: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(data)
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed


def found(path: Path) -> list[Parsed]:
    return read_all(discover([path]))


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("form", TEXTS)
def test_packed_text_reads_as_unpacked(tmp_path: Path, form: str, kind: str) -> None:
    name, text = TEXTS[form]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_text(text)
    (tmp_path / f"{name}.{kind}").write_bytes(pack(kind, text.encode()))
    (plain,) = found(tmp_path / "plain" / name)
    (packed,) = found(tmp_path / f"{name}.{kind}")
    assert plain.format == packed.format == form
    assert table(packed) == table(plain)
    assert table(packed)["a/b", 399] == 399.5
    assert packed.bytes_read == plain.bytes_read


def test_the_name_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(pack("gz", TEXTS["verl_console"][1].encode()))
    assert [p.format for p in found(tmp_path)] == ["verl_console"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cut_archive_gives_what_came_before(tmp_path: Path, kind: str) -> None:
    text = "".join(f"step:{s} - a/b:{s * 7919 % 10007}.5 - a/c:{s * 104729 % 99991}.25\n" for s in range(60_000))
    packed = pack(kind, text.encode())
    (tmp_path / f"run.log.{kind}").write_bytes(packed[: len(packed) // 2])
    (parsed,) = found(tmp_path)
    values = table(parsed)
    assert len(values) > 40_000
    assert all(values["a/b", s] == s * 7919 % 10007 + 0.5 for key, s in values if key == "a/b")
    assert "torn_archive" in problem_kinds(parsed)


def test_damage_inside_an_archive_is_told(tmp_path: Path) -> None:
    packed = bytearray(pack("gz", TEXTS["verl_console"][1].encode()))
    packed[-6] ^= 0xFF
    (tmp_path / "run.log.gz").write_bytes(bytes(packed))
    assert "damaged_archive" in problem_kinds(found(tmp_path)[0])


def test_archives_glued_together(tmp_path: Path) -> None:
    lines = TEXTS["verl_console"][1].encode().splitlines(keepends=True)
    (tmp_path / "run.log.gz").write_bytes(
        pack("gz", b"".join(lines[:200])) + pack("gz", b"".join(lines[200:])) + bytes(9)
    )
    (parsed,) = found(tmp_path)
    assert parsed.metrics.records == len(lines)
    assert not parsed.problems


def test_only_text_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "run.wandb.gz").write_bytes(pack("gz", block_log([wandb_row(1, {"a/b": 1})])))
    (tmp_path / "rollout_data").mkdir()
    (tmp_path / "rollout_data/1.jsonl.gz").write_bytes(pack("gz", b'{"input": "a", "output": "b", "step": 1}\n'))
    (tmp_path / "notes.gz").write_bytes(pack("gz", b"nothing of interest\n"))
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08")
    reasons = {s.path.name: s.reason for s in discover([tmp_path]).skipped}
    assert reasons["run.wandb.gz"] == reasons["broken.gz"] == "compressed, and no text log: unpack it first"
    assert reasons["1.jsonl.gz"] == "compressed dump: unpack it first"
    assert reasons["notes.gz"].startswith("no step line")


def test_zstd_without_a_decompressor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    (tmp_path / "run.log.zst").write_bytes(unpack.ZSTD + bytes(20))
    (skipped,) = discover([tmp_path]).skipped
    assert "install verl-audit[zstd]" in skipped.reason


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, form: str, packed: bool) -> None:
    data = TEXTS[form][1].encode()

    class Stdin:
        buffer = io.BytesIO(pack("gz", data) if packed else data)

    monkeypatch.setattr(sys, "stdin", Stdin())
    (parsed,) = found(STDIN)
    assert parsed.format == form
    assert parsed.path.name == "stdin"
    assert table(parsed)["a/b", 399] == 399.5


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_console_packed(tmp_path: Path) -> None:
    source = REAL_RUNS / "mismatch_probe" / "console.log"
    (tmp_path / "console.log.gz").write_bytes(pack("gz", source.read_bytes()))
    (packed,), (plain,) = found(tmp_path), found(source)
    assert bytes(packed.metrics.value) == bytes(plain.metrics.value)
