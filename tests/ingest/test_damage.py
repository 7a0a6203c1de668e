"""Damage of the tracker and export formats: no crash, no invented value, no more lost than the damaged piece."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ingest.test_exports import history_file
from tests.ingest.test_properties import Damage, cut, damages, flip, modest, remove, zero
from tests.ingest.test_step_consoles import areal_step
from tests.ingest.test_trackers import clearml_events, mlflow_store, swan_log, trackio_store
from tests.ingest.writers import BLOCK, REAL_RUNS, table
from verl_audit.ingest import areal, clearml, dict_console, jsonl, mlflow, swanlab, trackio, trl, wandb_export
from verl_audit.ingest.discover import discover
from verl_audit.ingest.model import Parsed
from verl_audit.ingest.read import read_all

STEPS = range(1, 41)
KEYS = [f"actor/k{i}" for i in range(6)]
ROWS = {step: {key: step + i / 8 for i, key in enumerate(KEYS)} for step in STEPS}
VALUES = {(key, step): value for step, row in ROWS.items() for key, value in row.items()}
Reader = Callable[[Path], list[Parsed]]


def csv_text() -> bytes:
    lines = ["_step," + ",".join(KEYS), *(f"{s}," + ",".join(map(str, row.values())) for s, row in ROWS.items())]
    return "\n".join([*lines, ""]).encode()


def chart_text() -> bytes:
    header = ",".join(f'"run - {key}"' for key in KEYS)
    lines = [f'"Step",{header}', *(f'"{s}",' + ",".join(f'"{v}"' for v in row.values()) for s, row in ROWS.items())]
    return "\n".join(lines).encode()


def jsonl_text() -> bytes:
    return "".join(json.dumps({"step": s, **row}) + "\n" for s, row in ROWS.items()).encode()


def slime_text() -> bytes:
    return "".join(
        f"(Actor pid=1) [2026-01-01 00:00:00] a.py:1 - step {s}: {row}\n" for s, row in ROWS.items()
    ).encode()


def areal_text() -> bytes:
    return "".join(areal_step(s + 1, row) for s, row in ROWS.items()).encode()


def trl_text() -> bytes:
    return json.dumps({"global_step": 40, "log_history": [{"step": s, **row} for s, row in ROWS.items()]}).encode()


def clearml_text() -> bytes:
    return clearml_events((s, ROWS[s]["actor/k0"]) for s in STEPS).replace('"kl"', '"k0"').encode()


LINES: dict[str, tuple[Callable[[], bytes], Reader, int]] = {
    "csv": (csv_text, wandb_export.read, len(KEYS)),
    "chart": (chart_text, wandb_export.read_chart, len(KEYS)),
    "jsonl": (jsonl_text, jsonl.read, len(KEYS)),
    "slime": (slime_text, dict_console.read, len(KEYS)),
    "clearml": (clearml_text, clearml.read, 1),
}
"""Formats of one record a line, and values a record."""
BINARY: dict[str, tuple[Callable[[], bytes], Reader]] = {"swanlab": (lambda: swan_log(ROWS.items()), swanlab.read)}
OTHERS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    "areal": (areal_text, areal.read),
    "trl": (trl_text, trl.read),
}
EVERYTHING: dict[str, tuple[Callable[[], bytes], Reader]] = {
    **{name: (text, read) for name, (text, read, _) in LINES.items()},
    **BINARY,
    **OTHERS,
}


def parse(data: bytes, read: Reader) -> list[Parsed]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "input"
        path.write_bytes(data)
        return read(path)


def values(parsed: list[Parsed]) -> dict[tuple[str, int], float]:
    return {point: value for p in parsed for point, value in table(p).items()}


def written(found: dict[tuple[str, int], float]) -> bool:
    return all(VALUES.get(point) == value for point, value in found.items())


@pytest.mark.parametrize("name", EVERYTHING)
def test_whole_files_are_read_whole(name: str) -> None:
    text, read = EVERYTHING[name]
    found = values(parse(text(), read))
    assert found == {p: v for p, v in VALUES.items() if name != "clearml" or p[0] == "actor/k0"}


@pytest.mark.parametrize("damage_kind", [cut, zero])
@pytest.mark.parametrize("name", LINES)
@given(damage=damages)
@modest
def test_lines_lose_themselves(name: str, damage_kind: Callable[[bytes, Damage], bytes], damage: Damage) -> None:
    text, read, width = LINES[name]
    data = text()
    if name in ("csv", "chart"):  # without its header a table tells nothing
        head, _, body = data.partition(b"\n")
        damaged = head + b"\n" + damage_kind(body, damage)
    else:
        damaged = damage_kind(data, damage)
    parsed = parse(damaged, read)
    found = values(parsed)
    assert written(found)
    touched = damaged.count(b"\n") if damage_kind is cut else len(STEPS) - damage.size * len(STEPS) // len(data) - 3
    assert len(found) >= (touched - 1) * width
    # a cut right after a comma or a line leaves nothing to report
    assert damage_kind is cut or len(found) == len(STEPS) * width or any(p.problems for p in parsed)


@pytest.mark.parametrize("damage_kind", [cut, zero])
@pytest.mark.parametrize("name", OTHERS)
@given(damage=damages)
@modest
def test_what_comes_before_damage_is_kept(
    name: str, damage_kind: Callable[[bytes, Damage], bytes], damage: Damage
) -> None:
    text, read = OTHERS[name]
    data = text()
    parsed = parse(damage_kind(data, damage), read)
    found = values(parsed)
    assert written(found)
    whole = int(damage.start(data) / len(data) * len(STEPS)) - 2
    assert len(found) >= whole * len(KEYS)


@pytest.mark.parametrize("damage_kind", [cut, flip, zero, remove])
@given(damage=damages)
@modest
def test_framed_records_lose_their_block(damage_kind: Callable[[bytes, Damage], bytes], damage: Damage) -> None:
    text, read = BINARY["swanlab"]
    assert written(values(parse(damage_kind(text(), damage), read)))


@pytest.mark.parametrize("damage_kind", [cut, flip, zero, remove])
@pytest.mark.parametrize("name", EVERYTHING)
@given(damage=damages)
@modest
def test_nothing_crashes(name: str, damage_kind: Callable[[bytes, Damage], bytes], damage: Damage) -> None:
    text, read = EVERYTHING[name]
    data = damage_kind(text(), damage)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / f"input.{'csv' if name in ('csv', 'chart') else 'jsonl'}").write_bytes(data)
        (Path(directory) / "plain").write_bytes(data)
        (Path(directory) / "packed").write_bytes(gzip.compress(data)[: len(data) // 3])
        results = read_all(discover([Path(directory)]))
    assert not any(p.kind == "reader_crashed" for r in results for p in r.problems)
    parse(data, read)


def duplicate(data: bytes, damage: Damage) -> bytes:
    """A block written twice."""
    start = damage.start(data) // BLOCK * BLOCK
    return data[: start + BLOCK] + data[start : start + BLOCK] + data[start + BLOCK :]


def interleave(data: bytes, damage: Damage) -> bytes:
    """Two blocks in each other's place."""
    blocks = [data[i : i + BLOCK] for i in range(0, len(data), BLOCK)]
    i, j = damage.start(data) // BLOCK, damage.size % len(blocks)
    blocks[i], blocks[j] = blocks[j], blocks[i]
    return b"".join(blocks)


REAL_SWANLAB = sorted((REAL_RUNS / "mismatch_probe" / "swanlog").glob("*/*.swanlab"))


@pytest.mark.skipif(not REAL_SWANLAB, reason="real runs are not here")
@pytest.mark.parametrize("damage_kind", [cut, flip, zero, remove, duplicate, interleave])
@given(damage=damages)
@modest
def test_a_real_swanlab_file_yields_only_what_is_in_it(
    damage_kind: Callable[[bytes, Damage], bytes], damage: Damage
) -> None:
    data = REAL_SWANLAB[0].read_bytes()
    whole = {point: repr(value) for point, value in table(parse(data, swanlab.read)[0]).items()}
    found = table(parse(damage_kind(data, damage), swanlab.read)[0])
    assert {point: repr(value) for point, value in found.items()}.items() <= whole.items()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("stores")
    points = [(key, value, 1000 * step, step, False) for (key, step), value in VALUES.items()]
    trackio_store(root / "trackio", ROWS.items()).close()
    return {
        "mlflow": mlflow_store(root / "mlflow", points).read_bytes(),
        "trackio": (root / "trackio").read_bytes(),
        "parquet": history_file(
            root / "x.parquet", range(1, 41), **{key: [ROWS[s][key] for s in STEPS] for key in KEYS}
        ).read_bytes(),
    }


STORE_READERS: dict[str, Reader] = {
    "mlflow": mlflow.read,
    "trackio": trackio.read,
    "parquet": wandb_export.read_parquet,
}


@pytest.mark.parametrize("damage_kind", [cut, flip, zero, remove])
@pytest.mark.parametrize("name", STORE_READERS)
@given(damage=damages)
@modest
def test_stores_do_not_crash(
    stores: dict[str, bytes], name: str, damage_kind: Callable[[bytes, Damage], bytes], damage: Damage
) -> None:
    data = damage_kind(stores[name], damage)
    found = values(parse(data, STORE_READERS[name]))
    if damage_kind is cut:
        assert all(VALUES.get(p, p[1] + 0.5) == v for p, v in found.items())
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "input").write_bytes(data)
        results = read_all(discover([Path(directory)]))
    assert not any(p.kind == "reader_crashed" for r in results for p in r.problems)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=8), st.floats() | st.integers() | st.none() | st.text(max_size=4)), max_size=6
    )
)
@modest
def test_any_rows_are_read(rows: list[dict[str, float | int | str | None]]) -> None:
    lines = "".join(
        json.dumps({"step": i, **{k: v for k, v in row.items() if k != "step"}}) + "\n" for i, row in enumerate(rows)
    )
    (parsed,) = parse(lines.encode(), jsonl.read)
    for (key, step), value in table(parsed).items():
        given_value = rows[step][key]
        assert isinstance(given_value, str) or given_value is None or value == float(given_value) or math.isnan(value)
