"""The norm census: every norm of a file, what ``optimize`` would write for it, and how each runtime takes both; and the
linear layers of a quantized file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import onnx

from .. import kernels
from ..contrib.shadows import apart
from ..errors import InputError
from ..graphs import cuts
from ..graphs.pictures import pictures
from ..graphs.quantized import everywhere, is_quantized
from ..recognition.explain import explain as explained
from ..recognition.lookalikes import lookalikes
from ..records import Finding, Summary, Support
from ..rewriting import rewrite
from ..storage.ordering import ordered
from ..storage.weights import lifted
from ..types import Progress

Form = tuple[int, Literal["now", "optimized"], onnx.ModelProto]  # place of the finding, which form of it


def census(
    proto: onnx.ModelProto,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    explain: str | None = None,
    progress: Progress | None = None,
    chains: bool = True,
) -> Summary:
    """What is to be known of the normalizations of ``proto``, which is not changed, and where it is quantized of its
    linear layers.

    Args:
        proto: the model with its weights, or with references to them (`normdeploy.storage.held`).
        runtime, fuse: as for ``optimize``, which is what would be done.
        explain: a tensor, a node or a module path to explain; the runtimes are not asked then.
        progress: called with (stage, done, total).
        chains: whether to show norms of several nodes to the runtimes as they stand in the file, too.

    Raises:
        GraphError: the model can't be read.
        InputError: nothing is called as ``explain`` says, or it is empty.
    """
    if explain is not None and not explain.strip():
        raise InputError(
            f"the name to explain is {explain!r}; give that of a tensor, a node or a module (`inspect` alone lists the"
            " norms)"
        )
    proto, weights = lifted(ordered(proto))
    layers = tuple(layer for q in everywhere(proto) for layer in q.layers()) if is_quantized(proto) else ()
    out, summary = rewrite.optimize(proto, runtime=runtime, fuse=fuse, progress=progress, census=True, weights=weights)
    proto, out = apart(proto)[0], apart(out)[0]
    findings = [*summary.findings, *lookalikes(proto, summary.findings)]
    if explain is not None:
        return replace(summary, findings=tuple(findings), explanations=explained(proto, findings, explain))
    if progress is not None:
        progress("runtimes", 0, 0)
    findings, notes = _asked(findings, _forms(findings, proto, out, chains))
    return replace(
        summary, findings=tuple(findings), notes=tuple(notes), pictures=pictures(findings, proto, out), layers=layers
    )


def _asked(findings: Sequence[Finding], forms: Sequence[Form]) -> tuple[list[Finding], list[str]]:
    """The findings, each with what the runtimes make of it."""
    if not forms:
        return list(findings), []
    distinct = {model.SerializeToString(deterministic=True): model for _, _, model in forms}
    asked, notes = kernels.ask(list(distinct.values()))
    place = {key: i for i, key in enumerate(distinct)}
    supports: dict[int, list[Support]] = {}
    for index, form, model in forms:
        answer_of = place[model.SerializeToString(deterministic=True)]
        nodes = tuple(n.op_type for n in model.graph.node if n.op_type != "Constant")
        for runtime in asked:
            answer = runtime.answers[answer_of]
            support = Support(runtime.runtime, form, nodes, answer.verdict, answer.parts, answer.reason)
            supports.setdefault(index, []).append(support)
    return [replace(f, runtimes=tuple(supports.get(i, ()))) for i, f in enumerate(findings)], notes


def _forms(findings: Sequence[Finding], proto: onnx.ModelProto, out: onnx.ModelProto, chains: bool) -> list[Form]:
    """Each norm as a model of its own: as the file has it, and as ``optimize`` writes it."""
    forms: list[Form] = []
    nested = any(f.place for f in findings)
    for form, source in (("now", proto), ("optimized", out)):
        cutters = {
            place: cuts.Cutter(model) for place, model in (cuts.models(source) if nested else {"": source}).items()
        }
        for i, finding in enumerate(findings):
            tensors = finding.tensors if form == "now" else finding.written
            if finding.place not in cutters:
                continue
            model = cutters[finding.place].cut(tensors, {finding.input: finding.shape})
            if model is not None and (chains or form == "optimized" or len(model.graph.node) == 1):
                forms.append((i, form, model))  # type: ignore[arg-type]
    return forms
