"""Match nodes that quantize each row with a separate scale, in the spellings that users write:

    y_scale = max(max|y|, least) / largest            Abs, ReduceMax over the last axis, Max or Clip, Div
    q       = saturate(round(y / y_scale))            Div, then Round, Clip and Cast to int8; Clip and Cast to FP8; or
                                                      QuantizeLinear with scale 1

``largest`` is 127 for int8 and 448 for FP8 (E4M3). Round, Clip and Cast equal QuantizeLinear with scale 1 and zero
point 0 by its definition, saturate(round(x / 1)). |y| / y_scale ≤ largest, so the result is the same with and without a
Clip at −largest. Only NaN differs: ONNX leaves the Cast of NaN to int8 undefined. If ``least`` is above 0, rows of
finite numbers give no NaN. If ``least`` is 0, a row of zeros gives 0 / 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from ..graphs.graph import Graph
from .node_queries import constant_number, is_standard_op, sole_consumer, standard_producer

_KINDS = {TensorProto.INT8: ("int8", 127.0), TensorProto.FLOAT8E4M3FN: ("float8_e4m3fn", 448.0)}


@dataclass(frozen=True)
class RowQuantization:
    """Nodes from a norm's result ``y`` to its quantized rows.

    Attributes:
        y: result of the norm.
        readers: nodes that read ``y``.
        kind: dtype of the quantized rows.
        least: lower bound of max|y|; 0 for none.
        largest: largest quantized number.
        cast: True for a Cast to int8, which leaves NaN undefined.
        scale: y_scale.
        q: the quantized rows.
    """

    y: gs.Tensor
    readers: tuple[gs.Node, ...]
    kind: np.dtype
    least: float
    largest: float
    cast: bool
    scale: gs.Tensor
    q: gs.Tensor

    @property
    def spelling(self) -> str:
        """Return the op types of the standard spelling."""
        return "Abs ReduceMax Div Div QuantizeLinear"

    def zero_point(self, graph: Graph) -> gs.Tensor:
        """Create the zero point.

        Returns:
            a constant 0 of type ``kind``.
        """
        return graph.add_constant(f"{self.q.name}_zero_point", np.zeros(()), self.kind)

    def build_nodes(self, graph: Graph, y: gs.Tensor, zero: gs.Tensor) -> list[gs.Node]:
        """Build the quantization of ``y`` as in the bodies of normdeploy's own ops, outside the graph.

        Returns:
            the nodes in topological order.
        """
        float32 = np.dtype(np.float32)

        def number_constant(name: str, value: float) -> gs.Tensor:
            return graph.add_constant(f"{self.q.name}_{name}", np.asarray(value), float32)

        made: list[gs.Node] = []

        def append_node(op: str, *inputs: gs.Tensor, **attrs: int) -> gs.Tensor:
            made.append(graph.make_node(op, inputs, self.scale, attrs))
            return made[-1].outputs[0]

        plain = append_node("Cast", y, to=TensorProto.FLOAT)
        axes = graph.add_constant(f"{self.q.name}_axes", np.asarray([-1]), np.dtype(np.int64))
        top = append_node("ReduceMax", append_node("Abs", plain), axes, keepdims=1)
        scale = append_node(
            "Div",
            append_node("Max", top, number_constant("least", self.least)),
            number_constant("largest", self.largest),
        )
        append_node("QuantizeLinear", append_node("Div", plain, scale), number_constant("one", 1.0), zero)
        return made


def match_row_quantization(graph: Graph, node: gs.Node) -> RowQuantization | None:
    """Match the quantization that ends at ``node``, a Cast or QuantizeLinear.

    Returns:
        the match; None if there is none.
    """
    # Before opset 18, the axes of ReduceMax are an attribute.
    if graph.opset < 18:
        return None
    ended = _match_quotient(graph, node)
    if ended is None:
        return None
    quotient, (name, largest) = ended
    div = _single_reader_producer(graph, quotient, "Div")
    bottom = standard_producer(graph, div.inputs[1], "Div") if div is not None else None
    if div is None or bottom is None or constant_number(graph, bottom.inputs[1]) != largest:
        return None
    top = bottom.inputs[0]
    least = 0.0
    clamp = standard_producer(graph, top, "Max", "Clip")
    if clamp is not None:
        bound = (
            constant_number(graph, clamp.inputs[1]) if len(clamp.inputs) == 2 or clamp.inputs[2].is_empty() else None
        )
        if bound is None or bound < 0 or sole_consumer(graph, top) is None:
            return None
        least = bound
        top = clamp.inputs[0]
    reduced = _single_reader_producer(graph, top, "ReduceMax")
    magnitude = (
        _single_reader_producer(graph, reduced.inputs[0], "Abs")
        if reduced is not None and _reduces_last_axis(graph, reduced)
        else None
    )
    plain = div.inputs[0]
    if magnitude is None or magnitude.inputs[0] is not plain or graph.dtype(plain) != np.float32:
        return None
    y = plain
    readers = (magnitude, div)
    cast = standard_producer(graph, plain, "Cast")
    if cast is not None:
        if graph.is_output(plain) or len(graph.consumers(plain)) != 2:
            return None
        y, readers = cast.inputs[0], (cast,)  # type: ignore[assignment]
    cast_of_nan = name == "int8" and node.op == "Cast"
    return RowQuantization(
        y, readers, np.dtype(_dtype_by_name(name)), least, largest, cast_of_nan, bottom.outputs[0], node.outputs[0]
    )


def _match_quotient(graph: Graph, node: gs.Node) -> tuple[gs.Tensor, tuple[str, float]] | None:
    """Return the rounded and saturated tensor, the type, and its largest number; None if ``node`` does not match."""
    if is_standard_op(node, "QuantizeLinear"):
        if len(node.inputs) > 2:
            zero = node.inputs[2]
        else:
            zero = None
        if zero is not None and graph.is_constant(zero):
            known = graph.known_value(zero)
        else:
            known = None
        kinds = {name: (name, largest) for name, largest in _KINDS.values()}
        if zero is not None:
            kind = kinds.get(getattr(graph.dtype(zero), "name", ""))
        else:
            kind = None
        others = {k: v for k, v in graph.attrs(node).items() if (k, v) != ("saturate", 1) and k != "axis"}
        if kind is None or known is None or known.any() or others or constant_number(graph, node.inputs[1]) != 1.0:
            return None
        return node.inputs[0], kind
    attrs = graph.attrs(node)
    kind = _KINDS.get(attrs.get("to", 0))
    if kind is None or attrs.get("saturate", 1) != 1:
        return None
    t = node.inputs[0]
    largest = kind[1]
    clip = _single_reader_producer(graph, t, "Clip")
    if clip is not None:
        low, high = (constant_number(graph, t) for t in (*clip.inputs[1:], gs.Variable.empty())[:2])
        if high != largest or low not in (-largest, -largest - (kind[0] == "int8")):
            return None
        t = clip.inputs[0]
    if kind[0] == "int8":
        rounded = _single_reader_producer(graph, t, "Round")
        if rounded is None:
            return None
        return (rounded.inputs[0], kind)
    return t, kind


def _dtype_by_name(name: str) -> Any:
    if name == "int8":
        return np.int8
    return getattr(ml_dtypes, name)


def _single_reader_producer(graph: Graph, t: gs.Tensor, op: str) -> gs.Node | None:
    """Return the node of type ``op`` that produces ``t``, if only one node reads ``t``."""
    if sole_consumer(graph, t) is not None:
        return standard_producer(graph, t, op)
    return None


def _reduces_last_axis(graph: Graph, reduced: gs.Node) -> bool:
    """Return True if the node reduces only the last axis, and keeps it."""
    shape = graph.shape(reduced.inputs[0])
    if len(reduced.inputs) > 1 and graph.is_constant(reduced.inputs[1]):
        axes = graph.known_value(reduced.inputs[1])
    else:
        axes = None
    if shape is None or axes is None or graph.attrs(reduced).get("keepdims", 1) != 1:
        return False
    return bool([int(a) % len(shape) for a in axes.reshape(-1)] == [len(shape) - 1])
