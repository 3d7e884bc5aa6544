"""Hide nodes from third-party passes that would misread them.

The passes look ops up by domain. A hidden node gets a domain that no pass knows, so the passes copy it unchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from .node_matching import constant_array

_HIDDEN = "normdeploy.hidden"


@contextlib.contextmanager
def hide_nodes(nodes: Iterable[ir.Node]) -> Iterator[None]:
    """Hide ``nodes`` from passes by giving each node a unique domain.

    Yields: nothing; the domains are restored at the end.
    """
    domains = [(node, node.domain) for node in nodes]
    for number, (node, _) in enumerate(domains):
        node.domain = f"{_HIDDEN}.{number}"
    try:
        yield
    finally:
        for node, domain in domains:
            node.domain = domain


def find_misread_by_folding(model: ir.Model) -> list[ir.Node]:
    """Find the nodes that onnxscript's partial evaluators misread.

    Returns: nodes of the main graph and of all bodies.
    """
    sums = any("+" in str(dim) for value in model.graph.inputs if value.shape is not None for dim in value.shape)
    opset = model.opset_imports.get("", 0)
    found = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        check = _MISREAD.get(node.op_type)
        if node.domain == "" and check is not None and check(node, opset):
            found.append(node)
        elif sums and node.op_type == "Add" and node.domain == "" and _may_be_int64(node.outputs[0]):
            # The evaluators name the sum of dims a and b "a+b", which is the name of another dim here.
            found.append(node)
    return found


def find_misread_by_merging(model: ir.Model) -> list[ir.Node]:
    """Find the nodes that onnx_ir's elimination of common subexpressions misreads.

    The elimination treats attributes 0.0 and -0.0 as equal, compares strings by address, and confuses an omitted output
    with a present one.

    Returns: nodes of the main graph.
    """
    return [
        node
        for node in model.graph
        if any(not value.name for value in node.outputs) or any(map(_is_ambiguous_attribute, node.attributes.values()))
    ]


def _is_ambiguous_attribute(attribute: ir.Attr) -> bool:
    if attribute.is_ref():
        return True
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().dtype == ir.DataType.STRING
    if attribute.type == ir.AttributeType.FLOATS:
        numbers = attribute.value
    else:
        numbers = (attribute.value,)
    floats = attribute.type in {ir.AttributeType.FLOAT, ir.AttributeType.FLOATS}
    return floats and any(number == 0 and math.copysign(1, number) < 0 for number in numbers)


def _may_be_int64(value: ir.Value | None) -> bool:
    """Return whether ``value`` may be an int64 tensor, which the evaluators treat as a shape."""
    return value is None or value.dtype is None or value.dtype == ir.DataType.INT64


def _misreads_abs(node: ir.Node, opset: int) -> bool:
    # The evaluators assume that every dim is positive, and that a dim plus a negative number is positive too.
    return _may_be_int64(node.inputs[0]) and constant_array(node.inputs[0]) is None


def _misreads_cast_like(node: ir.Node, opset: int) -> bool:
    # The evaluator replaces CastLike by a Cast and loses the attributes.
    return bool(node.attributes)


def _misreads_reshape(node: ir.Node, opset: int) -> bool:
    # If a shape is reshaped to a matrix, the evaluator still treats the matrix as a vector of sizes.
    x = node.inputs[0]
    if (
        not _may_be_int64(x)
        or constant_array(x) is not None
        or (x is not None and x.shape is not None and len(x.shape) > 1)
    ):
        return False
    if len(node.inputs) > 1:
        wanted = constant_array(node.inputs[1])
    else:
        wanted = None
    return wanted is None or wanted.size > 1


def _misreads_split_to_sequence(node: ir.Node, opset: int) -> bool:
    # The evaluator may write a Split with ``num_outputs``, which opset 18 introduced. On an empty axis, it would write
    # a Split without parts.
    x = node.inputs[0]
    axis = node.attributes.get_int("axis", 0)
    empty = x is None or x.shape is None or not -len(x.shape) <= axis < len(x.shape) or x.shape[axis] == 0
    return opset < 18 or empty


def _misreads_if(node: ir.Node, opset: int) -> bool:
    # A branch is inlined wrongly if it returns a value that its own nodes do not compute, or the same value twice.
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            return True
        branch = attribute.as_graph()
        outputs = list(branch.outputs)
        own = all(value.producer() is not None and value.producer().graph is branch for value in outputs)  # type: ignore[union-attr]
        if not own or len(set(outputs)) != len(outputs):
            return True
    return False


_MISREAD = {
    "Abs": _misreads_abs,
    "CastLike": _misreads_cast_like,
    "If": _misreads_if,
    "Reshape": _misreads_reshape,
    "SplitToSequence": _misreads_split_to_sequence,
}
