"""One way of reading one file, run by `ingest.py` in a process of its own.

python benchmarks/ingest_ways.py WAY FORMAT PATH, where WAY is `bytes`, `today`, `reader` or `diagnose`.

Prints one JSON object: CPU seconds of the work in all threads (imports are not counted, for anyone; what else the
machine does counts little), values read (0: not counted), what did it, in which version; or `missing`, the module
that is not installed. Needs nothing at import: `today` is run by the interpreter that has the other tools.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Work = Callable[[Path], int]
"""Reads a file and returns how many values it found."""
Way = tuple[str, Work]
"""What does the work, by name and version; and the work."""


def read_bytes(_: str) -> Way:
    """The floor: all bytes in pieces of 1 MiB."""

    def work(path: Path) -> int:
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass
        return 0

    return "read()", work


def read_only(form: str) -> Way:
    """The reader of the format, without a store."""
    read_one = import_module("verl_audit.ingest.read").read_one
    found = import_module("verl_audit.ingest.discover").Found
    return f"verl-audit {version('verl-audit')}", lambda path: sum(len(p.metrics) for p in read_one(found(path, form)))


def diagnose(_: str) -> Way:
    """`verl-audit diagnose PATH --json -`: found, read, stored, reconciled, judged and printed."""
    main = import_module("verl_audit.cli").main
    import_module("verl_audit.pipeline")

    def work(path: Path) -> int:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                main(["diagnose", str(path), "--json", "-"])
        except SystemExit as stop:
            if stop.code:
                raise
        json.loads(printed.getvalue())
        return 0

    return f"verl-audit {version('verl-audit')}", work


def today(form: str) -> Way:
    """What is done without verl-audit."""
    return {
        "verl_jsonl": _normalize,
        "verl_console": _line_loop,
        "wandb": _data_store,
        "tensorboard": _accumulator,
    }[form]()


def _normalize() -> Way:
    pandas = import_module("pandas")

    def work(path: Path) -> int:
        with path.open(encoding="utf-8") as stream:
            table = pandas.json_normalize([json.loads(line) for line in stream])
        return int(table.drop(columns="step").count().sum())

    return f"json + pandas {version('pandas')} json_normalize", work


def _line_loop() -> Way:
    record = re.compile(r"step:(\d+) - (.*)")
    pair = re.compile(r"([^\s:]+):(?:np\.\w+\()?([-+\w.]+)\)?(?: - |$)")

    def work(path: Path) -> int:
        columns: dict[str, list[tuple[int, float]]] = {}
        with path.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if found := record.search(line):
                    step = int(found[1])
                    for key, value in pair.findall(found[2]):
                        columns.setdefault(key, []).append((step, float(value)))
        return sum(map(len, columns.values()))

    return "regex loop over lines", work


def _data_store() -> Way:
    store = import_module("wandb.sdk.internal.datastore").DataStore
    record = import_module("wandb.proto.wandb_internal_pb2").Record

    def work(path: Path) -> int:
        columns: dict[str, list[tuple[int, float]]] = {}
        log = store()
        log.open_for_scan(str(path))
        while data := log.scan_data():
            one = record.FromString(data)
            if one.WhichOneof("record_type") == "history":
                for item in one.history.item:
                    key = ".".join(item.nested_key) or item.key
                    value = json.loads(item.value_json)
                    if not key.startswith("_"):
                        columns.setdefault(key, []).append((one.history.step.num, value))
        return sum(map(len, columns.values()))

    return f"wandb {version('wandb')} DataStore", work


def _accumulator() -> Way:
    events = import_module("tensorboard.backend.event_processing.event_accumulator")

    def work(path: Path) -> int:
        full = dict.fromkeys(("scalars", "tensors"), 0)
        log = events.EventAccumulator(str(path), size_guidance=full)
        log.Reload()
        return sum(len(log.Scalars(tag)) for tag in log.Tags()["scalars"])

    return f"tensorboard {version('tensorboard')} EventAccumulator", work


WAYS: dict[str, Callable[[str], Way]] = {
    "bytes": read_bytes,
    "today": today,
    "reader": read_only,
    "diagnose": diagnose,
}


def measured(way: str, form: str, path: Path) -> dict[str, Any]:
    """Do the work once."""
    try:
        name, work = WAYS[way](form)
    except ImportError as error:
        return {"missing": error.name or str(error)}
    start = time.process_time()
    values = work(path)
    return {"seconds": time.process_time() - start, "values": values, "by": name}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measured(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
