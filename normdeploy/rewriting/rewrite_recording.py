"""Record each applied rewrite for a certificate file.

The regions refer to the graph, which later rewrites change. So a rewrite is recorded before the graph is changed, with
the names that its tensors get in the file. docs/reference/certificate-format.md defines the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..evaluate.evaluator_core import is_quantized_type
from ..findings.records import Certificate
from ..forms.fold_expressions import FoldExpressions
from ..graphs.file_graph import NEWEST, stored_array
from ..graphs.graph import Graph
from ..graphs.region import Refusal, Region, compile_region
from ..proof.identity_check import Identity
from ..proof.sampler import StoredConstant
from .expression_nodes import record_expressions
from .proposals import NodeReplacement, Proposal
from .rewrite_records import RecordedConstant, RecordedLeaf, RecordedNode, RecordedSide, RewriteRecord


@dataclass(frozen=True)
class ProvedSides:
    """Regions of a proved proposal, with the proof.

    Attributes:
        pairs: region before and region after for each result.
        free_lengths: lengths in whose place the proof holds for any length.
        converted: True if the file stores the nodes in another form than they were proved in.
        writes: names of the tensors that the stored proposal computes anew or makes constant.
    """

    pairs: Sequence[tuple[Region, Region]]
    certificate: Certificate | None
    identity: Identity | None
    free_lengths: tuple[int, ...] = ()
    converted: bool = False
    writes: tuple[str, ...] = ()


def record_rewrite(graph: Graph, place: str, stage: str, proposal: Proposal, proved: ProvedSides) -> RewriteRecord:
    """Record a rewrite before the graph is changed.

    Args:
        proved: both sides, and their proof. Without pairs, the sides are found from the proposal's changes.

    Returns:
        the record.
    """
    finding = proposal.finding
    plain = RewriteRecord(
        place,
        stage,
        finding.tensor,
        finding.kind,
        proposal.finding.became,
        certificate=proved.certificate,
        identity=proved.identity,
        converted=proved.converted,
        free_lengths=proved.free_lengths,
        has_undescribed_constants=proposal.expressions is not None,
        writes=proved.writes,
    )
    pairs = list(proved.pairs) or _pairs_of_changes(graph, proposal.changes)
    if isinstance(pairs, Refusal):
        return replace(plain, reason=pairs.reason)
    if not pairs:
        return replace(plain, reason="a tensor became a constant")
    try:
        return _with_sides(plain, graph, proposal, pairs)
    except evaluator.UnsupportedOp as error:
        return replace(plain, reason=f"one of its constants can't be computed: {error}")


def _with_sides(
    plain: RewriteRecord, graph: Graph, proposal: Proposal, pairs: Sequence[tuple[Region, Region]]
) -> RewriteRecord:
    """Add both sides to a record."""
    names = _final_names(proposal, pairs)
    defined = proposal.expressions.computed_constants() if proposal.expressions is not None else []
    expressions = None
    if isinstance(proposal.expressions, FoldExpressions):
        expressions = record_expressions(graph, proposal.expressions)
    if expressions is not None:
        described = {id(c) for c in defined}
    else:
        described = set()
    before = _record_side(graph, [pair[0] for pair in pairs], {}, set())
    after = _record_side(graph, [pair[1] for pair in pairs], names, described)
    repeats = any(_repeats_piece(c) for side in (before, after) for c in side.constants.values())
    return replace(
        plain,
        leaves=_record_leaves(graph, [region for pair in pairs for region in pair]),
        free_lengths=() if repeats else plain.free_lengths,
        before=before,
        after=after,
        epsilons=_name_epsilons(plain.identity, pairs, names),
        expressions=expressions,
        has_undescribed_constants=bool(defined) and expressions is None,
    )


def _final_names(proposal: Proposal, pairs: Sequence[tuple[Region, Region]]) -> dict[int, str]:
    """Return the names that outputs of new nodes get when they replace tensors of the graph, by their ids."""
    names = {
        id(change.nodes[-1].outputs[output]): old.name
        for change in proposal.changes
        if change.nodes
        for output, old in ((change.output, change.old), *change.also.items())
    }
    # A result is named after the tensor that it replaces, also if its last node is the node of another change.
    return names | {id(after.y): before.y.name for before, after in pairs if after.y is not before.y}


def _name_epsilons(
    identity: Identity | None, pairs: Sequence[tuple[Region, Region]], names: Mapping[int, str]
) -> dict[str, float]:
    """Return the exact epsilons of a proof by the names of their nodes' first outputs."""
    if identity is None:
        return {}
    # The order is that of `Equivalence.nodes`.
    nodes = list({id(n): n for _, region in pairs for n in region.nodes}.values())
    firsts = {i: nodes[i].outputs[0] for i in identity.epsilons}
    return {names.get(id(t), t.name): identity.epsilons[i] for i, t in firsts.items()}


def _pairs_of_changes(graph: Graph, changes: Sequence[NodeReplacement]) -> list[tuple[Region, Region]] | Refusal:
    """Find both sides of changes that were compared without the prover.

    The leaves are the data that the new nodes read from the graph.
    """
    new = [node for change in changes for node in change.nodes]
    made = {id(t) for node in new for t in node.outputs}
    leaves = {
        id(t): t
        for node in new
        for t in node.inputs
        if not t.is_empty() and id(t) not in made and not isinstance(t, gs.Constant) and not graph.is_constant(t)
    }
    pairs = []
    for change in changes:
        for output, old in ((change.output, change.old), *change.also.items()):
            sides = [compile_region(graph, t, list(leaves.values())) for t in (old, change.nodes[-1].outputs[output])]
            for side in sides:
                if isinstance(side, Refusal):
                    return side
            before, after = sides
            assert isinstance(before, Region)
            assert isinstance(after, Region)
            pairs.append((before, after))
    return pairs


def _record_leaves(graph: Graph, regions: Sequence[Region]) -> tuple[RecordedLeaf, ...]:
    leaves = {id(t): t for t in regions[0].leaves}
    shapes = {id(t): t for region in regions for t in region.shape_leaves if id(t) not in leaves}
    return tuple(
        RecordedLeaf(t.name, _dtype_name(graph, t), graph.shape(t), id(t) in shapes)
        for t in (*leaves.values(), *shapes.values())
    )


def _dtype_name(graph: Graph, t: gs.Tensor) -> str:
    dtype = graph.dtype(t)
    return "" if dtype is None else np.dtype(dtype).name


def _record_side(
    graph: Graph, regions: Sequence[Region], names: Mapping[int, str], described: Collection[int]
) -> RecordedSide:
    """Record the union of regions.

    Args:
        names: final names of tensors by their ids.
        described: ids of constants that expressions define.
    """
    nodes = {id(n): n for region in regions for n in region.nodes}
    ends = [region.y for region in regions]
    inside = {id(t) for n in nodes.values() for t in n.outputs}
    outside = {id(t) for region in regions for t in (*region.leaves, *region.shape_leaves)}
    constants: dict[str, RecordedConstant] = {}
    for t in (*(t for n in nodes.values() for t in n.inputs), *ends):
        if t.is_empty() or id(t) in inside or id(t) in outside or t.name in constants:
            continue
        if isinstance(t, gs.Constant) or graph.is_constant(t):
            constants[t.name] = _record_constant(graph, t, id(t) in described)
    return RecordedSide(
        sort_nodes([_record_node(graph, n, names) for n in nodes.values()]),
        constants,
        tuple(names.get(id(t), t.name) for t in ends),
    )


def sort_nodes(nodes: Sequence[RecordedNode]) -> tuple[RecordedNode, ...]:
    """Order nodes so that each follows the nodes whose outputs it reads.

    The regions of several results, and inputs that only give a type, such as that of CastLike, may be out of order.
    """
    writers = {output: i for i, node in enumerate(nodes) for output in node.proto.output if output}
    sources = [[writers[n] for n in node.proto.input if n in writers] for node in nodes]
    ordered: dict[int, RecordedNode] = {}
    for start in range(len(nodes)):
        pending = [start]
        while pending:
            missing = [i for i in sources[pending[-1]] if i not in ordered]
            if missing:
                pending.append(missing[0])
            else:
                index = pending.pop()
                ordered[index] = nodes[index]
    return tuple(ordered.values())


def _record_node(graph: Graph, node: gs.Node, names: Mapping[int, str]) -> RecordedNode:
    proto = onnx.NodeProto()
    proto.CopyFrom(graph.node_proto(node))
    for i, t in enumerate(node.inputs):
        if i < len(proto.input) and id(t) in names:
            proto.input[i] = names[id(t)]
    for i, t in enumerate(node.outputs):
        if i < len(proto.output):
            proto.output[i] = names.get(id(t), t.name)
    return RecordedNode(proto, max(graph.opset, NEWEST) if id(node) in graph._new else graph.opset)


def _record_constant(graph: Graph, t: gs.Tensor, described: bool) -> RecordedConstant:
    stored = stored_array(t) if isinstance(t, gs.Constant) else None
    if described:
        return RecordedConstant(None, stored)
    exact = graph.exact.exact_value(id(t))
    if exact is not None:
        return RecordedConstant(exact, stored)
    if stored is not None:
        return RecordedConstant(stored)
    node = graph.producer(t)
    return RecordedConstant(graph.value(t), computed=node is None or node.op != "Constant")


def _repeats_piece(constant: RecordedConstant) -> bool:
    """Return True if a float constant with different elements repeats a piece along an axis.

    A proof for any length reads such pieces, so random elements could not take their place.
    """
    array = constant.value if constant.value is not None else constant.rounded
    if array is None or array.dtype.kind in "iub" or is_quantized_type(array.dtype):
        return False
    stored = StoredConstant(array)
    return not stored.uniform and any(period is not None for period in stored.periods)
