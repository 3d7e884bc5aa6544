"""Render HTML pages. A page is one file without scripts, and makes no network requests.

Texts come from untrusted files. Templates escape them, and `sanitize_texts` replaces control characters and truncates
them. The page's content policy (``templates/head.html``) stops the browser from loading anything.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NormdeployError, escape_lines

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

NEEDED = ("jinja2", "matplotlib")


def require_page_libraries() -> None:
    """Check that the libraries for pages are installed. Callers do this before any work.

    Raises:
        NormdeployError: a library of the extra ``report`` is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NormdeployError(
            f"--html needs {' and '.join(missing)}, not installed here: pip install jinja2 matplotlib"
        )


def template_environment() -> jinja2.Environment:
    """Load the templates.

    Returns:
        a jinja2 environment with the filters num, size, shape and whole.

    Raises:
        NormdeployError: a library of the extra ``report`` is missing.
    """
    require_page_libraries()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["filled_columns"] = find_filled_columns
    environment.filters.update(num=format_number, size=format_bytes, shape=format_shape, whole=keep_numbers_whole)
    return environment


def sanitize_texts(value: Any, longest: int) -> Any:
    """Escape control characters in all texts of ``value`` and truncate them to ``longest`` letters.

    Returns:
        a value of the same structure; sequences become lists.
    """
    if isinstance(value, str):
        text = escape_lines(value)
        if len(text) <= longest:
            return text
        return f"{text[:longest]} … ({len(text) - longest} more letters)"
    if isinstance(value, Mapping):
        return {sanitize_texts(k, longest): sanitize_texts(v, longest) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [sanitize_texts(v, longest) for v in value]
    return value


def find_filled_columns(rows: Sequence[Mapping[str, Any]], *columns: str) -> dict[str, bool]:
    """Find the columns of a table that are not empty.

    Returns:
        column -> True if any row has a value in the column.
    """
    return {c: any(row.get(c) not in (None, "", [], ()) for row in rows) for c in columns}


def format_number(value: Any) -> str:
    """Format a measured number with at most three digits.

    Returns:
        the text; a dash for None.
    """
    if value is None:
        return "–"
    number = float(value)
    if not math.isfinite(number) or number == 0 or 1e-2 <= abs(number) < 1e4:
        if not abs(number) >= 1000:
            return f"{number:.3g}"
        return f"{number:.0f}"
    return f"{number:.1e}"


def keep_numbers_whole(text: str) -> Markup:
    """Keep each number of ``text`` on one line. Without this, browsers break 1e-07 after the hyphen.

    Returns:
        escaped HTML.
    """
    from markupsafe import Markup, escape

    pieces = re.split(r"([^\s,()]{0,20}-\d[^\s,()]{0,9})", text)
    return Markup("").join(
        Markup('<span class="whole">{}</span>').format(p) if i % 2 else escape(p) for i, p in enumerate(pieces)
    )


def format_bytes(count: int) -> str:
    """Format a number of bytes.

    Returns:
        text with a unit, for example "1.5 MB".
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} bytes"


def format_shape(sizes: Sequence[int]) -> str:
    """Format a shape.

    Returns:
        text, for example "3×224×224".
    """
    return "×".join(map(str, sizes))
