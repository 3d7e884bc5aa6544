"""A group norm as normdeploy's own op GroupNorm (``--fuse portable``), whose body onnxruntime runs without loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.graphs.function_ops import attach_functions
from normdeploy.graphs.own_op_functions import DOMAIN
from normdeploy.rewriting.norm_optimizer import optimize_norms
from normdeploy.runtimes.trt_runner import describe_missing_runtime
from tests.support import run_onnxruntime

CHECKER = Path(__file__).parents[2] / "normdeploy_check.py"
CHANNELS = 8
SCALE = np.linspace(0.5, 2, CHANNELS)
SHIFT = np.linspace(-1, 1, CHANNELS)
GROUP_NORM = "GroupNormalization<num_groups = {groups}, epsilon = 1e-5>(x, scale, bias)"
# As torch exports it
EXPORTED = (
    "view = Constant<value_ints = [0, {groups}, -1]>() v = Reshape(x, view)"
    " u = InstanceNormalization<epsilon = 1e-5>(v, units, zeros) w = Shape(x) n = Reshape(u, w)"
    " m = Mul(n, scales) y = Add(m, biases)"
)


def net(body: str, dims: str, groups: int, dtype: str = "float", opset: int = 21) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "{DOMAIN}" : 1]> net ({dtype}[{dims}] x) => ({dtype}[{dims}] y)'
        f" {{ {body.format(groups=groups)} }}"
    )
    kind = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    places = (1,) * (dims.count(",") - 1)
    constants = {
        "scale": SCALE,
        "bias": SHIFT,
        "scales": SCALE.reshape(-1, *places),
        "biases": SHIFT.reshape(-1, *places),
        "units": np.ones(groups),
        "zeros": np.zeros(groups),
    }
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(kind), name) for name, value in constants.items() if name in read
    )
    return proto


def exact(x: np.ndarray, groups: int) -> np.ndarray:
    """The norm in float64, with the epsilon of the file."""
    rows = x.astype(np.float64).reshape(len(x), groups, -1)
    epsilon = np.float64(np.float32(1e-5))
    normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + epsilon)
    laid = (-1, *(1,) * (x.ndim - 2))
    scale, shift = (value.astype(x.dtype).astype(np.float64).reshape(laid) for value in (SCALE, SHIFT))
    return np.asarray(normal.reshape(x.shape) * scale + shift)


def drawn(shape: tuple[int, ...], offset: float, dtype: type) -> dict[str, np.ndarray]:
    return {"x": (np.random.default_rng(0).standard_normal(shape) + offset).astype(dtype)}


def own(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node if n.domain == DOMAIN]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("optimized", [False, True])
def test_portable_group_norm_is_one_exact_node(dtype: str, offset: float, silu: bool, optimized: bool) -> None:
    tail = "n = {norm} s = Sigmoid(n) y = Mul(n, s)" if silu else "y = {norm}"
    before = net(tail.replace("{norm}", GROUP_NORM), "N,8,H,W", 4, dtype)
    out, summary = optimize_norms(before, fuse="portable")
    assert [n.op_type for n in out.graph.node] == ["GroupNormSiLU" if silu else "GroupNorm"]
    (finding,) = summary.findings
    assert finding.certificate is not None
    assert (finding.status, finding.certificate.method) == ("fused", "exact")
    kind = np.float32 if dtype == "float" else np.float16
    given = drawn((2, CHANNELS, 16, 15), offset, kind)
    want = exact(given["x"], 4)
    if silu:
        want = want / (1 + np.exp(-want))
    (y,) = run_onnxruntime(out, given, optimized)
    assert y.dtype == kind
    # The mean and the products are off by a few ulps of the largest element; 4 is the largest x̂ times the scale.
    u = np.finfo(kind).eps
    assert np.abs(y - want).max() <= 8 * u * (1 + np.abs(want).max()) + 4 * np.finfo(np.float32).eps * offset


def test_standard_group_norm_loses_all_digits_at_an_offset() -> None:
    """The reason for an own op. A kernel in onnxruntime would make it needless."""
    given = drawn((2, CHANNELS, 16, 15), 1e3, np.float32)
    (y,) = run_onnxruntime(net(f"y = {GROUP_NORM}", "N,8,H,W", 4), given)
    assert not np.abs(y - exact(given["x"], 4)).max() < 0.01


@pytest.mark.parametrize("opset", [17, 18, 21, 23])
@pytest.mark.parametrize(
    ("dims", "shape", "groups", "op"),
    [
        ("N,8,H,W", (3, 8, 5, 6), 4, "GroupNorm"),
        ("N,8,H", (3, 8, 5), 2, "GroupNorm"),
        ("N,8,D,H,W", (3, 8, 2, 3, 4), 4, "GroupNorm"),
        ("2,8,5,6", (2, 8, 5, 6), 4, "GroupNorm"),
        ("N,8,H,W", (3, 8, 5, 6), 1, "GroupNorm"),
        ("N,8,H,W", (3, 8, 5, 6), 8, ""),
        ("N,8,5,6", (3, 8, 5, 6), 1, ""),
    ],
)
def test_exported_group_norm_is_one_node(dims: str, shape: tuple[int, ...], groups: int, op: str, opset: int) -> None:
    """As many groups as channels are InstanceNormalization; one group of known size is LayerNormalization."""
    before = net(EXPORTED, dims, groups, opset=opset)
    out, summary = optimize_norms(before, fuse="portable")
    onnx.checker.check_model(out, full_check=True)
    assert [f.status for f in summary.findings] == ["fused"]
    assert own(out) == [op] * bool(op)
    assert len(out.graph.node) == 1
    given = drawn(shape, 3.0, np.float32)
    (y,) = run_onnxruntime(out, given)
    np.testing.assert_allclose(y, exact(given["x"], groups), rtol=0, atol=2e-5)


def test_group_norm_of_two_axes_is_one_node() -> None:
    out, _ = optimize_norms(net(f"y = {GROUP_NORM}", "N,8", 2), fuse="portable")
    assert own(out) == ["GroupNorm"]
    given = drawn((3, 8), 3.0, np.float32)
    np.testing.assert_allclose(run_onnxruntime(out, given)[0], exact(given["x"], 2), rtol=0, atol=2e-5)


def test_group_norm_in_float64_does_not_become_the_op_that_computes_in_float32() -> None:
    out, _ = optimize_norms(net(f"s = {GROUP_NORM} y = Identity(s)", "N,8,H,W", 4, "double"), fuse="portable")
    assert own(out) == []


@pytest.mark.parametrize("runtime", ["any", "onnxruntime"])
def test_own_group_norm_is_recognized_again(runtime: str) -> None:
    first, _ = optimize_norms(net(f"y = {GROUP_NORM}", "N,8,H,W", 4), fuse="portable")
    again, summary = optimize_norms(first, runtime=runtime, fuse="portable")
    assert again.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)
    (finding,) = summary.findings
    assert (finding.kind, finding.status, finding.reason) == ("GroupNorm", "kept", "it is already one node")


def test_runtimes_write_their_own_form_of_an_own_group_norm() -> None:
    first, _ = optimize_norms(net(f"y = {GROUP_NORM}", "N,8,H,W", 4), fuse="portable")
    for runtime, fuse in (("tensorrt", "standard"), ("tensorrt-rtx", "portable")):
        out, _ = optimize_norms(first, runtime=runtime, fuse=fuse)
        assert [n.op_type for n in out.graph.node] == ["GroupNormalization"]
        assert not out.functions
    out, _ = optimize_norms(first)
    assert "InstanceNormalization" in [n.op_type for n in out.graph.node]
    assert not out.functions


def test_a_call_without_its_bias_is_not_the_op() -> None:
    """The file's own function defines it; the name alone does not."""
    proto = net(f"y = {DOMAIN}.GroupNorm<num_groups = 4, epsilon = 1e-5>(x, scale)", "N,8,H,W", 4)
    proto.functions.append(
        onnx.parser.parse_function(
            f'<opset_import: ["" : 21], domain: "{DOMAIN}"> GroupNorm <num_groups, epsilon> (X, scale) => (Y)'
            " { Y = Relu (X) }"
        )
    )
    out, _ = optimize_norms(proto, fuse="portable")
    assert [n.op_type for n in out.graph.node] == ["Relu"]


def test_the_certificate_of_an_own_group_norm_is_accepted(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.onnx", "source.onnx")]
    onnx.save(net(f"y = {GROUP_NORM}", "N,8,H,W", 4), files[2])
    normdeploy.optimize(files[2], files[1], certificate=files[0], fuse="portable")
    assert own(onnx.load(files[1])) == ["GroupNorm"]
    done = subprocess.run([sys.executable, CHECKER, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    bool(describe_missing_runtime("tensorrt-rtx", gpu=False)),
    reason=str(describe_missing_runtime("tensorrt-rtx", gpu=False)),
)
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_tensorrt_rtx_builds_a_portable_group_norm(tmp_path: Path, dtype: str) -> None:
    """``build`` gives the parser TensorRT's own layer instead of the body; other builders read the body."""
    source = attach_functions(
        net(f"y = {DOMAIN}.GroupNorm<num_groups = 4, epsilon = 1e-5>(x, scale, bias)", "N,8,H,W", 4, dtype), 21
    )
    onnx.save(source, tmp_path / "net.onnx")
    built = normdeploy.build(
        tmp_path / "net.onnx", tmp_path / "net.engine", profiles=["N=1:2:4", "H=2:8:16", "W=2:8:16"]
    )
    assert [norm.op for norm in built.norms] == ["GroupNormalization"]
    import tensorrt_rtx

    logger = tensorrt_rtx.Logger(tensorrt_rtx.Logger.ERROR)
    network = tensorrt_rtx.Builder(logger).create_network(0)
    assert tensorrt_rtx.OnnxParser(network, logger).parse(source.SerializeToString())
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    assert kinds.count(tensorrt_rtx.LayerType.NORMALIZATION) == 1
