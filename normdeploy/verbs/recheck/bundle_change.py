"""Record one difference between a bundle and its manifest for ``recheck``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BundleChange:
    """Difference between a bundle and its manifest.

    Attributes:
        what: kind of thing that changed.
        was, now: its states in words, "" if it did not or does not exist.
        worse: it is a regression.
    """

    what: Literal["file", "version", "config", "result", "norm"]
    name: str
    was: str
    now: str
    worse: bool
