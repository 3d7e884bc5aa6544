"""Graphs inside a file: bodies of If, Loop and Scan, and model-local functions, each as a model of its own.

A body sees the tensors around it. As a model of its own it gets the constants among them as initializers, so that a
norm whose epsilon or gamma lies outside is still one, and the others as inputs. Put back, it takes them from outside
again.

What is not written in the file is inferred, and only where it must hold: what a Loop carries keeps its shape if the
body gives back the shape that it is given (induction over the iterations); a function's input has what all its callers
agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx

from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import FunctionKey, attribute_graphs, attribute_value, functions_by_key
from .dims import Dims, Type, Types
from .proto_queries import called_functions, captured_names, value_info_type
from .shape_inference import infer_types

# element type and shape, None where unknown


@dataclass(frozen=True)
class Subgraph:
    """A graph inside a file. ``put_back`` takes the model that has become of ``model``."""

    place: str
    model: onnx.ModelProto
    put_back: Callable[[onnx.ModelProto], None]


@dataclass(frozen=True)
class _Surroundings:
    """A graph as its bodies see it: the types of its tensors, its constants and the functions of its file."""

    proto: onnx.ModelProto
    types: Types
    constants: Mapping[str, onnx.TensorProto]
    functions: Mapping[FunctionKey, onnx.FunctionProto]


def body_subgraphs(proto: onnx.ModelProto) -> Iterator[Subgraph]:
    """The bodies directly inside ``proto``'s graph (theirs are found when they are opened in turn); put back into
    ``proto`` itself."""
    holders = [n for n in proto.graph.node if any(attribute_graphs(a) for a in n.attribute)]
    if not holders:
        return
    around = _Surroundings(proto, infer_types(proto), _constant_tensors(proto), functions_by_key(proto))
    for node in holders:
        for attribute in node.attribute:
            for i, body in enumerate(attribute_graphs(attribute)):
                which = attribute.name + (f"[{i}]" if len(attribute.graphs) else "")
                given = _body_input_types(around, node, body)
                place = f"{which} of {node.op_type} {node.name or node.output[0]!r}"
                yield _make_body_subgraph(around, body, place, given)


def _constant_tensors(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers and the tensors of Constant nodes."""
    constants = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant" and is_standard(node):
            value = attribute_value(node, "value")
            if value is not None:
                constants[node.output[0]] = value
    return constants


def _make_body_subgraph(around: _Surroundings, body: onnx.GraphProto, place: str, given: Types) -> Subgraph:
    model = onnx.ModelProto(
        ir_version=around.proto.ir_version,
        opset_import=around.proto.opset_import,
        functions=called_functions(around.functions, body),
    )
    model.graph.CopyFrom(body)
    for i, stated in enumerate(body.input):
        model.graph.input[i].CopyFrom(make_value_info(stated.name, *given[stated.name]))
    outside = _outer_names(body)
    replaceable = {i.name for i in around.proto.graph.input}
    for name in outside:
        if name in around.constants:
            model.graph.initializer.append(around.constants[name])
            model.graph.initializer[-1].name = name
        if name not in around.constants or name in replaceable:
            model.graph.input.append(make_value_info(name, *around.types[name]))

    def put_back(result: onnx.ModelProto) -> None:
        graph = result.graph
        for field, kept in (
            ("node", graph.node),
            ("initializer", [t for t in graph.initializer if t.name not in outside]),
            ("sparse_initializer", graph.sparse_initializer),
            ("value_info", graph.value_info),
        ):
            # before the old ones go
            items = list(kept)
            del getattr(body, field)[:]
            getattr(body, field).extend(items)

    return Subgraph(place, model, put_back)


def _outer_names(body: onnx.GraphProto) -> list[str]:
    """The names that a body, or one inside it, takes from around it; in order."""
    own = {i.name for i in (*body.input, *body.initializer)} | {s.values.name for s in body.sparse_initializer}
    own |= {o for n in body.node for o in n.output}
    read = (
        {i for n in body.node for i in n.input}
        | {o.name for o in body.output}
        | {c for n in body.node for c in captured_names(n)}
    )
    inner = {o for n in body.node for a in n.attribute for g in attribute_graphs(a) for o in _inner_names(g)}
    return sorted(read - own - inner - {""})


def _inner_names(body: onnx.GraphProto) -> Iterator[str]:
    yield from (i.name for i in (*body.input, *body.initializer))
    for node in body.node:
        yield from node.output
        for attribute in node.attribute:
            for graph in attribute_graphs(attribute):
                yield from _inner_names(graph)


def make_value_info(name: str, kind: int | None, dims: Dims | None) -> onnx.ValueInfoProto:
    """The value_info of a tensor whose type or shape need not be known."""
    if kind is None:
        return onnx.ValueInfoProto(name=name)
    return onnx.helper.make_tensor_value_info(name, kind, dims)


# ------------------------------------------------------------------ inputs of a body


def _body_input_types(around: _Surroundings, node: onnx.NodeProto, body: onnx.GraphProto) -> Types:
    """What the inputs of a body are: as stated there, else as the node's own inputs tell."""
    stated = Types({i.name: value_info_type(i) for i in body.input})
    outer = [around.types[name] for name in node.input]
    inputs = [i.name for i in body.input]
    known_types: dict[str, Type] = {}
    if node.op_type == "Loop":
        known_types = dict(
            zip(inputs, [(onnx.TensorProto.INT64, ()), (onnx.TensorProto.BOOL, ()), *outer[2:]], strict=False)
        )
        carried = dict(zip(inputs[2:], (o.name for o in body.output[1:]), strict=False))
    elif node.op_type == "Scan":
        scanned = attribute_value(node, "num_scan_inputs", 0)
        axes = attribute_value(node, "scan_input_axes", [0] * scanned)
        states = len(inputs) - scanned
        slices = [_drop_axis(t, axis) for t, axis in zip(outer[states:], axes, strict=False)]
        known_types = dict(zip(inputs, [*outer[:states], *slices], strict=False))
        carried = dict(zip(inputs[:states], (o.name for o in body.output), strict=False))
    else:
        return stated
    for name, (kind, dims) in known_types.items():
        known, shape = stated[name]
        known_types[name] = (known or kind, dims if shape is None else shape)
    free = {n: out for n, out in carried.items() if stated[n][1] is None}
    return _drop_variant_shapes(around, body, Types({**stated, **known_types}), free)


def _drop_axis(scanned: Type, axis: int) -> Type:
    kind, dims = scanned
    return kind, None if dims is None else tuple(d for k, d in enumerate(dims) if k != axis % len(dims))


def _drop_variant_shapes(
    around: _Surroundings, body: onnx.GraphProto, given: Types, carried: Mapping[str, str]
) -> Types:
    """``given`` without the shapes of carried tensors that an iteration may change."""
    while any(given[name][1] is not None for name in carried):
        after = infer_types(_make_body_subgraph(around, body, "", given).model)
        changed = [n for n, out in carried.items() if given[n][1] is not None and after[out][1] != given[n][1]]
        if not changed:
            break
        for name in changed:
            given[name] = (given[name][0], None)
    return given
