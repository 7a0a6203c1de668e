from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ingest.writers import REAL_RUNS, kinds, problem_kinds, table
from verl_audit.ingest import verl_jsonl
from verl_audit.ingest.model import MetricBuffer, Parsed


def parse(tmp_path: Path, content: str | bytes) -> Parsed:
    path = tmp_path / "project" / "run.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (parsed,) = verl_jsonl.read(path)
    return parsed


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_run() -> None:
    (parsed,) = verl_jsonl.read(REAL_RUNS / "sync_baseline/file_logger/toy_map/sync_baseline.jsonl")
    assert (parsed.metrics.records, len(parsed.metrics)) == (61, 5497)
    assert not parsed.problems
    assert (parsed.identity.project, parsed.identity.experiment) == ("toy_map", "sync_baseline")


@pytest.mark.skipif(not REAL_RUNS.exists(), reason="real runs are not here")
def test_real_nulls_are_values_that_were_not_finite() -> None:
    (parsed,) = verl_jsonl.read(REAL_RUNS / "mismatch_probe/file_logger/mismatch_probe/bf16.jsonl")
    lost = {key for key, kind in kinds(parsed).items() if kind == "nonfinite_unknown"}
    assert lost
    assert all(math.isnan(table(parsed)[key]) for key in lost)


def test_null_is_nan_of_unknown_kind(tmp_path: Path) -> None:
    parsed = parse(tmp_path, '{"step":1,"data":{"actor/entropy":null,"actor/grad_norm":null,"a/b":true}}\n')
    assert kinds(parsed) == {
        ("actor/entropy", 1): "nonfinite_unknown",
        ("actor/grad_norm", 1): "nonfinite_unknown",
        ("a/b", 1): "finite",
    }
    assert math.isnan(table(parsed)["actor/entropy", 1])
    assert table(parsed)["a/b", 1] == 1.0


def test_zero_bytes_before_a_line_and_a_torn_line(tmp_path: Path) -> None:
    text = b'{"step":1,"data":{"a/b":1}}\n' + bytes(4096) + b'{"step":2,"data":{"a/b":2}}\n{"step":3,"da'
    parsed = parse(tmp_path, text)
    assert table(parsed) == {("a/b", 1): 1.0, ("a/b", 2): 2.0}
    assert problem_kinds(parsed) == ["torn_line"]
    assert parsed.problems[0].offset == text.index(b'{"step":3')


def test_a_complete_last_line_without_newline_counts(tmp_path: Path) -> None:
    parsed = parse(tmp_path, '{"step":1,"data":{"a/b":1}}')
    assert table(parsed) == {("a/b", 1): 1.0}
    assert not parsed.problems


def test_what_other_writers_leave(tmp_path: Path) -> None:
    parsed = parse(
        tmp_path,
        '{"step":1,"data":{"a/n":NaN,"a/i":-Infinity,"a/big":123456789012345678901234,"a/e":1e999}}\n'
        '{"step":2,"data":{"a/l":[1,2],"a/s":"text","a/ok":3}}\n'
        '{"step":"3","data":{}}\n[]\n{"step":4}\n',
    )
    values = table(parsed)
    assert math.isnan(values["a/n", 1])
    assert values["a/i", 1] == -math.inf
    assert values["a/big", 1] == 123456789012345678901234.0
    assert values["a/e", 1] == math.inf
    assert values["a/ok", 2] == 3.0
    assert {p.kind: p.count for p in parsed.problems} == {"not_a_number": 2, "bad_line": 3}
    assert parsed.values_lost == 0


def test_history_that_begins_late_was_overwritten(tmp_path: Path) -> None:
    lines = [json.dumps({"step": s, "data": {"a/b": s}}) for s in range(31, 41)]
    parsed = parse(tmp_path, "\n".join(lines) + "\n")
    assert problem_kinds(parsed) == ["history_overwritten"]
    assert "step 31" in parsed.problems[0].detail


def test_several_lines_of_one_step(tmp_path: Path) -> None:
    parsed = parse(tmp_path, '{"step":0,"data":{"a/b":1}}\n{"step":0,"data":{"a/c":2}}\n')
    assert table(parsed) == {("a/b", 0): 1.0, ("a/c", 0): 2.0}
    assert parsed.metrics.records == 2


def test_empty_and_missing_files(tmp_path: Path) -> None:
    assert parse(tmp_path, "").metrics.records == 0
    assert problem_kinds(verl_jsonl.read(tmp_path / "none.jsonl")[0]) == ["unreadable"]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.floats() | st.integers(-5, 5) | st.just(10**400), max_size=5),
        max_size=6,
    )
)
@settings(derandomize=True, max_examples=50, deadline=None)
def test_a_row_at_once_is_the_same_as_value_by_value(rows: list[dict[str, float]]) -> None:
    at_once, one_by_one = MetricBuffer(), MetricBuffer()
    for step, row in enumerate(rows):
        small = {key: float(value) for key, value in row.items() if not isinstance(value, int) or value < 10**308}
        at_once.next_record(step, 1.5)
        at_once.add_row(small)
        one_by_one.next_record(step, 1.5)
        for key, value in small.items():
            one_by_one.add(key, value)
    for name in ("keys", "key_id", "record", "segment", "step", "kind_id", "wall_time"):
        assert getattr(at_once, name) == getattr(one_by_one, name)
    assert [repr(v) for v in at_once.value] == [repr(v) for v in one_by_one.value]
