"""Command lines that verl's own Hydra takes or refuses, and what preflight says of each: the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_audit.errors import AuditError
from verl_audit.preflight.configuration import configuration
from verl_audit.preflight.names import names, unknown

V1, ROLLOUT, ACTOR = "trainer.v1", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
LINES = (
    "",
    f"{V1}.trainer_mode=separate_async {V1}.separate_async.parameter_sync_step=2",
    f"{V1}.stalness_threshold=3",
    f"{V1}.seperate_async.parameter_sync_step=2",
    f"{V1}.sampler.max_off_policy_treshold=3",
    f"+{V1}.sampler.max_off_policy_treshold=3",
    f"+{V1}.sampler.max_off_policy_threshold=3",
    f"++{V1}.sampler.max_off_policy_threshold=3",
    "+trainer.test_freq=3",
    "+data.custom_cls.path=x",
    "+data.custom_cls.path=x +data.custom_cls.path=y",
    "~trainer.nope",
    "~trainer.test_freq",
    "trainer.logger=[console,file]",
    f"{ROLLOUT}.engine_kwargs.vllm.a=1",
    f"+{ROLLOUT}.engine_kwargs.vllm.a=1",
    f"{ROLLOUT}.engine_kwargs.vllm={{a:1}}",
    f"+{ROLLOUT}.engine_kwargs.vllm={{a:1}}",
    f"{V1}.sampler={{max_off:1}}",
    f"{V1}.sampler={{max_off_policy_threshold:1}}",
    f"{V1}.sampler.sampler_kwargs.audit_dir=x",
    f"+{V1}.sampler.sampler_kwargs.audit_dir=x",
    f"{V1}.sync.x=1",
    "actor_rollout_ref.model.override_config.a=1",
    "+actor_rollout_ref.model.override_config.a=1 actor_rollout_ref.model.override_config.a=2",
    "+a.b=1 a.b=2",
    "a.b=2",
    f"{ACTOR}.optim.lr.x=1",
    f"{ROLLOUT}.custom.x=1",
    f"+{ROLLOUT}.custom.x=1",
    "trainer.total_training_steps.a=1",
    f"+{ROLLOUT}.prometheus.port=1",
    f"{ACTOR}.megatron.dtype=bfloat16",
    f"model_engine=megatron {ACTOR}.megatron.dtype=bfloat16",
    f"model_engine=megatron {ACTOR}.fsdp_config.dtype=bfloat16",
    f"model_engine=veomni {ACTOR}.veomni.router_replay.mode=R3",
    f"--config-name=ppo_megatron_trainer {ACTOR}.megatron.dtype=bfloat16",
    f"--config-name=ppo_megatron_trainer {ACTOR}.fsdp_config.dtype=bfloat16",
    "algorithm.rollout_correction.rollout_is_treshold=2",
    "+algorithm.rollout_correction.new=2",
    "hydra.run.dir=/tmp/x",
    "async_training.staleness_threshold=0.5",
    "+ray_kwargs.ray_init.runtime_env.env_vars.X=1",
)


def disagreements() -> Iterator[str]:
    """Lines of which Hydra and preflight differ; every leaf of the composed configuration must be known, too."""
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        composed = OmegaConf.to_container(compose("ppo_trainer"))
        yield from (f"verl has the key {key}, preflight not" for key in unknown(names(("dp",)), composed))
        for text in LINES:
            words = text.split()
            named = [w.partition("=")[2] for w in words if w.startswith("--config-name")]
            try:
                compose(named[0] if named else "ppo_trainer", [w for w in words if not w.startswith("--")])
                taken = True
            except HydraException:
                taken = False
            if text.startswith("async_training"):
                taken = True  # preflight takes it for the configuration of fully_async, which has it
            if taken is not _taken(words):
                yield f"`{text}` is {'taken' if taken else 'refused'} by Hydra and not by preflight"


def _taken(words: list[str]) -> bool:
    try:
        configuration(None, words)
    except AuditError:
        return False
    return True
