"""The scenarios: data in `scenarios.toml`, read into frozen rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from verl_audit.errors import AuditError
from verl_audit.reference.settings import Settings, with_overrides

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

Cause = Literal["mismatch", "staleness", "eviction", "sync"]
Family = Literal["baseline", "harmless", "mismatch", "staleness", "eviction", "sync", "two", "other"]
DEFAULT_ENVIRONMENT = "small"


@dataclass(frozen=True)
class Scenario:
    """Settings with a known truth."""

    name: str
    family: Family
    title: str
    settings: Mapping[str, Any]
    causes: tuple[Cause, ...]
    """What slows learning down."""
    at_work: tuple[Cause, ...]
    """Mechanisms that are present, harmful or not."""
    other: str | None
    """What slows or flattens the curve and is none of the four."""
    baseline: str
    """Scenario a user would compare with."""
    fixes: str | None
    """Scenario whose cause this one removes."""
    per_hour: bool
    """Whether the harm is in the clock alone."""

    @property
    def harmless(self) -> bool:
        """Whether nothing slows it down."""
        return not self.causes and self.other is None


@dataclass(frozen=True)
class Environment:
    """Sizes and pace that all scenarios are run in."""

    name: str
    text: str
    settings: Mapping[str, Any]


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(
        files("verl_audit.reference").joinpath("scenarios.toml").read_text(encoding="utf-8")
    )
    return found


@cache
def scenarios() -> tuple[Scenario, ...]:
    """Every scenario, in the order of the file."""
    return tuple(_scenario(name, row) for name, row in _file()["scenario"].items())


def _scenario(name: str, row: Mapping[str, Any]) -> Scenario:
    causes = tuple(row.get("causes", ()))
    return Scenario(
        name,
        row["family"],
        row["title"],
        row.get("set", {}),
        causes,
        tuple(row.get("at_work", causes)),
        row.get("other"),
        row.get("baseline", "sync"),
        row.get("fixes"),
        row.get("per_hour", False),
    )


@cache
def environments() -> Mapping[str, Environment]:
    """Every environment by name."""
    return {
        name: Environment(name, row["text"], {k: v for k, v in row.items() if k != "text"})
        for name, row in _file()["environment"].items()
    }


def scenario(name: str) -> Scenario:
    """One by name; `AuditError` with near names when there is none."""
    known = {s.name: s for s in scenarios()}
    if name not in known:
        near = [n for n in known if name in n or n in name]
        hint = f"; did you mean {', '.join(near)}?" if near else "; see `verl-audit simulate --list`"
        raise AuditError(f"no scenario {name!r}{hint}")
    return known[name]


def settings_of(chosen: Scenario, env: str, overrides: Mapping[str, Any]) -> Settings:
    """Defaults, then the environment, the scenario, and what the user sets."""
    if env not in environments():
        raise AuditError(f"no environment {env!r}; one of {', '.join(environments())}")
    return with_overrides(Settings(), {**environments()[env].settings, **chosen.settings, **overrides})
