"""The driver: recognise a norm, write it, certify it, keep or undo.

Norms first, in topological order; then BatchNorm and other scales and shifts are folded into their neighbours. Each rewrite is certified
before it is made, so "undo" is not to do it: a graph is never in a state that nobody proved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import onnx
import onnx_graphsurgeon as gs

from . import certify, rounding
from .errors import CertificateError
from .facts import Candidate, Norm, candidate, readings
from .graph import NEWEST, Graph
from .opsets import converted, needs_conversion, renumbered
from .passes import batch, write
from .passes.form import Form, written
from .records import Finding, Status, Summary
from .region import NORMS, NoMatch, compile_region, is_root
from .scales import Affine, affines, measure

Progress = Callable[[str, int, int], None]
RUNTIMES = ("any", "onnxruntime", "tensorrt", "tensorrt-rtx")

_OPSET = "its node needs opset"

# What says least about a candidate comes last when one reason has to be chosen.
_VAGUE = ("can't be evaluated", "gives NaN", "does not depend", "more than", "depends on", "its numerator", "each element")


@dataclass
class _Work:
    """What one pass over a graph collects."""

    graph: Graph
    runtime: str
    limit: int  # the highest opset that the result may have
    seconds: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    trials: list[tuple[int, rounding.Trial]] = field(default_factory=list)
    opset: int = 0


def optimize(
    proto: onnx.ModelProto, *, runtime: str = "any", strict: bool = False, progress: Progress | None = None
) -> tuple[onnx.ModelProto, Summary]:
    """Fuse and fold every normalization of ``proto`` that can be, each with its certificate.

    Args:
        proto: the model, weights included; it is not changed.
        runtime: which of equal standard forms to write: "any" (one standard node wherever there is one) or the name of a runtime.
        strict: a failed certificate is an error.
        progress: called with (stage, done, total).

    Returns:
        The new model (the opset raised where a norm's node needs it) and the account of what became of each norm.

    Raises:
        GraphError: the model can't be read.
        CertificateError: with ``strict``, where a certificate failed.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime is {runtime!r}; it is one of {', '.join(RUNTIMES)}")
    work = _passes(proto, runtime, NEWEST, progress)
    out = work.graph.to_proto()
    changed = needs_conversion(out, work.opset)
    if changed:  # an old file: its own ops have to be converted first, and the norms are looked for again
        newer = converted(proto, work.opset)
        limit = work.graph.opset if isinstance(newer, str) else NEWEST
        work = _passes(proto if isinstance(newer, str) else newer, runtime, limit, progress)
        if isinstance(newer, str):
            work.findings = [replace(f, reason=f"{f.reason} ({newer})") if f.reason.startswith(_OPSET) else f for f in work.findings]
        out = work.graph.to_proto()
    failed = [f for f in work.findings if f.status == "undone"]
    if strict and failed:
        raise CertificateError(
            f"{len(failed)} of {len(work.findings)} rewrites failed their certificates, "
            f"the first {failed[0].tensor!r}: {failed[0].reason}. Without --strict the export keeps these subgraphs as they were."
        )
    out = renumbered(out, work.opset)
    return out, Summary(tuple(work.findings), len(proto.graph.node), len(out.graph.node), _opset(out), work.seconds)


def _passes(proto: onnx.ModelProto, runtime: str, limit: int, progress: Progress | None) -> _Work:
    start = time.perf_counter()
    work = _Work(Graph(proto), runtime, limit)
    for stage, step in (("norms", _norm), ("scales", _scale)):
        began = time.perf_counter()
        _walk(work, progress, stage, step)
        work.seconds[stage] = time.perf_counter() - began
    began = time.perf_counter()
    _rounding(work, progress)
    work.seconds["rounding"] = time.perf_counter() - began
    work.seconds["passes"] = time.perf_counter() - start
    return work


def inspect(proto: onnx.ModelProto, *, runtime: str = "any") -> Summary:
    """What ``optimize`` would find and do; ``proto`` is not changed."""
    return optimize(proto, runtime=runtime)[1]


def _walk(work: _Work, progress: Progress | None, stage: str, step: Callable[[_Work, gs.Node], Finding | None]) -> None:
    nodes = work.graph.nodes
    for i, node in enumerate(nodes):
        if progress is not None and i % 256 == 0:
            progress(stage, i, len(nodes))
        if work.graph.alive(node):
            finding = step(work, node)
            if finding is not None:
                work.findings.append(finding)
    if progress is not None:
        progress(stage, len(nodes), len(nodes))


def _norm(work: _Work, root: gs.Node) -> Finding | None:
    """Deal with the norm around one root."""
    graph = work.graph
    around = candidate(graph, root) if is_root(graph, root) else None
    if around is None:
        return None
    best, refusals = _best(work, around)
    if best is None:
        return _refused(work, root, refusals)
    norm, form = best
    split = _used_inside(graph, norm, around)
    if split is not None:
        inner, _ = _best(work, split)
        if inner is not None:
            norm, form = inner
    if root.op in NORMS and form.core == root.op and len(_data_nodes(graph, norm)) <= len(form.nodes):
        return _finding(work, norm, "kept", reason="it is one standard node already")
    return _replace(work, norm, form)


def _best(work: _Work, around: Candidate) -> tuple[tuple[Norm, Form] | None, list[NoMatch]]:
    """The reading and form that leave the fewest nodes; of equals the one that writes fewer, then the outermost."""
    found: list[tuple[int, Norm, Form]] = []
    refusals: list[NoMatch] = []
    for reading in readings(work.graph, around):
        made = reading if isinstance(reading, NoMatch) else write(work.graph, reading, work.runtime)
        if isinstance(made, Form) and made.opset > work.limit:
            made = NoMatch(f"{_OPSET} {made.opset}, the file has {work.graph.opset}", made.nodes[-1].outputs[0].name)
        if isinstance(made, NoMatch):
            refusals.append(made)
            continue
        assert isinstance(reading, Norm)
        found.append((len(made.nodes) - len(_data_nodes(work.graph, reading)), reading, made))
        if len(made.nodes) == 1 or len(found) == 4:
            break
    if not found:
        return None, refusals
    _, norm, form = min(found, key=lambda f: (f[0], len(f[2].nodes)))
    return (norm, form), refusals


def _used_inside(graph: Graph, norm: Norm, around: Candidate) -> Candidate | None:
    """The candidate cut back to an inner tensor of x's shape that others read too: it may be the norm that they share."""
    inside = {id(n) for n in norm.region.nodes}
    for i, y in enumerate(around.ys):
        if y is norm.y:
            return None
        outside = graph.is_output(y) or any(id(n) not in inside for n in graph.consumers(y))
        if outside and graph.shape(y) == graph.shape(norm.y):
            return replace(around, ys=around.ys[: i + 1])
    return None


def _data_nodes(graph: Graph, norm: Norm) -> list[gs.Node]:
    return [n for n in norm.region.nodes if not graph.is_shape_valued(n.outputs[0])]


def _replace(work: _Work, norm: Norm, form: Form) -> Finding:
    graph = work.graph
    rewrite = certify.rewrite_of(graph, norm.region, form.nodes)
    if isinstance(rewrite, NoMatch):
        return _finding(work, norm, "refused", reason=rewrite.reason)
    cases = certify.norm_cases(norm, rewrite)
    certificate = certify.certify_norm(norm, rewrite, cases)
    if not certificate:
        why = certificate.note or f"differs by {certificate.error:.2g} (relative) on the input {certificate.worst!r}"
        return replace(_finding(work, norm, "undone", form, reason=f"its certificate failed: {why}"), certificate=certificate)
    trial = rounding.norm_trial(graph, norm, cases[0], rewrite, form.opset, len(work.trials))
    if trial is not None:
        work.trials.append((len(work.findings), trial))
    finding = replace(_finding(work, norm, "fused", form), certificate=certificate, proved=("identity",))
    graph.replace(norm.y, form.nodes, norm.shape)
    work.opset = max(work.opset, form.opset)
    return finding


def _scale(work: _Work, start: gs.Node) -> Finding | None:
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
        for fold in (batch.into_previous, batch.into_next):
            form = fold(graph, chain)
            if isinstance(form, Form):
                return _fold(work, chain, form, "")
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
    return _fold(work, longest, form, why) if isinstance(form, Form) else _chain_finding(work, longest, "refused", reason=form.reason)


def _fold(work: _Work, chain: Affine, form: Form, why: str) -> Finding:
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
    shape = graph.shape(leaf)
    if conv is None or shape is None or not isinstance(shape[1], int):
        return None
    attrs = graph.attrs(conv)
    kernel = conv.inputs[1].shape[2:]
    dilations, strides = attrs.get("dilations", [1] * len(kernel)), attrs.get("strides", [1] * len(kernel))
    return (2, shape[1], *(d * (k - 1) + 1 + s for k, d, s in zip(kernel, dilations, strides, strict=True)))


def _chain_finding(work: _Work, chain: Affine, status: Status, reason: str = "") -> Finding:
    return Finding(
        kind="BatchNorm" if chain.normalizes else "scale and shift",
        status=status,
        tensor=chain.y.name,
        module=work.graph.module(chain.nodes[-1]),
        spelling=" ".join(n.op for n in chain.nodes),
        reason=reason,
        dtype=chain.dtype.name,
    )


def _finding(work: _Work, norm: Norm, status: Status, form: Form | None = None, reason: str = "") -> Finding:
    producer = work.graph.producer(norm.y)
    module = work.graph.module(producer) if producer is not None else ""
    return Finding(
        kind=norm.kind,
        status=status,
        tensor=norm.y.name,
        module=module,
        spelling=" ".join(n.op for n in _data_nodes(work.graph, norm)),
        became=form.became if form is not None and status != "undone" else "",
        reason=reason,
        axes=norm.axes,
        epsilon=norm.epsilon,
        dtype=norm.dtype.name,
        notes=form.notes if form is not None else (),
    )


def _refused(work: _Work, root: gs.Node, refusals: list[NoMatch]) -> Finding | None:
    if not refusals:
        return None
    clear = [r for r in refusals if not r.reason.startswith(_VAGUE)] or refusals
    kind = root.op if root.op in NORMS else "unknown"
    status: Status = "kept" if root.op in NORMS else "refused"
    return Finding(
        kind=kind, status=status, tensor=clear[-1].tensor or root.outputs[0].name, module=work.graph.module(root), reason=clear[-1].reason
    )


def _rounding(work: _Work, progress: Progress | None) -> None:
    """Run both sides of every rewrite in onnxruntime, and complete the certificates."""
    trials = [t for _, t in work.trials]
    for start in range(0, len(trials), rounding.BATCH):
        if progress is not None:
            progress("rounding", start, len(trials))
        batch = work.trials[start : start + rounding.BATCH]
        for (place, _), verdict in zip(batch, rounding.verdicts([t for _, t in batch]), strict=True):
            finding = work.findings[place]
            assert finding.certificate is not None
            certificate = rounding.with_rounding(finding.certificate, verdict)
            notes, proved = finding.notes, finding.proved
            if certificate.rounding_after is not None:
                proved = (*proved, "onnxruntime run")
            if certificate.rounding_ok is False:
                notes = (
                    *notes,
                    f"onnxruntime's kernel is inaccurate here: error {certificate.rounding_after:.2g}, "
                    f"expected at most {certificate.rounding_bound:.2g}; --runtime onnxruntime writes another form",
                )
            work.findings[place] = replace(finding, certificate=certificate, notes=notes, proved=proved)


def _opset(proto: onnx.ModelProto) -> int:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)


__all__ = ["RUNTIMES", "inspect", "optimize", "written"]
