"""Return free memory of the C library's heap to the system.

glibc keeps freed memory between blocks in use, and takes new memory for arrays that do not fit into these gaps. While a
network's weights are folded, a float64 array is made and freed for each weight. Without this module, such gaps took
half of the peak memory.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Return free heap memory to the system. This takes some milliseconds, and does nothing without glibc."""
    if (given_back := load_malloc_trim()) is not None:
        given_back(0)


@cache
def load_malloc_trim() -> Any:
    """Load glibc's ``malloc_trim``.

    Returns:
        the function; None on other systems or with another C library.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        # The C library musl does not have malloc_trim.
        return None
