"""Define the record of an applied rewrite: its nodes before and after, and all constants that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from ..findings.records import Certificate
from ..graphs.dims import Dims
from ..graphs.symbolic_sizes import Size
from ..proof.identity_check import Identity
from .expression_nodes import ExpressionRecord

# Opset at which the form of reductions and of Split changes
FORMS = 18


@dataclass(frozen=True)
class RecordedConstant:
    """Constant that a region reads.

    Attributes:
        value: exact elements that the proof used; None if the constant's expression defines them.
        rounded: elements as the graph stores them, if they differ from ``value``.
        computed: True if nodes of the file compute the constant from other constants.
    """

    value: np.ndarray | None
    rounded: np.ndarray | None = None
    computed: bool = False


@dataclass(frozen=True)
class RecordedNode:
    """Node with the opset that defines it."""

    proto: onnx.NodeProto
    opset: int


@dataclass(frozen=True)
class RecordedSide:
    """Nodes of one side of a rewrite, in topological order.

    Attributes:
        constants: constants by the names of their tensors.
        outputs: names of the results.
    """

    nodes: tuple[RecordedNode, ...]
    constants: Mapping[str, RecordedConstant]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class RecordedLeaf:
    """Tensor that both sides read as data.

    Attributes:
        dtype: name of the element type; "" if it is unknown.
        dims: sizes, names of dims, or None for each axis; None for an unknown rank.
        only_shape: True if the nodes read only the shape.
    """

    name: str
    dtype: str
    dims: Dims | tuple[Size, ...] | None
    only_shape: bool = False


@dataclass(frozen=True)
class RewriteRecord:
    """One applied rewrite.

    Attributes:
        place: body or function that contains the nodes; "" for the main graph.
        stage: stage of the transform.
        tensor: tensor at which the transform started.
        kind: kind of the norm, or of the rewrite.
        became: description of the result.
        before, after: both sides; None if the nodes can't be recorded.
        reason: why the nodes can't be recorded.
        certificate: certificate of the proof; None if the transform compared the nodes without the prover.
        identity: the proof; None if the rewrite was proved by several proofs, or without the prover.
        epsilons: exact epsilon of nodes after the rewrite, by the name of their first output.
        expressions: definitions of the constants that the rewrite computed; None if they have none.
        converted: True if the file stores the nodes in another form than they were proved in.
        free_lengths: lengths in whose place the proof holds for any length.
        has_undescribed_constants: True if the rewrite computed constants that ``expressions`` does not define.
        writes: names of the tensors that the rewrite computes anew or makes constant.
    """

    place: str
    stage: str
    tensor: str
    kind: str
    became: str
    leaves: tuple[RecordedLeaf, ...] = ()
    before: RecordedSide | None = None
    after: RecordedSide | None = None
    reason: str = ""
    certificate: Certificate | None = None
    identity: Identity | None = None
    epsilons: Mapping[str, float] = field(default_factory=dict)
    expressions: ExpressionRecord | None = None
    converted: bool = False
    free_lengths: tuple[int, ...] = ()
    has_undescribed_constants: bool = False
    writes: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[RecordedNode]:
        """Return the nodes of both sides."""
        return [node for side in (self.before, self.after) if side is not None for node in side.nodes]


@dataclass
class RewriteRecorder:
    """Records of one pass over a file, in the order of the rewrites.

    Attributes:
        records: the rewrites.
        opset: opset of the file before the first of them.
        changes: records of the change of the opset before the pass.
        source_opset: opset of the file before these.
        written_opset: opset of the nodes that these wrote.
    """

    records: list[RewriteRecord] = field(default_factory=list)
    opset: int = 0
    changes: Sequence[RewriteRecord] = ()
    source_opset: int = 0
    written_opset: int = 0

    def start_file(self, changes: Sequence[RewriteRecord], source_opset: int, opset: int) -> None:
        """Remember how the file was changed before a pass.

        Args:
            source_opset: opset of the file before ``changes``.
            opset: opset of the nodes that ``changes`` wrote.
        """
        self.changes = changes
        self.source_opset = source_opset
        self.written_opset = opset

    def start_pass(self, opset: int) -> None:
        """Forget the records of an earlier pass, which was repeated."""
        self.records.clear()
        if self.changes and (opset < FORMS) == (self.written_opset < FORMS):
            self.records.extend(self.changes)
            self.opset = self.source_opset
        else:
            # Conversions of a whole file are not recorded, so nothing before one of them is.
            self.opset = opset
