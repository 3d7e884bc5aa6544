"""Compute the constants that another program may store in place of the constants of a file.

These are the values that the file computes from its constants, and the weights and biases of linear ops after the
scales and shifts around them are folded into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from ...storage.onnx_domains import STANDARD
from .field_run import ConcreteGraph, Trace, plain_attributes
from .field_values import Field, NotEvaluated, Value
from .norm_ops import evaluate_epsilon
from .op_call import Call

# Maximum number of ways to fold the neighbors of one tensor that are tried
_WAYS = 6


@dataclass(frozen=True)
class Affine:
    """Linear map with a scale and a shift: y = core(x; weight) + bias, or y = x·weight + bias without a core.

    Attributes:
        op: op type of the core; "" without a core.
        weight: the weight; None stands for 1.
        bias: one number per channel of the result, or one number; None stands for 0.
        axis: axis of the weight that belongs to the channels of the result.
    """

    op: str
    weight: Value | None
    bias: Value | None
    axis: int


@dataclass
class _Folder:
    """Search for folded weights and biases in one graph."""

    point: Field
    found: list[Value] = field(default_factory=list)
    maps: dict[str, list[Affine]] = field(default_factory=dict)

    def call(self, attrs: Mapping[str, object] | None = None) -> Call:
        return Call(self.point, "", [], attrs or {}, 21, 1)

    def record(self, name: str, made: list[Affine]) -> None:
        """Keep the maps that end in the tensor ``name``, and their numbers."""
        for affine in made:
            self.found += [x for x in (affine.weight, affine.bias) if x is not None and x.stored is None]
        self.maps.setdefault(name, []).extend(made[:_WAYS])

    def scale(self, affine: Affine, factor: Value) -> Affine:
        """Multiply the result of a map."""
        call = self.call()
        weight = factor
        if affine.weight is not None:
            weight = call.multiply(affine.weight, self._along(factor, affine))
        bias = None if affine.bias is None else call.multiply(affine.bias, factor)
        return Affine(affine.op, weight, bias, affine.axis)

    def shift(self, affine: Affine, term: Value) -> Affine:
        """Add to the result of a map."""
        bias = term if affine.bias is None else self.call().add(affine.bias, term)
        return Affine(affine.op, affine.weight, bias, affine.axis)

    def _along(self, factor: Value, affine: Affine) -> Value:
        """Shape one number per channel like the weight of a core."""
        weight = affine.weight
        if not affine.op or factor.size == 1 or weight is None:
            return factor if not affine.op or weight is None else self.call().reshape(factor, ())
        shape = [1] * weight.rank
        shape[affine.axis] = factor.size
        return self.call().reshape(factor, shape)

    def linear(self, op: str, weight: Value, bias: Value | None, axis: int, before: Affine | None) -> Affine:
        """Make the map of a linear op, after a scale and shift of its input."""
        if before is None:
            return Affine(op, weight, bias, axis)
        call = self.call()
        inner = 1 - axis
        other = [i for i in range(weight.rank) if i != axis]
        if before.bias is not None:
            term = before.bias
            if term.size > 1:
                shape = [1] * weight.rank
                shape[inner] = term.size
                term = call.reshape(term, shape)
            else:
                term = call.reshape(term, ())
            moved = call.reshape(call.sum(call.multiply(weight, term), other), (weight.dims[axis],))
            bias = moved if bias is None else call.add(bias, moved)
        if before.weight is not None:
            factor = before.weight
            shape = [1] * weight.rank
            if factor.size > 1:
                shape[inner] = factor.size
            weight = call.multiply(weight, call.reshape(factor, shape))
        return Affine(op, weight, bias, axis)


def fold_neighbors(point: Field, graph: ConcreteGraph, trace: Trace) -> list[Value]:
    """Compute exact values of the constants that a tool may store in place of the constants of ``graph``.

    Returns:
        constants with residues and approximate numbers.
    """
    folder = _Folder(point)
    folder.found += [x for x in trace.values.values() if x.approx is not None and x.stored is None]
    folder.found += point.body_constants.values()
    for node in graph.nodes:
        if node.domain not in STANDARD or not node.output:
            continue
        try:
            _fold_node(folder, node, trace.values, graph)
        # Numbers that do not fit together are not folded.
        except (NotEvaluated, ValueError, IndexError):
            continue
    return folder.found


def _fold_node(folder: _Folder, node: onnx.NodeProto, values: Mapping[str, Value], graph: ConcreteGraph) -> None:
    inputs = [values.get(name) if name else None for name in node.input]
    name = node.output[0]
    match node.op_type:
        case "Conv" | "ConvTranspose" | "Gemm" | "MatMul":
            _fold_linear(folder, node, inputs)
        case "Mul" | "Div" | "Add" | "Sub":
            _fold_binary(folder, node, inputs)
        case "BatchNormalization":
            scale, shift = _statistics_as_affine(folder, node, inputs)
            made = [Affine("", scale, shift, 0)]
            made += [folder.shift(folder.scale(a, scale), shift) for a in folder.maps.get(node.input[0], ())]
            folder.record(name, made)
        case "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" | "InstanceNormalization":
            gamma = inputs[1] if len(inputs) > 1 else None
            beta = inputs[2] if len(inputs) > 2 else None
            if all(x is None or x.is_constant for x in (gamma, beta)):
                folder.record(name, [Affine("", gamma, beta, 0)])
        case "Identity" | "Cast" | "Reshape" | "Dropout" | "Transpose" | "Flatten" | "Squeeze" | "Unsqueeze":
            folder.record(name, list(folder.maps.get(node.input[0], ())))


def _fold_linear(folder: _Folder, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
    attrs = plain_attributes(node)
    weight = inputs[1]
    bias = inputs[2] if len(inputs) > 2 else None
    if (
        weight is None
        or folder.point.shared_hash(weight) is not None
        or not weight.is_constant
        or (bias is not None and not bias.is_constant)
    ):
        return
    axis = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0 if attrs.get("transB") else 1}.get(node.op_type, weight.rank - 1)
    if weight.rank < 2 or (node.op_type == "MatMul" and weight.rank > 2) or attrs.get("group", 1) != 1:
        folder.record(node.output[0], [Affine(node.op_type, weight, bias, axis)] if weight.rank >= 2 else [])
        return
    befores: list[Affine | None] = [None, *(a for a in folder.maps.get(node.input[0], ()) if not a.op)]
    made = []
    for before in befores:
        try:
            made.append(folder.linear(node.op_type, weight, bias, axis, before))
        except (NotEvaluated, ValueError):
            continue
    folder.record(node.output[0], made)


def _fold_binary(folder: _Folder, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
    call = folder.call()
    place = next((i for i, x in enumerate(inputs) if x is not None and x.is_constant), None)
    if place is None or len(inputs) != 2 or (node.op_type == "Div" and place == 0):
        return
    number = inputs[place]
    assert number is not None
    flat = call.reshape(number, (number.size,)) if number.size > 1 else call.reshape(number, ())
    earlier = folder.maps.get(node.input[1 - place], [])
    made = []
    for affine in [Affine("", None, None, 0), *earlier]:
        try:
            if node.op_type in ("Mul", "Div"):
                factor = flat if node.op_type == "Mul" else call.inverse(flat)
                made.append(folder.scale(affine, factor))
            elif node.op_type == "Add":
                made.append(folder.shift(affine, flat))
            elif place == 1:
                made.append(folder.shift(affine, call.negate(flat)))
            else:
                made.append(folder.shift(folder.scale(affine, call.number(-1.0)), flat))
        except (NotEvaluated, ValueError):
            continue
    folder.record(node.output[0], made)


def _statistics_as_affine(folder: _Folder, node: onnx.NodeProto, inputs: list[Value | None]) -> tuple[Value, Value]:
    call = folder.call(plain_attributes(node))
    if any(x is None or not x.is_constant for x in inputs[1:5]):
        raise NotEvaluated("statistics that are not constants")
    gamma, beta, mean, variance = (x for x in inputs[1:5] if x is not None)
    epsilon = evaluate_epsilon(call)
    scale = call.multiply(gamma, call.inverse_root(call.add(variance, epsilon)))
    return scale, call.subtract(beta, call.multiply(mean, scale))
