"""Parse TOML of unknown origin, in time linear in its size."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_PARTS = 100
# `_LONG_KEY` matches a key or table name with more than `_MOST_PARTS` parts. A match can't start inside a word, because
# otherwise each letter would be tried as a start.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w.-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")
# Limits of TOML's integers, which have 64 bits. tomllib accepts larger integers.
_LEAST = -(2**63)
_MOST = 2**63 - 1
_LONG_INTEGER = re.compile(r"(?<![\w.])[+-]?\d[\d_]{18,}+(?![\w.])")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    For a dotted key, tomllib takes time and memory quadratic in the number of parts: 50,000 parts take 4 GB. So keys
    with too many parts are refused.

    Returns:
        the top-level table.

    Raises:
        ValueError: the text is not TOML, a key has too many parts, or an integer has more than 64 bits.
        RecursionError: the text is nested too deeply.
    """
    if (found := _LONG_KEY.search(text)) is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key has more than {_MOST_PARTS} parts (at line {line})")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        # Python refuses to read an integer of thousands of digits.
        raise ValueError(_describe_large_integer(text)) from error
    if _has_large_integer(content):
        raise ValueError(_describe_large_integer(text))
    return content


def _has_large_integer(content: Any) -> bool:
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and not _LEAST <= value <= _MOST:
            return True
    return False


def _describe_large_integer(text: str) -> str:
    what = "an integer has more than 64 bits"
    for number, line in enumerate(text.splitlines(), 1):
        if found := _LONG_INTEGER.search(line):
            what = (
                f"an integer has {sum(map(str.isdecimal, found[0]))} digits (at line {number}), but TOML's have 64 bits"
            )
            break
    return f"{what}: write at most {_MOST}"
