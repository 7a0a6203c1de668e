"""Low-precision rounding, as a rollout engine applies it to weights and activations.

A quantised engine stores `round(x / s) * s` with a scale s that maps the largest magnitude to the largest number of
the format: one scale for the whole tensor, or one for each output channel. The trainer computes with the unrounded
values, so both give different log-probs for the same weights. That difference is the train-inference mismatch.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from verl_audit.errors import AuditError

Floats: TypeAlias = NDArray[np.float32]
Format = Literal["fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6", "fp4"]
Scaling = Literal["tensor", "channel"]
LARGEST = {"bf16": 0.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp6": 7.5, "fp4": 6.0}
"""Largest finite number of each format (OCP 8-bit and microscaling formats); bf16 is not scaled."""
FORMATS: tuple[Format, ...] = get_args(Format)
_TYPES = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp6": "float6_e2m3fn",
    "fp4": "float4_e2m1fn",
}


def round_to(x: Floats, form: Format, scaling: Scaling = "channel") -> Floats:
    """`x` as the format holds it; the last axis of `x` is the channel. bf16 has the range of fp32 and needs no scale.

    Raises `AuditError` when ml_dtypes, which knows the formats, is not installed.
    """
    if form == "fp32":
        return x
    kind, largest = _type(form)
    if form == "bf16":
        return x.astype(kind).astype(np.float32)
    over = tuple(range(x.ndim - 1)) if scaling == "channel" else None
    scale = np.abs(x).max(axis=over, keepdims=True) / largest
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    rounded: Floats = (x / scale).astype(kind).astype(np.float32) * scale
    return rounded


def _type(form: Format) -> tuple[np.dtype[np.generic], float]:
    try:
        import ml_dtypes  # noqa: PLC0415  (an optional dependency: only rounding needs it)
    except ImportError:
        raise AuditError(
            "the reference loop rounds with ml_dtypes, which is not installed: pip install 'verl-audit[reference]'"
        ) from None
    kind = np.dtype(getattr(ml_dtypes, _TYPES[form]))
    return kind, LARGEST[form]
