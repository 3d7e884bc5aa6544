"""The function of an op whose body travels in the file: one of ours, or one that an installed package brings.

Whoever needs to know what such an op computes reads it here: the file that is written, the evaluation in float64, and
the prover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
import onnx.parser

from .norm_op import NormOp

# of the domains of such ops
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
    """The function of an op for a file of the given opset (``row.since`` or above); don't write into it.

    Raises:
        onnx.parser.ParseError, google.protobuf.message.DecodeError: a package's body is no function.
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
            # the parser writes the default one, other tools leave it out
            node.ClearField("domain")
    return function


def call_attributes(node: onnx.NodeProto, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a node of a function's body, where the function is called with the attributes
    ``given``."""
    return {
        a.name: given[a.ref_attr_name] if a.ref_attr_name else onnx.helper.get_attribute_value(a)
        for a in node.attribute
    }


def _write_reductions(text: str, opset: int) -> str:
    """``text`` with its {mean} and the like written as the opset has them: from 18 on the axes are an input."""

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
    """The function with inputs that bear no name of a tensor that a call gives; it itself where none does.

    TensorRT-RTX's parser (1.7) looks each given tensor up after it has named the ones before it: of F(X, residual) =
    X − residual, called as F(a, X), it makes a − a, without a word. TensorRT's was not asked.
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
    """The functions of which `rename_colliding_inputs` would rename inputs."""
    calls = calls_by_function(proto)
    return [f for f in proto.functions if rename_colliding_inputs(f, calls.get((f.domain, f.name), ())) is not f]


def calls_by_function(proto: onnx.ModelProto) -> dict[tuple[str, str], list[onnx.NodeProto]]:
    """The nodes that call each function, in functions and in bodies too; by domain and name."""
    named = {(f.domain, f.name) for f in proto.functions}
    calls: dict[tuple[str, str], list[onnx.NodeProto]] = {}
    for holder in (proto.graph, *proto.functions):
        for node in _nodes_with_bodies(holder.node):
            if (node.domain, node.op_type) in named:
                calls.setdefault((node.domain, node.op_type), []).append(node)
    return calls


def _nodes_with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those in their bodies. A body that names a tensor of its own like one outside is no valid ONNX."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(n for a in node.attribute for body in (a.g, *a.graphs) for n in body.node)


def describe_missing(row: NormOp, inputs: Sequence[str], attributes: Mapping[str, object]) -> list[str]:
    """What a call of an op leaves out or gives in another type than it takes, in words.

    ``inputs`` are the names given, "" where one is not; ``attributes`` their values, None where the caller of a
    function gives one.
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
