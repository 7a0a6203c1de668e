"""The recorder for verl's v1 trainers (sync, colocate_async, separate_async), as a custom sampler.

    trainer.v1.sampler.custom_sampler.path=pkg://verl_audit.record.verl
    trainer.v1.sampler.custom_sampler.name=AuditReplayBufferAsync      # sync: AuditReplayBuffer

The samplers select, wait and evict exactly as verl's own; unlike other custom samplers they keep the DAPO filter and
the refill of failed groups. Options, each as `+trainer.v1.sampler.sampler_kwargs.NAME=VALUE`: `audit_dir` (default:
`VERL_AUDIT_DIR`, else `audit` below `trainer.default_local_dir`), `log_prob_sample` (0.05), `limit_mb` (128).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

SAMPLERS = ("AuditReplayBuffer", "AuditReplayBufferAsync")


def __getattr__(name: str) -> Any:
    """The samplers; verl is imported when one is asked for."""
    if name in SAMPLERS:
        return getattr(import_module("verl_audit.record.verl_sampler"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
