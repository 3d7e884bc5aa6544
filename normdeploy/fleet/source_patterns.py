"""Expand the patterns of a fleet's sources as ``glob.glob`` does, but visit only a limited number of files."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

# Maximum number of files and folders that a pattern visits. Visiting this many takes seconds.
MOST_SEEN = 200_000


class TooManyFiles(Exception):
    """Error for a pattern that visits more than `MOST_SEEN` files and folders."""


def expand_pattern(pattern: str, folder: Path) -> Iterator[Path]:
    """Yield the matches of a pattern in ``folder``; ``**`` matches any number of folders.

    Names with a leading dot match only parts with a leading dot, as in a shell.

    Raises:
        TooManyFiles: the pattern visits too many files and folders.
    """
    top = Path(os.path.abspath(folder))
    for path in _PatternWalk().find_matches(str(top), PurePath(pattern).parts):
        if path != top:
            yield path


class _PatternWalk:
    def __init__(self) -> None:
        self._seen = 0

    def find_matches(self, folder: str, parts: Sequence[str]) -> Iterator[Path]:
        if not parts:
            yield Path(folder)
            return
        part = parts[0]
        rest = parts[1:]
        if not glob.has_magic(part):
            path = os.path.join(folder, part)
            if os.path.exists(path):
                yield from self.find_matches(path, rest)
            return
        if part == "**":
            yield from self.find_matches(folder, rest)
        for name in self._list_names(folder):
            path = os.path.join(folder, name)
            if name.startswith(".") and not part.startswith("."):
                continue
            if part != "**":
                if fnmatch.fnmatchcase(name, part):
                    yield from self.find_matches(path, rest)
            elif os.path.isdir(path):
                yield from self.find_matches(path, parts)
            elif not rest:
                yield Path(path)

    def _list_names(self, folder: str) -> list[str]:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            # The path is not a folder, or can't be read.
            return []
        self._seen += len(names)
        if self._seen > MOST_SEEN:
            raise TooManyFiles
        return names
