"""Find arrays that consist of whole rows of a model's tensors, such as packed and reordered gates, and slices.

A row is a line of elements along any axis. Rows of an array that are not rows of the model are foreign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...types import Array
from .derived_tensors import FloatSpacing
from .parameter_orders import squeeze_shape

# Minimum number of elements that identify a row.
ROW = 4
# If at least this share of a weight consists of rows of the model, its other rows are treated as changed.
MOSTLY = 0.5
# Maximum number of foreign rows that are compared with each row of a table.
_LOOKED_AT = 64
# Maximum number of elements that are compared at once.
_MOST_COMPARED = 1 << 24
# Maximum number of elements of a table that are converted to float64 at once.
_AT_ONCE = 1 << 22
# Rows whose elements all differ by less than this (relative) are the same row with changes. Independently trained
# parameters differ by more in some element.
NEAR = 1e-2


class RowMatcher:
    """Match arrays with rows of the model's tensors."""

    def __init__(self, parameters: Iterable[Array]) -> None:
        self._parameters = list(parameters)
        self._known: dict[tuple[int, str], set[int]] = {}

    def matched_share(self, array: Array) -> float:
        """Compute the share of ``array`` that consists of known rows, along the axis with the largest share.

        Rows in which all elements are equal do not count.

        Returns:
            the share, from 0 to 1.
        """
        if len(squeeze_shape(array.shape)) < 2:
            vector = np.ascontiguousarray(array.reshape(-1))
            # The vector may be one row of an embedding.
            one = vector.size >= ROW and hash(vector.tobytes()) in self._row_hashes(vector.size, vector.dtype)
            if one:
                return 1.0
            return self._matched_runs(vector)
        return max(
            (self._matched_share_along(array, axis) for axis, size in enumerate(array.shape) if size >= ROW),
            default=0.0,
        )

    def lacks_parameter(self, array: Array, parameters: Iterable[Array]) -> bool:
        """Check whether foreign rows in ``array`` are changed rows of one of ``parameters``.

        They count as changed if a foreign row, or the foreign part of a vector, is close to a row that the file lacks:
        most of its distinctive elements are equal, or all elements are within `NEAR`. They also count as changed if the
        file has most rows of a matrix, because it should then have the other rows of this matrix too.

        Args:
            parameters: the model's tensors that the file lacks.

        Returns:
            True if one of them is missing from ``array``.
        """
        with np.errstate(over="ignore"):
            typed = [p.astype(array.dtype) for p in parameters]
        if len(squeeze_shape(array.shape)) < 2:
            foreign_numbers = self._foreign_numbers(array)
            for parameter in (p for p in typed if len(squeeze_shape(p.shape)) == 1):
                numbers = np.unique(parameter)
                missed = int((~np.isin(numbers, array)).sum())
                if 0 < missed <= min(foreign_numbers.size, (1 - MOSTLY) * numbers.size) and numbers.size >= ROW:
                    return True
            return False
        for axis, size in enumerate(array.shape):
            lines = {line.tobytes() for line in _lines_along(array, axis)}
            foreign = self._foreign_rows(array, axis)
            for matrix in (m for m in typed if len(squeeze_shape(m.shape)) > 1):
                for along in (i for i, length in enumerate(matrix.shape) if length == size >= ROW):
                    every = {line.tobytes() for line in _lines_along(matrix, along)}
                    absent = every - lines
                    # Most rows of the matrix are present, and the foreign rows can be the absent ones.
                    if 0 < len(absent) <= min(len(foreign), (1 - MOSTLY) * len(every)):
                        return True
                    if _are_any_close(foreign, absent, array.dtype):
                        return True
        return False

    def is_scaled(self, array: Array, require_time: Callable[[], None] = lambda: None) -> bool:
        """Check whether every foreign row of ``array`` is a row of the model times a number, up to rounding.

        Examples are the gates of a weight-normed GRU, and packed projections with a scaled query.

        Args:
            require_time: called regularly; it raises an error when the time is over.

        Returns:
            True if this holds for the rows along one axis.
        """
        form = FloatSpacing.of_dtype(array.dtype)
        if len(squeeze_shape(array.shape)) < 2:
            return self._scaled_numbers(array, form)
        for axis, size in enumerate(array.shape):
            foreign = self._foreign_rows(array, axis)
            if size < ROW or not foreign:
                continue
            known = [p for p in self._parameters if size in p.shape and p.ndim > 1]
            # One table is converted at a time, because all tables in float64 take several times the memory of the
            # model.
            tables = (_lines_along(p, i) for p in known for i, n in enumerate(p.shape) if n == size)
            rows = np.stack([np.frombuffer(row, array.dtype) for row in foreign]).astype(np.float64)
            if _are_multiples(rows, tables, form, require_time):
                return True
        return False

    @staticmethod
    def count_foreign_rows(array: Array, parameter: Array) -> int:
        """Count the rows of ``array`` that differ from the row of ``parameter`` at the same position, if most rows are
        equal.

        Returns:
            the count along the first axis with such rows; 0 if all rows are equal or most rows differ.
        """
        for axis, size in enumerate(array.shape):
            if size < ROW:
                continue
            lines = _lines_along(array, axis)
            theirs = _lines_along(parameter, axis)
            telling = (lines != lines[:, :1]).any(-1)
            elsewhere = int((lines != theirs).any(-1)[telling].sum())
            if 0 < elsewhere < (1 - MOSTLY) * telling.sum():
                return elsewhere
        return 0

    def _foreign_numbers(self, array: Array) -> Array:
        """Return the elements of a vector, in order, that no vector of the model contains."""
        flat = array.reshape(-1)
        with np.errstate(over="ignore"):
            vectors = [p.reshape(-1).astype(array.dtype) for p in self._parameters if len(squeeze_shape(p.shape)) == 1]
        if vectors:
            return flat[~np.isin(flat, np.concatenate(vectors))]
        return flat

    def _scaled_numbers(self, array: Array, form: FloatSpacing) -> bool:
        """Return whether the foreign elements are equal to a number times elements of a vector that ``array`` lacks."""
        foreign = self._foreign_numbers(array).astype(np.float64)
        if foreign.size < ROW:
            return False
        for parameter in (p.reshape(-1) for p in self._parameters if len(squeeze_shape(p.shape)) == 1):
            with np.errstate(over="ignore"):
                missed = parameter[~np.isin(parameter.astype(array.dtype), array)]
            if missed.size == foreign.size and _are_multiples(foreign[None], [missed[None]], form):
                return True
        return False

    def _foreign_rows(self, array: Array, axis: int) -> set[bytes]:
        lines = _lines_along(array, axis)
        # A row in which all elements are equal does not identify a tensor.
        told = lines[(lines != lines[:, :1]).any(-1)]
        known = self._row_hashes(array.shape[axis], array.dtype)
        return {row for row in (line.tobytes() for line in told) if hash(row) not in known}

    def _matched_share_along(self, array: Array, axis: int) -> float:
        lines = _lines_along(array, axis)
        told = lines[(lines != lines[:, :1]).any(-1)]
        known = self._row_hashes(array.shape[axis], array.dtype)
        if len(told):
            return sum(hash(line.tobytes()) in known for line in told) / len(told)
        return 0.0

    def _row_hashes(self, length: int, dtype: Any) -> set[int]:
        """Return 64-bit hashes of all rows of one length. The rows themselves would take the model's memory for each
        axis.
        """
        key = (length, str(dtype))
        if key not in self._known:
            fitting = [(p, axis) for p in self._parameters for axis, size in enumerate(p.shape) if size == length]
            with np.errstate(over="ignore"):
                self._known[key] = {
                    hash(row.tobytes()) for p, axis in fitting for row in _lines_along(p.astype(dtype), axis)
                }
        return self._known[key]

    def _matched_runs(self, vector: Array) -> float:
        """Return the share of ``vector`` that consists of runs of known vectors, each of `ROW` elements or more."""
        at = length = 0
        vectors = [
            p.reshape(-1) for p in self._parameters if len(squeeze_shape(p.shape)) == 1 and p.size <= 16 * vector.size
        ]
        with np.errstate(over="ignore"):
            vectors = [v.astype(vector.dtype) for v in vectors]
        # A run can't start at a number that is in no vector. Most numbers of a folded bias are in no vector, so this
        # check saves time.
        if vectors:
            shared = np.isin(vector, np.concatenate(vectors))
        else:
            shared = np.zeros(vector.size, bool)
        while at < vector.size:
            if shared[at]:
                longest = max(_longest_prefix(vector[at:], v) for v in vectors)
            else:
                longest = 0
            if longest >= ROW:
                length += longest
                at += longest
            else:
                at += 1
        return length / vector.size


def _are_any_close(some: set[bytes], others: set[bytes], dtype: Any) -> bool:
    """Return whether one of the first `_LOOKED_AT` rows of ``some`` is close to a row of ``others``."""
    if not others:
        return False
    table = np.stack([np.frombuffer(row, dtype) for row in others])
    wide = table.astype(np.float64)
    for row in sorted(some)[:_LOOKED_AT]:
        line = np.frombuffer(row, dtype)
        telling = ~np.isin(line.astype(np.float64), (0.0, 1.0, -1.0))
        same = ((table == line) & telling).sum(-1)
        if (same > MOSTLY * line.size).any():
            return True
        with np.errstate(all="ignore"):
            near = np.abs(wide - line.astype(np.float64)) <= NEAR * np.abs(wide)
        if telling.sum() >= ROW and near.all(-1).any():
            return True
    return False


def _are_multiples(
    rows: Array, tables: Iterable[Array], form: FloatSpacing, require_time: Callable[[], None] = lambda: None
) -> bool:
    """Return whether each of ``rows`` equals a number times a row of one of ``tables``."""
    if rows.size > _MOST_COMPARED or not np.isfinite(rows).all():
        return False
    # The row of the tables with the largest projection has the most similar direction.
    largest = np.full(len(rows), -1.0)
    expected = np.zeros_like(rows)
    step = max(1, _AT_ONCE // max(rows.shape))
    for table in tables:
        for start in range(0, len(table), step):
            require_time()
            part = table[start : start + step].astype(np.float64)
            part = part[np.isfinite(part).all(-1)]
            lengths = np.sqrt((part * part).sum(-1))
            directions = part[lengths > 0] / lengths[lengths > 0, None]
            if not len(directions):
                continue
            projections = directions @ rows.T
            best = np.abs(projections).argmax(0)
            reached = projections[best, np.arange(len(rows))]
            nearer = np.abs(reached) > largest
            largest[nearer] = np.abs(reached)[nearer]
            expected[nearer] = reached[nearer, None] * directions[best[nearer]]
    if (largest < 0).any():
        return False
    return bool((np.abs(rows - expected) <= form.sum_tolerance(np.abs(rows) + np.abs(expected))).all())


def _longest_prefix(vector: Array, other: Array) -> int:
    """Return the length of the longest prefix of ``vector`` that ``other`` contains."""
    longest = 0
    for start in np.flatnonzero(other == vector[0]):
        length = min(len(vector), len(other) - int(start))
        differs = np.flatnonzero(vector[:length] != other[start : start + length])
        longest = max(longest, int(differs[0]) if differs.size else length)
    return longest


def _lines_along(array: Array, axis: int) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]))
