from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from verl_audit.report.findings_block import fired_findings
from verl_audit.report.page import clean, number, wrap
from verl_audit.report.terminal import render

SENTENCE = "Undetermined: eviction bias is at work, but whether reward slowed was not testable."
LONG = "actor_rollout_ref.rollout.engine_kwargs.vllm.a_key_far_longer_than_the_line.disable_cascade_attn=True"


def fact(value: Any, reason: str = "logged") -> dict[str, Any]:
    return {"value": value, "reason": reason}


def cause(
    status: str = "cleared", *, risk: bool = False, because: str = "measured", missing: Any = ()
) -> dict[str, Any]:
    damage = {"estimate": 0.0686, "low": 0.0, "high": 0.1273}
    return {
        "status": status,
        "risk": risk,
        "damage": damage,
        "evidence_level": "metrics",
        "because": because,
        "missing": list(missing),
        "at_work": ["a-rule"] if risk else [],
    }


def finding(rule: str = "eviction-stale-groups", **changes: Any) -> dict[str, Any]:
    rows = [
        {"step": i, "stale_groups": float(i), "response_length_mean": 9.015625 + i, "empty": None} for i in range(9)
    ]
    found = {
        "rule": rule,
        "step": 3,
        "cause": "eviction",
        "status": "fired",
        "severity": "medium",
        "confidence": "high",
        "title": "Groups were evicted as stale",
        "explain": "140 groups went.",
        "decisive": "140 groups",
        "measures": {"stale_groups_share": 0.127},
        "missing": [],
        "evidence": {"sql": "select step from steps where kind = 'a b' limit 50", "rows": rows, "more": False},
        "confirm": "Repeat with strategy wait.",
        "remedy": [
            {"framework": "trl", "set": "other.key=1", "price": "unknown"},
            {"framework": "verl v1", "set": "trainer.v1.sampler.max_off_policy_strategy=wait", "price": "waiting"},
        ],
        "refs": [],
        "error": None,
    }
    return found | changes


def document(**changes: Any) -> dict[str, Any]:
    """A small valid document: eviction at work, harm untested, one signal missing."""
    entry = {"signal": "stale_groups", "standing": "missing", "because": "not logged", "record": "set fates=true"}
    facts = {"framework": fact("verl"), "trainer": fact("separate_async"), "trainer_family": fact("v1")}
    made = {
        "schema_version": "1.0",
        "tool": {"name": "verl-audit", "version": "0.1.0", "settings": {}},
        "run": {
            "name": "toy",
            "put_together_because": ["both hold the same values"],
            "facts": facts | {"is_async": fact(True), "total_steps": fact(60.0)},
            "first_step": 1,
            "last_step": 60,
            "steps_logged": 60,
            "ended": "finished",
            "last_error": None,
            "inert": {"clip_share": "0 by construction"},
            "corrupt": {"chi2_seq": "padding rows count"},
        },
        "baselines": [{"name": "sync", "facts": {"framework": fact("verl"), "trainer": fact("sync")}}],
        "sources": [source("toy/console.log"), source("toy/run.jsonl")],
        "skipped": {"count": 0, "files": [], "more": 0},
        "problems": [],
        "coverage": {
            "keys": {"mapped": 71, "known": 39, "unknown": 1},
            "unknown_keys": ["custom/key"],
            "causes": {"mismatch": [], "eviction": [entry]},
        },
        "symptom": symptom(),
        "findings": [finding(), finding("quiet", status="clear"), finding("blind", status="fired", severity="info")],
        "causes": {
            "mismatch": cause(),
            "staleness": cause("cannot_tell", missing=["ess"]),
            "eviction": cause("cannot_tell", risk=True, missing=["stale_groups"]),
            "sync": cause(),
        },
        "verdict": verdict(),
        "ledger": ledger(),
        "measures": {},
    }
    return made | changes


def source(path: str) -> dict[str, Any]:
    counts = {"segments": 1, "records": 61, "values_read": 5642, "values_lost": 2, "bytes": 370304}
    return {
        "path": path,
        "format": "verl_console",
        "runs": "toy",
        "precision": "float64",
        "step_kind": "logged",
    } | counts


def symptom(**changes: Any) -> dict[str, Any]:
    return {
        "state": "untested",
        "because": "4 validation points are too few",
        "evidence": None,
        "speed": {"per_update": None, "per_sample": None, "per_hour": None},
        "smallest_detectable": None,
        "run_sd": None,
        "end_gap": None,
        "onset": None,
        "single_run": None,
        "caveats": [],
    } | changes


def verdict(**changes: Any) -> dict[str, Any]:
    return {
        "outcome": "undetermined",
        "causes": [],
        "risks": ["eviction"],
        "other": None,
        "confidence": "medium",
        "because": "the effect is not measured",
        "sentence": SENTENCE,
        "missing": ["stale_groups"],
    } | changes


def ledger() -> dict[str, Any]:
    fates = {"stale_groups": 140.0, "filtered_groups": 0.0, "failed_groups": None, "trained_groups": 960.0}
    return {
        "unit": "groups",
        "fates": fates,
        "decided": 1100.0,
        "generated": None,
        "residual": None,
        "level": "metrics",
    }


def shown(doc: dict[str, Any], width: int = 80, *, verbose: bool = False, **console: Any) -> str:
    out = io.StringIO()
    render(doc, Console(file=out, width=width, **console), verbose=verbose)
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def next_block(text: str) -> str:
    return flat(text[text.index("\nNext\n") :])


def test_the_verdict_comes_first_and_the_next_steps_last() -> None:
    text = shown(document())
    marks = ["UNDETERMINED", "Confidence", "What would decide it", "Run ", "The four steps", "Findings", "Coverage"]
    places = [text.index(mark) for mark in [*marks, "Ledger", "Files", "Next"]]
    assert places == sorted(places)
    assert places[0] == 0
    assert "Undetermined:" not in text


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        ("cause", "CAUSE"),
        ("other", "OTHER"),
        ("none", "NO CAUSE"),
        ("undetermined", "UNDETERMINED"),
        ("novel", "NOVEL"),
    ],
)
def test_each_outcome_has_its_word(outcome: str, word: str) -> None:
    text = shown(document(verdict=verdict(outcome=outcome, sentence="What happened.")))
    assert text.splitlines()[:2] == [word, "What happened."]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_line_is_wider_than_the_console(width: int, verbose: bool) -> None:
    hostile = finding(
        title=LONG * 3, explain="字" * 200, error=LONG, remedy=[{"framework": LONG, "set": LONG, "price": ""}]
    )
    broken = hostile | {"status": "error", "rule": LONG}
    doc = document(
        findings=[hostile, broken, finding(status="insufficient", missing=[{"measure": LONG, "because": LONG}])]
    )
    doc["run"]["name"] = LONG
    doc["problems"] = [{"path": LONG, "offset": 9, "kind": "torn", "detail": LONG, "count": 3}]
    doc["coverage"]["unknown_keys"] = [LONG]
    lines = shown(doc, width, verbose=verbose).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_words_are_not_cut() -> None:
    whole = set(flat(shown(document(), 200)).split())
    assert set(flat(shown(document(), 80)).split()) - whole <= {"response_", "length_", "mean"}


def test_no_codes_without_a_terminal_and_no_colour_when_it_is_off() -> None:
    assert "\x1b" not in shown(document())
    plain = shown(document(), no_color=True, force_terminal=True)
    assert not re.search(r"\x1b\[[\d;]*3\d", plain)
    assert re.search(r"\x1b\[[\d;]*3\d", shown(document(), force_terminal=True, color_system="standard"))


def test_standing_is_in_words_and_shapes() -> None:
    text = shown(document())
    assert "▲ at work (risk)" in text
    assert "✓ cleared" in text
    assert "? cannot tell" in text
    causes = document()["causes"] | {"mismatch": cause("implicated"), "sync": cause("contributing")}
    assert "implicated" in (text := shown(document(causes=causes))) and "contributing" in text


def test_damage_stands_only_where_something_was_measured() -> None:
    lines = shown(document()).splitlines()
    assert "6.9% (0.0% to 12.7%)" in next(line for line in lines if "eviction bias" in line and "▲" in line)
    assert "%" not in next(line for line in lines if "? cannot tell" in line)


@pytest.mark.parametrize("width", [44, 50, 60, 80, 120])
def test_numbers_are_whole_at_every_width(width: int) -> None:
    assert "6.9% (0.0% to 12.7%)" in flat(shown(document(), width))


def test_an_ascii_console_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    doc = document()
    doc["verdict"]["sentence"] = "Gap ≥ 0.01 in 'ключ'"
    render(doc, Console(file=file, width=80), verbose=True)
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "Gap >= 0.01" in text
    assert "! at work (risk)" in text


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(document(), force_terminal=True)


def test_markup_in_the_document_is_shown_as_it_is() -> None:
    doc = document(findings=[finding(title="[bold red]x[/] [/nope] :smile:", explain="[link=http://a]b")])
    doc["run"]["name"] = "[red]run[/red]"
    text = flat(shown(doc))
    assert "[bold red]x[/] [/nope] :smile:" in text
    assert "[link=http://a]b" in text
    assert "[red]run[/red]" in text


def test_control_characters_are_stripped() -> None:
    bad = "a\x1b[31mb\x1b]0;title\x07c\x00d\x9b2Je\u202ef\rg\nh\udc80"
    doc = document(problems=[{"path": bad, "offset": 1, "kind": bad, "detail": bad, "count": 1}])
    doc["run"] |= {"ended": "crashed", "last_error": {"exception": bad, "frames": [bad], "offset": 3}, "name": bad}
    doc["findings"][0] |= {"title": bad, "evidence": {"sql": bad, "rows": [{"step": 1, bad: bad}], "more": True}}
    text = shown(doc, verbose=True)
    assert clean(bad) == "abcdef g h"
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "title" not in text.split("Findings")[0].replace("its", "")


def test_missing_signals_name_their_setting() -> None:
    text = flat(shown(document()))
    assert "What would decide it stale_groups set fates=true" in text
    assert "1. Record stale_groups: set fates=true" in text


def test_what_only_traces_hold_is_advised() -> None:
    doc = document(verdict=verdict(missing=["evicted_lengths"]))
    record = "per-trajectory traces with a row for every evicted trajectory (docs/traces.md)"
    doc["coverage"]["causes"]["eviction"] = [
        {"signal": "evicted_lengths", "standing": "missing", "because": "no metric carries it", "record": record}
    ]
    text = flat(shown(doc))
    assert f"evicted_lengths {record}" in text
    assert f"Record evicted_lengths: {record}" in next_block(shown(doc))


def test_validation_is_asked_for_where_none_is_logged() -> None:
    doc = document(findings=[], verdict=verdict(missing=[]))
    entry = {"signal": "validation", "standing": "missing", "because": "not logged", "record": "trainer.test_freq=10"}
    doc["coverage"]["causes"]["symptom"] = [entry]
    assert next_block(shown(doc)) == "Next 1. Record validation: trainer.test_freq=10"


def test_what_no_setting_records_is_not_a_next_step() -> None:
    doc = document(findings=[])
    doc["coverage"]["causes"]["eviction"][0]["record"] = "logged by every trainer; nothing to set"
    assert next_block(shown(doc)) == "Next 1. Nothing to change."


def test_a_missing_baseline_names_the_option() -> None:
    doc = document(baselines=[], verdict=verdict(missing=["baseline", "unheard_of"], risks=[]), findings=[])
    text = flat(shown(doc))
    assert "baseline --baseline SYNC_RUN_DIR: a synchronous run of the same task" in text
    assert "unheard_of no setting is known that records it" in text
    assert "verl-audit diagnose RUN_DIR --baseline SYNC_RUN_DIR" in next_block(shown(doc))


def test_what_no_cause_needs_in_every_run_comes_with_what_records_it() -> None:
    text = flat(shown(document(verdict=verdict(missing=["configuration", "advantage"], risks=[]), findings=[])))
    assert "configuration keep .hydra/ or the console log beside the metrics of run and baseline" in text
    assert "advantage per-trajectory traces with advantage: in verl v1" in text
    known = flat(shown(document(verdict=verdict(missing=["lr"], risks=[]), findings=[])))
    assert "lr logged whenever the actor is updated" in known


def test_a_baseline_that_does_not_serve_is_asked_for_with_the_reason() -> None:
    text = next_block(shown(document(verdict=verdict(missing=["baseline"]))))
    assert "another one, since with this one 4 validation points are too few" in text


def test_a_dead_run_shows_its_exception_and_frames() -> None:
    doc = document(verdict=verdict(outcome="other", sentence="Other: it died.", missing=[], risks=[]))
    error = {
        "exception": "TypeError: no 'flush'",
        "frames": [f'File "f{i}.py", line 1, in g' for i in range(9)],
        "offset": 7,
    }
    doc["run"] |= {"ended": "died_before_step1", "last_error": error, "first_step": None, "last_step": None}
    text = shown(doc)
    assert text.index("TypeError: no 'flush'") < text.index("The four steps")
    assert "f8.py" in text and "f0.py" not in text
    assert "no training step logged" in flat(text)
    assert "byte 7 of the log" in flat(text)
    assert "The four steps not judged: no training step was logged" in flat(text)
    assert "Reward" not in text and "cannot tell" not in text and "Baseline  none" not in text
    error["offset"] = 0
    assert "byte 0" not in shown(doc)
    assert next_block(text).startswith("Next 1. Repair what stopped the run: TypeError")


def test_a_run_that_crashed_on_its_way_is_headed_so() -> None:
    doc = document()
    error = {"exception": "RuntimeError: out of memory", "frames": [], "offset": 7}
    doc["run"] |= {"ended": "crashed", "last_error": error, "last_step": 37}
    assert shown(doc).splitlines()[:2] == ["CRASHED at step 37", "UNDETERMINED"]


def test_restarts_are_told() -> None:
    doc = document()
    doc["run"]["reconciled"] = {"differences": 0, "rewritten": 12}
    assert "Restarted 12 values of earlier process lives replaced" in flat(shown(doc))
    doc["run"]["reconciled"]["rewritten"] = 0
    assert "Restarted" not in shown(doc)


def test_an_interval_without_width_is_left_out() -> None:
    doc = document()
    doc["causes"]["mismatch"]["damage"] = {"estimate": 0.002, "low": 0.002, "high": 0.002}
    assert "0.2% (" not in shown(doc) and "0.2%" in shown(doc)


def test_one_step_is_one_step() -> None:
    doc = document()
    doc["run"] |= {"first_step": 83, "last_step": 83, "steps_logged": 1}
    assert ", step 83 of 60," in flat(shown(doc))


def test_files_that_were_not_read_are_named() -> None:
    files = [{"path": "run/console.log.gz", "reason": "gzip: unpack it first"}]
    text = flat(shown(document(skipped={"count": 5, "files": files, "more": 2})))
    assert "3 files not read (and 2 files of other kinds):" in text
    assert "run/console.log.gz: gzip: unpack it first and 2 more" in text
    assert "not read" not in shown(document(skipped={"count": 5, "files": [], "more": 0}))


def test_a_few_problems_are_told_once() -> None:
    rows = [{"path": "a.log", "offset": 0, "kind": "torn line", "detail": "cut", "count": 2}]
    text = flat(shown(document(problems=rows)))
    assert text.count("torn line") == 1 and "a.log: torn line: cut, 2 times" in text
    assert "All 1" not in text


def test_at_most_three_next_steps() -> None:
    text = next_block(shown(document(baselines=[])))
    assert "3." in text and "4." not in text
    nothing = document(verdict=verdict(outcome="none", missing=[], risks=[]), findings=[])
    assert next_block(shown(nothing)) == "Next 1. Nothing to change."


def test_a_named_cause_is_mended_before_more_is_recorded() -> None:
    text = next_block(shown(document(verdict=verdict(outcome="cause", causes=["eviction"], risks=[]))))
    assert text.startswith("Next 1. Set trainer.v1.sampler.max_off_policy_strategy=wait (price: waiting)")


def test_a_next_step_is_the_experiment_without_its_reading() -> None:
    doc = document(findings=[finding(confirm="Run 20 steps at verl.v1. A gap that stays is kernels.")])
    assert "To confirm eviction-stale-groups: Run 20 steps at verl.v1." in next_block(shown(doc))
    assert "A gap that stays is kernels." in flat(shown(doc)).split("Next")[0]
    assert "A gap that stays" not in next_block(shown(doc))


def test_findings_stand_gravest_first() -> None:
    findings = [finding(f"r-{s}", severity=s, title=f"Title {s}") for s in ("low", "critical", "info", "high")]
    text = shown(document(findings=findings)).split("Findings", 1)[1]
    places = [text.index(f"Title {s}") for s in ("critical", "high", "low", "info")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("said", "first"),
    [
        (verdict(outcome="cause", causes=["eviction"], risks=["sync"]), "eviction"),
        (verdict(outcome="undetermined", causes=[], risks=["sync"]), "sync"),
        (verdict(outcome="other", causes=[], risks=["sync"]), "health"),
    ],
)
def test_of_equally_grave_findings_those_of_what_is_named_stand_first(said: dict[str, Any], first: str) -> None:
    causes = ("health", "mismatch", "eviction", "sync")
    grave = [finding("r-critical", severity="critical", cause="mismatch")]
    found = fired_findings(document(verdict=said, findings=[finding(f"r-{c}", cause=c) for c in causes] + grave))
    assert [f["rule"] for f in found[:2]] == ["r-critical", f"r-{first}"]


def test_info_findings_are_one_line_unless_verbose() -> None:
    doc = document(findings=[finding(severity="info", explain="The long story.")])
    assert "The long story." not in shown(doc)
    assert "The long story." in shown(doc, verbose=True)


def test_evidence_is_a_short_table_with_a_command_to_paste() -> None:
    text = shown(document())
    assert "stale_groups" in text and "empty" not in text
    assert "9.016" in text and "9.015625" not in text
    assert "first 6 rows with a value; all of them:" in text
    assert """verl-audit sql RUN_DIR 'select step from steps where kind = '"'"'a b'"'"'""" in text


def test_sql_comments_do_not_swallow_the_rest() -> None:
    sql = "select step -- every step\nfrom steps where a = '--' -- end"
    text = shown(document(findings=[finding(evidence={"sql": sql, "rows": [], "more": False})]))
    assert "'select step from steps where a =" in flat(text)
    assert "every step" not in text and "'--'" in text


def test_evidence_that_fails_says_so() -> None:
    text = shown(document(findings=[finding(evidence={"sql": "select", "error": "Parser Error: [x]"})]))
    assert "its query failed: Parser Error: [x]" in text


def test_remedies_are_those_of_the_framework() -> None:
    text = shown(document())
    assert "max_off_policy_strategy=wait" in text and "other.key=1" not in text
    assert "1 more for other frameworks" in text
    doc = document()
    doc["run"]["facts"] = {}
    assert "other.key=1" in shown(doc)


def test_broken_rules_are_loud() -> None:
    text = flat(shown(document(findings=[finding("mine", status="error", error="Binder Error: [no] column")])))
    assert "BROKEN RULES: 1 rule could not run; what they check is not cleared." in text
    assert "mine Binder Error: [no] column" in text


def test_rules_without_data_are_counted_with_their_reasons() -> None:
    missing = [{"measure": "gap", "because": "gap was not logged; lag was not logged"}]
    doc = document(findings=[finding(f"r{i}", status="insufficient", missing=missing) for i in range(3)])
    assert "3 rules without data: gap was not logged (3 rules); lag was not logged (3 rules)." in flat(shown(doc))
    assert "r1" not in shown(doc) and "r1" in shown(doc, verbose=True)


def test_coverage_names_missing_inert_corrupt_and_unknown() -> None:
    assert "Setting: set fates=true" not in flat(shown(document()))  # "What would decide it" has it already
    text = flat(shown(document(), verbose=True))
    assert "111 metric keys: 71 used, 39 known and not needed, 1 unknown" in text
    assert "stale_groups (for eviction): not logged. Setting: set fates=true" in text
    assert "clip_share: 0 by construction" in text
    assert "chi2_seq: padding rows count" in text
    assert "custom/key" in text


def test_a_reason_that_begins_like_another_is_told_once() -> None:
    doc = document()
    doc["run"]["inert"] = {"clip_share": "0 by construction and blind", "clip_lower_share": "0 by construction"}
    assert "clip_lower_share, clip_share: 0 by construction and blind" in flat(shown(doc))


def test_the_ledger_does_not_count_the_unlogged_as_zero() -> None:
    text = flat(shown(document()))
    assert "1100 groups decided = 960 trained + 140 stale; none filtered; not logged: failed" in text
    assert "Ledger" not in shown(document(ledger=ledger() | {"decided": None}))


def test_problems_are_counted_by_file_and_kind() -> None:
    rows = [{"path": "a.log", "offset": i, "kind": "torn line", "detail": "", "count": 2} for i in range(8)]
    text = flat(shown(document(problems=rows)))
    assert "a.log: torn line, 16 times" in text
    assert "The first 5:" in text and "a.log at byte 4: torn line" in text and "a.log at byte 5" not in text


def test_sources_are_one_line_unless_verbose() -> None:
    assert "2 files (741 kB), 122 records, 11284 values, 4 lost" in shown(document())
    assert "toy/run.jsonl" not in shown(document())
    assert "toy/run.jsonl" in shown(document(), verbose=True)


def test_the_symptom_shows_speeds_limits_and_onset() -> None:
    speed = {"value": 0.6123, "low": 0.4, "high": 0.9, "interval": "two-sided 90 %"}
    slow = symptom(
        state="slower",
        because="learning speed 0.61",
        evidence="validation",
        speed={"per_update": speed, "per_sample": speed, "per_hour": None},
        smallest_detectable=0.7,
        run_sd=0.15,
        onset={"low": 20.0, "high": 31.0},
    )
    text = flat(shown(document(symptom=slow)))
    assert "slower: learning speed 0.61" in text
    assert "per update: 0.61 (0.40 to 0.90)" in text
    assert "per hour: not known" in text
    assert "a slowdown to 0.70 or below would be seen" in text
    assert "began to fall behind between steps 20 and 31" in text
    early = flat(shown(document(symptom={**slow, "onset": {"low": 0.0, "high": 31.0}})))
    assert "began to fall behind by step 31 at the latest" in early


def test_verbose_gives_reasons() -> None:
    doc = document()
    doc["run"]["facts"]["trainer"]["reason"] = "only it logs this key"
    assert "only it logs this key" not in shown(doc)
    assert "only it logs this key" in flat(shown(doc, verbose=True))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (140.0, "140"),
        (0.127272, "0.1273"),
        (12345.678, "12346"),
        ("nan", "nan"),
        (True, "True"),
        (1e-7, "1e-07"),
    ],
)
def test_numbers(value: object, text: str) -> None:
    assert number(value) == text


def test_wrap_breaks_long_words_after_separators() -> None:
    assert wrap("see trainer.v1.sampler.strategy=wait", 12) == ["see trainer.", "v1.sampler.", "strategy=", "wait"]
    assert wrap("", 10) == [""]
    assert wrap("a" * 12, 5) == ["aaaaa", "aaaaa", "aa"]
