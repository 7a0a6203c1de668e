"""The reference loop: a small asynchronous RL run whose true cause of slow learning is known.

    from verl_audit.reference import scenarios, simulate

    simulate("stale_bypass", env="small", seed=0, out="run")

Begin reading at `loop.py`. Then: `task.py` what is learned, `policy.py` by what, `numerics.py` and `router.py` how the
rollout engine computes differently, `clock.py` when it answers, `buffer.py` who is trained on, `loss.py` how,
`learner.py` the update and what a sync delivers. `verl_log.py`, `verl_metrics.py` and `verl_config.py` write what verl
writes, `traces.py` per-trajectory traces, `truth.py` how fast it really learned. Nothing here imports the rooms that
diagnose, and they import nothing from here.
"""

from verl_audit.reference.scenarios import Environment, Scenario, environments, scenario, scenarios, settings_of
from verl_audit.reference.simulate import simulate, truth_path
from verl_audit.reference.traces import TraceOptions, trace_options

__all__ = [
    "Environment",
    "Scenario",
    "TraceOptions",
    "environments",
    "scenario",
    "scenarios",
    "settings_of",
    "simulate",
    "trace_options",
    "truth_path",
]
