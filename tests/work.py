"""Counts the work that a function does, in place of a clock: the count is the same on every machine.

A call counts once, however long it takes: a search that one C function does is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def count_calls(run: Callable[[], object], within: Path | None = None) -> int:
    """Return the number of calls that ``run`` makes in this thread.

    Args:
        run: takes no argument.
        within: a folder; only calls of Python functions defined in it count. None: all calls, of C functions too.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if within is None:
            calls += event in ("call", "c_call")
        else:
            calls += event == "call" and Path(frame.f_code.co_filename).is_relative_to(within)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
