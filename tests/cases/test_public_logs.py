"""Public verl logs: exactly the lines and values that are in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_audit import AuditError, NothingToJudge, audit
from verl_audit.pipeline import load_all

LOGS = Path(__file__).parents[2].parent / "shared" / "public_logs"
pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the public logs are not beside the repository")


@pytest.mark.parametrize(
    ("file", "steps", "values"),
    [
        ("verl_logicrl_m950nfkl_output.log", list(range(10)), 433),
        ("verl_logicrl_wntzruuo_output.log", [0, 1], 49),
        ("verl_logicrl_wntzruuo_killed.wandb", [0], 1),
    ],
)
def test_steps_and_values(file: str, steps: list[int], values: int) -> None:
    store = load_all(LOGS / file).store
    assert store.execute("SELECT DISTINCT step FROM raw_metrics ORDER BY step").fetchall() == [(s,) for s in steps]
    assert store.execute("SELECT count(*) FROM raw_metrics").fetchone() == (values,)


def test_old_names_are_understood() -> None:
    found = audit(LOGS / "verl_logicrl_m950nfkl_output.log")
    signals = {name for (name,) in found.sql("SELECT DISTINCT signal FROM signals")}
    assert {"validation", "reward_trained", "entropy", "grad_norm", "time_step", "response_length_mean"} <= signals
    assert found.document["run"]["facts"]["trainer"]["value"] == "v0"
    assert found.document["verdict"]["outcome"] == "undetermined"


def test_a_killed_run_has_a_torn_end_and_its_config() -> None:
    found = audit(LOGS / "verl_logicrl_wntzruuo_killed.wandb")
    assert sum(p["count"] for p in found.document["problems"]) >= 1
    assert found.sql("SELECT count(*) FROM config")[0][0] > 50
    score = "SELECT step, round(value, 3) FROM metrics WHERE key = 'val/test_score/logic_assignment'"
    assert found.sql(score) == [(0, 0.42)]


def test_the_crash_at_start_is_shown() -> None:
    found = audit(LOGS / "verl_maze_crash_at_start.log")
    assert found.sql("SELECT count(*) FROM raw_metrics") == [(0,)]
    assert found.document["verdict"]["outcome"] == "other"
    assert "NotImplementedError" in str(found.document["run"]["last_error"])


@pytest.mark.parametrize(
    "file",
    [
        "verl_alignx_pdb_session.log",
        "verl_logicrl_68ph1l4m_one_block.wandb",
        "ppo_starpilot_lcoremr1.wandb",
        "events.out.tfevents.1690024186.HOST.5294.0",
    ],
)
def test_nothing_to_judge(file: str) -> None:
    with pytest.raises(NothingToJudge) as caught:
        audit(LOGS / file)
    assert len(str(caught.value).split()) > 8


def test_a_chart_of_several_runs_lists_them() -> None:
    with pytest.raises(AuditError, match="holds 8 runs") as caught:
        audit(LOGS / "wandb_ui_export_chart.csv")
    assert "--run NAME" in str(caught.value)


def test_wandb_and_tensorboard_of_one_run_agree() -> None:
    """Another framework's run: its keys are unknown, and stay queryable."""
    wandb = load_all(LOGS / "ppo_starpilot_lcoremr1.wandb").store
    events = load_all(LOGS / "events.out.tfevents.1690024186.HOST.5294.0").store
    assert wandb.execute("SELECT count(DISTINCT record) FROM raw_metrics").fetchone() == (763,)
    assert events.execute("SELECT count(*) FROM raw_metrics").fetchone() == (6867,)
    query = "SELECT value FROM raw_metrics WHERE key = '{}' ORDER BY record"
    for key in ("Loss/pi", "Rewards/mean_episodes"):
        left, right = (s.execute(query.format(key)).fetchall() for s in (wandb, events))
        assert len(left) == 763
        assert [v for (v,) in left] == pytest.approx([v for (v,) in right], rel=1e-6)
