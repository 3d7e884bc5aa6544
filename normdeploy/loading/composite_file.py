"""Read several buffers as one file, without copying them.

So an archive of checked parts, and of weights that stay in another file, takes no additional memory or disk space.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from typing import Any


class PartCollector:
    """Collect written buffers, in order, without copying them. Views of a mapped file stay views."""

    def __init__(self) -> None:
        self.held: list[memoryview] = []

    def write(self, data: Any) -> int:
        """Append a buffer.

        Returns:
            Number of bytes of the buffer.
        """
        part = memoryview(data).cast("B")
        if part.nbytes:
            self.held.append(part)
        return part.nbytes

    def flush(self) -> None:
        """Do nothing. ``zipfile`` requires this method."""
        pass


class CompositeFile(io.RawIOBase):
    """Readable and seekable file made of the collected parts."""

    def __init__(self, parts: PartCollector) -> None:
        self._parts = parts.held
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + part.nbytes)
        self._at = 0

    def readinto(self, target: Any) -> int:
        """Fill ``target`` from the parts.

        Returns:
            Number of bytes read, 0 at the end.
        """
        wanted = memoryview(target).cast("B")
        done = 0
        while done < wanted.nbytes and self._at < self._starts[-1]:
            place = bisect_right(self._starts, self._at) - 1
            offset = self._at - self._starts[place]
            piece = self._parts[place][offset : offset + wanted.nbytes - done]
            wanted[done : done + piece.nbytes] = piece
            done += piece.nbytes
            self._at += piece.nbytes
        return done

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position.

        Returns:
            The new position, at least 0.
        """
        self._at = max(0, offset + (0, self._at, self._starts[-1])[whence])
        return self._at

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
