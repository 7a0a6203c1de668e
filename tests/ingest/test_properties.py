"""Damage of any kind: readers do not raise, invent no value, and lose no more than the damaged piece."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.writers import (
    BLOCK,
    block_log,
    output_raw,
    run_record,
    tf_scalar,
    tf_version,
    wandb_row,
)
from verl_audit.ingest import console, dumps, hydra, tfevents, verl_jsonl, wandb
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed

modest = settings(derandomize=True, max_examples=40, deadline=None)

STEPS = 60
KEYS = [f"actor/key_{k}" for k in range(12)]
VALUES = {(key, step): step + 0.015625 * k for step in range(STEPS) for k, key in enumerate(KEYS)}
PREFIX = "\x1b[36m(TaskRunner pid=1)\x1b[0m "


@dataclass(frozen=True)
class Damage:
    """Where, as a share of the file, and how much."""

    at: float
    size: int

    def start(self, data: bytes) -> int:
        return min(int(self.at * len(data)), len(data) - 1)


damages = st.builds(Damage, st.floats(0, 1, exclude_max=True), st.integers(1, 3000))


def cut(data: bytes, damage: Damage) -> bytes:
    return data[: damage.start(data)]


def flip(data: bytes, damage: Damage) -> bytes:
    start = damage.start(data)
    return data[:start] + bytes([data[start] ^ (1 << damage.size % 8)]) + data[start + 1 :]


def zero(data: bytes, damage: Damage) -> bytes:
    start = damage.start(data)
    stop = min(start + damage.size, len(data))
    return data[:start] + bytes(stop - start) + data[stop:]


def remove(data: bytes, damage: Damage) -> bytes:
    start = damage.start(data)
    return data[:start] + data[start + damage.size :]


def row(step: int) -> dict[str, float]:
    return {key: VALUES[key, step] for key in KEYS}


def console_lines() -> list[bytes]:
    return [
        (PREFIX + f"step:{s} - " + " - ".join(f"{k}:{v!r}" for k, v in row(s).items()) + "\n").encode()
        for s in range(STEPS)
    ]


def jsonl_lines() -> list[bytes]:
    return [json.dumps({"step": s, "data": row(s)}).encode() + b"\n" for s in range(STEPS)]


def wandb_bytes() -> bytes:
    config = {"filler": ["x" * 100] * 300}
    return block_log([run_record("i", "p", "n", config), *(wandb_row(s, row(s)) for s in range(STEPS))])


def tf_bytes() -> bytes:
    return tf_version() + b"".join(tf_scalar(k, v, s) for s in range(STEPS) for k, v in row(s).items())


CONSOLE, JSONL, WANDB, TF = b"".join(console_lines()), b"".join(jsonl_lines()), wandb_bytes(), tf_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def pairs(parsed: Parsed) -> list[tuple[str, int, float]]:
    m = parsed.metrics
    return [(m.keys[k], s, v) for k, s, v in zip(m.key_id, m.step, m.value, strict=True)]


def invented(parsed: Parsed) -> list[tuple[str, int, float]]:
    return [(k, s, v) for k, s, v in pairs(parsed) if VALUES.get((k, s)) != v]


def read_console(data: bytes) -> Parsed:
    return console.read_bytes(data, Path("console.log"))


def read_jsonl(place: Path, data: bytes) -> Parsed:
    path = place / "run.jsonl"
    path.write_bytes(data)
    return verl_jsonl.read(path)[0]


def read_wandb(place: Path, data: bytes) -> list[Parsed]:
    path = place / "run.wandb"
    path.write_bytes(data)
    return wandb.read(path)


def read_tf(place: Path, data: bytes) -> Parsed:
    path = place / "events.out.tfevents.1700000000.h"
    path.write_bytes(data)
    return tfevents.read(path)[0]


def lost(parsed: Parsed) -> int:
    return len(VALUES) - len(set(pairs(parsed)) & {(k, s, v) for (k, s), v in VALUES.items()})


@modest
@given(damages)
def test_console_cut(damage: Damage) -> None:
    data = cut(CONSOLE, damage)
    parsed = read_console(data)
    assert not invented(parsed)
    assert len(pairs(parsed)) >= data.count(b" - ") - 2 * (data.count(b"\n") + 1) + data.count(b"\n") - 1
    assert parsed.values_lost <= 1


@modest
@given(damages)
def test_console_zeros(damage: Damage) -> None:
    parsed = read_console(zero(CONSOLE, damage))
    assert not invented(parsed)
    lines = damage.size // min(map(len, console_lines())) + 2
    assert lost(parsed) <= lines * len(KEYS)


@modest
@given(damages)
def test_console_flip_touches_one_line_or_two(damage: Damage) -> None:
    parsed = read_console(flip(CONSOLE, damage))
    assert lost(parsed) <= 2 * len(KEYS)
    assert len({s for _, s, _ in invented(parsed)}) <= 1


text_lines = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "Let me compute. step:1 - multiply:2 - add:3",
                "step:7 - multiply:2",
                "so (a) step:3 - actor/key_1:9.5",
                "{'actor_rollout_ref': unbalanced",
                "Traceback (most recent call last):",
                '("Initial validation metrics: {',
                "Training Progress:  10%|",
                "Exception ignored in: <function>",
                "\x1b[36m(Other pid=9)\x1b[0m text",
                "",
            ]
        ),
        st.text(st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]), max_size=80),
    ),
    max_size=12,
)


@modest
@given(text_lines, st.integers(0, STEPS))
def test_console_with_model_text_between(texts: list[str], start: int) -> None:
    lines = console_lines()
    for i, text in enumerate(texts):
        lines.insert(min(start + 3 * i, len(lines)), text.encode() + b"\n")
    parsed = read_console(b"".join(lines))
    assert not invented(parsed)
    assert lost(parsed) == 0


@modest
@given(st.integers(0, STEPS - 1), st.integers(1, STEPS))
def test_duplicated_lines_add_records_and_nothing_else(start: int, count: int) -> None:
    lines = console_lines()
    again = lines[start : start + count]
    parsed = read_console(b"".join([*lines, *again]))
    assert not invented(parsed)
    assert parsed.metrics.records == STEPS + len(again)
    assert max(Counter(parsed.metrics.record).values()) == len(KEYS)


@modest
@given(st.binary(max_size=3000))
def test_garbage(place: Path, data: bytes) -> None:
    assert read_console(data).metrics.records == 0
    for magic in (b"", b":W&B\xe1\xbe\x00"):
        assert all(p.metrics.records == 0 for p in read_wandb(place, magic + data))
    assert read_tf(place, data).metrics.records == 0
    for name in ("config.yaml", "7.jsonl", "run.jsonl"):
        (place / name).write_bytes(data)
    hydra.read(place / "config.yaml")
    dumps.read(place / "7.jsonl")
    verl_jsonl.read(place / "run.jsonl")
    discover([place])


@modest
@given(damages)
def test_jsonl_cut_and_zeros(place: Path, damage: Damage) -> None:
    parsed = read_jsonl(place, cut(JSONL, damage))
    assert not invented(parsed)
    assert parsed.metrics.records >= cut(JSONL, damage).count(b"\n")
    parsed = read_jsonl(place, zero(JSONL, damage))
    assert not invented(parsed)
    assert lost(parsed) <= (damage.size // min(map(len, jsonl_lines())) + 2) * len(KEYS)


@modest
@given(damages)
def test_jsonl_flip(place: Path, damage: Damage) -> None:
    parsed = read_jsonl(place, flip(JSONL, damage))
    assert lost(parsed) <= 2 * len(KEYS)


@modest
@given(damages, st.sampled_from([cut, flip, zero, remove]))
def test_wandb_damage(place: Path, damage: Damage, how: object) -> None:
    assert callable(how)
    parsed = read_wandb(place, how(WANDB, damage))[0]
    assert not invented(parsed)
    assert all(count == len(KEYS) for count in Counter(parsed.metrics.record).values())
    if how is flip:
        assert lost(parsed) <= STEPS * len(KEYS) * BLOCK // len(WANDB) + 2 * len(KEYS)
    if how is not remove and damage.start(WANDB) < len(WANDB) - damage.size:
        assert parsed.problems or not lost(parsed)


@modest
@given(damages, st.sampled_from([cut, flip, zero, remove]))
def test_wandb_console_text(place: Path, damage: Damage, how: object) -> None:
    assert callable(how)
    text = CONSOLE.decode()
    log = block_log(output_raw(text[i : i + 700]) for i in range(0, len(text), 700))
    for parsed in read_wandb(place, how(log, damage)):
        assert not invented(parsed)


@modest
@given(damages, st.sampled_from([cut, flip, zero, remove]))
def test_tfevents_damage(place: Path, damage: Damage, how: object) -> None:
    assert callable(how)
    parsed = read_tf(place, how(TF, damage))
    assert not invented(parsed)
    record = len(tf_scalar(KEYS[0], 1.0, 1))
    if how is flip:
        assert lost(parsed) <= 1
    if how in (zero, remove):
        assert lost(parsed) <= damage.size // record + 2


@modest
@given(damages)
def test_glued_files(place: Path, damage: Damage) -> None:
    parsed = read_tf(place, cut(TF, damage) + TF)
    assert not invented(parsed)
    assert lost(parsed) == 0
    parsed = read_jsonl(place, cut(JSONL, damage) + b"\n" + JSONL)
    assert not invented(parsed)
    assert lost(parsed) == 0
    parsed = read_console(cut(CONSOLE, damage) + CONSOLE)
    assert not invented(parsed)
    assert lost(parsed) <= len(KEYS)


def test_the_undamaged_files_are_read_whole(place: Path) -> None:
    for parsed in (
        read_console(CONSOLE),
        read_jsonl(place, JSONL),
        read_wandb(place, WANDB)[0],
        read_tf(place, TF),
    ):
        assert not parsed.problems
        assert lost(parsed) == 0
        assert not any(math.isnan(v) for v in parsed.metrics.value)
