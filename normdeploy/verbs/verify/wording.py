"""Shorten lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def list_some(names: Sequence[str], most: int = 3) -> str:
    """Join the first few names and count the others.

    Args:
        most: number of names to list.

    Returns:
        for example "a, b, c and 2 more".
    """
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed
