"""The rules of quantized files: each is broken by one file, and kept by its like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import normdeploy
from normdeploy.errors import InputError
from normdeploy.verbs.check.quantization_rules import find_quantization_problems


def pair(name: str, *, scale: object = 0.1, zero: object = 0, kind: type = np.int8, **attrs: int) -> list[object]:
    """Nodes and initializers of a pair behind the tensor ``name``, which makes ``name``_back."""
    given = [
        numpy_helper.from_array(np.asarray(scale, np.float32), f"{name}_scale"),
        numpy_helper.from_array(np.asarray(zero, np.float64).astype(kind), f"{name}_zero"),
    ]
    parameters = [t.name for t in given]
    return [
        helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"], f"{name}_Q", **attrs),
        helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_back"], f"{name}_D", **attrs),
        *given,
    ]


def weight(name: str, *, channels: int = 4, zero: int = 0, kind: type = np.int8) -> list[object]:
    """A stored weight of 8×3×3×3 with a scale for each channel, or one for all."""
    codes = np.arange(216).reshape(8, 3, 3, 3) % 200 - 100
    scales = np.full(8 if channels else (), 0.01, np.float32)
    zeros = np.full(scales.shape, zero)
    return [
        numpy_helper.from_array(codes.astype(kind), f"{name}_codes"),
        numpy_helper.from_array(scales, f"{name}_scale"),
        numpy_helper.from_array(zeros.astype(kind), f"{name}_zero"),
        helper.make_node(
            "DequantizeLinear",
            [f"{name}_codes", f"{name}_scale", f"{name}_zero"],
            [f"{name}_back"],
            f"{name}_D",
            **({"axis": 0} if channels else {}),
        ),
    ]


def model(*parts: object, output: str = "y") -> onnx.ModelProto:
    flat = [p for part in parts for p in (part if isinstance(part, list) else [part])]
    graph = helper.make_graph(
        [p for p in flat if isinstance(p, onnx.NodeProto)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info(output, TensorProto.UNDEFINED, None)],
        [p for p in flat if isinstance(p, onnx.TensorProto)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def conv(w: str = "w_back", x: str = "x_back", y: str = "y") -> onnx.NodeProto:
    return helper.make_node("Conv", [x, w], [y], f"{y}_conv")


def relu(x: str, y: str) -> onnx.NodeProto:
    return helper.make_node("Relu", [x], [y])


def found(proto: onnx.ModelProto, runtime: str = "any", capability: float | None = None) -> list[str]:
    return [p.rule for p in find_quantization_problems(proto, runtime, capability)]


GOOD = [pair("x"), weight("w"), conv()]


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt", "tensorrt-rtx"])
def test_a_file_as_it_should_be(runtime: str) -> None:
    assert found(model(*GOOD), runtime, 8.6) == []


def test_zero_points_of_activations_are_for_onnxruntime_alone() -> None:
    for parts in (pair("x", zero=3), pair("x", zero=128, kind=np.uint8), pair("x", kind=np.uint8)):
        proto = model(parts, weight("w"), conv())
        assert found(proto, "tensorrt") == found(proto, "tensorrt-rtx") == ["asymmetric"]
        assert found(proto, "onnxruntime") == found(proto) == []


def test_one_scale_for_all_channels() -> None:
    (problem,) = find_quantization_problems(model(pair("x"), weight("w", channels=0), conv()), "any", None)
    assert (problem.rule, problem.tensor) == ("per-tensor", "w_back")
    assert "'w_codes' of shape [8, 3, 3, 3]" in problem.message


def test_zero_points_of_weights() -> None:
    assert found(model(pair("x"), weight("w", zero=2), conv())) == ["weight-zero-point"]


def test_a_pair_that_keeps_a_convolution_from_its_activation() -> None:
    blocked = model(pair("x"), weight("w"), conv(y="c"), pair("c"), relu("c_back", "y"))
    (problem,) = find_quantization_problems(blocked, "any", None)
    assert (problem.rule, problem.node) == ("blocked-fusion", "c_Q")
    assert problem.message == "Conv can't be fused with Relu: its output is quantized between the two"
    behind = model(pair("x"), weight("w"), conv(y="c"), relu("c", "r"), pair("r"), relu("r_back", "y"))
    assert found(behind) == []
    shared = model(*GOOD[:2], conv(y="c"), pair("c"), relu("c_back", "r"), helper.make_node("Add", ["c", "r"], ["y"]))
    assert found(shared) == []  # another reader needs the result as it is


def test_a_tensor_that_is_quantized_for_each_reader() -> None:
    again = helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q2"])
    back = helper.make_node("DequantizeLinear", ["x_q2", "x_scale", "x_zero"], ["x_back2"])
    add = helper.make_node("Add", ["a", "b"], ["y"])
    parts = [pair("x"), weight("w"), conv(y="a"), conv(x="x_back2", y="b"), add]
    assert found(model(parts[0], again, back, *parts[1:])) == ["blocked-fusion"]
    other = numpy_helper.from_array(np.float32(0.2).reshape(()), "other")
    again.input[1] = back.input[1] = "other"
    assert found(model(parts[0], other, again, back, *parts[1:])) == []


def test_fp8_before_ada() -> None:
    import ml_dtypes

    proto = model(pair("x", kind=ml_dtypes.float8_e4m3fn), weight("w"), conv())
    assert found(proto, "tensorrt", 8.6) == ["fp8"]
    assert found(proto, "tensorrt", 8.9) == found(proto, "tensorrt") == []


def test_what_is_quantized_and_never_dequantized() -> None:
    quantize, _, *given = pair("x")
    cast = helper.make_node("Cast", ["x_q"], ["y"], to=TensorProto.FLOAT)
    neg = helper.make_node("Neg", ["x_q"], ["n"])
    assert found(model([quantize, *given], neg, output="n")) == ["unpaired"]
    assert found(model([quantize, *given], output="x_q")) == []  # the file's output is quantized on purpose
    assert found(model([quantize, *given], cast)) == []  # leaves as numbers of a float type


def test_check_tells_them(tmp_path: Path) -> None:
    proto = model(pair("x", zero=3), weight("w", channels=0), conv())
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 6, 6]))
    onnx.save(proto, tmp_path / "m.onnx")
    result = normdeploy.check(tmp_path / "m.onnx", runtime="tensorrt-rtx", fail_on="asymmetric")
    assert not result
    assert {(p.rule, p.level) for p in result.files[0].findings} == {("asymmetric", "error"), ("per-tensor", "warning")}
    with pytest.raises(InputError, match=r"can't read the compute capability 'ada'; write it as NVIDIA does"):
        normdeploy.check(tmp_path / "m.onnx", compute_capability="ada")


def with_int32_bias() -> onnx.ModelProto:
    """Return a convolution as onnxruntime's quantizer writes it: its bias is int32, one scale for each channel."""
    scales = np.full(8, 0.003, np.float32)
    bias = np.array([3, -5, 2**30 + 1, 0, 7, -(2**24) - 1, 1, 2], np.int32)
    given = [numpy_helper.from_array(bias, "b"), numpy_helper.from_array(scales, "b_scale")]
    made = helper.make_node("DequantizeLinear", ["b", "b_scale"], ["b_back"], "b_D", axis=0)
    conv = helper.make_node("Conv", ["x_back", "w_back", "b_back"], ["y"], "conv")
    proto = model(pair("x"), weight("w"), given, made, conv)
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 6, 6]))
    return proto


def test_check_int32_bias_is_told_for_tensorrt_alone() -> None:
    proto = with_int32_bias()
    assert found(proto, "tensorrt-rtx") == found(proto, "tensorrt") == ["int32"]
    assert found(proto) == []


def test_optimize_int32_bias_for_tensorrt_gives_the_same_bits(tmp_path: Path) -> None:
    onnx.save(with_int32_bias(), tmp_path / "in.onnx")
    result = normdeploy.optimize(tmp_path / "in.onnx", output=tmp_path / "out.onnx", runtime="tensorrt-rtx")
    assert any("1 constants stored as int32" in note for note in result.notes)
    written = onnx.load(tmp_path / "out.onnx")
    assert found(written, "tensorrt-rtx") == []
    assert [node.op_type for node in written.graph.node].count("DequantizeLinear") == 2
    (stored,) = (t for t in written.graph.initializer if t.name == "b_back")
    original = onnx.load(tmp_path / "in.onnx")
    original.graph.output[0].CopyFrom(helper.make_tensor_value_info("b_back", TensorProto.FLOAT, [8]))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(original.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (computed,) = session.run(None, {"x": np.zeros((1, 3, 8, 8), np.float32)})
    np.testing.assert_array_equal(numpy_helper.to_array(stored), computed)
    kept = normdeploy.optimize(tmp_path / "in.onnx", output=tmp_path / "kept.onnx")
    assert kept.summary.nodes_after == 5


HEAD = '<ir_version: 10, opset_import: ["": 22]>'
UNPARSED = {
    "hard swish in bfloat16": (f"{HEAD} g (bfloat16[2,4] x) => (bfloat16[2,4] y) {{ y = HardSwish(x) }}", "HardSwish"),
    "mish in bfloat16": (f"{HEAD} g (bfloat16[2,4] x) => (bfloat16[2,4] y) {{ y = Mish(x) }}", "Mish"),
    "celu in float16": (f"{HEAD} g (float16[2,4] x) => (float16[2,4] y) {{ y = Celu(x) }}", "rank of operands"),
    "strings": (f"{HEAD} g (string[2] t) => (string[2] y) {{ y = Identity(t) }}", "date type"),
}


@pytest.mark.parametrize(("text", "reason"), UNPARSED.values(), ids=UNPARSED)
def test_check_file_that_tensorrt_rtx_can_not_read_is_told(tmp_path: Path, text: str, reason: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    (file,) = normdeploy.check(tmp_path / "m.onnx", runtime="tensorrt-rtx").files
    (finding,) = [p for p in file.findings if p.rule == "unparsed"]
    assert reason in finding.message
    assert "/_src" not in finding.message
    assert not normdeploy.check(tmp_path / "m.onnx").files[0].findings


def test_check_file_that_tensorrt_rtx_reads_is_clean(tmp_path: Path) -> None:
    proto = model(*GOOD)
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 6, 6]))
    onnx.save(proto, tmp_path / "m.onnx")
    (file,) = normdeploy.check(tmp_path / "m.onnx", runtime="tensorrt-rtx").files
    assert not file.findings
    assert not file.error
