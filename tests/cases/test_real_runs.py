"""Real verl runs, whole: counts, and every copy of a run alone gives the same signals and the same verdict."""

from __future__ import annotations

import json
import shutil
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from verl_audit import Audit, AuditError, audit

ROOT = Path(__file__).parents[2]
RUNS = ROOT.parent / "shared" / "real_runs"
BASELINE = ROOT / "fixtures" / "real" / "sync_baseline"
pytestmark = pytest.mark.skipif(not RUNS.is_dir(), reason="the real runs are not beside the repository")

STEPS = {
    "sync_baseline": 60,
    "async_mild": 50,
    "async_drop_bias": 60,
    "fp8_mismatch": 40,
    "rb_drop": 60,
    "rb_wait": 60,
    "rb_dapo": 30,
}
PROBES = ("fp32", "bf16", "fp8", "int8", "int4")
COMPARED = ("async_mild", "async_drop_bias", "fp8_mismatch")
TRAINER_DEPENDENT = {"time_gen"}
"""Without a configuration the trainer may stay unknown, and timing_s/gen means another thing in each."""
QUERY = "SELECT signal, coalesce(label, ''), step, value FROM signals WHERE role = 'run' ORDER BY ALL"


@cache
def whole(name: str) -> Audit:
    return audit(RUNS / name, baselines=[RUNS / "sync_baseline"] if name in COMPARED else [])


SIDE = "sample_metrics.jsonl"
SIDE_KEYS = ("metrics/", "gen_s", "keys", "dapo_filtered_reward_counts/")
"""What the driver of the rb_ runs wrote beside verl's logs: rows of its own, read as such."""


def file_logger(name: str) -> list[dict[str, Any]]:
    """The rows of the verl `file` log, read without the product."""
    (file,) = (RUNS / name / "file_logger").glob("*/*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", STEPS)
def test_steps_and_values_are_those_of_the_log(name: str) -> None:
    rows = file_logger(name)
    found = whole(name)
    assert found.document["run"]["steps_logged"] == STEPS[name]
    logged = "SELECT count(*) FROM metrics JOIN runs USING (run) JOIN sources USING (source_id) WHERE role = 'run'"
    assert found.sql(f"{logged} AND format != 'jsonl'") == [(sum(len(row["data"]) for row in rows),)]


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_lost_and_no_two_sources_differ(name: str) -> None:
    document = whole(name).document
    assert [p for p in document["problems"] if not p["path"].endswith(SIDE)] == []
    assert {s["values_lost"] for s in document["sources"]} == {0}
    assert whole(name).sql("SELECT count(*) FROM differences") == [(0,)]
    assert [k for k in document["coverage"]["unknown_keys"] if not k.startswith(SIDE_KEYS)] == []
    own = [s for s in document["sources"] if f"{name}/" in s["path"] and not s["path"].endswith(SIDE)]
    logs = {s["format"]: s["values_read"] for s in own if s["values_read"]}
    assert len(set(logs.values())) == 1, logs


@pytest.mark.parametrize("name", STEPS)
def test_no_rule_is_broken(name: str) -> None:
    assert [f["rule"] for f in whole(name).document["findings"] if f["status"] == "error"] == []


def test_140_groups_were_evicted() -> None:
    document = whole("async_drop_bias").document
    assert document["ledger"]["fates"]["stale_groups"] == 140
    assert document["ledger"]["fates"]["trained_groups"] == 60 * 16
    assert document["verdict"]["risks"] == ["eviction"]
    assert document["verdict"]["outcome"] == "undetermined"
    assert "evicted_lengths" not in document["verdict"]["missing"]  # its trace holds them


@pytest.mark.parametrize(
    ("name", "key", "fate"),
    [
        ("rb_drop", "training/off_policy/evicted_samples", "stale_groups"),
        ("rb_drop", "training/rollout_failure/evicted_samples", "failed_groups"),
        ("rb_wait", "training/rollout_failure/evicted_samples", "failed_groups"),
        ("rb_dapo", "training/filter_groups/evicted_samples", "filtered_groups"),
    ],
)
def test_the_ledger_agrees_with_what_the_buffer_returned(name: str, key: str, fate: str) -> None:
    lines = (RUNS / name / "sample_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evicted = sum(json.loads(line)["metrics"].get(key, 0) for line in lines)
    assert evicted > 0
    assert whole(name).document["ledger"]["fates"][fate] == evicted


def test_dumps_are_read() -> None:
    for name in ("sync_baseline", "async_mild", "async_drop_bias", "fp8_mismatch"):
        for folder, split in (("rollout_data", "train"), ("val_data", "validation")):
            rows = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in (RUNS / name / folder).glob("*.jsonl"))
            query = f"SELECT count(*) FROM samples JOIN runs USING (run) WHERE role = 'run' AND split = '{split}'"
            assert whole(name).sql(query) == [(rows,)], (name, folder)


def test_fp8_gap_is_three_times_that_of_bf16() -> None:
    document = whole("fp8_mismatch").document
    assert document["measures"]["gap_prob_lag0"]["value"] == pytest.approx(0.013, abs=0.001)
    assert document["measures"]["gap_prob_lag0_ratio"]["value"] == pytest.approx(3.1, abs=0.2)
    assert (document["verdict"]["causes"], document["verdict"]["risks"]) == ([], ["mismatch"])


def test_mild_staleness_is_not_blamed_on_mismatch() -> None:
    document = whole("async_mild").document
    assert (document["verdict"]["outcome"], document["verdict"]["risks"]) == ("none", [])
    assert document["measures"]["gap_prob_ratio"]["value"] > 1.5
    assert document["causes"]["mismatch"]["status"] == "cleared"


def test_the_crash_is_shown() -> None:
    document = whole("crash_hybrid_off").document
    assert document["verdict"]["outcome"] == "other"
    assert document["run"]["ended"] == "died_before_step1"
    assert "unexpected keyword argument 'flush'" in json.dumps(document["run"]["last_error"])


def test_the_five_runs_of_the_probe_are_told_apart() -> None:
    with pytest.raises(AuditError) as caught:
        audit(RUNS / "mismatch_probe")
    assert all(f"  {name}: steps 1 to 12" in str(caught.value) for name in PROBES)
    for name in PROBES:
        found = audit(RUNS / "mismatch_probe", run=name)
        assert found.document["run"]["name"] == name
        assert found.document["run"]["steps_logged"] == 12


def copies(name: str) -> dict[str, Path]:
    """The sources of a run, one a format."""
    run = RUNS / name
    found = {
        "console": run / "console.log",
        "jsonl": next(run.glob("file_logger/*/*.jsonl")),
        "tensorboard": next(run.glob("tensorboard/*")),
    }
    wandb = next(run.glob("wandb/*/*.wandb"), None)
    return found if wandb is None else {**found, "wandb": wandb}


@pytest.mark.parametrize("with_config", [True, False], ids=["with its config", "alone"])
@pytest.mark.parametrize("name", ["sync_baseline", "async_mild", "async_drop_bias", "fp8_mismatch"])
def test_each_copy_gives_the_same_signals_and_verdict(name: str, with_config: bool, tmp_path: Path) -> None:
    reference = whole(name)
    want = reference.sql(QUERY)
    baseline = BASELINE if with_config else BASELINE / "file_logger"
    for form, path in copies(name).items():
        folder = tmp_path / form
        shutil.copytree(RUNS / name / "hydra", folder / "hydra") if with_config else folder.mkdir()
        shutil.copyfile(path, folder / path.name)
        got = audit(folder, baselines=[baseline] if name in COMPARED else [])
        left_out = set() if with_config or form in ("console", "wandb") else TRAINER_DEPENDENT
        same_signals(got.sql(QUERY), [row for row in want if row[0] not in left_out - signals_of(got)], form)
        assert short(got) == short(reference), (form, got.document["verdict"]["sentence"])


def signals_of(found: Audit) -> set[str]:
    return {name for (name,) in found.sql("SELECT DISTINCT signal FROM signals WHERE role = 'run'")}


def short(found: Audit) -> tuple[str, list[str], list[str]]:
    verdict = found.document["verdict"]
    return verdict["outcome"], verdict["causes"], verdict["risks"]


def same_signals(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]], form: str) -> None:
    assert [row[:3] for row in got] == [row[:3] for row in want], form
    for one, other in zip(got, want, strict=True):
        both = isfinite(one[3]) and isfinite(other[3])
        assert not both or one[3] == pytest.approx(other[3], rel=1e-6, abs=1e-12), (form, one, other)
