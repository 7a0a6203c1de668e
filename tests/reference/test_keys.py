"""Simulated verl logs carry the keys of real ones for the same mode, and each mode lacks what verl leaves out there."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_audit.reference.loop import Run
from verl_audit.reference.scenarios import scenario, settings_of
from verl_audit.reference.verl_config import config
from verl_audit.reference.verl_log import VerlLog

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "real"
RECORDED = ROOT / "fixtures" / "recorded"
OWN_BACKEND = {"checkpoint_engine/payload_mb"}
"""Logged by the checkpoint engine those runs brought along, not by verl."""


def alike(key: str) -> str:
    """Names of data sources are the task's own."""
    return re.sub(r"^(val-(?:core|aux)/)\w+?_(short|long)/", r"\1SOURCE_\2/", key)


def steady(key: str) -> bool:
    """Whether a key is in every row at the same place; verl takes the per-token timings from a set."""
    return not any(word in key for word in ("evicted", "switch", "timing_per_token_ms"))


def real(name: str) -> list[dict[str, Any]]:
    folder = RECORDED if (RECORDED / name).exists() else FIXTURES
    (file,) = (folder / name / "file_logger").glob("*/*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@cache
def simulated(name: str, **over: Any) -> list[tuple[int, dict[str, float | int]]]:
    settings = settings_of(scenario(name), "small", {"updates": 24, **over})
    log = VerlLog(settings)
    Run(settings, 0, (log,)).execute()
    return log.rows


def keys(name: str, **over: Any) -> set[str]:
    """Keys of all rows after the first validation."""
    return {key for step, row in simulated(name, **over) if step for key in row}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("sync_baseline", "sync"),
        ("async_mild", "async_drop_loose"),
        ("async_drop_bias", "drop"),
        ("colocate_async", "colocate_drop"),
    ],
)
def test_keys_and_their_order_are_those_of_a_real_run(run: str, name: str) -> None:
    rows = real(run)
    for first in (True, False):
        wanted = {alike(k) for row in rows if (row["step"] == 0) is first for k in row["data"]} - OWN_BACKEND
        got = {alike(k) for step, row in simulated(name) if (step == 0) is first for k in row}
        assert got == wanted
    full = next([alike(k) for k in row["data"] if k not in OWN_BACKEND] for row in rows if row["step"] == 2)
    ours = next([alike(k) for k in row] for step, row in simulated(name) if step == 2)
    assert [k for k in ours if steady(k)] == [k for k in full if steady(k)]


@pytest.mark.parametrize(
    ("run", "name"), [("sync_baseline", "sync"), ("async_drop_bias", "drop"), ("colocate_async", "colocate_drop")]
)
def test_types_are_those_of_a_real_run(run: str, name: str) -> None:
    """What is an integer in verl's file is one here, so that readers meet the same text."""
    wanted = {alike(k): type(v) for row in real(run) for k, v in row["data"].items() if v is not None}
    got = {alike(k): type(v) for _, row in simulated(name) for k, v in row.items()}
    assert {k: t for k, t in got.items() if t is not wanted[k]} == {}


def test_colocate_async_is_configured_as_in_a_real_run() -> None:
    real_one = yaml.safe_load((RECORDED / "colocate_async" / "hydra" / ".hydra" / "config.yaml").read_text())
    over = {"threshold": 3, "warmup": 2.0}
    ours = config(settings_of(scenario("colocate_drop"), "small", over), "p", "e")
    for made in (ours, real_one):
        v1 = made["trainer"]["v1"]
        assert (v1["trainer_mode"], v1["colocate_async"]) == ("colocate_async", {"num_warmup_batches": 2.0})
        assert v1["separate_async"]["parameter_sync_step"] == 4  # verl's default: it stands there and is not read
        assert v1["sampler"]["max_off_policy_threshold"] == 3
        assert made["actor_rollout_ref"]["rollout"]["nnodes"] == 0
        assert made["actor_rollout_ref"]["rollout"]["checkpoint_engine"]["backend"] == "naive"


def test_a_configuration_states_the_engine_of_the_start() -> None:
    stated = [config(settings_of(scenario(n), "small", {}), "p", "e") for n in ("fp4_late", "fp4_bypass")]
    assert [c["actor_rollout_ref"]["rollout"]["quantization"] for c in stated] == [None, "fp4"]


def test_bypass_mode_logs_no_gap_and_no_entropy() -> None:
    lost = keys("sync") - keys("sync_bypass")
    assert lost == {
        k for k in keys("sync") if k.startswith(("training/rollout_", "rollout_corr/")) or k == "actor/entropy"
    }
    assert keys("sync_bypass") < keys("sync")


def test_corrections_add_their_keys() -> None:
    added = {k.removeprefix("rollout_corr/") for k in keys("async_tis") - keys("async")}
    assert {"rollout_is_mean", "rollout_is_eff_sample_size", "rollout_is_ratio_fraction_high"} <= added
    assert all(k.startswith("rollout_is_") for k in added)
    rejected = keys("stale_mis") - keys("async")
    assert {"rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_token_k1_fraction_high"} <= rejected


def test_eviction_keys_are_left_out_where_nothing_was_evicted() -> None:
    counts = [row.get("training/off_policy/evicted_samples") for step, row in simulated("drop") if step]
    assert None in counts and any(counts) and 0 not in counts
    assert not any("evicted" in k for k in keys("async"))


def test_fully_async_rows_are_one_update_late() -> None:
    rows = simulated("fully_async")
    merged = [(s, r) for s, r in rows if "training/global_step" in r]
    assert [(s, r["training/global_step"]) for s, r in merged] == [(n, 4 * n - 1) for n in range(1, 7)] + [(6, 24)]
    assert [r["fully_async/count/current_param_version"] for _, r in merged] == [0, 1, 2, 3, 4, 5, 5]
    assert "timing_s/timing_s/param_sync" not in merged[0][1] and "timing_s/timing_s/param_sync" in merged[1][1]
    assert not any(k.startswith(("training/off_policy/", "global_seqlen/")) for _, r in rows for k in r)
    assert sum("fully_async/rollouter/idle_ratio" in r for _, r in rows) == 6


def test_an_overflowing_queue_shows_in_its_counter_alone() -> None:
    rows = [r for _, r in simulated("overflow") if "fully_async/count/dropped_stale_samples" in r]
    counts = [r["fully_async/count/dropped_stale_samples"] for r in rows]
    assert counts == sorted(counts) and counts[-1] > 1000
    assert {r["fully_async/static/max_queue_size"] for r in rows} == {64}
    assert max(r["fully_async/monitor/queue/mq_queue_size"] for r in rows) <= 64
    assert keys("overflow") == keys("fully_async")
    assert {r["fully_async/count/dropped_stale_samples"] for _, r in simulated("fully_async") if len(r) > 30} == {0}
