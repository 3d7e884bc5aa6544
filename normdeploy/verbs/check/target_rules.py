"""Find the norms of a file that a target does not run as they are (``check --target``).

The answers come from the table of published op lists (`normdeploy.runtimes.target_support`). Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx

from ...contrib.expansion_types import tensor_types
from ...graphs.dims import Types
from ...graphs.proto_queries import module_path
from ...norms.norm_table import ROWS
from ...runtimes.target_support import (
    OpSupport,
    Target,
    describe_sources,
    describe_unmet_condition,
    op_key,
)
from ...storage.onnx_domains import default_domain_opset
from ...storage.onnx_files import iter_tensors
from ...storage.proto_traversal import nodes_with_opsets
from .norm_rules import Problem

_KINDS = {row.op: row.kind for row in ROWS}
# Op -> (form, ops of this form): forms that compute the same norm, in the order of preference.
_COMPOSED = ("several nodes (ReduceMean, Sub, Mul, Sqrt, Div …)", ("ReduceMean", "Sub", "Mul", "Add", "Sqrt", "Div"))
_INSTANCE = ("InstanceNormalization between two Reshapes", ("InstanceNormalization", "Reshape", "Mul", "Add"))
_LAYER = ("LayerNormalization between two Reshapes", ("LayerNormalization", "Reshape", "Mul", "Add"))
_SIMPLIFIED = ("SimplifiedLayerNormalization of onnxruntime", ("com.microsoft.SimplifiedLayerNormalization",))
_FORMS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "RMSNormalization": (_SIMPLIFIED, _COMPOSED),
    "com.microsoft.SimplifiedLayerNormalization": (("RMSNormalization", ("RMSNormalization",)), _COMPOSED),
    "com.microsoft.SkipLayerNormalization": (
        ("Add and LayerNormalization", ("Add", "LayerNormalization")),
        _COMPOSED,
    ),
    "com.microsoft.SkipSimplifiedLayerNormalization": (
        ("Add and RMSNormalization", ("Add", "RMSNormalization")),
        _COMPOSED,
    ),
    "com.microsoft.GroupNorm": (("GroupNormalization", ("GroupNormalization",)), _INSTANCE, _LAYER, _COMPOSED),
    "GroupNormalization": (_INSTANCE, _LAYER, _COMPOSED),
    "InstanceNormalization": (_LAYER, _COMPOSED),
    "LayerNormalization": (_COMPOSED,),
    "MeanVarianceNormalization": (_INSTANCE, _LAYER, _COMPOSED),
    "LpNormalization": (("ReduceL2 and Div", ("ReduceL2", "Div")), _COMPOSED),
    "BatchNormalization": (("Mul and Add, or folded into the op before it", ("Mul", "Add")),),
}


def find_target_problems(proto: onnx.ModelProto, target: Target) -> Iterator[Problem]:
    """Find the norm nodes that a target does not run, in the graph, its bodies and the file's functions.

    A node in a function has no known types, so only its op, its opset and its attributes are compared.

    Yields:
        A problem for each node, and one for the file's opset.
    """
    opset = default_domain_opset(proto)
    _, newest = target.opsets
    if newest is not None and opset > newest:
        yield Problem(
            "unsupported-opset",
            f"the file has opset {opset}, and {target.title} reads opsets up to {newest}: {target.consequence}"
            f" [{describe_sources(target)}]",
        )
    types = tensor_types(proto, opset)
    constants = {t.name for t in iter_tensors(proto)} | {
        name for node, _ in nodes_with_opsets(proto) if node.op_type == "Constant" for name in node.output
    }
    defined = {(f.domain, f.name) for f in proto.functions}
    for node, node_opset in nodes_with_opsets(proto):
        key = op_key(node)
        if key in _FORMS and node.input and (node.domain, node.op_type) not in defined:
            yield from _judge_node(target, key, node, node_opset, types, constants)


def _judge_node(
    target: Target, key: str, node: onnx.NodeProto, opset: int, types: Types, constants: set[str]
) -> Iterator[Problem]:
    row = target.row(key)
    at = {
        "kind": _KINDS.get(node.op_type, ""),
        "module": module_path(node),
        "node": node.name,
        "tensor": next(iter(node.output), ""),
    }
    if row.support == "unknown":
        yield Problem("unknown-support", f"{key} in {target.title}: unknown, because {row.why}", **at)
        return
    reason = row.why if row.support == "no" else ""
    reason = reason or describe_unmet_condition(row, node, opset, types, constants.__contains__)
    if reason:
        message = f"{key} in {target.title}: {reason}; {target.consequence}. {_describe_remedy(target, key)}"
        yield Problem("unsupported", f"{message} [{describe_sources(row)}]", **at)


def _describe_remedy(target: Target, key: str) -> str:
    for form, ops in _FORMS[key]:
        if all(_runs(target.row(op)) for op in ops):
            return f"It runs as {form}."
    return "No other form of this norm runs there."


def _runs(row: OpSupport) -> bool:
    return row.support == "yes" and row.opsets[1] is None


def is_supported_form(target: Target, became: str) -> bool:
    """Return False if a rewrite would write an op that the target does not run.

    Args:
        became: form of a finding, such as "LayerNormalization(axis=-1, epsilon=1e-05)" or "Reshape to 2 groups,
            InstanceNormalization(epsilon=1e-05) with Reshape around it".
    """
    return all(op not in target.ops or _runs(target.ops[op]) for op in re.findall(r"\w+", became))
