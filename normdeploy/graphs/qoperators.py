"""Writes ops that quantize inside as what they are defined to be: DequantizeLinear, the op, QuantizeLinear.

    QLinearOp(q) = Q(Op(DQ(q)))

So onnxruntime's quantizer writes files in its QOperator format, and its optimizer what it fuses of a QDQ file
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). A bias is int32 in steps of the product
of the operands' scales. The form is for evaluation alone: in it the rounding of each tensor can be left out, and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..domains import default_opset
from ..storage.files import bodies
from ..storage.protos import copied
from . import qbits, qrecurrent
from .quantized import BITS, DEQUANTIZE, DYNAMIC, INTEGER, LSTM, QUANTIZE, Quantization, seals

_AXES_ARE_OWN = 13  # the opset from which on Softmax takes one axis, and not all from it on


@dataclass(frozen=True, kw_only=True)
class _Form:
    """``operands``: places of quantized inputs, each with its scale and zero point behind it; ``result``: the place of
    the output's scale, None where the output is floating; ``first``: inputs that are passed on as they are; ``bias``:
    its place; ``channels``: operand -> the axis of a scale for each channel."""

    op: str
    operands: tuple[int, ...] = (0,)
    result: int | None
    first: tuple[int, ...] = ()
    bias: int | None = None
    channels: dict[int, int] = field(default_factory=dict)


def _each(op: str) -> Callable[[onnx.NodeProto], _Form]:
    return lambda node: _Form(op=op, result=3)


def _both(op: str) -> Callable[[onnx.NodeProto], _Form]:
    return lambda node: _Form(op=op, operands=(0, 3), result=6)


def _conv(node: onnx.NodeProto) -> _Form:
    return _Form(op="Conv", operands=(0, 3), result=6, bias=8, channels={3: 0})


def _matmul(node: onnx.NodeProto) -> _Form:
    return _Form(op="MatMul", operands=(0, 3), result=6, channels={0: -2, 3: -1})


def _gemm(node: onnx.NodeProto) -> _Form:
    rounded = len(node.input) > 7 and bool(node.input[7])
    axis = 0 if _attribute(node, "transB", 0) else 1
    return _Form(op="Gemm", operands=(0, 3), result=7 if rounded else None, bias=6, channels={3: axis})


def _concat(node: onnx.NodeProto) -> _Form:
    return _Form(op="Concat", operands=tuple(range(2, len(node.input), 3)), result=0)


def _where(node: onnx.NodeProto) -> _Form:
    return _Form(op="Where", operands=(1, 4), result=7, first=(0,))


_FORMS: dict[str, Callable[[onnx.NodeProto], _Form]] = {
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
    "QGemm": _gemm,
    "QLinearAdd": _both("Add"),
    "QLinearMul": _both("Mul"),
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "QLinearSigmoid": _each("Sigmoid"),
    "QLinearLeakyRelu": _each("LeakyRelu"),
    "QLinearSoftmax": _each("Softmax"),
    "QLinearAveragePool": _each("AveragePool"),
    "QLinearGlobalAveragePool": _each("GlobalAveragePool"),
}
_WRITERS = {LSTM: qrecurrent.written, BITS: qbits.written}
_FUSED = ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")
# Ops that multiply codes with codes, whatever they are written in.
PRODUCTS = frozenset({*INTEGER, *_FUSED, "QLinearConv", "QLinearMatMul", "QGemm"})
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_SUFFIX = "_quantized"
_OWN_ATTRIBUTES = ("channels_last", "opset")  # which the plain ops do not have


def sealed(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Name the ops of a file that quantize inside and can't be written as pairs and plain ops."""
    opset, main, weights = default_opset(proto), proto.graph, _stored(proto)
    closed = (
        n for body in bodies(proto) for n in body.node if seals(n) and not (body is main and opens(n, opset, weights))
    )
    return tuple(sorted({node.op_type for node in closed}))


def _stored(proto: onnx.ModelProto) -> set[str]:
    return {t.name for t in proto.graph.initializer} - {v.name for v in proto.graph.input}


def opens(node: onnx.NodeProto, opset: int, weights: Collection[str] = ()) -> bool:
    """Decide whether a node can be written as pairs and a plain op in a file of ``opset`` that stores ``weights``."""
    if node.domain not in _DOMAINS:
        return False
    if node.op_type in _FUSED:
        return True
    if node.op_type == LSTM:
        return qrecurrent.writable(node)
    if node.op_type == BITS:
        return qbits.writable(node, weights)
    if node.op_type not in _FORMS or _attribute(node, "channels_last", 0):
        return False
    form = _FORMS[node.op_type](node)
    # Without a zero point nothing in the node says which type it rounds to.
    if form.result is not None and not (len(node.input) > form.result + 1 and node.input[form.result + 1]):
        return False
    if node.op_type != "QLinearSoftmax":
        return True
    alike = (_attribute(node, "opset", 1) < _AXES_ARE_OWN) == (opset < _AXES_ARE_OWN)
    return alike or _attribute(node, "axis", -1) == -1


def opened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Write such nodes of the main graph as pairs and plain ops, which keep the node's name; others stay.

    What has none is returned as it is.
    """
    opset, weights = default_opset(proto), _stored(proto)
    if not any(opens(node, opset, weights) for node in proto.graph.node):
        return proto
    proto = copied(proto)
    writer = _Writer(proto)
    nodes = [each for n in proto.graph.node for each in (writer.written(n) if opens(n, opset, weights) else [n])]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


class _Writer:
    """Writes the nodes of one graph, and adds the scales of biases to its initializers."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._graph = proto.graph
        self._constants = Quantization(proto)
        self._used = {name for node in proto.graph.node for name in (*node.input, *node.output)}
        self._used |= {value.name for value in (*proto.graph.output, *proto.graph.initializer)}

    def written(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Write one node, under its name or that of its output."""
        if not node.name:
            node.name = node.output[0]
        if node.op_type in _FUSED:
            yield from self._fused(node)
            return
        if node.op_type in _WRITERS:
            yield from _WRITERS[node.op_type](node, self._fresh, self._constant, self._constants.constant)
            return
        form = _FORMS[node.op_type](node)
        inputs = [node.input[i] for i in form.first]
        for place in form.operands:
            made = self._fresh(node.input[place])
            inputs.append(made)
            yield self._dequantized(node, place, made, form.channels.get(place))
        if form.bias is not None and len(node.input) > form.bias and node.input[form.bias]:
            bias = self._fresh(node.input[form.bias])
            inputs.append(bias)
            yield from self._bias(node, form, bias)
        result = node.output[0] if form.result is None else self._fresh(node.output[0])
        plain = helper.make_node(form.op, inputs, [result], node.name)
        plain.attribute.extend(a for a in node.attribute if a.name not in _OWN_ATTRIBUTES)
        yield plain
        if form.result is not None:
            ends = node.input[form.result : form.result + 2]
            yield helper.make_node(QUANTIZE, [result, *ends], node.output[:1], node.name)

    def _dequantized(self, node: onnx.NodeProto, place: int, made: str, axis: int | None) -> onnx.NodeProto:
        names = [name for name in node.input[place : place + 3] if name]
        if axis is None or not self._has_channels(node.input[place + 1]):
            return helper.make_node(DEQUANTIZE, names, [made], node.name)
        return helper.make_node(DEQUANTIZE, names, [made], node.name, axis=axis)

    def _has_channels(self, scale: str) -> bool:
        value = self._constants.constant(scale)
        return value is not None and value.size > 1

    def _bias(self, node: onnx.NodeProto, form: _Form, made: str) -> Iterator[onnx.NodeProto]:
        """Dequantize a bias, in steps of the product of the operands' scales."""
        assert form.bias is not None
        scales = [node.input[place + 1] for place in form.operands]
        alpha = next((a.f for a in node.attribute if a.name == "alpha"), 1.0)
        known = [self._constants.constant(name) for name in scales]
        product = self._fresh(f"{made}_scale")
        if all(value is not None for value in known):
            a, b = (np.asarray(value, np.float64).reshape(-1) for value in known)
            steps = (alpha * a * b).astype(np.float32)
            self._graph.initializer.append(numpy_helper.from_array(steps if steps.size > 1 else steps[0], product))
        else:
            yield helper.make_node("Mul", scales, [product], node.name)
        yield helper.make_node(DEQUANTIZE, [node.input[form.bias], product], [made], node.name, axis=0)

    def _fused(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Write a product of integers that is made floating in the same node."""
        given = [*node.input, *[""] * 7]
        if node.op_type == "DynamicQuantizeMatMul":
            a = [self._fresh(f"{node.input[0]}_{end}") for end in ("quantized", "scale", "zero_point")]
            yield helper.make_node(DYNAMIC, node.input[:1], a, node.name)
            b, bias = [given[1], given[2], given[3]], given[4]
        else:
            a, b, bias = [given[0], given[2], given[4]], [given[1], given[3], given[5]], given[6]
        made = [self._fresh(a[0]), self._fresh(b[0])]
        yield helper.make_node(DEQUANTIZE, _filled(a), made[:1], node.name)
        axis = {"axis": -1} if self._has_channels(b[1]) else {}
        yield helper.make_node(DEQUANTIZE, _filled(b), made[1:], node.name, **axis)
        if not bias:
            yield helper.make_node("MatMul", made, node.output[:1], node.name)
            return
        product = self._fresh(node.output[0])
        yield helper.make_node("MatMul", made, [product], node.name)
        yield helper.make_node("Add", [product, bias], node.output[:1], node.name)

    def _constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer under a name of its own."""
        fresh = self._fresh(name)
        self._graph.initializer.append(numpy_helper.from_array(value, fresh))
        return fresh

    def _fresh(self, name: str) -> str:
        """Name a floating tensor as onnxruntime's quantizer found it: it adds the suffix."""
        fresh = name.removesuffix(_SUFFIX) or name
        while fresh in self._used:
            fresh += "_"
        self._used.add(fresh)
        return fresh


def _filled(names: Sequence[str]) -> list[str]:
    return [name for name in names if name]
