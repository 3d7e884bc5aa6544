"""Find the line of a key in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

# Maximum number of lines of a statement. For a longer statement, the reported line is wrong.
_STATEMENT = 50


def line_of_key(text: str, path: Sequence[str | int]) -> int:
    """Find the line that sets the value at ``path``, or at the longest part of ``path`` that the file contains.

    tomllib reports no positions. But a file is a list of statements. Parse the first n lines of the file, without an
    unfinished statement at their end. The smallest n for which the result contains the key is the number of the line
    that sets the key. For every larger n, the result contains the key too, so a binary search finds the smallest n.

    Returns:
        line number, starting at 1.
    """
    whole = tomllib.loads(text)
    while path and not _has_path(whole, path):
        path = path[:-1]
    lines = text.split("\n")
    lacks = 0
    holds = len(lines)
    while holds - lacks > 1:
        middle = (lacks + holds) // 2
        if _has_path(_parse_first_lines(lines, middle), path):
            holds = middle
        else:
            lacks = middle
    return holds


def _parse_first_lines(lines: Sequence[str], count: int) -> dict[str, Any]:
    """Parse the first ``count`` lines, without an unfinished statement at their end."""
    for least in range(count, max(0, count - _STATEMENT), -1):
        try:
            return tomllib.loads("\n".join(lines[:least]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
    return {}


def _has_path(value: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True
