"""The benchmark's inputs are whole: every reader takes them without a problem."""

from pathlib import Path

import pytest

from verl_audit.ingest.discover import discover
from verl_audit.ingest.read import read_all

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["jsonl", "console", "wandb", "tensorboard"])
def test_inputs_are_read_without_a_problem(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    inputs = __import__("ingest_inputs")
    path = inputs.write(name, 0.002, tmp_path)
    (parsed,) = read_all(discover([path]))
    count = inputs.CONSOLE_KEYS if name == "console" else inputs.KEYS_A_STEP
    steps = max(parsed.metrics.step)
    assert parsed.format == inputs.INPUTS[name][0]
    assert (len(parsed.metrics), parsed.problems) == (count * steps, [])
