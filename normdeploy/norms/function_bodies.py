"""Build the function of an op whose body is stored in the file: one of normdeploy's own ops, or a third-party op.

The body is the only definition of such an op. The written file, the float64 evaluation and the prover all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
import onnx.parser

from .norm_op import NormOp

# Version of the domains of these ops
VERSION = 1
_KINDS: dict[int, tuple[str, type | tuple[type, ...]]] = {
    onnx.AttributeProto.FLOAT: ("FLOAT", float),
    onnx.AttributeProto.INT: ("INT", int),
    onnx.AttributeProto.STRING: ("STRING", (str, bytes)),
    onnx.AttributeProto.FLOATS: ("FLOATS", float),
    onnx.AttributeProto.INTS: ("INTS", int),
}


@lru_cache
def norm_function_body(row: NormOp, opset: int) -> onnx.FunctionProto:
    """Build the function of an op for a file of the given opset (``row.since`` or above).

    Returns:
        the function, cached; don't modify it.

    Raises:
        onnx.parser.ParseError, google.protobuf.message.DecodeError: a package's body is not a function.
    """
    if isinstance(row.body, bytes):
        function = onnx.FunctionProto.FromString(row.body)
        del function.opset_import[:]
        function.opset_import.add(domain="", version=opset)
    else:
        head = f'<opset_import: ["" : {opset}], domain: "{row.domains[0]}">'
        attributes, inputs, outputs = (", ".join(names) for names in (row.attributes, row.inputs, row.outputs))
        if attributes:
            listed = f"<{attributes}> "
        else:
            listed = ""
        function = onnx.parser.parse_function(
            f"{head} {row.op} {listed}({inputs}) => ({outputs}) {{ {_write_reductions(row.body, opset)} }}"
        )
    for node in function.node:
        if node.domain == "ai.onnx":
            node.domain = ""
        if not node.domain:
            # onnx's parser writes the name of the default domain, other tools omit it.
            node.ClearField("domain")
    return function


def call_attributes(node: onnx.NodeProto, given: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the attributes of a node in a function body, for a call of the function with the attributes ``given``.

    Returns:
        values by attribute name.
    """
    return {
        a.name: given[a.ref_attr_name] if a.ref_attr_name else onnx.helper.get_attribute_value(a)
        for a in node.attribute
    }


def _write_reductions(text: str, opset: int) -> str:
    """Replace {mean} and similar fields in ``text`` by reductions in the opset's form.

    From opset 18 on, the axes of a reduction are an input.
    """

    def reduction_text(of: str, to: str, axes: str = "@axes", by: str = "ReduceMean") -> str:
        if opset < 18:
            return f"{to} = {by} <axes: ints = {axes}, keepdims: int = 1> ({of})"
        return (
            f"along_{to} = Constant <value_ints: ints = {axes}> () {to} = {by} <keepdims: int = 1> ({of}, along_{to})"
        )

    places = {
        "{mean}": reduction_text("x", "mean"),
        "{biased}": reduction_text("q", "biased"),
        "{last}": reduction_text("q", "biased", "[-1]"),
        "{length}": reduction_text("x", "length", by="ReduceL2"),
        "{largest}": reduction_text("magnitude", "top", "[-1]", by="ReduceMax"),
    }
    for place, written in places.items():
        text = text.replace(place, written)
    return text


def rename_colliding_inputs(function: onnx.FunctionProto, calls: Iterable[onnx.NodeProto]) -> onnx.FunctionProto:
    """Rename inputs of a function that have the name of a tensor that a call passes.

    TensorRT-RTX's parser (1.7) confuses the names of a function's inputs with the names of passed tensors. For F(X,
    residual) = X − residual, called as F(a, X), it first lets X be a, then looks up the passed X and finds a. So it
    silently computes a − a. TensorRT's parser was not tested.

    Returns:
        a renamed copy, or ``function`` itself if no name collides.
    """
    given = {name for node in calls for name in node.input}
    clashing = [name for name in function.input if name in given]
    if not clashing:
        return function
    renamed = onnx.FunctionProto()
    renamed.CopyFrom(function)
    inner = list(_nodes_with_bodies(renamed.node))
    taken = given | {*function.input} | {name for node in inner for name in (*node.input, *node.output)}
    names = {}
    for name in clashing:
        names[name] = f"{name}_given"
        while names[name] in taken:
            names[name] += "_"
        taken.add(names[name])
    renamed.input[:] = [names.get(name, name) for name in function.input]
    renamed.output[:] = [names.get(name, name) for name in function.output]
    for node in inner:
        node.input[:] = [names.get(name, name) for name in node.input]
        for output in (o for a in node.attribute for body in (a.g, *a.graphs) for o in body.output):
            output.name = names.get(output.name, output.name)
    for value in renamed.value_info:
        value.name = names.get(value.name, value.name)
    return renamed


def functions_to_rename(proto: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """List the functions that `rename_colliding_inputs` would change.

    Returns:
        the functions of ``proto`` that have colliding names.
    """
    calls = calls_by_function(proto)
    return [f for f in proto.functions if rename_colliding_inputs(f, calls.get((f.domain, f.name), ())) is not f]


def calls_by_function(proto: onnx.ModelProto) -> dict[tuple[str, str], list[onnx.NodeProto]]:
    """Find the nodes that call each function, including calls in functions and in bodies.

    Returns:
        the calling nodes, keyed by (domain, name) of the function.
    """
    named = {(f.domain, f.name) for f in proto.functions}
    calls: dict[tuple[str, str], list[onnx.NodeProto]] = {}
    for holder in (proto.graph, *proto.functions):
        for node in _nodes_with_bodies(holder.node):
            if (node.domain, node.op_type) in named:
                calls.setdefault((node.domain, node.op_type), []).append(node)
    return calls


def _nodes_with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, and the nodes in the bodies of their subgraphs.

    In valid ONNX, a tensor in a body never has the name of a tensor outside.
    """
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(n for a in node.attribute for body in (a.g, *a.graphs) for n in body.node)


def describe_missing(row: NormOp, inputs: Sequence[str], attributes: Mapping[str, object]) -> list[str]:
    """List the inputs that a call of an op omits, and the attributes that it omits or passes with a wrong type.

    Args:
        inputs: names of the passed tensors; "" for an omitted input.
        attributes: values by name; None if the caller of the surrounding function supplies the value.

    Returns:
        one phrase for each, for example "the attribute 'axis' as INT".
    """
    function = norm_function_body(row, row.since)
    kinds = {a.ref_attr_name: a.type for node in function.node for a in node.attribute if a.ref_attr_name}
    without = [name for i, name in enumerate(function.input) if i >= len(inputs) or not inputs[i]]
    wrong = [n for n in function.attribute if n in kinds and not _has_attribute_type(kinds[n], attributes.get(n))]
    return [
        *(f"the input {name!r}" for name in without),
        *(f"the attribute {name!r}" for name in function.attribute if name not in attributes),
        *(f"the attribute {name!r} as {_KINDS[kinds[name]][0]}" for name in wrong),
    ]


def _has_attribute_type(kind: int, value: object) -> bool:
    if value is None or kind not in _KINDS:
        return True
    name, python = _KINDS[kind]
    if name.endswith("S"):
        return isinstance(value, list | tuple) and all(isinstance(v, python) for v in value)
    return isinstance(value, python)
