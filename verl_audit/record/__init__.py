"""Writes traces from inside a training job, and never harms the job. Importing it loads numpy and nothing heavier."""

from verl_audit.record.writer import TraceWriter

__all__ = ["TraceWriter"]
