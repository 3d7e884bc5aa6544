"""The sum before a layer norm: written as Sum where onnxruntime would join an Add with the norm into a slower, less
exact kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

import normdeploy
from normdeploy.rewriting.norm_optimizer import optimize_norms

D = 48
LN = "LayerNormalization<axis = -1, epsilon = 1e-5>"


def graph(
    body: str, x: str = "float[N,S,48]", r: str = "float[N,S,48]", outputs: str = "float[N,S,48] y"
) -> onnx.ModelProto:
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({x} x, {r} r) => ({outputs}) {{ {body} }}')
    kind = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    rng = np.random.default_rng(0)
    for name, value in (("g", rng.uniform(0.5, 2, D)), ("b", rng.normal(size=D))):
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(kind), name))
    return proto


def ops(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def in_onnxruntime(proto: onnx.ModelProto, folder: Path) -> list[str]:
    """The ops that onnxruntime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 4
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return ops(onnx.load(folder / "optimized.onnx"))


POST = f"s = Add(x, r) y = {LN}(s, g, b)"


@pytest.mark.parametrize(
    ("runtime", "wanted"), [("any", "Sum"), ("onnxruntime", "Sum"), ("tensorrt", "Add"), ("tensorrt-rtx", "Add")]
)
def test_a_residual_before_a_layer_norm(runtime: str, wanted: str, tmp_path: Path) -> None:
    before = graph(POST)
    after, summary = optimize_norms(before, runtime=runtime)
    assert ops(after) == [wanted, "LayerNormalization"]
    assert "SkipLayerNormalization" in in_onnxruntime(before, tmp_path), (
        "onnxruntime joins them no more: the step has lost its reason"
    )
    if wanted == "Sum":
        assert "SkipLayerNormalization" not in in_onnxruntime(after, tmp_path)
        assert any("Sum" in note for note in summary.findings[0].notes)
    again, _ = optimize_norms(after, runtime=runtime)
    assert ops(again) == ops(after)


def test_the_numbers_are_those_of_both_ops(tmp_path: Path) -> None:
    before = graph(POST)
    after, _ = optimize_norms(before)
    rng = np.random.default_rng(1)
    feeds = {name: (rng.normal(size=(2, 7, D)) + 1e3).astype(np.float32) for name in "xr"}
    s = feeds["x"].astype(np.float64) + feeds["r"]
    held = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in before.graph.initializer}
    exact = (s - s.mean(-1, keepdims=True)) / np.sqrt(s.var(-1, keepdims=True) + 1e-5) * held["g"] + held["b"]
    errors = []
    for proto in (before, after):
        session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        errors.append(np.abs(session.run(None, feeds)[0] - exact).max())
    rounded = (
        np.spacing(np.abs(s).max().astype(np.float32)) / 2 / s.std(-1).min()
    )  # what rounding the sum alone may cost
    assert errors[1] <= 16 * rounded
    assert errors[1] <= errors[0]


@pytest.mark.parametrize(
    ("body", "types"),
    [
        (f"s = Add(x, r) n = {LN}(s, g, b) y = Add(s, n)", {}),  # onnxruntime does not join these either
        (POST, {"r": "float[48]"}),
        (POST, {"x": "float[N,48]", "r": "float[N,48]", "outputs": "float[N,48] y"}),
        (POST, {"x": "float16[N,S,48]", "r": "float16[N,S,48]", "outputs": "float16[N,S,48] y"}),
        (POST.replace("LayerNormalization<axis = -1, ", "RMSNormalization<axis = -1, ").replace(", b)", ")"), {}),
    ],
    ids=["the sum is read again", "a bias", "two dims", "halves", "an RMS norm"],
)
def test_other_sums_stay(body: str, types: dict[str, str]) -> None:
    proto = graph(body, **types)
    if "RMSNormalization" in body:
        proto.opset_import[0].version = 23
    assert "Sum" not in ops(optimize_norms(proto)[0])


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False
    ).eval()


def test_an_encoder(tmp_path: Path) -> None:
    made = normdeploy.export(encoder(), torch.randn(2, 5, 32), output=tmp_path / "encoder.onnx")
    assert ops(made.proto).count("Sum") == 4
    assert "SkipLayerNormalization" not in in_onnxruntime(made.proto, tmp_path)
    assert normdeploy.verify(made, seeds=2)


def test_half_precision_has_no_sums_of_two(tmp_path: Path) -> None:
    """Several of them crash onnxruntime 1.31.1 while it optimizes."""
    made = normdeploy.export(encoder(), torch.randn(2, 5, 32), precision="fp16", output=tmp_path / "encoder.onnx")
    assert "Sum" not in ops(made.proto)
    in_onnxruntime(made.proto, tmp_path)
