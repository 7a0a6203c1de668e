"""Seeded inputs of a given size, in the shapes that real writers leave.

verl's file logger and console, wandb-core's `.wandb` with its repeated summaries, TensorBoard's one event a value.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from verl_audit.ingest.tfevents import _crc32c as crc32c

SEED = 7
KEYS_A_STEP = 200
CONSOLE_KEYS = 150
STEPS = 50_000
"""Steps of the JSONL at scale 1: with 200 keys, ten million values."""
CONSOLE_BYTES, WANDB_BYTES, POINTS = 250 * 10**6, 500 * 10**6, 5 * 10**6
CONSOLE_STEP_BYTES = 83_000
"""Console text from one step to the next, as in a log of 250 MB and 3,000 steps."""
BLOCK = 32_768
VERL_KEYS = (
    "training/global_step",
    "training/epoch",
    "actor/entropy",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/step",
    "perf/throughput",
    "training/off_policy/trajectory_staleness/mean",
    "training/off_policy/trajectory_staleness/max",
)


def keys(count: int) -> list[str]:
    """Names of verl, then made-up ones of the same length."""
    return [*VERL_KEYS, *(f"timing_s/part_{n:03d}/mean" for n in range(count - len(VERL_KEYS)))]


def rows(count: int) -> Iterator[tuple[int, list[float]]]:
    """Steps from 1 and their values, the first of which is the step again; without end."""
    draw = random.Random(SEED).random
    step = 0
    while True:
        step += 1
        yield step, [step, 0, *(draw() for _ in range(count - 2))]


def jsonl(stream: BinaryIO, scale: float) -> None:
    """verl's file logger."""
    names = keys(KEYS_A_STEP)
    line = '{"step":%d,"data":{' + ",".join(f'"{key}":%r' for key in names) + "}}\n"
    for step, values in rows(len(names)):
        if step > STEPS * scale:
            return
        stream.write((line % (step, *values)).encode())


def console(stream: BinaryIO, scale: float) -> None:
    """verl's console under Ray: long step lines between lines of sampled text."""
    names = keys(CONSOLE_KEYS)
    line = "\x1b[36m(TaskRunner pid=4711)\x1b[0m step:%d - " + " - ".join(f"{key}:np.float64(%r)" for key in names)
    words = [f"word{n}" for n in range(500)]
    choose = random.Random(SEED).choices
    texts = ["(RewardLoopWorker pid=4712) [response] " + " ".join(choose(words, k=18)) + "\n" for _ in range(2000)]
    for step, values in rows(len(names)):
        if stream.tell() >= CONSOLE_BYTES * scale:
            return
        text = line % (step, *values) + "\n"
        between = (CONSOLE_STEP_BYTES - len(text)) // len(texts[0])
        stream.write((text + "".join(choose(texts, k=between))).encode())


def wandb(stream: BinaryIO, scale: float) -> None:
    """wandb-core: a history record and the whole summary again, for each step; items in no order."""
    shuffle = random.Random(SEED).shuffle
    heads = [_blob(2, key.encode()) for key in keys(KEYS_A_STEP)]
    log = _BlockLog(stream)
    for step, values in rows(len(heads)):
        if stream.tell() >= WANDB_BYTES * scale:
            return
        one = [_blob(1, head + _blob(16, repr(value).encode())) for head, value in zip(heads, values, strict=True)]
        shuffle(one)
        items = b"".join(one)
        own = _blob(1, _blob(2, b"_step") + _blob(16, b"%d" % step)) + _blob(2, b"\x08" + _varint(step))
        log.add(_blob(2, items + own))
        log.add(_blob(3, items))


def tensorboard(stream: BinaryIO, scale: float) -> None:
    """An event for each value, as SummaryWriter.add_scalar writes it."""
    heads = [_blob(1, key.encode()) + b"\x15" for key in keys(KEYS_A_STEP)]
    stream.write(_tf_record(b"\x09" + struct.pack("<d", 1.7e9) + _blob(3, b"brain.Event:2")))
    for step, values in rows(len(heads)):
        if step * len(heads) > POINTS * scale:
            return
        start = b"\x09" + struct.pack("<d", 1.7e9 + 30 * step) + b"\x10" + _varint(step)
        stream.writelines(
            _tf_record(start + _blob(5, _blob(1, head + struct.pack("<f", value))))
            for head, value in zip(heads, values, strict=True)
        )


INPUTS: dict[str, tuple[str, str, Callable[[BinaryIO, float], None]]] = {
    "jsonl": ("verl_jsonl", "run.jsonl", jsonl),
    "console": ("verl_console", "train.log", console),
    "wandb": ("wandb", "run-bench.wandb", wandb),
    "tensorboard": ("tensorboard", "events.out.tfevents.1700000000.host", tensorboard),
}
"""Short name: format, file name, writer."""


def write(name: str, scale: float, folder: Path) -> Path:
    """Write one input into a new folder below `folder`."""
    _, file_name, writer = INPUTS[name]
    path = folder / f"{name}-{scale:g}" / file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        writer(stream, scale)
    return path


class _BlockLog:
    """LevelDB-style framing: chunks that do not cross the edge of a block."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.at = stream.write(b":W&B\xe1\xbe\x00")

    def add(self, record: bytes) -> None:
        pos, first = 0, True
        while pos < len(record):
            left = BLOCK - self.at % BLOCK
            if left < 7:
                self.at += self.stream.write(bytes(left))
                continue
            part = record[pos : pos + left - 7]
            last = pos + len(part) == len(record)
            body = bytes([(1 if last else 2) if first else (4 if last else 3)]) + part
            self.at += self.stream.write(struct.pack("<IH", zlib.crc32(body), len(part)) + body)
            pos, first = pos + len(part), False


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _blob(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF)


def _tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)
