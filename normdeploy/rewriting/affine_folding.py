"""Fold one scale and shift (an eval BatchNorm, in any spelling) into a neighboring linear op."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from ..findings.records import Finding, Status
from ..forms import batch_norm
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..recognition import norm_attributes
from ..recognition.affine_chains import AffineChain, find_affine_chains, measure_affine
from ..recognition.anchors import VIEWS, is_norm_node
from ..storage.heap import trim_heap
from . import dequantized_weights
from .certification import pair_of, unproved_finding
from .dequantized_weights import is_quantized_dequantized, require_expressible
from .fold_accuracy import CostlyFold, drop_costly_fold
from .proposals import NodeReplacement, Proposal, RewriteTarget
from .rounding_verdicts import fold_trial_maker

# Bytes of weights above which the proof's float64 copies are freed at once. They take several times the weights' memory
_LARGE = 2**20


def propose_fold(graph: Graph, start: gs.Node, target: RewriteTarget) -> Proposal | Finding | None:
    """Propose to fold the scale and shift that starts at ``start``.

    Returns:
        the proposal, or the finding of a norm that stays; None if no scale and shift starts here.
    """
    if start.op == "BatchNormalization" and graph.is_constant(start.inputs[0]):
        # The node is constant, so `constant_evaluation` computes it.
        return None
    chains = find_affine_chains(graph, start)
    if isinstance(chains, Refusal):
        return Finding("BatchNorm", "refused", chains.tensor, graph.module(start), reason=chains.reason)
    refusals: list[Refusal] = []
    costly: CostlyFold | None = None
    longest: AffineChain | None = None
    for chain in chains:
        longest = longest or chain
        for write in (batch_norm.fold_into_previous, batch_norm.fold_into_concat, batch_norm.fold_into_next):
            made = require_expressible(graph, drop_costly_fold(graph, chain, write(graph, chain)))
            if isinstance(made, batch_norm.AffineFold):
                return _fold_proposal(graph, chain, made, "", target)
            refusals.append(made)
            if costly is None and isinstance(made, CostlyFold):
                costly = made
    if longest is None:
        own = start.op == "BatchNormalization" and not _belongs_to_norm(graph, start)
        alone = measure_affine(graph, start.inputs[0], start.outputs[0]) if own else None
        if isinstance(alone, Refusal):
            return Finding("BatchNorm", "refused", start.outputs[0].name, graph.module(start), reason=alone.reason)
        return None
    why = next(
        (r.reason for r in refusals if r.kind is not RefusalKind.NO_LINEAR_OP),
        "no linear op precedes or follows it",
    )
    why = costly.reason if costly is not None else why
    if (
        longest is not None
        and all(r.kind is RefusalKind.NO_LINEAR_OP for r in refusals)
        and is_quantized_dequantized(graph, longest.z)
    ):
        why = "its input is quantized, so rounding separates it from the preceding ops"
    # A chain of more than two of Sub, Div, Mul and Add by vectors is a BatchNorm that another optimizer expanded, after
    # it computed the root of the variance.
    if longest.normalizes or len(longest.nodes) > 2 or costly is not None:
        return _propose_lone_affine(graph, longest, why, target)
    # A padding Conv takes the scale of (x − mean)/std, and one Sub stays.
    scale_fold = _fold_scale_alone(graph, longest)
    if scale_fold is not None and target.wanted.partial:
        return _fold_proposal(graph, longest, scale_fold, why, target)
    return None


def _fold_scale_alone(graph: Graph, chain: AffineChain) -> batch_norm.AffineFold | None:
    """Write the fold of the chain's scale into the next linear op; None if none can take it."""
    made = require_expressible(graph, drop_costly_fold(graph, chain, batch_norm.fold_scale_into_next(graph, chain)))
    if isinstance(made, batch_norm.AffineFold):
        return made
    return None


def _propose_lone_affine(
    graph: Graph, chain: AffineChain, why: str, target: RewriteTarget
) -> Proposal | Finding | None:
    """Propose the best form of a scale and shift that no linear op takes completely.

    Fold the scale alone if a linear op can take it; otherwise write one scale and shift, in no more nodes than before.
    """
    scale_fold = _fold_scale_alone(graph, chain)
    if scale_fold is not None:
        if target.wanted.partial:
            return _fold_proposal(graph, chain, scale_fold, why, target)
        why += "; folding only its scale would quantize x + shift/scale, which has a wider range"
    plain = all(isinstance(t, gs.Constant) for n in chain.nodes for t in n.inputs if graph.is_constant(t))
    # torch exports a cat of one tensor as an Identity.
    steps = [n for n in chain.nodes if n.op not in ("Identity", "Dropout")]
    lone = len(steps) == 1 and steps[0].op == "BatchNormalization"
    if lone:
        done = batch_norm.has_neutral_statistics(graph, steps[0])
    else:
        done = len(chain.nodes) <= 2 and all(n.op in ("Mul", "Add") for n in chain.nodes)
    if plain and done and lone and _belongs_to_norm(graph, steps[0]):
        return None
    if plain and done:
        return _fold_finding(graph, chain, target, "kept", reason=f"it is already one scale and shift; {why}")
    made = drop_costly_fold(
        graph,
        chain,
        batch_norm.neutralize_statistics(graph, chain, steps[0])
        if lone
        else batch_norm.write_scale_and_shift(graph, chain),
    )
    if isinstance(made, batch_norm.AffineFold):
        return _fold_proposal(graph, chain, made, why, target)
    return _fold_finding(graph, chain, target, "refused", reason=made.reason)


def _belongs_to_norm(graph: Graph, node: gs.Node) -> bool:
    """Return True if the node is the scale and shift of the norm before it (`forms.group_norm`), not a norm itself."""
    before = graph.producer(node.inputs[0])
    while before is not None and before.op in VIEWS:
        before = graph.producer(before.inputs[0])
    return before is not None and is_norm_node(before)


def _fold_proposal(
    graph: Graph, chain: AffineChain, form: batch_norm.AffineFold, why: str, target: RewriteTarget
) -> Proposal:
    return Proposal(
        replace(_fold_finding(graph, chain, target, "folded", reason=why), became=form.became, proved=("identity",)),
        (pair_of(graph, form.old, form.leaves, form.nodes[-1].outputs[0]),),
        tuple(NodeReplacement(old, nodes) for old, nodes in form.edits),
        unproved=lambda failure: unproved_finding(_fold_finding(graph, chain, target, "undone"), failure),
        expressions=form.expressions,
        trial=fold_trial_maker(form.windows, chain.dtype),
        kind=_trial_kind(chain, form),
        stored=lambda proposal: _as_stored_in_file(graph, form, proposal, written=target.wanted.census and bool(why)),
    )


def _trial_kind(chain: AffineChain, form: batch_norm.AffineFold) -> tuple[object, ...]:
    """Return a key that is equal for folds that run the same kernels.

    Such folds differ only in sizes and in constants, whose effect on the accuracy `drop_costly_fold` measures.
    """
    shares = [(share.side, share.linear.node.op, share.linear.w.ndim, share.linear.groups > 1) for share in form.shares]
    return "fold", chain.dtype.name, tuple(node.op for node in chain.nodes), tuple(shares)


def _as_stored_in_file(graph: Graph, form: batch_norm.AffineFold, proposal: Proposal, *, written: bool) -> Proposal:
    """Convert a proved fold to the form that the file stores, and release the memory of the proof.

    A dequantized weight is written as codes and scales again.

    Args:
        written: True to list the written tensors in the finding.
    """
    form = dequantized_weights.write_dequantized(graph, form)
    for share in form.shares:
        if (again := share.linear.weight_recomputation(graph, share.scale, share.side == "output")) is not None:
            graph.exact.drop_remainder(id(share.weight), again)
    if sum(share.weight.values.nbytes for share in form.shares) > _LARGE:
        trim_heap()
    return replace(
        proposal,
        finding=replace(proposal.finding, became=form.became, remains=" ".join(form.remains)),
        changes=tuple(NodeReplacement(old, nodes) for old, nodes in form.edits),
        revise=lambda finding, certificate: replace(
            finding,
            certificate=certificate,
            nodes_left=len(form.remains),
            written=tuple(n.outputs[0].name for n in form.nodes) if written else (),
        ),
    )


def _fold_finding(graph: Graph, chain: AffineChain, target: RewriteTarget, status: Status, reason: str = "") -> Finding:
    finding = Finding(
        kind="BatchNorm" if chain.normalizes else "scale and shift",
        status=status,
        tensor=chain.y.name,
        module=graph.module(chain.nodes[-1]),
        spelling=" ".join(n.op for n in chain.nodes),
        reason=reason,
        dtype=chain.dtype.name,
    )
    if target.wanted.census:
        return replace(finding, **norm_attributes.attributes_of_scale(graph, chain))
    return finding
