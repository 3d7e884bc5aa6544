"""Take the norm census: the list of the norms of a file.

For each norm, the census has the nodes in the file, the form that ``optimize`` would write, and the support of each
runtime for the two. For a quantized file, it also lists the linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import onnx

from ...contrib.name_clashes import rename_clashing_functions
from ...errors import InputError
from ...findings.records import Finding, RuntimeSupport, Summary
from ...graphs import norm_extraction
from ...graphs.norm_diagrams import draw_norm_diagrams
from ...graphs.quantization_info import all_quantizations, is_quantized
from ...recognition.explanations import explain as explained
from ...recognition.lookalikes import find_lookalikes
from ...rewriting import norm_optimizer
from ...runtimes import kernel_support
from ...storage.node_order import with_sorted_nodes
from ...storage.weight_serialization import share_large_weights
from ...types import Progress

# Index of a finding, "now" (as in the file) or "optimized", and a model that contains only the norm in this form.
Form = tuple[int, Literal["now", "optimized"], onnx.ModelProto]


def take_census(
    proto: onnx.ModelProto,
    *,
    runtime: str = "any",
    fuse: str = "standard",
    explain: str | None = None,
    progress: Progress | None = None,
    chains: bool = True,
) -> Summary:
    """List the normalizations of ``proto`` and, if it is quantized, its linear layers; ``proto`` is not changed.

    Args:
        proto: the model with its weights, or with references to them (`normdeploy.storage.shared_weights`).
        runtime, fuse: as for ``optimize``.
        explain: name of a tensor, a node or a module to explain. If it is set, the runtimes are not queried.
        progress: called with (stage, done, total).
        chains: also query the runtimes about norms that consist of several nodes in the file.

    Returns:
        The findings with the support of each runtime, notes, diagrams and quantized layers. With ``explain``, only the
        findings and explanations.

    Raises:
        GraphError: the model can't be read.
        InputError: ``explain`` is empty, or no tensor, node or module has this name.
    """
    if explain is not None and not explain.strip():
        raise InputError(
            f"the name to explain is {explain!r}; pass the name of a tensor, a node or a module (`inspect`"
            " without --explain lists the norms)"
        )
    proto, weights = share_large_weights(with_sorted_nodes(proto))
    layers = (
        tuple(layer for q in all_quantizations(proto) for layer in q.quantized_layers()) if is_quantized(proto) else ()
    )
    out, summary = norm_optimizer.optimize_norms(
        proto, runtime=runtime, fuse=fuse, progress=progress, census=True, weights=weights
    )
    proto = rename_clashing_functions(proto)[0]
    out = rename_clashing_functions(out)[0]
    findings = [*summary.findings, *find_lookalikes(proto, summary.findings)]
    if explain is not None:
        return replace(summary, findings=tuple(findings), explanations=explained(proto, findings, explain))
    if progress is not None:
        progress("runtimes", 0, 0)
    findings, notes = _ask_runtimes(findings, _norm_forms(findings, proto, out, chains))
    return replace(
        summary,
        findings=tuple(findings),
        notes=tuple(notes),
        pictures=draw_norm_diagrams(findings, proto, out),
        layers=layers,
    )


def _ask_runtimes(findings: Sequence[Finding], forms: Sequence[Form]) -> tuple[list[Finding], list[str]]:
    """Query the runtimes about all forms.

    Returns:
        The findings, each with the answers of the runtimes, and notes.
    """
    if not forms:
        return list(findings), []
    distinct = {model.SerializeToString(deterministic=True): model for _, _, model in forms}
    asked, notes = kernel_support.query_runtimes(list(distinct.values()))
    place = {key: i for i, key in enumerate(distinct)}
    supports: dict[int, list[RuntimeSupport]] = {}
    for index, form, model in forms:
        answer_of = place[model.SerializeToString(deterministic=True)]
        nodes = tuple(n.op_type for n in model.graph.node if n.op_type != "Constant")
        for runtime in asked:
            answer = runtime.answers[answer_of]
            support = RuntimeSupport(runtime.runtime, form, nodes, answer.verdict, answer.parts, answer.reason)
            supports.setdefault(index, []).append(support)
    return [replace(f, runtimes=tuple(supports.get(i, ()))) for i, f in enumerate(findings)], notes


def _norm_forms(findings: Sequence[Finding], proto: onnx.ModelProto, out: onnx.ModelProto, chains: bool) -> list[Form]:
    """Extract each norm into two separate models: as the file has it, and as ``optimize`` would write it."""
    forms: list[Form] = []
    nested = any(f.place for f in findings)
    for form, source in (("now", proto), ("optimized", out)):
        cutters = {
            place: norm_extraction.NormExtractor(model)
            for place, model in (norm_extraction.models_by_location(source) if nested else {"": source}).items()
        }
        for i, finding in enumerate(findings):
            if form == "now":
                tensors = finding.tensors
            else:
                tensors = finding.written
            if finding.place not in cutters:
                continue
            model = cutters[finding.place].extract_model(tensors, {finding.input: finding.shape})
            if model is not None and (chains or form == "optimized" or len(model.graph.node) == 1):
                forms.append((i, form, model))  # type: ignore[arg-type]
    return forms
