"""Reports for the tests of the page, of runs made up or taken from fixtures, and a parser that checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.report.traced import traces
from tests.synthetic import OFF, Row, rows, write_run
from verl_audit import audit
from verl_audit.compare import compare
from verl_audit.report.html.comparison import render_comparison
from verl_audit.report.html.page import render

ROOT = Path(__file__).parents[3]
REAL = ROOT / "fixtures" / "real"
CASES = ("healthy", "stale", "mismatched", "evicted", "undetermined", "crashed", "traced", "long", "compared")


@cache
def document(case: str) -> dict[str, Any]:
    """The audit document of a case; `traced` is a real run to which a made-up tree of traces was added."""
    if case == "traced":
        return {**document("undetermined"), "traces": traces()}
    if case == "long":
        return _long()
    real: dict[str, tuple[str, str]] = {
        "healthy": ("async_mild", "sync_baseline"),
        "mismatched": ("fp8_mismatch", "sync_baseline"),
        "undetermined": ("async_drop_bias", "sync_baseline"),
        "crashed": ("crash_hybrid_off", ""),
    }
    run, baseline = real.get(case, ("", ""))
    if run:
        return audit(REAL / run, baselines=[REAL / baseline] if baseline else []).document
    return _made(case)


def _made(case: str) -> dict[str, Any]:
    """A run that is slow because of its lag, or of what it evicts, beside its synchronous baseline."""
    folder = Path(mkdtemp())
    base = write_run(folder / "base", rows(range(121), every=5, seed=1), name="sync")
    differs: dict[str, dict[str, Any]] = {
        "stale": {"lag": 6.0, "chi2": 0.3, "gap": 0.02},
        "evicted": {"lag": 1.0, "extra": {f"{OFF}evicted_samples": 32.0, "prompt_length/mean": 30.0}},
    }
    made = rows(range(121), every=5, seed=2, speed=0.4, **differs[case])
    run = write_run(folder / case, made, "separate_async", name=case)
    return audit(run, baselines=[base]).document


LONG_STEPS = 2000


def _long() -> dict[str, Any]:
    """2,000 steps with every gauge that is drawn, noisy, beside four baselines."""
    folder = Path(mkdtemp())
    extra = {
        f"{OFF}evicted_samples": 8.0,
        "timing_s/update_actor": 3.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/switch_wait": 1.0,
    }
    made = rows(range(LONG_STEPS + 1), every=20, seed=9, speed=0.5, lag=3.0, chi2=0.1, noise=0.05, extra=extra)
    run = write_run(folder / "long", made, "separate_async", name="long")
    bases = [
        write_run(folder / f"base{i}", rows(range(LONG_STEPS + 1), every=20, seed=i, noise=0.05), name=f"sync{i}")
        for i in range(4)
    ]
    return audit(run, baselines=bases).document


@cache
def comparison() -> dict[str, Any]:
    """Three runs: a baseline, a slow one, and the slow one with its threshold lowered, which learns again."""
    folder = Path(mkdtemp())
    made: dict[str, tuple[list[Row], str, dict[str, Any]]] = {
        "sync": (rows(range(121), every=5, seed=1), "sync", {}),
        "lagging": (rows(range(121), every=5, seed=2, speed=0.35, lag=6.0, chi2=0.3), "separate_async", {}),
        "lowered": (rows(range(121), every=5, seed=3, lag=1.0), "separate_async", {"threshold": 1}),
    }
    return compare(
        [write_run(folder / name, what, mode, name=name, **over) for name, (what, mode, over) in made.items()]
    )


@cache
def page(case: str, *, interactive: bool = False) -> str:
    """The HTML of a case."""
    if case == "compared":
        return render_comparison(comparison(), interactive=interactive)
    return render(document(case), interactive=interactive)


VOID = {"meta", "input", "br", "link", "img", "hr"}


@dataclass
class Parsed(HTMLParser):
    """What a page holds, for assertions: tags with attributes, text outside scripts, and tags left open."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    def values(self, attribute: str) -> list[str]:
        """Every value of an attribute."""
        return [attrs[attribute] for _, attrs in self.tags if attribute in attrs]


def parsed(html: str) -> Parsed:
    """The page parsed; every tag must be closed in order."""
    parser = Parsed()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser
