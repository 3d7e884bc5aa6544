"""What optimize makes of a quantized file: the norms beside the quantization are one node, and of that nothing is
touched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.graphs.quantization_info import DEQUANTIZE, QUANTIZE, GraphQuantization
from normdeploy.runtimes.ort_runner import OrtRunner
from normdeploy.runtimes.quantized_float64 import QuantizedRunner
from tests import quantized_files as files


def census(proto: onnx.ModelProto) -> dict[str, tuple[object, ...]]:
    """Each DequantizeLinear by what it makes: its scale, zero point and stored numbers."""
    q = GraphQuantization(proto)
    told = {}
    for node in proto.graph.node:
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            scheme = q.scheme_of(node)
            stored = q.constant_value(node.input[0])
            parts = (scheme.scale, scheme.zero_point, stored)
            told[node.output[0]] = (
                node.op_type,
                str(scheme.kind),
                scheme.axis,
                scheme.block,
                *(None if p is None else (p.shape, p.astype(np.float64).tobytes()) for p in parts),
            )
    return told


def decomposed(folder: Path, *, gamma_quantized: bool = False) -> Path:
    """A hand-written LayerNorm behind a quantized product and before another, its weights as codes of 8 bits."""
    rng = np.random.default_rng(0)
    codes = [rng.integers(-127, 128, (16, 16)).astype(np.int8) for _ in range(2)]
    constants = {
        "w1": codes[0],
        "w2": codes[1],
        "s1": rng.uniform(0.001, 0.01, 16).astype(np.float32),
        "s2": np.float32(0.005).reshape(()),
        "z": np.zeros(16, np.int8),
        "zero": np.int8(0).reshape(()),
        "sx": np.float32(0.03).reshape(()),  # of the input and of the norm's result: shared
        "axes": np.array([-1], np.int64),
        "eps": np.float32(1e-5).reshape(()),
        "two": np.float32(2).reshape(()),
        "gamma": rng.uniform(0.5, 2, 16).astype(np.float32),
        "beta": rng.uniform(-1, 1, 16).astype(np.float32),
        "gamma_codes": rng.integers(20, 127, 16).astype(np.int8),
        "gamma_scale": np.float32(0.02).reshape(()),
    }
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zero"], ["xq"]),
        node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"]),
        node("DequantizeLinear", ["w1", "s1", "z"], ["w1d"], axis=1),
        node("MatMul", ["xd", "w1d"], ["a"]),
        node("ReduceMean", ["a", "axes"], ["mean"]),
        node("Sub", ["a", "mean"], ["d"]),
        node("Pow", ["d", "two"], ["square"]),
        node("ReduceMean", ["square", "axes"], ["variance"]),
        node("Add", ["variance", "eps"], ["v"]),
        node("Sqrt", ["v"], ["root"]),
        node("Div", ["d", "root"], ["normal"]),
        node("DequantizeLinear", ["gamma_codes", "gamma_scale"], ["gamma_back"]),
        node("Mul", ["normal", "gamma_back" if gamma_quantized else "gamma"], ["scaled"]),
        node("Add", ["scaled", "beta"], ["n"]),
        node("QuantizeLinear", ["n", "sx", "zero"], ["nq"]),
        node("DequantizeLinear", ["nq", "sx", "zero"], ["nd"]),
        node("DequantizeLinear", ["w2", "s2", "zero"], ["w2d"]),
        node("MatMul", ["nd", "w2d"], ["b"]),
        node("Add", ["b", "n"], ["y"]),
    ]
    if not gamma_quantized:
        del nodes[11]
        del constants["gamma_codes"], constants["gamma_scale"]
    shape = ["batch", 4, 16]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    path = folder / "decomposed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def optimized(path: Path, **options: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    out = path.with_name("optimized.onnx")
    normdeploy.optimize(path, out, **options)
    return onnx.load(path), onnx.load(out)


def same(before: onnx.ModelProto, after: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """In float64, where a fused norm differs by 1e-12 and no value lies that near to a tie, and in onnxruntime."""
    one, two = (QuantizedRunner(p).infer(feeds) for p in (before, after))
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=0, atol=1e-7 * np.abs(value).max())
    with OrtRunner(before, optimize=False) as a, OrtRunner(after, optimize=False) as b:
        plain, new = a.infer(feeds), b.infer(feeds)
    for name, value in plain.items():
        off = np.abs(new[name].astype(np.float64) - value)
        assert np.median(off) <= 1e-6 * np.abs(value).max()  # but for values that a norm's rounding moved over a tie
        assert off.max() <= 0.05 * np.abs(value).max()


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt-rtx"])
def test_a_norm_between_quantized_products_is_fused_and_they_stay(tmp_path: Path, runtime: str) -> None:
    before, after = optimized(decomposed(tmp_path), runtime=runtime)
    ops = Counter(n.op_type for n in after.graph.node)
    assert ops["LayerNormalization"] == 1
    assert "Pow" not in ops
    assert census(after) == census(before)
    rng = np.random.default_rng(1)
    same(before, after, {"x": rng.standard_normal((3, 4, 16)).astype(np.float32)})


def test_a_scale_of_the_norm_that_is_quantized_is_not_stored_as_float(tmp_path: Path) -> None:
    """Nothing is proved through a rounding: what the norm is multiplied with stays, be it inside or behind it."""
    before, after = optimized(decomposed(tmp_path, gamma_quantized=True))
    assert census(after) == census(before)
    rng = np.random.default_rng(1)
    same(before, after, {"x": rng.standard_normal((3, 4, 16)).astype(np.float32)})


FORMS = {"symmetric": {}, "asymmetric": {"activations": files.QuantType.QUInt8, "symmetric": False}}


@pytest.mark.parametrize("make", ["net", "conv"])
@pytest.mark.parametrize("form", FORMS)
def test_files_of_onnxruntimes_quantizer_keep_their_numbers(make: str, form: str, tmp_path: Path) -> None:
    model = getattr(files, make)()
    before, after = optimized(files.quantized(model, tmp_path, **FORMS[form]))
    assert census(after) == census(before)
    stored = {t.data_type for t in after.graph.initializer if len(t.dims) > 1}
    assert stored == {TensorProto.INT8}
    same(before, after, model.samples(0))
