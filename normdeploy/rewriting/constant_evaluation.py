"""The cleanup that computes once what constants alone feed (`normdeploy.recognition.constant_subgraphs`), and says what
became of norms in it.

Each result is evaluated in float64 and rounded once to the type that the file gives it; where a part only moves numbers
they stay bit for bit. The file never grows by it but for a few small constants: what is stored instead is counted
against the weights that nobody reads any more, a result that would cost more stays, and so do the nodes that make it;
of these the inputs are asked next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from ..evaluate import evaluator
from ..findings.records import Finding
from ..graphs.graph import Graph
from ..recognition.constant_subgraphs import (
    ConstantNorm,
    ConstantSubgraph,
    byte_count,
    find_constant_norms,
    find_constant_subgraphs,
)
from .proposals import COMPUTED, ProposeResult, RewriteTarget, StoredTensor, Sweep, propose_stored

STAGE = "constants"
# bytes by which a file may grow in all
_SLACK = 2**16
# each moves a border of what is computed up by a node
_ROUNDS = 24
# nodes looked at to choose among the results of one part
_TRIES = 2**22


def note_constant_norms(graph: Graph) -> Sweep:
    """Note the norms of constants before anything is rewritten, as a fold may take one along."""
    norms = list(find_constant_norms(graph))
    return lambda target: _iter_proposals(graph, norms, target)


def _iter_proposals(
    graph: Graph, norms: Sequence[ConstantNorm], target: RewriteTarget
) -> Iterator[tuple[gs.Node, ProposeResult]]:
    """Propose to store what constants alone feed, then tell of ``norms``."""
    left = _SLACK
    # Of nodes that have to stay, by id.
    reasons: dict[int, str] = {}
    for _ in range(_ROUNDS):
        again = False
        for part in find_constant_subgraphs(graph, reasons):
            first = part.nodes[0]
            undone = target.wanted.undone_at(STAGE, first)
            if undone is not None:
                reasons.update((id(node), undone.reason) for node in part.nodes)
                again = True
                continue
            chosen = _results_to_store(graph, part, left, reasons)
            values = _stored_values(graph, chosen, reasons)
            again = again or len(values) < len(part.results)
            # What would be freed was counted with all of them.
            if len(values) < len(chosen):
                continue
            left -= max(0, part.file_growth(graph, {id(v.tensor) for v in values}))
            if values:
                yield first, propose_stored(part.results[0], graph.module(first), values)
        if not again:
            break
    for norm in norms:
        yield norm.node, _constant_norm_finding(graph, norm, reasons)


def _results_to_store(graph: Graph, part: ConstantSubgraph, left: int, reasons: dict[int, str]) -> list[gs.Tensor]:
    """Choose the results that are stored; the nodes of the others get a reason."""
    chosen = {id(t): t for t in part.results}
    growth = whole = part.file_growth(graph, chosen)
    large = sorted(part.results, key=lambda t: byte_count(graph, t), reverse=True)
    for t in large if len(large) * len(part.nodes) <= _TRIES else ():
        if growth <= left:
            break
        without = {key: other for key, other in chosen.items() if key != id(t)}
        less = part.file_growth(graph, without)
        if less < growth:
            chosen = without
            growth = less
    if growth > left:
        chosen = {}
    for t in part.results:
        node = graph.producer(t)
        if id(t) not in chosen and node is not None:
            reasons[id(node)] = f"constants alone feed it, but stored once the file would be larger by {whole:,} bytes"
    return list(chosen.values())


def _stored_values(graph: Graph, chosen: Sequence[gs.Tensor], reasons: dict[int, str]) -> list[StoredTensor]:
    """Evaluate results in their own types; those that can't be are left out, and their nodes get a reason."""
    computed: list[StoredTensor] = []
    for t in chosen:
        node = graph.producer(t)
        dtype = graph.dtype(t)
        assert node is not None
        try:
            with evaluator.silence_numpy():
                exact = graph.value(t)
                if dtype is not None:
                    stored = exact.astype(dtype)
                else:
                    stored = None
                fits = stored is not None and (
                    stored.dtype.kind in "iub" or bool(np.isfinite(stored.astype(np.float64)).all())
                )
        except evaluator.UnsupportedOp as e:
            reasons[id(node)] = f"constants alone feed it, but it can't be computed: {e}"
            continue
        if stored is None or not fits or stored.shape != graph.shape(t):
            reasons[id(node)] = "constants alone feed it, but what it computes is not finite, or of no known type"
            continue
        computed.append(StoredTensor(t, stored))
    return computed


def _constant_norm_finding(graph: Graph, norm: ConstantNorm, reasons: dict[int, str]) -> Finding:
    node = norm.node
    dtype = graph.dtype(node.outputs[0])
    gone = not graph.is_alive(node)
    return Finding(
        kind=norm.kind,
        status="folded" if gone else "refused",
        tensor=norm.tensor,
        module=norm.module,
        spelling=norm.spelling,
        became=COMPUTED if gone else "",
        reason="" if gone else _reason_not_stored(graph, node, reasons),
        dtype="" if dtype is None else dtype.name,
        proved=("float64, rounded once",) if gone else (),
        nodes_left=0 if gone else None,
    )


def _reason_not_stored(graph: Graph, node: gs.Node, reasons: dict[int, str]) -> str:
    """Why a norm stays: the reason of the first node behind it that has to."""
    stack = [node]
    seen = {id(node)}
    while stack:
        top = stack.pop(0)
        if id(top) in reasons:
            return reasons[id(top)]
        new = [
            r
            for t in top.outputs
            for r in graph.all_consumers_of(t)
            if id(r) not in seen and graph.is_constant(r.outputs[0])
        ]
        seen.update(map(id, new))
        stack += new
    return "constants alone feed it, but a step or a narrower type behind it depends on how it is rounded"
