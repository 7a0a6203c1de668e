"""What was read and what was not: coverage of the causes, inert and corrupt signals, ledger, files, problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl_audit.report.head_block import Document
from verl_audit.report.page import Page, clean, count, listed, number
from verl_audit.report.reading import stated

COLUMN = 14
FEW_UNKNOWN = 6
FEW_PROBLEMS = 5


def show_coverage(page: Page, document: Document, *, verbose: bool) -> None:
    """Keys, then only the signals that a cause needs and lacks, then inert and corrupt ones with the reason."""
    coverage = document["coverage"]
    page.heading("Coverage", keys_read(coverage["keys"]))
    unknown = coverage["unknown_keys"]
    if unknown:
        page.item(
            "unknown keys", listed(unknown, len(unknown) if verbose else FEW_UNKNOWN), indent=2, column=COLUMN + 2
        )
    if verbose or sum(coverage["keys"].values()):
        _show_gaps(page, document, told=() if verbose else document["verdict"]["missing"])
    _show_reasons(page, "Inert: logged, but cannot move in this run, so they clear nothing", document, "inert")
    _show_reasons(page, "Corrupt: logged, but not what the name says, so left out", document, "corrupt")


def keys_read(keys: Mapping[str, int]) -> str:
    """How many metric keys were read, and how many of them were used."""
    total = sum(keys.values())
    if not total:
        return "no metric was read"
    told = f"{keys['mapped']} used, {keys['known']} known and not needed, {keys['unknown']} unknown"
    return f"{count(total, 'metric key')}: {told}"


def _show_gaps(page: Page, document: Document, told: Sequence[str]) -> None:
    """Missing signals with the same reason and setting on one line, each with the causes that need it.

    Those that the first screen has `told` already are left out, and those of a cause that is cleared without them.
    """
    grouped: dict[str, dict[str, list[str]]] = {}
    for cause, entries in document["coverage"]["causes"].items():
        if document["causes"].get(cause, {}).get("status") == "cleared":
            continue
        for e in entries:
            if e["standing"] == "missing" and e["signal"] not in told:
                grouped.setdefault(gap_advice(e), {}).setdefault(e["signal"], []).append(clean(cause))
    for why, signals in grouped.items():
        names = ", ".join(f"{clean(signal)} (for {', '.join(needed)})" for signal, needed in signals.items())
        page.item("missing", f"{names}: {why}.", indent=2, column=COLUMN, style="yellow")


def gap_advice(entry: Mapping[str, Any]) -> str:
    """Why a signal is missing, and what would record it."""
    record = entry["record"]
    return f"{clean(entry['because'])}. " + (f"Setting: {clean(record)}" if record else "No setting is known for it")


def _entries(causes: Mapping[str, Sequence[Mapping[str, Any]]], standing: str) -> dict[str, str]:
    return {e["signal"]: e["because"] for entries in causes.values() for e in entries if e["standing"] == standing}


def grouped_reasons(document: Document, standing: str) -> list[tuple[str, str]]:
    """(signals, reason) of the signals that are inert or corrupt, those with the same reason together."""
    run, causes = document["run"], document["coverage"]["causes"]
    reasons = {**_entries(causes, standing), **(run.get(standing) or {})}
    grouped: dict[str, list[str]] = {}
    for signal, because in reasons.items():
        fullest = max((r for r in reasons.values() if r.startswith(because)), key=len)  # a reason may go on elsewhere
        grouped.setdefault(fullest, []).append(signal)
    return [(", ".join(map(clean, sorted(signals))), clean(because)) for because, signals in grouped.items()]


def _show_reasons(page: Page, title: str, document: Document, standing: str) -> None:
    grouped = grouped_reasons(document, standing)
    if grouped:
        page.para(f"{title}:", indent=2)
    for signals, because in grouped:
        page.para(f"{signals}: {because}", indent=4, hang=2)


def show_ledger(page: Page, ledger: Mapping[str, Any] | None) -> None:
    """Groups by fate on one line, when anything is known; a fate that was not logged is not a zero."""
    fates = {clean(k).removesuffix("_groups"): v for k, v in ((ledger or {}).get("fates") or {}).items()}
    if not ledger or ledger.get("decided") is None:
        return
    known = {name: v for name, v in fates.items() if v is not None}
    parts = [f"{number(v)} {name}" for name, v in sorted(known.items(), key=lambda kv: -kv[1]) if v]
    zero = [name for name, v in known.items() if not v]
    unknown = [name for name, v in fates.items() if v is None]
    text = f"{number(ledger['decided'])} {clean(ledger['unit'])} decided = {' + '.join(parts) or '0'}"
    text += f"; none {', '.join(zero)}" if zero else ""
    text += f"; not logged: {', '.join(unknown)}" if unknown else ""
    page.heading("Ledger", f"{text}; {_generated(ledger)}")


def _generated(ledger: Mapping[str, Any]) -> str:
    if ledger.get("generated") is None:
        return "how many were generated is not logged, so the sum is unchecked"
    return f"{number(ledger['generated'])} generated, residual {number(ledger.get('residual'))}"


def show_files(page: Page, document: Document, *, verbose: bool) -> None:
    """The files read, one line or one each, and what was wrong with them."""
    sources = document["sources"]
    page.heading("Files", stated(sources, document["coverage"]["keys"]["unknown"]))
    if verbose and sources:
        for s in sources:
            page.para(s["path"], indent=2, hang=2)
            page.para(_source(s), indent=6)
    _show_skipped(page, document["skipped"])
    _show_problems(page, document["problems"], verbose=verbose)


def _source(s: Mapping[str, Any]) -> str:
    read = f"{number(s['records'])} records, {number(s['values_read'])} values, {number(s['values_lost'])} lost"
    kind = f"{number(s['bytes'])} bytes, {clean(s['precision'])}, steps {clean(s['step_kind'])}"
    return f"{clean(s['format'])} of {clean(s['runs'])}: {read}, {kind}"


def _show_problems(page: Page, problems: Sequence[Mapping[str, Any]], *, verbose: bool) -> None:
    if not problems:
        page.para("Nothing in them was damaged.", indent=2)
        return
    if len(problems) <= FEW_PROBLEMS:
        page.para("Damaged, and skipped over:", indent=2, style="yellow")
        _list_problems(page, problems)
        return
    counts: Counter[tuple[str, str]] = Counter()
    for p in problems:
        counts[clean(p["path"]), clean(p["kind"])] += p.get("count") or 1
    page.para("Damaged, and skipped over:", indent=2, style="yellow")
    for (path, kind), n in counts.items():
        page.para(f"{path}: {kind}, {count(n, 'time')}", indent=4, hang=2)
    few = problems if verbose else problems[:FEW_PROBLEMS]
    page.para(f"{'All' if len(few) == len(problems) else 'The first'} {len(few)}:", indent=2)
    _list_problems(page, few)


def _list_problems(page: Page, problems: Sequence[Mapping[str, Any]]) -> None:
    for p in problems:
        at = f" at byte {p['offset']}" if p.get("offset") else ""
        times = f", {count(p['count'], 'time')}" if (p.get("count") or 1) > 1 else ""
        page.para(f"{clean(p['path'])}{at}: {clean(p['kind'])}: {clean(p['detail'])}{times}", indent=4, hang=2)


def _show_skipped(page: Page, skipped: Mapping[str, Any]) -> None:
    """Files not read: by name where they may hold what the run logged, the others as a number."""
    files = skipped["files"]
    if not files:
        return
    told = len(files) + skipped["more"]
    others = skipped["count"] - told
    beside = f" (and {count(others, 'file')} of other kinds)" if others else ""
    page.para(f"{count(told, 'file')} not read{beside}:", indent=2, style="yellow")
    for f in files:
        page.para(f"{clean(f['path'])}: {clean(f['reason'])}", indent=4, hang=2)
    if skipped["more"]:
        page.para(f"and {skipped['more']} more", indent=4)
