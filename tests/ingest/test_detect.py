"""Facts of a run: right where something tells them, None with a reason where nothing does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_audit.ingest.detect import FACTS, Fact, detect, plain

SHARED = Path(__file__).parents[2].parent / "shared"
RUNS = SHARED / "real_runs"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="shared inputs are not here")
SPANS = "training/off_policy/trajectory_spans/mean"
LAG = "training/off_policy/trajectory_staleness/max"
ROW = ("timing_s/step", "critic/score/mean", "actor/grad_norm")
Values = dict[str, tuple[float, float]]


def real_values(run: str) -> Values:
    values: Values = {}
    for path in (RUNS / run).glob("file_logger/*/*.jsonl"):
        for line in path.read_text().splitlines():
            data: dict[str, Any] = json.loads(line)["data"]
            for key, value in data.items():
                number = math.nan if value is None else float(value)
                low, high = values.get(key, (number, number))
                values[key] = (min(low, number), max(high, number))
    return values


def real_config(run: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((RUNS / run / "hydra" / ".hydra" / "config.yaml").read_text())
    return tree


def config(**settings: Any) -> dict[str, Any]:
    """A nested tree from `a__b__c=value`."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, last = path.split("__")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def v1(mode: str, **settings: Any) -> dict[str, Any]:
    return config(trainer__v1__trainer_mode=mode, trainer__use_v1=True, **settings)


FA_CONFIG = config(
    trainer__use_v1=True,
    trainer__v1__trainer_mode="sync",
    data__train_batch_size=0,
    actor_rollout_ref__hybrid_engine=False,
    actor_rollout_ref__actor__ppo_mini_batch_size=32,
    actor_rollout_ref__actor__ppo_epochs=1,
    actor_rollout_ref__rollout__n=8,
    async_training__trigger_parameter_sync_step=4,
    async_training__require_batches=2,
    async_training__staleness_threshold=0.5,
    async_training__partial_rollout=False,
    algorithm__filter_groups__enable=True,
    algorithm__rollout_correction__bypass_mode=True,
)


def value(facts: Mapping[str, Fact], name: str) -> object:
    return facts[name].value


# ------------------------------------------------------------------ real runs

COMMON = {
    "framework": "verl",
    "trainer_family": "v1",
    "log_prob_mode": "decoupled",
    "calculate_log_probs": True,
    "on_policy_updates": True,
    "correction": "none",
    "rejection": "none",
    "three_decimals": False,
}
CONFIGURED = {
    "updates_per_version": 1,
    "groups_per_step": 16,
    "dapo_enabled": False,
    "dapo_effective": False,
    "loss_mode": "vanilla",
    "rollout_quantization": "none",
    "rollout_dtype": "bfloat16",
    "trainer_dtype": "fp32",
    "router_replay": "none",
    "temperature": 1,
    "top_p": 1,
    "top_k": -1,
    "learning_rate": 1e-4,
    "response_limit": 24,
    "project": "toy_map",
    "model_path": "/data/toy/assets/model",
    "train_files": "/data/toy/assets/train.parquet",
}
RUN_FACTS: dict[str, dict[str, object]] = {
    "sync_baseline": {
        "trainer": "sync",
        "is_async": False,
        "group_size": 6,
        "samples_per_step": 96,
        "staleness_threshold": None,
        "staleness_strategy": None,
        "warmup_batches": None,
        "custom_sampler": False,
        "partial_rollout": False,
        "total_steps": 60,
        "test_freq": 10,
    },
    "fp8_mismatch": {"trainer": "sync", "is_async": False, "samples_per_step": 64},
    "async_mild": {
        "trainer": "separate_async",
        "is_async": True,
        "staleness_threshold": 8,
        "staleness_strategy": "drop",
        "warmup_batches": 1,
        "custom_sampler": False,
        "partial_rollout": True,
    },
    "async_drop_bias": {
        "trainer": "separate_async",
        "staleness_threshold": 3,
        "warmup_batches": 2,
        "custom_sampler": True,
        "experiment": "async_drop_bias",
    },
}


@needs_shared
@pytest.mark.parametrize("run", sorted(RUN_FACTS))
def test_real_run_with_its_configuration(run: str) -> None:
    values = real_values(run)
    facts = plain(detect(values, real_config(run), (), values))
    expected = {**COMMON, **CONFIGURED, **RUN_FACTS[run]}
    assert {name: facts[name] for name in expected} == expected
    assert str(facts["framework_version"]).startswith(">=0.9.1")


@needs_shared
@pytest.mark.parametrize(
    ("run", "trainer", "is_async"),
    [
        ("sync_baseline", None, None),
        ("fp8_mismatch", None, None),
        ("async_mild", "separate_async", True),
        ("async_drop_bias", "separate_async", True),
    ],
)
def test_real_run_from_its_metrics_alone(run: str, trainer: str | None, is_async: bool | None) -> None:
    values = real_values(run)
    facts = detect(values, None, (), values)
    expected = {**COMMON, "trainer": trainer, "is_async": is_async}
    assert {name: value(facts, name) for name in expected} == expected
    if trainer is None:
        assert "no proof" in facts["trainer"].reason


@needs_shared
@pytest.mark.parametrize(("run", "dapo"), [("rb_drop", None), ("rb_wait", None), ("rb_dapo", True)])
def test_replay_buffer_runs_are_asynchronous_and_nothing_more(run: str, dapo: bool | None) -> None:
    values = real_values(run)
    facts = plain(detect(values, None, (), values))
    assert (facts["trainer"], facts["trainer_family"], facts["is_async"]) == (None, "v1", True)
    assert facts["dapo_effective"] is dapo
    assert facts["log_prob_mode"] is None


@needs_shared
def test_mismatch_probe_has_a_gap_and_no_trainer() -> None:
    values = real_values("mismatch_probe")
    facts = plain(detect(values, None, (), values))
    assert (facts["framework"], facts["trainer"], facts["is_async"]) == ("verl", None, None)
    assert facts["log_prob_mode"] == "decoupled"
    assert facts["correction"] is None
    assert facts["rejection"] == "seq_mean_k3"


@needs_shared
def test_crashed_run_is_known_from_its_configuration() -> None:
    facts = plain(detect([], real_config("crash_hybrid_off"), ["TaskRunnerV1"]))
    assert (facts["framework"], facts["trainer"], facts["is_async"]) == ("verl", "separate_async", True)


# ------------------------------------------------------------------ honesty


def test_nothing_is_known_of_nothing_and_every_reason_is_given() -> None:
    facts = detect([], None)
    assert tuple(facts) == FACTS
    assert {name for name, fact in facts.items() if fact.value is not None} == set()
    assert all(fact.reason for fact in facts.values())


def test_hand_picked_columns_prove_nothing_by_what_is_absent() -> None:
    facts = plain(detect(["rollout_corr/kl", SPANS], None))
    assert (facts["correction"], facts["rejection"]) == (None, None)
    facts = plain(detect([SPANS, "actor/pg_loss"], None))
    assert facts["log_prob_mode"] is None
    assert facts["trainer"] is None


def test_unresolved_settings_are_unknown() -> None:
    tree = config(
        actor_rollout_ref__rollout__n="${oc.select:data.n,1}",
        actor_rollout_ref__rollout__response_length="${data.max_response_length}",
        actor_rollout_ref__rollout__name="???",
        data__max_response_length=512,
    )
    facts = detect([], tree)
    assert value(facts, "group_size") is None
    assert "not resolved" in facts["group_size"].reason
    assert value(facts, "response_limit") == 512


def test_configuration_of_another_schema_is_no_error() -> None:
    tree = {"trainer": "a string", "data": [1, 2], "actor_rollout_ref": {"rollout": None}, "lr": 1e-5}
    assert value(detect(["loss"], tree), "trainer") is None


def test_flat_dotted_configuration_is_read() -> None:
    tree = {"trainer.v1.trainer_mode": "colocate_async", "actor_rollout_ref.rollout.n": "8"}
    facts = detect([], tree)
    assert (value(facts, "trainer"), value(facts, "group_size")) == ("colocate_async", 8)


# ------------------------------------------------------------------ trainer


@pytest.mark.parametrize(
    ("keys", "tree", "announced", "trainer"),
    [
        (["fully_async/partial/partial_ratio"], None, (), "fully_async"),
        ([], FA_CONFIG, (), "fully_async"),
        ([], None, ["(FullyAsyncTrainer pid=3)"], "fully_async"),
        (["timing_s/sync_rollout_weights", *ROW], None, (), "one_step_off"),
        ([], v1("sync", actor_rollout_ref__hybrid_engine=False), (), "one_step_off"),
        ([], None, ["OneStepTaskRunner"], "one_step_off"),
        (["timing_s/switch_to_trainer"], None, (), "separate_async"),
        (["training/filter_groups/discarded_surplus_samples", SPANS], None, (), "sync"),
        ([], None, ["(TaskRunner pid=7)"], "v0"),
        ([], None, ["(TaskRunnerV1 pid=7)"], None),
        (["mfu/actor", "actor/pg_loss"], None, (), "v0"),
        (list(ROW), None, (), "v0"),
        (["critic/score/mean"], None, (), None),
        ([], config(trainer__use_v1=False), (), "v0"),
        ([], config(actor_rollout_ref__hybrid_engine=True), (), "v0"),
        ([], v1("colocate_async"), (), "colocate_async"),
        ([SPANS], v1("sync"), (), "sync"),
    ],
)
def test_trainer(keys: list[str], tree: dict[str, Any] | None, announced: Any, trainer: str | None) -> None:
    assert value(detect(keys, tree, announced), "trainer") == trainer


def test_configuration_that_contradicts_the_log_is_not_believed() -> None:
    facts = detect([SPANS, LAG], v1("sync"), (), {LAG: (0, 2)})
    assert value(facts, "trainer") is None
    assert "lag above 0" in facts["trainer"].reason
    assert value(facts, "is_async") is True


def test_evictions_alone_show_an_asynchronous_run() -> None:
    facts = detect(["training/off_policy/dropped_samples", SPANS], None)
    assert value(facts, "is_async") is True
    assert str(value(facts, "framework_version")).startswith("<0.9.0")


def test_a_class_name_tells_the_family() -> None:
    facts = detect([], None, ["TaskRunnerV1"])
    assert (value(facts, "trainer_family"), value(facts, "is_async")) == ("v1", None)


# ------------------------------------------------------------------ modes and sizes


def test_fully_async_counts_per_sync_cycle() -> None:
    facts = detect(["fully_async/partial/partial_ratio"], FA_CONFIG)
    assert value(facts, "updates_per_version") == 8
    assert value(facts, "on_policy_updates") is False
    assert value(facts, "groups_per_step") == 256
    assert value(facts, "samples_per_step") == 2048
    assert value(facts, "log_prob_mode") == "bypass"
    assert value(facts, "calculate_log_probs") is True
    assert value(facts, "partial_rollout") is False


def test_fully_async_threshold_is_a_share_of_samples_and_not_an_age() -> None:
    facts = detect(["fully_async/partial/partial_ratio"], FA_CONFIG)
    assert value(facts, "fa_staleness_share") == 0.5
    assert value(facts, "staleness_threshold") is None
    assert "does not read" in facts["staleness_threshold"].reason


@pytest.mark.parametrize(
    ("tree", "updates"),
    [
        (v1("separate_async", trainer__v1__separate_async__parameter_sync_step=4), 4),
        (v1("sync", data__train_batch_size=96, actor_rollout_ref__actor__ppo_mini_batch_size=32), 3),
        (
            v1(
                "colocate_async",
                data__train_batch_size=40,
                actor_rollout_ref__actor__ppo_mini_batch_size=32,
                actor_rollout_ref__actor__ppo_epochs=2,
            ),
            4,
        ),
        (v1("sync", data__train_batch_size=96), None),
        (config(data__train_batch_size=96), None),
    ],
)
def test_updates_per_version(tree: dict[str, Any], updates: float | None) -> None:
    facts = detect([], tree)
    assert value(facts, "updates_per_version") == updates
    assert value(facts, "on_policy_updates") is (None if updates is None else updates == 1)


def test_filter_is_ignored_outside_v1_and_with_a_custom_sampler() -> None:
    on = {"algorithm__filter_groups__enable": True}
    fully_async = detect(["fully_async/partial/partial_ratio"], FA_CONFIG)
    assert (value(fully_async, "dapo_enabled"), value(fully_async, "dapo_effective")) == (True, False)
    assert value(detect([], v1("sync", **on)), "dapo_effective") is True
    own = v1("sync", trainer__v1__sampler__custom_sampler__name="Mine", **on)
    assert value(detect([], own), "dapo_effective") is False
    assert value(detect(["training/filter_groups/evicted_samples"], own), "dapo_effective") is True
    recorder = v1("sync", trainer__v1__sampler__custom_sampler__path="pkg://verl_audit.record.verl", **on)
    assert value(detect([], recorder), "dapo_effective") is True


def test_correction_that_is_configured_and_off_is_none() -> None:
    setting = {"algorithm__rollout_correction__rollout_is": "token"}
    bypass = {"algorithm__rollout_correction__bypass_mode": True}
    assert value(detect([], v1("sync", **setting)), "correction") == "token"
    facts = detect([], v1("sync", **setting, **bypass))
    assert value(facts, "correction") == "none"
    assert "ignores it" in facts["correction"].reason
    own_loss = {"actor_rollout_ref__actor__policy_loss__loss_mode": "bypass_mode"}
    assert value(detect([], v1("sync", **setting, **bypass, **own_loss)), "correction") == "token"
    without = {"actor_rollout_ref__rollout__calculate_log_probs": False}
    assert value(detect([], v1("sync", **setting, **without)), "correction") == "none"


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        (["training/rollout_probs_diff_mean"], "decoupled"),
        (["actor/entropy"], "decoupled"),
        (["mismatch/mismatch_kl"], "decoupled"),
        (["actor/rollout_corr/kl"], "bypass"),
        ([SPANS, *ROW], "bypass"),
        ([SPANS], None),
    ],
)
def test_log_prob_mode_from_keys(keys: list[str], mode: str | None) -> None:
    assert value(detect(keys, None), "log_prob_mode") == mode


def test_missing_gap_beside_entropy_means_log_probs_were_not_calculated() -> None:
    assert value(detect([SPANS, *ROW, "actor/entropy"], None), "calculate_log_probs") is False
    assert value(detect([SPANS, "actor/entropy"], None), "calculate_log_probs") is None


def test_rounded_log_is_recognised_and_its_zeros_prove_nothing() -> None:
    values: Values = {f"k{i}": (0.0, 0.125 + i) for i in range(12)}
    values |= {"actor/ppo_kl": (0.0, 0.0), "actor/entropy": (0.1, 0.2)}
    facts = detect(values, None, (), values)
    assert (value(facts, "three_decimals"), value(facts, "on_policy_updates")) == (True, None)
    exact = {**values, "k0": (0.0, 0.12345)}
    facts = detect(exact, None, (), exact)
    assert (value(facts, "three_decimals"), value(facts, "on_policy_updates")) == (False, True)
    few: Values = {"k": (0.0, 0.125)}
    assert value(detect(few, None, (), few), "three_decimals") is None


def test_router_replay_and_quantisation() -> None:
    tree = config(
        actor_rollout_ref__actor__megatron__router_replay__mode="R3",
        actor_rollout_ref__rollout__quantization="fp8",
    )
    facts = detect([], tree)
    assert (value(facts, "router_replay"), value(facts, "rollout_quantization")) == ("R3", "fp8")


def test_other_frameworks() -> None:
    facts = detect(["sampling/sampling_logp_difference/mean"], None)
    assert (value(facts, "framework"), value(facts, "trainer")) == ("trl", "grpo")
    mimo = detect(["partial/avg_staleness", "dynsam/avg@n"], None, (), {"partial/avg_staleness": (0, 2.5)})
    assert (value(mimo, "framework"), value(mimo, "is_async")) == ("mimo", True)


# ------------------------------------------------------------------ settings as configured


def test_null_says_something_where_it_is_a_choice() -> None:
    facts = detect(
        [],
        v1(
            "separate_async",
            algorithm__rollout_correction__rollout_rs=None,
            algorithm__rollout_correction__rollout_rs_threshold=None,
            algorithm__filter_groups__metric=None,
            data__gen_batch_size=None,
            trainer__v1__sampler__max_off_policy_threshold=None,
        ),
    )
    assert value(facts, "rejection_configured") == value(facts, "rejection_threshold") == "none"
    assert value(facts, "filter_metric") == "none"
    assert value(facts, "gen_batch_size") == 0
    assert value(facts, "age_unbounded") is True
    bare = detect([], v1("separate_async"))
    names = ("rejection_configured", "filter_metric", "gen_batch_size", "age_unbounded", "sync_steps", "hybrid_engine")
    assert [value(bare, name) for name in names] == [None] * len(names)
    bounded = detect([], v1("separate_async", trainer__v1__sampler__max_off_policy_threshold=8))
    assert value(bounded, "age_unbounded") is False


@pytest.mark.parametrize(
    ("rollout", "trainer", "differ"),
    [("bfloat16", "bf16", False), ("bfloat16", "fp32", True), ("torch.float16", "half", False), ("auto", None, None)],
)
def test_precisions_are_compared_by_meaning(rollout: str, trainer: str | None, differ: bool | None) -> None:
    tree = v1("sync", actor_rollout_ref__rollout__dtype=rollout, actor_rollout_ref__actor__fsdp_config__dtype=trainer)
    assert value(detect([], tree), "dtypes_differ") is differ


@pytest.mark.parametrize(
    ("path", "is_moe"),
    [
        ("Qwen/Qwen3-30B-A3B", True),
        ("mistralai/Mixtral-8x7B-v0.1", True),
        ("deepseek-ai/DeepSeek-V3", True),
        ("Qwen/Qwen2.5-7B-Instruct", False),
        ("/models/llama-3.1-8b", False),
    ],
)
def test_models_with_experts_are_known_by_name(path: str, is_moe: bool) -> None:
    assert value(detect([], v1("sync", actor_rollout_ref__model__path=path)), "model_is_moe") is is_moe


def test_expert_parallelism_means_experts() -> None:
    tree = v1("sync", actor_rollout_ref__actor__megatron__expert_model_parallel_size=8)
    assert value(detect([], tree), "model_is_moe") is True


@pytest.mark.parametrize(("logger", "full"), [(["console"], False), (["console", "file"], True), ("['wandb']", True)])
def test_the_console_alone_rounds(logger: object, full: bool) -> None:
    assert value(detect([], v1("sync", trainer__logger=logger)), "full_precision") is full
