"""The step that fuses one norm: read it around its root, write it in its best form, certify it, keep or leave it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import onnx_graphsurgeon as gs

from ..choices import ANY
from ..forms import write
from ..forms.form import Form
from ..forms.norm_forms import measured
from ..graphs.graph import Graph
from ..graphs.region import Clarity, Kind, Refusal
from ..norms import guests
from ..norms.guests import own
from ..recognition import traits
from ..recognition.facts import Candidate, Norm
from ..recognition.numerators import reason_of
from ..recognition.readings import candidate, readings
from ..recognition.roots import is_norm, is_root
from ..records import Attempt, Certificate, Finding, Status, both
from . import certify, rounding, trials
from .certify import unproved
from .sealed import seals
from .work import Work

_TRIES = 4  # smaller readings of a norm whose certificate fails, one inside the other

_Refusal = tuple[Refusal, Norm | None]  # the norm, where it was one and only its form failed


def fuse(work: Work, root: gs.Node) -> Finding | None:
    """Deal with the norm around one root."""
    around = candidate(work.graph, root) if is_root(work.graph, root) else None
    fused = None if around is None else _fuse(work, root, around)
    brought = guests.row(root.domain, root.op)
    return replace(fused, kind=brought.kind) if fused and brought and fused.status == "kept" else fused


def _fuse(
    work: Work, root: gs.Node, around: Candidate, within: Norm | None = None, tries: int = _TRIES
) -> Finding | None:
    """``within``: a wider reading whose certificate failed. Another kind of norm inside it is none that anybody
    meant."""
    graph = work.graph
    best, refusals = _best(work, around)
    if best is None:
        return _refused(work, root, refusals)
    norm, form = best
    split = _used_inside(graph, norm, around)
    if split is not None:
        inner, _ = _best(work, split)
        if inner is not None:
            norm, form = inner
    if within is not None and norm.kind != within.kind:
        return None
    brought = work.wanted.fuse == "portable" and guests.row(root.domain, root.op) is not None
    if is_norm(root) and (form.core == root.op or brought) and len(_data_nodes(graph, norm)) <= len(form.nodes):
        standard = "standard " if own(root.domain, root.op) is None else ""
        return _finding(work, norm, "kept", reason=f"it is one {standard}node already")
    finding = _replace(work, norm, form)
    if finding.status != "fused" and norm.guessed:
        graph.memo.pop(norm.region.template, None)
        return _fuse(work, root, around, within, tries)
    if not finding.certificate and finding.status != "fused":
        for smaller in _smaller(graph, root, around, norm, finding.certificate) if tries else ():
            made = _fuse(work, root, smaller, within=norm, tries=tries - 1)
            if made is not None and made.status in ("fused", "kept"):
                return made
        return finding
    return _wider(work, finding, form) if within is not None and finding.status == "fused" else finding


def _smaller(
    graph: Graph, root: gs.Node, around: Candidate, norm: Norm, certificate: Certificate | None
) -> list[Candidate]:
    """What is left of a candidate without what could not be proved: a scale and a shift before the norm, an activation
    behind it."""
    xs = around.xs[: next(i for i, x in enumerate(around.xs) if x is norm.x)]
    ys = around.ys[: next(i for i, y in enumerate(around.ys) if y is norm.y)]
    culprit = next(
        (n for n in norm.region.nodes if certificate is not None and n.outputs[0].name == certificate.culprit), None
    )
    if culprit is not None and graph.order(culprit) < graph.order(root):
        at = graph.order(culprit)
        xs = tuple(x for x in xs if (node := graph.producer(x)) is not None and graph.order(node) >= at)
        return [replace(around, xs=xs)] if xs else []
    if culprit is not None and culprit is not root:
        ys = tuple(
            y for y in ys if (node := graph.producer(y)) is not None and graph.order(node) < graph.order(culprit)
        )
        return [replace(around, ys=ys)] if ys else []
    return ([replace(around, xs=xs)] if xs else []) + ([replace(around, ys=ys)] if ys else [])


def _wider(work: Work, finding: Finding, form: Form) -> Finding:
    """The norm just written together with what lies before it, where that is one node too: in two steps it may be
    proved."""
    node = next(n for n in form.nodes if n.op == form.core)
    around = candidate(work.graph, node)
    fused = _fuse(work, node, around) if around is not None else None
    if fused is None or fused.status != "fused":
        return finding
    spelling = fused.spelling.replace(form.core, finding.spelling)
    return replace(
        fused,
        spelling=spelling,
        notes=(*finding.notes, *fused.notes),
        certificate=both(finding.certificate, fused.certificate),
    )


def _best(work: Work, around: Candidate) -> tuple[tuple[Norm, Form] | None, list[_Refusal]]:
    """The reading and form that leave the fewest nodes; of equals the one that writes fewer, then the outermost.

    For a runtime whose forms were measured, of equals the outermost: a part of the norm has a form of its own, but not
    the one measured. Of "any" runtime these are the group norms.
    """
    candidates: list[tuple[int, Norm, Form]] = []
    refusals: list[_Refusal] = []
    for reading in readings(work.graph, around):
        if isinstance(reading, Refusal):
            refusals.append((reading, None))
            continue
        made = write(work.graph, reading, work.wanted.forms, work.wanted.fuse)
        if isinstance(made, Form) and made.opset > work.wanted.limit:
            reason = f"its node needs opset {made.opset}, the file has {work.graph.opset}"
            made = Refusal(reason, made.nodes[-1].outputs[0].name, kind=Kind.OPSET)
        if isinstance(made, Refusal):
            refusals.append((replace(made, start=reading.x.name, end=reading.y.name), reading))
            continue
        written = sum(node.op != "Shape" for node in made.nodes)
        candidates.append((written - len(_data_nodes(work.graph, reading)), reading, made))
        if len(made.nodes) == 1 or len(candidates) == 4:
            break
    if not candidates:
        return None, refusals
    outermost = measured(work.wanted.forms) and (
        work.wanted.forms != ANY or any(norm.kind == "GroupNorm" for _, norm, _ in candidates)
    )
    _, norm, form = min(candidates, key=lambda f: (f[0], 0 if outermost else len(f[2].nodes)))
    return (norm, form), refusals


def _used_inside(graph: Graph, norm: Norm, around: Candidate) -> Candidate | None:
    """The candidate cut back to an inner tensor of x's shape that others read too: it may be the norm that they
    share."""
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


def _replace(work: Work, norm: Norm, form: Form) -> Finding:
    graph = work.graph
    rewrite = certify.rewrite_of(graph, norm.region, form.nodes)
    if isinstance(rewrite, Refusal):
        return _finding(work, norm, "refused", reason=rewrite.reason)
    certificate = certify.certified(work.proofs, [rewrite])
    if not certificate:
        failed = unproved(_finding(work, norm, "undone", form), certificate)
        by = f"as the package {form.package!r} writes it: {failed.reason}"
        return replace(failed, reason=by) if form.package else failed
    likes = work.kinds.setdefault((rewrite.before.template, form.became), [])
    likes.append(len(work.findings))
    if len(likes) <= rounding.OF_A_KIND:
        case = trials.norm_case(norm, rewrite)
        trial = (
            rounding.norm_trial(graph, norm, case, rewrite, form.opset, len(work.trials)) if case is not None else None
        )
        if trial is not None:
            work.trials.append((len(work.findings), trial))
    finding = replace(
        _finding(work, norm, "fused", form),
        certificate=certificate,
        proved=("identity",),
        notes=(*form.notes, *norm.notes),
    )
    work.sealed += seals(graph, form.nodes)
    graph.replace(norm.y, form.nodes, norm.shape, origin=_heart(graph, norm))
    if work.wanted.census:
        finding = replace(finding, written=tuple(n.outputs[0].name for n in form.nodes))
    work.opset = max(work.opset, form.opset)
    return finding


def _heart(graph: Graph, norm: Norm) -> gs.Node | None:
    """The root, whose module is the norm's: its ends may lie in the module around it (a modulation by data, a
    Dropout)."""
    roots = [n for n in norm.region.nodes if is_root(graph, n) and graph.module(n)]
    return roots[-1] if roots else graph.producer(norm.y)


def _finding(work: Work, norm: Norm, status: Status, form: Form | None = None, reason: str = "") -> Finding:
    heart = _heart(work.graph, norm)
    module = work.graph.module(heart) if heart is not None else ""
    finding = Finding(
        kind=(form.kind if form is not None else "") or norm.kind,
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
    return replace(finding, **traits.of_norm(work.graph, norm)) if work.wanted.census else finding


def _refused(work: Work, root: gs.Node, refusals: list[_Refusal]) -> Finding | None:
    """The refusal that says most: the innermost clear one. None where no two ends around the root belong together."""
    clear = [(r, norm) for r, norm in refusals if r.clarity]
    if not clear:
        return None
    best, norm = next((pair for pair in reversed(clear) if pair[0].clarity is Clarity.SPECIFIC), clear[0])
    best, norm = next(pair for pair in clear if pair[0].reason == best.reason)  # of the same flaw the whole norm
    if best.kind is Kind.EVEN and (region := best.region) is not None:
        best = replace(best, reason=reason_of(work.graph, region.leaves[0], region.y))
    if best.kind is Kind.OPSET and work.wanted.unraised:
        best = replace(best, reason=f"{best.reason} ({work.wanted.unraised})")
    status: Status = "kept" if is_norm(root) else "refused"
    attempts = tuple(_attempt(r, norm) for r, norm in refusals)
    if norm is not None:
        return replace(_finding(work, norm, status, reason=best.reason), attempts=attempts)
    fit = best.fit
    finding = Finding(
        kind=root.op if is_norm(root) else fit.kind if fit is not None else "unknown",
        status=status,
        tensor=best.tensor or root.outputs[0].name,
        module=work.graph.module(root),
        spelling=best.region.spelling() if best.region is not None else "",
        reason=best.reason,
        axes=fit.over if fit is not None else (),
        attempts=attempts,
    )
    region = best.region or next((r.region for r, _ in refusals if r.region is not None), None)
    return (
        replace(finding, **traits.of_region(work.graph, region, fit))
        if work.wanted.census and region is not None
        else finding
    )


def _attempt(refusal: Refusal, norm: Norm | None) -> Attempt:
    stage: Literal["ends", "values", "form"] = "form" if norm is not None else "values" if refusal.clarity else "ends"
    return Attempt(refusal.start, refusal.end, stage, refusal.reason, refusal.tensor)
