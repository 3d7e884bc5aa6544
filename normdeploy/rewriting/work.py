"""What one pass over a graph collects; the steps share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from ..graphs.graph import NEWEST, Graph
from ..proof.errors import NotProved
from ..proof.evaluation import Identity
from ..records import Finding
from ..storage.held import Weights
from ..types import Progress
from .rounding import Trial, Verdict
from .sealed import Seal


@dataclass(frozen=True)
class Step:
    """One application of a pass: where it began."""

    place: str  # the body or function, "" in the main graph
    stage: str
    tensor: str  # the first result of the node at which it began


@dataclass(frozen=True)
class Wanted:
    """What the result shall be like."""

    runtime: str = "any"  # which of equal standard forms to write
    fuse: str = "standard"  # "portable": this project's own ops where no standard one says a norm
    limit: int = NEWEST  # the highest opset that the result may have
    unraised: str = ""  # why the file's own can't be raised
    attentions: bool = (
        True  # whether an attention may become one node, where the runtime runs that faster: not before half precision
    )
    rows: bool = True  # whether linear layers may become Gemm over rows: not before they compute in integers
    partial: bool = True  # whether a linear op may take a scale without its shift: not before its input is quantized
    census: bool = False  # whether findings shall hold all that there is to know of a norm
    progress: Progress | None = None  # called with (stage, done, total)
    weights: Weights | None = field(
        default=None, compare=False
    )  # what keeps large weights that are made, to which the result refers
    place: str = ""  # of the graph dealt with: the body or function, "" for the main graph
    undone: Mapping[Step, Finding] = field(
        default_factory=dict
    )  # steps that are not to be taken again, and what is told of them

    @property
    def forms(self) -> str:
        """The runtime whose measured forms are written; "" are single nodes, which the ops of ``--fuse portable`` are
        joined of."""
        return "" if self.runtime == "any" and self.fuse == "portable" else self.runtime


@dataclass
class Work:
    """One pass over one graph."""

    graph: Graph
    wanted: Wanted
    seconds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    # What onnxruntime shall run, until it has, and what is told of it: the place of its finding, or a finding that is
    # in no table while the rewrite stays.
    trials: list[tuple[int | Finding, Trial]] = field(default_factory=list)
    kinds: dict[object, list[int]] = field(
        default_factory=dict
    )  # places of findings that differ in gamma and beta only
    step: Step | None = None  # the one under way
    steps: dict[int, list[Step]] = field(default_factory=dict)  # place of the finding -> the steps that made it
    tried: list[Step] = field(default_factory=list)  # of each of these
    verdicts: list[tuple[int | Finding, Step, Verdict]] = field(default_factory=list)  # of the trials that were run
    taken: list[tuple[Step, Finding]] = field(
        default_factory=list
    )  # every step that changed the graph, those in bodies included
    settled: list[tuple[Step, Finding]] = field(
        default_factory=list
    )  # what was computed once, and attentions: steps that are no norm's
    gross: dict[Step, Finding] = field(
        default_factory=dict
    )  # those whose result onnxruntime can't run, or not well enough
    proofs: dict[object, Identity | NotProved] = field(default_factory=dict)  # of rewrites that others may be like
    sealed: list[tuple[gs.Node, Seal]] = field(default_factory=list)  # nodes as they were proved
    seals: list[Seal] = field(default_factory=list)  # of those that are left at the end, in bodies too
    merged: dict[str, list[int]] = field(
        default_factory=dict
    )  # result of a merged branch -> places of the findings in it
    shared: dict[tuple[object, ...], gs.Tensor] = field(
        default_factory=dict
    )  # what steps wrote once, for all that read the same
    opset: int = 0  # the opset that the nodes written so far need
    _places: dict[str, int] = field(default_factory=dict)
    _placed: int = 0

    def place(self, tensor: str) -> int | None:
        """Where the first finding of a tensor stands; None where there is none."""
        for i in range(self._placed, len(self.findings)):
            self._places.setdefault(self.findings[i].tensor, i)
        self._placed = len(self.findings)
        return self._places.get(tensor)
