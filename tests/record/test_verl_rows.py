"""Rows from what verl's queue says, each of which the trace schema takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_audit.record.verl_rows import (
    SEGMENTS,
    Fate,
    Group,
    Trained,
    group_row,
    missing_sessions,
    parts_of,
    row,
    segments,
    trained_row,
)
from verl_audit.record.verl_submit import Submissions, prompt_key
from verl_audit.trace.write import to_table

GROUP = Group(submit_step=3, t_submit=10.0, t_enqueue=19.5, prompt_key="ab")
TAG = {"prompt_len": 7, "response_len": 6, "min_global_steps": 2, "max_global_steps": 4, "global_steps": 3}


def call(prefill: int, length: int, version: int | None, stop: str = "stop", server: str = "s0") -> dict[str, Any]:
    return {
        "version": version,
        "start": 0,
        "length": length,
        "server": server,
        "t0": 11.0,
        "t1": 12.0,
        "prefill": prefill,
        "stop": stop,
    }


def test_a_resumed_response_is_cut_into_its_calls() -> None:
    calls = [call(7, 0, 2, "abort"), call(7, 4, 3, "abort"), call(11, 2, 4, "length")]
    fields = {"extra_fields": {SEGMENTS: calls, "reward_extra_info": {"acc": np.float32(1), "note": "text"}}}
    fields["rm_scores"] = np.array([0, 0, 0, 0, 0, 1.0])  # type: ignore[assignment]
    made = row("u_2_0", TAG, fields, GROUP, Fate(("stale", "filtered"), 9, 20.0), limit=100)
    assert [(s["start"], s["length"], s["version"]) for s in made["segments"]] == [(0, 0, 2), (0, 4, 3), (4, 2, 4)]
    assert (made["first_version"], made["last_version"]) == (3, 4)  # verl says 2: nothing was sampled by it
    assert (made["fate"], made["reasons"], made["session"], made["turn"]) == ("stale", ["stale", "filtered"], 2, 0)
    assert (made["submit_version"], made["reward"], made["reward_parts"]) == (2, 1.0, {"acc": 1.0})
    assert made["truncated"] is True
    to_table([made])


def test_without_segments_the_tags_tell_the_versions() -> None:
    made = row("u_0_0", TAG, {}, Group(), Fate(("failed",), 9, None), limit=6)
    assert (made["first_version"], made["last_version"], made.get("segments")) == (2, 4, None)
    assert made["truncated"] is True
    assert (made["reward"], made["submit_version"]) == (None, None)
    to_table([made])


def test_turns_leave_room_for_tool_output() -> None:
    calls = [call(7, 2, 3), call(12, 3, 3)]  # two tokens, three of a tool, three tokens
    assert [(s["start"], s["length"]) for s in segments(calls, 8)] == [(0, 2), (5, 3)]
    assert segments(calls, 8, one_turn=False) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), st.integers(0, 40))
def test_segments_lie_in_the_response(calls: list[tuple[int, int]], length: int) -> None:
    found = segments([call(p, n, 1) for p, n in calls], length)
    assert all(0 <= s["start"] <= s["start"] + s["length"] <= length for s in found)


@pytest.mark.parametrize("junk", [None, {}, "x", []])
def test_what_are_no_segments(junk: object) -> None:
    assert segments(junk, 5) == []


def lists(n: int = 6, **more: Any) -> Trained:
    behave = np.linspace(-2, -0.5, n, dtype=np.float32)
    return Trained(behave=behave, prox=behave + np.float32(0.25), mask=np.ones(n, bool), kept=np.ones(n, bool), **more)


def trained(
    tag: dict[str, Any], lists_: Trained, fields: dict[str, Any] | None = None, step: int = 5
) -> dict[str, Any]:
    return trained_row(row("u_0_0", tag, fields or {}, GROUP, Fate(("trained",), step, 21.0), 100), step, lists_)


def test_a_trained_row_has_lag_masks_and_advantage() -> None:
    kept = np.array([1, 1, 0, 0, 1, 1], bool)
    given = lists(minibatch=2, advantages=np.full(6, 0.5, np.float32))
    given = Trained(**{**given.__dict__, "kept": kept})
    made = trained(TAG, given)
    assert (made["train_version"], made["train_minibatch"]) == (4, 2)
    assert (made["loss_tokens"], made["rejected_tokens"], made["advantage"]) == (6, 2, 0.5)
    to_table([made])


def test_the_probe_of_a_response_that_the_installed_version_sampled_is_whole() -> None:
    made = trained({**TAG, "min_global_steps": 4, "max_global_steps": 4}, lists())
    assert made["trainer_logp"] is made["prox_logp"]
    assert "sums" not in made


def test_the_probe_of_a_mixed_response_sums_the_tokens_of_the_installed_version() -> None:
    fields = {"extra_fields": {SEGMENTS: [call(7, 4, 3, "abort"), call(11, 2, 4)]}}
    made = trained(TAG, lists(), fields)
    assert "trainer_logp" not in made
    [entry] = made["sums"]
    assert (entry["later"], entry["earlier"], entry["n"]) == ("trainer_logp", "behave_logp", 2)
    assert entry["sum"] == pytest.approx(0.5)


def test_no_probe_where_nothing_is_fresh_or_no_trainer_log_prob_exists() -> None:
    old = {**TAG, "min_global_steps": 1, "max_global_steps": 1}
    assert "trainer_logp" not in trained(old, lists())
    assert "trainer_logp" not in trained(TAG, lists())  # versions 2 to 4, no telling which token is whose
    bypass = Trained(**{**lists().__dict__, "prox": None})
    assert "trainer_logp" not in trained({**TAG, "min_global_steps": 4}, bypass)


def test_a_group_of_which_nothing_is_known_is_one_row_without_a_session() -> None:
    made = group_row("u", GROUP, Fate(("in_flight",), 9, None))
    assert (made["session"], made["response_length"], made["fate"]) == (None, 0, "in_flight")
    failed = missing_sessions("u", {0, 2}, 4, GROUP, 9)
    assert [(r["session"], r["fate"]) for r in failed] == [(1, "failed"), (3, "failed")]
    to_table([made, *failed])


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("a-b_1_0", ("a-b", 1, 0)),
        ("a", ("a", None, None)),
        ("a_x_y", ("a_x_y", None, None)),
        ("uid_0_1_2_0", ("uid_0_1", 2, 0)),
    ],
)
def test_keys(key: str, parts: tuple[str, int | None, int | None]) -> None:
    assert parts_of(key) == parts


def test_submissions_are_known_once_by_uid() -> None:
    known = Submissions()
    known.note({"uid": np.array(["u", "v"]), "raw_prompt": [[{"role": "user", "content": "1+1"}], None]})
    t, key = known.of("u", forget=True)
    assert t is not None
    assert key == prompt_key([{"content": "1+1", "role": "user"}])
    assert known.of("u", forget=True) == (None, None)
    assert known.of("v", forget=True)[1] is None
