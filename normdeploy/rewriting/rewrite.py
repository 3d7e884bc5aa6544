"""The driver: recognise a norm, write it, certify it, keep or undo.

Norms first, in topological order; then BatchNorm and other scales and shifts are folded into their neighbours; then,
where own ops are asked for, norms are joined with theirs. A rewrite is certified before it is made. A failed one is
never applied.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import onnx
import onnx_graphsurgeon as gs

from ..choices import FUSES, ONNXRUNTIME, RUNTIMES, TENSORRT
from ..contrib.account import accounted
from ..contrib.shadows import apart
from ..contrib.standardize import standardized
from ..domains import default_opset
from ..errors import CertificateError
from ..evaluate import evaluate
from ..forms.norm_forms import best
from ..graphs.calls import attach, imports, opened
from ..graphs.graph import Graph
from ..graphs.nested import Nested, bodies
from ..graphs.nested_functions import functions
from ..graphs.omitted import without_omitted
from ..graphs.opsets import converted, needs_conversion, renumbered
from ..graphs.protos import names, without_unused
from ..graphs.type_opsets import opset_for_types
from ..proof.shapes import complete
from ..recognition.constant_parts import repeated_constants
from ..recognition.unopened import closed_norms
from ..records import Finding, Summary
from ..storage.files import filled
from ..storage.heap import trim
from ..storage.held import Weights
from ..storage.ordering import ordered
from ..storage.protos import copied
from ..storage.weights import lifted
from ..types import Progress
from . import activations, attention, constants, dequantized, int32_codes, rounding
from .branching import merge
from .folding import fold
from .fusing import fuse as fuse_norm
from .gemms import by_rows
from .joining import join
from .pricing import costs
from .quantizing import quantize
from .residuals import part
from .sealed import require_sealed
from .work import Step, Wanted, Work


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


_ROUNDING = "rounding"  # the stage in which onnxruntime runs both sides of each rewrite
_WAITING = (
    2**21
)  # bytes that trials may take until they are run: a session for some tens of them costs little more than one for all
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


def _attempt(proto: onnx.ModelProto, wanted: Wanted) -> tuple[Work, onnx.ModelProto]:
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
            work, out = _file(proto, replace(wanted, limit=work.graph.opset, unraised=newer))
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


def _file(proto: onnx.ModelProto, wanted: Wanted) -> tuple[Work, onnx.ModelProto]:
    """Deal with a file's graph, what is nested in it, and its functions."""
    work, out = _graph(proto, (), wanted)
    for function in functions(out):
        _inside(work, function, set())
    work.findings += closed_norms(out)
    return work, without_unused(out) if out.functions or any(f.place for f in work.findings) else out


def _graph(proto: onnx.ModelProto, taken: Collection[str], wanted: Wanted) -> tuple[Work, onnx.ModelProto]:
    """Deal with one graph and its bodies. ``taken``: the names around it, where it is a body itself."""
    work = _passes(proto, taken, wanted)
    out = work.graph.to_proto()
    around = {*taken, *names(out.graph)}
    for body in bodies(out):
        _inside(work, body, around)
    return work, out


def _inside(work: Work, nested: Nested, taken: Collection[str]) -> None:
    place = "; ".join(filter(None, (work.wanted.place, nested.place)))
    inner, out = _graph(nested.model, taken, replace(work.wanted, place=place, weights=None))
    if any(f.status in ("fused", "folded") for f in inner.findings):
        nested.put_back(out)
        work.opset = max(work.opset, inner.opset)
    work.taken += inner.taken
    work.gross |= inner.gross
    work.seals += inner.seals if any(f.status in ("fused", "folded") for f in inner.findings) else []
    work.findings += [
        replace(f, place=f"{nested.place}, {f.place}" if f.place else nested.place) for f in inner.findings
    ]


def _passes(proto: onnx.ModelProto, taken: Collection[str], wanted: Wanted) -> Work:
    start = time.perf_counter()
    work = Work(Graph(proto, taken, wanted.weights), wanted)
    work.graph.completer = complete
    work.graph.take_as_data(repeated_constants(work.graph))
    of_constants = constants.census_of(work.graph)
    surroundings: dict[str, Callable[[Work, gs.Node], Finding | None]]
    surroundings = (
        {"neighbours": join, "quantized": quantize}
        if wanted.fuse == "portable"
        else {"residuals": part, "linears": by_rows}
    )
    steps = {"norms": fuse_norm, activations.STAGE: activations.write, "scales": fold, "branches": merge} | surroundings
    if (
        wanted.attentions
        and wanted.runtime == "onnxruntime"
        and not wanted.place
        and not needs_conversion(proto, attention.OPSET)
    ):
        steps[attention.STAGE] = attention.attend
    for stage, step in steps.items():
        began, ran = time.perf_counter(), work.seconds.get(_ROUNDING, 0.0)
        with dequantized.opened(work.graph) if step is fold else nullcontext():
            _walk(work, stage, step)
        work.seconds[stage] = time.perf_counter() - began - (work.seconds.get(_ROUNDING, 0.0) - ran)
    began = time.perf_counter()
    constants.settle(work, of_constants)
    work.seconds[constants.STAGE] = time.perf_counter() - began
    work.seals = [seal for node, seal in work.sealed if work.graph.alive(node)]
    _rounding(work)
    work.taken = [
        (s, work.findings[i])
        for i, steps in work.steps.items()
        if work.findings[i].status in ("fused", "folded")
        for s in steps
    ]
    work.taken += work.settled
    work.seconds["passes"] = time.perf_counter() - start
    return work


def _walk(work: Work, stage: str, step: Callable[[Work, gs.Node], Finding | None]) -> None:
    nodes, progress = work.graph.nodes, work.wanted.progress
    for i, node in enumerate(nodes):
        if progress is not None and i % 16 == 0:
            progress(stage, i, len(nodes))
        if work.graph.alive(node) and node.outputs:
            work.step = Step(work.wanted.place, stage, node.outputs[0].name)
            if (known := work.wanted.undone.get(work.step)) is not None:
                if not any(f.tensor == known.tensor and f.status == "undone" for f in work.findings):
                    work.findings.append(known)
                continue
            try:
                finding = step(work, node)
            except evaluate.Unsupported as error:  # a constant that would take too long; nothing was edited yet
                finding = Finding(
                    "unknown", "refused", node.outputs[0].name, work.graph.module(node), reason=str(error)
                )
            work.tried += [work.step] * (len(work.trials) - len(work.tried))
            if len(work.trials) >= rounding.BATCH or sum(t.nbytes for _, t in work.trials) > _WAITING:
                _try(work)
            if finding is not None and not _told(work, finding):
                work.steps[len(work.findings)] = [work.step]
                work.findings.append(finding)
    if progress is not None:
        progress(stage, len(nodes), len(nodes))


def _told(work: Work, finding: Finding) -> bool:
    """Whether the same was said of the same norm: one may hold two roots (‖x‖₂ and the root of its square)."""
    place = work.place(finding.tensor)
    return place is not None and finding.status in ("undone", "refused") and work.findings[place] == finding


def _try(work: Work) -> None:
    """Let onnxruntime run the trials at hand, and keep of them the verdicts alone."""
    began = time.perf_counter()
    verdicts = rounding.verdicts([t for _, t in work.trials])
    work.verdicts += [(place, step, v) for (place, _), step, v in zip(work.trials, work.tried, verdicts, strict=True)]
    if work.trials:
        work.trials.clear()
        work.tried.clear()
        trim()
    work.seconds[_ROUNDING] = work.seconds.get(_ROUNDING, 0.0) + time.perf_counter() - began


def _rounding(work: Work) -> None:
    """Complete the certificates with what onnxruntime made of both sides of every rewrite; take down what turns out to
    be gross."""
    if work.wanted.progress is not None and work.trials:
        work.wanted.progress(_ROUNDING, len(work.verdicts), len(work.verdicts) + len(work.trials))
    _try(work)
    decides = work.wanted.runtime not in TENSORRT  # another runtime than the one asked for does not
    for place, step, verdict in work.verdicts:
        if isinstance(place, Finding):
            if decides and (why := costs(verdict)):
                work.gross[step] = undone(place, why)
            continue
        finding = work.findings[place]
        assert finding.certificate is not None
        certificate = rounding.with_rounding(finding.certificate, verdict)
        notes, proved = finding.notes, finding.proved
        if verdict.missing and verdict.missing not in notes:
            notes = (*notes, verdict.missing)
        if certificate.rounding_after is not None and "onnxruntime run" not in proved:
            proved = (*proved, "onnxruntime run")
        if certificate.rounding_ok is False:
            measured, most = certificate.rounding_after, certificate.rounding_bound
            reason = f"onnxruntime's kernel is inaccurate here: error {measured:.2g}, expected at most {most:.2g}"
            better = best(finding.kind, "onnxruntime", finding.dtype, ("standard", "instance", "layer")) != "standard"
            hint = (
                "; --runtime onnxruntime writes another form"
                if better and work.wanted.runtime not in ONNXRUNTIME
                else ""
            )
            notes = (*notes, reason + hint)
        work.findings[place] = replace(finding, certificate=certificate, notes=notes, proved=proved)
        if verdict.gross and decides:
            work.gross[step] = undone(work.findings[place], verdict.gross)
    for likes in work.kinds.values():
        bad = next(
            (work.gross[s] for i in likes[: rounding.OF_A_KIND] for s in work.steps.get(i, ()) if s in work.gross), None
        )
        for place in likes[rounding.OF_A_KIND :]:
            work.findings[place] = rounding.like(work.findings[place], work.findings[likes[0]])
            if bad is not None:
                why = f"{bad.reason} (seen of {bad.tensor!r}, which differs in gamma and beta only)"
                work.gross |= {step: undone(work.findings[place], why) for step in work.steps.get(place, ())}


def undone(finding: Finding, reason: str) -> Finding:
    """What is told of a rewrite that was made and proved and is taken back."""
    return replace(finding, status="undone", became="", reason=f"it was taken back: {reason}", written=())
