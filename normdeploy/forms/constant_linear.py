"""Scale and shift the input or output of a linear op by changing its constant weight and bias.

    output channels:  a·(W·x + c) + b = (a·W)·x + (a·c + b)
    input channels:   W·(a·x + b) + c = (W·a)·x + (c + W·b)

This covers Conv, ConvTranspose (with groups), Gemm (alpha, beta, transposes) and MatMul with the weight on either side.
MatMul has no bias, so an Add of a constant after it counts as its bias. All computation is in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_graphsurgeon as gs

from ..graphs.exact_constants import Product, min_and_max, round_product
from ..graphs.graph import Graph
from ..graphs.region import Refusal, RefusalKind
from ..storage.onnx_domains import is_standard

LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class ConstantLinear:
    """Linear op with a constant weight.

    Attributes:
        weight: index of the weight among the inputs.
        w: the weight, with a Gemm's alpha multiplied in.
        c: the bias, one value per output channel or a single value, with a Gemm's beta multiplied in.
        biased: True if the node itself has a bias.
        shared: number of nodes that read the weight.
        out: the result; for a MatMul with an added bias, the output of the Add.
        nodes: the node and, for a MatMul with an added bias, the Add.
        attrs: the node's attributes without alpha and beta.
    """

    node: gs.Node
    weight: int
    w: np.ndarray
    c: np.ndarray
    biased: bool
    shared: int
    out: gs.Tensor
    nodes: tuple[gs.Node, ...]
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def data_input(self) -> gs.Tensor:
        """Return the input that is not the weight."""
        return self.node.inputs[1 - self.weight]

    @property
    def title(self) -> str:
        """Return op and name of the node for messages, with a note if another node reads the same weight."""
        name = title_of(self.node)
        if self.shared > 1:
            return f"{name} (its own copy of a weight that {self.shared} nodes share)"
        return name

    @property
    def groups(self) -> int:
        """Return the number of groups of a convolution; 1 for other ops."""
        return int(self.attrs.get("group", 1))

    @property
    def is_transposed(self) -> bool:
        """Return True if a Gemm transposes its weight."""
        return bool(self.attrs.get("transB", 0))

    @property
    def output_channels(self) -> int:
        """Return the number of output channels."""
        if self.node.op == "Conv":
            return int(self.w.shape[0])
        if self.node.op == "ConvTranspose":
            return int(self.w.shape[1]) * self.groups
        if self.node.op == "Gemm":
            return int(self.w.shape[0 if self.is_transposed else 1])
        return int(self.w.shape[-1 if self.weight == 1 else -2])

    @property
    def input_channels(self) -> int:
        """Return the number of input channels."""
        if self.node.op == "Conv":
            return int(self.w.shape[1]) * self.groups
        if self.node.op == "ConvTranspose":
            return int(self.w.shape[0])
        if self.node.op == "Gemm":
            return int(self.w.shape[1 if self.is_transposed else 0])
        return int(self.w.shape[-2 if self.weight == 1 else -1])

    def channel_axis(self, rank: int) -> int:
        """Find the channel axis of the output.

        Returns:
            the axis of an output of rank ``rank``.
        """
        if self.node.op in ("Conv", "ConvTranspose"):
            return 1
        if self.weight == 1:
            return rank - 1
        return rank - 2

    def input_channel_axis(self, rank: int) -> int:
        """Find the channel axis of the data input.

        Returns:
            the axis of an input of rank ``rank``.
        """
        if self.node.op in ("Conv", "ConvTranspose"):
            return 1
        if self.node.op == "Gemm":
            if self.attrs.get("transA", 0):
                return 0
            return 1
        if self.weight == 1:
            return rank - 1
        return rank - 2

    def has_padding(self) -> bool:
        """Return True if the op pads its input at the borders or, for a ConvTranspose, between elements."""
        if self.node.op == "ConvTranspose":
            return True
        return self.node.op == "Conv" and (
            any(self.attrs.get("pads") or ())
            or str(self.attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID", "b'NOTSET'", "b'VALID'")
        )

    def scale_output(self, a: np.ndarray, b: np.ndarray) -> tuple[Product, np.ndarray]:
        """Compute weight and bias of a·(W·x + c) + b.

        Args:
            a, b: vectors over the output channels.

        Returns:
            the weight in the shape of ``w``, and the bias.
        """
        return Product(self.w, self._output_factors(a)), a * self.c + b

    def _output_factors(self, a: np.ndarray) -> np.ndarray:
        """Lay a vector over the output channels out in the rank of the weight."""
        rank = self.w.ndim
        if self.node.op == "ConvTranspose":
            groups = a.reshape(self.groups, -1)
            return np.repeat(groups, len(self.w) // self.groups, axis=0).reshape(len(self.w), -1, *[1] * (rank - 2))
        if self.node.op == "Conv":
            axis = 0
        elif self.node.op == "Gemm":
            axis = 0 if self.is_transposed else 1
        else:
            axis = rank - 1 if self.weight == 1 else rank - 2
        return a.reshape([-1 if i == axis else 1 for i in range(rank)])

    def scale_input(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute weight and bias of W·(a·x + b) + c. The op must not pad its input.

        Args:
            a, b: vectors over the input channels.

        Returns:
            the weight in the shape of ``w``, and the bias.
        """
        w = self.w
        ones = [1] * (self.w.ndim - 2)
        if self.node.op == "ConvTranspose":
            return w * a.reshape(-1, 1, *ones), self.c + np.zeros(self.output_channels)
        if self.node.op == "Conv":
            cut = w.reshape(self.groups, -1, *w.shape[1:])
            per = [p.reshape(self.groups, 1, -1, *ones) for p in (a, b)]
            return (cut * per[0]).reshape(w.shape), self.c + (cut * per[1]).sum(axis=tuple(range(2, cut.ndim))).reshape(
                -1
            )
        if self.node.op == "Gemm":
            if self.is_transposed:
                return (w * a, self.c + w @ b)
            return (w * a[:, None], self.c + b @ w)
        if self.weight == 1:
            return (w * a[:, None], self.c + b @ w)
        return (w * a, self.c + w @ b)

    def weight_recomputation(self, graph: Graph, a: np.ndarray, output: bool) -> Callable[[], np.ndarray] | None:
        """Build a function that recomputes the weight of `scale_output` or `scale_input` when it is needed.

        The function keeps no weight in memory.

        Args:
            output: True for `scale_output`.

        Returns:
            the function, or None if the weight is not a stored constant of the file.
        """
        stored, alpha = self.node.inputs[self.weight], float(self.node.attrs.get("alpha", 1.0))
        if id(stored) in graph.exact or not isinstance(stored, gs.Constant):
            return None
        bare = replace(self, w=np.empty(0))

        def recompute_weight() -> np.ndarray:
            w = graph.value(stored)
            linear = replace(bare, w=w if alpha == 1.0 else w * alpha)
            if output:
                return linear.scale_output(a, np.zeros_like(a))[0].compute()
            return linear.scale_input(a, np.zeros_like(a))[0]

        return recompute_weight

    def write_nodes(
        self,
        graph: Graph,
        data: gs.Tensor,
        weight: np.ndarray | Product,
        shift: np.ndarray,
        like: gs.Tensor,
        dtype: np.dtype,
    ) -> list[gs.Node] | Refusal:
        """Write the op with another weight and bias.

        Args:
            like: tensor whose name the result gets, with a suffix.

        Returns:
            the op, followed by an Add for the bias of a MatMul. A refusal if a number does not fit into ``dtype``.
        """
        name = self.node.name or like.name
        stored = _add_weight(graph, self.node.inputs[self.weight].name or f"{name}_weight", weight, dtype)
        if stored is None or not is_representable(dtype, shift):
            return Refusal(f"the folded weight is out of range for {dtype.name}", like.name)
        inputs = [data, data]
        inputs[self.weight] = stored
        if self.node.op == "MatMul":
            node = graph.make_node("MatMul", inputs, like, self.attrs)
            if not shift.any():
                return [node]
            if self.weight == 1:
                lined = shift
            else:
                lined = shift[:, None]
            return [
                node,
                graph.make_node("Add", [node.outputs[0], graph.add_constant(f"{name}_bias", lined, dtype)], like),
            ]
        if self.biased or shift.any():
            if self.biased:
                bias = self.node.inputs[2].name
            else:
                bias = ""
            inputs.append(
                graph.add_constant(bias or f"{name}_bias", np.broadcast_to(shift, self.output_channels), dtype)
            )
        return [graph.make_node(self.node.op, inputs, like, self.attrs)]


def _add_weight(graph: Graph, name: str, weight: np.ndarray | Product, dtype: np.dtype) -> gs.Constant | None:
    """Add a weight to the graph.

    Returns:
        the constant; None if a number does not fit into ``dtype``.
    """
    if isinstance(weight, Product):
        rounded = round_product(weight) if dtype == np.float32 else None
        if rounded is not None:
            if is_range_representable(dtype, rounded.low, rounded.high):
                return graph.add_rounded(name, rounded)
            return None
        weight = weight.compute()
    if is_representable(dtype, weight):
        return graph.add_constant(name, weight, dtype)
    return None


def title_of(node: gs.Node) -> str:
    """Return op and name of a node for messages."""
    if node.name:
        return f"{node.op} {node.name!r}"
    return node.op


def constant_linear_of(graph: Graph, node: gs.Node | None) -> ConstantLinear | Refusal:
    """Read ``node`` as a linear op whose weight and bias are constants.

    Returns:
        the op, or a refusal with the reason.
    """
    if node is None or node.op not in LINEAR or not is_standard(node):
        return Refusal(
            "not a linear op", node.outputs[0].name if node is not None else "", kind=RefusalKind.NO_LINEAR_OP
        )
    out = node.outputs[0].name
    title = title_of(node)
    if graph.is_constant(node.inputs[1]) and not graph.is_constant(node.inputs[0]):
        weight = 1
    elif node.op == "MatMul" and graph.is_constant(node.inputs[0]) and not graph.is_constant(node.inputs[1]):
        weight = 0
    else:
        maker = graph.producer(node.inputs[1])
        quantized = maker is not None and maker.op == "DequantizeLinear"
        return Refusal(
            f"the weight of {title} is {'dequantized from a value that is ' if quantized else ''}not constant", out
        )
    stored = node.inputs[weight]
    readers = [n for n in graph.consumers(stored) if not graph.is_shape_valued(n.outputs[0])]
    other = next((n for n in readers if n.op not in LINEAR), None)
    if other is not None:
        return Refusal(
            f"{other.op} {other.name!r} also reads {stored.name!r}, the weight of {title}: folding would have to "
            "copy it",
            out,
        )
    w = graph.known_value(stored)
    if w is None:
        return Refusal(f"the weight of {title} can't be evaluated", out)
    if w.ndim < 2:
        return Refusal(f"the weight of {title} is a vector, so its output has no channels", out)
    attrs = dict(node.attrs)
    biased = len(node.inputs) > 2 and not node.inputs[2].is_empty()
    c = graph.known_value(node.inputs[2]) if biased else np.zeros(1)
    if c is None:
        return Refusal(f"the bias of {title} is not constant", out)
    if c.ndim == 2 and c.shape[0] > 1:
        return Refusal(f"the bias of {title} differs by row", out)
    alpha = float(attrs.pop("alpha", 1.0))
    beta = float(attrs.pop("beta", 1.0))
    w = w if alpha == 1.0 else w * alpha
    c = c.reshape(-1) * beta
    linear = ConstantLinear(node, weight, w, c, biased, len(readers), node.outputs[0], (node,), attrs)
    if c.size not in (1, linear.output_channels):
        return Refusal(f"the bias of {title} has {c.size} elements, but {linear.output_channels} channels", out)
    return linear


def absorb_added_bias(graph: Graph, linear: ConstantLinear) -> ConstantLinear:
    """Include the constant that an Add adds to a MatMul, one number per channel, if nothing else reads the product.

    Returns:
        the MatMul with this bias, or ``linear`` unchanged.
    """
    t = linear.out
    readers = graph.consumers(t)
    if linear.node.op != "MatMul" or graph.is_output(t) or len(readers) != 1 or readers[0].op != "Add":
        return linear
    added = next((graph.known_value(i) for i in readers[0].inputs if i is not t), None)
    lined = (linear.output_channels,) if linear.weight == 1 else (linear.output_channels, 1)
    if added is None or added.shape not in (lined, (1,) * len(lined), ()):
        return linear
    return ConstantLinear(
        linear.node,
        linear.weight,
        linear.w,
        added.reshape(-1),
        False,
        linear.shared,
        readers[0].outputs[0],
        (linear.node, readers[0]),
        linear.attrs,
    )


def is_representable(dtype: np.dtype, *values: np.ndarray) -> bool:
    """Check that each array of ``values`` neither overflows nor, in half precision, loses digits to subnormals.

    Returns:
        True if the largest magnitude of each array is 0, or is finite and at least 2^7 times the smallest subnormal.
    """
    return all(is_range_representable(dtype, low, high) for low, high in map(min_and_max, values))


def is_range_representable(dtype: np.dtype, low: float, high: float) -> bool:
    """Check an array as `is_representable` does, by its smallest and its largest element."""
    limits = ml_dtypes.finfo(dtype)
    # The largest rounding error of a subnormal is half the smallest subnormal. Relative to ``least``, this error is
    # 2⁻⁸, the unit roundoff of bfloat16.
    least = 2.0**7 * float(limits.smallest_subnormal)
    largest = max(high, -low)
    return largest == 0 or least <= largest <= float(limits.max)


def channel_vector(values: np.ndarray, axis: int, channels: int) -> np.ndarray | None:
    """Read a scale or shift as a vector over the channels on ``axis``.

    Returns:
        a vector of shape (channels,), or None if the values vary along another axis.
    """
    if any(n > 1 and a != axis for a, n in enumerate(values.shape)):
        return None
    return np.broadcast_to(values.reshape(-1), channels)
