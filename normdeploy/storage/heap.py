"""The C library's heap, given back to the system.

glibc keeps what is freed between blocks that are not, and takes new memory for arrays that do not fit into the gaps: of
the float64 values that folding a network's weights makes, one weight at a time, half of the peak was such gaps.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Give back what is free. Some milliseconds; nothing where the C library is another one."""
    if (given_back := load_malloc_trim()) is not None:
        given_back(0)


@cache
def load_malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        # musl has none
        return None
