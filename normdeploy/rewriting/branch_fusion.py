"""Merge parallel branches of one input into one convolution if one of them has a batch norm (`branch_merging`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from ..compare.rewrite_errors import TIMES, ULPS
from ..evaluate import evaluator
from ..findings.records import Certificate, Finding, combine_certificates
from ..forms.constant_linear import ConstantLinear
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from . import certification
from .affine_folding import propose_fold
from .branch_expressions import BranchExpression, MergedBranchExpressions
from .branch_merging import BranchMerge, ParallelBranch, branch_weight, merge_branches, parallel_branches
from .certification import Failure, pair_of
from .fold_accuracy import (
    AccuracyLoss,
    CostlyFold,
    most_accurate_chain,
    normal_numbers,
    round_to_dtype,
    sum_products,
    worst_channel,
)
from .proposals import NodeReplacement, Proposal, Remark, RewriteTarget
from .rewrite_ledger import LedgerEntry
from .rounding_verdicts import fold_trial_maker
from .weight_rows import select_rows

_DRAWS = 8
_ROWS = 24


def propose_branch_merge(graph: Graph, node: gs.Node, target: RewriteTarget) -> Proposal | Remark | None:
    """Propose to merge the branches that ``node`` adds.

    The findings of their norms report the merge, or the reason why it was not made.

    Returns:
        the proposal or a remark; None if ``node`` does not add such branches.
    """
    parts = parallel_branches(graph, node)
    if parts is None:
        return None
    norms = [entry for part in parts for entry in _norms_in_branch(part, target)]
    if not norms:
        return None
    form = merge_branches(graph, node, parts)
    if not isinstance(form, Refusal):
        form = _drop_costly_merge(graph, parts, form)
    if isinstance(form, Refusal):
        return _unmerged_remark(norms, form)
    return Proposal(
        Finding("branches", "folded", form.old.name, became=form.became),
        (pair_of(graph, form.old, [form.data], form.nodes[-1].outputs[0]),),
        (NodeReplacement(form.old, form.nodes),),
        unproved=lambda failure: _unmerged_remark(norms, failure),
        expressions=form.expressions,
        trial=fold_trial_maker((form.window,), graph.dtype(form.old)),
        revised_entries=tuple(norms),
        revise=lambda finding, certificate: _merged_finding(finding, certificate, form.became),
        then=lambda: _propose_fold_behind(graph, form.old, target),
    )


def _norms_in_branch(part: ParallelBranch, target: RewriteTarget) -> Sequence[LedgerEntry]:
    """Return the entries of the norms in a branch."""
    merged_before = target.entries_behind(part.out.name)
    if merged_before:
        return merged_before
    entry = target.entry_of(part.out.name)
    if entry is not None and entry.finding.status in ("folded", "kept"):
        return [entry]
    return []


def _merged_finding(finding: Finding, certificate: Certificate | None, became: str) -> Finding:
    """Return the finding of a norm whose branch was merged."""
    before = finding.became.split(", merged")[0]
    if finding.remains:
        told = became
    else:
        told = f"{before}, {became}"
    whole = combine_certificates(finding.certificate, certificate)
    return replace(finding, became=told, reason="", remains="", certificate=whole, nodes_left=0, written=())


def _unmerged_remark(norms: Sequence[LedgerEntry], failure: Failure) -> Remark:
    """Add the reason why branches are not merged to the findings of the norms that remain in them."""
    reason = certification.failure_reason(failure)

    def revise_finding(finding: Finding) -> Finding:
        if not finding.remains:
            return finding
        told = "; ".join(filter(None, (finding.reason, f"its branch is not merged: {reason}")))
        return replace(finding, reason=told)

    return Remark(norms, revise_finding)


def _propose_fold_behind(graph: Graph, t: gs.Tensor, target: RewriteTarget) -> Proposal | None:
    """Propose to fold the scale after the merged branches, such as FastViT's layer scale, into the new convolution."""
    readers = graph.consumers(t)
    if len(readers) != 1 or readers[0].op not in ("Mul", "Div", "BatchNormalization"):
        return None
    folded = propose_fold(graph, readers[0], target)
    if isinstance(folded, Proposal):
        return folded
    return None


# ------------------------------------------------------------------ accuracy


def _drop_costly_merge(
    graph: Graph, parts: tuple[ParallelBranch, ParallelBranch], form: BranchMerge
) -> BranchMerge | Refusal:
    """Return ``form`` if it costs no accuracy by the rule of `fold_accuracy`, else the refusal.

    Inputs are drawn from the statistics of a branch's scale and shift, or from the normal distribution.
    """
    with evaluator.silence_numpy():
        loss = _merge_loss(graph, parts, form)
    if loss is None:
        return form
    reason = (
        f"merging it would lose accuracy: the error in channel {loss.channel} would grow from "
        f"{loss.before:.2g} to {loss.after.error:.2g}; the limit is {TIMES} times the error before plus "
        f"{ULPS} ulp"
    )
    return CostlyFold(reason, form.old.name)


def _merge_loss(graph: Graph, parts: tuple[ParallelBranch, ParallelBranch], form: BranchMerge) -> AccuracyLoss | None:
    e = form.expressions
    dtype = graph.dtype(form.old)
    frame = e.frame
    w = graph.value(e.weight)
    taps = int(np.prod(frame.w.shape[2:]))
    if e.bias is None:
        bias = np.zeros(frame.output_channels)
    else:
        bias = graph.value(e.bias)
    inputs = w.shape[1]
    per = frame.output_channels // frame.groups
    chain = next((p for p in parts if p.chain is not None), None)
    mean = np.zeros(frame.input_channels)
    spread = np.ones(frame.input_channels)
    if chain is not None:
        safe = np.where(chain.scale != 0, chain.scale, 1.0)
        mean = -chain.shift / safe
        spread = np.abs(np.where(chain.scale != 0, 1 / safe, 1.0))
    weights = [
        _embed_branch_weight(part, frame, at.at) for part, at in zip(parts, _branches_in_order(parts, e), strict=True)
    ]
    cancels = np.sum([np.abs(v).sum(axis=(1, 2)) for v in weights], axis=0) / (
        np.abs(w).reshape(len(w), -1).sum(axis=1) + 1e-300
    )
    exact = []
    before = []
    after = []
    channels = []
    for o in select_rows(cancels, _ROWS):
        own = np.arange(inputs) + o // per * inputs
        z = round_to_dtype(
            mean[own, None] + spread[own, None] * normal_numbers(_DRAWS * inputs * taps).reshape(_DRAWS, inputs, taps),
            dtype,
        )
        total = np.zeros(_DRAWS)
        told = np.zeros(_DRAWS)
        for part, laid in zip(parts, weights, strict=True):
            if part.linear is not None:
                c = float(np.broadcast_to(part.linear.c, frame.output_channels)[o])
                kept = laid[o].any(axis=0)
                y = sum_products(part.linear, (z[..., kept] * laid[o][:, kept]).reshape(_DRAWS, -1), c, dtype)
                true = (z * laid[o]).sum(axis=(1, 2)) + c
            else:
                assert part.chain is not None
                at = np.flatnonzero(laid.reshape(len(laid), -1, taps).any(axis=(0, 1)))
                tap = int(at[0]) if at.size else 0
                one = z[:, int(o) % inputs if frame.groups == 1 else int(o - o // per * per), tap]
                run = most_accurate_chain(part.chain, part.scale[[o]], part.shift[[o]], shifted=True)
                y = run(one[:, None], rounding=True)[:, 0]
                true = run(one[:, None], rounding=False)[:, 0]
            total = round_to_dtype(total + part.sign * y, dtype)
            told = told + part.sign * true
        exact.append(told)
        before.append(total)
        after.append(
            sum_products(
                frame,
                (z * round_to_dtype(w[o].reshape(inputs, taps), dtype)).reshape(_DRAWS, -1),
                round_to_dtype(bias[o], dtype),
                dtype,
            )
        )
        channels.append(int(o))
    return worst_channel(
        np.array(exact).T, np.array(before).T, np.array(after).T, dtype, np.array(channels), frame.title
    )


def _branches_in_order(
    parts: tuple[ParallelBranch, ParallelBranch], e: MergedBranchExpressions
) -> list[BranchExpression]:
    return [next(b for b in e.parts if b.linear is p.linear and (b.chain is None) == (p.chain is None)) for p in parts]


def _embed_branch_weight(part: ParallelBranch, frame: ConstantLinear, at: tuple[int, ...]) -> np.ndarray:
    """Embed the weight of a branch into the kernel of ``frame``: (outputs, inputs of a group, taps)."""
    shape = frame.w.shape
    small, _ = branch_weight(frame, part)
    made = np.zeros(shape)
    made[(slice(None), slice(None), *(slice(o, o + n) for o, n in zip(at, small.shape[2:], strict=True)))] = small
    return made.reshape(*shape[:2], -1)
