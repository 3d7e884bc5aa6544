"""ONNX protobufs: what any reader or writer of them needs, the lowest of all that knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx

from ..norms.third_party import is_managed_op

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def attribute_graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """The graphs that an attribute holds, mostly none."""
    if attribute.type == onnx.AttributeProto.GRAPH:
        return [attribute.g]
    return list(attribute.graphs)


def iter_subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of an If, Loop or Scan, and those inside them."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
            yield graph
            for inner in graph.node:
                yield from iter_subgraphs(inner)


def standard_opset(proto: onnx.ModelProto | onnx.FunctionProto) -> onnx.OperatorSetIdProto | None:
    """The line that says in which opset ONNX's own ops are written; None where there is none."""
    return next((o for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def nodes_with_opsets(proto: onnx.ModelProto) -> list[tuple[onnx.NodeProto, int]]:
    """Every node of the graph, its bodies and the file's functions (this project's own are written anew for each
    opset), and the opset that it is written in."""
    listed: list[tuple[onnx.NodeProto, int]] = []
    for holder, nodes in (
        (proto, proto.graph.node),
        *((f, f.node) for f in proto.functions if not is_managed_op(f.domain, f.name)),
    ):
        entry = standard_opset(holder)
        if entry is not None:
            inside = [inner for node in nodes for body in iter_subgraphs(node) for inner in body.node]
            listed += [(n, entry.version) for n in (*nodes, *inside)]
    return listed


def copy_field(out: onnx.ModelProto, field: Any, value: Any) -> None:
    if isinstance(value, (str, bytes, int, float)):
        setattr(out, field.name, value)
    elif hasattr(value, "extend"):
        getattr(out, field.name).extend(value)
    else:
        getattr(out, field.name).CopyFrom(value)


def copy_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy, field by field: a message of more than 2 GB can't be copied as a whole."""
    copy = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            copy_field(copy, field, value)
    for field, value in proto.graph.ListFields():
        copy_field(copy.graph, field, value)
    return copy


def is_meaningless_dim(dim_param: str) -> bool:
    """Whether a dim's name holds no letter, such as "?", "-1" or "*", or is Python's None as text."""
    return bool(dim_param) and (dim_param == "None" or not any(c.isalpha() for c in dim_param))
