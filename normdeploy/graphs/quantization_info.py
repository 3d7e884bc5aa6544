"""Read a graph's quantization from its ops alone, so it works for files of any quantizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..evaluate.quantize_ops import TABLE, TYPES, finite_limits
from ..findings.records import QuantizedLayer
from ..norms.norm_table import DOMAIN, OURS
from ..storage.onnx_domains import is_standard
from ..storage.proto_traversal import attribute_graphs, attribute_values, iter_bodies, metadata_text
from ..storage.shared_weights import tensor_array
from .proto_queries import module_path

# Metadata key of files that `normdeploy.quantization` made.
RECORD = "normdeploy.quantization"
QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
DYNAMIC = "DynamicQuantizeLinear"
LSTM = "DynamicQuantizeLSTM"
BITS = "MatMulNBits"
# Op → positions of its inputs that are scales or zero points.
_INSIDE = {LSTM: (8, 9, 10, 11), BITS: (2, 3)}
INTEGER = ("MatMulInteger", "ConvInteger")
# Metadata key of the biases that correct a shift of the input, and compute this correction with the quantized weight.
RECENTRED = f"{RECORD}.recentred"
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Beginnings of the names of ops that quantize internally. Only a runtime computes these ops, our evaluator does not.
_SEALED = (
    "QLinear",
    "QGemm",
    "QAttention",
    "QMoE",
    "MatMulNBits",
    "MatMulBnb4",
    "MatMulFpQ4",
    "DynamicQuantize",
    "MatMulIntegerToFloat",
)
_MOVES = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast", "Expand"})


def is_quantization_node(node: onnx.NodeProto) -> bool:
    """Return whether a node quantizes or dequantizes, and the evaluator computes it.

    Returns: False for ops that quantize internally.
    """
    return ("" if is_standard(node) else node.domain, node.op_type) in TABLE


def quantizes_inside(node: onnx.NodeProto) -> bool:
    """Return whether a node quantizes internally, without QuantizeLinear or DequantizeLinear in the graph.

    Returns: True for onnxruntime's QOperators and packed products, for example.
    """
    return node.op_type.startswith(_SEALED) and not is_quantization_node(node)


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Return whether any node quantizes, dequantizes or computes in a few bits.

    Returns: True also for nodes in bodies and functions.
    """
    return any(
        is_quantization_node(node) or quantizes_inside(node) for body in iter_bodies(proto) for node in body.node
    )


def quantized_ranges(proto: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Compute the range of each quantized tensor of the main graph.

    The quantized tensors are outputs of QuantizeLinear on data, and of normdeploy's own ops that contain a
    QuantizeLinear. The scale must be one constant.

    Returns: output tensor → (lowest, highest) representable number.
    """
    q = GraphQuantization(proto)
    found = dict[str, tuple[float, float]]()
    for node in q.nodes:
        if node.domain == DOMAIN:
            own = OURS.get(node.op_type)
        else:
            own = None
        if own is not None and own.quantizes and "y_scale" in own.inputs:
            end = len(node.input)
            pair = helper.make_node(QUANTIZE, [node.output[0], *node.input[end - 2 : end]], [node.output[0]])
        elif node.op_type == QUANTIZE and is_quantization_node(node) and not q.is_weight(node.input[0]):
            pair = node
        else:
            continue
        if (ends := q.scheme_of(pair).representable_range) is not None:
            found[node.output[0]] = ends
    return found


def read_recorded_ranges(proto: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Read the ranges that calibration found, if the file records them.

    Returns: tensor → (low, high); {} for any other file.
    """
    try:
        return {str(n): (float(low), float(high)) for n, (low, high) in _read_record(proto)["ranges"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def read_recorded_runtime(proto: onnx.ModelProto) -> str:
    """Read the runtime for which the file was quantized.

    Returns: "" if the file does not record it.
    """
    try:
        return str(_read_record(proto)["runtime"])
    except (ValueError, TypeError, KeyError):
        return ""


def read_recorded_biases(proto: onnx.ModelProto) -> dict[str, list[int]]:
    """Read which biases correct a shift (`normdeploy.quantization.bias_corrections`).

    A layer that reads x − c needs a bias with the share W·c. The recorded biases contain W·c with the quantized weight
    W.

    The file must record these biases, because they look like biases that contain W·c with the original weight.

    Returns: bias → input channels for which W·c uses the original weight instead; {} if the file records no biases.
    """
    try:
        told = json.loads(metadata_text(proto, RECENTRED) or "{}")
    except ValueError:
        return {}
    if not isinstance(told, dict):
        told = {}
    return {name: left for name, left in told.items() if isinstance(left, list) and all(type(i) is int for i in left)}


def _read_record(proto: onnx.ModelProto) -> Any:
    return json.loads(metadata_text(proto, RECORD))


def quantization_parameters(proto: onnx.ModelProto) -> set[str]:
    """Find the initializers, in bodies and functions too, that are only scales and zero points.

    Returns: their names.
    """
    read = set[str]()
    other = set[str]()
    for body in iter_bodies(proto):
        dynamic = {n.output[1] for n in body.node if n.op_type == DYNAMIC and is_quantization_node(n)}
        for node in body.node:
            if node.domain == DOMAIN:
                own = {"y_scale", "y_zero_point"}
            else:
                own = set()
            if own and node.op_type in OURS:
                names = OURS[node.op_type].inputs
            else:
                names = ()
            for i, name in enumerate(node.input):
                of_own = i < len(names) and names[i] in own
                of_pair = i > 0 and node.op_type in (QUANTIZE, DEQUANTIZE) and is_quantization_node(node)
                of_product = node.op_type == "Mul" and bool(dynamic & set(node.input))
                is_inside = i in _INSIDE.get(node.op_type, ())
                (read if of_own or of_pair or of_product or is_inside else other).add(name)
    return read - other - {""}


@dataclass(frozen=True)
class QuantizationScheme:
    """One QuantizeLinear or DequantizeLinear, with its type and parameters.

    Attributes:
        kind: dtype of the codes; None if unknown.
        scale: None if it is computed.
        zero_point: None if it is computed or omitted.
        axis: as in ONNX.
        block: size of a block, as in ONNX; 0 without blocks.
    """

    node: onnx.NodeProto
    kind: np.dtype[Any] | None
    scale: np.ndarray | None
    zero_point: np.ndarray | None
    axis: int
    block: int

    @property
    def granularity(self) -> str:
        """Return "tensor", "384 channels" or "blocks of 32", for example; "" if the scale is computed."""
        if self.scale is None:
            return ""
        if self.block:
            return f"blocks of {self.block}"
        if self.scale.ndim and self.scale.size > 1:
            return f"{self.scale.size} channels"
        return "tensor"

    @property
    def is_asymmetric(self) -> bool:
        """Return whether a zero point is not 0.

        A weight of an unsigned type is also symmetric if its zero point is the middle of the type. Callers must check
        this case themselves.
        """
        return self.zero_point is not None and bool(np.any(self.zero_point.astype(np.float64)))

    @property
    def representable_range(self) -> tuple[float, float] | None:
        """Return the lowest and the highest representable number; None without a single constant scale."""
        if self.kind is None or self.scale is None or self.scale.size != 1:
            return None
        low, high = finite_limits(self.kind)
        if self.zero_point is None:
            zero = 0.0
        else:
            zero = float(self.zero_point.astype(np.float64).reshape(-1)[0])
        step = float(self.scale.astype(np.float64).reshape(-1)[0])
        return (low - zero) * step, (high - zero) * step


class GraphQuantization:
    """Quantization of one graph: the main graph, a body or a function.

    Weights may be in the proto or in external data.

    Args:
        body: the graph; None for the main graph.
        around: quantization of the graph that contains ``body``, whose tensors ``body`` can read; None for a function.
        place: location for findings, for example "then_branch of If 'gate'"; "" for the main graph.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        body: onnx.GraphProto | onnx.FunctionProto | None = None,
        around: GraphQuantization | None = None,
        place: str = "",
    ) -> None:
        if body is None:
            graph = proto.graph
        else:
            graph = body
        self.place = place
        self.nodes = list(graph.node)
        self.weights: dict[str, onnx.TensorProto]
        if around is None:
            self.weights = {}
        else:
            self.weights = dict(around.weights)
        self.makers: dict[str, onnx.NodeProto]
        if around is None:
            self.makers = {}
        else:
            self.makers = dict(around.makers)
        if not isinstance(graph, onnx.FunctionProto):
            self.weights |= {t.name: t for t in graph.initializer}
        self.makers |= {name: node for node in self.nodes for name in node.output if name}
        self.outputs = {v if isinstance(v, str) else v.name for v in graph.output}

    @cached_property
    def readers_by_tensor(self) -> dict[str, list[onnx.NodeProto]]:
        """Return the nodes that read each tensor, in bodies of nodes too."""
        readers: dict[str, list[onnx.NodeProto]] = {}
        waiting = self.nodes[::-1]
        while waiting:
            node = waiting.pop()
            for name in dict.fromkeys(filter(None, node.input)):
                readers.setdefault(name, []).append(node)
            waiting += [n for a in node.attribute for body in attribute_graphs(a) for n in reversed(body.node)]
        return readers

    def constant_value(self, name: str) -> np.ndarray | None:
        """Return the value of an initializer or of a Constant node's tensor.

        Returns: None for any other tensor.
        """
        if name in self.weights:
            return np.asarray(tensor_array(self.weights[name]))
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Constant" and is_standard(maker):
            for a in maker.attribute:
                return np.asarray(tensor_array(a.t) if a.name == "value" else onnx.helper.get_attribute_value(a))
        return None

    def scheme_of(self, node: onnx.NodeProto) -> QuantizationScheme:
        """Read the scheme of a QuantizeLinear or DequantizeLinear.

        Returns: its type and parameters.
        """
        attrs = attribute_values(node)
        if len(node.input) > 2 and node.input[2]:
            zero = self.constant_value(node.input[2])
        else:
            zero = None
        kind: np.dtype[Any] | None
        if zero is None:
            kind = None
        else:
            kind = zero.dtype
        if kind is None and node.op_type == QUANTIZE:
            kind = TYPES.get(int(attrs.get("output_dtype", 0)) or 2)
        if kind is None and node.op_type == DEQUANTIZE:
            kind = self._stored_dtype(node.input[0])
        scale = self.constant_value(node.input[1])
        return QuantizationScheme(node, kind, scale, zero, int(attrs.get("axis", 1)), int(attrs.get("block_size", 0)))

    def _stored_dtype(self, name: str) -> np.dtype[Any] | None:
        origin = self.source_tensor(name)
        if origin in self.weights:
            return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.weights[origin].data_type))
        maker = self.makers.get(origin)
        if maker is not None and maker.op_type == QUANTIZE:
            return self.scheme_of(maker).kind
        value = self.constant_value(origin)
        if value is None:
            return None
        return value.dtype

    def source_tensor(self, name: str, through: frozenset[str] = _MOVES) -> str:
        """Follow moves and casts backwards.

        Args:
            through: op types to follow.

        Returns: the tensor whose elements ``name`` holds.
        """
        while (maker := self.makers.get(name)) is not None and maker.op_type in through and is_standard(maker):
            name = maker.input[0]
        return name

    def source_node(self, name: str, op: str) -> onnx.NodeProto | None:
        """Find the node of type ``op`` whose output reaches ``name`` through moves only.

        Returns: None if another node makes it.
        """
        node = self.makers.get(self.source_tensor(name))
        if node is not None and node.op_type == op and is_quantization_node(node):
            return node
        return None

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor is computed from constants alone, by moves, quantization and dequantization.

        Returns: False for computed tensors and inputs.
        """
        through = _MOVES | {QUANTIZE, DEQUANTIZE}
        return self.constant_value(self.source_tensor(name, through)) is not None

    def data_quantizers(self) -> Iterator[onnx.NodeProto]:
        """Iterate over the QuantizeLinear nodes of data.

        Returns: an iterator in the file's order.
        """
        return (
            n
            for n in self.nodes
            if n.op_type == QUANTIZE and is_quantization_node(n) and not self.is_weight(n.input[0])
        )

    # -------------------------------------------------------------- the census

    def quantized_layers(self) -> list[QuantizedLayer]:
        """List every linear layer and convolution with a constant weight, quantized or not.

        Returns: layers in the file's order.
        """
        return [layer for node in self.nodes if (layer := self._read_layer(node)) is not None]

    def _read_layer(self, node: onnx.NodeProto) -> QuantizedLayer | None:
        if node.op_type in INTEGER and is_quantization_node(node):
            return self._read_integer_layer(node)
        if node.op_type not in LINEAR or not is_standard(node) or len(node.input) < 2:
            return None
        sides = [i for i in range(2) if self.is_weight(node.input[i])]
        if len(sides) != 1 or (node.op_type.startswith("Conv") and sides != [1]):
            return None
        weight = node.input[sides[0]]
        data = node.input[1 - sides[0]]
        stored = self.source_node(weight, DEQUANTIZE)
        made = self.source_node(data, DEQUANTIZE)
        layer = QuantizedLayer(node.output[0], node.op_type, module_path(node), data, place=self.place)
        if stored is not None:
            scheme = self.scheme_of(stored)
            layer = replace(
                layer,
                weight="" if scheme.kind is None else scheme.kind.name,
                granularity=scheme.granularity,
                weight_symmetric=not scheme.is_asymmetric,
            )
        if made is not None:
            layer = self._with_activation_scheme(layer, made)
        if stored is not None:
            return replace(layer, status="weight" if made is None else "quantized")
        if made is None:
            return layer
        return replace(layer, status="activation")

    def _with_activation_scheme(self, layer: QuantizedLayer, made: onnx.NodeProto) -> QuantizedLayer:
        scheme = self.scheme_of(made)
        source = self.source_node(made.input[0], QUANTIZE)
        dynamic = self.source_node(made.input[0], DYNAMIC) is not None
        low, high = scheme.representable_range or (None, None)
        single = scheme.scale is not None and scheme.scale.size == 1
        return replace(
            layer,
            input=source.input[0] if source is not None else layer.input,
            activation="" if scheme.kind is None else scheme.kind.name,
            dynamic=dynamic,
            scale=float(scheme.scale.astype(np.float64).reshape(-1)[0])
            if single and scheme.scale is not None
            else None,
            zero_point=_integer_zero_point(scheme.zero_point) if single else None,
            low=low,
            high=high,
        )

    def _read_integer_layer(self, node: onnx.NodeProto) -> QuantizedLayer | None:
        weight = self.constant_value(self.source_tensor(node.input[1]))
        if weight is None:
            return None
        made = self.makers.get(self.source_tensor(node.input[0]))
        dynamic = made is not None and made.op_type == DYNAMIC
        if len(node.input) > 3 and node.input[3]:
            zero = self.constant_value(node.input[3])
        else:
            zero = None
        return QuantizedLayer(
            node.output[0],
            node.op_type,
            module_path(node),
            made.input[0] if made is not None and dynamic else node.input[0],
            status="quantized",
            weight=weight.dtype.name,
            # The scale is unknown here, because a later node multiplies by it.
            granularity="",
            weight_symmetric=zero is None or not np.any(zero.astype(np.float64)),
            activation="uint8" if dynamic else "",
            dynamic=dynamic,
            place=self.place,
        )


def all_quantizations(proto: onnx.ModelProto) -> Iterator[GraphQuantization]:
    """Walk the main graph, its bodies, the functions and their bodies.

    Yields: the quantization of each graph.
    """
    waiting = [
        *(GraphQuantization(proto, f, None, f"function {f.domain}.{f.name}") for f in reversed(proto.functions)),
        GraphQuantization(proto),
    ]
    while waiting:
        q = waiting.pop()
        yield q
        inner = [
            GraphQuantization(
                proto, body, q, f"{q.place}, {_body_path(node, a, i)}" if q.place else _body_path(node, a, i)
            )
            for node in q.nodes
            for a in node.attribute
            for i, body in enumerate(attribute_graphs(a))
        ]
        waiting += reversed(inner)


def _body_path(node: onnx.NodeProto, attribute: onnx.AttributeProto, i: int) -> str:
    which = attribute.name + (f"[{i}]" if len(attribute.graphs) else "")
    return f"{which} of {node.op_type} {node.name or node.output[0]!r}"


def _integer_zero_point(zero_point: np.ndarray | None) -> int:
    if zero_point is None:
        return 0
    return int(zero_point.astype(np.float64).reshape(-1)[0])
