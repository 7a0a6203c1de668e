"""A run on a wandb server, read through wandb's own client: only when its address is given, and only with the extra.

The client takes the API key from its own configuration (`wandb login`, WANDB_API_KEY); none is asked for or kept here.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_audit.errors import AuditError
from verl_audit.ingest.model import ConfigFound, Identity, Parsed
from verl_audit.ingest.rows import flatten, number

INSTALL = "reading from a wandb server needs its client: pip install 'verl-audit[wandb]'"
_SHORT = re.compile(r"wandb:/{0,2}([^/\s]+)/([^/\s]+)/([^/\s]+)")
_URL = re.compile(r"(https?):/{1,2}([^/\s]+)/([^/\s]+)/([^/\s]+)/runs/([^/?#\s]+)(?:[/?#].*)?")
_CLOUD = ("wandb.ai", "www.wandb.ai", "app.wandb.ai")
_OTHER_STEPS = ("global_step", "training/global_step", "train/global_step")
_INT64 = 1 << 63


@dataclass(frozen=True)
class Address:
    """A run on a server; `server` is None for the one the client is configured for."""

    server: str | None
    entity: str
    project: str
    run: str


def address(text: str) -> Address | None:
    """`wandb:ENTITY/PROJECT/RUN_ID`, or the URL of a run's page (a path may have lost one of its slashes)."""
    if short := _SHORT.fullmatch(text):
        return Address(None, *short.groups())
    if page := _URL.fullmatch(text):
        scheme, host, entity, project, run = page.groups()
        server = "https://api.wandb.ai" if host in _CLOUD else f"{scheme}://{host}"
        return Address(server, entity, project, run)
    return None


def read(where: Address, path: Path) -> list[Parsed]:
    """Every row of the run's history and its configuration; `path` stands for it in reports.

    AuditError when the client is missing, or says no.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise AuditError(INSTALL) from None
    try:
        run = wandb.Api(**({"overrides": {"base_url": where.server}} if where.server else {})).run(
            f"{where.entity}/{where.project}/{where.run}"
        )
        parsed = Parsed(path, "wandb", identity=Identity(where.project, run.name or None, where.run))
        if config := {key: value for key, value in dict(run.config).items() if not key.startswith("_")}:
            parsed.configs.append(ConfigFound(config, "wandb"))
        for row in run.scan_history():
            _add(row, parsed)
    except Exception as error:  # its classes differ between versions; whatever it is, the user has to act on it
        raise AuditError(f"wandb {where.entity}/{where.project}/{where.run}: {error or type(error).__name__}") from None
    return [parsed]


def _add(row: Mapping[str, Any], parsed: Parsed) -> None:
    step, wall = row.get("_step"), row.get("_timestamp")
    if type(step) is not int or abs(step) >= _INT64:
        parsed.note("no_step", "a row of the history has no step")
        return
    parsed.metrics.next_record(step, float(wall) if isinstance(wall, int | float) and math.isfinite(wall) else None)
    for key, value, kind in _numbers(row):
        parsed.metrics.add(key, value, kind)
        if key in _OTHER_STEPS and value != step:
            parsed.step_kind = "counter"


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float, Any]]:
    """The numbers of a row, nested ones under dotted keys as in a `.wandb` file; media objects are left out."""
    for key, value in row.items():
        if key.startswith("_"):
            continue
        if isinstance(value, dict):
            leaves = [] if "_type" in value else [(f"{key}.{k.replace('/', '.')}", v) for k, v in flatten(value)]
        else:
            leaves = [(key, value)]
        for name, leaf in leaves:
            if (found := number(leaf)) is not None:
                yield name, *found
