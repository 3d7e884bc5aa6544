"""What ``recheck`` reports: one difference between a bundle and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class BundleChange:
    """One thing that is not as it was; ``was`` and ``now`` are in words, "" where there was or is nothing."""

    what: Literal["file", "version", "config", "result", "norm"]
    name: str
    was: str
    now: str
    worse: bool
