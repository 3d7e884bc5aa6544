"""Describe one difference that ``recheck`` found between a bundle and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BundleChange:
    """Difference between a bundle and its manifest.

    Attributes:
        what: kind of the changed item: "file", "config", "version", "result" or "norm".
        was, now: the recorded and the current state in words; "" if the item did not or does not exist.
        worse: True if the difference is a regression.
    """

    what: Literal["file", "version", "config", "result", "norm"]
    name: str
    was: str
    now: str
    worse: bool
