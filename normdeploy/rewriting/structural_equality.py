"""Compare the body of one of normdeploy's own ops with the nodes that the op replaces.

The body and the nodes are equal if they have the same ops and attributes on the same tensors, in the same order.
Nothing is evaluated, so non-algebraic ops are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..graphs.graph import Graph
from ..graphs.own_op_functions import DOMAIN
from ..norms.function_bodies import call_attributes, norm_function_body
from ..norms.norm_table import OURS, NormOp

# Attribute of QuantizeLinear → value at which it has no effect
_NEUTRAL: Mapping[str, Any] = {"saturate": 1, "block_size": 0, "precision": 0}


def describe_difference(graph: Graph, row: NormOp, made: gs.Node, old: Sequence[gs.Node]) -> str | None:
    """Compare the body of ``made`` with the ``old`` nodes, in their order.

    Tensors are compared by identity, not by name; constants of one element are compared by value.

    Returns:
        description of the difference; None if they are equal.
    """
    opset = max(graph.opset, row.since)
    before = list(_flatten_nodes(graph, old, opset))
    after = list(_flatten_nodes(graph, [made], opset))
    if [n.op for n in before] != [n.op for n in after]:
        return f"the nodes {' '.join(n.op for n in before)} differ from the nodes of {row.op}"
    same: dict[object, object] = {}
    for theirs, ours in zip(before, after, strict=True):
        if theirs.attrs != ours.attrs:
            return f"its {theirs.op} has the attributes {theirs.attrs}; in {row.op}, they are {ours.attrs}"
        given = [same.get(i, i) for i in theirs.inputs]
        # The rewrite may have added a bias of zeros, which the original nodes do not have.
        given += [i for i in ours.inputs[len(given) :] if _is_own_zeros(graph, made, i)]
        if given != list(ours.inputs):
            return f"its {theirs.op} reads tensors that differ from those in {row.op}"
        same.update(zip(theirs.outputs, ours.outputs, strict=False))
    kept = [same.get(id(t)) for n in old for t in n.outputs]
    ends = [id(t) for t in made.outputs]
    if all(end in kept for end in ends):
        return None
    return f"its results differ from those of {row.op}"


@dataclass(frozen=True)
class _FlatNode:
    """Standard node with all effective attributes.

    Attributes:
        op: op type.
        attrs: attributes, with defaults.
        inputs: key of each tensor: its id in the graph, or (id of the call, name) within a body.
        outputs: keys as for ``inputs``.
    """

    op: str
    attrs: dict[str, Any]
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


def _flatten_nodes(graph: Graph, nodes: Sequence[gs.Node], opset: int) -> Iterator[_FlatNode]:
    """Yield nodes, with normdeploy's own ops replaced by their bodies."""
    for node in nodes:
        if node.domain == DOMAIN:
            row = OURS.get(node.op)
        else:
            row = None
        inputs = [_tensor_key(graph, t) for t in node.inputs]
        while inputs and inputs[-1] == ():
            inputs.pop()
        if row is None:
            attrs = full_attributes(node.op, graph.attrs(node), opset)
            yield _FlatNode(node.op, attrs, tuple(inputs), tuple(id(t) for t in node.outputs))
            continue
        function = norm_function_body(row, opset)
        own = graph.attrs(node)
        names: dict[str, object] = dict(zip(function.input, inputs, strict=True))
        names |= {name: id(t) for name, t in zip(function.output, node.outputs, strict=False)}
        for inner in function.node:
            attrs = call_attributes(inner, own)
            if inner.op_type == "Constant":
                (value,) = attrs.values()
                names[inner.output[0]] = _constant_key(np.asarray(value))
                continue
            read, made = (tuple(names.get(n, (id(node), n)) for n in ns) for ns in (inner.input, inner.output))
            yield _FlatNode(inner.op_type, full_attributes(inner.op_type, attrs, opset), read, made)


def full_attributes(op: str, given: Mapping[str, Any], opset: int) -> dict[str, Any]:
    """Complete the attributes of a standard node with their defaults.

    Returns:
        all attributes; for QuantizeLinear with one scale, without those that change nothing.
    """
    schema = onnx.defs.get_schema(op, opset)
    known = {
        name: onnx.helper.get_attribute_value(a.default_value)
        for name, a in schema.attributes.items()
        if a.default_value.name
    }
    known |= given
    if op == "QuantizeLinear":
        known = {k: v for k, v in known.items() if k not in ("axis", "output_dtype") and _NEUTRAL.get(k) != v}
    return known


def _tensor_key(graph: Graph, t: gs.Tensor) -> object:
    if t.is_empty():
        return ()
    if isinstance(t, gs.Constant):
        value = t.values
    else:
        value = None
    if isinstance(value, np.ndarray) and value.size == 1:
        return _constant_key(value)
    return id(t)


def _constant_key(value: np.ndarray) -> object:
    """Return the key of a constant of one element. Integers and float32 are exact; a float16 never equals a float32."""
    # onnx returns a float attribute as a Python float.
    kind = {"f8": "f4"}.get(value.dtype.str[1:], value.dtype.str[1:])
    if value.dtype.kind in "iuf":
        return (kind, value.shape, value.astype(kind).tobytes())
    return (kind, value.tobytes())


def _is_own_zeros(graph: Graph, made: gs.Node, tensor: object) -> bool:
    """Return True if an input of ``made`` is a constant of zeros."""
    t = next((t for t in made.inputs if id(t) == tensor), None)
    if isinstance(t, gs.Constant):
        value = graph.known_value(t)
    else:
        value = None
    return value is not None and not value.any()
