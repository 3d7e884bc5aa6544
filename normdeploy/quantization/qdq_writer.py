"""Write QuantizeLinear and DequantizeLinear around linear layers, in standard ONNX.

A QuantizeLinear and the DequantizeLinear after it are called a pair. The input of a layer gets a pair that only linear
layers read; other readers (a residual, a norm) keep reading the float tensor. Layers that share an input share its
pair. Weights are stored as codes, with a DequantizeLinear after them. onnxruntime computes a convolution in integers
only if the result is quantized too. So this result gets a pair that all of its readers use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..graphs.proto_queries import all_names, captured_names
from ..graphs.quantization_info import RECENTRED
from ..storage.proto_traversal import copy_model, set_metadata
from .number_formats import (
    INT4,
    CodeFormat,
    ScaleZeroPoint,
    broadcast_scales,
    quantize_to_codes,
    round_scales_up,
    weight_scales,
)

# Largest number of steps of a bias: half of int32's range
_MOST = 2.0**30


@dataclass(frozen=True)
class InputShift:
    """Shift of a layer's input that the layer's bias compensates.

    Attributes:
        offset: float64 [channels], subtracted from the input. It is 0 for channels whose shift the bias compensates
            with the original weight.
        bias: name of the initializer of the bias that compensates the shift. No other node reads it.
    """

    offset: np.ndarray
    bias: str

    def bias_correction(self, w: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """Compute the correction of the bias for a rounded weight (`normdeploy.quantization.bias_corrections`).

        Args:
            w: original weight, [channels, outputs].
            stored: rounded weight, [channels, outputs].

        Returns:
            float64 [outputs], to be added to the bias.
        """
        return np.asarray(self.offset @ (stored.astype(np.float64) - w.astype(np.float64)))


@dataclass(frozen=True)
class LayerPlan:
    """Plan of how one layer is written.

    Attributes:
        tensor: first result of the layer's node.
        data: index of the node's data input.
        weight: index of the node's weight input.
        form: format of the weight.
        axis: axis of the weight along which scales vary: one scale per index, or one per ``block`` indices. None for a
            single scale.
        step: step of the input; None if only the weight is quantized.
        dynamic: True to compute the step of the input at run time.
        scales: dtype that must represent the weight's scales exactly.
        stored: codes and scales of the weight from GPTQ; None to round each element to the nearest code.
        shift: shift of the input that the bias compensates with the rounded weight.
        least: lower limit of the weight's scales, a single number or [outputs].
    """

    tensor: str
    data: int
    weight: int
    form: CodeFormat
    axis: int | None
    step: ScaleZeroPoint | None = None
    block: int = 0
    dynamic: bool = False
    scales: np.dtype = field(default_factory=lambda: np.dtype(np.float32))
    stored: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
    shift: InputShift | None = field(default=None, compare=False)
    least: np.ndarray | float = field(default=0.0, compare=False)

    @property
    def has_channels_first(self) -> bool:
        """Return True if the input channels are the first axis of a matrix.

        The scales of such a matrix vary along the outputs or, for blocks, along the inputs.
        """
        return self.axis == (0 if self.block else 1)


def layer_biases(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Collect the constant biases that Conv, ConvTranspose and Gemm have as an input.

    Returns:
        biases, by the first result of the node.
    """
    stored = {t.name: t for t in proto.graph.initializer}
    return {
        n.output[0]: numpy_helper.to_array(stored[n.input[2]])
        for n in proto.graph.node
        if n.op_type in ("Conv", "ConvTranspose", "Gemm") and len(n.input) > 2 and n.input[2] in stored
    }


def smallest_scale_for_bias(
    bias: np.ndarray | None, step: ScaleZeroPoint, plan: LayerPlan, outputs: int
) -> np.ndarray | float:
    """Compute the smallest weight scales with which the bias fits into int32.

    onnxruntime converts a float bias to an int32 in steps of (input scale · weight scale), and does not check for
    overflow. The bias overflows if the weights of a channel are much smaller than its bias. A larger scale avoids the
    overflow. For each input, it changes the result by less than 2⁻²⁰ of the bias.

    Args:
        bias: [1] or [outputs]; None if the layer has no bias.
        step: step of the input.

    Returns:
        float32 [outputs]. 0 if no limit applies. Also 0 for a weight with a single scale, because the limit would make
        the scale larger for all channels.
    """
    if bias is None or bias.size not in (1, outputs) or plan.axis is None or plan.block or not plan.form.is_integer:
        return 0.0
    least = np.where(np.isfinite(bias), np.abs(bias), 0.0).reshape(-1) / np.float32(_MOST * step.scale)
    return np.broadcast_to(least, outputs).astype(np.float32)


def write_quantized(
    proto: onnx.ModelProto,
    plans: Mapping[str, LayerPlan],
    bias: bool = False,
    results: Mapping[str, tuple[str, ScaleZeroPoint]] | None = None,
) -> onnx.ModelProto:
    """Copy ``proto`` with the layers of ``plans`` quantized.

    Args:
        plans: plans, by the first result of the layer's node.
        bias: True to store biases of integer layers as int32 with a DequantizeLinear after them. onnxruntime's integer
            kernels of Conv and Gemm need this.
        results: tensor → (layer whose result the tensor is, step). If the layer is in ``plans``, the tensor gets a pair
            that all of its readers use.

    Returns:
        the copy.
    """
    out = copy_model(proto)
    graph = out.graph
    work = _QdqWriter(graph, {t.name: t for t in graph.initializer}, all_names(graph))
    nodes = work.nodes
    shared = {t: step for t, (layer, step) in (results or {}).items() if layer in plans}
    renamed: dict[str, str] = {}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        plan = plans.get(node.output[0]) if node.output else None
        if plan is not None and plan.dynamic:
            work.write_dynamic(node, plan)
            continue
        if plan is not None:
            if plan.shift is not None:
                renamed[plan.shift.bias] = work.write_corrected_bias(node, plan, plan.shift)
                for i, name in enumerate(node.input):
                    node.input[i] = renamed.get(name, name)
            work.write_layer(node, plan, bias)
        nodes.append(node)
        for name in node.output:
            if name in shared:
                renamed[name] = work.write_quantize_dequantize(name, shared[name])
                work.done.add(renamed[name])
    del graph.node[:]
    graph.node.extend(nodes)
    read = {i for n in nodes for i in (*n.input, *captured_names(n))} | {v.name for v in (*graph.output, *graph.input)}
    kept = [t for t in (*graph.initializer, *work.made) if t.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    if work.recentred_biases:
        set_metadata(out, RECENTRED, work.recentred_biases)
    return out


class _QdqWriter:
    """Writer of names, constants and pairs, each only once. ``nodes`` collects the new nodes."""

    def __init__(self, graph: onnx.GraphProto, weights: dict[str, TensorProto], taken: Iterable[str]) -> None:
        self.weights, self.taken = weights, set(taken)
        self.nodes: list[onnx.NodeProto] = []
        self.made: list[TensorProto] = []
        self._pairs: dict[object, str] = {}
        # Names of the results of a DynamicQuantizeLinear. For a weight without a DequantizeLinear, names of its codes
        # and scales.
        self._parts: dict[tuple[str, str], list[str]] = {}
        # Results that already have a pair that all readers use.
        self.done: set[str] = set()
        # Name of a corrected bias → indices of the channels that the correction leaves out
        self.recentred_biases: dict[str, list[int]] = {}

    def fresh_name(self, name: str) -> str:
        """Reserve an unused name.

        Returns:
            ``name``, with a number appended if it is taken.
        """
        candidate = name
        n = 1
        while candidate in self.taken:
            n += 1
            candidate = f"{name}_{n}"
        self.taken.add(candidate)
        return candidate

    def add_constant(self, name: str, values: np.ndarray, kind: int) -> str:
        """Add an initializer of elem_type ``kind``.

        Returns:
            its name.
        """
        made = self.fresh_name(name)
        self.made.append(_make_initializer(made, values, kind))
        return made

    def write_layer(self, node: onnx.NodeProto, plan: LayerPlan, bias: bool) -> None:
        """Quantize the weight, the input and, with ``bias``, the bias of one layer."""
        weight = node.input[plan.weight]
        key = ("weight", weight, plan.form.name, plan.axis, plan.block)
        q, scales = self.quantize_weight(weight, plan)
        if key not in self._pairs:
            self._pairs[key] = self.write_dequantize(weight, q, scales, plan)
        node.input[plan.weight] = self._pairs[key]
        if plan.step is None:
            return
        if node.input[plan.data] not in self.done:
            node.input[plan.data] = self.write_quantize_dequantize(node.input[plan.data], plan.step)
        if bias and len(node.input) > 2 and node.input[2] in self.weights and plan.form.is_integer:
            self.write_quantized_bias(node, plan, scales)

    def quantize_weight(self, weight: str, plan: LayerPlan) -> tuple[np.ndarray, np.ndarray]:
        """Quantize a weight by its plan.

        Returns:
            codes in the weight's shape, and float32 scales.
        """
        if plan.stored is not None:
            return plan.stored
        w = numpy_helper.to_array(self.weights[weight])
        scales = round_scales_up(
            np.maximum(weight_scales(w, plan.axis, plan.form, plan.block), plan.least), plan.scales
        )
        return quantize_to_codes(w, broadcast_scales(scales, w.shape, plan.axis, plan.block), plan.form), scales

    def write_corrected_bias(self, node: onnx.NodeProto, plan: LayerPlan, shift: InputShift) -> str:
        """Write the bias of a layer, corrected for the rounded weight (`normdeploy.quantization.bias_corrections`).

        Returns:
            name of the new bias.
        """
        name = node.input[plan.weight]
        w = numpy_helper.to_array(self.weights[name])
        q, scales = self.quantize_weight(name, plan)
        stored = q.astype(np.float32) * broadcast_scales(scales, w.shape, plan.axis, plan.block)
        w, stored = (w, stored) if plan.has_channels_first else (w.T, stored.T)
        b = numpy_helper.to_array(self.weights[shift.bias])
        values = (b + shift.bias_correction(w, stored)).astype(np.float32)
        made = self.add_constant(f"{shift.bias}_recentred", values, TensorProto.FLOAT)
        self.recentred_biases[made] = np.flatnonzero(shift.offset == 0).tolist()
        return made

    def write_dequantize(self, name: str, q: np.ndarray, scales: np.ndarray, plan: LayerPlan) -> str:
        """Write a weight's codes and scales, and a DequantizeLinear that reads them.

        Returns:
            name of the dequantized weight.
        """
        form = plan.form
        inputs = [
            self.add_constant(f"{name}_{form.name}", q, form.onnx),
            self.add_constant(f"{name}_scale", scales, TensorProto.FLOAT),
            self.add_constant(f"{name}_zero_point", np.zeros(scales.shape, form.dtype), form.onnx),
        ]
        out = self.fresh_name(f"{name}_dequantized")
        self.nodes.append(
            helper.make_node("DequantizeLinear", inputs, [out], name=out, axis=plan.axis, block_size=plan.block or None)
        )
        return out

    def write_quantize_dequantize(self, name: str, step: ScaleZeroPoint) -> str:
        """Write QuantizeLinear and DequantizeLinear for a tensor, once per step.

        Returns:
            name of the dequantized tensor.
        """
        key = ("input", name, step)
        if key not in self._pairs:
            ends = [
                self.add_constant(f"{name}_scale", np.array(step.scale, np.float32), TensorProto.FLOAT),
                self.add_constant(f"{name}_zero_point", np.array(step.zero_point, step.format.dtype), step.format.onnx),
            ]
            q = self.fresh_name(f"{name}_{step.format.name}")
            out = self.fresh_name(f"{name}_dequantized")
            self.nodes.append(helper.make_node("QuantizeLinear", [name, *ends], [q], name=q))
            self.nodes.append(helper.make_node("DequantizeLinear", [q, *ends], [out], name=out))
            self._pairs[key] = out
        return self._pairs[key]

    def write_dynamic(self, node: onnx.NodeProto, plan: LayerPlan) -> None:
        """Write a MatMul as DynamicQuantizeLinear, MatMulInteger and a scaling of the sums.

        onnxruntime fuses these nodes (ONNX operator schemas DynamicQuantizeLinear-11, MatMulInteger-10).
        """
        name = node.input[plan.data]
        weight = node.input[plan.weight]
        if ("dynamic", name) not in self._parts:
            made = [self.fresh_name(f"{name}_{part}") for part in ("uint8", "scale", "zero_point")]
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [name], made, name=made[0]))
            self._parts["dynamic", name] = made
        x, scale, zero_point = self._parts["dynamic", name]
        if ("integers", weight) not in self._parts:
            q, scales = self.quantize_weight(weight, plan)
            self._parts["integers", weight] = [
                self.add_constant(f"{weight}_{plan.form.name}", q, plan.form.onnx),
                self.add_constant(f"{weight}_scale", scales, TensorProto.FLOAT),
            ]
        q_name, w_scale = self._parts["integers", weight]
        sums, cast, both = (self.fresh_name(f"{node.output[0]}_{part}") for part in ("sums", "float", "scale"))
        self.nodes.append(helper.make_node("MatMulInteger", [x, q_name, zero_point], [sums], name=sums))
        self.nodes.append(helper.make_node("Cast", [sums], [cast], name=cast, to=TensorProto.FLOAT))
        self.nodes.append(helper.make_node("Mul", [scale, w_scale], [both], name=both))
        last = helper.make_node("Mul", [cast, both], [node.output[0]], name=node.name)
        last.metadata_props.extend(node.metadata_props)
        self.nodes.append(last)

    def write_quantized_bias(self, node: onnx.NodeProto, plan: LayerPlan, scales: np.ndarray) -> None:
        """Write the bias as an integer, in steps of (input scale · weight scale), like the products of integers."""
        assert plan.step is not None
        b = numpy_helper.to_array(self.weights[node.input[2]])
        steps = scales.reshape(-1) * np.float32(plan.step.scale)
        # The bias is a single number for all channels.
        if b.size < steps.size:
            b = np.broadcast_to(b.reshape(-1), steps.shape)
        step = np.broadcast_to(steps, b.shape).astype(np.float32)
        counted = np.rint(b.astype(np.float64) / step)
        # The bias stays float if it is not finite, or if its step is so small that the number of steps does not fit
        # int32.
        if not np.abs(counted).max(initial=0.0) < 2**31:
            return
        inputs = [
            self.add_constant(f"{node.input[2]}_int32", counted.astype(np.int32), TensorProto.INT32),
            self.add_constant(f"{node.input[2]}_scale", step, TensorProto.FLOAT),
            self.add_constant(f"{node.input[2]}_zero_point", np.zeros(step.shape, np.int32), TensorProto.INT32),
        ]
        out = self.fresh_name(f"{node.input[2]}_dequantized")
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [out], name=out, axis=0))
        node.input[2] = out


def _make_initializer(name: str, values: np.ndarray, kind: int) -> TensorProto:
    """Build an initializer. For INT4, two codes share a byte, with the first in the low half (ONNX's TensorProto)."""
    made = TensorProto(name=name, data_type=kind, dims=values.shape)
    if kind == INT4.onnx:
        nibbles = values.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
        nibbles = np.concatenate([nibbles, np.zeros(len(nibbles) % 2, np.uint8)])
        made.raw_data = (nibbles[::2] | (nibbles[1::2] << 4)).tobytes()
    else:
        made.raw_data = np.ascontiguousarray(values).tobytes()
    return made
