"""Which integers of the inputs a failure needs: a length of 0, an index at the end of a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...types import Arrays

# of an input of lengths or indices: among more, one value says little
_MOST_ELEMENTS = 64
_MOST_VALUES = 3

Feeds = Arrays


def find_failing_integers(failed: Sequence[Feeds], passed: Sequence[Feeds]) -> str | None:
    """Name the input and the integers that every failing case has and that lie outside of those of the others; None
    where there are none."""
    if not failed or not passed:
        return None
    for name, first in failed[0].items():
        if first.dtype.kind not in "iu" or not 0 < first.size <= _MOST_ELEMENTS:
            continue
        shared = set.intersection(*(set(feeds[name].reshape(-1).tolist()) for feeds in failed))
        others = {value for feeds in passed for value in feeds[name].reshape(-1).tolist()}
        if not others:
            continue
        beyond = sorted(value for value in shared if not min(others) <= value <= max(others))
        if 0 < len(beyond) <= _MOST_VALUES:
            return f"only where {name!r} has {' and '.join(map(str, beyond))}, which no input that passes has"
    return None
