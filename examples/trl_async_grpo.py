"""Traces from TRL's asynchronous GRPO trainer (trl.experimental.async_grpo, as of TRL 1.16).

    trainer = AsyncGRPOTrainer(...)
    record(trainer, "run/audit")
    trainer.train()

The trainer takes samples from a queue and drops those that are too many versions old; the queue and the weight
transfer are looked at on their way. What TRL loses before the queue is not seen.
"""

import time

import numpy as np
from transformers import TrainerCallback

from verl_audit.record import TraceWriter


def record(trainer, directory):
    """Look on from a trainer that has been made and not begun; on the main process."""
    writer = TraceWriter(directory, run=trainer.args.run_name, updates_per_version=trainer.args.weight_sync_steps)
    trainer.rollout_queue = queue = Queue(trainer.rollout_queue, trainer, writer)
    if trainer.weight_transfer is not None:
        trainer.weight_transfer = Transfer(trainer.weight_transfer, trainer, writer)
    trainer.add_callback(Steps(writer, queue))
    return writer


class Steps(TrainerCallback):
    """A file a step."""

    def __init__(self, writer, queue):
        self.writer, self.queue = writer, queue

    def on_step_end(self, args, state, control, **kwargs):
        self.writer.buffer([{"step": state.global_step, "wait_s": self.queue.waited}])
        self.queue.waited = 0.0
        self.writer.step_done(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self.writer.close()


class Queue:
    """The trainer's queue of samples; each that leaves it is a row."""

    def __init__(self, queue, trainer, writer):
        self.queue, self.trainer, self.writer = queue, trainer, writer
        self.sessions, self.waited = {}, 0.0

    def __getattr__(self, name):
        return getattr(self.queue, name)

    def get(self, *args, **kwargs):
        began = time.monotonic()
        sample = self.queue.get(*args, **kwargs)
        self.waited += time.monotonic() - began
        self.writer.trajectories([self.row(sample, self.trainer.state.global_step + 1)])
        return sample

    def row(self, sample, step):
        version = self.trainer.model_version
        is_stale = version - sample.model_version > self.trainer.args.max_staleness  # the trainer's own rule
        session = self.sessions[sample.group_id] = self.sessions.get(sample.group_id, -1) + 1
        mask = np.asarray(sample.completion_mask, bool)
        prompt = int(mask.argmax()) if mask.any() else len(mask)
        return {
            "group": str(sample.group_id),
            "session": session,
            "fate": "stale" if is_stale else "trained",
            "decided_step": step,
            "first_version": sample.model_version,
            "train_version": None if is_stale else version,
            "prompt_length": prompt,
            "response_length": len(mask) - prompt,
            "loss_mask": mask[prompt:],
            "behave_logp": np.asarray(sample.old_log_probs)[prompt:],
            "advantage": float(sample.advantage),
            "reward": sample.metrics.get("reward"),
        }


class Transfer:
    """The way of the weights to the engine: seconds by phase, tensors and bytes."""

    def __init__(self, transfer, trainer, writer):
        self.transfer, self.trainer, self.writer, self.seen = transfer, trainer, writer, {}

    def __getattr__(self, name):
        return getattr(self.transfer, name)

    def pause(self):
        self.seen = {"abort_s": self._timed(self.transfer.pause), "payload_count": 0, "payload_bytes": 0}

    def send_weights(self, weights):
        self.seen["transfer_s"] = self._timed(lambda: self.transfer.send_weights(self._counted(weights)))

    def resume(self):
        self.seen["resume_s"] = self._timed(self.transfer.resume)
        # The trainer counts the version up when the engine has resumed.
        self.writer.syncs(
            [{"version": self.trainer.model_version + 1, "step": self.trainer.state.global_step, **self.seen}]
        )

    def _counted(self, weights):
        for name, tensor in weights:
            self.seen["payload_count"] += 1
            self.seen["payload_bytes"] += tensor.nbytes
            yield name, tensor

    @staticmethod
    def _timed(call):
        began = time.monotonic()
        call()
        return time.monotonic() - began
