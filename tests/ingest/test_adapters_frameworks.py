"""The adapters of the frameworks beside verl: every entry, every defect, and which framework a key set belongs to.

The key strings are those of the frameworks' sources; a row is `key signal`, then the facts it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from verl_audit.diagnose.coverage import FACTS as FACT_NEEDS
from verl_audit.diagnose.coverage import NEEDS, TRACES_ONLY
from verl_audit.ingest.adapters import (
    Adapter,
    AdapterError,
    KeyMap,
    Mapped,
    candidates,
    choose_adapter,
    load_adapters,
    load_signals,
    map_keys,
    read_adapter,
    setting_for,
)
from verl_audit.ingest.detect import detect, plain

ADAPTERS = {a.framework: a for a in load_adapters()}
FRAMEWORKS = ("areal", "slime", "openrlhf", "trl", "prime-rl", "skyrl", "nemo-rl", "roll")
Facts = Mapping[str, object]

AREAL = """
ppo_actor/task_reward/avg score_trained
ppo_actor/task_reward/min score_trained_min
ppo_actor/task_reward/max score_trained_max
rollout/reward score_generated
eval-rollout/reward validation
ppo_actor/advantages/avg advantage_mean
ppo_actor/advantages/min advantage_min
ppo_actor/advantages/max advantage_max
ppo_actor/seq_len/avg sequence_length_mean
ppo_actor/seq_len/min sequence_length_min
ppo_actor/seq_len/max sequence_length_max
ppo_actor/prompt_len/avg masked_length_mean
ppo_actor/no_eos_ratios/avg response_clip_share
ppo_actor/update/version_stats/sample_staleness_theta_avg lag_token_mean
ppo_actor/update/version_stats/sample_staleness_theta_max lag_token_max
ppo_actor/update/version_stats/sample_staleness_theta_min lag_token_min
ppo_actor/update/version_stats/sample_staleness_proximal_avg lag_token_proximal_mean
ppo_actor/update/version_stats/sample_staleness_proximal_max lag_token_proximal_max
ppo_actor/update/version_stats/sample_staleness_proximal_min lag_token_proximal_min
ppo_actor/update/version_stats/v_theta param_version
ppo_actor/update/behave_approx_kl/avg gap_kl
ppo_actor/compute_logp/kl_div_direct/avg gap_kl
ppo_actor/compute_logp/kl_div_taylor/avg gap_k2
ppo_actor/compute_logp/kl_div_dual/avg gap_k3
ppo_actor/update/behave_imp_weight/avg is_weight_mean
ppo_actor/update/behave_imp_weight/max is_weight_max
ppo_actor/update/behave_imp_weight/min is_weight_min
ppo_actor/update/rs_filtered_fraction tis_share rejection=clamp
ppo_actor/update/rs_filtered_fraction rs_masked_share rejection=mask
ppo_actor/update/rs_filtered_fraction is_oob_share
ppo_actor/update/importance_weight/avg update_ratio_mean log_prob_mode=decoupled
ppo_actor/update/importance_weight/max update_ratio_max log_prob_mode=decoupled
ppo_actor/update/importance_weight/min update_ratio_min log_prob_mode=decoupled
ppo_actor/update/importance_weight/avg update_ratio_mean
ppo_actor/update/importance_weight/max update_ratio_max
ppo_actor/update/importance_weight/min update_ratio_min
ppo_actor/update/clip_ratio/avg clip_share log_prob_mode=decoupled
ppo_actor/update/clip_ratio/avg clip_share log_prob_mode=bypass
ppo_actor/update/clip_ratio/avg clip_share
ppo_actor/update/dual_clip_ratio/avg clip_lower_share log_prob_mode=decoupled
ppo_actor/update/dual_clip_ratio/avg clip_lower_share log_prob_mode=bypass
ppo_actor/update/dual_clip_ratio/avg clip_lower_share
ppo_actor/update/approx_kl/avg ppo_kl log_prob_mode=decoupled
ppo_actor/update/approx_kl/avg ppo_kl
ppo_actor/kl_rewards/avg kl_ref
ppo_actor/update/entropy/avg entropy
ppo_actor/update/grad_norm grad_norm
ppo_actor/update/lr lr
ppo_actor/update/update_successful update_applied
ppo_actor/update/actor_loss/avg pg_loss
rollout/accepted accepted_rollouts
rollout/rejected rejected_rollouts
timeperf/rollout time_gen trainer=on_policy
timeperf/rollout wait_seconds trainer=async_rl
timeperf/recompute_logp time_old_log_prob
timeperf/train_step time_update_actor
timeperf/update_weights time_update_weights
ppo_actor/correct_seq_len/avg -
ppo_actor/incorrect_seq_len/avg -
ppo_actor/update/version_stats/v_proximal -
timeperf/rollout -
"""

SLIME = """
rollout/raw_reward score_trained
eval/aime-pass@8 validation_aux
eval/aime validation
rollout/advantages advantage_mean
rollout/response_len/mean loss_length_mean
rollout/response_len/max loss_length_max
rollout/response_len/min loss_length_min
rollout/response_lengths response_length_mean
rollout/truncated_ratio truncated_share
rollout/fully_async/avg_staleness lag_oldest_seen_mean
rollout/fully_async/max_staleness lag_oldest_seen_max
rollout/fully_async/stale_groups_filtered stale_groups
rollout/fully_async/queue_size queue_size
rollout/step global_step
train/train_rollout_logprob_abs_diff gap_logp_abs
train/mis_kl gap_kl
train/mis_k3_kl gap_k3
train/mis_chi2_token chi2_token
train/mis_chi2_seq chi2_seq
train/tis is_raw_mean
train/mis_is_ratio_mean_final is_weight_mean
train/mis_is_ratio_max_final is_weight_max
train/mis_is_ratio_min_final is_weight_min
train/tis_clipfrac tis_share
train/mis_tis_truncate_fraction tis_share
train/mis_rs_mask_fraction_low rs_masked_low_share
train/mis_rs_mask_fraction_high rs_masked_high_share
train/pg_clipfrac clip_share log_prob_mode=bypass
train/ppo_kl ppo_kl log_prob_mode=bypass
train/ois update_ratio_mean log_prob_mode=bypass
train/pg_clipfrac clip_share log_prob_mode=decoupled
train/ppo_kl ppo_kl log_prob_mode=decoupled
train/ois update_ratio_mean log_prob_mode=decoupled
train/pg_clipfrac clip_share
train/ppo_kl ppo_kl
train/ois update_ratio_mean
train/kl_loss kl_ref
train/entropy_loss entropy
train/grad_norm grad_norm
train/pg_loss pg_loss
train/lr-pg_0 lr
rollout/dynamic_filter/drop_zero_std filter_dropped_groups
rollout/zero_std/count_1 zero_spread_groups
perf/step_time time_step
perf/rollout_time time_gen trainer=train
perf/rollout_time gen_busy_seconds
perf/train_wait_time wait_seconds
perf/wait_time_ratio trainer_idle_share
perf/log_probs_time time_old_log_prob
perf/actor_train_time time_update_actor
perf/update_weights_time time_update_weights
perf/tokens_per_gpu_per_sec throughput
rollout/response_len/median -
rollout/correct_length/p50 -
rollout/repetition_frac -
train/mis_ppl_ratio -
train/mis_log_ppl_diff -
train/mis_tis_clip_fraction_low -
train/mis_rs_catastrophic_token_fraction -
train/opsm_clipfrac -
train/step -
perf/actor_train_tok_per_s -
perf/actor_train_tflops -
perf/longest_sample_tokens_per_sec -
eval/step -
"""

OPENRLHF = """
train/rollout/reward_mean score_trained
train/rollout/reward_std score_std
train/group_reward_std score_group_std
eval/eval_aime_pass1 validation
eval/eval_aime_pass8 validation_aux
train/rollout/response_length_mean response_length_mean
train/rollout/truncated_rate truncated_share
train/response_clip_ratio response_clip_share
train/vllm_kl gap_kl
train/ppo_kl ppo_kl
train/ppo_clip_ratio clip_share
train/kl kl_ref
train/entropy_loss entropy
train/actor_grad_norm grad_norm
train/policy_loss pg_loss
train/actor_lr lr
train/dynamic_filtering_pass_rate filter_pass_share
train/timing/step_total time_step
train/timing/generation time_gen trainer=sync_training
train/timing/generation gen_busy_seconds
train/timing/ppo_train time_update_actor
train/timing/broadcast time_update_weights
train/global_step global_step
train/logprobs_diff -
train/timing/make_experience -
"""

TRL = """
reward reward_trained
reward_std score_group_std trainer=async_grpo
reward_std score_std trainer=grpo
eval_reward validation
completions/mean_length response_length_mean
completions/max_length response_length_max
completions/min_length response_length_min
completions/clipped_ratio response_clip_share
sample/trained_tokens_mean loss_length_mean
rollout/turns_mean turns_mean trainer=async_grpo
sample/staleness_mean lag_admission_mean
sample/staleness_max lag_admission_max
sample/time_in_queue_s queue_seconds
sampling/sampling_logp_difference/mean gap_logp_abs
sampling/sampling_logp_difference/max gap_logp_abs_max
sampling/importance_sampling_ratio/mean is_weight_mean correction=sequence
sampling/importance_sampling_ratio/max is_weight_max correction=sequence
sampling/importance_sampling_ratio/min is_weight_min correction=sequence
sampling/importance_sampling_ratio/mean is_weight_mean
sampling/importance_sampling_ratio/max is_weight_max
sampling/importance_sampling_ratio/min is_weight_min
kl gap_k3 trainer=async_grpo
kl kl_ref trainer=grpo
clip_ratio/region_mean clip_share
clip_ratio/low_mean clip_low_share
clip_ratio/high_mean clip_high_share
ratio update_ratio_mean trainer=async_grpo
entropy entropy
policy_loss pg_loss
loss pg_loss
grad_norm grad_norm
learning_rate lr
step_time time_step
epoch epoch
frac_reward_zero_std zero_spread_share
sample/dropped_stale_total evicted_stale_trajectories_total
batch/dropped_oversize_total oversize_trajectories_total
sample/rollout_queue_size queue_trajectories
rollout/inflight in_flight_rollouts
perf/step_s time_step
perf/rollout_wait_s wait_seconds
perf/weight_sync_s time_update_weights
perf/fwd_bwd_s time_forward_backward
perf/optimizer_s time_optimizer
perf/mfu_fwd_bwd mfu_actor
perf/trained_tok_s_wall_clock throughput_total
rollout/duration_s rollout_seconds
rollout/backpressure_s rollout_blocked_seconds
rollout/generated_tok_s generated_tokens_per_second
num_tokens -
kl -
reward_std -
completions/mean_terminated_length -
clip_ratio/low_min -
clip_ratio/high_max -
perf/weight_sync_pause_s -
perf/forwarded_tok_s_wall_clock -
perf/mfu_wall_clock -
rollout/vllm_retry_total -
aux_loss -
"""

PRIME_RL = """
train/agg/effective/math/reward/mean score_trained
train/agg/all/math/reward/mean score_generated
eval/aime/all/math/avg@8 validation
eval/aime/effective/math/avg@8 validation_aux
train/agg/effective/math/num_output_tokens/mean kept_length_mean
train/agg/effective/math/num_output_tokens/max kept_length_max
train/agg/effective/math/num_output_tokens/min kept_length_min
train/agg/all/math/num_output_tokens/mean generated_length_mean
train/agg/all/math/num_output_tokens/max generated_length_max
train/agg/all/math/num_output_tokens/min generated_length_min
train/agg/effective/math/is_truncated/mean truncated_share
train/agg/all/math/is_truncated/mean truncated_generated_share
train/agg/effective/math/num_turns/mean turns_mean
off_policy/mean lag_oldest_mean
off_policy/max lag_oldest_max
off_policy/in_flight/mean lag_in_flight_mean
off_policy/in_flight/max lag_in_flight_max
off_policy/in_queue/mean lag_in_queue_mean
off_policy/in_queue/max lag_in_queue_max
watcher/policy_version param_version
mismatch_kl/all/mean gap_k3
mismatch_kl/all/max gap_k3_max
mismatch_kl/all/std gap_k3_std
masked_mismatch_kl/mean gap_k3_masked
unmasked_mismatch_kl/mean gap_k3_kept
is_masked/mean rs_masked_share
is_masked_low/mean rs_masked_low_share
is_masked_high/mean rs_masked_high_share
ref_kl kl_ref
entropy/all/mean entropy
optim/grad_norm grad_norm
optim/lr lr
loss/mean pg_loss
off_policy/dropped evicted_stale_trajectories
dispatcher/cancelled/train cancelled_trajectories
dispatcher/errored/train failed_trajectories
dispatcher/inflight/train in_flight_rollouts
train/agg/all/has_error/mean error_share
train/agg/all/cancelled/mean cancelled_share
train/agg/all/math/solved_all solved_all_share
train/agg/all/math/solved_none solved_none_share
train/agg/all/math/solved_some zero_spread_share
time/step time_step
time/wait_for_batch wait_seconds
time/forward_backward time_forward_backward
time/broadcast_weights time_update_weights
perf/throughput throughput
perf/mfu mfu_actor
train/agg/all/math/reward/p10 -
train/agg/effective/math/num_output_tokens/p90 -
train/agg/all/math/stop_condition/stop -
train/agg/all/math/error/timeout -
train/agg/all/math/timing/agent/model/mean -
mismatch_kl/gsm8k/mean -
kl_ent_ratio/mean -
max_vio/mean -
routing_confidence/mean -
eval/aime/policy_version -
watcher/last_update_weights_time -
concurrency/max_inflight -
time/wait_for_policy -
perf/peak_memory -
"""

SKYRL = """
reward/avg_raw_reward score_generated
loss/avg_final_rewards reward_trained
eval/aime/avg_score validation
eval/all/pass_at_8 validation_aux
loss/avg_raw_advantages advantage_mean
loss/avg_raw_advantages_abs advantage_abs_mean
generate/avg_num_tokens generated_length_mean
generate/max_num_tokens generated_length_max
generate/min_num_tokens generated_length_min
generate/std_num_tokens generated_length_std
generate_kept/avg_num_tokens kept_length_mean
generate_dropped/avg_num_tokens evicted_length_mean
async/staleness_mean lag_admission_mean
async/staleness_max lag_admission_max
async/staleness_min lag_admission_min
async/staleness_ratio stale_group_share
async/staleness_violation_count lag_violations
trainer/global_step global_step
policy/rollout_train_logprobs_abs_diff_mean gap_logp_abs
policy/rollout_train_logprobs_abs_diff_max gap_logp_abs_max
policy/rollout_train_logprobs_abs_diff_std gap_logp_abs_std
policy/minibatch_rollout_logprobs_abs_diff_mean gap_logp_abs
policy/minibatch_rollout_logprobs_abs_diff_max gap_logp_abs_max
policy/minibatch_rollout_logprobs_abs_diff_std gap_logp_abs_std
policy/minibatch_rollout_logprobs_abs_diff_min gap_logp_abs_min
policy/loss_metrics/tis_token_clip_high_ratio tis_share
policy/loss_metrics/tis_seq_clip_high_ratio tis_share
policy/loss_metrics/geo_sequence_mask_masked_ratio rs_seq_masked_share
policy/loss_metrics/product_sequence_mask_masked_ratio rs_seq_masked_share
policy/loss_metrics/outlier_seq_masked_ratio rs_seq_masked_share
policy/loss_metrics/clip_ratio clip_share
loss/avg_kl kl_ref
policy/policy_kl kl_ref
policy/policy_entropy entropy
policy/grad_norm grad_norm
policy/policy_loss pg_loss
policy/policy_lr lr
async/num_groups_dropped filtered_groups
async/keep_rate filter_pass_share
async/gen_buffer_qsize_at_wait_start queue_size
timing/step time_step
timing/wait_for_generation_buffer wait_seconds
timing/policy_train time_update_actor
timing/sync_weights time_update_weights
timing/fwd_logprobs_values_reward time_old_log_prob
generate/trajectory_time_mean rollout_seconds
trainer/tokens_per_second_per_gpu throughput
reward/num_zero_variance_filtered -
policy/loss_metrics/other -
generate/tokens_per_turn_mean -
generate/avg_tokens_non_zero_rewards -
generate/avg_tokens_zero_rewards -
generate/group_completion_time_max -
timing/run_training -
"""

NEMO_RL = """
train/reward score_trained
validation/accuracy validation
train/advantages/mean advantage_mean
train/advantages/max advantage_max
train/advantages/min advantage_min
train/mean_gen_tokens_per_sample loss_length_mean
train/max_gen_tokens_per_sample loss_length_max
train/truncation_rate truncated_share
train/avg_turns_per_sample turns_mean
train/avg_trajectory_age lag_batch_start_mean
train/token_mult_prob_error gap_exp_abs
train/gen_kl_error gap_kl gap_estimator=k1
train/gen_kl_error gap_k2 gap_estimator=k2
train/gen_kl_error gap_k3
train/js_divergence_error gap_js
train/sampling_importance_ratio is_weight_mean
train/is_oob_ratio tis_share correction=tis
train/is_oob_ratio rs_masked_share correction=icepop
train/is_oob_ratio rs_seq_masked_share correction=seq-mask-tis
train/is_oob_ratio is_oob_share
train/num_masked_seqs_by_logprob_error rs_masked_trajectories
train/probs_ratio update_ratio_mean
train/probs_ratio_max update_ratio_max
train/probs_ratio_min update_ratio_min
train/kl_penalty kl_ref
train/approx_entropy entropy
train/grad_norm grad_norm
train/loss pg_loss
train/lr lr
train/dropped_prompt_groups failed_groups
train/evicted_stale_prompt_groups stale_groups
train/aborted_stale_inflight_groups stale_in_flight_groups
train/buffer_size queue_size
rollout/inflight in_flight_rollouts
timing/train/total_step_time time_step
timing/train/policy_training time_update_actor
timing/train/weight_sync time_update_weights
timing/train/policy_and_reference_logprobs time_old_log_prob
timing/train/idle/buffer_starvation wait_seconds
timing/train/exposed_generation wait_seconds
timing/train/generation time_gen trainer=grpo
timing/train/generation gen_busy_seconds
timing/train/valid_tokens_per_sec_per_gpu throughput
train/policy_kl_error -
train/probs_ratio_clamped -
train/baseline_reward/pct_mixed -
train/dynamic_sampling_num_batches -
timing/train/prepare_for_generation/total -
timing/train/idle/refit_bubble -
generation_metrics/histogram/gen_tokens_length -
validation/avg_length -
performance/anything -
"""

ROLL = """
critic/score/mean score_trained
rollout/score/mean score_generated
scheduler/math/score/mean score_generated
val_correct/all/mean validation
val/score/mean validation
critic/advantages/mean advantage_mean
critic/advantages/max advantage_max
critic/advantages/min advantage_min
tokens/response_length/mean response_length_mean
token/response_length/max response_length_max
token/response_length/min response_length_min
rollout/response_length/mean generated_length_mean
rollout/response_length/max generated_length_max
rollout/response_length/min generated_length_min
token/total_response_length/clip response_clip_share
scheduler/off_policy_ratio lag_admission_mean
system/step global_step
actor/train_infer_diff_token_mean gap_prob_signed
actor/train_infer_diff_sequence_mean gap_prob_signed_seq
actor/train_infer_ratio_token_mean is_raw_mean
actor/train_infer_ratio_sequence_mean is_raw_seq_mean
actor/is_weight_clipfrac tis_share
actor/train_infer_final_mask_mean rs_masked_share
actor/clipfrac clip_share
actor/ppo_ratio_clipfrac ratio_out_share
actor/ppo_ratio_low_clipfrac ratio_out_low_share
actor/ppo_ratio_high_clipfrac ratio_out_high_share
actor/ratio_mean update_ratio_mean
actor/ratio_max update_ratio_max
actor/ratio_min update_ratio_min
actor/policykl ppo_kl
actor/kl_loss kl_ref
critic/entropy/mean entropy
actor_train/grad_norm grad_norm
actor/pg_loss pg_loss
actor/lr lr
scheduler/query_filter_count filter_dropped_groups
scheduler/group_filter_count filter_dropped_groups
group/all_correct_groups_ratio solved_all_share
group/all_incorrect_groups_ratio solved_none_share
group/mixed_groups_ratio zero_spread_share
time/step_total time_step
time/step_train time_update_actor
time/step_model_update time_update_weights
time/old_log_probs time_old_log_prob
time/step_old_log_probs_values time_old_log_prob
time/get_batch_cost_train wait_seconds
time/step_generate time_gen trainer=sync_pipeline
time/step_rollout time_gen trainer=sync_pipeline
time/step_generate wait_seconds trainer=async_pipeline
time/step_rollout wait_seconds trainer=async_pipeline
system/tps throughput_total
system/tps_gpu throughput
time/step_generate -
actor/approxkl -
actor/train_infer_diff_geometric_mean -
actor/train_infer_token_ratio_mask_mean -
token/right_response_length/mean -
token/error_response_length/mean -
env/any -
scheduler/math/time/generate/mean -
"""

TABLES = dict(zip(FRAMEWORKS, (AREAL, SLIME, OPENRLHF, TRL, PRIME_RL, SKYRL, NEMO_RL, ROLL), strict=True))
Row = tuple[str, str, Facts]


@cache
def rows(framework: str) -> tuple[Row, ...]:
    """`(key, signal or "-", facts)` of a table."""
    parts = [line.split() for line in TABLES[framework].strip().splitlines()]
    return tuple((key, signal, dict(fact.split("=") for fact in facts)) for key, signal, *facts in parts)


def keys_of(framework: str) -> set[str]:
    return {key for key, _, _ in rows(framework)}


ALL_ROWS = [(framework, *row) for framework in FRAMEWORKS for row in rows(framework)]


def one(framework: str, key: str, facts: Facts | None = None, *others: str) -> Mapped:
    found = map_keys(ADAPTERS[framework], [key, *others], facts or {})
    return next(m for m in found.mapped if m.key == key)


def value(framework: str, key: str, logged: float, facts: Facts | None = None) -> float:
    mapped = one(framework, key, facts)
    return logged * mapped.scale + mapped.offset


# ------------------------------------------------------------------ every key, every entry


@pytest.mark.parametrize(("framework", "key", "signal", "facts"), ALL_ROWS)
def test_key(framework: str, key: str, signal: str, facts: Facts) -> None:
    found = map_keys(ADAPTERS[framework], [key], facts)
    if signal == "-":
        assert found.known == (key,)
    else:
        assert [m.signal for m in found.mapped] == [signal]
        assert found.mapped[0].record


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_entry_of_the_adapter_is_exercised(framework: str) -> None:
    adapter = ADAPTERS[framework]
    used = {id(e) for key, _, facts in rows(framework) if (e := entry(adapter, key, facts)) is not None}
    assert [e.key or e.pattern for e in adapter.maps if id(e) not in used] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_known_family_is_exercised(framework: str) -> None:
    adapter = ADAPTERS[framework]
    bare = [adapter.bare(key) for key, signal, _ in rows(framework) if signal == "-"]
    for family in adapter.known:
        assert any(family.pattern.fullmatch(key) for key in bare) or family.pattern.pattern == "step", family.pattern


def entry(adapter: Adapter, key: str, facts: Facts) -> KeyMap | None:
    """The entry that maps a key, found by what it yields."""
    found = map_keys(adapter, [key], facts).mapped
    if not found:
        return None
    return next(
        e
        for e in adapter.maps
        if (e.key == adapter.bare(key) or (e.pattern and e.pattern.fullmatch(adapter.bare(key))))
        and (e.signal, e.against, e.contains) == (found[0].signal, found[0].against, unstripped(e, found[0]))
        and all(facts.get(name) in allowed for name, allowed in e.when.items())
        and (not e.trainers or facts.get("trainer") in e.trainers)
    )


def unstripped(candidate: KeyMap, mapped: Mapped) -> tuple[str, ...]:
    """What an entry contains, where the adapter only took staleness away."""
    left = tuple(c for c in candidate.contains if c != "staleness")
    return candidate.contains if mapped.contains in (candidate.contains, left) else mapped.contains


@pytest.mark.parametrize("framework", ["trl", "openrlhf", "nemo-rl", "areal"])
def test_a_prefix_may_be_there_or_not(framework: str) -> None:
    adapter = ADAPTERS[framework]
    for key, signal, facts in rows(framework):
        other = adapter.bare(key) if key.startswith(adapter.optional_prefix) else adapter.optional_prefix + key
        found = map_keys(adapter, [other], facts)
        assert [m.signal for m in found.mapped] == ([] if signal == "-" else [signal]), other
    chosen, reason = choose_adapter({adapter.bare(key) for key in keys_of(framework)})
    assert chosen is adapter, reason
    chosen, reason = choose_adapter({adapter.optional_prefix + adapter.bare(key) for key in keys_of(framework)})
    assert chosen is adapter, reason


ASKED = {group[0] for needs in NEEDS.values() for group in needs} - {*TRACES_ONLY, *FACT_NEEDS}
"""What coverage asks a setting for: the first alternative of every need."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("signal", sorted(ASKED & set(load_signals())))
def test_every_signal_a_cause_needs_has_a_setting_or_an_honest_no(framework: str, signal: str) -> None:
    assert setting_for(signal, ADAPTERS[framework])


def test_nothing_is_declared_unrecorded_that_is_mapped() -> None:
    for framework in FRAMEWORKS:
        mapped = {e.signal for e in ADAPTERS[framework].maps}
        assert not mapped & set(ADAPTERS[framework].unrecorded), framework


# ------------------------------------------------------------------ choosing


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_framework_is_recognised(framework: str) -> None:
    adapter, reason = choose_adapter(keys_of(framework))
    assert adapter is not None
    assert adapter.framework == framework, reason


REAL_SETS = {
    "areal": "ppo_actor/task_reward/avg ppo_actor/update/actor_loss/avg ppo_actor/seq_len/avg timeperf/rollout",
    "slime": "rollout/response_len/mean rollout/zero_std/count_0 rollout/truncated_ratio perf/rollout_time",
    "openrlhf": "train/policy_loss train/actor_lr train/ppo_kl train/rollout/reward_mean train/timing/step_total",
    "trl": "loss grad_norm learning_rate reward reward_std kl completions/mean_length frac_reward_zero_std",
    "prime-rl": "step time/step perf/throughput loss/mean optim/lr mismatch_kl/all/mean entropy/all/mean",
    "skyrl": "reward/avg_raw_reward policy/policy_loss policy/grad_norm timing/step generate/avg_num_tokens",
    "nemo-rl": "train/reward train/loss train/grad_norm train/lr train/token_mult_prob_error validation/accuracy",
    "roll": "critic/score/mean critic/advantages/mean actor/pg_loss actor/lr actor/kl_loss critic/rewards/mean "
    "critic/rewards/max critic/rewards/min actor/ratio_mean actor/clipfrac system/step time/step_train",
    "verl": "critic/score/mean critic/advantages/mean critic/rewards/mean actor/pg_loss actor/kl_loss actor/lr "
    "timing_s/step perf/throughput",
}


@pytest.mark.parametrize("framework", sorted(REAL_SETS))
def test_a_small_set_of_keys_is_enough(framework: str) -> None:
    adapter, reason = choose_adapter(REAL_SETS[framework].split())
    assert adapter is not None
    assert adapter.framework == framework, reason


@pytest.mark.parametrize("prefix", ["train/", ""])
def test_trl_and_nemo_rl_share_names_and_are_told_apart(prefix: str) -> None:
    shared = [prefix + name for name in ("loss", "grad_norm", "reward")]
    assert choose_adapter(shared)[0] is None
    for own, framework in (("completions/mean_length", "trl"), ("token_mult_prob_error", "nemo-rl")):
        adapter, _ = choose_adapter([*shared, prefix + own])
        assert adapter is not None
        assert adapter.framework == framework


def test_slime_and_openrlhf_share_names_and_are_told_apart() -> None:
    shared = ["train/ppo_kl", "train/entropy_loss"]
    assert choose_adapter(shared)[0] is None
    for own, framework in (("train/pg_clipfrac", "slime"), ("train/ppo_clip_ratio", "openrlhf")):
        adapter, _ = choose_adapter([*shared, own])
        assert adapter is not None
        assert adapter.framework == framework


def test_keys_that_verl_and_roll_share_are_verls_unless_roll_logs_its_own() -> None:
    shared = ["critic/score/mean", "critic/advantages/mean", "actor/pg_loss"]
    adapter, reason = choose_adapter(shared)
    assert adapter is not None
    assert adapter.framework == "verl"
    assert "used by other frameworks too" in reason
    adapter, _ = choose_adapter([*shared, "actor/ppo_ratio_clipfrac"])
    assert adapter is not None
    assert adapter.framework == "roll"


SHARED_WITH_VERL = {
    ("verl", "roll"): {
        "critic/score/mean", "critic/advantages/mean", "critic/advantages/max", "critic/advantages/min",
        "actor/kl_loss", "actor/pg_loss",
    },
}  # fmt: skip


@pytest.mark.parametrize("claims", list(ADAPTERS))
@pytest.mark.parametrize("owner", FRAMEWORKS)
def test_no_adapter_claims_the_keys_of_another(claims: str, owner: str) -> None:
    if claims != owner:
        adapter = ADAPTERS[claims]
        claimed = {k for k in keys_of(owner) if any(p.fullmatch(adapter.bare(k)) for p in adapter.distinctive)}
        assert claimed == SHARED_WITH_VERL.get((claims, owner), set())


# ------------------------------------------------------------------ meaning


LAGS = {
    ("areal", "ppo_actor/update/version_stats/sample_staleness_theta_avg"): ("token", "token", 0),
    ("areal", "ppo_actor/update/version_stats/sample_staleness_proximal_avg"): ("token", "token", -1),
    ("slime", "rollout/fully_async/avg_staleness"): ("oldest", "trajectory", 0),
    ("trl", "sample/staleness_mean"): ("admission", "trajectory", 0),
    ("prime-rl", "off_policy/mean"): ("oldest", "trajectory", 0),
    ("prime-rl", "off_policy/in_queue/mean"): ("newest", "trajectory", 0),
    ("skyrl", "async/staleness_mean"): ("admission", "group", 0),
    ("nemo-rl", "train/avg_trajectory_age"): ("batch_start", "group", 0),
    ("roll", "scheduler/off_policy_ratio"): ("admission", "group", 0),
    ("verl", "training/off_policy/trajectory_staleness/mean"): ("newest", "trajectory", 0),
    ("verl", "training/off_policy/trajectory_staleness_worst/mean"): ("oldest", "trajectory", 0),
    ("verl", "training/off_policy/evicted_samples_staleness/mean"): ("admission", "group", None),
    ("mimo", "partial/avg_staleness"): ("unknown", "trajectory", 0),
}


@pytest.mark.parametrize(("framework", "key"), sorted(LAGS))
def test_a_lag_says_anchor_weight_version_unit_and_on_policy_value(framework: str, key: str) -> None:
    mapped = one(framework, key, {"trainer_family": "v1"} if framework == "verl" else {})
    assert (mapped.anchor, mapped.weight, mapped.on_policy) == LAGS[framework, key]
    assert mapped.version_unit


def test_every_lag_of_every_adapter_names_its_version_unit() -> None:
    signals = load_signals()
    for adapter in ADAPTERS.values():
        for e in adapter.maps:
            assert signals[e.signal].anchor is None or e.version_unit, (adapter.framework, e.key)


def test_no_lag_of_another_anchor_passes_for_the_lag_of_the_oldest_or_newest_token() -> None:
    signals = load_signals()
    for name in ("lag_newest_mean", "lag_newest_max", "lag_oldest_mean", "lag_oldest_max"):
        assert signals[name].anchor == name.split("_")[1]
    for framework in FRAMEWORKS:
        used = {e.signal for e in ADAPTERS[framework].maps}
        assert framework == "prime-rl" or not used & {"lag_mean", "lag_newest_mean", "lag_oldest_mean"}


def test_gaps_of_different_kinds_are_different_signals() -> None:
    kinds = {
        ("slime", "train/train_rollout_logprob_abs_diff"): ("gap_logp_abs", "log_prob", 0),
        ("nemo-rl", "train/token_mult_prob_error"): ("gap_exp_abs", "ratio", 1),
        ("roll", "actor/train_infer_diff_token_mean"): ("gap_prob_signed", "probability", 0),
        ("prime-rl", "mismatch_kl/all/mean"): ("gap_k3", "log_prob", 0),
        ("openrlhf", "train/vllm_kl"): ("gap_kl", "log_prob", 0),
        ("areal", "ppo_actor/compute_logp/kl_div_taylor/avg"): ("gap_k2", "log_prob", 0),
    }
    for (framework, key), expected in kinds.items():
        mapped = one(framework, key)
        assert (mapped.signal, mapped.unit_kind, mapped.on_policy) == expected


def test_a_gap_to_theta_contains_the_update() -> None:
    full = ("mismatch", "staleness", "update")
    assert one("prime-rl", "mismatch_kl/all/mean").contains == full
    assert one("areal", "ppo_actor/compute_logp/kl_div_dual/avg").contains == full
    assert one("trl", "kl", {"trainer": "async_grpo"}).contains == full
    assert one("areal", "ppo_actor/update/behave_approx_kl/avg").contains == ("mismatch", "staleness")


@pytest.mark.parametrize(
    ("framework", "key", "mode"),
    [
        ("trl", "sampling/sampling_logp_difference/mean", "grpo"),
        ("slime", "train/train_rollout_logprob_abs_diff", "train"),
        ("skyrl", "policy/rollout_train_logprobs_abs_diff_mean", "sync_trainer"),
        ("nemo-rl", "train/token_mult_prob_error", "grpo"),
        ("roll", "actor/train_infer_diff_token_mean", "sync_pipeline"),
        ("openrlhf", "train/vllm_kl", "sync_training"),
        ("areal", "ppo_actor/update/behave_approx_kl/avg", "on_policy"),
    ],
)
def test_staleness_is_not_in_the_gap_of_a_proven_sync_run(framework: str, key: str, mode: str) -> None:
    assert one(framework, key, {"trainer": mode}).contains == ("mismatch",)
    assert one(framework, key, {"is_async": False}).contains == ("mismatch",)
    assert one(framework, key, {"is_async": True}).contains == ("mismatch", "staleness")
    assert one(framework, key).contains == ("mismatch", "staleness")


def test_signs_are_turned_to_the_canonical_one() -> None:
    assert value("areal", "ppo_actor/update/behave_approx_kl/avg", -0.02) == pytest.approx(0.02)
    assert value("areal", "ppo_actor/update/approx_kl/avg", -0.01) == pytest.approx(0.01)
    assert value("openrlhf", "train/vllm_kl", 0.02) == pytest.approx(0.02)


def test_pass_rates_become_masked_shares() -> None:
    assert value("roll", "actor/train_infer_final_mask_mean", 1.0) == 0
    assert value("roll", "actor/train_infer_final_mask_mean", 0.9) == pytest.approx(0.1)
    assert value("roll", "group/mixed_groups_ratio", 0.25) == 0.75
    assert value("prime-rl", "train/agg/all/math/solved_some", 0.25) == 0.75


def test_only_one_gap_is_read_where_two_keys_hold_it() -> None:
    both = ["policy/rollout_train_logprobs_abs_diff_mean", "policy/minibatch_rollout_logprobs_abs_diff_mean"]
    assert [m.key for m in map_keys(ADAPTERS["skyrl"], both, {}).mapped] == both[:1]
    areal = ["ppo_actor/update/behave_approx_kl/avg", "ppo_actor/compute_logp/kl_div_direct/avg"]
    assert [m.key for m in map_keys(ADAPTERS["areal"], areal, {}).mapped] == areal[:1]


def test_names_that_say_one_thing_and_mean_another() -> None:
    assert one("roll", "scheduler/off_policy_ratio").unit_kind == "versions"
    assert one("skyrl", "async/staleness_ratio").signal != "partial_share"
    assert one("areal", "ppo_actor/prompt_len/avg").signal != "prompt_length_mean"
    assert one("skyrl", "reward/avg_raw_reward").signal == "score_generated"
    assert one("trl", "sample/dropped_stale_total").unit_kind == "trajectories"
    assert one("slime", "train/tis").signal != "is_weight_mean"
    assert one("roll", "actor/ppo_ratio_clipfrac").signal != "clip_share"


def test_generated_kept_and_evicted_lengths_are_told_apart() -> None:
    skyrl = {"generate": "generated_length_mean", "generate_kept": "kept_length_mean"}
    for head, signal in {**skyrl, "generate_dropped": "evicted_length_mean"}.items():
        assert one("skyrl", f"{head}/avg_num_tokens").signal == signal


def test_averaging_per_sample_first_is_marked() -> None:
    assert one("slime", "train/train_rollout_logprob_abs_diff").weight == "trajectory"
    assert one("trl", "sampling/importance_sampling_ratio/mean", {"correction": "sequence"}).weight == "trajectory"
    assert one("trl", "sampling/importance_sampling_ratio/mean").weight == "token"


def test_labels_name_agent_reason_and_data_set() -> None:
    assert one("prime-rl", "train/agg/all/a/b/reward/mean").label == "a/b"
    assert one("slime", "rollout/dynamic_filter/drop_zero_std").label == "zero_std"
    assert one("nemo-rl", "validation/accuracy").label == "accuracy"
    assert one("openrlhf", "eval/eval_aime_pass1").label == "aime_pass1"


# ------------------------------------------------------------------ inert, corrupt


@pytest.mark.parametrize("key", ["rollout/accepted", "rollout/rejected"])
def test_areal_counts_that_average_calls_of_one_are_inert(key: str) -> None:
    mapped = one("areal", key)
    assert mapped.inert_because is not None
    assert "1.0 by construction" in mapped.inert_because
    assert "sessions-r" in (mapped.record or "")


@pytest.mark.parametrize("policy", ["theta", "proximal"])
@pytest.mark.parametrize("extreme", ["max", "min"])
def test_areal_averages_of_extremes_are_corrupt(policy: str, extreme: str) -> None:
    key = f"ppo_actor/update/version_stats/sample_staleness_{policy}_{extreme}"
    reason = one("areal", key, {"lag_labels": "aligned"}).corrupt_because
    assert reason is not None
    assert "averages the extremes" in reason


@pytest.mark.parametrize("policy", ["theta", "proximal"])
def test_areal_lag_is_believed_only_where_version_labels_are_aligned(policy: str) -> None:
    key = f"ppo_actor/update/version_stats/sample_staleness_{policy}_avg"
    for facts in ({}, {"lag_labels": "shifted"}):
        assert "1736" in (one("areal", key, facts).corrupt_because or "")
    assert one("areal", key, {"lag_labels": "aligned"}).corrupt_because is None


def test_areal_lag_is_too_small_where_rejection_masks_tokens() -> None:
    key = "ppo_actor/update/version_stats/sample_staleness_theta_avg"
    facts = {"lag_labels": "aligned", "rejection": "mask"}
    assert "masked first" in (one("areal", key, facts).corrupt_because or "")
    assert one("areal", key, {**facts, "rejection": "clamp"}).corrupt_because is None


def test_areal_share_without_end_token_is_no_truncation_rate() -> None:
    assert "padded width" in (one("areal", "ppo_actor/no_eos_ratios/avg").corrupt_because or "")


def test_prime_rl_step_time_of_two_processes_is_corrupt() -> None:
    assert "trainer and orchestrator" in (one("prime-rl", "time/step").corrupt_because or "")


def test_prime_rl_throughput_counts_padding() -> None:
    assert "padded" in (one("prime-rl", "perf/throughput").corrupt_because or "")


def test_what_is_corrupt_whatever_the_run_names_no_setting() -> None:
    for framework in FRAMEWORKS:
        for e in ADAPTERS[framework].maps:
            if any(not remark.when for remark in e.corrupt):
                assert (e.record or "").startswith("none: "), (framework, e.key)


def test_skyrl_minimum_over_masked_tokens_is_corrupt() -> None:
    mapped = one("skyrl", "policy/minibatch_rollout_logprobs_abs_diff_min")
    assert "masked" in (mapped.corrupt_because or "")


CLIPS = {
    "areal": "ppo_actor/update/clip_ratio/avg",
    "slime": "train/pg_clipfrac",
    "openrlhf": "train/ppo_clip_ratio",
    "trl": "clip_ratio/region_mean",
    "skyrl": "policy/loss_metrics/clip_ratio",
    "roll": "actor/clipfrac",
}


@pytest.mark.parametrize("framework", sorted(CLIPS))
def test_a_clip_share_of_one_step_per_batch_is_inert(framework: str) -> None:
    key, decoupled = CLIPS[framework], {"log_prob_mode": "decoupled"}
    assert one(framework, key, decoupled).inert_because is None
    for fact in ("on_policy_updates", "clip_always_zero"):
        assert "by construction" in (one(framework, key, {**decoupled, fact: True}).inert_because or "")


@pytest.mark.parametrize("framework", ["areal", "slime"])
def test_a_clip_share_against_the_rollout_policy_is_not_inert(framework: str) -> None:
    mapped = one(framework, CLIPS[framework], {"log_prob_mode": "bypass", "clip_always_zero": True})
    assert mapped.inert_because is None
    assert mapped.contains == ("mismatch", "staleness", "update")


@pytest.mark.parametrize(
    ("framework", "key"),
    [
        ("areal", "ppo_actor/update/importance_weight/avg"),
        ("areal", "ppo_actor/update/dual_clip_ratio/avg"),
        ("areal", "ppo_actor/update/approx_kl/avg"),
        ("slime", "train/ppo_kl"),
        ("slime", "train/ois"),
        ("openrlhf", "train/ppo_kl"),
        ("nemo-rl", "train/probs_ratio"),
        ("roll", "actor/ratio_mean"),
        ("roll", "actor/policykl"),
        ("roll", "actor/ppo_ratio_clipfrac"),
    ],
)
def test_update_gauges_of_one_step_per_batch_are_inert(framework: str, key: str) -> None:
    facts = {"log_prob_mode": "decoupled", "on_policy_updates": True}
    assert "by construction" in (one(framework, key, facts).inert_because or "")
    assert one(framework, key, {**facts, "on_policy_updates": None}).inert_because is None


def test_nemo_rl_weight_without_correction_is_inert() -> None:
    assert one("nemo-rl", "train/sampling_importance_ratio", {"correction": "none"}).inert_because is not None


# ------------------------------------------------------------------ facts

Found = Mapping[str, object]


def facts_of(keys: str, config: Mapping[str, object] | None = None, /, **values: tuple[float, float]) -> Found:
    spans = {key.replace("__", "/"): span for key, span in values.items()}
    return plain(detect([*keys.split(), *spans], config, (), spans))


SYNC_OR_ASYNC = [
    ("trl", "loss step_time completions/mean_length", None, "grpo", False),
    ("trl", "train/clip_ratio/region_mean", None, "grpo", False),
    ("trl", "sample/staleness_mean reward kl", None, "async_grpo", True),
    ("trl", "completions/mean_length", None, None, None),
    ("slime", REAL_SETS["slime"], None, None, None),
    ("slime", REAL_SETS["slime"], {"colocate": True}, None, None),
    ("slime", REAL_SETS["slime"], {"colocate": True, "partial_rollout": True}, None, None),
    ("slime", REAL_SETS["slime"], {"args": {"colocate": True, "partial_rollout": False}}, "train", False),
    ("slime", REAL_SETS["slime"], {"colocate": False}, None, None),
    (
        "slime",
        "rollout/fully_async/avg_staleness",
        {"colocate": True, "partial_rollout": False},
        "fully_async_rollout",
        True,
    ),
    ("openrlhf", REAL_SETS["openrlhf"], None, None, None),
    ("openrlhf", REAL_SETS["openrlhf"], {"train": {"async_queue_size": 1}}, None, None),
    ("openrlhf", REAL_SETS["openrlhf"], {"train": {"partial_rollout_enable": True}}, "async_training", True),
    ("prime-rl", REAL_SETS["prime-rl"], None, None, None),
    ("skyrl", "async/staleness_mean reward/avg_raw_reward", None, "fully_async_trainer", True),
    ("skyrl", "trainer/tokens_per_second_per_gpu", None, "sync_trainer", False),
    ("skyrl", REAL_SETS["skyrl"], None, None, None),
    ("nemo-rl", "train/avg_trajectory_age train/gen_kl_error", None, "async_grpo", True),
    ("nemo-rl", "train/evicted_stale_prompt_groups train/gen_kl_error", None, "single_controller", True),
    ("nemo-rl", REAL_SETS["nemo-rl"], None, None, None),
    ("roll", REAL_SETS["roll"], {"async_generation_ratio": 0}, "sync_pipeline", False),
    ("roll", REAL_SETS["roll"], {"async_generation_ratio": 1}, "async_pipeline", True),
    ("roll", REAL_SETS["roll"], None, None, None),
    ("areal", REAL_SETS["areal"], {"rollout": {"max_head_offpolicyness": 0}}, "on_policy", False),
    ("areal", REAL_SETS["areal"], {"rollout": {"max_head_offpolicyness": 2}}, "async_rl", True),
    ("areal", REAL_SETS["areal"], {"rollout": {"max_head_offpolicyness": None}}, None, None),
    ("areal", REAL_SETS["areal"], None, None, None),
]


@pytest.mark.parametrize(("framework", "keys", "config", "trainer", "is_async"), SYNC_OR_ASYNC)
def test_sync_is_said_only_where_keys_or_configuration_prove_it(
    framework: str, keys: str, config: Mapping[str, object] | None, trainer: str | None, is_async: bool | None
) -> None:
    found = detect(keys.split(), config)
    assert (found["framework"].value, found["trainer"].value) == (framework, trainer)
    assert found["is_async"].value is is_async
    assert found["trainer"].reason
    assert found["is_async"].reason


def test_a_lag_above_zero_proves_async_and_beats_the_configuration() -> None:
    theta = "update__version_stats__sample_staleness_theta_avg"
    config = {"max_head_offpolicyness": 0}
    assert facts_of("ppo_actor/task_reward/avg", config, **{theta: (0, 1.5)})["is_async"] is True
    assert facts_of("ppo_actor/task_reward/avg", config, **{theta: (0, 0)})["is_async"] is False
    assert facts_of("ppo_actor/task_reward/avg", config, **{theta: (1, 1)})["is_async"] is False, "labels off by one"
    assert facts_of("mismatch_kl/all/mean", off_policy__max=(0, 3))["is_async"] is True
    assert facts_of("mismatch_kl/all/mean", off_policy__max=(0, 0))["is_async"] is None
    assert facts_of("actor/ratio_mean", scheduler__off_policy_ratio=(0, 1))["trainer"] == "async_pipeline"


@pytest.mark.parametrize(
    ("keys", "config", "mode"),
    [
        ("sample/staleness_mean", None, "bypass"),
        ("clip_ratio/region_mean", None, "decoupled"),
        ("completions/mean_length", None, None),
        ("train/vllm_kl", None, "decoupled"),
        ("mismatch_kl/all/mean", None, "bypass"),
        ("train/token_mult_prob_error", None, "decoupled"),
        ("actor/ratio_mean", None, "decoupled"),
        ("policy/policy_loss", None, None),
        ("train/pg_clipfrac", None, None),
        ("train/pg_clipfrac", {"use_rollout_logprobs": True}, "bypass"),
        ("train/pg_clipfrac", {"use_rollout_logprobs": False}, "decoupled"),
        ("timeperf/rollout", {"actor": {"use_decoupled_loss": True, "recompute_logprob": False}}, "decoupled"),
        ("timeperf/rollout", {"actor": {"use_decoupled_loss": False, "recompute_logprob": True}}, "decoupled"),
        ("timeperf/rollout", {"actor": {"use_decoupled_loss": False, "recompute_logprob": False}}, "bypass"),
        ("timeperf/rollout", {"actor": {"recompute_logprob": False}}, None),
    ],
)
def test_log_prob_mode(keys: str, config: Mapping[str, object] | None, mode: str | None) -> None:
    assert facts_of(keys, config)["log_prob_mode"] == mode


FRACTIONS = {f"train__x{i}": (0.0, 0.1234567 + i / 7) for i in range(10)}


def test_one_update_per_batch_is_seen_from_an_exact_zero() -> None:
    found = facts_of("train/vllm_kl", **FRACTIONS, train__ppo_kl=(0, 0), train__ppo_clip_ratio=(0, 0))
    assert (found["on_policy_updates"], found["clip_always_zero"]) == (True, True)
    moving = facts_of("train/vllm_kl", **FRACTIONS, train__ppo_kl=(0, 1e-7), train__ppo_clip_ratio=(0, 1e-3))
    assert (moving["on_policy_updates"], moving["clip_always_zero"]) == (None, None)
    rounded = {key: (0.0, round(high, 3)) for key, (_, high) in FRACTIONS.items()}
    assert facts_of("train/vllm_kl", **rounded, train__ppo_kl=(0, 0))["on_policy_updates"] is None
    slime = facts_of("train/tis", **FRACTIONS, train__ppo_kl=(0, 0))
    assert (slime["log_prob_mode"], slime["on_policy_updates"]) == ("decoupled", True)
    assert (
        facts_of("train/tis", {"use_rollout_logprobs": True}, **FRACTIONS, train__ppo_kl=(0, 0))["on_policy_updates"]
        is None
    )
    areal = facts_of(
        "ppo_actor/task_reward/avg",
        {"recompute_logprob": True},
        **FRACTIONS,
        ppo_actor__update__approx_kl__avg=(0, 0),
    )
    assert areal["on_policy_updates"] is True
    assert facts_of("actor/ratio_mean", **FRACTIONS, actor__policykl=(0, 0))["on_policy_updates"] is True


@pytest.mark.parametrize(
    ("low", "high", "labels"), [(-1, 2, "shifted"), (0, 2, "aligned"), (1, 3, None), (0.5, 2, None)]
)
def test_version_labels_of_areal_are_checked_against_what_a_lag_can_be(
    low: float, high: float, labels: str | None
) -> None:
    theta = "ppo_actor__update__version_stats__sample_staleness_theta_avg"
    assert facts_of("ppo_actor/task_reward/avg", **{theta: (low, high)})["lag_labels"] == labels


def test_rejection_and_correction() -> None:
    share = "ppo_actor__update__rs_filtered_fraction"
    base = "ppo_actor/task_reward/avg"
    nothing: Found = {"actor": {"rejection_sampling": None}}
    assert facts_of(base, nothing)["rejection"] == "none"
    for action in ("mask", "clamp"):
        config = {"actor": {"rejection_sampling": {"level": "token", "action": action}}}
        assert facts_of(base, config, **{share: (0, 0.1)})["rejection"] == action
    assert facts_of(base, **{share: (0, 0.1)})["rejection"] == "mask or clamp"
    assert facts_of(base)["rejection"] is None
    assert facts_of("train/tis train/pg_clipfrac")["correction"] == "token"
    assert facts_of("train/pg_clipfrac", {"use_tis": False})["correction"] == "none"
    assert facts_of("train/vllm_kl", {"is_correction_enable": False})["correction"] == "none"
    nemo = {"loss_fn": {"use_importance_sampling_correction": False}}
    assert facts_of("train/gen_kl_error", nemo)["correction"] == "none"
    trl = {"vllm_importance_sampling_mode": "sequence_mask"}
    assert facts_of("completions/mean_length", trl)["correction"] == "sequence"
    off: Found = {**trl, "vllm_importance_sampling_correction": False}
    assert facts_of("completions/mean_length", off)["correction"] == "none"
    assert facts_of("train/vllm_kl", {"partial_rollout_enable": True})["partial_rollout"] is True
    for partial in (True, False):
        assert facts_of("train/tis", {"partial_rollout": partial})["partial_rollout"] is partial


def test_the_estimator_of_nemo_rl() -> None:
    key = "train__gen_kl_error"
    assert facts_of("train/lr", **{key: (0, 0.1)})["gap_estimator"] is None
    assert facts_of("train/lr", **{key: (-0.01, 0.1)})["gap_estimator"] == "k1"
    for kind in ("k1", "k2", "k3"):
        config = {"loss_fn": {"reference_policy_kl_type": kind}}
        assert facts_of("train/lr", config, **{key: (0, 0.1)})["gap_estimator"] == kind


def test_a_fact_nobody_knows_says_so() -> None:
    found = detect(["mismatch_kl/all/mean"], None)
    assert found["group_size"].value is None
    assert "prime-rl" in found["group_size"].reason
    assert found["gap_estimator"].value is None
    verl = detect(["training/rollout_probs_diff_mean"], None)
    assert {verl[name].value for name in ("clip_always_zero", "gap_estimator", "lag_labels")} == {None}


def test_a_fact_the_user_sets_wins() -> None:
    found = detect(["train/token_mult_prob_error"], None, given={"trainer": "grpo", "correction": "tis"})
    assert (found["is_async"].value, found["correction"].value) == (False, "tis")


def test_candidates_are_the_frameworks_own_modes() -> None:
    modes = ADAPTERS["nemo-rl"].modes
    assert candidates({}, modes) == {"grpo", "async_grpo", "single_controller"}
    assert candidates({"is_async": True}, modes) == {"async_grpo", "single_controller"}
    assert candidates({"trainer": "grpo"}, modes) == {"grpo"}


def test_no_mode_has_the_name_of_a_verl_trainer() -> None:
    for framework in FRAMEWORKS:
        assert not ADAPTERS[framework].modes.keys() & {"sync", "v0", "fully_async", "one_step_off", "separate_async"}


# ------------------------------------------------------------------ definition files

HEAD = 'framework = "x"\nadapter_version = 1\ncovers = "all"\ndistinctive = []\n[modes]\nslow = false\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[fact]]\nfact = "trainer"\nvalue = "fast"\nbecause = "so"',
            r"\[\[fact\]\] number 1 \(trainer\): mode 'fast'",
        ),
        ('[[fact]]\nfact = "moon"\nvalue = "full"\nbecause = "so"', "fact 'moon'"),
        ('[[fact]]\nfact = "correction"\nvalue = "tis"', "because is missing"),
        ('[[fact]]\nfact = "correction"\nvalue = "tis"\nbecause = "so"\nlogs = ["("]', "is no regular expression"),
        ('[[map]]\nkey = "a"\nsignal = "lr"\ntrainers = ["sync"]', "trainer 'sync'"),
    ],
)
def test_a_wrong_mode_or_fact_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(HEAD + text)
    with pytest.raises(AdapterError, match=message):
        read_adapter(path, load_signals())
