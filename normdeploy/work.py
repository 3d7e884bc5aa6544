"""What one pass over a graph collects, shared by the steps that fuse and fold."""

from __future__ import annotations

from dataclasses import dataclass, field

from .graph import Graph
from .records import Finding
from .rounding import Trial


@dataclass
class Work:
    """One pass over one graph."""

    graph: Graph
    runtime: str
    limit: int  # the highest opset that the result may have
    census: bool = False  # whether findings shall hold all that there is to know of a norm
    seconds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    trials: list[tuple[int, Trial]] = field(default_factory=list)  # (place of the finding, what onnxruntime shall run)
    kinds: dict[object, list[int]] = field(default_factory=dict)  # places of findings that differ in gamma and beta only
    opset: int = 0  # the opset that the nodes written so far need
