"""The parts of the loop do what their docstrings say: rounding, routing, scoring, gradients, the clock, speed."""

from __future__ import annotations

import builtins
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_audit.errors import AuditError
from verl_audit.reference.buffer import Buffer
from verl_audit.reference.clock import Engine, loaded
from verl_audit.reference.learner import TRAINER, Learner
from verl_audit.reference.loop import Run
from verl_audit.reference.loss import advantages, correction, push
from verl_audit.reference.numerics import FORMATS, LARGEST, round_to
from verl_audit.reference.policy import Numerics, Policy, Weights, log_softmax, make_policy, processed
from verl_audit.reference.router import choose
from verl_audit.reference.settings import Settings, with_overrides
from verl_audit.reference.task import expected_score, make_task, score
from verl_audit.reference.truth import BaselineCurve, behind_from, onsets, speed, speed_to_end

SMALL = with_overrides(Settings(), {"classes": 4, "lengths": "2,4", "positions": 8, "features": 16, "groups": 4})
STEP = {"bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "fp6": 2**-4, "fp4": 2**-2}
"""Largest relative rounding error of a normal number: half a unit in the last place."""


@pytest.mark.parametrize("form", [f for f in FORMATS if f != "fp32"])
@given(seed=st.integers(0, 2**16))
@settings(deadline=None)
def test_rounding_stays_within_half_a_unit_and_rounds_only_once(form: Any, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((6, 5)).astype(np.float32)
    for scaling in ("tensor", "channel"):
        rounded = round_to(x, form, scaling)
        largest = np.abs(x).max(axis=None if scaling == "tensor" else 0)
        smallest = 0 if form == "bf16" else largest * (2.0 if form == "fp8_e5m2" else 1.0) / LARGEST[form]
        assert np.all(np.abs(rounded - x) <= STEP[form] * np.maximum(np.abs(x), smallest) * 1.001)
        assert np.array_equal(round_to(rounded, form, scaling), rounded) or form != "bf16"


def test_largest_numbers_are_those_of_the_formats() -> None:
    kinds = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6": "float6_e2m3fn", "fp4": "float4_e2m1fn"}
    for form, kind in kinds.items():
        assert float(ml_dtypes.finfo(getattr(ml_dtypes, kind)).max) == LARGEST[form]  # type: ignore[no-untyped-call]


def test_a_channel_scale_keeps_a_small_channel_alive() -> None:
    x = np.array([[1.0, 1e-3], [0.5, 2e-3]], np.float32)
    assert np.all(round_to(x, "fp4", "tensor")[:, 1] == 0)
    assert np.all(round_to(x, "fp4", "channel")[:, 1] > 0)


def test_missing_ml_dtypes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name == "ml_dtypes":
            raise ImportError(name)
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AuditError, match=r"pip install 'verl-audit\[reference\]'"):
        round_to(np.ones((2, 2), np.float32), "bf16")


def test_expected_score_is_what_sampling_gives() -> None:
    task = make_task(4, 6, (2, 4), 8, 0)
    rng = np.random.default_rng(0)
    logp = log_softmax(rng.standard_normal((32, 6), dtype=np.float32))
    table, n = loaded(0, 0, logp, None), 4000
    classes = np.repeat(np.arange(4), n)
    context = classes[:, None] * 8 + np.arange(8)
    tokens = (rng.random((4 * n, 8, 1)) >= table.cumulated[context]).sum(axis=2)
    for limit in (8, 3):
        stops = tokens == 0
        stops[:, limit - 1 :] = True
        reward, _ = score(task, classes, tokens, stops.argmax(axis=1) + 1)
        sampled, error = reward.reshape(4, n).mean(axis=1), reward.reshape(4, n).std(axis=1) / np.sqrt(n)
        assert np.all(np.abs(expected_score(task, logp.reshape(4, 8, 6), limit) - sampled) < 4 * error + 1e-9)


def test_top_p_keeps_the_likeliest_and_renormalises() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    assert np.allclose(np.exp(processed(logits, Numerics(top_p=0.7))), [[0.625, 0.375, 0, 0]])
    assert np.allclose(np.exp(processed(logits, Numerics(temperature=0.5)))[0, 0], 0.25 / 0.365)


@pytest.mark.parametrize("experts", [0, 4])
def test_gradient_is_that_of_finite_differences(experts: int) -> None:
    task = make_task(4, 5, (2, 4), 8, 0)
    policy, weights = make_policy(task, 12, experts, 1.0, 0)
    direction = np.random.default_rng(1).standard_normal((32, 5)).astype(np.float32)

    def value(w: Weights) -> float:
        return float((policy.forward(w, TRAINER, routes).logp.astype(np.float64) * direction).sum())

    forward = policy.forward(weights, TRAINER)
    routes = forward.routes
    d_logits = direction - np.exp(forward.logp) * direction.sum(axis=1, keepdims=True)
    for name, g in policy.gradient(forward, d_logits).items():
        step = np.random.default_rng(2).standard_normal(g.shape).astype(np.float32)
        there, back = ({**weights, name: weights[name] + sign * np.float32(1e-2) * step} for sign in (1, -1))
        assert (value(there) - value(back)) / 2e-2 == pytest.approx(float((g * step).sum()), rel=2e-2)


def test_a_coarse_router_flips_and_replay_takes_its_choice_over() -> None:
    task = make_task(16, 6, (4, 8), 12, 0)
    policy, weights = make_policy(task, 32, 8, 1.0, 0)
    coarse = policy.forward(weights, Numerics("fp32", "fp4", "tensor"))
    own = policy.forward(weights, TRAINER)
    assert coarse.routes is not None and own.routes is not None
    flips = (coarse.routes != own.routes).any(axis=1)
    assert 0.02 < flips.mean() < 0.6
    replayed = policy.forward(weights, TRAINER, coarse.routes)
    far = np.abs(own.logp - coarse.logp).max(axis=1)
    assert far[flips].mean() > 3 * far[~flips].mean()
    assert np.abs(replayed.logp - coarse.logp)[flips].mean() < 0.3 * np.abs(own.logp - coarse.logp)[flips].mean()
    assert np.array_equal(choose(np.array([[0.1, 3.0, 2.0]], np.float32)), [[1, 2]])


def test_advantages_are_centred_and_a_flat_group_teaches_nothing() -> None:
    made = advantages(np.array([[0, 1, 1, 0], [0.5, 0.5, 0.5, 0.5]], np.float32))
    assert made[0].sum() == pytest.approx(0, abs=1e-6) and np.all(made[1] == 0)


def test_the_clip_silences_tokens_that_moved_with_their_advantage() -> None:
    theta = np.log(np.array([[1.5, 1.5, 0.5, 0.5, 5.0]], np.float32))
    advantage = np.array([[1, -1, 1, -1, -1]], np.float32)
    mask = np.ones((1, 5), bool)
    done = push(SMALL, theta, np.zeros_like(theta), advantage, correction(SMALL, theta, theta, mask))
    assert np.array_equal(done.push != 0, [[False, True, True, False, False]])
    assert (done.clipped, done.clipped_lower) == (0.4, 0.2)


def test_corrections_truncate_and_mask() -> None:
    gap, mask = np.log(np.array([[4.0, 1.0, 0.2]], np.float32)), np.ones((1, 3), bool)
    zero = np.zeros_like(gap)
    tis = correction(with_overrides(SMALL, {"rollout_is": "token"}), gap, zero, mask)
    assert np.allclose(tis.weight, [[2.0, 1.0, 0.2]])
    mis = correction(with_overrides(SMALL, {"rollout_rs": "token_k1"}), gap, zero, mask)
    assert np.array_equal(mis.kept, [[False, True, False]])


def engine_with(settings: Settings, seed: int = 0) -> tuple[Engine, Learner, Policy]:
    task = make_task(settings.classes, settings.vocabulary, settings.lengths, settings.positions, 0)
    policy, weights = make_policy(task, settings.features, 0, 1.0, 0)
    engine, learner = Engine(settings, seed), Learner(settings, policy, weights)
    engine.load(learner.publish(0, []), 0.0)
    return engine, learner, policy


def test_what_was_written_before_a_sync_stays_and_the_rest_has_the_new_version() -> None:
    engine, learner, _ = engine_with(SMALL)
    (group,) = engine.submit(np.array([1]), 1, 0)
    engine.pass_time(SMALL.prefill_seconds + 1.5 * engine.pace)
    rows = engine.pool.rows(group)
    running = np.array([row for _, row in engine.running])
    before = engine.pool.tokens[running, 0].copy()
    learner.weights = {"out": learner.weights["out"] + np.float32(1)}
    engine.load(learner.publish(1, engine.replicas), 0.5)
    assert np.array_equal(engine.pool.tokens[running, 0], before)
    assert np.all(engine.pool.source[running, 0] == 0) and np.all(engine.pool.source[running, 1] == 1)
    while engine.running:
        done = engine.finish_next()
    assert done is group and np.all(engine.pool.ended[rows] > 0)


def test_long_responses_come_back_later() -> None:
    engine, _, _ = engine_with(SMALL)
    engine.submit(np.zeros(30, int), 1, 0)
    order = []
    while engine.running:
        row = engine.running[0][1]
        order.append((engine.running[0][0], int(engine.pool.length[row])))
        engine.finish_next()
    assert [length for _, length in order] == sorted(length for _, length in order)


def test_a_sleeping_engine_writes_nothing_and_goes_on_with_the_next_weights() -> None:
    engine, learner, _ = engine_with(SMALL)
    engine.submit(np.array([1]), 1, 0)
    engine.pass_time(SMALL.prefill_seconds + 1.5 * engine.pace)
    engine.sleep()
    rows, before = engine.stopped, engine.pool.progress.copy()
    assert len(rows) and not engine.running
    engine.submit(np.array([2]), 2, 0)
    assert engine.pass_time(100.0) == [] and not engine.running
    engine.load(learner.publish(1, engine.replicas), 0.5)
    assert engine.aborted == len(rows) and np.array_equal(engine.pool.progress, before)
    assert np.all(engine.pool.source[rows, 0] == 0) and np.all(engine.pool.source[rows, 1] == 1)
    assert len(engine.running) > len(rows)


def test_a_straggler_writes_the_same_tokens_later() -> None:
    tokens, ended = [], []
    for chance in (0.0, 0.3):
        engine, _, _ = engine_with(with_overrides(SMALL, {"straggler": chance, "straggler_factor": 20.0}))
        engine.submit(np.zeros(30, int), 1, 0)
        while engine.running:
            engine.finish_next()
        rows = np.arange(30 * SMALL.group_size)
        tokens.append(engine.pool.tokens[rows].copy())
        ended.append((engine.pool.ended[rows] - SMALL.prefill_seconds) / engine.pool.length[rows] / engine.pace)
    assert np.array_equal(*tokens)
    assert np.allclose(ended[0], 1)
    slow = ended[1] > 1.5
    assert np.allclose(ended[1][slow], 20) and 0.2 < slow.mean() < 0.4


def test_before_the_onset_the_engine_is_sound() -> None:
    faults = {"rollout_format": "fp4", "scaling": "tensor", "temperature": 1.3, "failure": 0.9}
    s = with_overrides(Settings(), {**faults, "onset": 0.25, "updates": 8, "classes": 4, "features": 16})
    task = make_task(s.classes, s.vocabulary, s.lengths, s.positions, 0)
    policy, weights = make_policy(task, s.features, 0, 1.0, 0)
    learner = Learner(s, policy, weights)
    sound = policy.forward(weights, Numerics("bf16", "bf16")).logp
    found = [np.array_equal(learner.publish(version, [])[0].logp, sound) for version in range(4)]
    assert found == [True, True, False, False]
    engine = Engine(s, 0)
    engine.load(learner.publish(0, []), 0.0)
    cuts = [engine.pool.cut[engine.pool.rows(engine.submit(np.zeros(1, int), 1, v)[0])] for v in range(4)]
    assert [bool((cut <= s.positions).any()) for cut in cuts] == [False, False, True, True]
    late = with_overrides(s, {"rollout_format": "bf16", "frozen": 1})
    assert (late.faulty_from, late.onset_update) == (2, 2)


def test_a_full_queue_discards_the_oldest_but_not_while_the_trainer_collects() -> None:
    over = {"trainer": "fully_async", "queue": 1.0, "groups": 2, "staleness_share": 3.0, "slots": 6}
    settings = with_overrides(SMALL, over)
    engine, _, _ = engine_with(settings)
    gone: list[int] = []
    buffer = Buffer(
        settings,
        engine,
        lambda n: np.zeros(n, np.int64),
        lambda group: np.zeros(settings.group_size, np.float32),
        lambda group, reasons, step: gone.append(group.number),
    )
    buffer.admit(1)
    assert len(buffer.unfinished) == buffer.most_out == 8
    first = [g.number for g in buffer.sample(1, 4)]
    assert gone == [] and len(first) == 4
    buffer.pass_time(1000.0, 1)
    assert len(buffer.finished) == settings.queue_groups == 2 and buffer.overflowed == len(gone) == 2
    assert set(first).isdisjoint(gone) and not buffer.unfinished
    buffer.synced(1)
    buffer.admit(2)
    assert not buffer.unfinished  # nothing is asked while the queue is full


def test_no_more_than_the_slots_run_at_once() -> None:
    engine, _, _ = engine_with(with_overrides(SMALL, {"slots": 5}))
    engine.submit(np.zeros(4, int), 1, 0)
    seen = []
    while engine.running:
        seen.append(len(engine.running))
        engine.finish_next()
    assert max(seen) == 5 and len(seen) == 4 * SMALL.group_size


def test_a_frozen_replica_keeps_its_weights_and_its_label_only_if_labelled() -> None:
    for labelled, label in (("true", 0), ("false", 1)):
        settings = with_overrides(SMALL, {"frozen": 1, "labelled": labelled})
        engine, learner, _ = engine_with(settings)
        learner.weights = {"out": learner.weights["out"] * np.float32(2)}
        held = learner.publish(1, engine.replicas)
        assert [h.label for h in held] == [label, 1, 1, 1]
        assert held[0].logp is engine.replicas[0].logp and held[1].logp is not held[0].logp


def test_partial_sync_moves_half_of_the_rows_and_none_delivers_nothing() -> None:
    settings = with_overrides(SMALL, {"delivered": 0.5})
    _, learner, _ = engine_with(settings)
    start = learner.weights["out"]
    learner.weights = {"out": start + np.float32(1)}
    moved = learner._partly_delivered()["out"] - start
    assert np.allclose(moved[: len(start) // 2], 1) and np.allclose(moved[len(start) // 2 :], 0)


def test_speed_is_the_factor_a_curve_was_stretched_by() -> None:
    updates = np.arange(0, 201.0)
    base = 0.8 - 0.7 * np.exp(-updates / 60)
    for factor in (0.3, 0.6, 1.0, 1.5):
        slow = 0.8 - 0.7 * np.exp(-factor * updates / 60)
        assert speed(updates, slow, updates, base) == pytest.approx(factor, rel=0.03)
        assert speed_to_end(updates, slow, updates, base) == pytest.approx(min(factor, 1.0), rel=0.08)
    plateau = np.minimum(base, 0.5)
    assert speed_to_end(updates, plateau, updates, base) < 0.35


def test_a_run_is_behind_from_where_it_stays_below_a_baseline_two_deviations_slow() -> None:
    updates = np.arange(0, 201.0)
    base = BaselineCurve(updates, 0.8 - 0.7 * np.exp(-updates / 60), 1.0, 0.1, 5)
    curve = np.stack([updates, updates, base.reward], axis=1)
    assert behind_from(updates, base.reward, base) is None
    stuck = np.minimum(base.reward, base.reward[50])
    first = behind_from(updates, stuck, base)
    assert first is not None and first == np.floor(50 * np.exp(0.2)) + 1  # the slow one needs so long to pass it
    curve[:, 2] = stuck
    late = Settings(decay_from=48, updates_per_sync=4)
    assert onsets(curve, base, late) == {"sets_in": 13, "behind": np.ceil(first / 4)}
    assert onsets(curve, None, Settings()) == {"sets_in": None, "behind": None}
    caught_up = np.where(updates < 100, stuck, base.reward)
    assert behind_from(updates, caught_up, base) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nonsense": 1}, "no such setting: nonsense"),
        ({"rollout_format": "fp3"}, "one of fp32, bf16"),
        ({"updates": "many"}, "not of type int"),
        ({"bypass": "maybe"}, "not of type bool"),
        ({"frozen": 9}, "frozen exceeds replicas"),
        ({"lengths": "3,5"}, "must be even"),
        ({"updates_per_sync": 3}, "multiple of updates_per_sync"),
        ({"bypass": True, "rollout_is": "token"}, "ignores rollout_is"),
        ({"onset": 1.0}, "share of the updates"),
        ({"queue": 0.5}, "must hold a batch"),
        ({"straggler_factor": 0.5}, "at least 1"),
        ({"trainer": "colocate_async", "admission": 2}, "runs while training"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        with_overrides(Settings(), given)


def test_pool_grows_when_more_is_out_than_planned() -> None:
    run = Run(with_overrides(SMALL, {"updates": 4, "trainer": "separate_async", "warmup": 1, "threshold": 0}), 0)
    run.engine.load(run.learner.publish(0, []), 0.0)
    run.buffer.submit(40, 1)
    assert run.engine.pool.capacity >= 40 * SMALL.group_size
    assert len({g.first for g in run.buffer.unfinished.values()}) == 40
