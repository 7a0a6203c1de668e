from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.measure.tokens.files import table, write_run
from tests.measure.tokens.test_engines import same
from verl_audit.errors import AuditError
from verl_audit.measure.tokens import Spec, reduce_all
from verl_audit.measure.tokens.cache import default_folder
from verl_audit.trace.write import to_table, write


class Reads:
    """Counts the sources that are reduced, not taken from the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from verl_audit.measure.tokens import engines, shard

        self.names: list[str] = []
        original = shard.reduce_shard

        def counted(source: str, *args: object) -> object:
            self.names.append(Path(source).name)
            return original(source, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(engines, "reduce_shard", counted)

    def taken(self) -> list[str]:
        names, self.names = sorted(self.names), []
        return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_a_growing_run_reads_only_what_is_new(tmp_path: Path, reads: Reads) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    first = reduce_all(write_run(run, 3), cache=cache).sums
    assert len(reads.taken()) == 3
    paths = sorted(str(path) for path in run.glob("*.parquet"))
    assert same(reduce_all(paths, cache=cache).sums, first)
    assert reads.taken() == []
    write(table(9), run / "part-4.parquet")
    write(table(8), run / "part-2.parquet")
    paths = sorted(str(path) for path in run.glob("*.parquet"))
    grown = reduce_all(paths, cache=cache).sums
    assert reads.taken() == ["part-2.parquet", "part-4.parquet"]
    assert same(grown, reduce_all(paths).sums)
    assert len(list(cache.iterdir())) == 4


def test_a_file_rewritten_in_the_same_size_is_read_again(tmp_path: Path, reads: Reads) -> None:
    (path,) = write_run(tmp_path / "run", 1)
    reduce_all([path], cache=tmp_path / "cache")
    stat = Path(path).stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    reduce_all([path], cache=tmp_path / "cache")
    assert len(reads.taken()) == 2


def test_other_settings_have_other_entries(tmp_path: Path, reads: Reads) -> None:
    (path,) = write_run(tmp_path / "run", 1)
    for spec in (Spec(), Spec(clip_high=0.28), Spec()):
        reduce_all([path], spec, cache=tmp_path / "cache")
    assert len(reads.taken()) == 2


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "other"])
def test_a_damaged_entry_is_made_anew(damage: str, tmp_path: Path, reads: Reads) -> None:
    (path,) = write_run(tmp_path / "run", 1)
    whole = reduce_all([path], cache=tmp_path / "cache").sums
    (entry,) = (tmp_path / "cache").iterdir()
    good = entry.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 3] ^= 1
    entry.write_bytes(
        {"torn": good[:-50], "flipped": bytes(bad), "empty": b"", "other": Path(path).read_bytes()}[damage]
    )
    reads.taken()
    assert same(reduce_all([path], cache=tmp_path / "cache").sums, whole)
    assert reads.taken() == ["part-1.parquet"]
    assert entry.read_bytes() == good


def test_a_cache_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path / "run", 1)
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    found = reduce_all([path], cache=tmp_path / "cache")
    assert found.failures == ()
    assert same(found.sums, reduce_all([path]).sums)


def test_the_cache_is_never_in_the_run(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path / "run", 1)
    for folder in (tmp_path / "run", tmp_path / "run" / "cache"):
        with pytest.raises(AuditError, match="would lie in the run's directory"):
            reduce_all([path], cache=folder)


def test_the_default_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "verl-audit" / "tokens"


def test_a_file_whose_rows_have_no_token_to_count_has_an_entry(tmp_path: Path, reads: Reads) -> None:
    """As one of groups in flight."""
    path, cache = tmp_path / "run" / "open.parquet", tmp_path / "cache"
    path.parent.mkdir()
    rows = [{"group": f"g{i}", "session": 0, "fate": "in_flight", "response_length": 3} for i in range(4)]
    write(to_table(rows), path)
    first = reduce_all([str(path)], cache=cache).sums
    again = reduce_all([str(path)], cache=cache).sums
    assert reads.taken() == ["open.parquet"]
    assert same(first, again)
    assert first.problems == again.problems == ()
