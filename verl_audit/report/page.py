"""A page of terminal text: safe words, whole words on every line, plain ASCII where the console needs it.

Rich tables and paragraphs cut long keys and paths anywhere; these lines break at spaces, else after `/`, `.`, `_`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

MAX_WIDTH = 120
"""Columns used of a wider terminal; longer lines are hard to read."""
MIN_WIDTH = 40
MAX_CELL = 24
"""Columns of a table cell, beyond which it wraps."""
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]|\x9b[0-?]*[ -/]*[@-~]")
_BREAKS = re.compile(r"[^/._,=&?:-]*[/._,=&?:-]+|[^/._,=&?:-]+")
_ASCII = str.maketrans(
    {
        "≤": "<=", "≥": ">=", "×": "x", "·": "-", "–": "-", "—": "-", "−": "-", "…": "...", "→": "->", "±": "+/-",
        "‘": "'", "’": "'", "“": '"', "”": '"', "π": "pi", "θ": "theta", "μ": "mu", "σ": "sigma", "\u00a0": " ",
    }
)  # fmt: skip


def clean(value: object) -> str:
    """The text of `value` without terminal sequences or control and direction marks, its whitespace single spaces."""
    text = " ".join(_ANSI.sub("", str(value)).split())
    return "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))


def number(value: object) -> str:
    """A number with 4 significant digits (whole numbers in full), a dash for nothing, other values as clean text."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def percent(share: float) -> str:
    """A share as a percentage: 0.0686 is 6.9%."""
    return f"{100 * share:.1f}%"


def count(n: int, noun: str) -> str:
    """`n` with its noun: 1 file, 2 files."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def listed(names: Sequence[object], cap: int) -> str:
    """The first `cap` names with commas, and how many more there are."""
    shown = ", ".join(clean(name) for name in names[:cap])
    return shown + (f" and {len(names) - cap} more" if len(names) > cap else "")


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells; a word longer than a line breaks after a separator, else at the edge."""
    return wrap_words(text.split(), width)


def wrap_words(words: Iterable[str], width: int) -> list[str]:
    """As `wrap`, for words that may hold spaces of their own."""
    lines: list[str] = []
    line = ""
    for word in words:
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        *full, line = _pieces(word, width, line)
        lines += full
    return [*lines, line] if line or not lines else lines


def _pieces(word: str, width: int, line: str) -> list[str]:
    """Lines that begin with `line` and go on with a word that does not fit beside it."""
    if cell_len(word) <= width:
        return [line, word] if line else [word]
    lines: list[str] = []
    line = f"{line} " if line else ""
    for part in _parts(word, width):
        if line and cell_len(line + part) > width:
            lines.append(line.rstrip())
            line = ""
        line += part
    return [*lines, line]


def _parts(word: str, width: int) -> Iterator[str]:
    """Parts of a word between separators, single characters where a part is itself longer than a line."""
    for part in _BREAKS.findall(word):
        yield from (part,) if cell_len(part) <= width else part


def longest_part(word: str) -> int:
    """Cells that a word needs when it may break after separators."""
    return max((cell_len(p) for w in word.split() for p in _BREAKS.findall(w)), default=0)


class Page:
    """Writes wrapped lines to a console; `ascii` says that the console shows nothing else."""

    def __init__(self, console: Console) -> None:
        """Take width and encoding from the console."""
        self.console = console
        self.ascii = console.options.ascii_only
        self.width = max(min(console.width, MAX_WIDTH), MIN_WIDTH)

    def text(self, value: object) -> str:
        """`value` as clean text that the console can show."""
        text = clean(value)
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode() if self.ascii else text

    def glyph(self, shape: str, plain: str) -> str:
        """A shape, or its stand-in where the console shows ASCII only."""
        return plain if self.ascii else shape

    def blank(self) -> None:
        """An empty line."""
        self.console.print()

    def heading(self, text: str, rest: str = "") -> None:
        """A section's name after an empty line, and what it says in short."""
        self.blank()
        self.item(text, rest, style="bold")

    def para(self, value: object, indent: int = 0, style: str = "", hang: int = 0) -> None:
        """A paragraph; lines after the first are indented by `hang` more."""
        for i, line in enumerate(wrap(self.text(value), self.width - indent - hang)):
            self._emit((" " * (indent + (hang if i else 0)) if line else "", ""), (line, style))

    def item(self, label: str, value: object, *, indent: int = 0, column: int = 0, style: str = "") -> None:
        """A label with its text beside it, wrapped in a column of its own that starts at `column`."""
        label = self.text(label)
        start = max(indent + cell_len(label) + 2, column)
        if start > self.width // 2:
            self.para(label, indent, style)
            self.para(value, indent + 4)
            return
        for i, line in enumerate(wrap(self.text(value), self.width - start)):
            head = " " * indent + label if i == 0 else ""
            self._emit(
                (head, style if i == 0 else ""), (" " * (start - cell_len(head)) if line else "", ""), (line, "")
            )

    def verbatim(self, lines: Iterable[str], indent: int) -> None:
        """Lines already wrapped, such as a command to paste."""
        for line in lines:
            self._emit((" " * indent, ""), (line, ""))

    def row(
        self,
        cells: Sequence[str],
        widths: Sequence[int],
        indent: int = 0,
        *,
        style: str = "",
        right: Sequence[bool] | None = None,
    ) -> None:
        """Cells wrapped in columns; `right` says of each column whether its text goes to the right edge.

        On a console too narrow for the columns the cells follow one another.
        """
        if sum(widths) + 2 * (len(widths) - 1) + indent > self.width or min(widths) < 1:
            self.para("  ".join(cell for cell in cells if cell), indent, style, hang=2)
            return
        columns = [wrap(self.text(cell), width) for cell, width in zip(cells, widths, strict=True)]
        for n in range(max(map(len, columns))):
            parts = [
                _pad(lines[n] if n < len(lines) else "", width, right=edge)
                for lines, width, edge in zip(columns, widths, right or [False] * len(columns), strict=True)
            ]
            self._emit((" " * indent, ""), ("  ".join(parts).rstrip(), style))

    def _emit(self, *parts: tuple[str, str]) -> None:
        self.console.print(Text.assemble(*parts, no_wrap=True, overflow="ignore"), soft_wrap=True, highlight=False)


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


Row = Mapping[str, Any]
"""One row of a table: column name and plain value."""


def table(page: Page, rows: Sequence[Row], names: Sequence[str], indent: int) -> list[str]:
    """Print the columns that fit, headers broken at separators; return the names of those left out."""
    cells = {name: [_shortened(page.text(number(row.get(name)))) for row in rows] for name in names}
    widths = _column_widths(cells, page, page.width - indent)
    shown = list(names)[: len(widths)]
    right = [not any(isinstance(row.get(name), str) for row in rows) for name in shown]
    page.row(shown, widths, indent, style="bold", right=right)
    for values in zip(*(cells[n] for n in shown), strict=True):
        page.row(values, widths, indent, right=right)
    return list(names)[len(widths) :]


def _shortened(text: str) -> str:
    """At most two lines' worth of a long text cell, whole words; the query beside the table gives the rest."""
    lines = wrap(text, MAX_CELL * 2)
    return f"{lines[0]} ..." if len(lines) > 1 else text


def _column_widths(cells: Mapping[str, Sequence[str]], page: Page, room: int) -> list[int]:
    widths: list[int] = []
    for name, values in cells.items():
        widest = min(max(map(cell_len, values), default=1), MAX_CELL)
        widths.append(max(widest, min(longest_part(page.text(name)), MAX_CELL), 1))
        if sum(widths) + 2 * (len(widths) - 1) > room:
            widths = widths[:-1] or [room]
            break
    return _widened(widths, list(cells), room)


def _widened(widths: Sequence[int], names: Sequence[str], room: int) -> list[int]:
    """Give the room left to the columns, first come first served, until their headers need no break."""
    spare = room - sum(widths) - 2 * (len(widths) - 1)
    wider: list[int] = []
    for width, name in zip(widths, names, strict=False):
        more = max(min(cell_len(clean(name)) - width, spare), 0)
        more = more if width + more >= cell_len(clean(name)) else 0
        spare -= more
        wider.append(width + more)
    return wider
