"""Render results: ``print`` and notebooks show the same tables as the command line."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..errors import escape_line

if TYPE_CHECKING:
    from rich.console import Console

# Width of printed tables in characters; the command line uses the same width for a file or a pipe.
_WIDTH = 120
# Maximum length of the facts in a ``repr``, in characters
_REPR = 240
_PRE = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'


class ShortRepr:
    """Record whose ``repr`` is one line with the main facts, so that a REPL or a failed test prints a short text.

    Subclasses are dataclasses with ``repr=False``.
    """

    def summarize(self) -> str:
        """Describe the record in one line. If it has a verdict, the line begins with it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        text = escape_line(self.summarize())
        if len(text) > _REPR:
            text = f"{text[:_REPR]}…"
        return f"<{type(self).__qualname__}: {text}>"


class Renderable(ShortRepr):
    """Result of a verb.

    ``str(result)`` is its table in 120 columns, without colors and without a newline at the end. A notebook shows the
    same in color.
    """

    def show(self, console: Console) -> None:
        """Print the tables that the command line prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        self.show(Console(file=text, width=_WIDTH, highlight=False, color_system=None))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(
            file=io.StringIO(), width=_WIDTH, highlight=False, record=True, color_system="standard", force_terminal=True
        )
        self.show(console)
        return console.export_html(inline_styles=True, code_format=_PRE)


def make_printable(value: Any) -> Any:
    """Make all texts of ``value`` safe for a terminal.

    Returns:
        a value of the same structure; ``value`` itself if nothing changed.
    """
    if isinstance(value, Enum):
        # Texts of an enum are safe, and a converted text would not be equal to the enum member.
        return value
    if isinstance(value, str):
        return escape_line(value)
    if isinstance(value, tuple):
        items = tuple(map(make_printable, value))
        if any(a is not b for a, b in zip(items, value, strict=True)):
            return items
        return value
    if isinstance(value, list):
        return [make_printable(item) for item in value]
    if isinstance(value, Mapping):
        return {make_printable(name): make_printable(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        safe = {name: make_printable(item) for name, item in vars(value).items()}
        if any(safe[name] is not item for name, item in vars(value).items()):
            return replace(value, **safe)
        return value
    return value
