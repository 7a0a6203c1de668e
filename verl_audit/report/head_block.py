"""The first screen: the verdict, the run with its symptom, and the four causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_audit.diagnose.coverage import UNASKED
from verl_audit.diagnose.verdict import NAMES as CAUSE_NAMES
from verl_audit.ingest.adapters import load_adapters, setting_for
from verl_audit.report.page import Page, clean, count, listed, number, percent

Document = Mapping[str, Any]
OUTCOMES: Mapping[str, tuple[str, str]] = {
    "cause": ("CAUSE", "bold red"),
    "other": ("OTHER", "bold magenta"),
    "none": ("NO CAUSE", "bold green"),
    "undetermined": ("UNDETERMINED", "bold yellow"),
}
NAMES: Mapping[str, str] = {str(cause): name for cause, name in CAUSE_NAMES.items()}
STANDINGS: Mapping[str, tuple[str, str, str, str]] = {
    "implicated": ("●", "X", "implicated", "bold red"),
    "contributing": ("◐", "+", "contributing", "red"),
    "risk": ("▲", "!", "at work (risk)", "yellow"),
    "cleared": ("✓", "=", "cleared", "green"),
    "cannot_tell": ("?", "?", "cannot tell", "bold"),
}
"""Per standing of a cause: shape, shape in ASCII, words, style. Shape and words carry it; colour only repeats."""
ENDED: Mapping[str, str] = {
    "finished": "finished",
    "crashed": "crashed",
    "died_before_step1": "died before its first training step",
    "unknown": "how it ended is not known",
}
STATES: Mapping[str, str] = {
    "slower": "slower",
    "not_shown": "no slowdown shown",
    "unclear": "whether it slowed is not clear",
    "untested": "whether it slowed was not testable",
}
COLUMN = 12
WIDE = 100
"""Columns from which the reason of a cause stands beside it."""
BASELINE = "--baseline SYNC_RUN_DIR"


def show_verdict(page: Page, document: Document) -> None:
    """Outcome and sentence, how sure and why, the death of the run, and what would decide what is open."""
    verdict, run = document["verdict"], document["run"]
    if run["ended"] == "crashed":
        page.para(f"CRASHED at step {run['last_step']}", style="bold red")
    word, style = OUTCOMES.get(verdict["outcome"], (clean(verdict["outcome"]).upper(), "bold"))
    page.para(word, style=style)
    page.para(after_word(clean(verdict["sentence"]), word))
    page.item("Confidence", f"{verdict['confidence']}: {verdict['because']}", column=COLUMN, style="bold")
    _show_death(page, run)
    missing = list(missing_settings(document))
    if missing:
        page.heading("What would decide it")
        column = min(max(len(names) for names, _ in missing) + 4, page.width // 3)
        for names, setting in missing:
            page.item(names, setting, indent=2, column=column)


def after_word(sentence: str, word: str) -> str:
    """The sentence without the outcome word that stands above it."""
    start = f"{word}:"
    rest = sentence[len(start) :].lstrip() if sentence.upper().startswith(start) else sentence
    return rest[:1].upper() + rest[1:]


def without_steps(run: Mapping[str, Any]) -> bool:
    """Whether the run died before it logged a training step: then nothing about reward can be asked of it."""
    return run["ended"] == "died_before_step1" and run["first_step"] is None


def died(run: Mapping[str, Any]) -> bool:
    """Whether the run ended with an error that the document holds."""
    return run.get("ended") in ("crashed", "died_before_step1") and bool(run.get("last_error"))


def _show_death(page: Page, run: Mapping[str, Any]) -> None:
    if not died(run):
        return
    error = run["last_error"]
    page.heading("It stopped with")
    page.para(error["exception"], indent=2, style="bold red", hang=2)
    for frame in error["frames"][-4:]:
        page.para(frame, indent=4, hang=2)
    if error.get("offset"):  # at 0 the log was not a file of its own
        page.para(f"({error['path'] + ', ' if error.get('path') else ''}byte {error['offset']} of the log)", indent=2)


def missing_settings(document: Document) -> Iterator[tuple[str, str]]:
    """What the verdict lacks, as (signals, what records them), signals with the same remedy together."""
    grouped: dict[str, list[str]] = {}
    for signal in document["verdict"]["missing"]:
        grouped.setdefault(_setting(signal, document), []).append(clean(signal))
    for setting, signals in grouped.items():
        yield listed(signals, 6), setting


def _setting(signal: str, document: Document) -> str:
    if signal == "baseline":
        return _baseline_setting(document)
    if signal in UNASKED:
        return UNASKED[signal]
    found = [e for entries in document["coverage"]["causes"].values() for e in entries if e["signal"] == signal]
    record = next((e["record"] for e in found if e["record"]), "")
    if any(e["standing"] == "present" for e in found):
        return f"{found[0]['because']} logged, too few or too rare for this question" + (
            f"; {record}" if record else ""
        )
    return record or _recorded_by(signal, document["run"]["facts"]) or "no setting is known that records it"


def _recorded_by(signal: str, facts: Mapping[str, Any]) -> str:
    """What records a signal that no cause needs in every run, in the framework of the run; "" where that is unknown."""
    adapter = next((a for a in load_adapters() if a.framework == fact(facts, "framework")), None)
    return (setting_for(signal, adapter) if adapter is not None else None) or ""


def _baseline_setting(document: Document) -> str:
    if document["baselines"]:
        return f"{BASELINE}: another one, since with this one {document['symptom']['because']}"
    return f"{BASELINE}: a synchronous run of the same task"


def show_run(page: Page, document: Document, *, verbose: bool) -> None:
    """The run, its baselines and its symptom."""
    run = document["run"]
    page.blank()
    ended = ENDED.get(run["ended"], run["ended"])
    page.item("Run", f"{run['name']}: {kind_of(run['facts'])}, {steps_of(run)}, {ended}", **_AT)
    if verbose:
        _show_reasons(page, run)
    for baseline in document["baselines"]:
        page.item("Baseline", f"{baseline['name']}: {kind_of(baseline['facts'])}", **_AT)
    restarted = run["reconciled"]["rewritten"] if run.get("reconciled") else 0
    if restarted:
        page.item("Restarted", f"{count(restarted, 'value')} of earlier process lives replaced", **_AT)
    if without_steps(run):
        return
    if not document["baselines"]:
        page.item("Baseline", f"none given ({BASELINE})", **_AT)
    _show_symptom(page, document["symptom"], told=clean(document["verdict"]["sentence"]))


_AT: dict[str, Any] = {"column": COLUMN, "style": "bold"}


def fact(facts: Mapping[str, Any], name: str) -> Any:
    """The value of a fact of a run, None when it is not known."""
    return (facts.get(name) or {}).get("value")


def kind_of(facts: Mapping[str, Any]) -> str:
    """Framework, trainer and mode of a run in words."""
    words = [clean(v) for v in (fact(facts, "framework"), fact(facts, "trainer")) if v is not None]
    mode = {True: "asynchronous", False: "synchronous"}.get(fact(facts, "is_async"))
    named = " ".join(words) or "framework not recognised"
    return f"{named} ({mode})" if mode else named


def steps_of(run: Mapping[str, Any]) -> str:
    """The steps that a run logged, in words."""
    if run["first_step"] is None:
        return "no training step logged"
    total = fact(run["facts"], "total_steps")
    of = f" of {number(total)}" if total is not None else ""
    span = run["last_step"] - run["first_step"] + 1
    gaps = f" ({run['steps_logged']} logged)" if run["steps_logged"] != span else ""
    if span == 1:
        return f"step {run['last_step']}{of}"
    return f"steps {run['first_step']} to {run['last_step']}{of}{gaps}"


def _show_reasons(page: Page, run: Mapping[str, Any]) -> None:
    for name in ("framework", "framework_version", "trainer", "log_prob_mode", "correction", "rollout_quantization"):
        known = run["facts"].get(name)
        if known:
            page.para(f"{name} {number(known['value'])}: {known['reason']}", indent=COLUMN, hang=2)
    for reason in dict.fromkeys(run["put_together_because"]):
        page.para(f"one run, since {reason}", indent=COLUMN, hang=2)


def _show_symptom(page: Page, symptom: Mapping[str, Any], *, told: str) -> None:
    """The state, with its reason unless the verdict has `told` it, then speeds and limits."""
    state, because = STATES.get(symptom["state"], clean(symptom["state"])), clean(symptom["because"])
    page.item("Reward", state if because in told else f"{state}: {because}", **_AT)
    for line in _speeds(symptom):
        page.para(line, indent=COLUMN, hang=2)
    for line in limits(symptom):
        page.para(line, indent=COLUMN, hang=2)
    for caveat in symptom.get("caveats") or ():
        page.para(f"note: {caveat}", indent=COLUMN, hang=2)


def _speeds(symptom: Mapping[str, Any]) -> Iterator[str]:
    known = {name: s for name, s in symptom["speed"].items() if s}
    if not known:
        return
    source = f", from {clean(symptom['evidence']).replace('_', ' ')}" if symptom.get("evidence") else ""
    yield f"learning speed, the baseline's = 1 (intervals {next(iter(known.values()))['interval']}{source}):"
    for name, s in symptom["speed"].items():
        told = ranged(ratio(s["value"]), ratio(s["low"]), ratio(s["high"])) if s else "not known"
        yield f"- {clean(name).replace('_', ' ')}: {told}"


def ranged(value: str, low: str, high: str) -> str:
    """A value with its interval, which is left out where it has no width as printed."""
    return value if low == high else f"{value} ({low} to {high})"


def ratio(value: object) -> str:
    """A speed ratio with two decimals."""
    return f"{value:.2f}" if isinstance(value, int | float) else number(value)


def limits(symptom: Mapping[str, Any]) -> Iterator[str]:
    """What slowdown could have been seen, and when the run began to fall behind."""
    if symptom.get("smallest_detectable") is not None:
        spread = (
            f" (run-to-run spread taken as {number(symptom['run_sd'])})" if symptom.get("run_sd") is not None else ""
        )
        yield f"a slowdown to {ratio(symptom['smallest_detectable'])} or below would be seen 4 times in 5{spread}"
    onset = symptom.get("onset")
    if onset:
        yield f"it began to fall behind {between('step', onset['low'], onset['high'])} (9 of 10 such ranges hold)"


def between(unit: str, low: float, high: float) -> str:
    """An onset in words; one that may be as early as the start has only a latest."""
    if low <= 0:
        return f"by {f'{unit} ' if unit else ''}{number(high)} at the latest"
    return f"between {f'{unit}s ' if unit else ''}{number(low)} and {number(high)}"


def show_causes(page: Page, document: Document, *, verbose: bool) -> None:
    """The four steps in order, each with its standing, its decisive number and the damage measured."""
    if without_steps(document["run"]):
        page.heading("The four steps", "not judged: no training step was logged")
        return
    page.heading("The four steps", "with the share of the training signal lost (range)")
    wide = page.width >= WIDE
    widths = (1, 16, 24, 22, page.width - 73) if wide else (1, 16, 24, max(page.width - 49, 22))
    for step, (name, cause) in enumerate(document["causes"].items(), 1):
        standing, style = _standing(page, cause)
        because = "; ".join([clean(cause["because"]), *_more(cause, verbose=verbose)])
        cells = (str(step), standing, NAMES.get(name, clean(name)), damage_of(cause))
        page.row((*cells, because) if wide else cells, widths, 2, style="" if wide else style)
        if not wide:
            page.para(because, indent=5)


def standing_of(cause: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Shape, shape in ASCII, words and style of a cause's standing; a risk without proof of harm has its own."""
    at_risk = cause["risk"] and cause["status"] not in ("implicated", "contributing")
    key = "risk" if at_risk else cause["status"]
    return STANDINGS.get(key, ("?", "?", clean(key), ""))


def _standing(page: Page, cause: Mapping[str, Any]) -> tuple[str, str]:
    shape, plain, word, style = standing_of(cause)
    return f"{page.glyph(shape, plain)} {word}", style


def damage_of(cause: Mapping[str, Any]) -> str:
    """The damage, but not where nothing could be told: a number there would read as a measurement."""
    damage = cause.get("damage")
    if not damage or (cause["status"] == "cannot_tell" and not cause["risk"]):
        return ""
    return ranged(*(percent(damage[name]) for name in ("estimate", "low", "high")))


def _more(cause: Mapping[str, Any], *, verbose: bool) -> Iterator[str]:
    """What is missing, and in verbose the rules at work and the kind of evidence."""
    if cause["missing"]:
        yield f"not recorded: {listed(cause['missing'], 6)}"
    rules: Sequence[str] = cause.get("at_work") or ()
    if rules and verbose:
        yield f"{count(len(rules), 'rule')} at work: {listed(rules, 6)}"
    if verbose:
        yield f"evidence: {clean(cause['evidence_level'])}"
