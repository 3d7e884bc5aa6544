"""Write the expressions of a fold's constants as ONNX nodes, for a certificate file.

A fold computes its constants from the scale a and the shift b of a chain (`normdeploy.forms.fold_expressions`). The
nodes here compute a = chain(1) − chain(0) and b = chain(0), and then each constant, from constants of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ..forms.fold_expressions import FoldExpressions, FoldShare
from ..graphs.file_graph import stored_array
from ..graphs.graph import Graph
from ..graphs.region import EvaluationFailed, Region

# Opset of the nodes that compute the constants from scale and shift
OPSET = 21
# Largest relative difference between the chain's scale and the scale that the fold used. Both are computed in float64.
_CLOSE = 2.0**-40


@dataclass
class ExpressionRecord:
    """Nodes that compute the constants of a fold.

    Attributes:
        nodes: in topological order, each with its opset.
        constants: constants that the nodes read, by name.
        results: name of a computed constant → name of the tensor that defines it.
    """

    nodes: list[tuple[onnx.NodeProto, int]] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output.

        Returns:
            the name of the output.
        """
        name = f"expression:{len(self.nodes)}"
        self.nodes.append((onnx.helper.make_node(op, inputs, [name], **attributes), OPSET))
        return name

    def add_constant(self, value: np.ndarray) -> str:
        """Add a constant.

        Returns:
            its name.
        """
        name = f"number:{len(self.constants)}"
        self.constants[name] = value
        return name

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        """Add a Reshape.

        Returns:
            the name of the result.
        """
        return self.add("Reshape", [name, self.add_constant(np.array(shape, np.int64))])


def record_expressions(graph: Graph, fold: FoldExpressions) -> ExpressionRecord | None:
    """Write the expressions of all constants of ``fold``.

    Returns:
        the nodes; None if the chain's scale is not a vector over one axis that can be written this way.
    """
    made = ExpressionRecord()
    vector = _add_scale_and_shift(made, graph, fold)
    if vector is None:
        return None
    a, b, size = vector
    for constants, tensor in ((fold.scale, a), (fold.shift, b)):
        for c in constants:
            if not _add_result(made, c, tensor, size):
                return None
    for c in fold.ratio:
        if not _add_result(made, c, made.add("Div", [b, a]), size):
            return None
    for share in fold.shares:
        if not _add_share(made, graph, share, a, b, size):
            return None
    return made


def _add_result(made: ExpressionRecord, constant: gs.Constant, vector: str, size: int) -> bool:
    """Define ``constant`` as the vector in its shape. Returns False if it has another number of elements."""
    shape = [int(n) for n in constant.shape]
    if size == 1 or int(np.prod(shape)) == size:
        laid = made.reshape(vector, shape if int(np.prod(shape)) == size else [1] * len(shape))
        made.results[constant.name] = made.add("Expand", [laid, made.add_constant(np.array(shape, np.int64))])
        return True
    return False


def _add_scale_and_shift(made: ExpressionRecord, graph: Graph, fold: FoldExpressions) -> tuple[str, str, int] | None:
    """Write a and b as vectors.

    Returns:
        their names and their number of elements.
    """
    chain = fold.chain
    shape = _choose_input_shape(graph, fold)
    # The expressions have no leaves, so the chain may not read the shape of another tensor either.
    if shape is None or chain.shape_leaves or len(chain.leaves) > 1:
        return None
    zero = _add_chain(made, graph, chain, np.zeros(shape, np.float32))
    one = _add_chain(made, graph, chain, np.ones(shape, np.float32))
    size = int(np.prod(shape))
    b = made.reshape(zero, [size])
    a = made.add("Sub", [made.reshape(one, [size]), b])
    return a, b, size


def _choose_input_shape(graph: Graph, fold: FoldExpressions) -> tuple[int, ...] | None:
    """Choose the shape of the constant input on which the chain's result is the vector of scales.

    Each axis has length 1, except for one axis: the first axis for which the chain computes the scale that the fold
    used.
    """
    chain = fold.chain
    dims = graph.shape(chain.leaves[0])
    if dims is None:
        return None
    expected = fold.shares[0].scale if fold.shares else None
    count = 0 if expected is None else (fold.shares[0].whole or expected.size)
    # The axis with most elements that fits comes last, so try one element first only for a chain of plain numbers.
    for axis, n in enumerate(dims):
        if not isinstance(n, int) or (count and n != count):
            continue
        shape = tuple(n if i == axis else 1 for i in range(len(dims)))
        scale = _run_scale(chain, shape)
        if scale is None or scale.size != n:
            continue
        wanted = expected if expected is not None else _stored_scale(graph, fold, n)
        if wanted is None or (fold.shares and fold.shares[0].whole):
            return shape
        if wanted.size == n and np.allclose(scale.reshape(-1), wanted.reshape(-1), rtol=_CLOSE, atol=0):
            return shape
    return None


def _stored_scale(graph: Graph, fold: FoldExpressions, n: int) -> np.ndarray | None:
    for c in fold.scale:
        exact = graph.exact.exact_value(id(c))
        if exact is not None and exact.size in (1, n):
            return np.broadcast_to(exact.reshape(-1), (n,))
    return None


def _run_scale(chain: Region, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        bound = chain.bind(dict.fromkeys(chain.symbols, 1))
        low, high = (bound.run([np.full(shape, number)]) for number in (0.0, 1.0))
    except (EvaluationFailed, ValueError):
        return None
    return np.asarray(high - low)


def _add_chain(made: ExpressionRecord, graph: Graph, chain: Region, value: np.ndarray) -> str:
    """Copy the chain's nodes with a constant input.

    Returns:
        the name of the result.
    """
    leaf = made.add_constant(value)
    prefix = f"{leaf}:"
    names: dict[str, str] = {chain.leaves[0].name: leaf}
    for node in chain.nodes:
        proto = onnx.NodeProto()
        proto.CopyFrom(graph.node_proto(node))
        for i, t in enumerate(node.inputs):
            if t.is_empty():
                continue
            if t.name not in names:
                made.constants[t.name] = _constant_array(graph, t)
                names[t.name] = t.name
            proto.input[i] = names[t.name]
        for i, t in enumerate(node.outputs):
            names[t.name] = f"{prefix}{t.name}"
            proto.output[i] = names[t.name]
        made.nodes.append((proto, graph.opset))
    return names[chain.y.name]


def _constant_array(graph: Graph, t: gs.Tensor) -> np.ndarray:
    exact = graph.exact.exact_value(id(t))
    if exact is not None:
        return exact
    return stored_array(t) if isinstance(t, gs.Constant) else graph.value(t)


def _add_share(made: ExpressionRecord, graph: Graph, share: FoldShare, a: str, b: str, size: int) -> bool:
    """Write weight and bias of one linear op. Returns False if the channels do not fit."""
    linear = share.linear
    output = share.side == "output"
    count = linear.output_channels if output else linear.input_channels
    if share.whole:
        a, b = (_add_slice(made, v, share.start, count) for v in (a, b))
    elif size != count:
        return False
    weight = linear.node.inputs[linear.weight]
    values = _constant_array(graph, weight)
    made.constants[weight.name] = values
    w = weight.name
    scalars = dict(linear.node.attrs) if linear.node.op == "Gemm" else {}
    if scalars.get("alpha", 1.0) != 1.0:
        w = made.add("Mul", [w, made.add_constant(np.array(scalars["alpha"], np.float64))])
    c = _add_bias(made, graph, share, float(scalars.get("beta", 1.0)))
    dims = list(values.shape)
    wide, laid = _channel_layout(share, dims, count)
    cut = made.reshape(w, wide)
    scaled = made.add("Mul", [cut, made.reshape(a, laid)])
    if made.results.get(share.weight.name) is None:
        made.results[share.weight.name] = made.reshape(scaled, [int(n) for n in share.weight.shape])
    if share.bias is None:
        return True
    if output:
        bias = made.add("Add", [made.add("Mul", [a, c]), b])
    elif share.side == "scale":
        bias = c
    else:
        shifted = made.add("Mul", [cut, made.reshape(b, laid)])
        bias = made.add("Add", [c, _add_sum(made, share, shifted, dims)])
    shape = np.array(share.bias.shape, np.int64)
    if int(np.prod(shape)) == linear.output_channels:
        bias = made.add("Expand", [bias, made.add_constant(np.array([linear.output_channels], np.int64))])
        made.results[share.bias.name] = made.reshape(bias, shape.tolist())
        return True
    return False


def _add_slice(made: ExpressionRecord, vector: str, start: int, count: int) -> str:
    ends = [made.add_constant(np.array([n], np.int64)) for n in (start, start + count, 0)]
    return made.add("Slice", [vector, *ends])


def _add_bias(made: ExpressionRecord, graph: Graph, share: FoldShare, beta: float) -> str:
    """Write the bias before the fold as a vector; [0] if the op has none."""
    linear = share.linear
    if linear.biased:
        t = linear.node.inputs[2]
    elif len(linear.nodes) == 2:
        t = next(t for t in linear.nodes[1].inputs if t is not linear.node.outputs[0])
    else:
        return made.add_constant(np.zeros(1, np.float32))
    made.constants[t.name] = _constant_array(graph, t)
    flat = made.reshape(t.name, [-1])
    if linear.biased and beta != 1.0:
        return made.add("Mul", [flat, made.add_constant(np.array(beta, np.float64))])
    return flat


def _channel_layout(share: FoldShare, dims: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the shape of the weight with separate groups, and the shape of a vector of channels beside it."""
    linear = share.linear
    output = share.side == "output"
    if linear.node.op in ("Conv", "ConvTranspose"):
        g = linear.groups
        wide = [g, dims[0] // g, *dims[1:]]
        own = 1 if output != (linear.node.op == "ConvTranspose") else 2
        laid = [g, *(count // g if i == own else 1 for i in range(1, len(wide)))]
        return wide, laid
    rows = _has_channels_in_rows(share, output)
    return list(dims), [count, 1] if rows else [count]


def _has_channels_in_rows(share: FoldShare, output: bool) -> bool:
    if share.linear.node.op == "Gemm":
        return bool(share.linear.is_transposed) == output
    return bool(share.linear.weight == 1) != output


def _add_sum(made: ExpressionRecord, share: FoldShare, product: str, dims: Sequence[int]) -> str:
    """Sum W·b over input channels and taps; the result is a vector over the output channels."""
    linear = share.linear
    if linear.node.op in ("Conv", "ConvTranspose"):
        rank = len(dims) + 1
        kept = 1 if linear.node.op == "Conv" else 2
        axes = [i for i in range(rank) if i not in (0, kept)]
        return made.reshape(_reduce_sum(made, product, axes), [linear.output_channels])
    rows = _has_channels_in_rows(share, False)
    return made.reshape(_reduce_sum(made, product, [-2 if rows else -1]), [-1])


def _reduce_sum(made: ExpressionRecord, name: str, axes: Sequence[int]) -> str:
    return made.add("ReduceSum", [name, made.add_constant(np.array(axes, np.int64))], keepdims=0)
