"""How lists are cut off in messages."""

from __future__ import annotations

from collections.abc import Sequence


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Name the first few, and count the others: "a, b, c and 2 more"."""
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed
