"""Models that hold the rounding of their quantization are compared as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    disable_fake_quant,
    disable_observer,
    prepare_qat,
)
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the operators of PT2E

import normdeploy
from normdeploy.runtimes.fake_quantize import fake_quantize_float64


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.fake_quantize_per_tensor_affine(self.norm(x), 0.03, 0, -128, 127))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_grid_in_float64_is_that_of_float32(axis: int | None) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    if axis is None:
        expected = torch.fake_quantize_per_tensor_affine(x, 0.03125, 3, -128, 127)
        found = fake_quantize_float64("aten::fake_quantize_per_tensor_affine", (x.double(), 0.03125, 3, -128, 127))
    else:
        scale = torch.full((x.shape[axis],), 0.03125)
        zero = torch.arange(x.shape[axis], dtype=torch.int32)
        expected = torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)
        found = fake_quantize_float64(
            "aten::fake_quantize_per_channel_affine", (x.double(), scale.double(), zero, axis, -128, 127)
        )
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), expected.double().numpy())


def test_a_model_that_rounds_itself_is_verified_and_another_scale_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Rounding().eval()
    made = normdeploy.export(module, torch.randn(3, 8), output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()

    proto = onnx.load(made.path)
    quantizers = [n for n in proto.graph.node if n.op_type == "QuantizeLinear"]
    scale = next(t for t in proto.graph.initializer if t.name == quantizers[0].input[1])
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.02), scale.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    assert not normdeploy.verify(module, tmp_path / "wrong.onnx", inputs=["x[3,8]"])


class RoundedWeight(nn.Module):
    """A weight on a grid for each channel, and no rounding of what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.004, 0.02, 4))
        self.register_buffer("zero", torch.zeros(4, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, self.scale, self.zero, 0, -128, 127)
        return self.norm(x) @ weight.T


OPTION = "session.qdq_matmulnbits_accuracy_level=1"


def test_a_file_whose_operands_only_the_optimizer_rounds_is_right_with_the_option_that_stops_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = normdeploy.export(RoundedWeight().eval(), torch.randn(3, 8), output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison
    assert f"verified with the session option {OPTION}" in str(comparison)
    # onnxruntime 1.31 multiplies by MatMulNBits, which rounds the other operand to 8 bits.
    (told,) = (note for note in comparison.notes if OPTION in note)
    assert "by default onnxruntime (optimizer on) rounds activations to 8 bits" in told


def test_a_wrong_file_is_wrong_with_the_option_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = RoundedWeight().eval()
    proto = normdeploy.export(module, torch.randn(3, 8)).proto
    scale = next(t for t in proto.graph.initializer if numpy_helper.to_array(t).shape == (4,))
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.02), scale.name))
    onnx.save(proto, tmp_path / "wrong.onnx")
    comparison = normdeploy.verify(module, tmp_path / "wrong.onnx", torch.randn(3, 8))
    assert not comparison
    assert OPTION not in str(comparison)


def calibrated(quantizer: FakeQuantize) -> FakeQuantize:
    quantizer(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    return quantizer.eval()


def of_channels() -> FakeQuantize:
    return FakeQuantize(
        PerChannelMinMaxObserver,
        ch_axis=1,
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
    )


class Quantizing(nn.Module):
    def __init__(self, quantizer: FakeQuantize) -> None:
        super().__init__()
        self.norm, self.linear, self.quantizer = nn.LayerNorm(8), nn.Linear(8, 4), calibrated(quantizer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized: torch.Tensor = self.linear(self.quantizer(self.norm(x)))
        return quantized


@pytest.mark.parametrize("make", [FakeQuantize, FusedMovingAvgObsFakeQuantize, of_channels])
@pytest.mark.parametrize("rounds", [True, False])
def test_a_fake_quantizer_that_observes_no_more_is_exported_as_it_rounds(
    make: Callable[[], FakeQuantize], rounds: bool, tmp_path: Path
) -> None:
    module = Quantizing(make()).eval()
    module.apply(disable_observer)
    if not rounds:
        module.apply(disable_fake_quant)
    made = normdeploy.export(module, inputs=["x[n,8]"], output=tmp_path / "m.onnx")
    ops = {node.op_type for node in onnx.load(made.path).graph.node}
    assert ("QuantizeLinear" in ops) == rounds
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


def test_a_fake_quantizer_that_observes_is_refused_by_name() -> None:
    module = Quantizing(FakeQuantize()).eval()
    with pytest.raises(normdeploy.errors.ExportError, match=r"'quantizer' still observes.*disable_observer"):
        normdeploy.export(module, torch.randn(3, 8))


class Decomposed(nn.Module):
    """As torch's quantizer of exported programs (PT2E) writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer(
            "codes", torch.randint(-127, 127, (4, 8), generator=torch.Generator().manual_seed(0)).char()
        )
        self.register_buffer("scale", torch.linspace(0.004, 0.02, 4))
        self.register_buffer("zero", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decomposed = torch.ops.quantized_decomposed
        grid = (0.03, 3, -128, 127, torch.int8)
        rounded = decomposed.dequantize_per_tensor(decomposed.quantize_per_tensor(self.norm(x), *grid), *grid)
        weight = decomposed.dequantize_per_channel(self.codes, self.scale, self.zero, 0, -127, 127, torch.int8)
        return nn.functional.linear(rounded, weight, self.linear.bias)


@pytest.mark.parametrize("route", ["module", "program"])
def test_a_program_of_decomposed_quantizers_is_verified(route: str, tmp_path: Path) -> None:
    module, sample = Decomposed().eval(), torch.randn(3, 8)
    source: object = module
    if route == "program":
        torch.export.save(torch.export.export(module, (sample,)), tmp_path / "m.pt2")
        source = tmp_path / "m.pt2"
    given = (sample,) if route == "module" else ()
    made = normdeploy.export(source, given, output=tmp_path / "m.onnx")
    comparison = normdeploy.verify(made)
    assert comparison, comparison.table()


class TensorScale(nn.Module):
    def __init__(self, overload: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.linear, self.overload = nn.LayerNorm(8), nn.Linear(8, 4), overload
        self.register_buffer("scale", torch.full(shape, 0.01))
        self.register_buffer("zero", torch.zeros(shape, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        if self.overload == "default":
            args = (0.01, 0, -100, 100, torch.int8)
        else:
            args = (self.scale, self.zero, -100, 100, torch.int8)
        codes = getattr(ops.quantize_per_tensor, self.overload)(self.norm(x), *args)
        return self.linear(getattr(ops.dequantize_per_tensor, self.overload)(codes, *args))


@pytest.mark.parametrize(("overload", "shape"), [("default", ()), ("tensor", ()), ("tensor", (1,))])
def test_a_scale_that_is_a_tensor_and_narrow_bounds_are_exported(overload: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = TensorScale(overload, shape).eval()
    x = torch.randn(3, 8)
    # Normalized rows leave [-1, 1], so that the bounds decide.
    assert module.norm(x).abs().max() > 1.28
    made = normdeploy.export(module, x)
    session = onnxruntime.InferenceSession(made.proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    # One code is 0.01; sums of eight float32 products differ by far less.
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-5)


class Trained(nn.Module):
    """Two layers of quantization-aware training, per tensor: their weights share one zero point."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.quantize, self.relu = FakeQuantize(), nn.ReLU()
        self.first, self.second = layer(3, 8), layer(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.relu(self.first(self.quantize(x))))
        return y


LAYERS: dict[str, tuple[Callable[[int, int], nn.Module], tuple[int, ...]]] = {
    "linear": (nn.Linear, (4, 3)),
    "conv": (lambda i, o: nn.Conv2d(i, o, 3), (2, 3, 8, 8)),
}


def trained(layer: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    model = Trained(make).train()
    weights = FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver,
        dtype=torch.qint8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_symmetric,
    )
    model.qconfig = QConfig(activation=FakeQuantize, weight=weights)  # type: ignore[assignment]
    model = prepare_qat(model)
    for _ in range(8):
        model(torch.randn(shape))
    return model.eval().apply(disable_observer), torch.randn(shape)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_file_of_quantization_aware_training_is_right_in_integer_kernels_and_another_scale_is_not(
    layer: str, tmp_path: Path
) -> None:
    model, x = trained(layer)
    path = tmp_path / "m.onnx"
    torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], opset_version=17)
    comparison = normdeploy.verify(model, path, (x,), seeds=2)
    assert comparison, comparison.table()
    proto = onnx.load(path)
    nodes = list(proto.graph.node)
    sums = {name for n in nodes if n.op_type in ("Conv", "Gemm") for name in n.output}
    quantizer = next(n for n in nodes if n.op_type == "QuantizeLinear" and n.input[0] in sums)
    constants = {n.output[0]: n.attribute[0].t for n in nodes if n.op_type == "Constant"}
    value = (constants | {t.name: t for t in proto.graph.initializer})[quantizer.input[1]]
    value.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(value) * np.float32(1.02), value.name))
    onnx.save(proto, path)
    assert not normdeploy.verify(model, path, (x,), seeds=2)
