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
from .dims import Dims
from .proto_queries import called_functions, captured_names, value_info_type
from .shape_inference import infer_types

# element type and shape, None where unknown
Type = tuple[int | None, Dims | None]
Types = Mapping[str, Type]


@dataclass(frozen=True)
class Subgraph:
    """A graph inside a file. ``put_back`` takes the model that has become of ``model``."""

    place: str
    model: onnx.ModelProto
    put_back: Callable[[onnx.ModelProto], None]


def body_subgraphs(proto: onnx.ModelProto) -> Iterator[Subgraph]:
    """The bodies directly inside ``proto``'s graph (theirs are found when they are opened in turn); put back into
    ``proto`` itself."""
    holders = [n for n in proto.graph.node if any(attribute_graphs(a) for a in n.attribute)]
    if not holders:
        return
    types = infer_types(proto)
    constants = _constant_tensors(proto)
    defined = functions_by_key(proto)
    for node in holders:
        for attribute in node.attribute:
            for i, body in enumerate(attribute_graphs(attribute)):
                which = attribute.name + (f"[{i}]" if len(attribute.graphs) else "")
                given = _body_input_types(proto, node, body, types, constants)
                place = f"{which} of {node.op_type} {node.name or node.output[0]!r}"
                yield _make_body_subgraph(proto, defined, body, place, types, constants, given)


def _constant_tensors(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The initializers and the tensors of Constant nodes."""
    constants = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant" and is_standard(node):
            value = attribute_value(node, "value")
            if value is not None:
                constants[node.output[0]] = value
    return constants


def _make_body_subgraph(
    proto: onnx.ModelProto,
    defined: Mapping[FunctionKey, onnx.FunctionProto],
    body: onnx.GraphProto,
    place: str,
    types: Types,
    constants: Mapping[str, onnx.TensorProto],
    given: Types,
) -> Subgraph:
    model = _body_model(proto, defined, body)
    for i, stated in enumerate(body.input):
        model.graph.input[i].CopyFrom(make_value_info(stated.name, *given.get(stated.name, (None, None))))
    outside = _outer_names(body)
    replaceable = {i.name for i in proto.graph.input}
    for name in outside:
        if name in constants:
            model.graph.initializer.append(constants[name])
            model.graph.initializer[-1].name = name
        if name not in constants or name in replaceable:
            model.graph.input.append(make_value_info(name, *types.get(name, (None, None))))

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


def _body_model(
    proto: onnx.ModelProto, defined: Mapping[FunctionKey, onnx.FunctionProto], body: onnx.GraphProto
) -> onnx.ModelProto:
    model = onnx.ModelProto(
        ir_version=proto.ir_version, opset_import=proto.opset_import, functions=called_functions(defined, body)
    )
    model.graph.CopyFrom(body)
    return model


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


def _body_input_types(
    proto: onnx.ModelProto,
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    types: Types,
    constants: Mapping[str, onnx.TensorProto],
) -> Types:
    """What the inputs of a body are: as stated there, else as the node's own inputs tell."""
    stated = {i.name: value_info_type(i) for i in body.input}
    outer = [types.get(name, (None, None)) for name in node.input]
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
    return _drop_variant_shapes(proto, body, {**stated, **known_types}, free, types, constants)


def _drop_axis(scanned: Type, axis: int) -> Type:
    kind, dims = scanned
    return kind, None if dims is None else tuple(d for k, d in enumerate(dims) if k != axis % len(dims))


def _drop_variant_shapes(
    proto: onnx.ModelProto,
    body: onnx.GraphProto,
    given: dict[str, Type],
    carried: Mapping[str, str],
    types: Types,
    constants: Mapping[str, onnx.TensorProto],
) -> Types:
    """``given`` without the shapes of carried tensors that an iteration may change."""
    defined = functions_by_key(proto)
    while any(given[name][1] is not None for name in carried):
        after = infer_types(_make_body_subgraph(proto, defined, body, "", types, constants, given).model)
        changed = [
            n
            for n, out in carried.items()
            if given[n][1] is not None and after.get(out, (None, None))[1] != given[n][1]
        ]
        if not changed:
            break
        for name in changed:
            given[name] = (given[name][0], None)
    return given
