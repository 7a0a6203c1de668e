"""Profiles: what a run determines, what it leaves open, and that a made-up run gives back the work it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.synthetic import row, rows, write_run
from verl_audit.errors import AuditError
from verl_audit.pipeline import load_all
from verl_audit.plan.des import Setting, simulate
from verl_audit.plan.measured import from_run
from verl_audit.plan.profile import Given, Profile, from_numbers
from verl_audit.plan.tail import lognormal

REAL = Path(__file__).parents[2] / "fixtures" / "real"
CARDS = Given(train_cards=8, rollout_cards=24, slots=32 / 24, durations=lognormal(1.0, 4))


def profile(path: Path, given: Given | None = None, **facts: Any) -> Profile:
    return from_run(load_all(path, facts=facts or None), given or Given())


def made(path: Path, mode: str, rollout: float, train: float, **other: Any) -> Path:
    """A v1 run of 40 steps whose timers a simulation made: 16 groups of 4, one update a step."""
    setting = Setting(32, 16, 4, 1, 1.0, train, 0.5, rollout * 32 / 64, cycles=44, warm_up=4)
    run = simulate(setting, lognormal(1.0, 4).values)
    found = [
        row(
            n,
            lag=1.0,
            extra={
                "timing_s/step": c.end - c.start,
                "timing_s/gen": sum(high - low for low, high in c.waits),
                "timing_s/update_weights": 0.5,
                **other,
            },
        )
        for n, c in enumerate(run.cycles[4:], 1)
    ]
    return write_run(path, found, mode)


def test_work_is_found_again_where_the_trainer_waits(tmp_path: Path) -> None:
    found = profile(made(tmp_path, "separate_async", 60.0, 20.0), CARDS)
    assert found.work.train.seconds == pytest.approx(20.0, rel=1e-6)
    assert found.work.rollout.seconds == pytest.approx(60.0, rel=0.05)
    assert (found.train_cards, found.rollout_cards, found.cards) == (8, 24, 32)
    assert found.work.sync_seconds == 0.5
    assert found.work.rollout.low is not None and found.work.rollout.low < found.work.rollout.seconds


def test_a_trainer_that_never_waits_bounds_the_rollouts(tmp_path: Path) -> None:
    found = profile(made(tmp_path, "separate_async", 10.0, 200.0), CARDS)
    assert found.work.rollout.high is not None and found.work.rollout.high >= 10.0
    assert "rollout time" in {u.what for u in found.work.unknown}


def test_a_synchronous_baseline_tells_what_the_trainer_hides(tmp_path: Path) -> None:
    run = made(tmp_path / "a", "separate_async", 10.0, 200.0)
    base = write_run(tmp_path / "s", rows(range(1, 41), extra={"timing_s/step": 60.0, "timing_s/gen": 40.0}), "sync")
    config = (base / ".hydra" / "config.yaml").read_text() + "  nnodes: 1\n  n_gpus_per_node: 8\n"
    (base / ".hydra" / "config.yaml").write_text(config)
    found = from_run(load_all(run, [base]), CARDS)
    assert "rollout time" not in {u.what for u in found.work.unknown}
    assert any("from generation of" in text for text in found.work.measured)
    assert found.work.rollout.seconds < 40.0 * 8 / 24, "drain taken off, and on three times the cards"


def test_synchronous_run_without_its_drain() -> None:
    found = profile(REAL / "sync_baseline")
    work = found.work
    assert (found.cards, found.updates, work.groups, work.group_size) == (1, 1, 16, 6)
    assert work.reference.seconds == pytest.approx(5.18, abs=0.01)
    assert work.sync_seconds == pytest.approx(0.042, abs=0.001)
    generation = work.reference.seconds - work.train.seconds - work.sync_seconds
    assert generation == pytest.approx(3.84, abs=0.01)
    assert 0.3 * generation < work.rollout.seconds < 0.7 * generation, "all 96 at once: the longest is waited for"


def test_asynchronous_run() -> None:
    found = profile(REAL / "async_mild")
    work = found.work
    assert (found.train_cards, found.rollout_cards, found.theta, work.mode) == (1, 1, 1.0, "separate_async")
    assert work.evict_above == 8
    assert work.train.seconds == pytest.approx(1.46, abs=0.02)
    assert any("every 2 s" in note for note in work.notes)
    assert {"KV cache", "spread of durations", "scaling of rollout and training"} == {u.what for u in work.unknown}


def test_numbers() -> None:
    found = from_numbers(Given(rollout=6, train=2, baseline_cards=32, updates=2))
    assert found.work.rollout.card_seconds == 96
    assert found.work.train.card_seconds == 32
    assert found.work.reference.seconds == 4
    assert len(found.work.unknown) == 6


@pytest.mark.parametrize("missing", ["rollout", "train", "baseline_cards"])
def test_numbers_that_do_not_suffice(missing: str) -> None:
    numbers = {"rollout": 3.0, "train": 1.0, "baseline_cards": 32, missing: None}
    with pytest.raises(AuditError, match="needed"):
        from_numbers(Given(**numbers))  # type: ignore[arg-type]


def test_what_a_run_must_have(tmp_path: Path) -> None:
    few = write_run(tmp_path / "few", rows(range(1, 6)), "separate_async")
    with pytest.raises(AuditError, match="a profile needs 8"):
        profile(few, CARDS)
    unknown = write_run(tmp_path / "cards", rows(range(1, 41)), "separate_async")
    with pytest.raises(AuditError, match="give --train-cards"):
        profile(unknown)
    bare = write_run(tmp_path / "bare", rows(range(1, 41)), None)
    with pytest.raises(AuditError, match=r"fact\.trainer"):
        profile(bare)


def test_fully_async_from_the_busy_share_of_its_rollouter(tmp_path: Path) -> None:
    made_rows = [
        (
            n,
            {
                "timing_s/step": 100.0 + np.sin(n),
                "fully_async/total_wait_time": 20.0,
                "fully_async/trainer/idle_ratio": 0.2,
                "fully_async/rollouter/idle_ratio": 0.3,
                "fully_async/count/current_param_version": float(n - 1),
                "timing_s/timing_s/param_sync": 4.0,
                "response_length/mean": 100.0,
                "response_length/max": 300.0,
            },
        )
        for n in range(1, 41)
    ]
    run = write_run(tmp_path, made_rows, None)
    facts = {"trainer": "fully_async", "updates_per_version": 4, "fa_staleness_share": 0.1, "groups_per_step": 64}
    found = profile(run, CARDS, **facts)
    assert found.work.mode == "fully_async"
    assert found.work.rollout.seconds * 4 == pytest.approx(70, rel=0.01)
    assert found.work.train.seconds * 4 == pytest.approx(76, rel=0.01)
    assert found.work.evict_above is None
