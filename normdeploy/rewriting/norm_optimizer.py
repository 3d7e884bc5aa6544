"""Drive the rewrites: recognize each norm, write it, certify it, and keep or undo the rewrite.

Norms come first, in topological order. Then BatchNorms and other scales and shifts are folded into their neighbors.
Then, if normdeploy's own ops are requested, norms are joined with their neighbors. A rewrite is certified before it is
made, and a rewrite whose certificate fails is never applied.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx

from ..contrib.foreign_findings import merge_foreign_findings
from ..contrib.name_clashes import rename_clashing_functions
from ..errors import CertificateError, GraphError
from ..findings.records import Finding, Summary
from ..graphs.function_ops import attach_functions, inline_unwanted_functions, may_use_function_ops
from ..graphs.graph import Graph
from ..graphs.local_functions import open_functions
from ..graphs.omitted_inputs import remove_omitted_inputs
from ..graphs.opset_conversion import convert_opset, ops_needing_conversion, raise_opset_number
from ..graphs.proto_queries import all_names, drop_unused_initializers
from ..graphs.region import RefusedError
from ..graphs.shape_completion import ShapedGraph
from ..graphs.subgraphs import Subgraph, body_subgraphs
from ..graphs.type_opsets import oldest_opset_for_types
from ..option_values import FUSES, RUNTIMES, TENSORRT
from ..recognition.closed_functions import find_closed_norms
from ..recognition.constant_subgraphs import find_sized_data
from ..recognition.other_norms import list_other_norms
from ..storage.node_order import with_sorted_nodes
from ..storage.onnx_domains import default_domain_opset
from ..storage.onnx_files import fill_shared_weights
from ..storage.proto_traversal import copy_model
from ..storage.shared_weights import Weights
from ..storage.weight_serialization import share_large_weights
from ..types import Progress
from . import int32_codes, transform_table
from .opset_change import change_opset
from .proved_nodes import NodeSeal, require_sealed
from .rewrite_ledger import RewriteOptions, RewriteStep, undone_finding
from .rewriter import Rewriter


@dataclass
class RewriteOutcome:
    """Result for a graph and its nested graphs.

    Attributes:
        findings: findings of the norms.
        taken: every step that changed a graph, with its finding.
        gross: steps whose result onnxruntime cannot run, or runs with a gross error (`rounding_verdicts`).
        seals: seals of the written nodes that remain, as they were proved.
        opset: lowest opset that has the written nodes.
        seconds: seconds of each stage.
    """

    findings: list[Finding]
    taken: list[tuple[RewriteStep, Finding]]
    gross: dict[RewriteStep, Finding]
    seals: list[NodeSeal]
    opset: int
    seconds: dict[str, float]


def optimize_norms(
    proto: onnx.ModelProto,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    strict: bool = False,
    progress: Progress | None = None,
    census: bool = False,
    weights: Weights | None = None,
) -> tuple[onnx.ModelProto, Summary]:
    """Fuse and fold every normalization of ``proto`` that can be rewritten, each with a certificate.

    Args:
        proto: the model with its weights; it is not changed.
        runtime: selects among equal standard forms. "any" writes one standard node per norm except group norms.
            "onnxruntime" and "openvino" write the fastest sound form for it, "onnxruntime-accurate" the most accurate
            (`normdeploy.forms.measured_forms`).
        fuse: "standard" for standard ops only; "portable" also writes this project's own ops with function bodies
            (`graphs.own_op_functions`) if no standard op expresses a norm, and for group norms.
        strict: raise an error if a certificate failed.
        progress: called with (stage, done, total).
        census: store all properties of each norm in its finding (`normdeploy.recognition.norm_attributes`), which takes
            some more time.
        weights: the weights that ``proto`` and the result refer to
            (`storage.weight_serialization.share_large_weights`); None if both models contain their weights.

    Returns:
        the new model, with a higher opset if a norm's node needs it, and the summary of all norms.

    Raises:
        GraphError: the model cannot be read.
        CertificateError: a certificate failed, with ``strict``.
    """
    for name, value, known in (("runtime", runtime, RUNTIMES), ("fuse", fuse, FUSES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    light, kept = (proto, weights) if weights is not None else share_large_weights(proto)
    out, summary, _ = optimize_with_steps(
        light, RewriteOptions(runtime, fuse, census=census, progress=progress, weights=kept), strict
    )
    return (out if weights is not None else fill_shared_weights(out)), summary


def optimize_with_steps(
    proto: onnx.ModelProto, wanted: RewriteOptions, strict: bool = False
) -> tuple[onnx.ModelProto, Summary, list[tuple[RewriteStep, Finding]]]:
    """Run `optimize_norms` and return every step that changed the graph, so that a caller may omit some of them.

    If onnxruntime cannot run a step's result, or runs it with a gross error (`normdeploy.rewriting.rounding_verdicts`),
    everything is repeated without that step.

    Returns:
        the new model, the summary, and each step with its finding.

    Raises:
        CertificateError: a certificate failed, with ``strict``.
    """
    with _pause_garbage_collection():
        for attempt in range(_ATTEMPTS):
            work, out = _rewrite_once(proto, wanted)
            if not work.gross or attempt == _ATTEMPTS - 1:
                break
            if attempt < _ATTEMPTS - 2:
                again = work.gross
            else:
                again = {step: _give_up_finding(f) for step, f in work.taken} | work.gross
            wanted = replace(wanted, undone={**wanted.undone, **again})
    require_sealed(out, work.seals)
    if strict:
        require_kept(work.findings)
    ops = count_ops(proto)
    left = count_ops(out)
    findings = tuple(work.findings)
    summary = Summary(
        findings,
        sum(ops.values()),
        len(out.graph.node),
        default_domain_opset(out),
        work.seconds,
        ops_before=ops,
        ops_after=left,
    )
    return out, summary, work.taken


def require_kept(findings: Sequence[Finding]) -> None:
    """Require that no finding is undone: ``--strict``.

    Raises:
        CertificateError: one is undone.
    """
    failed = [f for f in findings if f.status == "undone"]
    if failed:
        raise CertificateError(
            f"{len(failed)} of {len(findings)} rewrites failed their certificates; the first is "
            f"{failed[0].tensor!r}: {failed[0].reason}. Without --strict, the export leaves these subgraphs "
            "unchanged."
        )


def require_exact(findings: Sequence[Finding]) -> None:
    """Require an exact certificate for each rewrite: ``--strict-proof``.

    Raises:
        CertificateError: a rewrite was only tested on inputs, or gives NaN for an infinite input that gave a number
            before.
    """
    for f in findings:
        if (
            f.status in ("fused", "folded")
            and f.certificate is not None
            and (f.certificate.method != "exact" or f.certificate.gains)
        ):
            why = f.certificate.note or "its certificate rests only on sampled inputs"
            raise CertificateError(
                f"the rewrite of {f.tensor!r} ({f.became}) is not proved as --strict-proof requires: {why}"
            )


# Maximum number of attempts; the last attempt omits all steps. Models with several kinds of norms need two or three.
_ATTEMPTS = 8


def _give_up_finding(finding: Finding) -> Finding:
    reason = f"onnxruntime ran some rewrite of this file poorly in each of {_ATTEMPTS - 2} attempts, so all were undone"
    return undone_finding(finding, reason)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause Python's cycle collector. It would traverse the whole graph repeatedly and take a seventh of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _rewrite_once(proto: onnx.ModelProto, wanted: RewriteOptions) -> tuple[RewriteOutcome, onnx.ModelProto]:
    """Rewrite the whole file once, without the undone steps."""
    proto = source = with_sorted_nodes(proto)
    if wanted.runtime in TENSORRT:
        proto = int32_codes.replace_int32_codes(proto)
    proto, shadows = rename_clashing_functions(proto)
    inlined = inline_unwanted_functions(remove_omitted_inputs(proto), wanted.fuse)
    proto, foreign = change_opset(inlined, wanted)
    work, out = _rewrite_file(proto, wanted)
    # A written node, such as an activation, may support the file's type only in a newer opset.
    work.opset = max(work.opset, oldest_opset_for_types(out))
    if wanted.opset is not None and work.opset > wanted.opset:
        raise GraphError(f"the file needs opset {work.opset}, not {wanted.opset}, because of its dtypes")
    if ops_needing_conversion(out, work.opset):
        # The ops of an old file must be converted to the new opset first. Then the norms are found again.
        try:
            newer = convert_opset(proto, work.opset)
        except RefusedError as refusal:
            wanted = replace(wanted, limit=default_domain_opset(proto), unraised=str(refusal))
            work, out = _rewrite_file(proto, wanted)
        else:
            work, out = _rewrite_file(newer, wanted)
    work.findings = merge_foreign_findings(work.findings, foreign, proto)
    out = raise_opset_number(out, work.opset)
    if wanted.fuse == "portable" or may_use_function_ops(out):
        attach_functions(out, default_domain_opset(out))
    name = shadows.written_clash(out)
    if name is None and default_domain_opset(out) != default_domain_opset(source):
        name = shadows.standard_clash
    if name is None:
        return work, shadows.restore_names(out)
    reason = (
        f"the file has a function named {name!r}; in the rewritten file, it would be confused with the ONNX "
        "op of that name; rename the function"
    )
    if wanted.opset is not None:
        raise GraphError(f"the file can't be written at opset {wanted.opset}: {reason}")
    work.findings = [
        replace(f, status="refused", reason=reason, became="", nodes_left=None, written=()) if _is_written(f) else f
        for f in work.findings
    ]
    work.taken = []
    if wanted.recorder is not None:
        wanted.recorder.start_file((), default_domain_opset(source), default_domain_opset(source))
        wanted.recorder.start_pass(default_domain_opset(source))
    work.gross = {}
    work.seals = []
    return work, copy_model(source)


def _is_written(finding: Finding) -> bool:
    """Return True if nodes were written for a norm: its node, or standard nodes that replace a third-party one."""
    return bool(
        finding.status in ("fused", "folded") or finding.became or (finding.status == "refused" and finding.certificate)
    )


def count_ops(proto: onnx.ModelProto) -> dict[str, int]:
    """Count the nodes of the main graph by op type.

    Returns:
        number of nodes by op type, the most frequent first.
    """
    return dict(Counter(node.op_type for node in proto.graph.node).most_common())


def _rewrite_file(proto: onnx.ModelProto, wanted: RewriteOptions) -> tuple[RewriteOutcome, onnx.ModelProto]:
    """Rewrite a file's graph, its nested graphs and its functions."""
    if wanted.recorder is not None:
        wanted.recorder.start_pass(default_domain_opset(proto))
    work, out = _rewrite_graph(proto, (), wanted)
    for function in open_functions(out):
        _rewrite_subgraph(work, function, set(), wanted)
    work.findings += find_closed_norms(out)
    return work, drop_unused_initializers(out) if out.functions or any(f.place for f in work.findings) else out


def _rewrite_graph(
    proto: onnx.ModelProto, taken: Collection[str], wanted: RewriteOptions
) -> tuple[RewriteOutcome, onnx.ModelProto]:
    """Rewrite one graph and its bodies.

    Args:
        taken: names in the enclosing graphs, for a body.
    """
    graph, work = _apply_transforms(proto, taken, wanted)
    out = graph.to_proto()
    around = {*taken, *all_names(out.graph)}
    for body in body_subgraphs(out):
        _rewrite_subgraph(work, body, around, wanted)
    return work, out


def _rewrite_subgraph(work: RewriteOutcome, nested: Subgraph, taken: Collection[str], wanted: RewriteOptions) -> None:
    place = "; ".join(filter(None, (wanted.place, nested.place)))
    inner, out = _rewrite_graph(nested.model, taken, replace(wanted, place=place, weights=None))
    # Steps for speed alone have no findings, but change the body too.
    if inner.taken:
        nested.put_back(out)
        work.opset = max(work.opset, inner.opset)
        work.seals += inner.seals
    work.taken += inner.taken
    work.gross |= inner.gross
    work.findings += [
        replace(f, place=f"{nested.place}, {f.place}" if f.place else nested.place) for f in inner.findings
    ]


def _apply_transforms(
    proto: onnx.ModelProto, taken: Collection[str], wanted: RewriteOptions
) -> tuple[Graph, RewriteOutcome]:
    """Apply every transform and cleanup of the tables to one graph, in order."""
    start = time.perf_counter()
    graph = ShapedGraph(proto, taken, wanted.weights)
    graph.treat_as_data(find_sized_data(graph))
    cleanups = [(cleanup.stage, cleanup.begin(graph)) for cleanup in transform_table.CLEANUPS]
    rewriter = Rewriter(graph, wanted)
    for transform in transform_table.select_transforms(proto, wanted):
        with transform.around(graph):
            rewriter.apply(transform.stage, transform.propose)
    for stage, sweep in cleanups:
        rewriter.apply_cleanup(stage, sweep)
    seals = rewriter.remaining_seals()
    # onnxruntime's verdict does not take back rewrites for a TensorRT target.
    rewriter.apply_verdicts(decides=wanted.runtime not in TENSORRT)
    rewriter.seconds["passes"] = time.perf_counter() - start
    ledger = rewriter.ledger
    findings = [*ledger.findings, *list_other_norms(graph, ledger.findings)]
    return graph, RewriteOutcome(findings, ledger.steps_taken(), ledger.gross, seals, rewriter.opset, rewriter.seconds)
