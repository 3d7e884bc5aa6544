"""Fold nodes on constants, from a closed list of ops.

An op is folded in one of three ways, each with its premise:

- **moved**: elements are only moved or selected. The result has the inputs' bits and type.
- **whole**: integers and booleans in their own type, for ops on which numpy and C++ agree: sums and products wrap, a
  quotient truncates. Division by zero and the least integer by -1 are undefined, so these nodes stay.
- **rounded**: floats are computed in float64 by `normdeploy.evaluate` and rounded once. A runtime rounds at least once
  too. Ops with many terms are folded only if none of their sums, products or squares can leave the type's range.
  Otherwise the runtime might compute an ∞ or a 0 where float64 computes an ordinary number. Runtimes differ if an op
  compares -0 with +0, or reads a NaN, so Max, Min, Clip and Relu are folded only on finite numbers without -0.

All other ops stay. LogSoftmax, for example, stays because onnx's own evaluator computes it as log(softmax), which is
less accurate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.reference.ops
import onnx_ir as ir

from ...evaluate import evaluator
from .cast_rules import exact_cast
from .node_matching import constant_array

_FLOATS = {"float16", "bfloat16", "float32", "float64"}
_MOVED = frozenset(
    {
        "Concat",
        "ConstantOfShape",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)
# Ops that onnx's evaluator computes and ours does not. tests/graphs/test_simplification_rules.py checks the results.
_MOVED_BY_ONNX = frozenset({"GatherND", "NonZero", "ScatterND", "Trilu"})
_COMPARED = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_WHOLE = _COMPARED | {
    "Abs",
    "Add",
    "And",
    "Clip",
    "CumSum",
    "Div",
    "Max",
    "Min",
    "Mod",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "Range",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "Sub",
    "Sum",
}
_EACH = _COMPARED | {
    "Abs",
    "Add",
    "Ceil",
    "Cos",
    "Div",
    "Erf",
    "Exp",
    "Floor",
    "IsNaN",
    "Log",
    "Mul",
    "Neg",
    "Pow",
    "Range",
    "Reciprocal",
    "Round",
    "Sigmoid",
    "Sin",
    "Softplus",
    "Sqrt",
    "Sub",
    "Tanh",
}
_LIMITED = frozenset({"Clip", "Max", "Min", "Relu"})
_MANY = frozenset(
    {
        "BatchNormalization",
        "Gemm",
        "MatMul",
        "Mean",
        "ReduceL1",
        "ReduceL2",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "Softmax",
        "Sum",
    }
)
_OWN: dict[str, Any] = {"Cos": np.cos, "Sin": np.sin}
_FAILURES = (
    evaluator.UnsupportedOp,
    ValueError,
    TypeError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
)


def fold_node(node: ir.Node, opset: int) -> list[np.ndarray] | None:
    """Compute the outputs of a node on constants.

    Returns: one array per output; None if the node must stay.
    """
    if node.domain != "" or not _is_fully_specified(node, opset):
        return None
    inputs = [None if value is None else constant_array(value) for value in node.inputs]
    if any(array is None and value is not None for array, value in zip(inputs, node.inputs, strict=True)):
        return None
    arrays = [array for array in inputs if array is not None]
    if any(array.dtype.kind not in "iub" and array.dtype.name not in _FLOATS for array in arrays):
        return None
    attributes = {name: _attribute_value(attribute) for name, attribute in node.attributes.items()}
    try:
        with evaluator.silence_numpy():
            made = _compute_outputs(node, inputs, attributes, opset)
    except _FAILURES:
        return None
    if made is None or len(made) != len(node.outputs):
        return None
    return made


def _is_fully_specified(node: ir.Node, opset: int) -> bool:
    """Return whether the standard defines every attribute and input of the node."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    known = all(name in schema.attributes and not attribute.is_ref() for name, attribute in node.attributes.items())
    return known and schema.min_input <= len(node.inputs) <= schema.max_input


def _attribute_value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    if isinstance(attribute.value, tuple):
        return list(attribute.value)
    return attribute.value


def _compute_outputs(
    node: ir.Node, inputs: Sequence[np.ndarray | None], attributes: dict[str, Any], opset: int
) -> list[np.ndarray] | None:
    op = node.op_type
    arrays = [array for array in inputs if array is not None]
    if op == "Cast":
        made = exact_cast(arrays[0], ir.DataType(attributes["to"]))
        if made is None:
            return None
        return [made]
    if op == "ConstantOfShape":
        value = attributes.get("value", np.zeros(1, np.float32))
        if len(arrays) == 1:
            return [np.full(arrays[0].tolist(), value.reshape(()), value.dtype)]
        return None
    if op in _MOVED_BY_ONNX and attributes.get("reduction", "none") == "none":
        return [
            np.asarray(
                onnx.reference.ops.load_op("", op, opset).eval(*inputs, **attributes),
                arrays[0].dtype if op != "NonZero" else np.int64,
            )
        ]
    if op in _MOVED:
        results = evaluator.evaluate_node(op, list(inputs), attributes, opset=opset, outputs=len(node.outputs))
        return [np.ascontiguousarray(result).reshape(np.shape(result)) for result in results if result is not None]
    floating = [array for array in arrays if array.dtype.name in _FLOATS]
    if not floating:
        return _compute_integers(op, node, inputs, attributes, opset)
    return _compute_rounded(op, inputs, attributes, opset)


def _compute_integers(
    op: str, node: ir.Node, inputs: Sequence[np.ndarray | None], attributes: dict[str, Any], opset: int
) -> list[np.ndarray] | None:
    if op not in _WHOLE:
        return None
    first, *others = inputs
    assert first is not None
    if op in {"Div", "Mod"}:
        (by,) = others
        if by is None or not by.all() or (first.dtype.kind == "i" and _division_overflows(first, by)):
            return None
    if op == "CumSum":
        return _cumulative_sum(first, others[0], attributes)
    if first.size == 0 and op in {"ReduceMax", "ReduceMin"}:
        return None
    (made,) = evaluator.evaluate_node(op, list(inputs), attributes, opset=opset)
    assert made is not None
    if op in _COMPARED | {"And", "Or", "Not"}:
        kind = np.dtype(np.bool_)
    else:
        kind = first.dtype
    # numpy sums in 64 bits. The low bits of this sum equal the sum in the narrow type.
    return [made.astype(kind)]


def _division_overflows(first: np.ndarray, by: np.ndarray) -> bool:
    return bool((by == -1).any() and (first == np.iinfo(first.dtype).min).any())


def _cumulative_sum(x: np.ndarray, axis: np.ndarray | None, attributes: dict[str, Any]) -> list[np.ndarray] | None:
    if axis is None or axis.size != 1 or attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        return None
    return [np.cumsum(x, int(axis.item()), dtype=x.dtype)]


def _compute_rounded(
    op: str, inputs: Sequence[np.ndarray | None], attributes: dict[str, Any], opset: int
) -> list[np.ndarray] | None:
    arrays = [array for array in inputs if array is not None]
    kind = arrays[0].dtype
    if op not in _EACH | _LIMITED | _MANY or kind.name not in _FLOATS:
        return None
    if op in _LIMITED and not all(_is_foldable_float(array) for array in arrays):
        return None
    if op in _MANY and not _stays_normal(op, arrays, attributes):
        return None
    wide = [
        array.astype(np.float64) if array is not None and array.dtype.name in _FLOATS else array for array in inputs
    ]
    if op in _OWN:
        made = _OWN[op](wide[0])
    else:
        (made,) = evaluator.evaluate_node(op, wide, attributes, opset=opset)
    if op in _COMPARED or op == "IsNaN":
        return [np.asarray(made, np.bool_)]
    return [_round_once(np.asarray(made), kind)]


def _is_foldable_float(array: np.ndarray) -> bool:
    wide = array.astype(np.float64)
    return bool(np.isfinite(wide).all() and not (np.signbit(wide) & (wide == 0)).any())


def _stays_normal(op: str, arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> bool:
    """Return whether every intermediate number of the op stays normal in the type of its first input.

    float64 has a larger range than that type, so it gives a number where the runtime may overflow and give NaN.
    """
    limits = _float_info(ir.DataType.from_numpy(arrays[0].dtype))
    most = float(limits.max)
    least = float(limits.tiny)
    sizes = [np.abs(array.astype(np.float64)) for array in arrays if array.dtype.name in _FLOATS]
    if op == "ReduceProd":
        return _is_normal_product(sizes[0], most=most, least=least)
    factors = 2
    if op == "Gemm":
        scales = [attributes.get("alpha", 1.0), attributes.get("beta", 1.0)]
        if scales != [1.0, 1.0]:
            sizes += [np.abs(np.float64(scale)).reshape(1) for scale in scales]
            factors = 3
    return _is_normal_sum(sizes, factors, most=most, least=least)


def _is_normal_product(sizes: np.ndarray, *, most: float, least: float) -> bool:
    """Return whether the product of any selection of ``sizes`` lies between ``least`` and ``most``.

    Such a product is at most the product of all numbers > 1, and at least the product of all numbers < 1.
    """
    if not np.isfinite(sizes).all():
        return False
    logarithms = np.log2(sizes[sizes > 0])
    return bool(
        logarithms[logarithms > 0].sum() < math.log2(most) and logarithms[logarithms < 0].sum() > math.log2(least)
    )


def _is_normal_sum(sizes: Sequence[np.ndarray], factors: int, *, most: float, least: float) -> bool:
    """Return whether every sum of products of ``factors`` numbers each lies between ``least`` and ``most``.

    Up to n products of k numbers ≤ m sum to at most n·m^k. Products of k numbers ≥ l are at least l^k.
    """
    count = max(array.size for array in sizes)
    for array in sizes:
        if array.size == 0 or not np.isfinite(array).all():
            return False
        if array.max() > (most / count) ** (1 / factors):
            return False
        if (array[array > 0] < least ** (1 / factors)).any():
            return False
    return True


def _float_info(kind: ir.DataType) -> Any:
    return ml_dtypes.finfo(kind.numpy())


def _round_once(values: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Round float64 to ``kind``."""
    if kind.name != "bfloat16":
        return values.astype(kind)
    return values.astype(np.float32).astype(kind)


class ConstantFolder:
    """Compute constants while onnxscript's folding pass walks the graph; `write_constants` writes them afterwards.

    The pass calls this object for each node whose inputs are constants. The call always returns False, so the pass
    computes nothing itself.
    """

    def __init__(self, wanted: Any, opset: int) -> None:
        self._wanted = wanted
        self._opset = opset
        self._folded: list[ir.Node] = []

    def __call__(self, node: ir.Node) -> bool:
        """Compute the outputs of one node on constants, if the node may be folded.

        Returns: always False, so that the pass computes nothing itself.
        """
        if not self._wanted(node):
            return False
        made = fold_node(node, self._opset)
        if made is None:
            return False
        for value, array in zip(node.outputs, made, strict=True):
            # The pass reads the constant when it visits the consumers, later in the same walk.
            value.const_value = ir.tensor(array, name=value.name)
        self._folded.append(node)
        return False

    def write_constants(self) -> bool:
        """Replace the folded nodes by Constants.

        Returns: whether any node was replaced.
        """
        for node in self._folded:
            graph = node.graph
            assert isinstance(graph, ir.Graph)
            new = [ir.node("Constant", [], {"value": value.const_value}) for value in node.outputs]
            for constant_node, value in zip(new, node.outputs, strict=True):
                tensor = value.const_value
                assert tensor is not None
                made = constant_node.outputs[0]
                made.dtype, made.shape = tensor.dtype, ir.Shape(tuple(tensor.shape.numpy()))
                value.const_value = None
            ir.convenience.replace_nodes_and_values(graph, node, [node], new, node.outputs, [n.outputs[0] for n in new])
        return bool(self._folded)
