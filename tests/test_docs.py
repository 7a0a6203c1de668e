"""The documentation is fresh, its links lead somewhere, and its examples work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from verl_audit import RuleSet, load_rules, read_settings
from verl_audit.cli import main
from verl_audit.diagnose.cases import missing_kinds, run_cases
from verl_audit.diagnose.rules import load_file
from verl_audit.ingest.model import Format
from verl_audit.pipeline import load_all

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "fixtures" / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code of one language."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return found


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_pages_are_fresh() -> None:
    """`python docs/generate.py` writes them again."""
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_formats_names_each_once() -> None:
    listed = tomllib.loads((ROOT / "verl_audit" / "ingest" / "formats.toml").read_text(encoding="utf-8"))
    named = [name for entry in (*listed["source"], *listed["beside"]) for name in entry["formats"]]
    assert sorted(named) == sorted(get_args(Format))
    assert {entry["kept"] for entry in listed["source"]} == {"yes", "partly", "no"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_rule_and_measure_has_a_section() -> None:
    rules = load_rules().rules
    assert {rule.id for rule in rules} <= anchors(DOCS / "rules.md")


def test_queries_of_the_store_page_run() -> None:
    real = ROOT / "fixtures" / "real"
    store = load_all(real / "async_drop_bias", [real / "sync_baseline"]).store
    queries = [block for block in blocks(DOCS / "store.md", "sql") if block.startswith("SELECT")]
    assert len(queries) >= 5
    for query in queries:
        store.execute(query).fetchall()


def test_the_example_rule_passes_its_own_cases(tmp_path: Path) -> None:
    file = tmp_path / "rule.yaml"
    file.write_text(blocks(DOCS / "writing-rules.md", "yaml")[0], encoding="utf-8")
    rule = load_file(file)
    assert [result for result in run_cases([rule]) if not result.ok] == []
    assert missing_kinds(rule) == ()


def test_the_example_settings_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "verl-audit.toml"
    file.write_text(blocks(DOCS / "writing-rules.md", "toml")[0], encoding="utf-8")
    settings = read_settings(file=file)
    assert settings.rule_dirs == (tmp_path / "my_rules",)
    assert settings.facts == {"groups_per_step": 512}
    assert isinstance(load_rules().with_params(settings.params), RuleSet)


def test_the_example_of_a_monitoring_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks(DOCS / "writing-rules.md", "python")[0], {})
    assert "sync-share medium" in capsys.readouterr().out


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in main.commands:
        assert f"verl-audit {name}" in text


def test_pages_hold_no_machine_path() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", page.read_text(encoding="utf-8")), page
