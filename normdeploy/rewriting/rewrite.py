"""The driver: recognise a norm, write it, certify it, keep or undo.

Norms first, in topological order; then BatchNorm and other scales and shifts are folded into their neighbours; then,
where own ops are asked for, norms are joined with theirs. A rewrite is certified before it is made. A failed one is
never applied.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx

from ..choices import FUSES, RUNTIMES, TENSORRT
from ..contrib.account import accounted
from ..contrib.shadows import apart
from ..contrib.standardize import standardized
from ..domains import default_opset
from ..errors import CertificateError
from ..graphs.calls import attach, imports, opened
from ..graphs.graph import Graph
from ..graphs.nested import Nested, bodies
from ..graphs.nested_functions import functions
from ..graphs.omitted import without_omitted
from ..graphs.opsets import converted, needs_conversion, renumbered
from ..graphs.protos import names, without_unused
from ..graphs.shapes import ShapedGraph
from ..graphs.type_opsets import opset_for_types
from ..recognition.constant_parts import repeated_constants
from ..recognition.unopened import closed_norms
from ..records import Finding, Summary
from ..storage.files import filled
from ..storage.held import Weights
from ..storage.ordering import ordered
from ..storage.protos import copied
from ..storage.weights import lifted
from ..types import Progress
from . import int32_codes, transforms
from .ledger import MADE, Step, Wanted, undone
from .rewriter import Rewriter
from .sealed import Seal, require_sealed


@dataclass
class Done:
    """What became of a graph and of what is nested in it.

    Args:
        findings: what is told.
        taken: every step that changed a graph, with what is told of it.
        gross: steps whose result onnxruntime can't run, or not well enough.
        seals: of the nodes that are left, as they were proved.
        opset: the lowest that has the nodes written.
        seconds: of each stage.
    """

    findings: list[Finding]
    taken: list[tuple[Step, Finding]]
    gross: dict[Step, Finding]
    seals: list[Seal]
    opset: int
    seconds: dict[str, float]


def optimize(
    proto: onnx.ModelProto,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    strict: bool = False,
    progress: Progress | None = None,
    census: bool = False,
    weights: Weights | None = None,
) -> tuple[onnx.ModelProto, Summary]:
    """Fuse and fold every normalization of ``proto`` that can be, each with its certificate.

    Args:
        proto: the model, weights included; it is not changed.
        runtime: which of equal standard forms to write: "any" (one standard node for each norm but group norms) or the
            name of a runtime; "onnxruntime" is the fastest that is sound there, "onnxruntime-accurate" the most
            accurate (`normdeploy.forms.norm_forms`).
        fuse: "standard": standard ops alone; "portable": ops of this project's own with function bodies
            (`graphs.functions`) where no standard one says a norm.
        strict: a failed certificate is an error.
        progress: called with (stage, done, total).
        census: let each finding hold all that there is to know of its norm (`normdeploy.recognition.traits`), which
        takes some more time.
        weights: those that ``proto`` refers to (`storage.weights.lifted`), as the result then does; None: both hold
        their own.

    Returns:
        The new model (the opset raised where a norm's node needs it) and the account of what became of each norm.

    Raises:
        GraphError: the model can't be read.
        CertificateError: with ``strict``, where a certificate failed.
    """
    for name, value, known in (("runtime", runtime, RUNTIMES), ("fuse", fuse, FUSES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it is one of {', '.join(known)}")
    light, kept = (proto, weights) if weights is not None else lifted(proto)
    out, summary, _ = optimized(light, Wanted(runtime, fuse, census=census, progress=progress, weights=kept), strict)
    return (out if weights is not None else filled(out)), summary


def optimized(
    proto: onnx.ModelProto, wanted: Wanted, strict: bool = False
) -> tuple[onnx.ModelProto, Summary, list[tuple[Step, Finding]]]:
    """As `optimize`, and with every step that changed the graph, so that a caller may ask for the same without some of
    them.

    Where onnxruntime can't run what a step wrote, or with a gross error (`normdeploy.rewriting.rounding`), all is done
    again without it.
    """
    with _uncollected():
        for attempt in range(_ATTEMPTS):
            work, out = _attempt(proto, wanted)
            if not work.gross or attempt == _ATTEMPTS - 1:
                break
            again = (
                work.gross if attempt < _ATTEMPTS - 2 else {step: _untaken(f) for step, f in work.taken} | work.gross
            )
            wanted = replace(wanted, undone={**wanted.undone, **again})
    require_sealed(out, work.seals)
    if strict:
        require_kept(work.findings)
    ops, left, findings = op_counts(proto), op_counts(out), tuple(work.findings)
    summary = Summary(
        findings,
        sum(ops.values()),
        len(out.graph.node),
        default_opset(out),
        work.seconds,
        ops_before=ops,
        ops_after=left,
    )
    return out, summary, work.taken


def require_kept(findings: Sequence[Finding]) -> None:
    """Raises CertificateError where one is undone: ``--strict``."""
    failed = [f for f in findings if f.status == "undone"]
    if failed:
        raise CertificateError(
            f"{len(failed)} of {len(findings)} rewrites failed their certificates, the first {failed[0].tensor!r}:"
            f" {failed[0].reason}. Without --strict the export keeps these subgraphs as they were."
        )


def require_exact(findings: Sequence[Finding]) -> None:
    """Raises CertificateError where a rewrite rests on inputs alone, or makes NaN of what was a number at an infinite
    input: ``--strict-proof``."""
    for f in findings:
        if (
            f.status in ("fused", "folded")
            and f.certificate is not None
            and (f.certificate.method != "exact" or f.certificate.gains)
        ):
            why = f.certificate.note or "its certificate rests on inputs alone"
            raise CertificateError(
                f"the rewrite of {f.tensor!r} ({f.became}) is not proved as --strict-proof asks: {why}"
            )


_ATTEMPTS = 8  # the last but one leaves out all that was done; models with several kinds of norms need two or three


def _untaken(finding: Finding) -> Finding:
    reason = f"{_ATTEMPTS - 2} times a rewrite of this file turned out to be one that onnxruntime can't run well"
    return undone(finding, reason)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would walk through the whole graph again and again: a seventh of the
    time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _attempt(proto: onnx.ModelProto, wanted: Wanted) -> tuple[Done, onnx.ModelProto]:
    """The whole file once, without the steps that are not to be taken."""
    proto = source = ordered(proto)
    if wanted.runtime in TENSORRT:
        proto = int32_codes.as_numbers(proto)
    proto, shadows = apart(proto)
    proto, foreign = standardized(opened(without_omitted(proto), wanted.fuse))
    work, out = _file(proto, wanted)
    # A node that was written, an activation for example, may have the file's type at a newer opset alone.
    work.opset = max(work.opset, opset_for_types(out))
    if needs_conversion(
        out, work.opset
    ):  # an old file: its own ops have to be converted first, and the norms are looked for again
        newer = converted(proto, work.opset)
        if isinstance(newer, str):
            work, out = _file(proto, replace(wanted, limit=default_opset(proto), unraised=newer))
        else:
            work, out = _file(newer, wanted)
    work.findings = accounted(work.findings, foreign, proto)
    out = renumbered(out, work.opset)
    if wanted.fuse == "portable" or imports(out):
        attach(out, default_opset(out))
    name = shadows.written(out) or (shadows.standard if default_opset(out) != default_opset(source) else "")
    if not name:
        return work, shadows.restored(out)
    reason = (
        f"the file has a function {name!r}, and a file with the rewrite would take it for ONNX's op, or ONNX's op for"
        " it; rename it"
    )
    work.findings = [
        replace(f, status="refused", reason=reason, became="", written=()) if _written(f) else f for f in work.findings
    ]
    work.taken, work.gross, work.seals = [], {}, []
    return work, copied(source)


def _written(finding: Finding) -> bool:
    """Whether something was written for a norm: its node, or standard nodes in the place of a foreign one."""
    return bool(
        finding.status in ("fused", "folded") or finding.became or (finding.status == "refused" and finding.certificate)
    )


def op_counts(proto: onnx.ModelProto) -> dict[str, int]:
    """Op type -> number of nodes in the main graph, the most frequent first."""
    return dict(Counter(node.op_type for node in proto.graph.node).most_common())


def _file(proto: onnx.ModelProto, wanted: Wanted) -> tuple[Done, onnx.ModelProto]:
    """Deal with a file's graph, what is nested in it, and its functions."""
    work, out = _graph(proto, (), wanted)
    for function in functions(out):
        _inside(work, function, set(), wanted)
    work.findings += closed_norms(out)
    return work, without_unused(out) if out.functions or any(f.place for f in work.findings) else out


def _graph(proto: onnx.ModelProto, taken: Collection[str], wanted: Wanted) -> tuple[Done, onnx.ModelProto]:
    """Deal with one graph and its bodies. ``taken``: the names around it, where it is a body itself."""
    graph, work = _passes(proto, taken, wanted)
    out = graph.to_proto()
    around = {*taken, *names(out.graph)}
    for body in bodies(out):
        _inside(work, body, around, wanted)
    return work, out


def _inside(work: Done, nested: Nested, taken: Collection[str], wanted: Wanted) -> None:
    place = "; ".join(filter(None, (wanted.place, nested.place)))
    inner, out = _graph(nested.model, taken, replace(wanted, place=place, weights=None))
    if any(f.status in MADE for f in inner.findings):
        nested.put_back(out)
        work.opset = max(work.opset, inner.opset)
        work.seals += inner.seals
    work.taken += inner.taken
    work.gross |= inner.gross
    work.findings += [
        replace(f, place=f"{nested.place}, {f.place}" if f.place else nested.place) for f in inner.findings
    ]


def _passes(proto: onnx.ModelProto, taken: Collection[str], wanted: Wanted) -> tuple[Graph, Done]:
    """Apply every transform and cleanup of the tables to one graph, in their order."""
    start = time.perf_counter()
    graph = ShapedGraph(proto, taken, wanted.weights)
    graph.take_as_data(repeated_constants(graph))
    cleanups = [(cleanup.stage, cleanup.begin(graph)) for cleanup in transforms.CLEANUPS]
    rewriter = Rewriter(graph, wanted)
    for transform in transforms.chosen(proto, wanted):
        with transform.around(graph):
            rewriter.apply(transform.stage, transform.propose)
    for stage, sweep in cleanups:
        rewriter.clean(stage, sweep)
    seals = rewriter.seals()
    # Another runtime than the one asked for does not decide.
    rewriter.judge(decides=wanted.runtime not in TENSORRT)
    rewriter.seconds["passes"] = time.perf_counter() - start
    ledger = rewriter.ledger
    return graph, Done(ledger.findings, ledger.taken(), ledger.gross, seals, rewriter.opset, rewriter.seconds)
