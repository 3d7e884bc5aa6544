"""Name the fastest contestant of a race, if the measurement is accurate enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def describe_fastest(entries: Sequence[Mapping[str, Any]]) -> str:
    """Name the fastest contestant of a race, or the fastest contestants if their times are too close.

    A contestant is the fastest only if its 95 % interval is below the intervals of all other contestants.

    Args:
        entries: contestants, with the keys "runtime", "file", "form", "median", "interval" and "reason". The median is
            in ms. The interval is of the time relative to the first contestant, or None if unknown. A contestant with a
            reason was not timed.

    Returns:
        a phrase; "" if fewer than two contestants were timed.
    """
    timed = [entry for entry in entries if not entry.get("reason") and entry.get("interval")]
    if len(timed) < 2:
        return ""
    best, *others = sorted(timed, key=lambda entry: float(entry["median"]))
    highest = float(best["interval"][1])
    close = [entry for entry in others if float(entry["interval"][0]) <= highest]
    if close:
        names = ", ".join(map(_contestant_name, (best, *close)))
        return f"no clear winner: the 95 % intervals of {names} overlap"
    return f"fastest: {_contestant_name(best)}"


def _contestant_name(entry: Mapping[str, Any]) -> str:
    return " · ".join(filter(None, (entry["runtime"], entry.get("file"), entry.get("form"))))
