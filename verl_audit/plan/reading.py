"""What one run shows of its work: timers, cards, batch, lengths and slots, each with what it leaves open."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from verl_audit.errors import AuditError
from verl_audit.ingest.detect import plain
from verl_audit.measure.run import RunData, Series
from verl_audit.measure.run import load as load_run_data
from verl_audit.measure.stats import ar1_mean
from verl_audit.pipeline import Loaded
from verl_audit.plan.profile import ASSUMED_CAP, ASSUMED_SIGMA, ASSUMED_WAVES, Given, unknown_lengths
from verl_audit.plan.tail import Durations, lognormal, sigma_of
from verl_audit.plan.traced import Traced, lengths, traced
from verl_audit.plan.workload import Unknown

MIN_STEPS = 8
WIDEST = 0.9
"""Half width of a timer's interval over its value, at most: of a few wild steps no lower bound is known."""


class Reading:
    """One run's timers, facts and configuration, per cycle (one row of its log)."""

    def __init__(self, loaded: Loaded, index: int, given: Given) -> None:
        """The audited run (0) or a baseline (from 1); AuditError where it has too few timed steps."""
        self.source = (loaded.run, *loaded.baselines)[index]
        self.data: RunData = load_run_data(loaded.store, self.source.run, plain(self.source.facts))
        self.store, self.given, self.unknown = loaded.store, given, list[Unknown]()
        self.trainer = self.data.facts.get("trainer")
        self.steps = self._settled(self.data.get("time_step"))
        if len(self.steps) < MIN_STEPS:
            raise AuditError(f"{self.data.name}: {len(self.steps)} steps with a step time; a profile needs {MIN_STEPS}")

    def _settled(self, series: Series) -> Series:
        """Without the first tenth, in which engines warm up and queues fill.

        Nor the last row of fully_async: a run that ends logs there the updates left over since the last sync.
        """
        if len(series) < 2:
            return series
        first, last = series.step[max(1, len(series) // 10)], series.step[-1]
        return series.at(lambda s: (s >= first) & ((s < last) | (self.trainer != "fully_async")))

    def mean(self, *names: str) -> float:
        """Sum of a timer over the judged steps, per step; 0 where it was never logged."""
        series = self.data.get(*names)
        inside = series.at(lambda s: np.isin(s, self.steps.step)).value
        return float(inside.sum() / len(self.steps))

    @cached_property
    def traced(self) -> Traced | None:
        """What traces with times tell of the rollout pool."""
        return traced(self.store, self.source.run, float(self.steps.step[0]))

    @property
    def sync(self) -> float:
        """Seconds of one weight sync."""
        if self.given.sync is not None:
            return self.given.sync
        value = self._settled(self.data.get("time_update_weights")).value
        if not len(value):
            self.unknown.append(Unknown("weight-sync time", "0", "timing_s/update_weights is logged by verl"))
        return float(value.mean()) if len(value) else 0.0

    def fact(self, name: str, given: float | None, taken: float, what: str) -> float:
        """A number from the user, the configuration, or assumed and said to be."""
        found = given if given is not None else self.data.number(name)
        if found is None:
            self.unknown.append(Unknown(what, f"{taken:g}", f"the configuration (.hydra); --set fact.{name}=N"))
        return taken if found is None else float(found)

    @property
    def updates(self) -> float:
        """Updates of one row of the log."""
        given = None if self.given.updates is None else float(self.given.updates)
        return self.fact("updates_per_version", given, 1.0, "updates per weight sync")

    def setting(self, *keys: str) -> float | None:
        """The first of these configuration values that is a number above 0."""
        for key in keys:
            try:
                value = float(self.source.config[key][0])
            except (KeyError, ValueError):
                continue
            if value > 0:
                return value
        return None

    def cards(self, given: int | None, *places: str) -> float | None:
        """nodes x GPUs per node of the first place that has both."""
        if given is not None:
            return float(given)
        for place in places:
            nodes, each = self.setting(f"{place}.nnodes"), self.setting(f"{place}.n_gpus_per_node")
            if nodes and each:
                return nodes * each
        return None

    def durations(self) -> Durations:
        """Relative durations: of traces, else lengths of traces or dumps, else a log-normal of the logged lengths."""
        if self.given.durations is not None:
            return self.given.durations
        if self.traced is not None:
            return self.traced.durations
        return lengths(self.store, self.source.run, float(self.steps.step[0])) or self._fitted_durations()

    def _fitted_durations(self) -> Durations:
        mean, largest = self.mean("response_length_mean"), self.mean("response_length_max")
        count, limit = self.data.number("samples_per_step"), self.data.number("response_limit")
        if not mean or not largest or not count:
            self.unknown.append(unknown_lengths())
            return lognormal(ASSUMED_SIGMA, ASSUMED_CAP)
        cut = bool(limit) and largest >= 0.98 * (limit or 0.0)
        sigma = sigma_of(largest / mean, count)
        self.unknown.append(
            Unknown(
                "spread of durations",
                f"log-normal, sigma {sigma:.2f} from mean and largest length"
                + (" (the limit cuts it: at least)" if cut else ""),
                "trainer.rollout_data_dir, or --lengths FILE",
            )
        )
        return lognormal(sigma, largest / mean)

    def slots(self, rollout_cards: float, under_way: float) -> float:
        """Trajectories at a time on one rollout card: as given, as traced, else max_num_seqs / TP.

        Never more than are under way, unless given: how fast a card is with more of them, the run does not show.
        """
        most = under_way / rollout_cards
        if self.given.slots is not None:
            return self.given.slots
        if self.traced is not None:
            return self._traced_slots(self.traced, rollout_cards)
        place = "actor_rollout_ref.rollout"
        seqs = self.setting(f"{place}.max_num_seqs")
        if seqs is None:
            self.unknown.append(
                Unknown("trajectories at a time", f"{most / ASSUMED_WAVES:g} a card", "rollout.max_num_seqs; --slots")
            )
            return most / ASSUMED_WAVES
        self.unknown.append(
            Unknown(
                "KV cache", "holds max_num_seqs trajectories", "the engine's `Running: N reqs`; --slots if it is fewer"
            )
        )
        return min(seqs / (self.setting(f"{place}.tensor_model_parallel_size") or 1.0), most)

    def _traced_slots(self, seen: Traced, cards: float) -> float:
        if not seen.queued:
            self.unknown.append(
                Unknown(
                    "trajectories at a time",
                    f"{seen.at_once / cards:.4g} a card, as many as ran: none waited for a slot",
                    "--slots, if the engine holds more at the same speed",
                )
            )
        return seen.at_once / cards

    def noise(self) -> float:
        """Coefficient of variation of step times."""
        values = self.steps.value
        return float(values.std(ddof=1) / values.mean())

    def interval(self, value: float) -> tuple[float, float]:
        """A 95 % interval of a timer that is the most of a step, from the spread of the step times."""
        found = ar1_mean(self.steps.value)
        assert found is not None
        half = min((found.high - found.low) / 2 / found.value, WIDEST)
        return value * (1 - half), value * (1 + half)
