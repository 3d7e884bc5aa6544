"""The file: QuantizeLinear and DequantizeLinear around linear layers, in standard ONNX.

The input of a layer is quantized for that layer alone: whoever else reads it (a residual, a norm) reads what it read.
Weights are stored quantized, behind one DequantizeLinear. Layers of one input share its pair. onnxruntime computes a
convolution in integers only where its result is quantized too: there a pair stands behind it, for all who read it.
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

# steps in a bias: half of what int32 holds
_MOST = 2.0**30


@dataclass(frozen=True)
class InputShift:
    """``offset``: float64 [channels], what the input of a layer lacks, 0 where the bias takes it back by the weight as
    it was. ``bias``: the initializer that makes up for it, which nobody else reads."""

    offset: np.ndarray
    bias: str

    def bias_correction(self, w: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """What is to be added to the bias where ``w`` is rounded to ``stored``, both [channels, outputs]."""
        return np.asarray(self.offset @ (stored.astype(np.float64) - w.astype(np.float64)))


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is written.

    ``tensor``: the first result of its node. ``data``, ``weight``: which of its inputs. ``step``: of its input, None
    where the weight alone is quantized. ``axis``: of the weight, along which there is a scale for each place, or for
    each ``block`` of them; None: one scale. ``dynamic``: the input's step is taken of it each time. ``stored``: codes
    and scales of the weight (`gptq`), None where each element is rounded by itself. ``shift``: of its input,
    which the bias takes back by the weight as it is stored.
    """

    tensor: str
    data: int
    weight: int
    form: CodeFormat
    axis: int | None
    step: ScaleZeroPoint | None = None
    block: int = 0
    dynamic: bool = False
    # whose numbers the weight's scales are
    scales: np.dtype = field(default_factory=lambda: np.dtype(np.float32))
    stored: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
    shift: InputShift | None = field(default=None, compare=False)
    least: np.ndarray | float = field(default=0.0, compare=False)

    @property
    def has_channels_first(self) -> bool:
        """Whether the input channels are the first axis of a matrix; the scales lie along the outputs, or blocks along
        the inputs."""
        return self.axis == (0 if self.block else 1)


def layer_biases(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The constant biases that Conv, ConvTranspose and Gemm hold themselves, by the result of their node."""
    stored = {t.name: t for t in proto.graph.initializer}
    return {
        n.output[0]: numpy_helper.to_array(stored[n.input[2]])
        for n in proto.graph.node
        if n.op_type in ("Conv", "ConvTranspose", "Gemm") and len(n.input) > 2 and n.input[2] in stored
    }


def smallest_scale_for_bias(
    bias: np.ndarray | None, step: ScaleZeroPoint, plan: LayerPlan, outputs: int
) -> np.ndarray | float:
    """The scales of a weight, float32 for each of ``outputs``, with which its bias is an int32 number of steps of input
    times weight; 0 for a weight of one scale, which would be coarser for all channels.

    onnxruntime turns float biases into such numbers and lets them overflow. Of a channel whose weights are so much
    smaller than its bias that this counts, a coarser scale loses less than 2⁻²⁰ of the bias for each input.
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
    """A copy of ``proto`` with the layers of ``plans`` quantized; they are named by the first result of their node.

    ``bias``: int32 biases behind a DequantizeLinear, as onnxruntime's integer kernels of Conv and Gemm want it; of
    others they stay float.
    ``results``: tensor -> the layer that it is the result of, which has to be among ``plans``, and the step of a pair
    for all who read it.
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
    """Makes names, constants and pairs, each once; ``nodes`` grows."""

    def __init__(self, graph: onnx.GraphProto, weights: dict[str, TensorProto], taken: Iterable[str]) -> None:
        self.weights, self.taken = weights, set(taken)
        self.nodes: list[onnx.NodeProto] = []
        self.made: list[TensorProto] = []
        self._pairs: dict[object, str] = {}
        # of an input quantized each time, and of a weight without its DequantizeLinear
        self._parts: dict[tuple[str, str], list[str]] = {}
        # what comes out of pairs for all readers
        self.done: set[str] = set()
        # the channels that each leaves out
        self.recentred_biases: dict[str, list[int]] = {}

    def fresh_name(self, name: str) -> str:
        candidate = name
        n = 1
        while candidate in self.taken:
            n += 1
            candidate = f"{name}_{n}"
        self.taken.add(candidate)
        return candidate

    def add_constant(self, name: str, values: np.ndarray, kind: int) -> str:
        made = self.fresh_name(name)
        self.made.append(_make_initializer(made, values, kind))
        return made

    def write_layer(self, node: onnx.NodeProto, plan: LayerPlan, bias: bool) -> None:
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
        """Its codes and its scales."""
        if plan.stored is not None:
            return plan.stored
        w = numpy_helper.to_array(self.weights[weight])
        scales = round_scales_up(
            np.maximum(weight_scales(w, plan.axis, plan.form, plan.block), plan.least), plan.scales
        )
        return quantize_to_codes(w, broadcast_scales(scales, w.shape, plan.axis, plan.block), plan.form), scales

    def write_corrected_bias(self, node: onnx.NodeProto, plan: LayerPlan, shift: InputShift) -> str:
        """The name of the layer's bias as the rounded weight wants it (`bias_corrections`)."""
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
        """A MatMul as DynamicQuantizeLinear and MatMulInteger, whose sums are scaled: the nodes that onnxruntime joins
        (ONNX operator schemas DynamicQuantizeLinear-11, MatMulInteger-10)."""
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
        """The bias in steps of input times weight, which is what the integer product counts in."""
        assert plan.step is not None
        b = numpy_helper.to_array(self.weights[node.input[2]])
        steps = scales.reshape(-1) * np.float32(plan.step.scale)
        # one number for all channels
        if b.size < steps.size:
            b = np.broadcast_to(b.reshape(-1), steps.shape)
        step = np.broadcast_to(steps, b.shape).astype(np.float32)
        counted = np.rint(b.astype(np.float64) / step)
        # beside a tiny step, or not finite: it stays float
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
    """An initializer; of INT4 two codes in a byte, the first in the low half (ONNX's TensorProto)."""
    made = TensorProto(name=name, data_type=kind, dims=values.shape)
    if kind == INT4.onnx:
        nibbles = values.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
        nibbles = np.concatenate([nibbles, np.zeros(len(nibbles) % 2, np.uint8)])
        made.raw_data = (nibbles[::2] | (nibbles[1::2] << 4)).tobytes()
    else:
        made.raw_data = np.ascontiguousarray(values).tobytes()
    return made
