"""Expand ops that quantize internally into DequantizeLinear, the plain op and QuantizeLinear.

    QLinearOp(q) = Q(Op(DQ(q)))

onnxruntime's quantizer writes such ops in its QOperator format. Its optimizer writes them when it fuses a QDQ file
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). A bias is int32 in steps of the product
of the operands' scales. The expanded form is for evaluation only. In the expanded form, the evaluation can omit or
randomly draw the rounding of each tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..storage.onnx_domains import default_domain_opset
from ..storage.proto_traversal import attribute_value, copy_model, iter_bodies, unique_name
from . import dynamic_quantize_lstm, matmul_nbits
from .quantization_info import BITS, DEQUANTIZE, DYNAMIC, INTEGER, LSTM, QUANTIZE, GraphQuantization, quantizes_inside

# Lowest opset in which Softmax normalizes along the given axis alone. Before, it normalized over this axis and all
# later axes together.
_AXES_ARE_OWN = 13


@dataclass(frozen=True, kw_only=True)
class _QOperatorForm:
    """Layout of an op's inputs.

    Attributes:
        op: the plain op.
        operands: positions of quantized inputs, each followed by its scale and zero point.
        result: position of the output's scale; None if the output is floating.
        first: positions of inputs that are passed on unchanged.
        bias: position of the bias; None if there is none.
        channels: position of an operand → axis of a scale per channel.
    """

    op: str
    operands: tuple[int, ...] = (0,)
    result: int | None
    first: tuple[int, ...] = ()
    bias: int | None = None
    channels: dict[int, int] = field(default_factory=dict)


_FORMS = {
    **{f"QLinear{op}": _QOperatorForm(op=op, operands=(0, 3), result=6) for op in ("Add", "Mul")},
    **{
        f"QLinear{op}": _QOperatorForm(op=op, result=3)
        for op in ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool")
    },
    "QLinearConv": _QOperatorForm(op="Conv", operands=(0, 3), result=6, bias=8, channels={3: 0}),
    "QLinearMatMul": _QOperatorForm(op="MatMul", operands=(0, 3), result=6, channels={0: -2, 3: -1}),
    "QLinearWhere": _QOperatorForm(op="Where", operands=(1, 4), result=7, first=(0,)),
    "QLinearConcat": _QOperatorForm(op="Concat", result=0),
    "QGemm": _QOperatorForm(op="Gemm", operands=(0, 3), result=7, bias=6),
}
_WRITERS = {LSTM: dynamic_quantize_lstm.expand_node, BITS: matmul_nbits.expand_node}
_FUSED = ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")


def _form_of(node: onnx.NodeProto) -> _QOperatorForm:
    form = _FORMS[node.op_type]
    if node.op_type == "QLinearConcat":
        return replace(form, operands=tuple(range(2, len(node.input), 3)))
    if node.op_type == "QGemm":
        rounded = len(node.input) > 7 and bool(node.input[7])
        if attribute_value(node, "transB", 0):
            axis = 0
        else:
            axis = 1
        return replace(form, result=form.result if rounded else None, channels={3: axis})
    return form


# Ops that multiply codes by codes, in all quantization formats.
PRODUCTS = frozenset({*INTEGER, *_FUSED, "QLinearConv", "QLinearMatMul", "QGemm"})
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_SUFFIX = "_quantized"
# Attributes of the quantized ops that the plain ops do not have.
_OWN_ATTRIBUTES = ("channels_last", "opset")


def unexpandable_ops(proto: onnx.ModelProto) -> tuple[str, ...]:
    """List the ops of a file that quantize internally and can't be expanded.

    Returns: sorted op types.
    """
    opset = default_domain_opset(proto)
    main = proto.graph
    weights = _initializer_names(proto)
    closed = (
        n
        for body in iter_bodies(proto)
        for n in body.node
        if quantizes_inside(n) and not (body is main and can_expand(n, opset, weights))
    )
    return tuple(sorted({node.op_type for node in closed}))


def _initializer_names(proto: onnx.ModelProto) -> set[str]:
    return {t.name for t in proto.graph.initializer} - {v.name for v in proto.graph.input}


def can_expand(node: onnx.NodeProto, opset: int, weights: Collection[str] = ()) -> bool:
    """Return whether a node can be expanded in a file of this opset.

    Args:
        weights: names of the file's initializers.

    Returns: False also for an op without a known expansion.
    """
    if node.domain not in _DOMAINS:
        return False
    if node.op_type in _FUSED:
        return True
    if node.op_type == LSTM:
        return dynamic_quantize_lstm.is_plain_form(node)
    if node.op_type == BITS:
        return matmul_nbits.is_plain_form(node, weights)
    if node.op_type not in _FORMS or attribute_value(node, "channels_last", 0):
        return False
    form = _form_of(node)
    # Without a zero point, the node does not say to which type it rounds.
    if form.result is not None and not (len(node.input) > form.result + 1 and node.input[form.result + 1]):
        return False
    if node.op_type != "QLinearSoftmax":
        return True
    alike = (attribute_value(node, "opset", 1) < _AXES_ARE_OWN) == (opset < _AXES_ARE_OWN)
    return alike or attribute_value(node, "axis", -1) == -1


def expand_qoperators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Expand the nodes of the main graph that `can_expand` accepts. The new nodes keep the node's name.

    Returns: a changed copy; ``proto`` itself if there is nothing to expand.
    """
    opset = default_domain_opset(proto)
    weights = _initializer_names(proto)
    if not any(can_expand(node, opset, weights) for node in proto.graph.node):
        return proto
    proto = copy_model(proto)
    writer = _QOperatorExpander(proto)
    nodes = [
        each for n in proto.graph.node for each in (writer.expand_node(n) if can_expand(n, opset, weights) else [n])
    ]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


class _QOperatorExpander:
    """Expand the nodes of one graph, adding the scales of biases to its initializers."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._graph = proto.graph
        self._constants = GraphQuantization(proto)
        self._used = {name for node in proto.graph.node for name in (*node.input, *node.output)}
        self._used |= {value.name for value in (*proto.graph.output, *proto.graph.initializer)}

    def expand_node(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Expand one node. The new nodes get its name, or the name of its output if it has no name.

        Yields: the new nodes in topological order.
        """
        if not node.name:
            node.name = node.output[0]
        if node.op_type in _FUSED:
            yield from self._expand_fused_product(node)
            return
        if node.op_type in _WRITERS:
            yield from _WRITERS[node.op_type](
                node, self._fresh_name, self._add_constant, self._constants.constant_value
            )
            return
        form = _form_of(node)
        inputs = [node.input[i] for i in form.first]
        for place in form.operands:
            made = self._fresh_name(node.input[place])
            inputs.append(made)
            yield self._dequantize_operand(node, place, made, form.channels.get(place))
        if form.bias is not None and len(node.input) > form.bias and node.input[form.bias]:
            bias = self._fresh_name(node.input[form.bias])
            inputs.append(bias)
            yield from self._dequantize_bias(node, form, bias)
        if form.result is None:
            result = node.output[0]
        else:
            result = self._fresh_name(node.output[0])
        plain = helper.make_node(form.op, inputs, [result], node.name)
        plain.attribute.extend(a for a in node.attribute if a.name not in _OWN_ATTRIBUTES)
        yield plain
        if form.result is not None:
            ends = node.input[form.result : form.result + 2]
            yield helper.make_node(QUANTIZE, [result, *ends], node.output[:1], node.name)

    def _dequantize_operand(self, node: onnx.NodeProto, place: int, made: str, axis: int | None) -> onnx.NodeProto:
        names = [name for name in node.input[place : place + 3] if name]
        if not self._has_channel_scales(node.input[place + 1]):
            axis = None
        return helper.make_node(DEQUANTIZE, names, [made], node.name, axis=axis)

    def _has_channel_scales(self, scale: str) -> bool:
        value = self._constants.constant_value(scale)
        return value is not None and value.size > 1

    def _dequantize_bias(self, node: onnx.NodeProto, form: _QOperatorForm, made: str) -> Iterator[onnx.NodeProto]:
        """Dequantize a bias, in steps of the product of the operands' scales."""
        assert form.bias is not None
        scales = [node.input[place + 1] for place in form.operands]
        alpha = attribute_value(node, "alpha", 1.0)
        known = [self._constants.constant_value(name) for name in scales]
        product = self._fresh_name(f"{made}_scale")
        if all(value is not None for value in known):
            a, b = (np.asarray(value, np.float64).reshape(-1) for value in known)
            steps = (alpha * a * b).astype(np.float32)
            self._graph.initializer.append(numpy_helper.from_array(steps if steps.size > 1 else steps[0], product))
        else:
            yield helper.make_node("Mul", scales, [product], node.name)
        yield helper.make_node(DEQUANTIZE, [node.input[form.bias], product], [made], node.name, axis=0)

    def _expand_fused_product(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Expand an integer product whose node also converts the result to float."""
        given = [*node.input, *[""] * 7]
        if node.op_type == "DynamicQuantizeMatMul":
            a = [self._fresh_name(f"{node.input[0]}_{end}") for end in ("quantized", "scale", "zero_point")]
            yield helper.make_node(DYNAMIC, node.input[:1], a, node.name)
            b = [given[1], given[2], given[3]]
            bias = given[4]
        else:
            a = [given[0], given[2], given[4]]
            b = [given[1], given[3], given[5]]
            bias = given[6]
        made = [self._fresh_name(a[0]), self._fresh_name(b[0])]
        yield helper.make_node(DEQUANTIZE, filter(None, a), made[:1], node.name)
        if self._has_channel_scales(b[1]):
            axis = {"axis": -1}
        else:
            axis = {}
        yield helper.make_node(DEQUANTIZE, filter(None, b), made[1:], node.name, **axis)
        if not bias:
            yield helper.make_node("MatMul", made, node.output[:1], node.name)
            return
        product = self._fresh_name(node.output[0])
        yield helper.make_node("MatMul", made, [product], node.name)
        yield helper.make_node("Add", [product, bias], node.output[:1], node.name)

    def _add_constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer under a fresh name and return the name."""
        fresh = self._fresh_name(name)
        self._graph.initializer.append(numpy_helper.from_array(value, fresh))
        return fresh

    def _fresh_name(self, name: str) -> str:
        """Return a fresh name for a floating tensor, without the suffix that onnxruntime's quantizer added."""
        fresh = name.removesuffix(_SUFFIX) or name
        return unique_name(fresh, self._used)
