"""Before a run: what its configuration will let a later audit decide, and what it gets wrong."""

from verl_audit.preflight.decide import Preflight, preflight

__all__ = ["Preflight", "preflight"]
