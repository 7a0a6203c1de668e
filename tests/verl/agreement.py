"""Traces beside the metrics that verl itself logged in the same run: what both tell must be the same, step by step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

Row = dict[str, Any]
Metrics = Mapping[int, Mapping[str, float]]
PAYLOAD = "checkpoint_engine/payload_mb"
OFF = "training/off_policy/"


def table(run: Path, name: str) -> list[Row]:
    """All rows of a table of the trace in a run directory."""
    return [row for path in sorted(run.glob(f"audit/{name}-*.parquet")) for row in pq.read_table(path).to_pylist()]


def logged(run: Path) -> list[dict[str, float]]:
    """The rows that verl's `file` logger wrote for training, in order."""
    [path] = run.glob("file_logger/*/*.jsonl")
    lines = [json.loads(line)["data"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [data for data in lines if "training/global_step" in data]


def metrics(run: Path) -> Metrics:
    """What verl's v1 trainers logged, by step."""
    return {int(data["training/global_step"]): data for data in logged(run)}


def by_step(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows by the step that decided them."""
    grouped: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row["decided_step"]].append(row)
    return grouped


def told_by_traces(trained: Sequence[Row]) -> dict[str, float]:
    """verl's own quantities of one step, computed from its trained rows.

    verl takes the version of the first and last attempt, an attempt without a token included.
    """
    first = np.array([row["segments"][0]["version"] for row in trained])
    last = np.array([row["segments"][-1]["version"] for row in trained])
    version = np.array([row["train_version"] for row in trained])
    series = {
        f"{OFF}trajectory_staleness": version - last,
        f"{OFF}trajectory_staleness_worst": version - first,
        f"{OFF}trajectory_spans": last - first + 1,
        "response_length": np.array([row["response_length"] for row in trained]),
        "prompt_length": np.array([row["prompt_length"] for row in trained]),
        "critic/score": np.array([row["reward"] for row in trained]),
    }
    return {f"{name}/{how}": float(getattr(np, how)(x)) for name, x in series.items() for how in ("mean", "max", "min")}


def gaps(trained: Sequence[Row]) -> dict[str, float]:
    """verl's mismatch metrics of one step from the token lists, if every trained row has them.

    Of several mini-batches verl averages the means, weighted by trajectories.
    """
    parts = [[row for row in trained if row["train_minibatch"] == m] for m in {r["train_minibatch"] for r in trained}]
    found = [_gaps(part) for part in parts]
    weights = [len(part) for part in parts]
    if not all(found):
        return {}
    return {
        name: float(
            max(f[name] for f in found)
            if name.endswith("_max")
            else np.average([f[name] for f in found], weights=weights)
        )
        for name in found[0]
    }


def _gaps(trained: Sequence[Row]) -> dict[str, float]:
    pairs = [(row["prox_logp"], row["behave_logp"], row["loss_mask"]) for row in trained]
    if any(None in pair for pair in pairs):
        return {}
    prox, behave = (np.concatenate([np.array(p[i])[np.array(p[2])] for p in pairs]) for i in (0, 1))
    difference = np.abs(np.exp(prox) - np.exp(behave))
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "rollout_corr/kl": float((behave - prox).mean()),
        "rollout_corr/rollout_rs_masked_fraction": sum(r["rejected_tokens"] for r in trained)
        / sum(r["loss_tokens"] for r in trained),
    }


def evictions(rows: Sequence[Row]) -> dict[str, float]:
    """verl's counts of evicted groups of one step, and the ages of the stale ones."""
    groups = {row["group"]: row for row in rows if row["fate"] in ("stale", "filtered", "failed", "surplus")}.values()
    stale = [row["decided_step"] - row["submit_step"] + 1 for row in groups if "stale" in row["reasons"]]
    names = {
        f"{OFF}evicted_samples": len(stale),
        "training/filter_groups/evicted_samples": sum("filtered" in row["reasons"] for row in groups),
        "training/rollout_failure/evicted_samples": sum(
            "failed" in row["reasons"] and row["fate"] != "trained" for row in groups
        ),
        "training/filter_groups/discarded_surplus_samples": sum("surplus" in row["reasons"] for row in groups),
    }
    ages = {f"{OFF}evicted_samples_staleness/{how}": getattr(np, how)(stale) for how in ("mean", "max", "min") if stale}
    return {**names, **ages}


def disagreements(run: Path) -> Iterator[str]:
    """Each number on which the traces and verl's metrics differ."""
    rows = by_step(table(run, "trajectories"))
    for step, told in metrics(run).items():
        trained = [row for row in rows[step] if row["fate"] == "trained"]
        found = {**told_by_traces(trained), **gaps(trained), **evictions(rows[step])}
        for name, value in found.items():
            wanted = told.get(name, 0.0)
            if not np.isclose(value, wanted, rtol=1e-5, atol=1e-6):
                yield f"step {step}: {name} is {value} by the traces and {wanted} by verl"


def payloads(run: Path) -> Iterator[str]:
    """What is wrong with the payloads of syncs: each sends all weights, new ones; an engine may tell its bytes, too.

    Norms change with every update, and in fully_async with every sync.
    """
    sent = [row for row in table(run, "syncs") if row["t0"] is not None]
    sizes = {(row["payload_count"], row["payload_bytes"]) for row in sent}
    if len(sizes) != 1 or None in next(iter(sizes)):
        yield f"tensors and bytes of the syncs are {sizes}"
    told = {round(row[PAYLOAD] * (1 << 20)) for row in logged(run) if PAYLOAD in row}
    if told and told != {size for _, size in sizes}:
        yield f"the syncs sent {sizes} by the traces and {told} bytes by verl"
    norms = [row["payload_norm"] for row in sent if row["payload_norm"] is not None]
    if len(set(norms)) != len(norms) or len(norms) < len({row["version"] for row in sent}):
        yield f"norms of the syncs are {norms}"


def residual(run: Path, batch: int, warmup: float) -> dict[str, int]:
    """The ledger in groups: submitted by verl's rules (warm-up, one batch a step, refills), decided, and the rest.

    Asynchronous trainers submit one group for each that they throw away.
    """
    rows = table(run, "trajectories")
    fates = {row["group"]: row["fate"] for row in rows}
    thrown = sum(fate in ("stale", "filtered", "failed") for fate in fates.values())
    submitted = int(warmup * batch) + batch * len(metrics(run)) + thrown
    return {"submitted": submitted, "decided": len(fates), "residual": submitted - len(fates)}
