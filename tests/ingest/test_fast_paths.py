"""The quick way through usual input gives what the slow way gives, and leaves everything else to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest import writers as w
from verl_audit.ingest import console, tfevents, wandb
from verl_audit.ingest.model import Parsed

steps = st.integers(-3, 300)
names = st.sampled_from(
    ["actor/loss", "a", "_step", "_x", "n\0x", "img._type", "k" * 118, "k" * 119, "é/數", "", "a:b/c"]
)
numbers = st.sampled_from(["0", "1", "-2.5", "1e-7", "1E+300", "0.1234567890123456", "123456789012345678901"])
texts = numbers | st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "true", "null", '"text"', '{"a":1.5}', "1_0", "", " 1"]
)
quick = settings(derandomize=True, deadline=None, max_examples=150)


def facts(parsed: Parsed) -> tuple[Any, ...]:
    """Everything a reader hands on, comparable (NaN is equal to NaN)."""
    columns = [repr(list(getattr(parsed.metrics, name))) for name in ("record", "segment", "step", "value", "kind_id")]
    keys = [parsed.metrics.keys[i] for i in parsed.metrics.key_id]
    walls = repr(list(parsed.metrics.wall_time))
    return (keys, *columns, walls, parsed.problems, parsed.step_kind, parsed.float32, parsed.values_lost)


def both(read: Callable[[Path], list[Parsed]], data: bytes, slow: Any) -> int:
    """Read the same bytes both ways; the number of values."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "log"
        path.write_bytes(data)
        found = [facts(p) for p in read(path)]
        with slow:
            assert found == [facts(p) for p in read(path)]
    return sum(len(keys) for keys, *_ in found)


ITEMS = st.lists(st.tuples(names, texts, st.booleans()), max_size=6)


@given(st.lists(st.tuples(steps, ITEMS), min_size=1, max_size=4), st.booleans())
@quick
def test_wandb(rows: list[tuple[int, list[tuple[str, str, bool]]]], extra: bool) -> None:
    typed = [w.blob(2, b"typed/x") + w.double_field(6, 0.5)] if extra else []
    records = [w.history(step, [*(w.item(*one) for one in items), *typed]) for step, items in rows]
    both(wandb.read, w.block_log(records), mock.patch.object(wandb, "_usual_row", lambda *_: None))


@given(st.lists(st.tuples(steps, st.lists(st.tuples(names, numbers), min_size=1, max_size=6)), min_size=1, max_size=4))
@quick
def test_wandb_numbers_only(rows: list[tuple[int, list[tuple[str, str]]]]) -> None:
    records = [w.history(step, [w.item(*one) for one in items]) for step, items in rows]
    both(wandb.read, w.block_log(records), mock.patch.object(wandb, "_usual_row", lambda *_: None))


def test_the_quick_ways_are_taken() -> None:
    """Were they never, the other tests here would show nothing."""
    log = w.block_log([w.history(s, [w.item("actor/loss", "0.5"), w.item("b", "2")]) for s in (1, 2)])
    events = b"".join(w.tf_scalar("actor/loss", 0.5, step) for step in (1, 2))
    text = b"step:1 - actor/loss:0.12345 - b:2\n" * 3
    for read, data, module, name in (
        (wandb.read, log, wandb, "_row"),
        (tfevents.read, events, tfevents._Writer, "_event"),
        (console.read, text, console._Scanner, "_record"),
    ):
        original = getattr(module, name)
        with mock.patch.object(module, name, autospec=True, side_effect=original) as slow:
            assert both(read, data, mock.patch.object(module, name, original)) > 0
        assert slow.call_count == (1 if module is console._Scanner else 0), (
            "its first line shows how floats are printed"
        )


def scalar(event: tuple[str, float, int, float, str]) -> bytes:
    tag, value, step, wall, shape = event
    if shape == "two":
        one = w.blob(1, w.blob(1, tag.encode()) + w.float_field(2, value))
        return w.tf_event(step, one + one.replace(b"a", b"z"), wall)
    if shape == "tensor":
        return w.tf_tensor(tag, w.number_field(1, 1) + w.blob(5, b"\0\0\0\x3f"), step, wall)
    if shape == "turned":
        return w.tf_event(step, w.blob(1, w.float_field(2, value) + w.blob(1, tag.encode())), wall)
    return w.tf_scalar(tag, value, step, wall)


EVENTS = st.tuples(
    names,
    st.sampled_from([0.5, -1.0, float("nan"), float("inf")]),
    st.integers(-2, 20_000),
    st.sampled_from([0.0, 1e9]),
    st.sampled_from(["usual", "usual", "two", "tensor", "turned"]),
)


@given(st.lists(EVENTS, min_size=1, max_size=8))
@quick
def test_tfevents(events: list[tuple[str, float, int, float, str]]) -> None:
    data = w.tf_version() + b"".join(map(scalar, events))
    both(tfevents.read, data, mock.patch.object(tfevents._Writer, "_usual", lambda *_: False))


PAIRS = st.lists(
    st.tuples(
        st.sampled_from(["actor/loss", "a", "b/c", "a:b/c", "with space/x", "é/數", "x - y/z", "global_step", "step"]),
        st.sampled_from(
            ["1", "0.12345", "-2e-05", "nan", "inf", "True", "np.float64(0.5)", "np.float64(0.5", "tensor(1.5)"]
        )
        | st.sampled_from(["1.", "text", "", "np.int64(3)", "0.5 ", "(pid=3)"]),
    ),
    min_size=1,
    max_size=5,
)
ENDINGS = st.sampled_from(
    ["", " - ", " ", " [repeated 3x across cluster]", "\0", "\r", "(Dumped generations to x.jsonl"]
)


@given(st.lists(st.tuples(steps, PAIRS, ENDINGS), min_size=1, max_size=4), st.sampled_from(["", "\n"]))
@quick
def test_console(lines: list[tuple[int, list[tuple[str, str]], str]], last: str) -> None:
    exact = "step:1 - actor/loss:0.123456\n"
    text = exact + "\n".join(
        f"(TaskRunner pid=7) step:{step} - " + " - ".join(f"{key}:{value}" for key, value in pairs) + ending
        for step, pairs, ending in lines
    )
    both(console.read, (text + last).encode(), mock.patch.object(console._Scanner, "_usual_record", lambda *_: False))
