"""A sequence with insertion anywhere, which tells at once which of two items comes first.

Each item has a label, a whole number that grows along the sequence. Where two neighbours leave no room between their
labels, those of a few items behind are spread anew: as many as it takes for the j-th of them to be more than j² away,
which costs O(log n) an insertion on average (Dietz, Sleator, "Two algorithms for maintaining order in a list", 1987,
section 2). Python's numbers have no end, so neither have the labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

# between neighbours at first: 32 insertions at one place before labels are spread
_ROOM = 2**32

T = TypeVar("T")


class OrderedList(Generic[T]):
    """Items by identity; they must live as long as the sequence does."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = list(items)
        self._labels = {id(item): i * _ROOM for i, item in enumerate(self._items)}
        self._next: dict[int, T] = {id(a): b for a, b in zip(self._items, self._items[1:], strict=False)}

    def position_of(self, item: T) -> int:
        """A number, 0 or more, that grows along the sequence; good until the next insertion.

        Raises:
            KeyError: the item is not in the sequence.
        """
        return self._labels[id(item)]

    def insert(self, item: T, after: T) -> None:
        """Put ``item`` right behind ``after``."""
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
        """Spread the labels behind ``first`` evenly as far as needed."""
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
        # nothing is ever put before the first
        if self._items:
            item = self._items[0]
        else:
            item = None
        while item is not None:
            yield item
            item = self._next.get(id(item))
