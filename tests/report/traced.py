"""A small tree of traces made up for tests, in the shape that an audit with traces has."""

from __future__ import annotations

from typing import Any


def traces() -> dict[str, Any]:
    """Long groups are evicted, the loss grows with the lag, and half of it is there at lag 0."""
    return {
        "level": "traces",
        "rows": 5200,
        "ledger": {
            "unit_rows": [
                _fate("trained", 960, 3840, 410_000, 106.8),
                _fate("stale", 250, 1000, 240_000, 240.0),
                _fate("filtered", 60, 240, 21_000, 87.5),
                _fate("failed", 10, 40, None, None),
            ],
            "generated": {"groups": 1300, "trajectories": 5200, "tokens": 690_000},
            "residual": {"groups": 20, "trajectories": 80, "tokens": 19_000},
        },
        "survival": [
            _bin("length", 0, 100, 400, 0.97, 0.95, 0.985),
            _bin("length", 100, 200, 500, 0.86, 0.83, 0.89),
            _bin("length", 200, 400, 300, 0.41, 0.36, 0.47),
            _bin("length", 400, 800, 80, 0.1, 0.05, 0.19),
            _bin("difficulty", 0.0, 0.5, 600, 0.6, 0.56, 0.64),
            _bin("difficulty", 0.5, 1.0, 680, 0.9, 0.87, 0.92),
        ],
        "per_lag": [
            {"lag": 0, "tokens": 90_000, "mean_abs_diff": 0.011, "ess": 0.99, "clipped_share": 0.0},
            {"lag": 1, "tokens": 210_000, "mean_abs_diff": 0.024, "ess": 0.97, "clipped_share": 0.004},
            {"lag": 2, "tokens": 90_000, "mean_abs_diff": 0.041, "ess": 0.93, "clipped_share": 0.013},
            {"lag": 3, "tokens": 20_000, "mean_abs_diff": 0.066, "ess": 0.86, "clipped_share": None},
        ],
        "shares": [
            _share("clip", 0.1, 0.7, 0.2, method="exact"),
            _share("chi2", None, 0.6, 0.4, low=0.25, high=0.5),
            _share("ess", None, None, None, low=0.2, high=0.45),
            _share("second", 0.0, 0.8, 0.2, method="exact"),
        ],
        "replicas": [
            {"replica": 0, "trajectories": 2600, "newest_version": 59, "largest_lag": 2},
            {"replica": 1, "trajectories": 2600, "newest_version": 12, "largest_lag": 47},
        ],
    }


def _fate(fate: str, groups: int, trajectories: int, tokens: int | None, length: float | None) -> dict[str, Any]:
    return {"fate": fate, "groups": groups, "trajectories": trajectories, "tokens": tokens, "mean_length": length}


def _bin(by: str, low: float, high: float, groups: int, share: float, low95: float, high95: float) -> dict[str, Any]:
    edges = {"by": by, "low": low, "high": high, "groups": groups}
    return {**edges, "trained_share": share, "low95": low95, "high95": high95}


def _share(
    quantity: str,
    update: float | None,
    staleness: float | None,
    mismatch: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    method: str = "bracket",
) -> dict[str, Any]:
    parts = {"update": update, "staleness": staleness, "mismatch": mismatch}
    return {"quantity": quantity, **parts, "low": low, "high": high, "method": method}
