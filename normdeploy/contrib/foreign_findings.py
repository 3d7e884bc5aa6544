"""Merge the findings of foreign norms with the findings of recognition, which saw only the standard nodes.

Each foreign norm gets one finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import onnx

from ..findings.records import Finding, combine_certificates
from ..graphs.dims import Types
from ..recognition.anchors import POINTWISE
from .expansion_proof import ExpansionProof
from .expansion_writer import ForeignOp

# Maximum number of nodes that are followed after a foreign norm, in search of a larger norm that contains it. A
# modulation, for example, adds two nodes after the norm.
_AHEAD = 8


@dataclass(frozen=True)
class Expansion:
    """Standard nodes in place of one foreign node, with their proof.

    Attributes:
        opset: opset that defines the node.
        written_opset: opset that defines ``nodes``.
        nodes, initializers: the standard nodes and their constants.
        constants: inputs of the node that are constants of the file.
        types: types of the tensors around.
        place: body that contains the node; "" for the main graph.
    """

    op: ForeignOp
    node: onnx.NodeProto
    opset: int
    written_opset: int
    nodes: Sequence[onnx.NodeProto]
    initializers: Sequence[onnx.TensorProto]
    constants: Sequence[onnx.TensorProto]
    proof: ExpansionProof
    types: Types = field(repr=False)
    place: str = ""


@dataclass(frozen=True)
class ForeignNode:
    """Foreign node, with the finding that is reported if recognition has no better finding.

    Attributes:
        inputs: the node's inputs.
        tensors: outputs of the standard nodes that replaced it.
        expansion: these nodes; None if the node was kept.
    """

    finding: Finding
    inputs: frozenset[str]
    tensors: frozenset[str] = frozenset()
    expansion: Expansion | None = None


@dataclass
class ForeignNorms:
    """Foreign norms of a file.

    Attributes:
        expansions: nodes that were replaced.
        left: nodes with "norm" in their name that were kept.
    """

    expansions: list[ForeignNode] = field(default_factory=list)
    left: list[ForeignNode] = field(default_factory=list)


def merge_foreign_findings(findings: Sequence[Finding], read: ForeignNorms, standard: onnx.ModelProto) -> list[Finding]:
    """Merge recognition's ``findings`` with the findings of the foreign norms.

    Args:
        standard: the file with its expansions, before recognition.

    Returns:
        findings with one for each foreign norm.
    """
    if not read.expansions and not read.left:
        return list(findings)
    result: dict[int, Finding] = dict(enumerate(findings))
    places: dict[tuple[str, str], list[int]] = {}
    for i, finding in result.items():
        places.setdefault((finding.place, finding.tensor), []).append(i)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in standard.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    claimed: set[int] = set()
    for expansion in read.expansions:
        own = expansion.finding
        its = next((i for i in _matching_findings(expansion, result, places, readers) if i not in claimed), None)
        if its is None:
            result[len(result)] = own
            continue
        claimed.add(its)
        finding_of_norm = result[its]
        # Recognition did not read the nodes if it stopped before them.
        nodes = finding_of_norm.count_nodes_after() or len(expansion.tensors)
        result[its] = replace(
            finding_of_norm,
            tensor=own.tensor
            if finding_of_norm.tensor in expansion.tensors | expansion.inputs
            else finding_of_norm.tensor,
            kind=own.kind if finding_of_norm.kind == "unknown" else finding_of_norm.kind,
            module=finding_of_norm.module or own.module,
            spelling=own.spelling,
            tensors=own.tensors,
            became=finding_of_norm.became or f"now {nodes} standard nodes",
            notes=(*own.notes, *finding_of_norm.notes),
            certificate=combine_certificates(own.certificate, finding_of_norm.certificate),
            nodes_left=nodes,
        )
    dropped: set[int] = set()
    for left in read.left:
        larger = [
            i
            for i in _findings_downstream(left, places, readers)
            if _foreign_op_name(left) in result[i].spelling.split(" ")
        ]
        spoken = [i for i in (*_matching_findings(left, result, places, {}), *larger) if i not in claimed]
        if not any(result[i].status in ("fused", "folded") for i in spoken):
            dropped.update(spoken)
            result[len(result)] = left.finding
    return [f for i, f in result.items() if i not in dropped]


def _matching_findings(
    foreign: ForeignNode,
    result: dict[int, Finding],
    places: dict[tuple[str, str], list[int]],
    readers: dict[str, list[onnx.NodeProto]],
) -> Iterator[int]:
    """Yield the indices of recognition's findings for this node.

    A finding matches if it is at the node's result, at a part of the node, or at the input at which recognition
    stopped. The finding of a larger norm that contains the node matches too.
    """
    own = foreign.finding
    for tensor in (own.tensor, *sorted(foreign.tensors - {own.tensor})):
        yield from places.get((own.place, tensor), ())
    yield from (i for i in _findings_downstream(foreign, places, readers) if result[i].status == "fused")
    for tensor in sorted(foreign.inputs):
        for i in places.get((own.place, tensor), ()):
            if result[i].status in ("kept", "refused") and result[i].kind in ("unknown", own.spelling.split(" ")[0]):
                yield i


def _findings_downstream(
    foreign: ForeignNode, places: dict[tuple[str, str], list[int]], readers: dict[str, list[onnx.NodeProto]]
) -> Iterator[int]:
    """Yield the findings at the results of consecutive pointwise ops after the node."""
    ahead = foreign.finding.tensor
    for _ in range(_AHEAD if not foreign.finding.place else 0):
        behind = readers.get(ahead, [])
        if len(behind) != 1 or behind[0].op_type not in POINTWISE:
            return
        ahead = behind[0].output[0]
        if ahead not in foreign.inputs:
            yield from places.get(("", ahead), ())


def _foreign_op_name(foreign: ForeignNode) -> str:
    return foreign.finding.spelling.split(" ")[0]
