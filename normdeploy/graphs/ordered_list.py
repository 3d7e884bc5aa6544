"""Sequence with insertion at any position and constant-time comparison of two items' positions.

Each item has a label, an integer that increases along the sequence. If no integer lies between the labels of two
neighbors, the labels after the left neighbor are spread again, up to the first item whose label is large enough. The
j-th item after the neighbor is this item if its label exceeds the neighbor's by more than j². Spreading costs O(log n)
per insertion on average (Dietz, Sleator, "Two algorithms for maintaining order in a list", 1987, section 2). Labels
can't overflow, because Python's integers are unbounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

# Initial gap between neighbors: 32 insertions at one position before labels are spread.
_ROOM = 2**32

T = TypeVar("T")


class OrderedList(Generic[T]):
    """Sequence of items. Items are compared by identity and must exist as long as the sequence."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = list(items)
        self._labels = {id(item): i * _ROOM for i, item in enumerate(self._items)}
        self._next: dict[int, T] = {id(a): b for a, b in zip(self._items, self._items[1:], strict=False)}

    def position_of(self, item: T) -> int:
        """Return a number that increases along the sequence; valid until the next insertion.

        Returns: 0 or more.

        Raises:
            KeyError: the item is not in the sequence.
        """
        return self._labels[id(item)]

    def insert(self, item: T, after: T) -> None:
        """Insert ``item`` directly after ``after``."""
        low = self.position_of(after)
        following = self._next.get(id(after))
        if following is not None and self.position_of(following) - low < 2:
            self._spread_labels(after)
        if following is not None:
            high = self.position_of(following)
        else:
            high = low + 2 * _ROOM
        self._labels[id(item)] = (low + high) // 2
        self._next[id(after)] = item
        if following is not None:
            self._next[id(item)] = following

    def _spread_labels(self, first: T) -> None:
        """Spread the labels after ``first`` evenly, as far as needed."""
        low = self.position_of(first)
        crowded = list[T]()
        item = self._next.get(id(first))
        while item is not None and self.position_of(item) - low <= (len(crowded) + 1) ** 2:
            crowded.append(item)
            item = self._next.get(id(item))
        parts = len(crowded) + 1
        if item is not None:
            room = self.position_of(item) - low
        else:
            room = parts * _ROOM
        for k, crowd in enumerate(crowded, 1):
            self._labels[id(crowd)] = low + room * k // parts

    def __iter__(self) -> Iterator[T]:
        # Items are only inserted after an item, so the first item stays the first.
        if self._items:
            item = self._items[0]
        else:
            item = None
        while item is not None:
            yield item
            item = self._next.get(id(item))
