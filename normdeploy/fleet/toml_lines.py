"""In which line of a TOML file a key stands."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

# Lines of one statement, at most; of a longer one the line is not the right one.
_STATEMENT = 50


def line_of_key(text: str, path: Sequence[str | int]) -> int:
    """The line, from 1 on, with which the value at ``path`` is there, or as much of the path as the file has.

    tomllib tells no places. But a file is a list of statements, and the first of its beginnings that is valid TOML and
    holds the key ends with the line that sets it. Longer ones hold it too, so the lines are bisected.
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
    """Parse the first ``count`` lines, or as many fewer as leave no statement unfinished."""
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
