"""MatMulNBits is what its DequantizeLinear and MatMul say."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

from normdeploy.graphs.qoperator_expansion import expand_qoperators, unexpandable_ops
from normdeploy.graphs.quantization_info import quantization_parameters
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from normdeploy.runtimes.rounding_draws import RoundingDraw

K, N = 40, 6  # no whole number of blocks


def model(bits: int = 4, *, symmetric: bool = True) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "n")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.standard_normal((K, N)).astype(np.float32), "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    config = DefaultWeightOnlyQuantConfig(block_size=16, is_symmetric=symmetric, bits=bits)
    quantizer = MatMulNBitsQuantizer(proto, algo_config=config)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_opened_computes_what_the_kernel_computes(bits: int, symmetric: bool, bias: bool) -> None:
    proto = model(bits, symmetric=symmetric)
    if bias:
        proto.graph.initializer.append(numpy_helper.from_array(np.arange(N, dtype=np.float32), "b"))
        node = proto.graph.node[0]
        node.input.extend([*[""] * (5 - len(node.input)), "b"])
    x = np.random.default_rng(1).standard_normal((2, 5, K)).astype(np.float32)
    with OrtRunner(proto, optimize=False) as runner:
        ran = runner.infer({"x": x})["y"]
    quantized = QuantizedRunner(proto)
    assert np.abs(quantized.infer({"x": x})["y"] - ran).max() < 1e-4
    assert np.abs(quantized.run_with_draw({"x": x}, RoundingDraw("exact", 0))["y"] - ran).max() > 1e-3
    assert not unexpandable_ops(proto)
    assert quantization_parameters(proto) >= {"w_scales"}


def test_activations_of_eight_bits_and_another_order_stay_sealed() -> None:
    rounded, ordered = model(), model()
    rounded.graph.node[0].attribute.append(helper.make_attribute("accuracy_level", 4))
    order = numpy_helper.from_array(np.zeros(K, np.int32), "order")
    ordered.graph.initializer.append(order)
    ordered.graph.node[0].input.extend(["", "order"])
    for proto in (rounded, ordered):
        assert unexpandable_ops(proto) == ("MatMulNBits",)
        assert expand_qoperators(proto) is proto
