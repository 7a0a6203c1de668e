"""verl's fully_async on a CPU, recorded through the plugin of verl, and what both sides tell of each version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

if __package__:
    from tests.verl.agreement import logged, table
else:  # beside run.py, where another `tests` may be installed
    from agreement import logged, table  # type: ignore[import-not-found,no-redef,unused-ignore]

EVERYWHERE = Path(__file__).parent / "everywhere"
MINI, SIZE, STEPS = 8, 4, 8


def launch(plugin: Path, assets: Path, run: Path) -> None:
    """Eight updates, a sync after every second; raises with the end of the console if verl fails."""
    overrides = [
        *("data.train_batch_size=0", "data.gen_batch_size=1"),
        f"rollout.total_rollout_steps={MINI * STEPS}",
        *("async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=2"),
    ]
    start("verl.experimental.fully_async_policy.fully_async_main", overrides, plugin, assets, run)


def start(module: str, overrides: list[str], plugin: Path, assets: Path, run: Path) -> None:
    """Run an entry point of verl whose trainer and rollout are apart, with the recorder as verl's plugin."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    engine, store = f"{rollout}.checkpoint_engine", f"/dev/shm/verl_audit_{os.getpid()}"
    overrides = [
        *overrides,
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=False",
        *(f"data.train_files={assets}/train.parquet", f"data.val_files={assets}/val.parquet"),
        "data.dataloader_num_workers=0",
        *("data.max_prompt_length=32", "data.max_response_length=24", "data.filter_overlong_prompts=False"),
        f"actor_rollout_ref.model.path={assets}/model",
        "actor_rollout_ref.model.external_lib=verl_cpu.heavy",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.hybrid_engine=False",
        *(f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.strategy=fsdp2"),
        *(f"{actor}.use_torch_compile=False", f"{actor}.fsdp_config.use_torch_compile=False"),
        f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision.reduce_dtype=fp32",
        *(f"{actor}.ppo_mini_batch_size={MINI}", f"{actor}.ppo_micro_batch_size_per_gpu={MINI * SIZE}"),
        *(f"{actor}.optim.lr=1e-4", f"{actor}.use_kl_loss=False"),
        *(f"{rollout}.name=cpu_hf", f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.n={SIZE}"),
        f"{rollout}.log_prob_micro_batch_size_per_gpu={MINI * SIZE}",
        *(f"{rollout}.free_cache_engine=False", f"{rollout}.agent.num_workers=1"),
        f"+{rollout}.custom={{precision:bf16,tick_sleep:0.05,max_num_seqs:64,threads:1}}",
        *(f"{engine}.backend=cpu_file", f"{engine}.custom_backend_module=verl_cpu.heavy"),
        f"+{engine}.engine_kwargs.cpu_file.store={store}",
        *("rollout.nnodes=1", "rollout.n_gpus_per_node=1"),
        *("reward.num_workers=1", "reward.custom_reward_function.name=compute_score"),
        f"reward.custom_reward_function.path={plugin}/toy_reward.py",
        *("trainer.device=cpu", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.total_epochs=10"),
        *("trainer.logger=[console,file]", "trainer.project_name=toy_map", f"trainer.experiment_name={run.name}"),
        *("trainer.resume_mode=disable", "trainer.val_before_train=False", "trainer.test_freq=-1"),
        *("ray_kwargs.ray_init.num_cpus=40", "+ray_kwargs.ray_init.num_gpus=4"),
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"hydra.run.dir={run}/hydra",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{plugin}{os.pathsep}{EVERYWHERE}",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_cpu_everywhere",
        "VERL_FILE_LOGGER_ROOT": f"{run}/file_logger",
        "VERL_AUDIT_DIR": f"{run}/audit",
        "VERL_AUDIT_LOG_PROB_SAMPLE": "1.0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
    }
    (run / "file_logger").mkdir(parents=True)
    command = [sys.executable, "-m", module, *overrides]
    with (run / "console.log").open("wb") as console:
        done = subprocess.run(command, check=False, env=environment, cwd=run, stdout=console, stderr=subprocess.STDOUT)
    shutil.rmtree(store, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{run.name} failed:\n{(run / 'console.log').read_text(errors='replace')[-3000:]}")


def disagreements(run: Path) -> Iterator[str]:
    """Rows of verl's `file` log beside the traces of the updates they pool; the last update may be in none.

    A row holds the updates up to its `training/global_step` since the row before.
    """
    rows, before, stale = table(run, "trajectories"), 0, 0
    pooled = [row for row in logged(run) if "critic/score/mean" in row]
    if not pooled:
        yield "verl logged no row"
    for told in pooled:
        upto = int(told["training/global_step"])
        part = [row for row in rows if before < row["decided_step"] <= upto]
        stale += sum(row["train_version"] - row["segments"][-1]["version"] >= 1 for row in part)
        before = upto
        found = {
            "response_length/mean": np.mean([row["response_length"] for row in part]),
            "critic/score/mean": np.mean([row["reward"] for row in part]),
            "fully_async/count/stale_trajectory_processed": stale,
            "training/rollout_probs_diff_mean": gap(part),
        }
        for name, value in found.items():
            if not np.isclose(value, told[name], rtol=1e-4, atol=1e-6):
                yield f"update {upto}: {name} is {value} by the traces and {told[name]} by verl"


def gap(rows: list[dict[str, Any]]) -> float:
    """verl's mean difference of probabilities: token mean in each update, plain mean over updates."""
    means = []
    for step in sorted({row["decided_step"] for row in rows}):
        pairs = [(row["prox_logp"], row["behave_logp"]) for row in rows if row["decided_step"] == step]
        prox, behave = (np.concatenate([np.exp(p[i]) for p in pairs]) for i in (0, 1))
        means.append(np.abs(prox - behave).mean())
    return float(np.mean(means))
