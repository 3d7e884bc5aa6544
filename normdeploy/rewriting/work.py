"""What one pass over a graph collects, shared by the steps that fuse and fold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..graphs.graph import NEWEST, Graph
from ..records import Finding
from .rounding import Trial

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What the result shall be like."""

    runtime: str = "any"  # which of equal standard forms to write
    fuse: str = "standard"  # "portable": this project's own ops where no standard one says a norm
    limit: int = NEWEST  # the highest opset that the result may have
    census: bool = False  # whether findings shall hold all that there is to know of a norm
    progress: Progress | None = None  # called with (stage, done, total)


@dataclass
class Work:
    """One pass over one graph."""

    graph: Graph
    wanted: Wanted
    seconds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    trials: list[tuple[int, Trial]] = field(default_factory=list)  # (place of the finding, what onnxruntime shall run)
    kinds: dict[object, list[int]] = field(default_factory=dict)  # places of findings that differ in gamma and beta only
    opset: int = 0  # the opset that the nodes written so far need
    _places: dict[str, int] = field(default_factory=dict)
    _placed: int = 0

    def place(self, tensor: str) -> int | None:
        """Where the first finding of a tensor stands; None where there is none."""
        for i in range(self._placed, len(self.findings)):
            self._places.setdefault(self.findings[i].tensor, i)
        self._placed = len(self.findings)
        return self._places.get(tensor)
