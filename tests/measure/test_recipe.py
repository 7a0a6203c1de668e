"""Settings of the recipe that differ between a run and its baseline."""

from __future__ import annotations

import pytest

from verl_audit.measure.recipe import differences

LR, ENTROPY = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.entropy_coeff"
BASE = {
    LR: "1e-6",
    ENTROPY: "0",
    "actor_rollout_ref.model.path": "/models/a/Qwen-8B",
    "data.train_files": "['/data/one/train.parquet']",
    "trainer.v1.trainer_mode": "sync",
    "actor_rollout_ref.rollout.quantization": "null",
}


def test_spelling_and_folders_make_no_difference() -> None:
    same = {
        **BASE,
        LR: "0.000001",
        "actor_rollout_ref.model.path": "/other/Qwen-8B/",
        "data.train_files": "x/train.parquet",
    }
    assert differences(same, [BASE]) == ()


def test_what_a_diagnosis_is_about_is_no_recipe() -> None:
    moved = {**BASE, "trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.rollout.quantization": "fp8"}
    assert differences(moved, [BASE]) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (LR, "5e-6"),
        (ENTROPY, "0.01"),
        ("data.train_files", "other.parquet"),
        ("actor_rollout_ref.model.path", "Qwen-4B"),
    ],
)
def test_a_setting_that_differs_is_told_with_both_values(key: str, value: str) -> None:
    assert differences({**BASE, key: value}, [BASE]) == (f"{key} is {value}, the baseline's {BASE[key]}",)


def test_each_setting_is_told_once_whichever_baseline_differs() -> None:
    assert len(differences({**BASE, LR: "5e-6"}, [BASE, BASE]) or ()) == 1
    assert len(differences(BASE, [BASE, {**BASE, LR: "5e-6"}]) or ()) == 1


def test_what_one_does_not_state_is_not_known_to_differ() -> None:
    assert differences({LR: "1e-6", "actor_rollout_ref.rollout.n": "8"}, [{LR: "1e-6"}]) == ()
    assert differences({}, [BASE]) is None
    assert differences(BASE, []) is None
    assert differences(BASE, [{"trainer.v1.trainer_mode": "sync"}]) is None
