"""Compute nodes with constant inputs once, and report the norms among them.

`normdeploy.recognition.constant_subgraphs` finds the nodes with constant inputs.

Each result is evaluated in float64 and rounded once to its type in the file. Nodes that only move numbers keep them bit
for bit. The file grows by a few small constants at most: the bytes of a stored result are offset by the weights that
become unused. If storing a result would let the file grow too much, the node that computes the result stays. The inputs
of this node are tried next.
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
# Maximum bytes by which a file may grow in total
_SLACK = 2**16
# Maximum number of rounds. After each round, the nodes that have to stay are known, and their inputs are tried
_ROUNDS = 24
# Maximum number of node visits in the search for the best results to store in one constant subgraph
_TRIES = 2**22


def note_constant_norms(graph: Graph) -> Sweep:
    """Record the norms of constants before any rewrite, because a fold may remove such a norm.

    Returns:
        a sweep that stores constants and reports these norms.
    """
    norms = list(find_constant_norms(graph))
    return lambda target: _iter_proposals(graph, norms, target)


def _iter_proposals(
    graph: Graph, norms: Sequence[ConstantNorm], target: RewriteTarget
) -> Iterator[tuple[gs.Node, ProposeResult]]:
    """Yield proposals to store nodes with constant inputs, then the findings of ``norms``."""
    left = _SLACK
    # Id of a node that has to stay → the reason.
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
            # The freed bytes were counted for all chosen results, so the choice is repeated in the next round.
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
    """Choose the results to store; record a reason for the nodes of all other results."""
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
            reasons[id(node)] = (
                f"it depends only on constants, but storing its value would add {whole:,} bytes to the file"
            )
    return list(chosen.values())


def _stored_values(graph: Graph, chosen: Sequence[gs.Tensor], reasons: dict[int, str]) -> list[StoredTensor]:
    """Evaluate results in their own types. Results that cannot be stored are left out, and their nodes get a reason."""
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
            reasons[id(node)] = f"it depends only on constants, but its value can't be computed: {e}"
            continue
        if stored is None or not fits or stored.shape != graph.shape(t):
            reasons[id(node)] = "it depends only on constants, but its value is not finite or its type is unknown"
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
    """Return the reason why a norm stays. It is the reason of the first node after the norm that has to stay."""
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
    return "it depends only on constants, but a later step or a narrower type after it is sensitive to its rounding"
