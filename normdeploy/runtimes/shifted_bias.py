"""Recompute the bias of layers whose input is shifted before quantization and whose bias compensates the shift.

Such a layer (`normdeploy.quantization.bias_corrections`) computes V·((x − t)/s) + b, with the bias b = c + V·(t/s). V
is the stored weight, t the shift, s the scale and c the original bias. If weights V + ξ are drawn that round to the
same codes, the bias must be b + ξ·(t/s). So each draw of the weights needs another bias. b and the terms of its sum are
float32 numbers, so b contains a rounding error of up to u·Σ|V|·|t/s|, u = 2⁻²⁴.

In files of other tools, the bias is c + W·(t/s) with the original weights W, which are unknown here. The outputs of
these files contain the whole error ξ·((x − t)/s). So only a bias that the file's own record lists is recomputed. A
wrong record makes the allowed error smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import UNIT_ROUNDOFF
from ..evaluate.evaluator_core import Array
from ..graphs.quantization_info import DEQUANTIZE, QUANTIZE, read_recorded_biases

if TYPE_CHECKING:
    import onnx

    from .float64_evaluator import Float64Evaluator

FLOAT32 = UNIT_ROUNDOFF["float32"]
_LAYERS = ("MatMul", "Gemm")
_SCALING = ("Mul", "Div")
_SHIFTING = ("Add", "Sub")
_ALGEBRA = {"Mul": np.multiply, "Div": np.divide, "Add": np.add, "Sub": np.subtract}


def find_quantizer_shifts(graph: Float64Evaluator) -> dict[str, Array]:
    """Find layers with a shifted input and a recorded bias.

    These layers are MatMul and Gemm nodes. Their weight is a matrix, and no other node reads their weight or bias.

    Returns:
        Layer output -> t/s, float64 [input channels]; 0 for channels whose shift the stored weight does not compensate,
        according to the record.
    """
    recorded = read_recorded_biases(graph.proto)
    if not recorded:
        return {}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found: dict[str, Array] = {}
    for node in graph.nodes:
        left = recorded.get(_bias_name(graph, node, readers))
        if node.op_type in _LAYERS and left is not None:
            shape = _weight_shape(graph, node, readers)
            shift = _quantizer_shift(graph, node.input[0])
            if shape and shift is not None and shift.size == shape[_is_transposed(node)]:
                found[node.output[0]] = np.where(np.isin(np.arange(shift.size), left), 0.0, shift)
    return found


def bias_correction(node: onnx.NodeProto, shift: Array, stored: Array, drawn: Array, rng: np.random.Generator) -> Array:
    """Compute the change of the bias for drawn weights.

    Args:
        shift: t/s [input channels].
        stored: the stored weights, dequantized.
        drawn: the drawn weights, same shape.

    Returns:
        (drawn − stored)·``shift`` plus a random float32 rounding error, [output channels].
    """
    across = (lambda w: w.T) if _is_transposed(node) else (lambda w: w)
    size = np.abs(shift) @ np.abs(across(stored))
    return np.asarray(shift @ across(drawn - stored) + FLOAT32 * rng.uniform(-1.0, 1.0, size.shape) * size)


def _is_transposed(node: onnx.NodeProto) -> bool:
    return any(a.name == "transB" and a.i for a in node.attribute)


def _weight_shape(
    graph: Float64Evaluator, node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]]
) -> tuple[int, ...]:
    """Return the shape of the weight's codes; () if the codes are not a matrix or another node reads them."""
    made = _producer(graph, node.input[1])
    if made is not None and made.op_type == DEQUANTIZE:
        codes = graph.weights.get(made.input[0])
    else:
        codes = None
    if made is None or codes is None or len(codes.dims) != 2:
        return ()
    if len(readers[node.input[1]]) == len(readers[made.input[0]]) == 1:
        return tuple(codes.dims)
    return ()


def _bias_name(graph: Float64Evaluator, node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]]) -> str:
    """Return the name of a layer's bias; "" if the layer has no bias or another node reads the bias."""
    if node.op_type == "Gemm":
        plain = not any(a.name == "transA" and a.i for a in node.attribute) and len(node.input) > 2
        names: Sequence[str]
        if plain:
            names = node.input[2:]
        else:
            names = ()
    else:
        behind = readers.get(node.output[0], [])
        added = len(behind) == 1 and behind[0].op_type == "Add"
        if added:
            names = [n for n in behind[0].input if n != node.output[0]]
        else:
            names = ()
    own = len(names) == 1 and names[0] in graph.weights and len(readers[names[0]]) == 1
    if own:
        return names[0]
    return ""


def _quantizer_shift(graph: Float64Evaluator, name: str) -> Array | None:
    """Return t/s for ``name`` = dequantized(quantized((x − t)/s)), or None if x is not shifted.

    For x = 0, the ops before the quantizer compute −t/s. So t/s is this result with its sign changed.
    """
    for op in (DEQUANTIZE, QUANTIZE):
        made = _producer(graph, name)
        if made is None or made.op_type != op:
            return None
        name = made.input[0]
    chain: list[tuple[str, Array]] = []
    for ops in (_SCALING, _SHIFTING, _SCALING):
        made = _producer(graph, name)
        if made is not None and made.op_type in ops and made.input[1] in graph.weights:
            chain.append((made.op_type, graph.tensor_value(made.input[1], {})))
            name = made.input[0]
    if not any(op in _SHIFTING for op, _ in chain):
        return None
    value: Any = np.zeros(())
    for op, by in reversed(chain):
        value = _ALGEBRA[op](value, by)
    along_channels = np.ndim(value) and np.shape(value)[-1] == np.size(value)
    if along_channels:
        return np.asarray(-value).reshape(-1)
    return None


def _producer(graph: Float64Evaluator, name: str) -> onnx.NodeProto | None:
    place = graph.makers.get(name)
    if place is None:
        return None
    return graph.nodes[place]
