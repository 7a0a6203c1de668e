"""Errors a caller is meant to see: each message says what to do next."""


class AuditError(Exception):
    """Bad usage or unreadable input (exit code 2)."""


class NothingToJudge(AuditError):
    """The input was read and holds nothing that a rule could use (exit code 3)."""
