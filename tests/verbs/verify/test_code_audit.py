"""Codes of quantized weights lie beside the model's floats; single ones that do not are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn

from normdeploy import verify
from normdeploy.verbs.verify.code_audit import WeightCodes, find_altered_code

INT8 = (-128.0, 127.0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def codes(array: np.ndarray, ends: tuple[float, float] = INT8) -> WeightCodes:
    return WeightCodes("w", array.astype(np.float64), ends)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("zero", [0, 7])
def test_rounded_weights_are_the_parameters_and_one_moved_code_is_named(
    axis: int | None, zero: int, rng: np.random.Generator
) -> None:
    weight = rng.standard_normal((32, 24))
    step = np.full((1, 1), 0.03) if axis is None else rng.uniform(0.03, 0.3, (32, 1) if axis == 0 else (1, 24))
    right = np.clip(np.rint(weight / step) + zero, *INT8)
    assert find_altered_code(codes(right), weight) == (True, None)
    right[5, 3] += 40 if right[5, 3] < 60 else -40
    known, altered = find_altered_code(codes(right), weight)
    assert known
    assert altered is not None
    assert altered.place == (5, 3)
    assert altered.count == 1
    assert 39 < altered.steps < 41
    assert altered.expected == weight[5, 3]


def test_codes_that_were_rounded_up_or_down_and_cut_off_are_right(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((64, 64))
    # Percentiles cut two of a hundred off; AdaRound chooses either neighbor.
    chosen = np.clip(np.floor(weight / 0.02 + rng.random((64, 64))), -115, 115)
    assert find_altered_code(codes(chosen), weight)[1] is None


def test_codes_of_a_quantizer_that_moves_many_and_of_another_weight_are_not_judged(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((64, 64))
    compensated = np.clip(np.rint(weight / 0.02 + rng.standard_normal((64, 64))), *INT8)
    assert find_altered_code(codes(compensated), weight) == (False, None)
    # Some rows make up for the others.
    few = np.rint(weight / 0.02 + rng.standard_normal((64, 64)) * np.where(np.arange(64) == 63, 0.6, 0.1)[:, None])
    assert find_altered_code(codes(np.clip(few, *INT8)), weight)[1] is None
    other = np.rint(rng.standard_normal((64, 64)) / 0.02)
    assert find_altered_code(codes(other), weight) == (False, None)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu())
        return y


X = (torch.randn(4, 32, generator=torch.Generator().manual_seed(1)),)


def quantized(kind: str, folder: Path) -> Path:
    path, made = folder / "float.onnx", folder / "codes.onnx"
    torch.onnx.export(Layers().eval(), X, path, dynamo=False, input_names=["x"])
    if kind == "MatMulNBits":
        # Its kernel reads the second operand of a MatMul, and a Gemm has none.
        proto = onnx.load(path)
        for node in list(proto.graph.node):
            if node.op_type == "Gemm":
                weight = next(t for t in proto.graph.initializer if t.name == node.input[1])
                weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), weight.name))
                bias, output = node.input[2], node.output[0]
                inner = onnx.helper.make_node("MatMul", node.input[:2], [f"{output}_product"], name=f"{node.name}_p")
                proto.graph.node.insert(list(proto.graph.node).index(node), inner)
                node.CopyFrom(onnx.helper.make_node("Add", [f"{output}_product", bias], [output], name=node.name))
        quantizer = MatMulNBitsQuantizer(proto, bits=4, block_size=16, is_symmetric=True)
        quantizer.process()
        onnx.save(quantizer.model.model, made)
    else:
        quantize_dynamic(path, made, weight_type=QuantType.QInt8, per_channel=kind == "channels")
    return made


@pytest.mark.parametrize("kind", ["tensor", "channels", "MatMulNBits"])
def test_one_code_of_a_file_is_named_by_the_audit(kind: str, tmp_path: Path) -> None:
    path = quantized(kind, tmp_path)
    assert verify(Layers().eval(), path, X, seeds=1).weights == () or kind == "MatMulNBits"
    proto = onnx.load(path)
    tensor = next(t for t in proto.graph.initializer if t.data_type in (2, 3) and np.prod(t.dims) >= 1024)
    array = numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    # Of two codes in a byte the lower one.
    flat[200] = flat[200] ^ 8 if kind == "MatMulNBits" else flat[200] + (40 if flat[200] < 60 else -40)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, path)
    comparison = verify(Layers().eval(), path, X, seeds=1)
    assert not comparison
    (weight,) = (w for w in comparison.weights if not w)
    assert weight.name == tensor.name
    assert weight.parameter in ("first.weight", "second.weight")
    assert "1 of 2048 codes" in weight.reason
