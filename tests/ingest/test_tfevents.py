from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from tests.ingest.writers import (
    PUBLIC_LOGS,
    REAL_RUNS,
    blob,
    double_field,
    number_field,
    problem_kinds,
    table,
    tf_event,
    tf_record,
    tf_scalar,
    tf_tensor,
    tf_version,
    varint,
)
from verl_audit.ingest import tfevents
from verl_audit.ingest.model import Parsed

public = pytest.mark.skipif(not PUBLIC_LOGS.exists(), reason="public logs are not here")


def parse(tmp_path: Path, content: bytes, name: str = "events.out.tfevents.1700000000.host.1.0") -> Parsed:
    path = tmp_path / name
    path.write_bytes(content)
    (parsed,) = tfevents.read(path)
    return parsed


@pytest.fixture(params=["extra", "own"])
def checksum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the checksum of the extra, and with the built-in one."""
    if request.param == "own":
        monkeypatch.setattr(tfevents, "_crc32c", tfevents._slow_crc32c)
        monkeypatch.setattr(tfevents, "_FAST_CRC", False)
    return str(request.param)


@public
def test_public_file(checksum: str) -> None:
    (parsed,) = tfevents.read(PUBLIC_LOGS / "events.out.tfevents.1690024186.HOST.5294.0")
    assert (len(parsed.metrics.keys), len(parsed.metrics), parsed.metrics.records) == (9, 6_867, 763)
    assert parsed.float32
    assert parsed.identity.started == 1_690_024_186
    assert not parsed.problems


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_run_has_a_record_per_step() -> None:
    (parsed,) = tfevents.read(next((REAL_RUNS / "sync_baseline/tensorboard").iterdir()))
    assert (parsed.metrics.records, len(parsed.metrics)) == (61, 5_497)
    assert not parsed.problems


def test_own_checksum() -> None:
    for data in (b"", b"a", bytes(32), bytes(range(256))):
        assert tfevents._slow_crc32c(data) == google_crc32c.value(data)


def test_values_steps_and_wall_time(tmp_path: Path) -> None:
    parsed = parse(
        tmp_path,
        tf_version()
        + tf_scalar("a/x", 0.1, 1, 10.0)
        + tf_scalar("a/nan", math.nan, 1, 10.5)
        + tf_scalar("a/x", math.inf, 2, 11.0)
        + tf_scalar("a/x", 5.0, 2, 12.0)
        + tf_scalar("a/x", 1.0, -3, 13.0),
    )
    assert table(parsed)["a/x", 1] == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert math.isnan(table(parsed)["a/nan", 1])
    assert list(parsed.metrics.step) == [1, 1, 2, 2, -3]
    assert list(parsed.metrics.record) == [0, 0, 1, 2, 3]
    assert list(parsed.metrics.segment) == [0, 0, 0, 0, 1]
    assert list(parsed.metrics.wall_time) == [10.0, 10.0, 11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("tensor", "value", "float32"),
    [
        (number_field(1, 1) + blob(4, struct.pack("<f", 1.5)), 1.5, True),
        (number_field(1, 1) + blob(5, struct.pack("<f", 2.5)), 2.5, True),
        (number_field(1, 1) + varint(5 << 3 | 5) + struct.pack("<f", 2.5), 2.5, True),
        (number_field(1, 2) + double_field(6, 0.1), 0.1, False),
        (number_field(1, 2) + blob(4, struct.pack("<d", 0.1)), 0.1, False),
        (number_field(1, 3) + blob(7, varint(7)), 7.0, False),
        (number_field(1, 9) + number_field(10, -7), -7.0, False),
        (number_field(1, 1), 0.0, True),
        (number_field(1, 7) + blob(8, b"text"), None, False),
        (number_field(1, 1) + blob(4, struct.pack("<2f", 1.5, 2.5)), None, False),
    ],
)
def test_tensor_scalars(tmp_path: Path, tensor: bytes, value: float | None, float32: bool) -> None:
    parsed = parse(tmp_path, tf_version() + tf_tensor("a/x", tensor, 4))
    assert table(parsed) == ({} if value is None else {("a/x", 4): value})
    assert parsed.float32 is float32


def test_long_tags_are_kept_whole(tmp_path: Path) -> None:
    parsed = parse(tmp_path, b"".join(tf_scalar("a/x", i, i) for i in range(25_000)))
    assert len(parsed.metrics) == 25_000


def stream(count: int = 400) -> tuple[list[bytes], dict[tuple[str, int], float]]:
    records = [tf_version()] + [tf_scalar(f"a/k{i % 3}", i, i // 3) for i in range(count)]
    return records, {(f"a/k{i % 3}", i // 3): float(i) for i in range(count)}


def flip_length(data: bytearray, start: int) -> None:
    data[start + 1] ^= 4


def flip_length_checksum(data: bytearray, start: int) -> None:
    data[start + 9] ^= 1


def flip_payload(data: bytearray, start: int) -> None:
    data[start + 30] ^= 1


def flip_checksum(data: bytearray, start: int) -> None:
    data[start - 1] ^= 1


@pytest.mark.parametrize("damage", [flip_length, flip_length_checksum, flip_payload, flip_checksum])
def test_a_flipped_byte_costs_one_record(
    tmp_path: Path, checksum: str, damage: Callable[[bytearray, int], None]
) -> None:
    records, written = stream()
    data = bytearray(b"".join(records))
    damage(data, len(b"".join(records[:200])))
    parsed = parse(tmp_path, bytes(data))
    read = table(parsed)
    assert read.items() <= written.items()
    assert len(read) == len(written) - 1
    assert problem_kinds(parsed) == ["damaged_record"]


def test_a_hole_of_zeros(tmp_path: Path, checksum: str) -> None:
    records, written = stream()
    data = bytearray(b"".join(records))
    data[3000:5000] = bytes(2000)
    read = table(parse(tmp_path, bytes(data)))
    assert read.items() <= written.items()
    assert len(read) >= len(written) - 2000 // min(map(len, records)) - 2


def test_cut_and_glued_files(tmp_path: Path) -> None:
    records, written = stream()
    whole = b"".join(records)
    cut = parse(tmp_path, whole[:-5])
    assert len(table(cut)) == len(written) - 1
    assert problem_kinds(cut) == ["torn_record"]
    glued = parse(tmp_path, whole[:-5] + whole)
    assert table(glued) == written
    assert glued.problems


def test_resume_is_two_files(tmp_path: Path) -> None:
    first = parse(tmp_path, b"".join(tf_scalar("a/x", s, s) for s in range(10)))
    later = b"".join(tf_scalar("a/x", s + 100, s) for s in range(5, 12))
    second = parse(tmp_path, later, "events.out.tfevents.1700009999.host.2.0")
    assert len({*first.metrics.step, *second.metrics.step}) == 12
    assert len({*first.metrics.step} & {*second.metrics.step}) == 5
    assert (first.identity.started or 0) < (second.identity.started or 0)


def test_empty_garbage_and_wrong_messages(tmp_path: Path) -> None:
    assert problem_kinds(parse(tmp_path, b"")) == ["empty"]
    assert problem_kinds(parse(tmp_path, b"garbage" * 100)) == ["torn_record"]
    wrong = tf_record(tf_event(1, blob(1, b"\xff\xff")))
    parsed = parse(tmp_path, wrong + tf_scalar("a/x", 1, 1))
    assert table(parsed) == {("a/x", 1): 1.0}
    assert problem_kinds(parsed) == ["bad_record"]


def test_names_from_the_usual_layout(tmp_path: Path) -> None:
    path = tmp_path / "tensorboard_log" / "proj" / "exp" / "events.out.tfevents.1700000000.h"
    path.parent.mkdir(parents=True)
    path.write_bytes(tf_version())
    identity = tfevents.read(path)[0].identity
    assert (identity.project, identity.experiment) == ("proj", "exp")
