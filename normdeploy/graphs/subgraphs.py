"""Open graphs inside a file as models: bodies of If, Loop and Scan, and model-local functions.

A body can read the tensors of the graphs around it. The model of a body gets outer constants as initializers and other
outer tensors as inputs. So a norm whose epsilon or gamma is outside the body is still recognized. When the body is
written back, it again reads these tensors from outside.

Undeclared types and shapes are inferred only if they hold in every run. A tensor that a Loop passes from iteration to
iteration keeps its shape if the body returns it with the shape that it received. A function's input has the type and
shape on which all callers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx

from ..storage.proto_traversal import FunctionKey, attribute_graphs, attribute_value, functions_by_key
from .dims import Dims, Type, Types
from .proto_queries import called_functions, captured_names, constant_tensors, value_info_type
from .shape_inference import infer_types


@dataclass(frozen=True)
class Subgraph:
    """Graph inside a file.

    Attributes:
        place: location as findings show it.
        model: the graph as a model.
        put_back: writes the rewritten model into the file.
    """

    place: str
    model: onnx.ModelProto
    put_back: Callable[[onnx.ModelProto], None]


@dataclass(frozen=True)
class _Surroundings:
    """Graph around a body: the types of its tensors, its constants, and the functions of its file."""

    proto: onnx.ModelProto
    types: Types
    constants: Mapping[str, onnx.TensorProto]
    functions: Mapping[FunctionKey, onnx.FunctionProto]


def body_subgraphs(proto: onnx.ModelProto) -> Iterator[Subgraph]:
    """Open the bodies directly inside the main graph. To open deeper bodies, call this on each opened body.

    Yields: each body as a subgraph; changes are written back into ``proto``.
    """
    holders = [n for n in proto.graph.node if any(attribute_graphs(a) for a in n.attribute)]
    if not holders:
        return
    constants = {t.name: t for t in proto.graph.initializer} | constant_tensors(proto.graph)
    around = _Surroundings(proto, infer_types(proto), constants, functions_by_key(proto))
    for node in holders:
        for attribute in node.attribute:
            for i, body in enumerate(attribute_graphs(attribute)):
                which = attribute.name + (f"[{i}]" if len(attribute.graphs) else "")
                given = _body_input_types(around, node, body)
                place = f"{which} of {node.op_type} {node.name or node.output[0]!r}"
                yield _make_body_subgraph(around, body, place, given)


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
        """Write the result into the body, without the constants of the outer graph."""
        graph = result.graph
        for field, kept in (
            ("node", graph.node),
            ("initializer", [t for t in graph.initializer if t.name not in outside]),
            ("sparse_initializer", graph.sparse_initializer),
            ("value_info", graph.value_info),
        ):
            # Copy the new items before the old ones are deleted, because they may be the same objects.
            items = list(kept)
            del getattr(body, field)[:]
            getattr(body, field).extend(items)

    return Subgraph(place, model, put_back)


def _outer_names(body: onnx.GraphProto) -> list[str]:
    """Return the names that a body, or one inside it, reads from outside, sorted."""
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
    """Build the value_info of a tensor.

    Args:
        kind: elem_type; None if unknown.
        dims: None if the rank is unknown.

    Returns: a value_info without a type if ``kind`` is None.
    """
    if kind is None:
        return onnx.ValueInfoProto(name=name)
    return onnx.helper.make_tensor_value_info(name, kind, dims)


# ------------------------------------------------------------------ inputs of a body


def _body_input_types(around: _Surroundings, node: onnx.NodeProto, body: onnx.GraphProto) -> Types:
    """Return the types of a body's inputs. A type comes from the body's declaration, or else from the inputs of its
    node.
    """
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
    """Remove from ``given`` the shapes of carried tensors that an iteration may change."""
    while any(given[name][1] is not None for name in carried):
        after = infer_types(_make_body_subgraph(around, body, "", given).model)
        changed = [n for n, out in carried.items() if given[n][1] is not None and after[out][1] != given[n][1]]
        if not changed:
            break
        for name in changed:
            given[name] = (given[name][0], None)
    return given
