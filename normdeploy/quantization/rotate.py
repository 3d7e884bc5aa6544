"""The residual stream in other coordinates, in which no channel stands out (`--rotate`), each step proved.

A Hadamard matrix spreads what is large in one channel over all (QuaRot, Ashkboos et al., arXiv 2404.00456; QuIP#, Tseng
et al., arXiv 2402.04396). With Q = A/√k, A of ±1, the stream holds x·Q in the place of x: layers that write it hold
W·Q, those that read it Qᵀ·W, and an RMS norm without gamma commutes with Q. Gammas go into the layers behind first
(`migrate`). A layer norm is an RMS norm where its input has no mean: before that the mean is taken off by all that
write the stream (SliceGPT, Ashkboos et al., arXiv 2401.15024, section 3.1). The values of an attention are rotated head
by head, by the layer that makes them, and back by the one behind.

Why local proofs suffice is in docs/identities.md, "A map of a whole stream"; its premises are what `streams` looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.opsets import needs_conversion, renumbered
from ..quantized import Migration
from ..recognition.roots import VIEWS
from ..records import Certificate
from ..rewriting import certify
from ..rewriting.certify import pair_of
from ..rewriting.ledger import Wanted
from ..rewriting.rewriter import Decided, Rewriter
from ..storage.protos import copied, standard_opset
from . import migrate
from .edits import FLOAT, Edits, Map, proposal
from .hadamard import order_for, signed
from .streams import NORMS, RMS, Layers, Stream, stream_of, titled

OPSET = 23  # the first with RMSNormalization
_BETWEEN = frozenset({"Cast", "Identity", "Mul", "Where", "Dropout"})  # a Softmax and its product with the values


@dataclass
class _Work:
    rewriter: Rewriter
    migrations: list[Migration] = field(default_factory=list)
    looked_at: set[int] = field(default_factory=set)  # norms
    turned: set[int] = field(default_factory=set)  # tensors

    def __post_init__(self) -> None:
        self.layers = Layers.of(self.graph)

    @property
    def graph(self) -> Graph:
        return self.rewriter.graph

    def tell(self, kind: str, stream: Stream, done: Certificate | str) -> None:
        """Each refusal once, however many norms come to it."""
        names = tuple(one.out.name for one in (stream.writers | stream.readers).values())
        first = next(iter(stream.tensors.values())).name
        if not isinstance(done, str):
            self.migrations.append(Migration(kind, first, names, "made", certificate=done))
        elif not any(m.kind == kind and m.reason == done for m in self.migrations):
            self.migrations.append(Migration(kind, first, names, "refused", done))


def rotated(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """``proto`` with its residual streams and the values of its attentions rotated, where they are closed.

    Args:
        proto: a float32 model with its weights, its norms single nodes; not changed.

    Returns:
        The model, and an account of each stream: what was centered, moved and rotated, or why not.

    Raises:
        GraphError: the model can't be read.
    """
    return _transformed(proto, rotate=True)


def centered(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    """``proto`` with layer norms as RMS norms, the mean taken off by what writes the stream; else as `rotated`."""
    return _transformed(proto, rotate=False)


def _transformed(proto: onnx.ModelProto, rotate: bool) -> tuple[onnx.ModelProto, tuple[Migration, ...]]:
    work = _Work(Rewriter(Graph(_with_opset(proto)), Wanted()))
    for norm in [n for n in work.graph.nodes if n.op in NORMS and not n.domain]:
        if id(norm) in work.looked_at or not work.graph.alive(norm):
            continue
        if rotate:
            _residual(work, norm)
        elif norm.op not in RMS:
            _center(work, norm)
    for values in _values(work.graph) if rotate else ():
        _rotate(work, values)
    if not any(m.status == "made" for m in work.migrations):
        return proto, tuple(work.migrations)
    return work.rewriter.proto(), tuple(work.migrations)


def _with_opset(proto: onnx.ModelProto) -> onnx.ModelProto:
    entry = standard_opset(proto)
    if entry is None or entry.version >= OPSET or needs_conversion(proto, OPSET):
        return proto
    return renumbered(copied(proto), OPSET)


def _residual(work: _Work, norm: gs.Node) -> None:
    """Rotate the stream that ``norm`` reads."""
    graph, seed = work.graph, norm.inputs[0]
    stream, refusal = stream_of(work.layers, seed, through=True)
    work.looked_at |= {id(norm), *stream.norms}
    reason = refusal.reason if refusal is not None else _unfit(stream) or _immovable(graph, stream)
    if reason:
        work.tell("rotate", stream, reason)
        return
    for one in stream.norms.values():
        if one.op not in RMS and graph.alive(one) and not _center(work, one):
            return
    results = {id(t) for t in stream.tensors.values()}
    work.migrations += migrate.unscaled(work.rewriter, results)
    work.layers = Layers.of(graph)
    _rotate(work, seed)


def _unfit(stream: Stream) -> str:
    """Why no matrix suits a stream that is closed."""
    common = gcd(*stream.widths)
    if order_for(common) == 1:
        return f"no Hadamard matrix divides its {common} channels"
    both = stream.writers.keys() & stream.readers.keys()
    if both:
        return f"{stream.writers[both.pop()].title} reads it and writes it"
    if not stream.readers:
        return "no linear layer reads it, which could rotate it back"
    return ""


def _immovable(graph: Graph, stream: Stream) -> str:
    """Names a norm whose gamma or beta has not only linear layers behind it, which could take them."""
    for norm in stream.norms.values():
        known = [graph.known(t) for t in norm.inputs[1:3] if not t.is_empty()]
        if all(v is not None and bool((v == one).all()) for v, one in zip(known, (1.0, 0.0), strict=False)):
            continue
        left = [norm.outputs[0]]
        while left:
            for node in graph.consumers(left.pop()):
                if node.op in VIEWS:
                    left.append(node.outputs[0])
                elif id(node) not in stream.readers and node.op not in ("Shape", "Size"):
                    return f"{titled(node)} reads {titled(norm)}, whose gamma linear layers alone could take"
    return ""


def _center(work: _Work, norm: gs.Node) -> bool:
    """Take the mean off the stream that ``norm`` reads, and let all norms that read it be RMS norms."""
    graph = work.graph
    stream, refusal = stream_of(work.layers, norm.inputs[0], through=False)
    work.looked_at |= {id(norm), *stream.norms}
    done: Certificate | str
    if refusal is not None:
        done = refusal.reason
    elif graph.opset < OPSET:
        done = f"RMSNormalization needs opset {OPSET}, at which an op of the file means something else"
    elif len(stream.widths) > 1:
        done = f"views cut its channels: {', '.join(map(str, sorted(stream.widths)))}"
    else:
        edits = Edits(work.rewriter, work.layers, stream, Map(None))
        done = edits.prepared() or edits.made([_without_mean(work, one) for one in stream.norms.values()])
    work.tell("center", stream, done)
    return not isinstance(done, str)


def _without_mean(work: _Work, norm: gs.Node) -> Decided | str:
    """A layer norm as an RMS norm of what has no mean, its gamma and beta as a Mul and an Add."""
    graph, x, y = work.graph, norm.inputs[0], norm.outputs[0]
    known = [graph.known(t) if not t.is_empty() else None for t in (*norm.inputs[1:3], gs.Variable.empty())][:2]
    if known[0] is None or (known[1] is None and len(norm.inputs) > 2 and not norm.inputs[2].is_empty()):
        return f"gamma or beta of {norm.op} {norm.name!r} is no constant"
    ones = graph.constant(f"{y.name}_ones", np.ones(known[0].shape), FLOAT)
    attrs = {name: value for name, value in graph.attrs(norm).items() if name in ("axis", "epsilon", "stash_type")}
    constants = [
        (op, graph.constant(f"{y.name}_{name}", value, FLOAT))
        for op, name, value, neutral in (("Mul", "gamma", known[0], 1.0), ("Add", "beta", known[1], 0.0))
        if value is not None and bool((value != neutral).any())
    ]

    def written(data: gs.Tensor) -> list[gs.Node]:
        nodes = [graph.node("RMSNormalization", [data, ones], y, attrs)]
        for op, constant in constants:
            nodes.append(graph.node(op, [nodes[-1].outputs[0], constant], y))
        return nodes

    axes = graph.constant(f"{y.name}_axes", np.array([-1]), np.int64)
    mean = graph.node("ReduceMean", [x, axes], x, {"keepdims": 1})
    less = graph.node("Sub", [x, mean.outputs[0]], x)
    pair = pair_of(graph, y, [x], written(less.outputs[0])[-1].outputs[0])
    decided = work.rewriter.prove(proposal(graph, y, written(x), (pair,)))
    return decided if isinstance(decided, Decided) else certify.why(decided)


def _rotate(work: _Work, seed: gs.Tensor) -> None:
    """The stream of ``seed``, its norms without gammas."""
    if id(seed) in work.turned:
        return
    stream, refusal = stream_of(work.layers, seed, through=True)
    reason = refusal.reason if refusal is not None else _scaled(work.graph, stream) or _unfit(stream)
    if reason:
        work.tell("rotate", stream, reason)
        return
    run = signed(order_for(gcd(*stream.widths)))
    edits = Edits(work.rewriter, work.layers, stream, Map(run, len(run)))
    done = edits.prepared() or edits.made([])
    if not isinstance(done, str):
        work.turned |= stream.tensors.keys()
    work.tell("rotate", stream, done)


def _scaled(graph: Graph, stream: Stream) -> str:
    """Names a norm that has a gamma still."""
    for norm in stream.norms.values():
        gamma = graph.known(norm.inputs[1])
        if norm.op not in RMS or gamma is None or not bool((gamma == 1).all()):
            return f"the gamma of {titled(norm)} could not be moved out of it"
    return ""


def _values(graph: Graph) -> Iterator[gs.Tensor]:
    """The values of the attentions."""
    for node in graph.nodes:
        if node.op == "Attention" and not node.domain:
            yield node.inputs[2]
        elif node.op == "MatMul" and not graph.is_constant(node.inputs[1]):
            above = graph.producer(node.inputs[0])
            while above is not None and above.op in _BETWEEN:
                carried = [t for t in above.inputs if not graph.is_constant(t) and graph.dtype(t) == FLOAT]
                above = graph.producer(carried[0]) if carried else None
            if above is not None and above.op == "Softmax":
                yield node.inputs[1]
