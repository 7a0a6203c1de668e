"""verl-audit: why reward got slower after going asynchronous, told from the files a run left on disk.

from verl_audit import audit, load_rules

result = audit("run_dir", baselines=["sync_run_dir"])
result.document["verdict"]["sentence"]
load_rules().evaluate({"sync_share": 0.2, "sync_seconds": 31.0})  # a monitoring job, every step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_audit._version import __version__

if TYPE_CHECKING:
    from verl_audit.diagnose.evaluate import Finding, RuleSet
    from verl_audit.diagnose.rules import RuleError
    from verl_audit.errors import AuditError, NothingToJudge
    from verl_audit.pipeline import Audit, audit, load_rules
    from verl_audit.settings import Settings, read_settings

__all__ = [
    "Audit",
    "AuditError",
    "Finding",
    "NothingToJudge",
    "RuleError",
    "RuleSet",
    "Settings",
    "__version__",
    "audit",
    "load_rules",
    "read_settings",
]
_HOME = {
    "Audit": "pipeline",
    "AuditError": "errors",
    "Finding": "diagnose.evaluate",
    "NothingToJudge": "errors",
    "RuleError": "diagnose.rules",
    "RuleSet": "diagnose.evaluate",
    "Settings": "settings",
    "audit": "pipeline",
    "load_rules": "pipeline",
    "read_settings": "settings",
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that `import verl_audit` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'verl_audit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"verl_audit.{_HOME[name]}"), name)
