"""Fuse one norm: recognize it around its root, write its best form, certify it, and keep or drop the rewrite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import onnx_graphsurgeon as gs

from ..findings.records import Certificate, Finding, FittingAttempt, Status, combine_certificates
from ..forms import write_norm
from ..forms.measured_forms import is_measured
from ..forms.norm_writer import NormForm
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..norms import third_party
from ..norms.third_party import function_op_row
from ..option_values import ANY
from ..recognition import norm_attributes
from ..recognition.anchors import VIEWS, is_anchor, is_norm_node
from ..recognition.norm_candidates import candidate_at, candidate_readings
from ..recognition.norm_facts import Norm, RootCandidate
from ..recognition.norm_fit import Clarity, RejectedReading
from ..recognition.numerators import explain_numerator
from ..recognition.zero_epsilon import zero_epsilon_notes
from .certification import Failure, ResultPair, unproved_finding
from .proposals import NodeReplacement, Proposal, ProposeResult, RewriteTarget
from .rewrite_ledger import RewriteOptions
from .rounding_verdicts import norm_trial_maker

# Maximum number of times that a norm whose certificate fails is read again as a smaller norm inside it
_TRIES = 4

# Rejected reading, with its norm if only the form failed
_Rejection = tuple[RejectedReading, Norm | None]


def propose_norm(graph: Graph, root: gs.Node, target: RewriteTarget) -> ProposeResult:
    """Propose the norm around one root in its best form.

    Returns:
        the proposal, or the finding of a norm that stays; None if ``root`` is not the root of a norm.
    """
    if is_anchor(graph, root):
        around = candidate_at(graph, root)
    else:
        around = None
    if around is None:
        return None
    return _propose_at_candidate(_NormSearch(graph, root, target), around)


@dataclass(frozen=True)
class _NormSearch:
    """Search for the norm of one root.

    Attributes:
        graph: the graph.
        root: the root.
        target: target of the rewrite.
        within: wider reading whose certificate failed; None for the first search. Inside it, only a norm of the same
            kind is accepted.
        tries: number of smaller readings that may still be tried.
    """

    graph: Graph
    root: gs.Node
    target: RewriteTarget
    within: Norm | None = None
    tries: int = _TRIES


def _propose_at_candidate(search: _NormSearch, around: RootCandidate) -> ProposeResult:
    """Propose the best reading of a candidate, or return the finding of a norm that stays."""
    graph = search.graph
    root = search.root
    best, refusals = _best_reading(graph, around, search.target.wanted)
    if best is None:
        return _refusal_finding(search, refusals)
    norm, form = best
    split = _cut_back_candidate(graph, norm, around)
    if split is not None:
        inner, _ = _best_reading(graph, split, search.target.wanted)
        if inner is not None:
            norm, form = inner
    if search.within is not None and norm.kind != search.within.kind:
        return None
    portable = search.target.wanted.fuse == "portable" and third_party.third_party_row(root.domain, root.op) is not None
    if is_norm_node(root) and (form.op == root.op or portable) and len(_data_nodes(graph, norm)) <= len(form.nodes):
        if function_op_row(root.domain, root.op) is None:
            standard = "standard "
        else:
            standard = ""
        return _with_package_kind(_norm_finding(search, norm, "kept", reason=f"it is already one {standard}node"), root)
    return _norm_proposal(search, around, norm, form)


def _norm_proposal(search: _NormSearch, around: RootCandidate, norm: Norm, form: NormForm) -> Proposal:
    graph = search.graph
    wanted = search.target.wanted
    finding = _norm_finding(search, norm, "fused", form)
    finding = replace(finding, proved=("identity",), notes=(*finding.notes, *norm.notes))

    def retry_without_guesses() -> ProposeResult:
        """Read the candidate again without the guessed values."""
        graph.memo.pop(norm.region.template, None)
        return _propose_at_candidate(search, around)

    def try_smaller(failure: Failure) -> Iterator[ProposeResult]:
        if isinstance(failure, Certificate):
            certificate = failure
        else:
            certificate = None
        inner = replace(search, within=norm, tries=search.tries - 1)
        for candidate_inside in (
            _smaller_candidates(graph, search.root, around, norm, certificate) if search.tries else ()
        ):
            yield _propose_at_candidate(inner, candidate_inside)

    return Proposal(
        finding,
        (ResultPair(norm.region, form.nodes[-1].outputs[0]),),
        (NodeReplacement(norm.y, form.nodes, shape=norm.shape, origin=_root_of_norm(graph, norm)),),
        unproved=lambda failure: _unproved_norm_finding(search, norm, form, failure),
        opset=form.opset,
        trial=norm_trial_maker(norm, form.opset),
        kind=(norm.region.template, form.became),
        revise=lambda told, certificate: replace(
            told,
            certificate=certificate,
            nodes_left=sum(not graph.is_shape_valued(node.outputs[0]) for node in form.nodes),
            written=_written_tensors(form, wanted),
        ),
        instead=retry_without_guesses if norm.guessed else None,
        otherwise=try_smaller,
        then=None if search.within is None else lambda: _fuse_with_preceding(search, form),
        joined=lambda first, then: _join_findings(first, then, form),
    )


def _written_tensors(form: NormForm, wanted: RewriteOptions) -> tuple[str, ...]:
    """Return the names of the written tensors, as they are in the graph."""
    if wanted.census:
        return tuple(n.outputs[0].name for n in form.nodes)
    return ()


def _unproved_norm_finding(search: _NormSearch, norm: Norm, form: NormForm, failure: Failure) -> Finding:
    if isinstance(failure, Refusal):
        return _norm_finding(search, norm, "refused", reason=failure.reason)
    failed = unproved_finding(_norm_finding(search, norm, "undone", form), failure)
    by = f"in the form of package {form.package!r}: {failed.reason}"
    if form.package:
        return replace(failed, reason=by)
    return failed


def _smaller_candidates(
    graph: Graph, root: gs.Node, around: RootCandidate, norm: Norm, certificate: Certificate | None
) -> list[RootCandidate]:
    """Shrink a candidate by an unproved part: a scale and shift before the norm, or an activation after it."""
    xs = around.xs[: next(i for i, x in enumerate(around.xs) if x is norm.x)]
    ys = around.ys[: next(i for i, y in enumerate(around.ys) if y is norm.y)]
    culprit = next(
        (n for n in norm.region.nodes if certificate is not None and n.outputs[0].name == certificate.culprit), None
    )
    if culprit is not None and graph.position_of(culprit) < graph.position_of(root):
        at = graph.position_of(culprit)
        xs = tuple(x for x in xs if (node := graph.producer(x)) is not None and graph.position_of(node) >= at)
        if xs:
            return [replace(around, xs=xs)]
        return []
    if culprit is not None and culprit is not root:
        ys = tuple(
            y
            for y in ys
            if (node := graph.producer(y)) is not None and graph.position_of(node) < graph.position_of(culprit)
        )
        if ys:
            return [replace(around, ys=ys)]
        return []
    return ([replace(around, xs=xs)] if xs else []) + ([replace(around, ys=ys)] if ys else [])


def _fuse_with_preceding(search: _NormSearch, form: NormForm) -> ProposeResult:
    """Fuse the written norm with the nodes before it, if the result is one node. Two small steps may be provable even
    if one large step is not.
    """
    node = next(n for n in form.nodes if n.op == form.op)
    around = candidate_at(search.graph, node)
    if around is None:
        return None
    return _propose_at_candidate(_NormSearch(search.graph, node, search.target), around)


def _join_findings(first: Finding, then: Finding, form: NormForm) -> Finding:
    """Merge the findings of a norm and of the nodes fused with it in a second step."""
    return replace(
        then,
        spelling=then.spelling.replace(form.op, first.spelling),
        notes=tuple(dict.fromkeys((*first.notes, *then.notes))),
        certificate=combine_certificates(first.certificate, then.certificate),
    )


def _best_reading(
    graph: Graph, around: RootCandidate, wanted: RewriteOptions
) -> tuple[tuple[Norm, NormForm] | None, list[_Rejection]]:
    """Choose the reading and form that leave the fewest nodes.

    If several readings leave equally few nodes, the reading that writes fewer nodes is chosen, then the outermost
    reading. For a runtime with measured forms, the outermost reading is chosen at once, because forms are measured for
    a whole norm and not for its parts. For "any" runtime, this exception applies only to group norms.
    """
    candidates: list[tuple[int, Norm, NormForm]] = []
    refusals: list[_Rejection] = []
    for reading in candidate_readings(graph, around):
        if isinstance(reading, RejectedReading):
            refusals.append((reading, None))
            continue
        made = write_norm(graph, reading, wanted.runtime, wanted.fuse, wanted.excluded_ops)
        if isinstance(made, NormForm) and made.opset > wanted.limit:
            reason = f"its node needs opset {made.opset}, but the file has opset {wanted.limit}"
            made = Refusal(reason, made.nodes[-1].outputs[0].name, kind=RefusalKind.OPSET)
        if isinstance(made, Refusal):
            rejected = RejectedReading(
                made.reason, made.tensor, kind=made.kind, start=reading.x.name, end=reading.y.name
            )
            refusals.append((rejected, reading))
            continue
        written = sum(node.op != "Shape" for node in made.nodes)
        candidates.append((written - len(_data_nodes(graph, reading)), reading, made))
        if len(made.nodes) == 1 or len(candidates) == 4:
            break
    if not candidates:
        return None, refusals
    outermost = is_measured(wanted.runtime) and (
        wanted.runtime != ANY or any(norm.kind == "GroupNorm" for _, norm, _ in candidates)
    )
    _, norm, form = min(candidates, key=lambda f: (f[0], 0 if outermost else len(f[2].nodes)))
    return (norm, form), refusals


def _cut_back_candidate(graph: Graph, norm: Norm, around: RootCandidate) -> RootCandidate | None:
    """Cut the candidate back to an inner tensor of x's shape that other nodes read too, directly or through views.

    Such a tensor may be the result of a norm that several readers share. A mixture of experts, for example, flattens
    the result for its router, and restores the shape for a shared expert.
    """
    inside = {id(n) for n in norm.region.nodes}
    places = {id(y): i for i, y in enumerate(around.ys)}
    for y in around.ys:
        if y is norm.y:
            return None
        if not graph.is_output(y) and all(id(n) in inside for n in graph.consumers(y)):
            continue
        shared = _before_views(graph, y, norm)
        if shared is not None and id(shared) in places:
            return replace(around, ys=around.ys[: places[id(shared)] + 1])
    return None


def _before_views(graph: Graph, tensor: gs.Tensor, norm: Norm) -> gs.Tensor | None:
    """Walk up from ``tensor`` through views to a tensor with the shape of the norm's result.

    Returns:
        ``tensor`` itself if it has that shape; None if there is no such tensor.
    """
    while graph.shape(tensor) != graph.shape(norm.y):
        view = graph.producer(tensor)
        if view is None or view.op not in VIEWS:
            return None
        tensor = view.inputs[0]
    return tensor


def _data_nodes(graph: Graph, norm: Norm) -> list[gs.Node]:
    return [n for n in norm.region.nodes if not graph.is_shape_valued(n.outputs[0])]


def _root_of_norm(graph: Graph, norm: Norm) -> gs.Node | None:
    """Return the root of the norm, whose module is reported as the module of the norm.

    The first and last nodes of the norm may be in an outer module (a modulation by data, a Dropout).
    """
    roots = [n for n in norm.region.nodes if is_anchor(graph, n) and graph.module(n)]
    if roots:
        return roots[-1]
    return graph.producer(norm.y)


def _norm_finding(
    search: _NormSearch, norm: Norm, status: Status, form: NormForm | None = None, reason: str = ""
) -> Finding:
    graph = search.graph
    heart = _root_of_norm(graph, norm)
    if heart is not None:
        module = graph.module(heart)
    else:
        module = ""
    finding = Finding(
        kind=(form.kind if form is not None else "") or norm.kind,
        status=status,
        tensor=norm.y.name,
        module=module,
        spelling=" ".join(n.op for n in _data_nodes(graph, norm)),
        became=form.became if form is not None and status != "undone" else "",
        reason=reason,
        axes=norm.axes,
        epsilon=norm.epsilon,
        dtype=norm.dtype.name,
        notes=(*(form.notes if form is not None else ()), *zero_epsilon_notes(graph, norm)),
    )
    if search.target.wanted.census:
        return replace(finding, **norm_attributes.attributes_of_norm(graph, norm))
    return finding


def _refusal_finding(search: _NormSearch, refusals: list[_Rejection]) -> Finding | None:
    """Build a finding from the most informative refusal.

    This is the innermost refusal with a specific reason. The result is None if no refusal has a clear reason.
    """
    root = search.root
    wanted = search.target.wanted
    clear = [(r, norm) for r, norm in refusals if r.clarity]
    if not clear:
        return None
    best, norm = next((pair for pair in reversed(clear) if pair[0].clarity is Clarity.SPECIFIC), clear[0])
    # Of the refusals with this reason, take the widest reading.
    best, norm = next(pair for pair in clear if pair[0].reason == best.reason)
    if best.kind is RefusalKind.EVEN and (region := best.region) is not None:
        best = replace(best, reason=explain_numerator(search.graph, region.leaves[0], region.y))
    if best.kind is RefusalKind.OPSET and wanted.unraised:
        best = replace(best, reason=f"{best.reason} ({wanted.unraised})")
    status: Status
    if is_norm_node(root):
        status = "kept"
    else:
        status = "refused"
    attempts = tuple(_attempt_record(r, norm) for r, norm in refusals)
    if norm is not None:
        return replace(
            _with_package_kind(_norm_finding(search, norm, status, reason=best.reason), root), attempts=attempts
        )
    fit = best.fit
    finding = Finding(
        kind=root.op if is_norm_node(root) else fit.kind if fit is not None else "unknown",
        status=status,
        tensor=best.tensor or root.outputs[0].name,
        module=search.graph.module(root),
        spelling=best.region.spelling() if best.region is not None else "",
        reason=best.reason,
        axes=fit.normalized_axes if fit is not None else (),
        attempts=attempts,
    )
    region = best.region or next((r.region for r, _ in refusals if r.region is not None), None)
    if wanted.census and region is not None:
        finding = replace(finding, **norm_attributes.attributes_of_region(search.graph, region, fit))
    return _with_package_kind(finding, root)


def _with_package_kind(finding: Finding, root: gs.Node) -> Finding:
    """Return ``finding`` with the norm kind that an installed package declares for its op, if that op is kept."""
    brought = third_party.third_party_row(root.domain, root.op)
    if brought is not None and finding.status == "kept":
        return replace(finding, kind=brought.kind)
    return finding


def _attempt_record(refusal: RejectedReading, norm: Norm | None) -> FittingAttempt:
    stage: Literal["ends", "values", "form"]
    if norm is not None:
        stage = "form"
    elif refusal.clarity:
        stage = "values"
    else:
        stage = "ends"
    return FittingAttempt(refusal.start, refusal.end, stage, refusal.reason, refusal.tensor)
