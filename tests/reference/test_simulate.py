"""Whole simulated runs: the same bytes twice, buffer rules seen in the log, traces that add up, a hidden truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from verl_audit import audit
from verl_audit.cli import main
from verl_audit.errors import AuditError
from verl_audit.reference import (
    TraceOptions,
    environments,
    scenario,
    scenarios,
    simulate,
    trace_options,
    truth_path,
)
from verl_audit.reference.loop import Run
from verl_audit.reference.scenarios import settings_of
from verl_audit.reference.truth import LEAST_GAIN, baseline_curves
from verl_audit.reference.verl_log import VerlLog
from verl_audit.trace.schema import FATES, LOG_PROBS

FEW: dict[str, Any] = {"updates": 24}
ALL = TraceOptions(lists=1.0)


def rows_of(run: Path) -> list[dict[str, Any]]:
    (file,) = run.glob("unit_tests/*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def series(run: Path, key: str) -> list[float]:
    return [row["data"][key] for row in rows_of(run) if key in row["data"]]


def trajectories(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(run / "traces" / "trajectories.parquet").to_pylist()
    return found


def test_same_seed_same_bytes_another_seed_others(tmp_path: Path) -> None:
    made = [simulate("drop", seed=s, out=tmp_path / n, traces=ALL, **FEW) for n, s in (("a", 3), ("b", 3), ("c", 4))]
    files = [{p.relative_to(m): p.read_bytes() for p in sorted(m.rglob("*")) if p.is_file()} for m in made]
    assert len(files[0]) == 6
    assert files[0] == files[1]
    assert truth_path(made[0]).read_bytes() == truth_path(made[1]).read_bytes()
    assert [p for p in files[0] if p.suffix in (".log", ".parquet") and files[0][p] == files[2].get(p)] == []


@pytest.mark.parametrize("name", [s.name for s in scenarios()])
def test_every_scenario_runs(name: str) -> None:
    settings = settings_of(scenario(name), "small", {"updates": 8, "fault_from": 2})
    log = VerlLog(settings)
    run = Run(settings, 0, (log,)).execute()
    assert run.learner.updates == 8
    assert all(np.isfinite(list(row.values())).all() for _, row in log.rows)


def test_scenarios_are_consistent() -> None:
    known = {s.name: s for s in scenarios()}
    assert len(known) >= 45
    for s in scenarios():
        assert known[s.baseline].family == "baseline"
        assert s.fixes is None or known[s.fixes].at_work
        assert set(s.causes) <= set(s.at_work) or s.family == "two"
        assert (s.family in ("baseline", "harmless")) <= s.harmless
        assert (s.family == "other") == (s.other is not None)
        for env in environments():
            settings_of(s, env, {})
    found = {cause for s in scenarios() for cause in s.causes}
    assert found == {"mismatch", "staleness", "eviction", "sync"}


def test_curves_are_there_for_every_baseline_of_every_environment() -> None:
    wanted = {(env, s.baseline) for env in environments() for s in scenarios()}
    assert wanted <= set(baseline_curves())
    for (env, name), curve in baseline_curves().items():
        settings = settings_of(scenario(name), env, {})
        assert curve.updates[-1] == settings.updates
        assert curve.sd_log_speed < 0.15 or np.ptp(curve.reward) < LEAST_GAIN


def test_a_shipped_curve_is_what_the_loop_gives() -> None:
    """One seed lies where five lay."""
    curve = baseline_curves()[("small", "sync")]
    run = Run(settings_of(scenario("sync"), "small", {"updates": 60}), 1000).execute()
    got = np.array(run.curve)
    assert np.abs(got[:, 2] - np.interp(got[:, 0], curve.updates, curve.reward)).max() < 0.06


def test_nothing_that_reads_the_run_sees_the_truth(tmp_path: Path) -> None:
    run = simulate("stale_bypass", out=tmp_path / "run", **FEW)
    truth = json.loads(truth_path(run).read_text())
    assert truth["causes"] == ["staleness"] and truth_path(run).parent == tmp_path
    text = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    assert b"truth" not in text and b"at_work" not in text
    document = audit(run).document
    assert document["problems"] == [] and document["coverage"]["unknown_keys"] == []
    assert document["run"]["steps_logged"] == 24


def test_console_and_file_say_the_same(tmp_path: Path) -> None:
    for name in ("drop", "fully_async"):
        run = simulate(name, out=tmp_path / name, **FEW)
        found = audit(run)
        assert found.sql("SELECT count(*) FROM differences") == [(0,)]
        assert {s["format"] for s in found.document["sources"]} >= {"verl_console", "verl_jsonl"}


def test_drop_evicts_what_is_older_and_wait_and_admission_evict_nothing(tmp_path: Path) -> None:
    drop = simulate("drop", out=tmp_path / "drop", **FEW)
    assert min(series(drop, "training/off_policy/evicted_samples_staleness/min")) == 3
    assert max(series(drop, "training/off_policy/trajectory_staleness_worst/max")) <= 1
    for name in ("async_wait", "async_admission"):
        run = simulate(name, out=tmp_path / name, **FEW)
        assert series(run, "training/off_policy/evicted_samples") == []


def test_admission_bounds_what_was_asked(tmp_path: Path) -> None:
    run = Run(settings_of(scenario("async_admission"), "small", {"updates": 20}), 0).execute()
    s = run.settings
    assert run.engine.submitted == (s.admission + 19 + 1) * s.groups  # step 20 was trained from version 19


def test_the_engine_of_colocate_async_works_between_updates_only(tmp_path: Path) -> None:
    """Its clock is the sum of waits and updates, and what a sync finds was aborted when the batch was complete."""
    run = simulate("colocate_drop", out=tmp_path / "run", traces=ALL, **FEW)
    syncs = pq.read_table(run / "traces" / "syncs.parquet").to_pylist()
    assert sum(s["aborted"] > 0 for s in syncs) > 12 and sum(s["prefill_tokens"] for s in syncs) > 0
    busy = [(s["t1"].timestamp(), t) for s, t in zip(syncs[::4], series(run, "timing_s/gen")[1:], strict=False)]
    ended = sorted({row["t_done"].timestamp() for row in trajectories(run) if row["t_done"] is not None})
    for woke, wait in busy:
        until = woke + wait + 1e-3
        asleep = [t for t in ended if until < t < until + 0.3]
        assert asleep == []
    assert max(series(run, "training/off_policy/trajectory_staleness_worst/max")) == 1
    assert min(series(run, "training/off_policy/evicted_samples_staleness/min")) == 3


def test_late_faults_leave_the_first_steps_as_they_are(tmp_path: Path) -> None:
    """The same run as without the fault until it sets in, and the truth says when."""
    for late, sound in (("frozen_late", "async"), ("fp4_late", "async_bypass"), ("failures_late", "async")):
        made = [simulate(n, out=tmp_path / late / n, **FEW) for n in (late, sound)]
        truth = json.loads(truth_path(made[0]).read_text())
        assert truth["onset"]["sets_in"] == 11
        found = [series(m, "critic/rewards/mean") for m in made]
        assert found[0][:10] == found[1][:10] and found[0][12:] != found[1][12:]
    known = {n: settings_of(scenario(n), "small", {}).onset_update for n in ("sync", "drop", "rate_decayed")}
    assert known == {"sync": None, "drop": None, "rate_decayed": 40}
    assert settings_of(scenario("frozen_replicas"), "wide", {}).onset_update == 20


def test_dropped_stragglers_are_like_the_trained(tmp_path: Path) -> None:
    run = simulate("stragglers_dropped", out=tmp_path / "run", traces=TraceOptions(lists=0.0), updates=120)
    settings = settings_of(scenario("stragglers_dropped"), "small", {})
    rows = trajectories(run)
    groups = {fate: [r for r in rows if r["fate"] == fate] for fate in ("trained", "stale")}
    share = len(groups["stale"]) / (len(groups["stale"]) + len(groups["trained"]))
    assert share == pytest.approx(1 - (1 - settings.straggler) ** settings.group_size, abs=0.025)
    prompt = [np.mean([r["prompt_length"] for r in part]) for part in groups.values()]
    assert abs(prompt[0] - prompt[1]) < 1.0  # of 4 to 12
    reward = [np.array([r["reward"] for r in part]) for part in groups.values()]
    apart = reward[0].mean() - reward[1].mean()
    assert abs(apart) < 4 * reward[1].std() / np.sqrt(len(reward[1]) / settings.group_size)


def test_an_overflowing_queue_keeps_the_long_answers(tmp_path: Path) -> None:
    run = simulate("overflow", out=tmp_path / "run", traces=TraceOptions(lists=0.0), **FEW)
    rows = trajectories(run)
    size = {f: np.mean([r["response_length"] for r in rows if r["fate"] == f]) for f in ("trained", "stale")}
    assert size["trained"] > size["stale"]
    last = [r["data"] for r in rows_of(run) if "fully_async/count/dropped_stale_samples" in r["data"]][-1]
    lost = sum(r["fate"] == "stale" for r in rows) / settings_of(scenario("overflow"), "small", {}).group_size
    assert lost == pytest.approx(last["fully_async/count/dropped_stale_samples"], rel=0.2)


def test_a_frozen_replica_shows_in_the_largest_lag_unless_it_hides(tmp_path: Path) -> None:
    key = "training/off_policy/trajectory_staleness/max"
    stuck = simulate("frozen_bypass", out=tmp_path / "a", **FEW)
    hidden = simulate("frozen_unlabelled", out=tmp_path / "b", **FEW)
    assert series(stuck, key)[-1] >= 22 and max(series(hidden, key)) <= 4


@pytest.mark.parametrize(
    "name", ["drop", "moe_router_replay", "stale_k4_bypass", "fully_async", "failures", "colocate_async"]
)
def test_traces_add_up(name: str, tmp_path: Path) -> None:
    run = simulate(name, out=tmp_path / "run", traces=ALL, **FEW)
    settings = settings_of(scenario(name), "small", FEW)
    rows = trajectories(run)
    assert {row["fate"] for row in rows} <= set(FATES)
    trained = [row for row in rows if row["fate"] == "trained"]
    assert len(trained) == 24 * settings.groups * settings.group_size
    assert len({(row["group"], row["session"]) for row in rows}) == len(rows)
    logged = sum(series(run, "training/off_policy/evicted_samples"))
    assert sum("stale" in row["reasons"] for row in rows) == logged * settings.group_size
    for row in trained[:: max(1, len(trained) // 200)]:
        kept = [row[n] for n in LOG_PROBS if row[n] is not None]
        assert len(kept) == (3 if settings.bypass else 4)
        assert {len(values) for values in kept} == {row["response_length"]}
        segments = row["segments"]
        assert sum(s["length"] for s in segments) == row["response_length"]
        assert (segments[0]["version"], segments[-1]["version"]) == (row["first_version"], row["last_version"])
        assert row["t_submit"] <= row["t_first_token"] <= row["t_done"] <= row["t_enqueue"] <= row["t_decided"]


def test_refilled_groups_get_numbers_of_their_own(tmp_path: Path) -> None:
    run = simulate("async_admission", out=tmp_path / "run", traces=TraceOptions(lists=0.0), failure=0.6, **FEW)
    rows = trajectories(run)
    assert any(row["fate"] == "failed" for row in rows)
    assert len({(row["group"], row["session"]) for row in rows}) == len(rows)


def test_traced_lag_and_gap_are_those_of_the_log(tmp_path: Path) -> None:
    run = simulate("stale_and_fp4", out=tmp_path / "run", traces=ALL, bypass="false", **FEW)
    rows = [row for row in trajectories(run) if row["decided_step"] == 20 and row["fate"] == "trained"]
    logged = next(row["data"] for row in rows_of(run) if row["step"] == 20)
    lag = [row["train_version"] - row["last_version"] for row in rows]
    assert np.mean(lag) == pytest.approx(logged["training/off_policy/trajectory_staleness/mean"])
    gap = np.concatenate([np.exp(row["prox_logp"]) - np.exp(row["behave_logp"]) for row in rows])
    assert np.abs(gap).mean() == pytest.approx(logged["training/rollout_probs_diff_mean"], rel=1e-4)


def test_mismatch_is_zero_without_rounding_and_staleness_is_zero_at_lag_0(tmp_path: Path) -> None:
    exact = simulate("stale_bypass", out=tmp_path / "a", traces=ALL, rollout_format="fp32", **FEW)
    for row in trajectories(exact)[:2000:50]:
        if row["fate"] == "trained":
            assert np.allclose(row["trainer_logp"], row["behave_logp"], atol=1e-5)
    fresh = simulate("fp4_sync_bypass", out=tmp_path / "b", traces=ALL, bypass="false", **FEW)
    apart = []
    for row in trajectories(fresh)[-500::10]:
        assert np.allclose(row["prox_logp"], row["trainer_logp"], atol=1e-5)
        apart.append(np.abs(np.subtract(row["trainer_logp"], row["behave_logp"])).mean())
    assert np.mean(apart) > 0.02


def test_sums_stand_in_for_lists(tmp_path: Path) -> None:
    made = [
        simulate("fp4_bypass", out=tmp_path / str(lists), traces=TraceOptions(("behave", "theta"), lists), **FEW)
        for lists in (0.0, 1.0)
    ]
    summed, listed = (trajectories(m) for m in made)
    for a, b in list(zip(summed, listed, strict=True))[:400:40]:
        assert a["behave_logp"] is None and a["prox_logp"] is None and b["trainer_logp"] is None
        (found,) = a["sums"]
        d = np.subtract(b["theta_logp"], b["behave_logp"])
        assert (found["later"], found["earlier"], found["n"]) == ("theta_logp", "behave_logp", len(d))
        assert found["sum"] == pytest.approx(d.sum(), abs=1e-5) and found["w2_sum"] == pytest.approx(
            np.exp(2 * d).sum(), rel=1e-5
        )


def test_occupied_targets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("x")
    with pytest.raises(AuditError, match="not an empty directory"):
        simulate("sync", out=tmp_path / "run", **FEW)
    (tmp_path / "other.truth.json").write_text("{}")
    with pytest.raises(AuditError, match="no truth of a simulated run"):
        simulate("sync", out=tmp_path / "other", **FEW)


def test_bad_names_are_told() -> None:
    with pytest.raises(AuditError, match="did you mean stale_bypass"):
        scenario("stale_bypass2")
    with pytest.raises(AuditError, match="no environment 'huge'"):
        settings_of(scenario("sync"), "huge", {})
    with pytest.raises(AuditError, match="known are behave"):
        trace_options("behave,old", 0.1)


def test_command_writes_lists_and_refuses(tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "run"
    listed = runner.invoke(main, ["simulate", "--list"])
    assert listed.exit_code == 0 and "stale_bypass" in listed.output and "--env wide" in listed.output
    done = runner.invoke(main, ["simulate", "drop", "-o", str(out), "--set", "updates=10", "--seed", "2"])
    assert done.exit_code == 0, done.output
    assert json.loads(truth_path(out).read_text())["overrides"] == {"updates": "10"}
    assert (out / "traces" / "trajectories.parquet").exists() and (out / ".hydra" / "config.yaml").exists()
    assert runner.invoke(main, ["simulate", "drop", "-o", str(out)]).exit_code == 2
    assert runner.invoke(main, ["simulate", "drop"]).exit_code == 2
    for pair in ("lr=1", "seed=1", "updates"):
        assert runner.invoke(main, ["simulate", "drop", "-o", str(tmp_path / "b"), "--set", pair]).exit_code == 2
    assert not (tmp_path / "b").exists()


def test_validation_is_sampled_without_the_top_p_of_training(tmp_path: Path) -> None:
    """As in verl, whose val_kwargs have a top_p of their own: at step 0 nucleus sampling makes no difference to it."""
    made = [simulate(n, out=tmp_path / n, **FEW) for n in ("top_p_bypass", "async_bypass")]
    key = next(k for k in rows_of(made[0])[0]["data"] if k.startswith("val-core/"))
    first = [series(m, key)[0] for m in made]
    assert first[0] == first[1]
    assert series(made[0], "critic/rewards/mean")[0] != series(made[1], "critic/rewards/mean")[0]
