"""Planted faults of quantized files are found: the node, the kind, and the output is right with it mended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from torch import nn

from normdeploy.exporting.exporter import export_to_proto
from normdeploy.loading import from_module
from normdeploy.model import LoadedModel
from normdeploy.verbs.bisect.file_bisection import Bisection, search_faults
from normdeploy.verbs.bisect.quantized_weights import describe_wrong_weight
from normdeploy.verbs.verify.file_comparison import compare_files
from tests import quantized_files as files
from tests.verbs.verify.test_verify_quantized import (
    scale_of_one_end,
    swapped_channels,
    weight_scale,
    weight_zero_point,
    zero_point_of_one_end,
)


def clipped(proto: onnx.ModelProto) -> None:
    quantize = files.activations(proto)[1]
    for node in proto.graph.node:
        if node is quantize or [*node.input][:1] == [*quantize.output]:
            files.own_constants(proto, node)
            files.replace_constant(proto, node.input[1], files.constant(proto, node.input[1]) / 4)


FAULTS = {
    weight_scale: ("scale", "1.5 times the values in channel 3 of the model's", 0),
    weight_zero_point: ("zero point", "steps away from those of the model's", 1),
    swapped_channels: ("channels", "2 for 1, 1 for 2", 0),
    zero_point_of_one_end: ("zero point", "is 12, but that of the QuantizeLinear before it is 0", None),
    scale_of_one_end: ("scale", "but that of the QuantizeLinear before it", None),
    clipped: ("saturation", "its scale is too small", None),
}


@pytest.fixture(scope="module", params=["net", "conv"])
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    model = getattr(files, request.param)()
    return model, files.quantized(model, tmp_path_factory.mktemp(request.param), margin=1.0)


def searched(model: LoadedModel, path: Path) -> Bisection:
    return search_faults(model, path, inputs=files.samples(model))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_named(fault: object, right: tuple[LoadedModel, Path]) -> None:
    model, path = right
    kind, words, weight = FAULTS[fault]  # type: ignore[index]
    bisection = searched(model, files.edited(path, "wrong.onnx", fault))  # type: ignore[arg-type]
    assert [f.kind for f in bisection.faults] == [kind], str(bisection)
    found = bisection.faults[0]
    assert words in found.cause
    assert found.mended
    assert found.error > found.allowed
    proto = onnx.load(path)
    if weight is not None:
        assert found.tensor == list(files.weights(proto))[weight].output[0]
    else:
        assert found.tensor == files.activations(proto)[1].input[0]
    assert found.wrong == "file"


def test_two_faults_are_two(right: tuple[LoadedModel, Path]) -> None:
    model, path = right

    def both(proto: onnx.ModelProto) -> None:
        weight_scale(proto)
        zero_point_of_one_end(proto)

    bisection = searched(model, files.edited(path, "two.onnx", both))
    assert sorted(f.kind for f in bisection.faults) == ["scale", "zero point"], str(bisection)
    assert bisection.faults[-1].mended


def test_channels_of_very_different_size_under_one_scale(tmp_path: Path) -> None:
    """Weights alone in 8 bits: four rows are 2000 times as large as the others, which one scale rounds to nothing."""
    model = files.net()
    state = model.program.state_dict
    state["inner.weight"].data[:4] *= 2000
    state["outer.weight"].data[:, :4] /= 2000
    path = files.weights_alone(model, tmp_path)
    bisection = searched(model, path)
    assert [f.kind for f in bisection.faults] == ["granularity"], str(bisection)
    assert "use one scale per channel" in bisection.faults[0].cause
    assert bisection.faults[0].mended


def test_a_parameter_of_zeros_with_codes_that_are_none() -> None:
    """No factor of zeros gives anything: it is a weight that is off, and nothing divides by it."""
    zeros = np.zeros((4, 6))
    got = zeros.copy()
    got[1] = 0.3
    assert describe_wrong_weight("D", "p", got, zeros, np.full((4, 6), 0.1)).kind in ("weights", "zero point")


def test_what_is_right_has_no_fault(right: tuple[LoadedModel, Path]) -> None:
    bisection = searched(*right)
    assert bisection
    assert not bisection.faults


def test_what_was_quantized_from_another_model_is_said_to_be_unexplained(right: tuple[LoadedModel, Path]) -> None:
    """All weights drawn anew, each properly quantized: no parameter is near any of them."""
    model, path = right

    def other(proto: onnx.ModelProto) -> None:
        rng = np.random.default_rng(0)
        for node in files.weights(proto):
            codes = files.constant(proto, node.input[0])
            files.replace_constant(proto, node.input[0], rng.integers(-127, 128, codes.shape))

    bisection = searched(model, files.edited(path, "other.onnx", other))
    assert not bisection
    assert any("none of its weights or ranges explains" in note for note in bisection.notes)


@pytest.fixture(scope="module")
def rectified(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    """Convolutions whose ReLUs onnxruntime's quantizer writes as ranges that begin at 0."""
    model = files.conv()
    return model, files.quantized(
        model, tmp_path_factory.mktemp("rectified"), margin=1.0, activations=QuantType.QUInt8, symmetric=False
    )


def drawn(model: LoadedModel, path: Path) -> Bisection:
    """Search on random inputs, some of which lie beyond the calibrated ranges."""
    return search_faults(model, path, seeds=2)


def doubled(proto: onnx.ModelProto) -> None:
    name = next(iter(files.weights(proto))).input[1]
    files.replace_constant(proto, name, 2 * files.constant(proto, name))


def test_weight_scale_doubled_in_all_channels_accuses_no_range(rectified: tuple[LoadedModel, Path]) -> None:
    model, path = rectified
    bisection = drawn(model, files.edited(path, "doubled.onnx", doubled))
    assert [f.kind for f in bisection.faults] == ["scale"], str(bisection)
    assert "gives 2 times the values of the model's" in bisection.faults[0].cause
    assert bisection.faults[0].mended


def test_range_that_begins_below_zero_in_the_place_of_relu_is_named(rectified: tuple[LoadedModel, Path]) -> None:
    model, path = rectified

    def shifted(proto: onnx.ModelProto) -> None:
        quantize = files.activations(proto)[1]
        for node in proto.graph.node:
            if node is quantize or [*node.input][:1] == [*quantize.output]:
                files.own_constants(proto, node)
                files.replace_constant(proto, node.input[2], 60)

    bisection = drawn(model, files.edited(path, "shifted.onnx", shifted))
    first = bisection.faults[0]
    assert first.kind == "zero point", str(bisection)
    assert "the model has ReLU there" in first.cause
    assert first.nodes == (f"QuantizeLinear {files.activations(onnx.load(path))[1].name}",)


def test_bias_that_is_off_is_named(rectified: tuple[LoadedModel, Path]) -> None:
    model, path = rectified

    def moved(proto: onnx.ModelProto) -> None:
        name = next(t.name for t in proto.graph.initializer if t.data_type == onnx.TensorProto.INT32)
        codes = files.constant(proto, name).copy()
        codes[2] += 3 * np.abs(codes).max()
        files.replace_constant(proto, name, codes)

    bisection = drawn(model, files.edited(path, "bias.onnx", moved))
    assert "channel 2 of the model's 'one.bias'" in bisection.faults[0].cause, str(bisection)


def test_node_that_is_wrong_is_named_in_a_quantized_file(right: tuple[LoadedModel, Path]) -> None:
    model, path = right
    if not any(n.op_type == "LayerNormalization" for n in onnx.load(path).graph.node):
        pytest.skip("it has no norm")

    def wrong(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.op_type == "LayerNormalization")
        kept = [a for a in node.attribute if a.name != "epsilon"]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute("epsilon", 2.0)])

    bisection = searched(model, files.edited(path, "epsilon.onnx", wrong))
    assert [f.kind for f in bisection.faults] == ["epsilon"], str(bisection)
    assert bisection.faults[0].nodes[0].startswith("LayerNormalization ")


class Sliced(nn.Module):
    """A weight that is a part of a parameter, which an exporter stores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(32, 16)), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(x + nn.functional.linear(x, self.weight[:16])))


def test_node_added_behind_a_weight_that_is_like_no_parameter_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Sliced().eval()
    model = from_module(net, inputs=["x:float32[4,5,16]"])
    path = tmp_path / "int8.onnx"
    torch.onnx.export(net, (torch.randn(4, 5, 16),), tmp_path / "float32.onnx", dynamo=True, verbose=False)
    quantize_static(tmp_path / "float32.onnx", path, files.Samples(files.samples(model)))

    def scaled(proto: onnx.ModelProto) -> None:
        place = next(i for i, n in enumerate(proto.graph.node) if n.op_type == "LayerNormalization")
        norm = proto.graph.node[place]
        end, norm.output[0] = norm.output[0], "before"
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(1.5), "one_and_a_half"))
        proto.graph.node.insert(
            place + 1, onnx.helper.make_node("Mul", ["before", "one_and_a_half"], [end], name="scaled")
        )

    bisection = searched(model, files.edited(path, "scaled.onnx", scaled))
    assert ("added", ("Mul scaled",)) in [(f.kind, f.nodes) for f in bisection.faults], str(bisection)


def test_weights_of_files_of_dynamic_ranges_and_of_operators_are_named(tmp_path: Path) -> None:
    model = files.net()
    path = files.dynamic(model, tmp_path)

    def beta(proto: onnx.ModelProto) -> None:
        files.replace_constant(proto, "norm.bias", files.constant(proto, "norm.bias") + 0.5)

    bisection = searched(model, files.edited(path, "beta.onnx", beta))
    assert "'norm.bias'" in bisection.faults[0].cause, str(bisection)
    quantize_static(
        tmp_path / "float32.onnx",
        tmp_path / "operators.onnx",
        files.Samples(files.samples(model)),
        quant_format=QuantFormat.QOperator,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
    )

    def scale(proto: onnx.ModelProto) -> None:
        node = next(n for n in proto.graph.node if n.op_type == "QLinearMatMul")
        files.replace_constant(proto, node.input[4], 2 * files.constant(proto, node.input[4]))

    bisection = searched(model, files.edited(tmp_path / "operators.onnx", "scale.onnx", scale))
    node = next(n for n in onnx.load(tmp_path / "operators.onnx").graph.node if n.op_type == "QLinearMatMul")
    first = bisection.faults[0]
    assert (first.kind, first.nodes, first.tensor) == ("scale", (f"QLinearMatMul {node.name}",), node.input[3])


def test_weights_of_four_bits_in_one_node_have_their_half_steps(tmp_path: Path) -> None:
    model = files.net()
    config = DefaultWeightOnlyQuantConfig(block_size=16, is_symmetric=False)
    quantizer = MatMulNBitsQuantizer(export_to_proto(model), algo_config=config)
    quantizer.process()
    right = tmp_path / "right.onnx"
    onnx.save(quantizer.model.model, right)
    node = next(n for n in onnx.load(right).graph.node if n.op_type == "MatMulNBits")
    comparison = compare_files(model, right)
    assert comparison, str(comparison)
    assert not comparison.weights, str(comparison.weights)

    def scaled(proto: onnx.ModelProto) -> None:
        files.replace_constant(proto, node.input[2], 3 * files.constant(proto, node.input[2]))

    (found,) = search_faults(model, files.edited(right, "wrong.onnx", scaled)).faults
    assert (found.kind, found.nodes) == ("scale", (f"MatMulNBits {node.name}",))
