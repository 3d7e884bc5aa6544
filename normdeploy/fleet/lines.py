"""In which line of a TOML file a key stands."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line, from 1 on, with which the value at ``path`` is there, or as much of the path as the file has.

    tomllib tells no places. But a file is a list of statements, and the first of its beginnings that is valid TOML and
    holds the key ends with the line that sets it. (That reads the file once for each line: it is for errors.)
    """
    while path and not _holds(tomllib.loads(text), path):
        path = path[:-1]
    lines = text.split("\n")
    for count in range(1, len(lines) + 1):
        try:
            found = tomllib.loads("\n".join(lines[:count]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        if _holds(found, path):
            return count
    return 1


def _holds(value: Any, path: Sequence[str | int]) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True
