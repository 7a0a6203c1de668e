"""Runs with per-trajectory traces: the traces decide where metrics could only bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from click.testing import CliRunner

from tests.ingest.writers import REAL_RUNS
from tests.synthetic import rows, write_run
from verl_audit import audit
from verl_audit.cli import main
from verl_audit.measure.model import catalog
from verl_audit.trace.write import to_table, write

GROUP, TOKENS, STEPS = 4, 40, 40


def trajectories(
    *,
    lags: Sequence[int] = (0, 1, 2, 3),
    mismatch: float = 0.0,
    drift: float = 0.0,
    lost: str = "",
    groups: int = 8,
    servers: int = 2,
    frozen: bool = False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of a run of 40 steps whose gap and losses are known.

    `mismatch` and `drift` are standard deviations in nats, of the engines and of one update; `lost`: "longest" or any
    group of a step is stale; `frozen`: the last server keeps version 0.
    """
    rng = np.random.default_rng(seed)
    made = []
    for step in range(1, STEPS + 1):
        sizes = np.round(TOKENS * np.exp(0.5 * rng.normal(size=groups))).astype(int) + 5
        losers = set(np.argsort(-sizes if lost == "longest" else rng.random(groups))[:1].tolist()) if lost else set()
        for g in range(groups):
            lag = min(int(rng.choice(lags)), step - 1)
            server = int(rng.integers(servers))
            version = 0 if frozen and server == servers - 1 else step - 1 - lag
            for session in range(GROUP):
                n = max(2, int(sizes[g] + rng.integers(-2, 3)))
                behave = -np.abs(rng.normal(0.8, 0.7, n)).astype(np.float32)
                age = step - 1 - version
                spread = np.sqrt(mismatch**2 + age * drift**2)
                made.append(
                    {
                        "group": f"{step}-{g}",
                        "session": session,
                        "fate": "stale" if g in losers else "trained",
                        "reasons": ["stale"] if g in losers else ["trained"],
                        "submit_step": step,
                        "decided_step": step,
                        "first_version": version,
                        "last_version": version,
                        "train_version": None if g in losers else step - 1,
                        "train_minibatch": None if g in losers else 0,
                        "segments": [{"version": version, "start": 0, "length": n, "server": f"s{server}"}],
                        "response_length": n,
                        "reward": float(rng.random() < 0.5),
                        "advantage": float(rng.normal()),
                        "behave_logp": behave,
                        "prox_logp": np.minimum(behave + rng.normal(0, 1, n) * spread, 0).astype(np.float32),
                    }
                )
    return made


def run(folder: Path, name: str, **how: Any) -> Path:
    """An asynchronous run with its metrics and its trace."""
    made = rows(range(1, STEPS + 1), lag=1.5)
    home = write_run(folder / name, made, "separate_async", name=name)
    (home / "traces").mkdir()
    write(to_table(trajectories(**how), updates_per_version=1), home / "traces" / "trajectories-0.parquet")
    return home


def fired(document: dict[str, Any]) -> dict[str, str]:
    return {f["rule"]: f["level"] for f in document["findings"] if f["status"] == "fired"}


def test_a_gap_without_growth_is_mismatch(tmp_path: Path) -> None:
    found = audit(run(tmp_path, "coarse", mismatch=0.3)).document
    assert found["measures"]["mismatch_share"]["level"] == "traces"
    assert found["measures"]["mismatch_share"]["low"] > 0.6
    assert fired(found)["mismatch-dominates"] == "traces"
    assert "staleness-dominates" not in fired(found)
    assert found["causes"]["mismatch"]["evidence_level"] == "traces"


def test_a_gap_that_grows_with_age_is_staleness(tmp_path: Path) -> None:
    found = audit(run(tmp_path, "old", drift=0.3, lags=(0, 2, 4, 8, 12))).document
    assert found["measures"]["mismatch_share"]["high"] < 0.6
    assert found["measures"]["gap_growth"]["low"] > 0
    assert found["causes"]["mismatch"]["status"] != "implicated"
    assert "mismatch-dominates" not in fired(found)
    lags = {row["lag"]: row["mean_abs_diff"] for row in found["traces"]["per_lag"]}
    assert lags[0] < lags[2] < lags[4] < lags[8]


def test_losing_the_longest_is_found_and_losing_any_is_cleared(tmp_path: Path) -> None:
    longest = audit(run(tmp_path, "longest", lost="longest")).document
    random = audit(run(tmp_path, "random", lost="random")).document
    assert fired(longest)["eviction-long-responses-lost"] == "traces"
    assert longest["causes"]["eviction"]["risk"]
    assert longest["causes"]["eviction"]["damage"]["low"] > 0.05
    assert "eviction-long-responses-lost" not in fired(random)
    assert random["causes"]["eviction"]["damage"]["high"] < 0.05


def test_a_frozen_replica_is_named_by_its_versions(tmp_path: Path) -> None:
    found = audit(run(tmp_path, "frozen", servers=4, frozen=True)).document
    assert fired(found)["sync-replica-frozen-in-traces"] == "traces"
    assert found["causes"]["sync"]["risk"]
    behind = {r["server"]: r["behind"] for r in found["traces"]["replicas"]}
    assert max(behind, key=lambda s: behind[s]) == "s3"


def test_a_quiet_run_clears_what_traces_can_clear(tmp_path: Path) -> None:
    found = audit(run(tmp_path, "quiet", mismatch=0.01, drift=0.005)).document
    assert {c: j["status"] for c, j in found["causes"].items() if c != "sync"} == {
        "mismatch": "cleared",
        "staleness": "cleared",
        "eviction": "cleared",
    }
    present = {e["signal"] for e in found["coverage"]["causes"]["eviction"] if e["standing"] == "present"}
    assert "evicted_lengths" in present


def test_traces_alone_can_be_judged(tmp_path: Path) -> None:
    write(to_table(trajectories(lost="longest"), updates_per_version=1), tmp_path / "only.parquet")
    shown = CliRunner().invoke(main, ["traces", str(tmp_path)], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert shown.exit_code == 0, shown.output
    assert "Ledger" in shown.output
    assert "stale" in shown.output


def test_the_export_is_a_row_a_trajectory(tmp_path: Path) -> None:
    home, out = run(tmp_path, "r"), tmp_path / "rows.parquet"
    command = ["traces", str(home), "--export", str(out)]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = CliRunner().invoke(main, command, env=env)
    assert done.exit_code == 0, done.output
    query = f"select count(*), count(n), sum(n), sum(response_length) from '{out}'"
    rows_, summed, tokens, lengths = duckdb.execute(query).fetchall()[0]
    assert rows_ == summed == len(trajectories())
    assert tokens == lengths
    assert CliRunner().invoke(main, command, env=env).exit_code == 0
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 something else")
    refused = CliRunner().invoke(main, ["traces", str(home), "--export", str(tmp_path / "mine.parquet")], env=env)
    assert refused.exit_code == 2
    assert "no export of verl-audit" in refused.stderr


def test_a_run_without_traces_says_so(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["traces", str(write_run(tmp_path / "r", rows(range(1, 21))))])
    assert shown.exit_code == 3
    assert "no per-trajectory trace" in shown.stderr


real = pytest.mark.skipif(not REAL_RUNS.is_dir(), reason="the real runs are not beside the repository")


@real
def test_what_a_real_run_evicted() -> None:
    found = audit(REAL_RUNS / "async_drop_bias", baselines=[REAL_RUNS / "sync_baseline"]).document
    book = {row["fate"]: row for row in found["traces"]["ledger"]["unit_rows"]}
    assert (book["stale"]["groups"], book["stale"]["trajectories"]) == (140, 560)
    assert book["stale"]["mean_length"] == pytest.approx(17.7, abs=0.05)
    assert book["trained"]["mean_length"] == pytest.approx(10.9, abs=0.05)
    assert found["traces"]["ledger"]["closes"]
    assert found["ledger"]["level"] == "traces"
    shift = found["measures"]["trace_kept_length_shift"]
    assert shift["low"] < -0.091 < shift["high"] < -0.05
    eviction = found["causes"]["eviction"]
    assert eviction["evidence_level"] == "traces"
    assert eviction["damage"]["low"] > 0.07
    assert found["verdict"]["risks"] == ["eviction"]
    assert "evicted_lengths" not in found["verdict"]["missing"]


@real
@pytest.mark.parametrize(
    ("name", "fate", "groups", "biased"),
    [("rb_drop", "stale", 231, True), ("rb_wait", "stale", 0, False), ("rb_dapo", "filtered", 151, False)],
)
def test_what_real_replay_buffers_took_out(name: str, fate: str, groups: int, biased: bool) -> None:
    found = audit(REAL_RUNS / name).document
    book = {row["fate"]: row["groups"] for row in found["traces"]["ledger"]["unit_rows"]}
    assert book.get(fate, 0) == groups
    assert ("eviction-long-responses-lost" in fired(found)) == biased


def test_every_measure_of_traces_is_produced_by_some_trace(tmp_path: Path) -> None:
    home = run(tmp_path, "full", mismatch=0.2, drift=0.1, lost="longest", servers=4)
    syncs = [
        {"version": v, "replica": f"s{r}", "replica_version": v, "payload_count": 3, "payload_norm": 1.0 + v}
        for v in range(1, STEPS)
        for r in range(4)
    ]
    write(to_table(syncs, "syncs"), home / "traces" / "syncs-0.parquet")
    depth = [{"step": s, "pending": 0, "running": 0, "finished": 0, "failed": 0} for s in range(1, STEPS + 1)]
    write(to_table(depth, "buffer"), home / "traces" / "buffer-0.parquet")
    rows_ = trajectories(mismatch=0.2, drift=0.1, lost="longest", servers=4)
    for row in rows_:
        gap = row["prox_logp"] - row["behave_logp"]
        row |= {
            "truncated": False,
            "trainer_logp": row["behave_logp"] + 0.7 * gap,
            "theta_logp": row["prox_logp"] - 0.01,
        }
    write(to_table(rows_, updates_per_version=1), home / "traces" / "trajectories-0.parquet")
    found = audit(home).document["measures"]
    dead = {n for n, d in catalog().items() if d.traces and found[n]["value"] is None}
    # no agreement of experts here, no length trained half as often, and one update a version has no order
    assert dead <= {"expert_agreement", "trace_length_l50", "trace_order_period"}
