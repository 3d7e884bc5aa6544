"""Quantized files for tests, made by onnxruntime's own quantizer, and ways to break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from torch import nn

from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel


class Net(nn.Module):
    """A block with a norm whose γ and β are no ones and zeros, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.last = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(32)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)
            self.norm.bias.uniform_(-0.5, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.outer(torch.relu(self.inner(x))))
        return self.last(x)


class Conv(nn.Module):
    """Convolutions, a pool and a linear layer, as a small vision model has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x))))
        return self.last(x.mean((2, 3)))


def net() -> LoadedModel:
    return from_module(Net().eval(), inputs=["x:float32[batch=1:4:8,6,32]"])


def conv() -> LoadedModel:
    return from_module(Conv().eval(), inputs=["x:float32[batch=1:2:4,3,12,12]"])


class Samples(CalibrationDataReader):
    def __init__(self, samples: Sequence[dict[str, np.ndarray]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def samples(model: LoadedModel, count: int = 12, seed: int = 100) -> list[dict[str, np.ndarray]]:
    return [model.samples(seed + i) for i in range(count)]


def quantized(
    model: LoadedModel,
    folder: Path,
    name: str = "int8.onnx",
    *,
    activations: QuantType = QuantType.QInt8,
    symmetric: bool = True,
    per_channel: bool = True,
    margin: float = 1.3,
) -> Path:
    """Calibrated by the least and the largest value of the model's own samples, these ``margin`` times as large so
    that other draws fit in."""
    float32 = folder / "float32.onnx"
    onnx.save(export_to_proto(model), float32)
    wide = [{n: v * np.float32(margin) for n, v in feeds.items()} for feeds in samples(model)]
    quantize_static(
        float32,
        folder / name,
        Samples(wide),
        quant_format=QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=activations,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
    )
    return folder / name


def dynamic(model: LoadedModel, folder: Path) -> Path:
    """Activations quantized when they are seen: DynamicQuantizeLinear and MatMulInteger."""
    onnx.save(export_to_proto(model), folder / "float32.onnx")
    # Weights of 7 bits: without VNNI and with its optimizer off, onnxruntime saturates sums of two products at 16 bits.
    quantize_dynamic(
        folder / "float32.onnx",
        folder / "dynamic.onnx",
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
    )
    return folder / "dynamic.onnx"


def weights_alone(model: LoadedModel, folder: Path) -> Path:
    """The first product's weight in int8, with one scale for all of it, and nothing else quantized."""
    proto = export_to_proto(model)
    node = next(n for n in proto.graph.node if n.op_type in ("MatMul", "Gemm"))
    turned = next((n for n in proto.graph.node if n.output[0] == node.input[1]), None)
    weight = constant(proto, node.input[1]) if turned is None else constant(proto, turned.input[0]).T
    scale = np.float32(np.abs(weight).max() / 127).reshape(())
    proto.graph.initializer.append(numpy_helper.from_array(np.rint(weight / scale).astype(np.int8), "codes"))
    proto.graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    place = list(proto.graph.node).index(node)
    proto.graph.node.insert(place, onnx.helper.make_node("DequantizeLinear", ["codes", "scale"], ["back"]))
    node.input[1] = "back"
    onnx.save(proto, folder / "weights.onnx")
    return folder / "weights.onnx"


def edited(path: Path, name: str, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy beside it, changed."""
    proto = onnx.load(path)
    change(proto)
    onnx.save(proto, path.with_name(name))
    return path.with_name(name)


def constant(proto: onnx.ModelProto, name: str) -> np.ndarray:
    return next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == name)


def replace_constant(proto: onnx.ModelProto, name: str, value: Any) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    old = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(value).astype(old.dtype).reshape(old.shape), name))


def own_constants(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Give a node scales and zero points that nobody shares."""
    for i in (1, 2):
        if len(node.input) > i and node.input[i]:
            value = constant(proto, node.input[i])
            node.input[i] = f"{node.output[0]}_own_{i}"
            proto.graph.initializer.append(numpy_helper.from_array(value, node.input[i]))


def scale_pair(proto: onnx.ModelProto, quantize: onnx.NodeProto, factor: float) -> None:
    """Multiply the scale of a QuantizeLinear node and of the nodes that read its codes."""
    for node in proto.graph.node:
        if node is quantize or [*node.input][:1] == [*quantize.output]:
            own_constants(proto, node)
            replace_constant(proto, node.input[1], constant(proto, node.input[1]) * factor)


def weights(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The DequantizeLinear nodes of weights of two dims and more, in order."""
    stored = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in stored and len(stored[node.input[0]].dims) > 1:
            yield node


def activations(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The QuantizeLinear nodes, in order."""
    return [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
