"""What became of each norm: the values that travel from the passes to the report.

``Finding`` is one line of the report; ``Certificate`` is the proof that stands behind a rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["fused", "folded", "kept", "refused", "undone"]


@dataclass(frozen=True)
class Certificate:
    """Evidence for one rewrite (DESIGN.md, "Certificates").

    ``identity`` decides: the subgraph before and the nodes after, both evaluated in float64 by the ops' specifications, agree
    within ``bound`` (relative) on every input of the battery. ``rounding_*`` inform: the errors against float64 of what
    onnxruntime makes of both in the model's own type; None where it was not run.
    """

    identity: bool
    error: float  # worst relative difference, float64
    bound: float
    cases: int  # inputs evaluated
    worst: str  # the battery's name of the worst input
    rounding_before: float | None = None  # max abs error of the original nodes in onnxruntime
    rounding_after: float | None = None
    rounding_bound: float | None = None
    note: str = ""  # why it failed, or what onnxruntime could not run

    @property
    def rounding_ok(self) -> bool | None:
        """True where the new form is as accurate in onnxruntime as allowed; None where it was not run."""
        if self.rounding_after is None or self.rounding_bound is None:
            return None
        return self.rounding_after <= self.rounding_bound

    def __bool__(self) -> bool:
        return self.identity


@dataclass(frozen=True)
class Attempt:
    """One reading of a norm that was tried and given up: from which tensor to which, how far it came, and what stopped it."""

    start: str
    end: str
    stage: Literal["ends", "values", "form"]  # no function of one input; not the values of a norm; a norm that no node can hold
    reason: str
    tensor: str  # the culprit


@dataclass(frozen=True)
class Finding:
    """One normalization of the model and what became of it.

    ``status``: ``fused`` (one standard node now), ``folded`` (into a neighbour, or one scale and shift), ``kept`` (was already the
    best form), ``refused`` (left as it was, see ``reason``), ``undone`` (its certificate failed; left as it was).
    """

    kind: str  # LayerNorm, RMSNorm, GroupNorm, InstanceNorm, BatchNorm, ...
    status: Status
    tensor: str  # name of the tensor that holds its result (of the culprit where refused)
    module: str = ""  # qualified module path, "" where the file does not tell
    place: str = ""  # where it is not in the main graph: "then_branch of If 'gate'", "function custom.Block"
    spelling: str = ""  # the ops found, in the graph's order: "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul Add"
    became: str = ""  # "LayerNormalization(axis=-1, epsilon=1e-12)", "folded into Conv 'conv1'"
    reason: str = ""  # for kept, refused and undone: why
    axes: tuple[int, ...] = ()
    epsilon: float | None = None
    dtype: str = ""
    notes: tuple[str, ...] = ()  # "output depends on the batch", "onnxruntime's kernel is inaccurate here: ..."
    certificate: Certificate | None = None
    proved: tuple[str, ...] = ()  # where it was seen: "identity", "onnxruntime run", "TensorRT-RTX built", ...
    attempts: tuple[Attempt, ...] = ()  # for kept and refused: what was tried, outermost reading first


@dataclass(frozen=True)
class Summary:
    """The passes' account of one graph."""

    findings: tuple[Finding, ...]
    nodes_before: int
    nodes_after: int
    opset: int
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds
