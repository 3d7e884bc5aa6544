"""Find the integers in an input that cause a failure, such as a length of 0 or an index at the end of a table."""

from __future__ import annotations

from collections.abc import Sequence

from ...types import Arrays

# Maximum number of elements of an input that is examined. In a larger input, a single value says little.
_MOST_ELEMENTS = 64
_MOST_VALUES = 3

Feeds = Arrays


def find_failing_integers(failed: Sequence[Feeds], passed: Sequence[Feeds]) -> str | None:
    """Find integers that every failing case has and that lie outside the range of the passing cases.

    Args:
        failed: inputs by name of each failing case.
        passed: inputs by name of each passing case.

    Returns:
        a phrase with the input's name and up to three such integers, or None.
    """
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
            return f"only when {name!r} contains {' and '.join(map(str, beyond))}, which no passing input contains"
    return None
