"""Move Casts to half precision after the Transposes that read them.

A Cast and a Transpose commute. If a Cast and a Transpose precede a MatMul, onnxruntime's MatmulTransposeFusion (1.31.1)
swaps them itself, and then crashes or builds a graph that does not run.
"""

from __future__ import annotations

import onnx

from ..storage.proto_traversal import unique_name
from .type_conversion import HalfFormat


def move_casts_behind_transposes(graph: onnx.GraphProto, form: HalfFormat) -> None:
    """Write Transpose(Cast(x)) as Cast(Transpose(x)), in place, and remove Casts without readers."""
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {v.name for v in graph.output}
    taken = set(makers) | {t.name for t in (*graph.input, *graph.initializer)}
    nodes: list[onnx.NodeProto] = []
    moved: set[str] = set()
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Transpose":
            cast = makers.get(node.input[0])
        else:
            cast = None
        if cast is None or cast.op_type != "Cast" or not _is_narrowing_cast(cast, form):
            continue
        made = node.output[0]
        wide = unique_name(f"{made}_float32", taken)
        moved.add(cast.output[0])
        node.input[0] = cast.input[0]
        node.output[0] = wide
        nodes.append(onnx.helper.make_node("Cast", [wide], [made], name=f"cast_{made}", to=form.onnx))
        makers[made] = nodes[-1]
    read = {name for node in nodes for name in node.input} | outputs
    kept = [n for n in nodes if n.op_type != "Cast" or n.output[0] not in moved or n.output[0] in read]
    del graph.node[:]
    graph.node.extend(kept)


def _is_narrowing_cast(cast: onnx.NodeProto, form: HalfFormat) -> bool:
    return any(a.name == "to" and a.i == form.onnx for a in cast.attribute)
