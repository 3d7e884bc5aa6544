"""Reads TOML that somebody else may have written, in a time that is linear in its size."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_PARTS = 100
# A key or a name of a table with one part more. A part does not start within a word, or every letter would be a start.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w.-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a text as TOML.

    tomllib takes a time and a memory that are the square of a dotted key's parts: 50,000 of them take 4 GB.

    Raises:
        ValueError: it is none, or one of its keys has too many parts.
        RecursionError: it is nested too deeply.
    """
    if (found := _LONG_KEY.search(text)) is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key has more than {_MOST_PARTS} parts (at line {line})")
    return tomllib.loads(text)
