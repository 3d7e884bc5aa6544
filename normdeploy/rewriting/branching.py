"""The step that merges parallel branches of one input into one convolution, where a batch norm is in one of them
(`branches`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from ..compare.rewrites import TIMES, ULPS
from ..evaluate import evaluate
from ..forms.linear import Linear
from ..graphs.graph import Graph
from ..graphs.region import Refusal
from ..records import Certificate, Finding, both
from . import certify
from .branch_constants import Branch, Branches
from .branches import Merged, Part, branches_of, merged, weight_of
from .certify import Failure, pair_of
from .conditioning import Costly, Loss, normal, rounded, scaled, summed, worst
from .folding import fold
from .ledger import Entry
from .proposal import Change, Proposal, Remark, Target
from .rounding import fold_trial
from .rows import chosen_rows

_DRAWS, _ROWS = 8, 24


def merge(graph: Graph, node: gs.Node, target: Target) -> Proposal | Remark | None:
    """Propose to merge the branches that ``node`` adds up; the findings of their norms say what became of them."""
    parts = branches_of(graph, node)
    if parts is None:
        return None
    norms = [entry for part in parts for entry in _norms(part, target)]
    if not norms:
        return None
    form = merged(graph, node, parts)
    form = form if isinstance(form, Refusal) else _priced(graph, parts, form)
    if isinstance(form, Refusal):
        return _left(norms, form)
    return Proposal(
        Finding("branches", "folded", form.old.name, became=form.became),
        (pair_of(graph, form.old, [form.data], form.nodes[-1].outputs[0]),),
        (Change(form.old, form.nodes),),
        unproved=lambda failure: _left(norms, failure),
        expressions=form.expressions,
        trial=fold_trial((form.window,), graph.dtype(form.old)),
        upon=tuple(norms),
        revise=lambda finding, certificate: _merged(finding, certificate, form.became),
        then=lambda: _behind(graph, form.old, target),
    )


def _norms(part: Part, target: Target) -> Sequence[Entry]:
    """Return the entries of the norms in a branch."""
    merged_before = target.entries_behind(part.out.name)
    if merged_before:
        return merged_before
    entry = target.entry_of(part.out.name)
    return [entry] if entry is not None and entry.finding.status in ("folded", "kept") else []


def _merged(finding: Finding, certificate: Certificate | None, became: str) -> Finding:
    """Return the finding of a norm whose branch was merged."""
    before = finding.became.split(", merged")[0]
    told = became if finding.remains else f"{before}, {became}"
    whole = both(finding.certificate, certificate)
    return replace(finding, became=told, reason="", remains="", certificate=whole, written=())


def _left(norms: Sequence[Entry], failure: Failure) -> Remark:
    """Say of the norms that remain why they are not merged."""
    reason = certify.why(failure)

    def revise(finding: Finding) -> Finding:
        if not finding.remains:
            return finding
        told = "; ".join(filter(None, (finding.reason, f"its branch is not merged: {reason}")))
        return replace(finding, reason=told)

    return Remark(norms, revise)


def _behind(graph: Graph, t: gs.Tensor, target: Target) -> Proposal | None:
    """What scales the merged branches (FastViT's layer scale) can be folded now."""
    readers = graph.consumers(t)
    if len(readers) != 1 or readers[0].op not in ("Mul", "Div", "BatchNormalization"):
        return None
    folded = fold(graph, readers[0], target)
    return folded if isinstance(folded, Proposal) else None


# ------------------------------------------------------------------ accuracy


def _priced(graph: Graph, parts: tuple[Part, Part], form: Merged) -> Merged | Refusal:
    """``form`` where it costs no accuracy by the rule of `conditioning`, on inputs that the scale and shift state, or
    normal ones."""
    with evaluate.quiet():
        loss = _loss(graph, parts, form)
    if loss is None:
        return form
    reason = (
        f"merged it would lose accuracy: in channel {loss.channel} the error grows from {loss.before:.2g} to"
        f" {loss.after.error:.2g}, and {TIMES} times the error before and {ULPS} ulp are allowed"
    )
    return Costly(reason, form.old.name)


def _loss(graph: Graph, parts: tuple[Part, Part], form: Merged) -> Loss | None:
    e, dtype = form.expressions, graph.dtype(form.old)
    frame = e.frame
    w, taps = graph.value(e.weight), int(np.prod(frame.w.shape[2:]))
    bias = np.zeros(frame.channels) if e.bias is None else graph.value(e.bias)
    inputs, per = w.shape[1], frame.channels // frame.groups
    chain = next((p for p in parts if p.chain is not None), None)
    mean, spread = np.zeros(frame.inputs), np.ones(frame.inputs)
    if chain is not None:
        safe = np.where(chain.scale != 0, chain.scale, 1.0)
        mean, spread = -chain.shift / safe, np.abs(np.where(chain.scale != 0, 1 / safe, 1.0))
    weights = [_laid(part, frame, at.at) for part, at in zip(parts, _in_order(parts, e), strict=True)]
    cancels = np.sum([np.abs(v).sum(axis=(1, 2)) for v in weights], axis=0) / (
        np.abs(w).reshape(len(w), -1).sum(axis=1) + 1e-300
    )
    exact, before, after, channels = [], [], [], []
    for o in chosen_rows(cancels, _ROWS):
        own = np.arange(inputs) + o // per * inputs
        z = rounded(
            mean[own, None] + spread[own, None] * normal(_DRAWS * inputs * taps).reshape(_DRAWS, inputs, taps), dtype
        )
        total, told = np.zeros(_DRAWS), np.zeros(_DRAWS)
        for part, laid in zip(parts, weights, strict=True):
            if part.linear is not None:
                c = float(np.broadcast_to(part.linear.c, frame.channels)[o])
                kept = laid[o].any(axis=0)
                y = summed(part.linear, (z[..., kept] * laid[o][:, kept]).reshape(_DRAWS, -1), c, dtype)
                true = (z * laid[o]).sum(axis=(1, 2)) + c
            else:
                assert part.chain is not None
                at = np.flatnonzero(laid.reshape(len(laid), -1, taps).any(axis=(0, 1)))
                tap = int(at[0]) if at.size else 0
                one = z[:, int(o) % inputs if frame.groups == 1 else int(o - o // per * per), tap]
                run = scaled(part.chain, part.scale[[o]], part.shift[[o]], True)
                y, true = run(one[:, None], True)[:, 0], run(one[:, None], False)[:, 0]
            total, told = rounded(total + part.sign * y, dtype), told + part.sign * true
        exact.append(told)
        before.append(total)
        after.append(
            summed(
                frame,
                (z * rounded(w[o].reshape(inputs, taps), dtype)).reshape(_DRAWS, -1),
                rounded(bias[o], dtype),
                dtype,
            )
        )
        channels.append(int(o))
    return worst(np.array(exact).T, np.array(before).T, np.array(after).T, dtype, np.array(channels), frame.title)


def _in_order(parts: tuple[Part, Part], e: Branches) -> list[Branch]:
    return [next(b for b in e.parts if b.linear is p.linear and (b.chain is None) == (p.chain is None)) for p in parts]


def _laid(part: Part, frame: Linear, at: tuple[int, ...]) -> np.ndarray:
    """The weight of a branch in the kernel of ``frame``, as (outputs, inputs of a group, taps)."""
    shape = frame.w.shape
    small, _ = weight_of(frame, part)
    made = np.zeros(shape)
    made[(slice(None), slice(None), *(slice(o, o + n) for o, n in zip(at, small.shape[2:], strict=True)))] = small
    return made.reshape(*shape[:2], -1)
