"""Sort nodes into the topological order that ONNX requires. Some tools write another order.

For example, onnxruntime's float16 converter appends its Casts at the end of the list. onnxruntime itself accepts such a
file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from ..errors import GraphError
from .proto_traversal import attribute_graphs, copy_model, iter_bodies


def with_sorted_nodes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose nodes are in topological order, in its graph, bodies and functions.

    Returns:
        ``proto`` itself if the nodes are in order already, else a sorted copy.

    Raises:
        GraphError: the nodes form a cycle.
    """
    if all(_find_node_order(holder) is None for holder in iter_bodies(proto)):
        return proto
    copy = copy_model(proto)
    sort_nodes(copy)
    return copy


def sort_nodes(proto: onnx.ModelProto) -> bool:
    """Sort the nodes of ``proto`` in place, each before the nodes that read its outputs. Nodes that need not move keep
    their order.

    Returns:
        True if a node moved.

    Raises:
        GraphError: the nodes form a cycle.
    """
    moved = False
    # Sort inner bodies before the bodies around them, because moving a node copies its bodies.
    for holder in [*iter_bodies(proto)][::-1]:
        order = _find_node_order(holder)
        if order is not None:
            moved = True
            nodes = list(holder.node)
            del holder.node[:]
            holder.node.extend(nodes[i] for i in order)
    return moved


def _find_node_order(holder: onnx.GraphProto | onnx.FunctionProto) -> list[int] | None:
    """Find an order of node indices in which each node follows the nodes it reads; None if the nodes already have such
    an order.
    """
    if isinstance(holder, onnx.FunctionProto):
        given = set(holder.input)
    else:
        given = {t.name for t in (*holder.input, *holder.initializer)}
    made: dict[str, int] = {}
    for i, node in enumerate(holder.node):
        for name in node.output:
            # Two nodes with the same output are not an error here, because a later check refuses them.
            if name and name not in given:
                made.setdefault(name, i)
    if all(made.get(name, -1) < i for i, node in enumerate(holder.node) for name in iter_read_names(node)):
        return None
    above = [{made[name]: name for name in iter_read_names(node) if name in made} for node in holder.node]
    return _sort_depth_first(holder.node, above)


def iter_read_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads.

    These include the outer names that the node's bodies read. If a body reuses an outer name for its own tensor, this
    name is left out.
    """
    yield from node.input
    for attribute in node.attribute:
        for body in attribute_graphs(attribute):
            own = {t.name for t in (*body.input, *body.initializer)} | {o for n in body.node for o in n.output}
            yield from {*(o.name for o in body.output), *(name for n in body.node for name in iter_read_names(n))} - own


def _sort_depth_first(nodes: Sequence[onnx.NodeProto], above: Sequence[dict[int, str]]) -> list[int]:
    """Sort nodes depth first, in linear time. Each node comes after the nodes whose outputs it reads, and nodes already
    in order keep their positions.
    """
    order: list[int] = []
    begun = [False] * len(nodes)
    done = [False] * len(nodes)
    for first in range(len(nodes)):
        if done[first]:
            path = []
        else:
            path = [(first, iter(above[first]))]
        while path:
            i, rest = path[-1]
            begun[i] = True
            j = next((j for j in rest if not done[j]), None)
            if j is None:
                done[i] = True
                order.append(i)
                path.pop()
            elif begun[j]:
                raise GraphError(_describe_cycle(nodes[j], above[i][j], nodes[i]))
            else:
                path.append((j, iter(above[j])))
    return order


def _describe_cycle(node: onnx.NodeProto, tensor: str, reader: onnx.NodeProto) -> str:
    if reader is node:
        way = ""
    else:
        way = f" through {reader.op_type} {reader.name or reader.output[0]!r}"
    message = f"{node.op_type} {node.name or node.output[0]!r} needs its own result {tensor!r}{way}"
    return f"{message}: the nodes form a cycle, so they can't be computed; use unique tensor names"
