"""Preflight: what a configuration will let an audit decide, what to add, and what it gets wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from verl_audit.cli import main
from verl_audit.errors import AuditError
from verl_audit.pipeline import load_all, load_rules
from verl_audit.preflight import Preflight, preflight
from verl_audit.preflight.configuration import configuration
from verl_audit.preflight.decide import imagined
from verl_audit.preflight.doubts import of_line
from verl_audit.preflight.names import names
from verl_audit.preflight.overrides import line
from verl_audit.settings import Settings

FIXTURES = Path(__file__).parents[2] / "fixtures"
REAL = FIXTURES / "real"
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "data.train_batch_size=256",
    "trainer.v1.separate_async.parameter_sync_step=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl",
    "trainer.test_freq=5",
    "trainer.total_training_steps=100",
)
RECORDER = (
    "trainer.v1.sampler.custom_sampler.path=pkg://verl_audit.record.verl",
    "trainer.v1.sampler.custom_sampler.name=AuditReplayBufferAsync",
)


def judged(*overrides: str, path: Path | None = None, **more: Any) -> Preflight:
    return preflight(path, overrides, load_rules(), **more)


def answers(found: Preflight) -> dict[str, str]:
    return {a.cause: a.decidable for a in found.answers}


def fired(found: Preflight) -> dict[str, str]:
    return {f.rule: f.severity for f in found.findings}


def pasted(found: Preflight) -> str:
    return " ".join(p.overrides for p in found.paste)


def test_a_sound_configuration_with_the_recorder_decides_every_cause() -> None:
    found = judged(*SEPARATE, *RECORDER)
    assert set(answers(found).values()) == {"yes"}
    assert found.paste == ()
    assert set(fired(found).values()) <= {"low", "info"}


def test_without_the_recorder_it_is_to_be_pasted_and_names_the_sampler_of_the_trainer() -> None:
    found = judged(*SEPARATE)
    assert answers(found) == {
        "mismatch": "in part",
        "staleness": "yes",
        "eviction": "in part",
        "sync": "in part",
        "symptom": "yes",
    }
    assert pasted(found).endswith("name=AuditReplayBufferAsync")
    assert pasted(judged("trainer.test_freq=5")).endswith("name=AuditReplayBuffer")
    assert all(p.price for p in found.paste)


def test_pasting_what_it_says_removes_what_was_missing() -> None:
    bare = (*SEPARATE, f"{ROLLOUT}.calculate_log_probs=false", "trainer.test_freq=-1", "trainer.logger=[console]")
    before = judged(*bare)
    assert answers(before)["mismatch"] == "no"
    assert answers(before)["symptom"] == "no"
    after = judged(*bare, *pasted(before).replace("'", "").split())
    assert set(answers(after).values()) == {"yes"}
    assert after.paste == ()


def test_bypass_mode_leaves_mismatch_undecidable() -> None:
    found = judged(*SEPARATE, "algorithm.rollout_correction.bypass_mode=true")
    assert answers(found)["mismatch"] == "no"
    assert "bypass_mode=false" in pasted(found)
    assert fired(found)["config-bypass-unmeasured"] == "medium"


def test_settings_with_which_verl_does_not_start_are_critical() -> None:
    found = judged("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false")
    critical = {rule for rule, severity in fired(found).items() if severity == "critical"}
    assert critical == {"config-hybrid-engine-off", "config-naive-backend", "config-no-rollout-pool"}
    unequal = judged(*SEPARATE, "data.train_batch_size=512")
    assert fired(unequal)["config-batch-is-not-sync-steps"] == "critical"


def test_fully_async_has_its_own_defaults() -> None:
    found = judged("async_training.staleness_threshold=0.5", "data.train_batch_size=0")
    assert found.facts["trainer"] == "fully_async"
    assert found.facts["log_prob_mode"] == "bypass"
    assert fired(found)["config-fully-async-hybrid-engine"] == "critical"
    assert fired(found)["config-lag-unrecorded-bypass"] == "medium"
    assert answers(found)["staleness"] == "no"
    cut = judged("async_training.partial_rollout=false", "data.train_batch_size=0")
    assert fired(cut)["config-truncated-samples-trained"] == "high"


@pytest.mark.parametrize("name", ["async_mild", "async_drop_bias", "sync_baseline", "fp8_mismatch"])
def test_what_is_expected_to_be_logged_is_what_real_runs_logged(name: str) -> None:
    """Signals foretold from the configuration against the log of the run it made."""
    found = judged(path=REAL / name)
    expected = {s for s, series in imagined(found.facts).series.items() if len(series)}
    store = load_all(REAL / name).store
    logged = {signal for (signal,) in store.execute("SELECT DISTINCT signal FROM signals").fetchall()}
    assert expected <= logged | {"filtered_groups", "failed_groups", "stale_groups"}


def test_a_directory_a_file_and_a_hydra_directory_are_one_configuration() -> None:
    hydra = REAL / "async_mild" / "hydra" / ".hydra"
    trees = [configuration(p, ()).tree for p in (REAL / "async_mild", hydra, hydra / "config.yaml")]
    assert trees[0] == trees[1] == trees[2]
    assert trees[0]["trainer"]["v1"]["trainer_mode"] == "separate_async"


def test_overrides_win_over_the_file_and_references_follow_them() -> None:
    tree = configuration(
        REAL / "sync_baseline",
        ["data.max_response_length=77", "+new.key=[1,2]", "++trainer.test_freq=3", "~algorithm.rollout_correction"],
    ).tree
    assert tree["data"]["max_response_length"] == 77
    alone = configuration(None, ["data.max_response_length=77"]).tree
    assert alone["actor_rollout_ref"]["rollout"]["response_length"] == 77
    assert tree["new"]["key"] == [1, 2]
    assert tree["trainer"]["test_freq"] == 3
    assert "rollout_correction" not in tree["algorithm"]
    assert (
        configuration(None, ["hydra.run.dir=/x", "actor@a.b=c", "--config-name=mine"]).tree
        == configuration(None, []).tree
    )


@pytest.mark.parametrize("override", ["trainer.test_freq", "=3", "trainer.logger=[", "a b=3"])
def test_an_override_that_cannot_be_read_is_named(override: str) -> None:
    with pytest.raises(AuditError, match="override"):
        configuration(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "no configuration"),
        ("- 1\n", "no configuration"),
        ("x: 1\n", "none of verl's sections"),
        (None, "no such"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(AuditError, match=message):
        configuration(file, ())


V1 = "trainer.v1"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{V1}.sampler.max_off_policy_treshold=3"], f"did you mean `{V1}.sampler.max_off_policy_threshold`"),
        ([f"{V1}.seperate_async.parameter_sync_step=2"], f"did you mean `{V1}.separate_async.parameter_sync_step`"),
        ([f"{V1}.stalness_threshold=3"], "another trainer has `async_training.staleness_threshold`"),
        (["async_training.stalness_threshold=3"], "did you mean `async_training.staleness_threshold`"),
        ([f"{ROLLOUT}.max_off_policy_threshold=3"], f"did you mean `{V1}.sampler.max_off_policy_threshold`"),
        (["actor_rollout_ref.actor.megatron.dtype=float16"], "another trainer or engine has it"),
        ([f"{ROLLOUT}.engine_kwargs.vllm.x=1"], f"write +{ROLLOUT}.engine_kwargs.vllm.x="),
        ([f"{ROLLOUT}.agent.agent_loop_manager_class=a.B"], f"write +{ROLLOUT}.agent.agent_loop_manager_class="),
        (["something.else=1"], "unknown key `something.else`"),
        ([f"{V1}.sampler={{max_off:1}}"], "unknown key `trainer.v1.sampler.max_off`"),
        (["+trainer.test_freq=3"], "`+trainer.test_freq`: the key exists"),
        (["+data.custom_cls.path=x", "+data.custom_cls.path=y"], "`+data.custom_cls.path`: the key exists"),
        (["~trainer.test_frequency"], "did you mean `trainer.test_freq`"),
        ([f"{V1}.sampler.max_off_policy_strategy=keep"], "Allowed: drop, wait"),
        (["algorithm.rollout_correction.rollout_is=tokens"], "did you mean `token`? Allowed: token, sequence"),
        (["algorithm.rollout_correction.rollout_rs='token_k1,seq_k9'"], "`seq_k9` is not taken by verl"),
        (["algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k3"], "rollout_rs=\"'token_k1,seq_max_k3'\""),
        (["+trainer.test_freq=1,2"], "is a sweep, which Hydra takes with --multirun only"),
        (["trainer.logger=[console],[file]"], "is a sweep"),
        (["trainer.test_freq=choice(1,2)"], "is a sweep"),
        (["trainer.test_freq=range(1,9)"], "is a sweep"),
        ([f"{V1}.trainer_mode=seperate_async"], "did you mean `separate_async`"),
        ([f"{V1}.trainer_mode=seperate_async"], "name that in actor_rollout_ref.model.external_lib"),
        ([f"{V1}={{trainer_mode:seperate_async}}"], "did you mean `separate_async`"),
        ([f"{V1}.trainer_mode=separate_async", "rollout.nnodes=1"], "unknown key `rollout.nnodes`"),
        ([f"{V1}.trainer_mode=sync", "async_training.staleness_threshold=1"], "another trainer or engine has it"),
        ([f"{ROLLOUT}.custom.foo=1"], f"write +{ROLLOUT}.custom.foo="),
        (["trainer.logger=[console,files]"], "did you mean `file`"),
    ],
)
def test_what_verl_would_refuse_is_refused_and_says_what_was_meant(overrides: list[str], says: str) -> None:
    """`make test-verl` holds the same to Hydra and verl's own configuration."""
    with pytest.raises(AuditError, match="verl would not start") as refused:
        configuration(None, overrides)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{V1}.sampler.max_off_policy_threshold=3", f"{V1}.sampler={{max_off_policy_threshold:4}}"],
        ["+data.custom_cls.path=x"],
        [f"++{V1}.sampler.max_off_policy_threshold=3"],
        [f"+{V1}.sampler.sampler_kwargs.audit_dir=x"],
        [f"+{ROLLOUT}.engine_kwargs.vllm={{a:1}}"],
        ["+a.b=1", "a.b=2"],
        ["model_engine=megatron", "actor_rollout_ref.actor.megatron.dtype=float16"],
        ["--config-name", "ppo_megatron_trainer", "actor_rollout_ref.actor.megatron.dtype=float16"],
        ["--config-name=fully_async_ppo_trainer", "rollout.nnodes=2"],
        ["rollout.nnodes=2", "data.train_batch_size=8"],
        ["+reward.reward_kwargs.overlong_buffer_cfg.enable=true"],
        ["+ray_kwargs.ray_init.runtime_env.env_vars.VERL_AUDIT_DIR=x"],
        ["--config-path=/my", "--config-name=mine", "what.ever=1"],
        ["actor@actor_rollout_ref.actor=my_actor", "actor_rollout_ref.actor.mine=1"],
        ["--multirun", "trainer.test_freq=1,2"],
        ["trainer.project_name=a\\,b", "trainer.experiment_name=${oc.select:trainer.project_name,b}"],
        [f"+{ROLLOUT}.custom.foo=1", f"{ROLLOUT}.custom.foo=2"],
        ["+algorithm.rollout_correction={rollout_is:token,bypass_mode:false}"],
        ["--config-name=fully_async_ppo_trainer", f"{V1}.trainer_mode=sync", "rollout.nnodes=2"],
        ["trainer.logger=['console','file']", "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k3'"],
    ],
)
def test_what_verl_takes_is_taken_without_a_word(overrides: list[str]) -> None:
    assert configuration(None, overrides).problems == ()


def test_what_the_rules_tell_users_to_set_is_taken() -> None:
    """Every assignment in a remedy for verl is one that its configuration has, in the spelling that Hydra wants."""
    wanted = {"verl fully_async": "--config-name=fully_async_ppo_trainer", "verl one_step_off": "rollout.nnodes=1"}
    checked = 0
    for rule in load_rules().rules:
        for remedy in (r for r in rule.remedy if r.framework.startswith("verl")):
            for word in re.findall(r"(?<!\S)\+?[a-z_]+(?:\.\w+)+=[^\s,;]+", remedy.set):
                engine = "dp" if ".megatron." not in word else "megatron"
                given = [w for w in (wanted.get(remedy.framework),) if w is not None]
                told = line([*given, f"model_engine={engine}", re.sub("=.*", "=1", word)])
                found = [d.text for d in of_line(told, names((engine,), told.entry), {}) if d.refused]
                assert found == [], (rule.id, found)
                checked += 1
    assert checked > 100


def test_what_verl_takes_and_does_not_read_is_a_problem() -> None:
    [added] = configuration(None, [f"+{V1}.sampler.max_off_policy_treshold=3"]).problems
    assert f"did you mean `{V1}.sampler.max_off_policy_threshold`" in added
    [inner] = configuration(None, ["+algorithm.rollout_correction={rollout_iss:token}"]).problems
    assert "`+algorithm.rollout_correction.rollout_iss` adds a key that verl does not read" in inner
    assert "did you mean `algorithm.rollout_correction.rollout_is`" in inner
    [loss] = configuration(None, ["actor_rollout_ref.actor.policy_loss.loss_mode=mine"]).problems
    assert "code of yours may register it" in loss
    plugin = "actor_rollout_ref.model.external_lib=my.losses"
    assert configuration(None, ["actor_rollout_ref.actor.policy_loss.loss_mode=mine", plugin]).problems == ()
    for setting in (plugin, "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=my.trainers"):
        [mode] = configuration(None, [f"{V1}.trainer_mode=separate_sync", setting]).problems
        assert "did you mean `separate_async`" in mode
    assert judged(f"{V1}.trainer_mode=mine").worst() >= 1


def test_a_mapping_is_merged_into_what_is_there() -> None:
    tree = configuration(None, ["algorithm.rollout_correction={rollout_is:token}"]).tree
    whole = configuration(None, []).tree["algorithm"]["rollout_correction"]
    assert tree["algorithm"]["rollout_correction"] == {**whole, "rollout_is": "token"}


def test_a_saved_configuration_stays_the_trainers_it_is_of() -> None:
    recorded = FIXTURES / "recorded"
    for name in ("fully_async", "one_step_off"):
        found = configuration(recorded / name, ["rollout.nnodes=2", f"{V1}.trainer_mode=sync"])
        assert found.sources[0] == f"verl 0.9.1's defaults for {name}"
        assert found.problems == ()
    for key in ("rollout.nnodes", "async_training.staleness_threshold"):
        with pytest.raises(AuditError, match=f"unknown key `{key}`"):
            configuration(recorded / "separate_async", [f"{key}=1"])
    with pytest.raises(AuditError, match=rf"write \+{ROLLOUT}.custom.foo="):
        configuration(recorded / "fully_async", [f"{ROLLOUT}.custom.foo=1"])
    assert configuration(recorded / "fully_async", [f"+{ROLLOUT}.custom.foo=1"]).problems == ()
    with pytest.raises(AuditError, match="the key exists"):
        configuration(recorded / "fully_async", [f"+{ROLLOUT}.custom.threads=1"])


def test_what_a_saved_configuration_says_itself_is_not_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {v1: {trainer_mode: seperate_async}}\n")
    [mode] = configuration(file, []).problems
    assert "did you mean `separate_async`" in mode
    file.write_text("data: {train_batch_size: 8}\n")  # of few keys: the command line tells the trainer
    assert "for one_step_off" in configuration(file, ["rollout.nnodes=2"]).sources[0]


def test_a_saved_configuration_is_read_whatever_is_misspelt_in_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainer: {v1: {sampler: {max_off_policy_treshold: 3, max_off_policy_strategy: keep}}, mine: 1}\n"
        "actor_rollout_ref: {model: {override_config: {any: 1}}, actor: {fsdp_config: {mixed_precision: {a: 1}}}}\n"
    )
    problems = "\n".join(configuration(file, []).problems)
    assert f"did you mean `{V1}.sampler.max_off_policy_threshold`" in problems
    assert "unknown key `trainer.mine`: verl 0.9 does not have it" in problems
    assert "`keep` is not taken by verl" in problems
    assert len(configuration(file, []).problems) == 3
    with pytest.raises(AuditError, match="drop, wait"):
        configuration(file, [f"{V1}.sampler.max_off_policy_strategy=keep"])
    file.write_text("trainer: {" + ", ".join(f"old_{i}: 1" for i in range(30)) + "}\n")
    [many] = configuration(file, []).problems
    assert "30 keys are not verl 0.9's" in many
    assert "configuration of another version" in many


@pytest.mark.parametrize("path", sorted(REAL.glob("*/hydra")) + sorted((FIXTURES / "recorded").glob("*/hydra")))
def test_configurations_of_real_runs_have_no_problem(path: Path) -> None:
    assert configuration(path, []).problems == ()


def test_the_engine_tells_where_the_trainers_precision_stands() -> None:
    megatron = judged("model_engine=megatron", "actor_rollout_ref.actor.megatron.dtype=float16").facts
    assert (megatron["actor_strategy"], megatron["trainer_dtype"]) == ("megatron", "float16")
    assert judged("model_engine=veomni").facts["trainer_dtype"] is None
    assert judged().facts["trainer_dtype"] == "bfloat16"
    one_step = judged("rollout.nnodes=1", "actor_rollout_ref.hybrid_engine=false").facts
    assert (one_step["trainer"], one_step["log_prob_mode"]) == ("one_step_off", "bypass")


def test_facts_and_rules_of_the_users_own_are_used(tmp_path: Path) -> None:
    found = preflight(None, SEPARATE, load_rules().with_params({"config-validation-rare.least": 50}))
    assert "config-validation-rare" in fired(found)
    wait = judged(*SEPARATE, settings=Settings(facts={"staleness_strategy": "wait", "staleness_threshold": 1.0}))
    assert "config-wait-serialises" in fired(wait)


def test_prediction_from_a_measured_profile() -> None:
    narrow = (*SEPARATE, "trainer.v1.sampler.max_off_policy_threshold=3")
    three = judged(*narrow, profile=REAL / "sync_baseline").prediction
    six = judged(*SEPARATE, "trainer.v1.sampler.max_off_policy_threshold=6", profile=REAL / "sync_baseline").prediction
    assert three is not None
    assert six is not None
    assert three.drop_above is not None
    assert six.drop_above == pytest.approx(2 * three.drop_above)
    assert three.lag == 1
    wait = judged(*narrow, "trainer.v1.sampler.max_off_policy_strategy=wait", profile=REAL / "sync_baseline").prediction
    assert wait is not None
    assert wait.drop_above is None
    with pytest.raises(AuditError, match="synchronous run"):
        judged(*narrow, profile=REAL / "async_mild")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["preflight", *args])


def test_the_command_takes_a_file_overrides_or_both() -> None:
    alone = run("--", *SEPARATE)
    assert alone.exit_code == 0
    assert "separate_async" in alone.output
    both = run(str(REAL / "sync_baseline"), "--", "trainer.test_freq=-1")
    assert "config-no-validation" in both.output
    assert "1 override" in both.output


def test_exit_codes_for_training_scripts() -> None:
    broken = ("--", "trainer.v1.trainer_mode=separate_async")
    assert run(*broken).exit_code == 0
    assert run("--fail-on", "critical", *broken).exit_code == 1
    assert run("--fail-on", "medium", "--", *SEPARATE, *RECORDER).exit_code == 0
    assert run("/nowhere").exit_code == 2
    mode = run("--fail-on", "critical", "--", "trainer.v1.trainer_mode=seperate_async")
    assert mode.exit_code == 2
    assert "did you mean `separate_async`" in mode.output
    assert run("--", "x").exit_code == 2
    misspelt = run("--", "trainer.v1.sampler.max_off_policy_treshold=3")
    assert misspelt.exit_code == 2
    assert "did you mean `trainer.v1.sampler.max_off_policy_threshold`" in misspelt.output
    added = ("--", "+trainer.v1.sampler.max_off_policy_treshold=3", *SEPARATE, *RECORDER)
    assert "Misspelt?" in run(*added).output
    assert run("--fail-on", "medium", *added).exit_code == 1
