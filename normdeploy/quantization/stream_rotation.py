"""Rotate residual streams so that no channel is an outlier (`--rotate`); each step is proved.

A Hadamard matrix spreads large values of one channel over all channels (QuaRot, Ashkboos et al., arXiv 2404.00456;
QuIP#, Tseng et al., arXiv 2402.04396). With Q = A/√k, where the elements of A are ±1, the stream holds x·Q instead of
x. Layers that write the stream get the weight W·Q, and layers that read it get Qᵀ·W. An RMS norm without gamma commutes
with Q, so gammas are first moved into the layers after the norms (`scale_migration`).

A layer norm equals an RMS norm if its input has zero mean. So the mean is first subtracted in all writers of the stream
(SliceGPT, Ashkboos et al., arXiv 2401.15024, section 3.1). The values of an attention are rotated per head. The layer
that computes the values also rotates them, and the layer after the attention also rotates the result back.

docs/explanation/identities.md, "A map of a whole stream", explains why it suffices to prove each edit separately.
`residual_streams` checks the premises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..findings.quantization_report import Migration
from ..findings.records import Certificate
from ..graphs.graph import Graph
from ..graphs.opset_conversion import ops_needing_conversion, raise_opset_number
from ..graphs.region import RefusedError
from ..recognition.anchors import VIEWS
from ..rewriting.certification import pair_of
from ..rewriting.rewrite_ledger import RewriteOptions
from ..rewriting.rewriter import DecidedProposal, Rewriter
from ..storage.proto_traversal import copy_model, standard_opset
from . import scale_migration
from .hadamard import largest_order, signed_hadamard
from .residual_streams import NORMS, RMS, LinearLayers, ResidualStream, describe_node, trace_stream
from .stream_edits import FLOAT, StreamEdits, StreamMap, prove_nodes

# First opset with RMSNormalization
OPSET = 23
# Ops that may lie between a Softmax and the MatMul with the attention's values
_BETWEEN = frozenset({"Cast", "Identity", "Mul", "Where", "Dropout"})


@dataclass
class _RotationPass:
    rewriter: Rewriter
    migrations: list[Migration] = field(default_factory=list)
    # Ids of norms that were already examined
    looked_at: set[int] = field(default_factory=set)
    # Ids of tensors that were already rotated
    turned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.layers = LinearLayers.find_in_graph(self.graph)

    @property
    def graph(self) -> Graph:
        return self.rewriter.graph

    def record_outcome(self, kind: str, stream: ResidualStream, done: Certificate | RefusedError) -> None:
        """Record a success or a refusal. A refusal that several norms share is recorded once."""
        names = tuple(one.out.name for one in (stream.writers | stream.readers).values())
        first = next(iter(stream.tensors.values())).name
        if isinstance(done, Certificate):
            self.migrations.append(Migration(kind, first, names, "made", certificate=done))
        elif not any(m.kind == kind and m.reason == str(done) for m in self.migrations):
            self.migrations.append(Migration(kind, first, names, "refused", str(done)))


def rotate_streams(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """Rotate the residual streams of a model and the values of its attentions, if they are closed.

    Args:
        proto: a float32 model with its weights, in which each norm is a single node; not changed.

    Returns:
        the model, and records of the changes and refusals of each stream.

    Raises:
        GraphError: the model can't be read.
    """
    return _transform_streams(proto, rotate=True)


def center_streams(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """Turn layer norms into RMS norms by subtracting the mean in the writers of their streams.

    Returns:
        the model and a record of each stream, as for `rotate_streams`.
    """
    return _transform_streams(proto, rotate=False)


def _transform_streams(proto: onnx.ModelProto, rotate: bool) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    work = _RotationPass(Rewriter(Graph(_raise_opset_if_unchanged(proto)), RewriteOptions()))
    for norm in [n for n in work.graph.nodes if n.op in NORMS and not n.domain]:
        if id(norm) in work.looked_at or not work.graph.is_alive(norm):
            continue
        if rotate:
            _rotate_residual_stream(work, norm)
        elif norm.op not in RMS:
            _center_stream(work, norm)
    for values in _attention_values(work.graph) if rotate else ():
        _rotate_stream(work, values)
    if not any(m.status == "made" for m in work.migrations):
        return proto, tuple(work.migrations)
    return work.rewriter.build_proto(), tuple(work.migrations)


def _raise_opset_if_unchanged(proto: onnx.ModelProto) -> onnx.ModelProto:
    entry = standard_opset(proto)
    if entry is None or entry.version >= OPSET or ops_needing_conversion(proto, OPSET):
        return proto
    return raise_opset_number(copy_model(proto), OPSET)


def _rotate_residual_stream(work: _RotationPass, norm: gs.Node) -> None:
    """Prepare and rotate the stream that ``norm`` reads.

    Center the stream if it has layer norms, and move gammas out of its norms.
    """
    graph = work.graph
    seed = norm.inputs[0]
    stream = ResidualStream()
    try:
        trace_stream(work.layers, stream, seed, through=True)
        _require_matrix(stream)
        _require_movable_norms(graph, stream)
    except RefusedError as error:
        work.record_outcome("rotate", stream, error)
        return
    finally:
        work.looked_at |= {id(norm), *stream.norms}
    for one in stream.norms.values():
        if one.op not in RMS and graph.is_alive(one) and not _center_stream(work, one):
            return
    results = {id(t) for t in stream.tensors.values()}
    work.migrations += scale_migration.migrate_norm_scales(work.rewriter, results)
    work.layers = LinearLayers.find_in_graph(graph)
    _rotate_stream(work, seed)


def _require_matrix(stream: ResidualStream) -> None:
    """Check that a Hadamard matrix fits the width of a closed stream, and that linear layers can rotate it back.

    Raises:
        RefusedError: no matrix fits, a layer both reads and writes the stream, or no layer reads it.
    """
    common = gcd(*stream.widths)
    if largest_order(common) == 1:
        raise RefusedError(f"its {common} channels are not divisible by the order of a Hadamard matrix")
    both = stream.writers.keys() & stream.readers.keys()
    if both:
        raise RefusedError(f"{stream.writers[both.pop()].title} both reads and writes it")
    if not stream.readers:
        raise RefusedError("no linear layer reads it, so nothing could rotate it back")


def _require_movable_norms(graph: Graph, stream: ResidualStream) -> None:
    """Check that only linear layers read the norms with a gamma or beta, because only linear layers can absorb gamma
    and beta.

    Raises:
        RefusedError: another node reads such a norm.
    """
    for norm in stream.norms.values():
        known = [graph.known_value(t) for t in norm.inputs[1:3] if not t.is_empty()]
        if all(v is not None and bool((v == one).all()) for v, one in zip(known, (1.0, 0.0), strict=False)):
            continue
        left = [norm.outputs[0]]
        while left:
            for node in graph.consumers(left.pop()):
                if node.op in VIEWS:
                    left.append(node.outputs[0])
                elif id(node) not in stream.readers and node.op not in ("Shape", "Size"):
                    raise RefusedError(
                        f"{describe_node(node)} reads {describe_node(norm)}, whose gamma only linear layers could "
                        "absorb"
                    )


def _center_stream(work: _RotationPass, norm: gs.Node) -> bool:
    """Subtract the mean in the writers of the stream that ``norm`` reads, and turn its layer norms into RMS norms.

    Returns:
        False if the stream can't be centered; the refusal is recorded.
    """
    stream = ResidualStream()
    try:
        trace_stream(work.layers, stream, norm.inputs[0], through=False)
        if work.graph.opset < OPSET:
            raise RefusedError(f"RMSNormalization needs opset {OPSET}, in which an op of the file has another meaning")
        if len(stream.widths) > 1:
            raise RefusedError(f"views split its channels: {', '.join(map(str, sorted(stream.widths)))}")
        edits = StreamEdits(work.rewriter, work.layers, stream, StreamMap(None))
        edits.prove_edits()
        done = edits.apply_edits([_layer_norm_to_rms_norm(work, one) for one in stream.norms.values()])
    except RefusedError as error:
        work.record_outcome("center", stream, error)
        return False
    finally:
        work.looked_at |= {id(norm), *stream.norms}
    work.record_outcome("center", stream, done)
    return True


def _layer_norm_to_rms_norm(work: _RotationPass, norm: gs.Node) -> DecidedProposal:
    """Rewrite a layer norm of a zero-mean input as an RMS norm, followed by a Mul for gamma and an Add for beta."""
    graph = work.graph
    x = norm.inputs[0]
    y = norm.outputs[0]
    known = [graph.known_value(t) if not t.is_empty() else None for t in (*norm.inputs[1:3], gs.Variable.empty())][:2]
    if known[0] is None or (known[1] is None and len(norm.inputs) > 2 and not norm.inputs[2].is_empty()):
        raise RefusedError(f"gamma or beta of {norm.op} {norm.name!r} is not constant")
    ones = graph.add_constant(f"{y.name}_ones", np.ones(known[0].shape), FLOAT)
    attrs = {name: value for name, value in graph.attrs(norm).items() if name in ("axis", "epsilon", "stash_type")}
    constants = [
        (op, graph.add_constant(f"{y.name}_{name}", value, FLOAT))
        for op, name, value, neutral in (("Mul", "gamma", known[0], 1.0), ("Add", "beta", known[1], 0.0))
        if value is not None and bool((value != neutral).any())
    ]

    def scale_and_shift_nodes(data: gs.Tensor) -> list[gs.Node]:
        nodes = [graph.make_node("RMSNormalization", [data, ones], y, attrs)]
        for op, constant in constants:
            nodes.append(graph.make_node(op, [nodes[-1].outputs[0], constant], y))
        return nodes

    axes = graph.add_constant(f"{y.name}_axes", np.array([-1]), np.int64)
    mean = graph.make_node("ReduceMean", [x, axes], x, {"keepdims": 1})
    less = graph.make_node("Sub", [x, mean.outputs[0]], x)
    pair = pair_of(graph, y, [x], scale_and_shift_nodes(less.outputs[0])[-1].outputs[0])
    return prove_nodes(work.rewriter, y, scale_and_shift_nodes(x), (pair,))


def _rotate_stream(work: _RotationPass, seed: gs.Tensor) -> None:
    """Rotate the stream of ``seed``, whose norms have no gammas."""
    if id(seed) in work.turned:
        return
    stream = ResidualStream()
    try:
        trace_stream(work.layers, stream, seed, through=True)
        _require_no_gammas(work.graph, stream)
        _require_matrix(stream)
        run = signed_hadamard(largest_order(gcd(*stream.widths)))
        edits = StreamEdits(work.rewriter, work.layers, stream, StreamMap(run, len(run)))
        edits.prove_edits()
        done = edits.apply_edits()
    except RefusedError as error:
        work.record_outcome("rotate", stream, error)
        return
    work.turned |= stream.tensors.keys()
    work.record_outcome("rotate", stream, done)


def _require_no_gammas(graph: Graph, stream: ResidualStream) -> None:
    """Check that all norms of a stream are RMS norms with gamma 1.

    Raises:
        RefusedError: a norm still has a gamma.
    """
    for norm in stream.norms.values():
        gamma = graph.known_value(norm.inputs[1])
        if norm.op not in RMS or gamma is None or not bool((gamma == 1).all()):
            raise RefusedError(f"the gamma of {describe_node(norm)} could not be moved out of it")


def _attention_values(graph: Graph) -> Iterator[gs.Tensor]:
    """Yield the tensors with the values of attentions: of Attention ops, and of MatMuls after a Softmax."""
    for node in graph.nodes:
        if node.op == "Attention" and not node.domain:
            yield node.inputs[2]
        elif node.op == "MatMul" and not graph.is_constant(node.inputs[1]):
            above = graph.producer(node.inputs[0])
            while above is not None and above.op in _BETWEEN:
                carried = [t for t in above.inputs if not graph.is_constant(t) and graph.dtype(t) == FLOAT]
                if carried:
                    above = graph.producer(carried[0])
                else:
                    above = None
            if above is not None and above.op == "Softmax":
                yield node.inputs[1]
