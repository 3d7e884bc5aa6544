"""Run a quantized file in float64 to find the effect of its quantization steps. Its rounding is kept, left out or drawn
at random.

A step is the distance between neighboring numbers of a quantized type: for integers, the scale; for 8-bit floats, the
scale times the spacing of the type's numbers near the value. Rounding moves a value by at most half a step, as long as
it lies inside the type's range. Drawing other roundings with the same steps shows how far rounding can change the
outputs:

- For an activation, the grid is shifted by a random fraction θ of a step, θ in (−1/2, 1/2), one θ for each quantizer
  and run: q = round(x/s + θ) − θ. Every shift is as good a quantization as the file's own (θ = 0). Errors stay
  correlated: equal values get equal errors. The value 0 is not moved, because 0 is on the grid of every file.
- A stored weight becomes one of the values that round to its code: code + ξ, ξ in (−1/2, 1/2), independently for each
  weight. If all codes under one scale are zero, no value determined that scale: the weights were zero and stay zero. A
  bias that compensates an input shift by means of the stored weight is recomputed for the drawn weight
  (`shifted_bias`).

Saturation is not rounding. A draw extends each range by a step (or without limit, see `RoundingDraw.clips`). The lower
end of a range that begins at 0 is not extended, because such a range expresses a ReLU without a node. So the allowed
error covers a value that rounding moved past the end of its range, but not a value that the range itself clips. Such
clipping is detected in the plain run, which rounds as the file does, and is reported (`Saturation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from ..errors import NormdeployError
from ..evaluate.evaluator import UnsupportedOp, silence_numpy
from ..evaluate.evaluator_core import Array, is_quantized_type, optional_input
from ..evaluate.quantize_ops import (
    broadcast_parameter,
    finite_limits,
    quantized_dtype,
    scaled_quotient,
    subtract_zero_points,
)
from ..graphs.function_ops import inline_calls
from ..graphs.quantization_info import DEQUANTIZE, DYNAMIC, INTEGER, QUANTIZE, is_quantization_node
from ..norms.third_party import function_op_row
from ..storage.proto_traversal import attribute_values, copy_model
from ..types import Arrays
from . import RunResult
from .float64_evaluator import Float64Evaluator, NotEvaluated
from .onnx_float64 import OnnxFloat64Runner
from .rounding_draws import RoundingDraw, Saturation
from .shifted_bias import bias_correction, find_quantizer_shifts

_MOVES = frozenset({"Gather", "GatherElements", "GatherND", "Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze"})
# Maximum distance beyond a range, in steps, that rounding explains. Rounding brings a value within half a step back
# into the range, and a rounded zero point moves the range by another half step. The 1e-6 is a margin for float64's own
# rounding.
_ROOM = 1.0 + 1e-6


class _QuantizedEvaluator(Float64Evaluator):
    """Evaluator in which quantized tensors are not constants, since each run may round them differently."""

    draw = RoundingDraw()

    def __init__(self, proto: onnx.ModelProto, types: Mapping[str, np.dtype]) -> None:
        super().__init__(proto, types)
        moving: set[str] = set()
        for node in self.nodes:
            if is_quantization_node(node) or moving & set(self.read_names(node)):
                moving.update(filter(None, node.output))
        # Tensors whose values the file alone determines, including quantized tensors.
        self.stored = frozenset(self.constants)
        self.constants -= moving
        self.seen: dict[str, Saturation] = {}
        # Outputs of quantizers that clipped in the last plain run.
        self.clipped: set[str] = set()
        self.shifts = find_quantizer_shifts(self)
        self.tables = self._find_lookup_tables()

    def _find_lookup_tables(self) -> frozenset[str]:
        """Return tensors that nodes select from stored codes before the codes are dequantized, such as an embedding's
        rows.
        """
        tables: set[str] = set()
        for node in self.nodes:
            if node.op_type == DEQUANTIZE:
                name = node.input[0]
            else:
                name = ""
            while (maker := self.makers.get(name)) is not None and self.nodes[maker].op_type in _MOVES:
                taken = name
                name = self.nodes[maker].input[0]
                if name in self.stored and taken not in self.stored:
                    tables.add(taken)
        return frozenset(tables)

    def evaluate_node(
        self, node: onnx.NodeProto, inputs: Sequence[Any], known: Mapping[str, Array]
    ) -> Sequence[Array | None]:
        """Compute one node with the current draw.

        Returns:
            Its outputs, as from ``Float64Evaluator.evaluate_node``.

        Raises:
            NotEvaluated: the node can't be computed.
        """
        try:
            if is_quantization_node(node):
                return self._evaluate_quantization(node, inputs, known)
        except (UnsupportedOp, ValueError, TypeError, IndexError) as error:
            raise NotEvaluated(f"{node.op_type} {node.name!r}: {error}") from error
        if self.draw.weights is not None and self.tables.intersection(node.output):
            inputs = [self._perturb_codes(node, np.asarray(inputs[0]), ()), *inputs[1:]]
        results = super().evaluate_node(node, inputs, known)
        if self.draw.weights is None or not node.output or node.output[0] not in self.shifts:
            return results
        dequantize = self.nodes[self.makers[node.input[1]]]
        (stored,) = super().evaluate_node(
            dequantize, [self.tensor_value(name, known) for name in dequantize.input], known
        )
        rng = self._node_generator(node, self.draw.weights)
        back = bias_correction(node, self.shifts[node.output[0]], np.asarray(stored), np.asarray(inputs[1]), rng)
        return (np.asarray(results[0]) + back,)

    def _evaluate_quantization(
        self, node: onnx.NodeProto, inputs: Sequence[Any], known: Mapping[str, Array]
    ) -> Sequence[Array | None]:
        fixed = node.input[0] in self.stored
        if node.op_type == QUANTIZE:
            if not fixed and self.draw.rounds_as_stored:
                self._record_saturation(node, inputs)
            if node.output[0] in self.draw.held:
                return (self._quantize_unclipped(node, inputs),)
            how = self.draw.weights if fixed else self.draw.activations
            if how is not None:
                return (self._quantize_with_draw(node, inputs, how, fixed),)
        elif node.op_type == DEQUANTIZE and node.output[0] in self.draw.held:
            held = self.draw.held[node.output[0]]
            return (known[self.nodes[self.makers[node.input[0]]].input[0]] if held is None else held,)
        elif node.op_type == DEQUANTIZE and fixed and self.draw.weights is not None:
            if self.makers.get(node.input[0]) is None or not self._has_quantizer_before(node.input[0]):
                inputs = [self._perturb_codes(node, np.asarray(inputs[0]), inputs), *inputs[1:]]
        elif node.op_type == DYNAMIC and self.draw.activations is not None:
            _, scale, zero = super().evaluate_node(node, inputs, known)
            return (self._quantize_with_draw(node, [inputs[0], scale, zero], self.draw.activations, False), scale, zero)
        elif node.op_type in INTEGER:
            return self._evaluate_integer_product(node, inputs, known)
        return super().evaluate_node(node, inputs, known)

    def _body_evaluator(self, node: onnx.NodeProto, name: str) -> Float64Evaluator:
        """Return the evaluator of a body. It rounds in the same way as the evaluator of the graph around the body."""
        body = super()._body_evaluator(node, name)
        assert isinstance(body, _QuantizedEvaluator)
        body.draw = self.draw
        return body

    def round_to_file_type(self, name: str, value: Array) -> Array:
        """Convert ``value`` to the file's dtype of ``name``.

        Returns:
            The converted array; float64 codes of an integer tensor become float32, not integers, because a Resize
            interpolates codes.
        """
        own = self.types.get(name)
        if own is not None and own.kind in "iu" and np.asarray(value).dtype == np.float64:
            return np.asarray(value, np.float32)
        return super().round_to_file_type(name, value)

    def _has_quantizer_before(self, name: str) -> bool:
        """Return whether codes come from a QuantizeLinear, so that their rounding was already drawn."""
        return any(self.nodes[p].op_type == QUANTIZE for p in self.nodes_between([name]))

    def _evaluate_integer_product(
        self, node: onnx.NodeProto, inputs: Sequence[Any], known: Mapping[str, Array]
    ) -> Sequence[Any]:
        if (held := self.draw.held.get(node.output[0])) is not None:
            inputs = [inputs[0], held, *inputs[2:]]
        elif self.draw.weights is not None and node.input[1] in self.stored:
            inputs = [inputs[0], self._perturb_codes(node, np.asarray(inputs[1]), ()), *inputs[2:]]
        if all(np.asarray(v).dtype.kind != "f" for v in inputs[:2]):
            return super().evaluate_node(node, inputs, known)
        a, b = subtract_zero_points(inputs)
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        if node.op_type == "MatMulInteger":
            plain.op_type = "MatMul"
        else:
            plain.op_type = "Conv"
        return super().evaluate_node(plain, [a, b], known)

    def _node_generator(self, node: onnx.NodeProto, seed: int | str) -> np.random.Generator:
        """Make the random generator of one node for one seed. Its numbers do not depend on the draws of other nodes."""
        return np.random.default_rng([int(seed), self.makers[node.output[0]]])

    def _perturb_codes(self, node: onnx.NodeProto, codes: Array, inputs: Sequence[Any]) -> Array:
        """Draw weights that round to the given codes.

        Args:
            inputs: inputs of the DequantizeLinear. Codes with the same scale form a group. () for other nodes.

        Returns:
            Codes as float64, moved by at most half a step.
        """
        assert self.draw.weights is not None
        drawn = self.draw.width * self._node_generator(node, self.draw.weights).uniform(-0.5, 0.5, codes.shape)
        wide = codes.astype(np.float64)
        moved = drawn * _code_spacing(wide, codes.dtype)
        if len(inputs) > 1:
            attrs = attribute_values(node)
            axis = attrs.get("axis", 1)
            block = attrs.get("block_size", 0)
            zero = optional_input(inputs, 2)
            if zero is None:
                values = wide
            else:
                values = wide - broadcast_parameter(zero, codes.shape, axis, block).astype(np.float64)
            moved = np.where(_is_group_nonzero(values != 0, np.asarray(inputs[1]), axis, block), moved, 0.0)
        return wide + moved

    def _quantize_with_draw(self, node: onnx.NodeProto, inputs: Sequence[Any], how: int | str, fixed: bool) -> Array:
        """Quantize a tensor with a rounding that is drawn or left out.

        Args:
            how: "exact" to leave out the rounding; a seed to draw it.
            fixed: True if the tensor is a weight. Each element is then drawn separately, and nothing is clipped.

        Returns:
            Codes as float64, including the zero point.
        """
        attrs = attribute_values(node)
        if node.op_type == DYNAMIC:
            kind = np.dtype(np.uint8)
        else:
            kind = quantized_dtype(optional_input(inputs, 2), attrs)
        steps, zero = scaled_quotient(inputs, attrs)
        codes = steps + zero
        if how != "exact":
            unit = _code_spacing(steps, kind)
            theta = self._node_generator(node, how).uniform(-0.5, 0.5, steps.shape if fixed else ())
            drawn = (np.rint(steps / unit + theta) - theta) * unit
            if self.draw.width != 1:
                drawn = steps + self.draw.width * (drawn - steps)
            codes = np.where(steps == 0, 0.0, drawn) + zero
        if fixed:
            return codes
        if self.draw.clips:
            return _clip_beyond_one_step(codes, zero, kind)
        return _mask_range_ends(codes, zero, kind)

    def _quantize_unclipped(self, node: onnx.NodeProto, inputs: Sequence[Any]) -> Array:
        """Quantize a tensor without rounding and without clipping, except for ReLU.

        Returns:
            Codes as float64, including the zero point.
        """
        attrs = attribute_values(node)
        steps, zero = scaled_quotient(inputs, attrs)
        return _mask_range_ends(steps + zero, zero, quantized_dtype(optional_input(inputs, 2), attrs))

    def _record_saturation(self, node: onnx.NodeProto, inputs: Sequence[Any]) -> None:
        attrs = attribute_values(node)
        kind = quantized_dtype(optional_input(inputs, 2), attrs)
        steps, zero = scaled_quotient(inputs, attrs)
        x = np.asarray(inputs[0])
        codes = steps + zero
        finite = np.isfinite(codes)
        if not finite.any():
            return
        low, high = finite_limits(kind)
        scale = np.asarray(inputs[1], np.float64)
        one = scale.size == 1 and zero.size == 1
        ends = tuple((end - float(zero.reshape(-1)[0])) * float(scale.reshape(-1)[0]) for end in (low, high))
        name = f"{node.op_type} {node.name}".strip()
        seen = self.seen.setdefault(
            node.output[0], Saturation(name, node.input[0], (ends[0], ends[1]) if one else (np.nan, np.nan))
        )
        room = _ROOM * float(_code_spacing(np.asarray(high), kind))
        if _is_relu_range(zero, kind):
            below = np.zeros(())
        else:
            below = low - codes
        excess = np.where(finite, np.maximum(codes - high, below), 0.0) - room
        clipped = excess > 0
        if clipped.any():
            self.clipped.add(node.output[0])
        seen.least, seen.largest = min(seen.least, float(x[finite].min())), max(seen.largest, float(x[finite].max()))
        seen.beyond = max(seen.beyond, float(excess.max() + room) if clipped.any() else 0.0)
        seen.share = max(seen.share, float(clipped.mean()))
        width = float((min(codes[finite].max(), high) - max(codes[finite].min(), low)) / (high - low))
        seen.used = max(seen.used, width)


def _is_group_nonzero(nonzero: Array, scale: Array, axis: int, block: int) -> Array:
    """Return, for each element, whether any code with the same scale is not zero. The array is broadcastable to the
    codes.
    """
    if scale.size == 1 or not nonzero.size:
        return np.asarray(nonzero.any())
    if not block:
        return np.asarray(nonzero.any(tuple(i for i in range(nonzero.ndim) if i != axis % nonzero.ndim), keepdims=True))
    size = nonzero.shape[axis]
    blocks = np.logical_or.reduceat(nonzero, np.arange(0, size, block), axis)
    return np.asarray(np.repeat(blocks, block, axis).take(np.arange(size), axis))


def _is_relu_range(zero: Array, kind: np.dtype[Any]) -> bool:
    """Return whether a range begins at 0. Such a range expresses a ReLU without a node."""
    return "int" in kind.name and bool(np.all(zero == finite_limits(kind)[0]))


def _mask_range_ends(codes: Array, zero: Array, kind: np.dtype[Any]) -> Array:
    if _is_relu_range(zero, kind):
        return np.maximum(codes, finite_limits(kind)[0])
    return codes


def _clip_beyond_one_step(codes: Array, zero: Array, kind: np.dtype[Any]) -> Array:
    """Clip unrounded codes that lie more than a step outside their range. Rounding explains a smaller distance."""
    low, high = finite_limits(kind)
    room = _ROOM * _code_spacing(np.asarray(high), kind)
    codes = np.where(codes > high + room, high, codes)
    return np.where(codes < low - (0.0 if _is_relu_range(zero, kind) else room), low, codes)


def _code_spacing(steps: Array, kind: np.dtype[Any]) -> Array:
    """Return the distance between the type's numbers around ``steps``: 1 for integers."""
    if not is_quantized_type(kind) or "int" in kind.name:
        return np.ones(())
    info = ml_dtypes.finfo(kind)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(steps), float(info.smallest_normal))))
    return np.asarray(np.ldexp(1.0, exponent.astype(np.int64) - info.nmant))


class QuantizedRunner(OnnxFloat64Runner):
    """Runner of a quantized file in float64. ``infer`` rounds as the file does; ``run_with_draw`` rounds differently.

    Raises:
        GraphError: a function that the file calls can't be inlined.
    """

    exact = _QuantizedEvaluator

    def __init__(self, proto: onnx.ModelProto) -> None:
        rows = [function_op_row(n.domain, n.op_type) for n in proto.graph.node]
        # Functions that quantize are inlined, because roundings can be drawn only for nodes, not for calls of
        # functions.
        if any(row is not None and row.quantizes for row in rows):
            proto = copy_model(proto)
            calls = [n for n, row in zip(proto.graph.node, rows, strict=True) if row is not None and row.quantizes]
            proto = inline_calls(proto, calls)
        super().__init__(proto)

    def _run_bodies(self, node: onnx.NodeProto, values: dict[str, Array]) -> bool:
        """Leave control flow to `_QuantizedEvaluator`, which draws the roundings in bodies too."""
        return False

    def run_with_draw(self, feeds: Arrays, draw: RoundingDraw) -> RunResult:
        """Run the model with the given roundings.

        Returns:
            Output name -> array; floating outputs are float64.

        Raises:
            InputError: inputs are missing or unknown.
            NormdeployError: a node can't be computed.
        """
        with self._drawing(draw):
            return self.infer(feeds)

    @contextmanager
    def _drawing(self, draw: RoundingDraw) -> Iterator[None]:
        """Set the evaluator's roundings within the context."""
        stepped = self._evaluator
        stepped.draw = draw
        if draw.rounds_as_stored:
            stepped.clipped = set()
        try:
            yield
        finally:
            stepped.draw = RoundingDraw()

    @property
    def proto(self) -> onnx.ModelProto:
        """Return the model that is run, in which functions that quantize are inlined."""
        return self._evaluator.proto

    @property
    def _evaluator(self) -> _QuantizedEvaluator:
        assert isinstance(self._exact, _QuantizedEvaluator)
        return self._exact

    def list_saturations(self) -> list[Saturation]:
        """List which values the quantizers of activations received in all plain runs so far.

        Returns:
            One record per quantizer, in the file's order.
        """
        seen = self._evaluator.seen
        return [seen[name] for node in self._evaluator.nodes for name in node.output[:1] if name in seen]

    def clipped_tensors(self) -> frozenset[str]:
        """List the quantized tensors that were clipped in the last run that rounded as the file does.

        Returns:
            Names of the quantizers' outputs.
        """
        return frozenset(self._evaluator.clipped)

    def reset_saturations(self) -> None:
        """Delete the saturations recorded so far."""
        self._evaluator.seen.clear()

    def run_all_tensors(self, feeds: Arrays, draw: RoundingDraw) -> dict[str, Array]:
        """Run the model with the given roundings and keep every tensor.

        Returns:
            Tensor name -> array; floats are float64.

        Raises:
            NormdeployError: a node can't be computed.
        """
        known = {n: np.asarray(v, np.float64) if v.dtype.kind == "f" else v for n, v in feeds.items()}
        try:
            with self._drawing(draw), silence_numpy():
                return self._evaluator.evaluate_nodes(self._places, known)
        except NotEvaluated as error:
            raise NormdeployError(f"the file can't be run in float64: {error}") from error
