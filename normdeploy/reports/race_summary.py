"""Say which contestant of a race is the fastest, if the measurement can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def describe_fastest(entries: Sequence[Mapping[str, Any]]) -> str:
    """Name the fastest contestant of a race, or the contestants that are too close to tell.

    A contestant is the fastest only if its 95 % interval lies below those of all others.

    Args:
        entries: fields of the contestants: "runtime", "file", "form", "median" in ms, "interval" (of the time relative
            to the first one; None if unknown) and "reason" (not timed if it is not "").

    Returns:
        a phrase; "" if fewer than two were timed.
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
