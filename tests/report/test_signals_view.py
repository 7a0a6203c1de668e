from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from verl_audit.report.signals_view import render_signals


def row(signal: str = "clip_share", **changes: Any) -> dict[str, Any]:
    return {
        "signal": signal,
        "label": "",
        "key": "actor/pg_clipfrac",
        "points": 60,
        "first_step": 1,
        "last_step": 60,
        "last": 0.0123456,
        "derived": False,
        "unit_kind": "share",
        "against": "the recomputed pi_old",
        "contains": "update",
        "inert_because": None,
        "corrupt_because": None,
    } | changes


def shown(*rows: dict[str, Any], known: Any = (), unknown: Any = (), width: int = 80) -> str:
    out = io.StringIO()
    render_signals(rows, known, unknown, Console(file=out, width=width))
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_numbers_stand_in_columns_and_the_meaning_below() -> None:
    lines = shown(row()).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("clip_share"))
    assert lines[at].split() == ["clip_share", "present", "60", "1", "60", "0.01235"]
    below = flat(" ".join(lines[at + 1 :]))
    assert "from actor/pg_clipfrac, unit share, against the recomputed pi_old, contains update" in below


@pytest.mark.parametrize(
    ("changes", "standing", "reason"),
    [
        ({"inert_because": "0 by construction"}, "inert", "inert: 0 by construction"),
        ({"corrupt_because": "padding counts"}, "corrupt", "corrupt: padding counts"),
        ({"derived": True}, "derived", ""),
        ({}, "present", ""),
    ],
)
def test_standings_have_their_reason(changes: dict[str, Any], standing: str, reason: str) -> None:
    text = flat(shown(row(**changes)))
    assert f"clip_share {standing} 60" in text
    assert f"1 signal 1 {standing}" in text
    assert reason in text


def test_labels_tell_series_of_one_signal_apart() -> None:
    text = shown(row("validation", label="gsm8k"), row("validation", label="math"))
    assert "validation [gsm8k]" in text
    assert "validation [math]" in text


def test_unknown_keys_are_named_up_to_a_cap() -> None:
    text = flat(shown(known=["a", "b"], unknown=[f"key/{i:02}" for i in range(34)]))
    assert "2 known and not needed by any rule, 34 unknown" in text
    assert "key/29 and 4 more" in text
    assert "key/30" not in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    wide = row("a_signal_with_a_long_name_" * 4, key="actor/" + "x" * 150, inert_because="字" * 100, last=-1.23456e-12)
    text = shown(wide, unknown=["y" * 200], width=width)
    assert max(map(cell_len, text.splitlines())) <= width


def test_text_is_harmless() -> None:
    text = shown(row("[red]s[/]", key="k\x1b[31m\x00", against="[/nope]"), unknown=["[bold]\x07"])
    assert "[red]s[/]" in text and "[/nope]" in text and "[bold]" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_absent_fields_are_dashes() -> None:
    text = flat(shown({"signal": "s"}))
    assert "s present - - - -" in text


def test_nothing_found_is_said() -> None:
    assert "0 signals" in shown()
