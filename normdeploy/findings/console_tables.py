"""Build tables for the terminal that do not break words if possible."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..errors import escape_line

# Minimum width of a column in which a long name is elided, in characters
_LEAST = 6
# An elided part of a word counts as this number of additional lines when column widths are compared.
_ELISION = 5
# Number of rows that are measured to choose the column widths
_MEASURED = 60
# Parts of a word between which a line may break
_PARTS = re.compile(r".{8,}?(?:\(|[./](?=[A-Za-z_{]))(?=.)|.+")


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        whole: True if cells are never broken or elided. Set for columns of numbers.
    """

    title: str
    whole: bool = False
    justify: JustifyMethod = "left"
    style: str = ""


@dataclass
class WordTable:
    """Table whose columns share the terminal's width so that words stay whole.

    Lines break between words. A word that is longer than its column breaks after a parenthesis, or after a dot or
    slash of a path. The middle of a part that is still too long is elided.
    """

    columns: Sequence[Column]
    form: box.Box | None = None
    padding: tuple[int, int] = (0, 2)
    titled: bool = True
    rows: list[tuple[tuple[Text, ...], str]] = field(default_factory=list)

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row of as many cells as there are columns."""
        self.rows.append((tuple(Text(c) if isinstance(c, str) else c for c in cells), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table at the width that ``options`` allow."""
        lines = int(self.form is not None)
        gaps = (len(self.columns) - 1) * (sum(self.padding) + lines) + 2 * lines
        widths = self._share_width(options.max_width - gaps)
        left, right = self.padding
        table = Table(box=self.form, pad_edge=False, padding=(0, right, 0, left), show_header=self.titled)
        for column, width in zip(self.columns, widths, strict=True):
            table.add_column(
                Text(column.title) if column.whole else fit_words(Text(column.title), width),
                width=width,
                justify=column.justify,
                style=column.style,
                overflow="fold",
            )
        for cells, style in self.rows:
            table.add_row(
                *(fit_words(cell, width) for cell, width in zip(cells, widths, strict=True)), style=style or None
            )
        yield table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Measure the table as wide as ``options`` allow."""
        return Measurement(options.max_width, options.max_width)

    def _share_width(self, available: int) -> list[int]:
        """Distribute ``available`` characters among the columns.

        Each column first gets the width of its longest word. The remaining width goes to the columns in which it saves
        the most lines.
        """
        rows = [cells for cells, _ in self.rows]
        if self.titled:
            rows.insert(0, tuple(Text(c.title) for c in self.columns))
        columns = [_MeasuredColumn([cells[i].plain for cells in rows], c.whole) for i, c in enumerate(self.columns)]
        widths = [c.least for c in columns]
        if sum(widths) > available:
            # The longest words do not fit: give each column at most an equal share, and elide longer words.
            widths = [c.least if c.whole else min(c.least, max(_LEAST, available // len(columns))) for c in columns]
        while sum(widths) > available:
            width, widest = max((w, i) for i, w in enumerate(widths) if not columns[i].whole or max(widths) <= _LEAST)
            if width <= _LEAST:
                break
            widths[widest] -= 1
        while (spare := available - sum(widths)) > 0:
            now = _table_cost([c.count_lines(w) for c, w in zip(columns, widths, strict=True)])
            best, wider = 0.0, widths
            for i, column in enumerate(columns):
                for more in column.useful_growths(widths[i], spare):
                    tried = [w + more * (k == i) for k, w in enumerate(widths)]
                    cost = _table_cost([c.count_lines(w) for c, w in zip(columns, tried, strict=True)])
                    if (now - cost) / more > best:
                        best, wider = (now - cost) / more, tried
            if wider is widths:
                break
            widths = wider
        return widths


class _MeasuredColumn:
    """Column whose cells' line counts can be computed for any width."""

    def __init__(self, texts: Sequence[str], whole: bool) -> None:
        self.texts = texts[:_MEASURED]
        self.whole = whole
        self.most = max((cell_len(line) for t in texts for line in t.split("\n")), default=1) or 1
        pieces = (cell_len(part) for t in texts for part in _iter_parts(t))
        self.least = self.most if whole else max(pieces, default=1)
        self._lines: dict[int, tuple[int, ...]] = {}

    def count_lines(self, width: int) -> tuple[int, ...]:
        """Count the lines that each cell needs at ``width``."""
        if width not in self._lines:
            self._lines[width] = tuple(_count_lines(t, width) for t in self.texts)
        return self._lines[width]

    def useful_growths(self, width: int, spare: int) -> Iterable[int]:
        """Yield the growths of the column, up to ``spare``, that reduce its number of lines."""
        before = self.count_lines(width)
        for more in range(1, min(spare, self.most - width) + 1):
            if (lines := self.count_lines(width + more)) != before:
                yield more
                before = lines


def _table_cost(lines: Sequence[Sequence[int]]) -> float:
    """Return the cost of a table's layout: its height, then the number of lines in all cells."""
    return sum(map(max, zip(*lines, strict=True))) + 0.1 * sum(map(sum, lines))


def _count_lines(text: str, width: int) -> int:
    """Count the lines of a cell. Each elided part counts as `_ELISION` additional lines."""
    count = 0
    for line in text.split("\n"):
        count += 1
        used = 0
        for gap, word in re.findall(r"(\s*)(\S+)", line):
            length = cell_len(word)
            if used and used + len(gap) + length > width:
                count += 1
                used = 0
            if length <= width:
                used += length + len(gap) * (used > 0)
                continue
            for part in map(cell_len, _iter_parts(word)):
                if used and used + part > width:
                    count += 1
                    used = 0
                count += _ELISION * (part > width)
                used += min(part, width)
    return count


def _iter_parts(text: str) -> Iterable[str]:
    """Yield the pieces of ``text`` that a line break must not split: words, and parts of calls and paths."""
    for word in text.split():
        yield from _PARTS.findall(word)


def fit_words(text: Text, width: int) -> Text:
    """Make every word of ``text`` fit into ``width`` cells.

    Returns:
        the text with line breaks inside long calls and paths, and with the middle of other long words elided.
    """
    if all(cell_len(word) <= width for word in text.plain.split()):
        return text
    fitted = text.blank_copy()
    for piece in re.finditer(r"\s+|\S+", text.plain):
        word = text[piece.start() : piece.end()]
        if piece[0].isspace() or cell_len(piece[0]) <= width:
            fitted.append_text(word)
            continue
        line = 0
        for part in _PARTS.finditer(piece[0]):
            shown = _elide_middle(word[part.start() : part.end()], width)
            if line and line + cell_len(shown.plain) > width:
                fitted.append("\n")
                line = 0
            fitted.append_text(shown)
            line += cell_len(shown.plain)
    return fitted


def _elide_middle(word: Text, width: int) -> Text:
    """Replace the middle of a word by "…" if the word is longer than ``width`` cells."""
    if cell_len(word.plain) <= width:
        return word
    head, tail = (width - 1) // 2, width - 1 - (width - 1) // 2
    start, end = 0, len(word.plain)
    while start < end and cell_len(word.plain[: start + 1]) <= head:
        start += 1
    while end > start and cell_len(word.plain[end - 1 :]) <= tail:
        end -= 1
    return word[:start].append("…").append_text(word[end:])


def make_table(*columns: str | Column, padding: tuple[int, int] = (1, 1)) -> WordTable:
    """Return an empty table."""
    return WordTable([Column(c) if isinstance(c, str) else c for c in columns], box.SIMPLE_HEAD, padding)


def make_grid(*columns: Column) -> WordTable:
    """Return an empty table without a header and lines."""
    return WordTable(columns, padding=(0, 2), titled=False)


def file_title(file: str) -> Text:
    """Make the title above a file's tables, for verbs with several files.

    Returns:
        bold file name on one line.
    """
    return Text(escape_line(file), style="bold")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print the notes, one per line."""
    for note in notes:
        console.print(Text(f"note: {escape_line(note)}", style="yellow"))
