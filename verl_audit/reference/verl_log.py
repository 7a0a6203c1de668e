"""The files a verl run leaves: console log, the JSONL of the `file` logger, `.hydra/config.yaml`.

v1 trainers log one row a step; fully_async aggregates the updates between two syncs and is one update late: the row of
version n holds the updates (n - 1) k to n k - 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat

import numpy as np
import orjson

from verl_audit.reference.learner import Updated
from verl_audit.reference.loop import Run, Step, Times, Validation
from verl_audit.reference.pool import Group
from verl_audit.reference.settings import Settings
from verl_audit.reference.verl_config import config, config_text
from verl_audit.reference.verl_metrics import (
    Metrics,
    combined,
    data_metrics,
    evictions,
    minibatch_metrics,
    off_policy,
    prompt_lengths,
)

PROJECT = "unit_tests"
Row = tuple[int, Metrics]
_PREFIX = "\x1b[36m({} pid=4242)\x1b[0m "
_NUMPY = re.compile(r"val-|training/num_turns/|num_turns/|training/off_policy/trajectory_")
"""Keys whose values verl prints as numpy scalars."""
TESTING_SECONDS = 1.5
GPU_SHARE = 0.3
"""Model FLOPs utilisation of the actor; a constant of the simulated hardware."""


class VerlLog:
    """Collects the rows of a run."""

    def __init__(self, settings: Settings) -> None:
        """Without rows."""
        self.settings = settings
        self.rows: list[Row] = []
        self.micro: list[Metrics] = []
        """fully_async: updates not yet logged."""
        self.sync_seconds = 0.0
        self.stale_trained = self.enqueued = 0

    # -- observer

    def validated(self, run: Run, step: int, validation: Validation) -> None:
        """Initial validation: a row of its own."""
        self.rows.append((step, validation_metrics(run, validation)))

    def discarded(self, run: Run, group: Group, reasons: list[str], step: int) -> None:
        """Counted by the buffer."""

    def synced(self, run: Run, version: int, began: float, seconds: float) -> None:
        """Timed by the step."""

    def stepped(self, run: Run, step: Step) -> None:
        """Log the step as its trainer does."""
        if self.settings.trainer == "fully_async":
            self._fully_async(run, step)
        else:
            self.rows.append((step.number, v1_row(run, step)))

    def ended(self, run: Run) -> None:
        """fully_async: the last update comes in a second row of the last version."""
        if self.micro:
            self.rows.append((self.settings.updates // self.settings.updates_per_sync, aggregated(self.micro)))

    # -- fully_async

    def _fully_async(self, run: Run, step: Step) -> None:
        last = len(step.updated) - 1
        for j, done in enumerate(step.updated):
            made = self._micro_step(run, step, j, done)
            if j < last:
                self.micro.append(made)
        if self.micro:
            self.rows.append((step.number, aggregated(self.micro)))
        self.micro = [made]
        self.rows.append((step.number, self._rollouter(run, step)))
        if step.validation is not None:
            self.rows.append((step.number, validation_metrics(run, step.validation)))

    def _micro_step(self, run: Run, step: Step, j: int, done: Updated) -> Metrics:
        s, version = self.settings, step.number - 1
        batch, times = done.trajectories, step.micro[j]
        labels = np.array(run.learner.labels)
        newest = labels[batch.last_source()]
        spans = newest - batch.attempt
        self.stale_trained += int((version - newest >= 1).sum())
        seconds = batch.ended - batch.first_token + batch.pace
        made = minibatch_metrics(s, done) | data_metrics(s, [done]) | _timing(run, [done], times, times.step)
        if step.number > 1 and j == 0:
            made["timing_s/timing_s/param_sync"] = self.sync_seconds
        self.sync_seconds = step.times.update_weights
        points = {"tp50": 50, "tp95": 95, "tp99": 99}
        made |= {
            "training/global_step": (step.number - 1) * s.updates_per_sync + j + 1,
            "training/epoch": _epoch(s, (step.number - 1) * s.updates_per_sync + j + 1),
            "fully_async/total_wait_time": times.gen,
            "fully_async/partial/total_partial_num": int((spans != 0).sum()),
            "fully_async/partial/partial_ratio": float((spans != 0).mean()),
            "fully_async/partial/max_partial_span": int(np.abs(spans).max()),
            "fully_async/processing_time/avg": float(seconds.mean()),
            "fully_async/processing_time/max": float(seconds.max()),
            "fully_async/processing_time/min": float(seconds.min()),
            **{f"fully_async/processing_time/{n}": float(np.percentile(seconds, p)) for n, p in points.items()},
            "fully_async/count/current_param_version": version,
            "fully_async/count/stale_trajectory_processed": self.stale_trained,
            "fully_async/count/dropped_stale_samples": run.buffer.overflowed,
            "fully_async/count/staleness_samples": run.buffer.left_over + run.buffer.since_sync,
            "fully_async/count/total_generated_samples": run.engine.submitted - len(run.buffer.unfinished),
            "fully_async/monitor/active_tasks_size": len(run.buffer.unfinished),
            "fully_async/monitor/queue/mq_queue_size": len(run.buffer.finished),
            "fully_async/monitor/queue/pending_queue_size": 0,
            "fully_async/static/max_required_samples": run.buffer.most_out,
            "fully_async/static/required_samples": s.groups,
            "fully_async/static/staleness_threshold": s.staleness_share,
            "fully_async/static/max_queue_size": s.queue_groups or run.buffer.most_out,
        }
        return made

    def _rollouter(self, run: Run, step: Step) -> Metrics:
        before, self.enqueued = self.enqueued, run.engine.submitted - len(run.buffer.unfinished)
        busy = min(1.0, len(run.engine.running) / max(1, self.settings.slots // 4))
        window = run.engine.now - step.times.began
        return {
            "fully_async/rollouter/idle_ratio": 1.0 - busy,
            "fully_async/rollouter/active_time": busy * window,
            "fully_async/rollouter/version_time": window,
            "fully_async/rollouter/step_generated_samples": self.enqueued - before,
        }

    # -- files

    def write(self, out: Path, experiment: str, logs: Sequence[str] = ("console", "file")) -> None:
        """Write what was asked for into a new directory."""
        made = config(self.settings, PROJECT, experiment)
        (out / ".hydra").mkdir(parents=True)
        (out / ".hydra" / "config.yaml").write_text(config_text(made), encoding="utf-8")
        if "file" in logs:
            (out / PROJECT).mkdir()
            lines = b"".join(orjson.dumps({"step": n, "data": row}) + b"\n" for n, row in self.rows)
            (out / PROJECT / f"{experiment}.jsonl").write_bytes(lines)
        if "console" in logs:
            (out / "console.log").write_text(self._console(pformat(made, sort_dicts=True)), encoding="utf-8")

    def _console(self, configuration: str) -> str:
        runner = {"fully_async": "FullyAsyncTrainer"}.get(self.settings.trainer, "TaskRunnerV1")
        lines = [*configuration.splitlines(), "[validate_config] All configuration checks passed successfully!"]
        lines += [" - ".join([f"step:{n}", *(f"{k}:{_shown(k, v)}" for k, v in row.items())]) for n, row in self.rows]
        prefix = _PREFIX.format(runner)
        return "".join(f"{prefix}{line}\n" for line in lines)


def _shown(key: str, value: float | int) -> str:
    """A value as `repr` prints it there, numpy wrappers included."""
    if not _NUMPY.match(key):
        return repr(value)
    return f"np.{'float64' if isinstance(value, float) else 'int64'}({value!r})"


def v1_row(run: Run, step: Step) -> Metrics:
    """One row of a v1 trainer."""
    s = run.settings
    tokens = _tokens(s, step.updated)
    made: Metrics = {f"global_seqlen/{n}": float(tokens) for n in ("min", "max")}
    made |= {"global_seqlen/minmax_diff": 0.0}
    made |= {f"global_seqlen/{n}": float(tokens) for n in ("balanced_min", "balanced_max", "mean")}
    made |= combined([minibatch_metrics(s, done) for done in step.updated])
    made |= {"perf/mfu/actor": GPU_SHARE * step.times.update_actor / step.times.step}
    if step.validation is not None:
        made |= validation_metrics(run, step.validation)
    made |= {"training/global_step": step.number, "training/epoch": _epoch(s, step.number * s.updates_per_sync)}
    made |= data_metrics(s, step.updated)
    made |= _timing(run, step.updated, step.times, step.times.step, tested=step.validation is not None)
    if s.trainer == "separate_async" and (step.number - 1) % s.test_freq == 0:
        made["timing_s/switch_to_trainer"] = 0.03
    made |= {"training/num_turns/mean": 2.0, "training/num_turns/max": 2, "training/num_turns/min": 2}
    made |= off_policy(run.learner, step.number - 1, [u.trajectories for u in step.updated])
    return made | evictions(run.buffer.counts)


def _epoch(settings: Settings, updates: int) -> int:
    """Passes over the training data before this update."""
    return (updates - 1) * settings.groups // settings.prompts


def _tokens(settings: Settings, updated: Sequence[Updated]) -> int:
    batches = [u.trajectories for u in updated]
    return sum(int(b.length.sum() + prompt_lengths(settings, b.prompt_class).sum()) for b in batches)


def _timing(run: Run, updated: Sequence[Updated], times: Times, total: float, *, tested: bool = False) -> Metrics:
    """Timers and throughput, `compute_timing_metrics` and `compute_throughout_metrics`."""
    s, tokens = run.settings, _tokens(run.settings, updated)
    response = sum(int(u.trajectories.length.sum()) for u in updated)
    names = ["gen", "old_log_prob", "adv", "update_actor"]
    names += [] if s.trainer == "fully_async" else ["update_weights"]
    made: Metrics = {f"timing_s/{name}": float(getattr(times, name)) for name in names}
    made["timing_s/step"] = total
    if tested:
        made["timing_s/testing"] = TESTING_SECONDS
    made |= {f"timing_per_token_ms/{n}": 1000 * getattr(times, n) / tokens for n in ("adv", "update_actor")}
    made["timing_per_token_ms/gen"] = 1000 * times.gen / response
    gpus = 1 + (0 if s.trainer in ("sync", "colocate_async") else s.replicas)
    return made | {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": total,
        "perf/throughput": tokens / (total * gpus),
    }


def validation_metrics(run: Run, validation: Validation) -> Metrics:
    """Scores of short and of long prompts, as two data sources."""
    made: Metrics = {}
    long = run.task.long[validation.prompt_class]
    for name, which in (("short", ~long), ("long", long)):
        source, passed = f"{PROJECT}_{name}", float(validation.passed[which].mean(dtype=np.float64))
        reward = float(validation.reward[which].mean(dtype=np.float64))
        needed = float(run.task.needed[validation.prompt_class[which]].mean())
        made |= {
            f"val-aux/{source}/reward/mean@1": reward,
            f"val-aux/{source}/score/mean@1": reward,
            f"val-core/{source}/acc/mean@1": passed,
            f"val-aux/{source}/n/mean@1": needed,
            f"val-aux/{source}/acc_success_only/mean@1": passed,
        }
    return made | {"val-aux/num_turns/min": 2, "val-aux/num_turns/max": 2, "val-aux/num_turns/mean": 2.0}


def aggregated(micro: Sequence[Metrics]) -> Metrics:
    """The updates between two rows as verl's `MetricsAggregator` reduces them, its misreadings included.

    `timing_per_token_ms` holds "min" and takes the smallest.
    """
    made: Metrics = {}
    for key in dict.fromkeys(key for part in micro for key in part):
        values = [part[key] for part in micro if key in part]
        made[key] = _fully_async_reduced(key, values)
    made["fully_async/trainer/idle_ratio"] = made["timing_s/gen"] / made["timing_s/step"]
    return made


def _fully_async_reduced(key: str, values: Sequence[float | int]) -> float | int:
    last = ("training/global_step", "fully_async/count/total_generated_samples", "training/epoch")
    counters = ("stale_trajectory_processed", "dropped_stale_samples", "current_param_version")
    if key in last or key.endswith(counters):
        return values[-1]
    if key.startswith("timing_s/"):
        return sum(values)
    for words, reduce in ((("mean", "avg"), _average), (("max",), max), (("min",), min), (("sum", "total"), sum)):
        if any(word in key for word in words):
            return reduce(values)
    return _average(values)


def _average(values: Sequence[float | int]) -> float:
    return float(sum(values)) / len(values)
