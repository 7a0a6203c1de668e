"""`--db` twice: only what is new is parsed, and the outcome is that of a fresh reading, byte for byte."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_audit import Audit, audit
from verl_audit.ingest import read
from verl_audit.ingest.discover import Found
from verl_audit.ingest.model import Parsed
from verl_audit.pipeline import load_all
from verl_audit.store.kept import Reading

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "fixtures" / "real" / "sync_baseline"
KEYS = ("training/global_step", "critic/score/mean", "actor/grad_norm", "timing_s/step", "val-core/toy/acc/mean@1")


def line(step: int, shift: float = 0.0) -> bytes:
    data = {key: step + shift + 0.125 * i for i, key in enumerate(KEYS)} | {KEYS[0]: step}
    return json.dumps({"step": step, "data": data}).encode() + b"\n"


def console(step: int) -> bytes:
    pairs = " - ".join(f"{key}:{step + 0.125 * i!r}" for i, key in enumerate(KEYS))
    return f"(TaskRunner pid=1) step:{step} - {pairs}\nsome text\n".encode()


def run_dir(path: Path) -> Path:
    """A run with two trackers, a configuration, dumps, and a log of another run's rows beside them."""
    (path / "logger").mkdir(parents=True)
    (path / "logger" / "run.jsonl").write_bytes(b"".join(map(line, range(1, 15))))
    (path / "train.log").write_bytes(b"".join(map(console, range(1, 15))))
    (path / ".hydra").mkdir()
    (path / ".hydra" / "config.yaml").write_text("trainer: {total_epochs: 3}\nalgorithm: {adv_estimator: grpo}\n")
    (path / "rollout_data").mkdir()
    (path / "rollout_data" / "1.jsonl").write_text('{"input": "a", "output": "bc", "score": 0.5, "step": 1}\n')
    return path


def same_as_fresh(path: Path, db: Path) -> Reading:
    """Audit with the store at `db`; the document must be the one of a reading without it."""
    found, fresh = audit(path, db=db), audit(path)
    assert found.to_json() == fresh.to_json()
    for table in ("raw_metrics", "metrics", "sources", "segments", "samples", "events", "problems", "signals"):
        query = f"SELECT * FROM {table} ORDER BY ALL"
        assert repr(found.sql(query)) == repr(fresh.sql(query)), table
    assert found.reading is not None
    close(found, fresh)
    return found.reading


def close(*audits: Audit) -> None:
    for one in audits:
        one.store.close()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that a reader was given."""
    names: list[str] = []
    original = read.read_one

    def seen(found: Found) -> list[Parsed]:
        names.append(found.path.name)
        return original(found)

    monkeypatch.setattr(read, "read_one", seen)
    return names


def test_nothing_old_is_read_again(tmp_path: Path, parsed: list[str]) -> None:
    run, db = run_dir(tmp_path / "run"), tmp_path / "a.db"
    first = audit(run, db=db)
    assert first.reading is not None and first.reading.sources_kept == first.reading.bytes_kept == 0
    everything = len(parsed)
    assert everything == first.reading.sources_read == 4
    parsed.clear()
    second = audit(run, db=db)
    assert parsed == [] and second.to_json() == first.to_json()
    assert second.reading == Reading(0, 0, everything, first.reading.bytes_read)
    with (run / "train.log").open("ab") as stream:
        stream.write(console(15))
    grown = audit(run, db=db)
    assert parsed == ["train.log"]
    assert grown.reading is not None
    assert grown.reading.bytes_read == (run / "train.log").stat().st_size
    close(first, second, grown)
    assert same_as_fresh(run, db).bytes_read == 0


def replaced(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"2.125", b"9.125"))


def rotated(path: Path) -> None:
    text = path.read_bytes()
    with gzip.GzipFile(path.with_name(path.name + ".gz"), "wb", mtime=0) as packed:
        packed.write(text)
    path.write_bytes(text[: len(text) // 3])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-37])


def appended(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(line(15, 0.5) if path.suffix == ".jsonl" else console(15))


def restarted(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(line(7, 0.5) if path.suffix == ".jsonl" else console(7))


def removed(path: Path) -> None:
    path.unlink(missing_ok=True)


def moved(path: Path) -> None:
    path.rename(path.with_name(f"old-{path.name}"))


def untouched(path: Path) -> None:
    pass


CHANGES: tuple[Callable[[Path], None], ...] = (
    appended,
    restarted,
    truncated,
    rotated,
    replaced,
    moved,
    removed,
    untouched,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(CHANGES), st.sampled_from(["logger/run.jsonl", "train.log"])), min_size=1, max_size=2
    )
)
@settings(derandomize=True, deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_outcome_is_that_of_a_fresh_reading(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[Callable[[Path], None], str]]
) -> None:
    home = tmp_path_factory.mktemp("kept")
    run, db = run_dir(home / "run"), home / "a.db"
    close(audit(run, db=db))
    for n, (change, name) in enumerate(changes):
        path = run / name
        if path.exists() and not (change is removed and len(list(run.rglob("*.*l*g*"))) < 2):
            change(path)
            if path.exists() and change is not untouched:
                os.utime(path, ns=(n, n))  # times that differ whatever the clock of the file system does
        if (run / "train.log").exists() or (run / "logger" / "run.jsonl").exists():
            same_as_fresh(run, db)
    shutil.rmtree(home)


def test_an_edit_of_the_same_size_is_told_by_its_time_or_its_head(tmp_path: Path) -> None:
    run, db = run_dir(tmp_path / "run"), tmp_path / "a.db"
    path = run / "logger" / "run.jsonl"
    close(audit(run, db=db))
    before = path.stat()
    replaced(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert same_as_fresh(run, db).sources_read == 1, "the change is in the first bytes"


def test_a_run_beside_others_and_its_baseline_are_kept(tmp_path: Path, parsed: list[str]) -> None:
    home = tmp_path / "runs"
    for name, shift in (("a", 0.0), ("b", 0.25)):
        (home / name).mkdir(parents=True)
        (home / name / f"{name}.jsonl").write_bytes(b"".join(line(s, shift) for s in range(1, 15)))
    db, wanted = tmp_path / "a.db", {"baselines": [f"{home}#b"], "run": "a"}
    first = audit(home, db=db, **wanted)  # type: ignore[arg-type]
    parsed.clear()
    second = audit(home, db=db, **wanted)  # type: ignore[arg-type]
    assert parsed == [] and second.to_json() == first.to_json()
    other = audit(home, db=db, run="b")
    assert parsed == [], "rows of the run that was not chosen are kept as well"
    fresh = audit(home, run="b")
    assert other.to_json() == fresh.to_json()
    close(first, second, other, fresh)


@pytest.mark.skipif(not CONSOLE.is_dir(), reason="needs the fixtures")
def test_a_real_run_is_recalled_whole(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    first = same_as_fresh(CONSOLE, db)
    again = same_as_fresh(CONSOLE, db)
    assert first.sources_kept == again.sources_read == 0
    assert again.bytes_kept == first.bytes_read > 0


def test_a_console_whose_steps_were_aligned_is_kept(tmp_path: Path) -> None:
    run, db = tmp_path / "run", tmp_path / "a.db"
    run.mkdir()
    rows = [{"loss": 0.5 + s / 7, "grad_norm": s / 3, "kl": s / 11, "learning_rate": 1e-6} for s in range(1, 6)]
    history = [{"step": 10 * (i + 1), "epoch": 0.5, **row} for i, row in enumerate(rows)]
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 50, "log_history": history}))
    (run / "train.log").write_text("".join(f"{row | {'epoch': 0.5}}\n" for row in rows))
    first, again, fresh = load_all(run, db=db), load_all(run, db=db), load_all(run)
    assert again.reading is not None and again.reading.sources_read == 0
    query = "SELECT format, step, axis_step, key, value FROM raw_metrics JOIN sources USING (source_id) ORDER BY ALL"
    stored = [loaded.store.execute(query).fetchall() for loaded in (first, again, fresh)]
    assert stored[0] == stored[1] == stored[2]
    console = {(step, axis) for form, step, axis, *_ in stored[0] if form == "dict_console"}
    assert console == {(step, 10 * step) for step in range(1, 6)}
    for loaded in (first, again, fresh):
        loaded.store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE meta SET tool_version = '0'",
        "UPDATE meta SET schema_version = 1",
        "DROP TABLE kept_sources",
        "UPDATE kept_sources SET state = 'x'::BLOB",
    ],
)
def test_a_store_of_another_version_or_a_damaged_one_is_built_anew(tmp_path: Path, damage: str) -> None:
    run, db = run_dir(tmp_path / "run"), tmp_path / "a.db"
    close(audit(run, db=db))
    with duckdb.connect(str(db)) as con:
        con.execute(damage)
    assert same_as_fresh(run, db).sources_kept == 0
    assert same_as_fresh(run, db).sources_read == 0


def test_the_store_names_no_path_of_the_machine(tmp_path: Path) -> None:
    run, db = run_dir(tmp_path / "run"), tmp_path / "a.db"
    close(audit(run, db=db))
    assert str(tmp_path).encode() not in db.read_bytes()
    with duckdb.connect(str(db), read_only=True) as con:
        kept = con.execute("SELECT place, stamp FROM kept_sources").fetchall()
    assert len(kept) == 4 and all(len(text) == 64 for row in kept for text in row)
