"""What stands between rollout and trainer: who is trained on, who is thrown away, who is asked next.

verl v1: a batch of prompts is submitted in every step, after `warmup` batches ahead of the first. A finished group
is evicted when it failed, when its rewards show no variance (DAPO), or, with strategy `drop`, when its prompt is older
than the threshold: `step - submitted + 1 > threshold`. Every evicted group is replaced by a new prompt. With `wait`
nothing is dropped; the trainer waits while any unfinished prompt is that old. The oldest finished groups are trained.
All of it holds for separate_async and colocate_async alike.

AReaL admits prompts while `(eta + version + 1) * batch` exceeds those submitted so far, and never drops.

verl fully_async submits while fewer than `(1 + share) * batch` prompts are out since the last sync and the queue is
not full, takes finished groups in order of completion, and a full queue discards its oldest. The trainer empties the
queue into its batch one by one, so nothing is discarded while it waits. What was discarded is not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verl_audit.reference.clock import Engine
from verl_audit.reference.numerics import Floats
from verl_audit.reference.pool import Group
from verl_audit.reference.settings import Settings

Reasons = dict[str, list[Group]]


@dataclass
class Counts:
    """What happened since the last step was logged."""

    stale_ages: list[int] = field(default_factory=list)
    filtered: int = 0
    failed: int = 0
    waited: float = 0.0
    waits: list[float] = field(default_factory=list)


class Buffer:
    """Finished groups, and the rules for them. `discarded` is told each evicted group with all its reasons."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        prompts: Callable[[int], NDArray[np.int64]],
        rewards: Callable[[Group], Floats],
        discarded: Callable[[Group, list[str], int], None],
    ) -> None:
        """`prompts(n)` draws prompt classes, `rewards(group)` scores a finished group."""
        self.settings, self.engine = settings, engine
        self.prompts, self.rewards, self.discarded = prompts, rewards, discarded
        self.finished: list[Group] = []
        self.unfinished: dict[int, Group] = {}
        self.counts = Counts()
        self.overflowed = 0
        self.version = 0
        self.left_over = 0
        """fully_async: groups submitted before the last sync that were not trained by then."""
        self.since_sync = 0
        self.accepted = 0
        """Groups asked and not evicted."""

    # -- submission

    def submit(self, n: int, step: int) -> None:
        """Ask `n` new prompts."""
        if n > 0:
            self.since_sync += n
            self.accepted += n
            made = self.engine.submit(self.prompts(n), step, self.version)
            self.unfinished.update((group.number, group) for group in made)

    def admit(self, step: int) -> None:
        """Ask as many as the framework's rule allows at this moment (AReaL and fully_async; verl v1 asks per step)."""
        s = self.settings
        if s.admission >= 0:
            self.submit((s.admission + self.version + 1) * s.group_batch - self.accepted, step)
        elif s.trainer == "fully_async" and not (s.queue and len(self.finished) >= s.queue_groups):
            self.submit(self.most_out - self.left_over - self.since_sync, step)

    @property
    def most_out(self) -> int:
        """fully_async: `max_required_samples`."""
        return int((1 + self.settings.staleness_share) * self.settings.group_batch)

    def synced(self, version: int) -> None:
        """Start counting anew: what is still out now is left over."""
        self.version = version
        self.left_over, self.since_sync = len(self.finished) + len(self.unfinished), 0

    # -- completion

    def arrive(self, groups: list[Group], step: int, collecting: int = 0) -> None:
        """Take completed groups in; a full queue discards the oldest. `collecting`: how many the trainer waits for."""
        for group in groups:
            del self.unfinished[group.number]
            self.finished.append(group)
        limit = self.settings.queue_groups
        while self.settings.trainer == "fully_async" and limit and len(self.finished) > limit + collecting:
            self.overflowed += 1
            self._discard([self.finished[0]], ["stale"], step)

    def _discard(self, groups: list[Group], reasons: list[str], step: int) -> None:
        for group in groups:
            self.finished.remove(group)
            self.discarded(group, reasons, step)
            self.engine.release(group)

    def pass_time(self, seconds: float, step: int) -> None:
        """Let rollouts go on while the trainer computes."""
        self.arrive(self.engine.pass_time(seconds), step)

    # -- eviction and choice

    def sample(self, step: int, n: int) -> list[Group]:
        """The next `n` groups; waits for completions, and evicts and refills on every look."""
        began, s = self.engine.now, self.settings
        self._evict(step)
        while len(self.finished) < n or self._must_wait(step):
            if not self.engine.running:
                raise RuntimeError("the trainer waits and nothing is being generated")
            group = self.engine.finish_next()
            if group is not None:
                self.arrive([group], step, n)
                self._evict(step)
        if s.order == "oldest" and s.trainer != "fully_async":
            self.finished.sort(key=lambda g: (g.step, g.number))
        taken, self.finished = self.finished[:n], self.finished[n:]
        self.counts.waits.append(self.engine.now - began)
        self.counts.waited += self.engine.now - began
        return taken

    def _must_wait(self, step: int) -> bool:
        s = self.settings
        if s.strategy != "wait" or not s.threshold or not s.is_async:
            return False
        return any(step - g.step + 1 >= s.threshold for g in self.unfinished.values())

    def _evict(self, step: int) -> None:
        """Evict the union of the three reasons, count each, and refill once per group."""
        s = self.settings
        drops = s.strategy == "drop" and s.threshold > 0 and s.v1_async and s.admission < 0
        gone = 0
        for group in list(self.finished):
            reasons = ["stale"] if drops and step - group.step + 1 > s.threshold else []
            reasons += ["failed"] if group.failed else []
            reasons += ["filtered"] if s.filter_groups and not group.failed and self._flat(group) else []
            if reasons:
                self.counts.stale_ages += [step - group.step + 1] if "stale" in reasons else []
                self.counts.failed += "failed" in reasons
                self.counts.filtered += "filtered" in reasons
                self._discard([group], reasons, step)
                gone += 1
        if s.admission < 0 and s.trainer != "fully_async":
            self.submit(gone, step)
        else:
            self.since_sync -= gone
            self.accepted -= gone
            self.admit(step)

    def _flat(self, group: Group) -> bool:
        if group.flat is None:
            group.flat = float(np.ptp(self.rewards(group))) == 0.0
        return group.flat
