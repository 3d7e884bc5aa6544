"""The step that folds one scale and shift (an eval BatchNorm, however it is written) into a neighbouring linear op."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from ..forms import batch
from ..graphs.graph import Graph
from ..graphs.region import Kind, Refusal
from ..recognition import traits
from ..recognition.roots import VIEWS, is_norm
from ..recognition.scales import Affine, affines, measure
from ..records import Finding, Status
from ..storage.heap import trim
from . import dequantized
from .certify import pair_of, unproved
from .conditioning import Costly, priced
from .dequantized import expressible, rounds
from .proposal import Change, Proposal, Target
from .rounding import fold_trial

_LARGE = 2**20  # bytes of weights, of which the proofs held some times as much in float64


def fold(graph: Graph, start: gs.Node, target: Target) -> Proposal | Finding | None:
    """Propose to fold the scale and shift that begins with ``start``."""
    if start.op == "BatchNormalization" and graph.is_constant(start.inputs[0]):
        return None  # `constants` computes it once
    chains = affines(graph, start)
    if isinstance(chains, Refusal):
        return Finding("BatchNorm", "refused", chains.tensor, graph.module(start), reason=chains.reason)
    refusals: list[Refusal] = []
    costly: Costly | None = None
    longest: Affine | None = None
    for chain in chains:
        longest = longest or chain
        for write in (batch.into_previous, batch.into_concat, batch.into_next):
            made = expressible(graph, priced(graph, chain, write(graph, chain)))
            if isinstance(made, batch.Fold):
                return _proposal(graph, chain, made, "", target)
            refusals.append(made)
            costly = made if costly is None and isinstance(made, Costly) else costly
    if longest is None:
        own = start.op == "BatchNormalization" and not _carries(graph, start)
        alone = measure(graph, start.inputs[0], start.outputs[0]) if own else None
        if isinstance(alone, Refusal):
            return Finding("BatchNorm", "refused", start.outputs[0].name, graph.module(start), reason=alone.reason)
        return None
    why = next(
        (r.reason for r in refusals if r.kind is not Kind.NO_LINEAR_OP), "no linear op stands before or behind it"
    )
    why = costly.reason if costly is not None else why
    if longest is not None and all(r.kind is Kind.NO_LINEAR_OP for r in refusals) and rounds(graph, longest.z):
        why = "what it reads is quantized: rounding stands between it and what is before"
    # Sub, Div, Mul, Add by vectors are what other optimizers leave of a BatchNorm by hand: its root is folded already
    return (
        _alone(graph, longest, why, target)
        if longest.normalizes or len(longest.nodes) > 2 or costly is not None
        else None
    )


def _alone(graph: Graph, chain: Affine, why: str, target: Target) -> Proposal | Finding | None:
    """What no linear op takes whole: its scale alone if one can, else one scale and shift, in no more nodes than
    before."""
    made = expressible(graph, priced(graph, chain, batch.scale_into_next(graph, chain)))
    if isinstance(made, batch.Fold):
        if target.wanted.partial:
            return _proposal(graph, chain, made, why, target)
        why += "; nor is its scale folded alone, since x + shift/scale would be quantized, whose range is wider"
    plain = all(isinstance(t, gs.Constant) for n in chain.nodes for t in n.inputs if graph.is_constant(t))
    steps = [n for n in chain.nodes if n.op not in ("Identity", "Dropout")]  # torch's cat of one tensor is an Identity
    lone = len(steps) == 1 and steps[0].op == "BatchNormalization"
    done = (
        batch.is_neutral(graph, steps[0])
        if lone
        else len(chain.nodes) <= 2 and all(n.op in ("Mul", "Add") for n in chain.nodes)
    )
    if plain and done and lone and _carries(graph, steps[0]):
        return None
    if plain and done:
        return _finding(graph, chain, target, "kept", reason=f"it is one scale and shift already; {why}")
    made = priced(graph, chain, batch.neutral(graph, chain, steps[0]) if lone else batch.scale_and_shift(graph, chain))
    return (
        _proposal(graph, chain, made, why, target)
        if isinstance(made, batch.Fold)
        else _finding(graph, chain, target, "refused", reason=made.reason)
    )


def _carries(graph: Graph, node: gs.Node) -> bool:
    """Whether it is the scale and shift of the norm before it (`forms.group`): no norm of its own."""
    before = graph.producer(node.inputs[0])
    while before is not None and before.op in VIEWS:
        before = graph.producer(before.inputs[0])
    return before is not None and is_norm(before)


def _proposal(graph: Graph, chain: Affine, form: batch.Fold, why: str, target: Target) -> Proposal:
    return Proposal(
        replace(_finding(graph, chain, target, "folded", reason=why), became=form.became, proved=("identity",)),
        (pair_of(graph, form.old, form.leaves, form.nodes[-1].outputs[0]),),
        tuple(Change(old, nodes) for old, nodes in form.edits),
        unproved=lambda failure: unproved(_finding(graph, chain, target, "undone"), failure),
        expressions=form.expressions,
        trial=fold_trial(form.windows, chain.dtype),
        stored=lambda proposal: _stored(graph, form, proposal, written=target.wanted.census and bool(why)),
    )


def _stored(graph: Graph, form: batch.Fold, proposal: Proposal, *, written: bool) -> Proposal:
    """The fold as the file holds it: what was dequantized by codes and scales; and let go of what the proof held.

    Args:
        written: whether the finding names the tensors that are written; where nothing is left there are none.
    """
    form = dequantized.written(graph, form)
    for share in form.shares:
        if (again := share.linear.weight_again(graph, share.scale, share.side == "output")) is not None:
            graph.exact.drop_part(id(share.weight), again)
    if sum(share.weight.values.nbytes for share in form.shares) > _LARGE:
        trim()
    return replace(
        proposal,
        finding=replace(proposal.finding, became=form.became, remains=" ".join(form.remains)),
        changes=tuple(Change(old, nodes) for old, nodes in form.edits),
        revise=lambda finding, certificate: replace(
            finding,
            certificate=certificate,
            written=tuple(n.outputs[0].name for n in form.nodes) if written else (),
        ),
    )


def _finding(graph: Graph, chain: Affine, target: Target, status: Status, reason: str = "") -> Finding:
    finding = Finding(
        kind="BatchNorm" if chain.normalizes else "scale and shift",
        status=status,
        tensor=chain.y.name,
        module=graph.module(chain.nodes[-1]),
        spelling=" ".join(n.op for n in chain.nodes),
        reason=reason,
        dtype=chain.dtype.name,
    )
    return replace(finding, **traits.of_scale(graph, chain)) if target.wanted.census else finding
