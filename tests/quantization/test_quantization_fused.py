"""``--quantize`` with ``--fuse portable`` in one call: what a second call of `optimize` makes of the quantized file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from tests.half_graphs import text

RNG = np.random.default_rng(0)
WIDTH = 32
X = RNG.standard_normal((64, WIDTH)).astype(np.float32)
BODY = """
    mean = ReduceMean(x, axes) d = Sub(x, mean) square = Mul(d, d) var = ReduceMean(square, axes) v = Add(var, eps)
    root = Sqrt(v) normal = Div(d, root) scaled = Mul(normal, gamma) n = Add(scaled, beta)
    a = MatMul(n, w1) r = Relu(a) b = MatMul(r, w2) sum = Add(b, x)
    n2 = LayerNormalization(sum, gamma, beta) y = MatMul(n2, w1)"""


@pytest.fixture(scope="module")
def block() -> onnx.ModelProto:
    return text(
        BODY,
        f"float[b,{WIDTH}] x",
        f"float[b,{2 * WIDTH}] y",
        axes=np.array([-1]),
        eps=np.array(1e-5),
        gamma=RNG.uniform(0.5, 2, WIDTH),
        beta=RNG.standard_normal(WIDTH),
        w1=RNG.standard_normal((WIDTH, 2 * WIDTH)) / 6,
        w2=RNG.standard_normal((2 * WIDTH, WIDTH)) / 8,
    )


def run(proto: onnx.ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


@pytest.mark.parametrize(
    ("to", "runtime"), [("int8", "any"), ("int8", "onnxruntime"), ("fp8", "tensorrt"), ("int4", "any")]
)
def test_one_call_is_as_two(block: onnx.ModelProto, to: str, runtime: str) -> None:
    one = normdeploy.optimize(block, runtime=runtime, fuse="portable", quantize=to, calibrate=[{"x": X}])
    first = normdeploy.optimize(block, runtime=runtime, quantize=to, calibrate=[{"x": X}])
    assert first.proto is not None
    two = normdeploy.optimize(first.proto, runtime=runtime, fuse="portable")
    assert one.proto is not None
    assert two.proto is not None
    ops = [Counter(n.op_type for n in proto.graph.node) for proto in (one.proto, two.proto)]
    assert ops[0] == ops[1]
    assert one.quantization == first.quantization
    joined = {"int8": 2, "fp8": 2, "int4": 0}[to] if runtime != "onnxruntime" else 0  # uint8 is not joined
    assert sum(n for op, n in ops[0].items() if op.endswith("Quantize")) == joined
    np.testing.assert_array_equal(run(one.proto), run(first.proto))  # the same nodes round the same
    onnx.checker.check_model(one.proto)


def test_each_norm_is_told_once_with_all_its_proofs(block: onnx.ModelProto) -> None:
    summary = normdeploy.optimize(block, fuse="portable", quantize="int8", calibrate=[{"x": X}]).summary
    assert [(f.kind, f.status, f.became.split("(")[0]) for f in summary.findings] == [
        ("LayerNorm", "fused", "normdeploy.LayerNormQuantize"),
        ("LayerNorm", "fused", "normdeploy.AddLayerNormQuantize"),
    ]
    for finding in summary.findings:
        assert finding.certificate
        assert {"identity", "the same nodes"} <= set(finding.proved)


def test_from_the_command_line(block: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(block, tmp_path / "in.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    command = ["optimize", str(tmp_path / "in.onnx"), "-o", str(tmp_path / "out.onnx"), "--quantize", "int8"]
    done = CliRunner().invoke(app, [*command, "--calibrate", str(tmp_path / "x.npz"), "--fuse", "portable"])
    assert done.exit_code == 0
    ops = {n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node}
    assert {"LayerNormQuantize", "AddLayerNormQuantize"} <= ops
