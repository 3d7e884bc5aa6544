"""The step that folds one scale and shift (an eval BatchNorm, however it is written) into a neighbouring linear op."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from . import certify, rounding
from .graph import Graph
from .passes import batch
from .passes.form import Form
from .records import Finding, Status
from .region import NoMatch, compile_region
from .scales import Affine, affines, measure
from .work import Work


def fold(work: Work, start: gs.Node) -> Finding | None:
    """Fold the scale and shift that begins with ``start``."""
    graph = work.graph
    if start.op == "BatchNormalization" and graph.is_constant(start.inputs[0]):
        reason = "batch statistics of a weight, as in training mode (weight standardization): constant folding computes it once"
        return Finding("BatchNorm", "refused", start.outputs[0].name, graph.module(start), reason=reason)
    chains = affines(graph, start)
    if isinstance(chains, NoMatch):
        return Finding("BatchNorm", "refused", chains.tensor, graph.module(start), reason=chains.reason)
    reasons: list[str] = []
    longest: Affine | None = None
    for chain in chains:
        longest = longest or chain
        for write in (batch.into_previous, batch.into_next):
            form = write(graph, chain)
            if isinstance(form, Form):
                return _replace(work, chain, form, "")
            reasons.append(form.reason)
    alone = measure(graph, start.inputs[0], start.outputs[0]) if longest is None and start.op == "BatchNormalization" else None
    if isinstance(alone, NoMatch):
        return Finding("BatchNorm", "refused", start.outputs[0].name, graph.module(start), reason=alone.reason)
    if longest is None or not longest.normalizes:
        return None
    why = next((r for r in reasons if not r.startswith("no linear op")), "no linear op stands before or behind it")
    plain = all(isinstance(t, gs.Constant) for n in longest.nodes for t in n.inputs if graph.is_constant(t))
    if plain and len(longest.nodes) <= 2 and all(n.op in ("Mul", "Add") for n in longest.nodes):
        return _chain_finding(work, longest, "kept", reason=f"it is one scale and shift already; {why}")
    form = batch.scale_and_shift(graph, longest)
    return _replace(work, longest, form, why) if isinstance(form, Form) else _chain_finding(work, longest, "refused", reason=form.reason)


def _replace(work: Work, chain: Affine, form: Form, why: str) -> Finding:
    graph = work.graph
    linear = graph.producer(chain.z) if form.core else None
    old, leaf = chain.y, chain.z
    if form.core and form.became.endswith("behind it"):
        old = graph.consumers(chain.y)[0].outputs[0]
    elif linear is not None:
        leaf = next(t for t in linear.inputs if not graph.is_constant(t))
    before = compile_region(graph, old, [leaf])
    rewrite = before if isinstance(before, NoMatch) else certify.rewrite_of(graph, before, form.nodes)
    if isinstance(rewrite, NoMatch):
        return _chain_finding(work, chain, "refused", reason=rewrite.reason)
    cases = certify.fold_cases(rewrite, _window(graph, form, leaf))
    certificate, terms = certify.certify_fold(rewrite, cases)
    if not certificate:
        reason = f"its certificate failed: {certificate.note or f'differs by {certificate.error:.2g} (relative) on {certificate.worst!r}'}"
        return replace(_chain_finding(work, chain, "undone", reason=reason), certificate=certificate)
    trial = rounding.fold_trial(graph, cases[0], rewrite, chain.dtype, terms, form.opset, len(work.trials))
    if trial is not None:
        work.trials.append((len(work.findings), trial))
    finding = replace(_chain_finding(work, chain, "folded", reason=why), became=form.became, certificate=certificate, proved=("identity",))
    graph.replace(old, form.nodes)
    return finding


def _window(graph: Graph, form: Form, leaf: gs.Tensor) -> tuple[int, ...] | None:
    """The smallest input of a convolution that has more than one output element along each axis."""
    conv = next((n for n in form.nodes if n.op in ("Conv", "ConvTranspose")), None)
    if conv is None or graph.shape(leaf) is None:
        return None
    attrs, weight = graph.attrs(conv), conv.inputs[1].shape
    channels, kernel = weight[0] if conv.op == "ConvTranspose" else weight[1] * attrs.get("group", 1), weight[2:]
    dilations, strides = attrs.get("dilations", [1] * len(kernel)), attrs.get("strides", [1] * len(kernel))
    return (2, channels, *(d * (k - 1) + 1 + s for k, d, s in zip(kernel, dilations, strides, strict=True)))


def _chain_finding(work: Work, chain: Affine, status: Status, reason: str = "") -> Finding:
    return Finding(
        kind="BatchNorm" if chain.normalizes else "scale and shift",
        status=status,
        tensor=chain.y.name,
        module=work.graph.module(chain.nodes[-1]),
        spelling=" ".join(n.op for n in chain.nodes),
        reason=reason,
        dtype=chain.dtype.name,
    )
