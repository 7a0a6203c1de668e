"""The benchmark's traces are whole, and its ways count the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_audit.ingest import traces
from verl_audit.measure.tokens import reduce_all

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_inputs_are_read_without_a_problem_and_peers_find_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    inputs, benchmark = __import__("tokens_inputs"), __import__("tokens")
    tokens = inputs.write(inputs.Size(2, 12, 40), tmp_path / "run", steps_a_file=1)
    parsed = traces.read(tmp_path / "run")
    assert [problem for one in parsed for problem in one.problems] == []
    sources = [source for one in parsed for source in one.traces]
    found = reduce_all(sources)
    assert found.sums.problems == ()
    assert len(found.sums.trajectories) == 2
    paths = [str(source.path) for source in sources]
    counted = sum(row[2] for row in benchmark.sql(paths))
    assert counted == sum(found.sums.cells["n"].to_pylist())
    assert 0.9 * tokens < counted < tokens
