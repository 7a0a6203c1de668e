"""A plain asynchronous loop that records itself: python examples/plain_loop.py DIRECTORY.

A bandit with a softmax policy stands in for the model. Rollouts lag two versions, groups older than three steps are
dropped, slow ones first; all of it is in the traces.
"""

import sys

import numpy as np

from verl_audit.record import TraceWriter

ARMS, GROUPS, SIZE, LAG, OLDEST = 8, 16, 4, 2, 3


def main(directory: str, steps: int = 30) -> None:
    """Train for some steps; the best arm takes longest to pull."""
    rng = np.random.default_rng(0)
    writer = TraceWriter(directory, run="plain-loop", updates_per_version=1, log_prob_sample=1.0)
    logits, history = np.zeros(ARMS), [np.zeros(ARMS)]
    waiting = []
    for step in range(1, steps + 1):
        version = max(0, step - 1 - LAG)
        waiting += [sampled(rng, history[version], version, step, f"{step}-{g}") for g in range(GROUPS)]
        ready = [group for group in waiting if group["done"] <= step]
        waiting = [group for group in waiting if group["done"] > step]
        for group in ready:
            age = step - group["step"] + 1
            fate = "stale" if age > OLDEST else "trained"
            writer.trajectories(rows(group, fate, step, logits))
            if fate == "trained":
                logits = logits + 0.1 * gradient(group, logits)
        history.append(logits.copy())
        writer.syncs([{"version": step, "step": step}])
        writer.buffer([{"step": step, "running": len(waiting), "finished": len(ready)}])
        writer.step_done(step)
    writer.trajectories(row for group in waiting for row in rows(group, "in_flight", steps, logits))
    writer.step_done(steps)
    writer.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probs of the arms."""
    return logits - np.log(np.exp(logits).sum())


def sampled(rng: np.random.Generator, logits: np.ndarray, version: int, step: int, name: str) -> dict:
    """A group of arms; high arms pay more and take longer."""
    arms = rng.choice(ARMS, SIZE, p=np.exp(log_softmax(logits)))
    return {"name": name, "arms": arms, "version": version, "step": step, "done": step + int(arms.max()) // 2,
            "behave": log_softmax(logits)[arms], "reward": arms / ARMS}  # fmt: skip


def gradient(group: dict, logits: np.ndarray) -> np.ndarray:
    """REINFORCE with the group's mean as baseline."""
    advantage = group["reward"] - group["reward"].mean()
    return sum(
        a * (np.eye(ARMS)[arm] - np.exp(log_softmax(logits))) for a, arm in zip(advantage, group["arms"], strict=True)
    )


def rows(group: dict, fate: str, step: int, logits: np.ndarray) -> list[dict]:
    """One row of the trace per trajectory; arm k is a response of k + 1 tokens, of which the first counts."""
    made = []
    for session, (arm, behave, reward) in enumerate(zip(group["arms"], group["behave"], group["reward"], strict=True)):
        length = int(arm) + 1
        row = {"group": group["name"], "session": session, "fate": fate, "reasons": [fate], "response_length": length,
               "submit_step": group["step"], "submit_version": group["version"], "first_version": group["version"],
               "last_version": group["version"], "reward": reward}  # fmt: skip
        if fate != "in_flight":
            row["decided_step"] = step
        if fate == "trained":
            spread = np.zeros(length)
            row.update(train_version=step - 1, loss_mask=np.arange(length) == 0, behave_logp=spread + behave,
                       prox_logp=spread + log_softmax(logits)[arm])  # fmt: skip
        made.append(row)
    return made


if __name__ == "__main__":
    main(sys.argv[1])
