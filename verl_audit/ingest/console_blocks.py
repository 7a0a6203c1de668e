"""Texts of several lines in a console log: the configuration echo, tracebacks, printed validation results.

Other processes, and other threads of the same one, print between the lines. A block takes only lines of its
own process (`owner`, the line's prefix) that look like its continuation.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_audit.ingest.model import ConfigFound, Event, Identity, Parsed

_STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_STRINGS = re.compile(_STRING)
_LEADING_STRING = re.compile(rf"[\s(]*({_STRING})")
_CONFIG_LINE = re.compile(r"\s+['\"{\[(\d\-}\])]|\s+(?:None|True|False|nan|inf)\b|\{'")
_VALIDATION = re.compile(r"(['\"]?)(Initial|Final) validation metrics: (\{.*)")
_PAIR = re.compile(r"(['\"])((?:(?!\1).)+)\1: (?:[\w.]+\()?(-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|nan|inf))\)?(?=[,}])")
_EXCEPTION = re.compile(r"(?!(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b)[A-Za-z_][\w.]*(?:\([\w.]+\))?(?:: .*|:?)$")
_CARETS = re.compile(r"[\s^~]*$")
_FRAMES_KEPT = 4
_DETAIL = 300
_TRACEBACKS_KEPT = 100


class Block(Protocol):
    """Lines of one process that belong together."""

    owner: bytes

    def take(self, line: str) -> bool:
        """Look at the next line of the same process; true when the block is complete."""
        ...

    def emit(self, parsed: Parsed) -> None:
        """Report what was collected."""
        ...


@dataclass
class ConfigEcho:
    """The pretty-printed configuration every verl entry point starts with."""

    owner: bytes
    offset: int
    lines: list[str] = field(default_factory=list)
    depth: int = 0

    def take(self, line: str) -> bool:
        """Collect the line if it looks like pretty-printed literals; true when all brackets are closed."""
        if self.lines and not _CONFIG_LINE.match(line):
            return False
        self.lines.append(line)
        code = _STRINGS.sub("", line)
        self.depth += sum(code.count(c) for c in "{[(") - sum(code.count(c) for c in "}])")
        return self.depth <= 0

    def emit(self, parsed: Parsed) -> None:
        """Report the configuration and whose run it is."""
        tree = _literal("\n".join(self.lines))
        if not isinstance(tree, dict):
            parsed.note("config_unreadable", "the printed configuration is incomplete or garbled", self.offset)
            return
        parsed.configs.append(ConfigFound(tree, "console"))
        parsed.identity = identity(tree)


def identity(tree: dict[str, Any]) -> Identity:
    """Project and experiment of a verl configuration."""
    trainer = tree.get("trainer")
    names = trainer if isinstance(trainer, dict) else {}
    project, experiment = names.get("project_name"), names.get("experiment_name")
    return Identity(
        project=project if isinstance(project, str) else None,
        experiment=experiment if isinstance(experiment, str) else None,
    )


def _literal(text: str) -> object:
    """A Python literal; bare `inf` and `nan`, which `pprint` writes as well, are made readable first."""
    bare = re.compile(rf"({_STRING})|\b(inf|nan)\b")
    for candidate in (text, bare.sub(lambda m: m[1] or ("1e999" if m[2] == "inf" else "None"), text)):
        try:
            found: object = ast.literal_eval(candidate)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        return found
    return None


@dataclass
class Traceback:
    """A Python traceback; its last line names the exception."""

    owner: bytes
    offset: int
    ignored: bool
    """Python said "Exception ignored in": it did not stop anything."""
    frames: list[str] = field(default_factory=list)
    exception: str = ""
    strays: int = 0

    def take(self, line: str) -> bool:
        """Collect frames; true at the line that names the exception."""
        if line.startswith("  File "):
            self.frames.append(line.strip())
        elif _CARETS.match(line) or line[0] == " ":
            return False
        elif _EXCEPTION.match(line):
            self.exception = line[:_DETAIL]
            return "RayTaskError(" not in line  # Ray appends the frames of the remote side
        else:
            self.strays += 1
        return self.strays > 20

    def emit(self, parsed: Parsed) -> None:
        """Report the exception and its last frames as JSON, once if it repeats."""
        detail = {
            "exception": self.exception or None,
            "ignored": self.ignored,
            "frames": self.frames[-_FRAMES_KEPT:],
        }
        text = json.dumps(detail, ensure_ascii=False)
        known = [e for e in parsed.events if e.kind == "traceback"]
        if any(e.detail == text for e in known):
            return
        if len(known) > _TRACEBACKS_KEPT:  # sampled code brings its own; the last one is the likely crash
            parsed.events.remove(known[-1])
            parsed.note("more_tracebacks", f"the first {_TRACEBACKS_KEPT} and the last are kept", self.offset)
        parsed.events.append(Event("traceback", text, offset=self.offset))


@dataclass
class Validation:
    """`Initial validation metrics: {...}`, printed by pprint as a string cut into quoted pieces.

    The event's detail is JSON `{"when": "Initial", "metrics": {...}}`, NaN and infinity as bare tokens.
    """

    owner: bytes
    offset: int
    step: int | None
    when: str = ""
    text: str = ""
    waited: int = 0

    def take(self, line: str) -> bool:
        """Collect quoted pieces; true at the closing brace."""
        if not self.when:
            return self._first(line)
        if piece := _LEADING_STRING.match(line):
            self.text += _unquote(piece[1])
        self.waited += 1
        return self.text.endswith("}") or self.waited > 500

    def _first(self, line: str) -> bool:
        match = _VALIDATION.search(line)
        if not match:
            return True
        self.when = match[2]
        quoted = _STRINGS.match(line, match.start()) if match[1] else None
        self.text = _unquote(quoted[0]) if quoted else match[3]
        return self.text.endswith("}") or not quoted

    def emit(self, parsed: Parsed) -> None:
        """Report the results as JSON."""
        metrics = {m[2]: float(m[3]) for m in _PAIR.finditer(self.text.partition("{")[2])}
        if metrics:
            detail = json.dumps({"when": self.when, "metrics": metrics}, ensure_ascii=False)
            parsed.events.append(Event("validation_text", detail, self.step, self.offset))


def _unquote(literal: str) -> str:
    try:
        text = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return literal[1:-1]
    return str(text)
