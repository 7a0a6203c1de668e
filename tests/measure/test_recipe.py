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
    elsewhere = {"actor_rollout_ref.model.path": "/other/Qwen-8B/", "data.train_files": "/x/one/train.parquet"}
    assert differences({**BASE, LR: "0.000001", **elsewhere}, [BASE]) == ()


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [
        ("actor_rollout_ref.actor.use_kl_loss", "True", "true"),
        ("actor_rollout_ref.actor.optim.betas", "[0.9,0.999]", "(0.9, 0.999)"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "-1", "null"),
        ("actor_rollout_ref.model.path", "/c/models--Qwen--Qwen-8B/snapshots/0a1b", "Qwen/Qwen-8B"),
        ("critic.optim.lr", "1e-5", "2e-5"),
        ("reward_model.model.path", "a", "b"),
        ("actor_rollout_ref.actor.kl_loss_coef", "0.1", "0.2"),
    ],
)
def test_these_are_no_differences(key: str, ours: str, theirs: str) -> None:
    off = {"actor_rollout_ref.actor.use_kl_loss": "false"}
    assert differences({**BASE, **off, key: ours}, [{**BASE, **off, key: theirs}]) == ()


def test_a_coefficient_counts_where_its_switch_is_on() -> None:
    on = {**BASE, "actor_rollout_ref.actor.use_kl_loss": "true"}
    key = "actor_rollout_ref.actor.kl_loss_coef"
    assert len(differences({**on, key: "0.1"}, [{**on, key: "0.2"}]) or ()) == 1


def test_data_of_one_name_in_other_folders_may_be_the_same_or_not() -> None:
    moved = {**BASE, "data.train_files": "/data/math/train.parquet"}
    assert differences(moved, [BASE]) is None
    assert len(differences({**moved, LR: "5e-6"}, [BASE]) or ()) == 1
    two = "[/data/one/train.parquet, /data/more/train.parquet]"
    assert len(differences({**BASE, "data.train_files": two}, [BASE]) or ()) == 1


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
