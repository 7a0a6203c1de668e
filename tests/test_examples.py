"""The examples run, and what they record is within the schema."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from verl_audit.trace.schema import schema

ROOT = Path(__file__).parents[1]


def test_the_plain_loop_records_every_fate_and_the_bias_of_dropping(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "examples" / "plain_loop.py"), str(tmp_path)], check=True)
    files = sorted(tmp_path.glob("trajectories-*.parquet"))
    assert all(pq.read_schema(path).equals(schema()) for path in files)
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    assert {row["fate"] for row in rows} == {"trained", "stale", "in_flight"}
    length = {fate: [r["response_length"] for r in rows if r["fate"] == fate] for fate in ("trained", "stale")}
    assert sum(length["stale"]) / len(length["stale"]) > sum(length["trained"]) / len(length["trained"])
    assert all(r["train_version"] >= r["last_version"] for r in rows if r["fate"] == "trained")
