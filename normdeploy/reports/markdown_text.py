"""Write texts and tables as Markdown. Names in them come from files and must not add markup, links, HTML or lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import escape_line

_MARKUP = re.compile(
    r"[\\`*|\[\]!~$]"
    # An underscore inside a word is plain text.
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    # GitHub turns these into links, without brackets.
    r"|:(?=//)|(?<=www)\."
    # Start of a heading, a quotation, a list or a rule
    r"|^[-+=>#]|(?<=^\d)[.)](?!\S)|(?<=^\d\d)[.)](?!\S)",
    re.IGNORECASE,
)


def escape_markdown(text: str) -> str:
    """Escape a text for one line or one cell of Markdown.

    Returns:
        Markdown that shows the text itself.
    """
    return _MARKUP.sub(r"\\\g<0>", escape_line(text)).replace("&", "&amp;").replace("<", "&lt;")


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table. All texts are escaped.

    Args:
        rows: as many texts for each row as there are titles.

    Returns:
        Markdown that ends with a newline.
    """
    lines = [titles, *rows]
    cells = [f"| {' | '.join(map(escape_markdown, line))} |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(titles), *cells[1:]]) + "\n"


def markdown_list(texts: Iterable[str]) -> str:
    """Write a list with one line for each text. All texts are escaped.

    Returns:
        Markdown; "" for no texts.
    """
    return "".join(f"- {escape_markdown(text)}\n" for text in texts)


def markdown_code(lines: Iterable[str]) -> str:
    """Write a block of code. Indented code needs no fence, which a line of the code could close.

    Returns:
        Markdown.
    """
    return "".join(f"    {escape_line(line)}\n" for line in lines)
