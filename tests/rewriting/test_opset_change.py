"""Changing the opset: norms of newer opsets become nodes that the older one has, proved and recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

import normdeploy
from normdeploy.errors import GraphError, InputError, NormdeployError
from normdeploy.storage.onnx_domains import default_domain_opset
from tests.support import run_onnxruntime

CHECKER = Path(__file__).parents[2] / "normdeploy_check.py"
NEWEST = 26

# name → (opset, shape of x, nodes)
NORMS = {
    "layer norm": (17, "n,6,8", "y = LayerNormalization <epsilon: float = 0.01> (x, s8, b8)"),
    "layer norm of two axes": (17, "n,6,8", "y = LayerNormalization <axis = -2> (x, s68)"),
    "layer norm of channels": (17, "n,8,5", "y = LayerNormalization <axis = 1> (x, s8c, b8c)"),
    "layer norm with statistics": (17, "3,8", "z, m, d = LayerNormalization (x, s8) t = Mul (z, d) y = Add (t, m)"),
    "RMS norm": (23, "n,6,8", "y = RMSNormalization <epsilon: float = 0.01> (x, s8)"),
    "RMS norm of two axes": (23, "n,6,8", "y = RMSNormalization <axis = 1> (x, s68)"),
    "group norm": (21, "n,8,5", "y = GroupNormalization <num_groups = 4, epsilon: float = 0.01> (x, s8, b8)"),
    "group norm of an open image": (21, "n,8,h,w", "y = GroupNormalization <num_groups = 2> (x, s8, b8)"),
    "group norm of opset 18": (18, "n,8,5", "y = GroupNormalization <num_groups = 4> (x, s4, b4)"),
    "instance norm": (22, "n,8,5", "y = InstanceNormalization (x, s8, b8)"),
    "batch norm": (15, "n,8,5", "y = BatchNormalization (x, s8, b8, b8, v8)"),
    "norm of data": (17, "n,6,8", "p = Sin (x) q = Slice (p, i0, i1, i1) y = LayerNormalization (x, s8, q)"),
    "norm in several nodes": (
        18,
        "n,6,8",
        "m = ReduceMean (x, last) d = Sub (x, m) q = Mul (d, d) v = ReduceMean (q, last) e = Add (v, eps) r = Sqrt (e)"
        " y = Div (d, r)",
    ),
    "several norms": (
        23,
        "n,6,8",
        "a = LayerNormalization (x, s8, b8) c = RMSNormalization (a, s8) g = Gelu (c)"
        " y = GroupNormalization <num_groups = 3> (g, s6, b6)",
    ),
}


def model(name: str) -> onnx.ModelProto:
    opset, shape, nodes = NORMS[name]
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> f (float[{shape}] x) => (float[{shape}] y) {{ {nodes} }}'
    )
    rng = np.random.default_rng(7)
    values = {f"{k}{n}": rng.uniform(0.5, 1.5, n) for k in "sb" for n in (4, 6, 8)}
    values |= {"s68": rng.uniform(0.5, 1.5, (6, 8)), "s8c": values["s8"][:, None], "b8c": values["b8"][:, None]}
    values |= {"v8": rng.uniform(0.5, 1.5, 8), "eps": np.array([1e-3])}
    stored = {n: v.astype(np.float32) for n, v in values.items()}
    stored |= {"i0": np.array([0]), "i1": np.array([1]), "last": np.array([-1])}
    read = {i for n in proto.graph.node for i in n.input}
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in stored.items() if n in read)
    return proto


def feeds(proto: onnx.ModelProto, batch: int = 2) -> dict[str, np.ndarray]:
    sizes = [d.dim_value or batch for d in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(batch).standard_normal(sizes).astype(np.float32)}


def float64_output(proto: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    """Run onnx's evaluator in float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in [t for t in wide.graph.initializer if t.data_type == TensorProto.FLOAT]:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    return np.asarray(ReferenceEvaluator(wide).run(None, {"x": given["x"].astype(np.float64)})[0])


def check(certificate: Path, file: Path) -> str:
    told = subprocess.run([sys.executable, CHECKER, certificate, file], capture_output=True, text=True, check=False)
    return told.stdout + told.stderr


@pytest.mark.parametrize("target", [13, 15, 17, 18, 21, NEWEST])
@pytest.mark.parametrize("name", NORMS)
def test_norm_at_another_opset_is_the_same_and_certified(name: str, target: int, tmp_path: Path) -> None:
    before = model(name)
    out, certificate = tmp_path / "out.onnx", tmp_path / "c.json"
    onnx.save(before, tmp_path / "in.onnx")
    result = normdeploy.optimize(tmp_path / "in.onnx", out, opset=target, certificate=certificate, strict=True)
    after = onnx.load(out)
    assert default_domain_opset(after) == result.summary.opset == target
    onnx.checker.check_model(after, full_check=True)
    for batch in (1, 2, 5):
        given = feeds(before, batch)
        exact = float64_output(before, given)
        # Norms of at most 48 float32 numbers near 1
        np.testing.assert_allclose(run_onnxruntime(after, given)[0], exact, rtol=1e-5, atol=1e-5)
    assert check(certificate, out).startswith("accepted: ")


@pytest.mark.parametrize("target", [13, 15, 17, 18, 21])
@pytest.mark.parametrize(
    "name", ["layer norm", "RMS norm", "group norm", "group norm of an open image", "several norms"]
)
def test_each_norm_that_the_opset_lacks_has_an_exact_proof(name: str, target: int, tmp_path: Path) -> None:
    before = model(name)
    lacking = [
        n.op_type for n in before.graph.node if not onnx.defs.has(n.op_type, max_inclusive_version=target, domain="")
    ]
    if default_domain_opset(before) <= target or not lacking:
        pytest.skip("nothing to write out")
    out, certificate = tmp_path / "out.onnx", tmp_path / "c.json"
    result = normdeploy.optimize(before, out, opset=target, certificate=certificate)
    norms = [f for f in result.summary.findings if f.kind in ("LayerNorm", "RMSNorm", "GroupNorm")]
    assert norms
    assert all(f.certificate is None or (f.certificate.method == "exact" and f.certificate) for f in norms)
    told = check(certificate, out)
    assert told.startswith("accepted: ")
    proved = int(told.split()[1])
    assert proved >= len([op for op in lacking if op.endswith("Normalization")])


@pytest.mark.parametrize("target", [13, 17])
def test_lowered_file_is_proved_equal(target: int, tmp_path: Path) -> None:
    onnx.save(model("group norm of an open image"), tmp_path / "in.onnx")
    normdeploy.optimize(tmp_path / "in.onnx", tmp_path / "out.onnx", opset=target)
    assert normdeploy.prove(tmp_path / "in.onnx", tmp_path / "out.onnx").verdict.startswith("equal")
    normdeploy.optimize(tmp_path / "out.onnx", tmp_path / "back.onnx", opset=21)
    assert normdeploy.prove(tmp_path / "in.onnx", tmp_path / "back.onnx").verdict.startswith("equal")


def test_norm_of_an_open_row_is_refused_with_its_lowest_opset(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> f (float[n,6,h] x, float[c] s) => (float[n,6,h] y) {
        y = GroupNormalization <num_groups = 4> (x, s, s) }"""
    out = tmp_path / "out.onnx"
    with pytest.raises(
        GraphError, match=r"can't be lowered to 13: node 'y' \(GroupNormalization\) .* opset for it is 21"
    ):
        normdeploy.optimize(onnx.parser.parse_model(text), out, opset=13)
    assert not out.exists()


def test_type_that_the_opset_lacks_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 22]> f (bfloat16[2,3,8] x) => (bfloat16[2,3,8] y) { y = Sin (x) }"""
    out = tmp_path / "out.onnx"
    with pytest.raises(
        GraphError, match=r"node 'y' \(Sin\).* does not allow its types \(bfloat16\); the lowest .* is 22"
    ):
        normdeploy.optimize(onnx.parser.parse_model(text), out, opset=17)
    assert not out.exists()


def test_instance_norm_in_bfloat16_becomes_several_nodes() -> None:
    text = """<ir_version: 10, opset_import: ["": 22]>
        f (bfloat16[2,3,8] x, bfloat16[3] s) => (bfloat16[2,3,8] y) { y = InstanceNormalization (x, s, s) }"""
    made = normdeploy.optimize(onnx.parser.parse_model(text), opset=17).model
    assert "InstanceNormalization" not in {n.op_type for n in made.graph.node}
    assert default_domain_opset(made) == 17


@pytest.mark.parametrize("opset", [12, 29, "17"])
def test_opset_out_of_range_is_refused(opset: object) -> None:
    with pytest.raises(InputError, match="choose one of 13 to 28"):
        normdeploy.optimize(model("layer norm"), opset=opset)


def test_opset_that_onnxruntime_does_not_load_is_refused() -> None:
    with pytest.raises(NormdeployError, match="a file of opset 28 would not run, so nothing was written"):
        normdeploy.optimize(model("layer norm"), opset=28)


def test_quantized_file_that_needs_a_newer_opset_is_refused(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[2,64] x) => (float[2,64] y) { y = MatMul (x, w) }'
    )
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    out = tmp_path / "out.onnx"
    with pytest.raises(NormdeployError, match="the file needs opset 21, not 17, because of its dtypes"):
        normdeploy.optimize(proto, out, opset=17, quantize="int4")
    assert not out.exists()


def test_opset_of_a_function_in_the_file_is_lowered() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]> f (float[2,8] x, float[8] s) => (float[2,8] y) {
        y = own.F (x, s) }
    <opset_import: ["": 21], domain: "own"> F (a, s) => (z) { z = LayerNormalization (a, s) }"""
    before = onnx.parser.parse_model(text)
    made = normdeploy.optimize(before, opset=13).model
    given = {"x": feeds(model("layer norm with statistics"), 2)["x"][:2], "s": np.arange(8, dtype=np.float32)}
    np.testing.assert_allclose(run_onnxruntime(made, given)[0], run_onnxruntime(before, given)[0], rtol=1e-5, atol=1e-6)
    assert {f.opset_import[0].version for f in made.functions} <= {13}


def test_own_ops_are_written_for_the_older_opset() -> None:
    before = model("RMS norm")
    made = normdeploy.optimize(before, opset=17, fuse="portable").model
    assert [n.op_type for n in made.graph.node] == ["RMSNorm"]
    assert default_domain_opset(made.functions[0]) == 17
    below = normdeploy.optimize(made, opset=13, fuse="portable").model
    assert not below.functions
    given = feeds(before)
    np.testing.assert_allclose(run_onnxruntime(below, given)[0], float64_output(before, given), rtol=1e-5, atol=1e-6)


def test_half_precision_keeps_the_stated_opset() -> None:
    made = normdeploy.optimize(model("layer norm"), opset=13, precision="fp16").model
    assert default_domain_opset(made) == 13
    assert TensorProto.FLOAT16 in {t.data_type for t in made.graph.initializer}


NESTED = {
    "function": """<ir_version: 10, opset_import: ["": 21, "own": 1]> f (float[2,8] x, float[8] s) => (float[2,8] y) {
        y = own.F (x, s) }
    <opset_import: ["": 21], domain: "own"> F (a, s) => (z) { z = LayerNormalization (a, s) }""",
    "function that is inlined": """<ir_version: 10, opset_import: ["": 21, "own": 1]>
    f (float[2,8] x, float[8] s) => (float[2,8] y) { y = own.F (x, s) }
    <opset_import: ["": 21], domain: "own"> F (a, s) => (z) { n = LayerNormalization (a, s) z = Gelu (n) }""",
    "branches": """<ir_version: 10, opset_import: ["": 21]> f (float[2,8] x, bool c) => (float[2,8] y)
    <float[8] s = {1,2,3,4,5,6,7,8}, int64[1] last = {1}> {
        y = If (c) <then_branch = t () => (float[2,8] a) { a = LayerNormalization (x, s) },
            else_branch = e () => (float[2,8] b) { m = ReduceMean (x, last) b = Sub (x, m) }> }""",
    "loop": """<ir_version: 10, opset_import: ["": 21]> f (float[2,8] x, int64 k) => (float[2,8] y)
    <float[8] s = {1,2,3,4,5,6,7,8}, bool t = {1}> {
        y = Loop (k, t, x) <body = b (int64 i, bool c, float[2,8] v) => (bool d, float[2,8] w) {
            d = Identity (c) n = LayerNormalization (v, s) w = Gelu (n) }> }""",
    "reductions": """<ir_version: 10, opset_import: ["": 20]> f (float[n,8,4] x) => (float[n,2,2] y)
    <int64[2] axes = {1,2}, int64[1] one = {1}> {
        m = ReduceMax (x, axes) d = Sub (x, m) e = Exp (d) t = ReduceL2 (e, one) u = ReduceSumSquare (e, one)
        v = Add (t, u) p, q = Split <num_outputs = 2, axis = 2> (v) y = Concat <axis = 1> (p, q) }""",
}


@pytest.mark.parametrize("target", [13, 17, 18])
@pytest.mark.parametrize("name", NESTED)
def test_nested_nodes_are_the_same_and_certified(name: str, target: int, tmp_path: Path) -> None:
    before = onnx.parser.parse_model(NESTED[name])
    out, certificate = tmp_path / "out.onnx", tmp_path / "c.json"
    normdeploy.optimize(before, out, opset=target, certificate=certificate)
    after = onnx.load(out)
    onnx.checker.check_model(after, full_check=True)
    given = {
        "x": np.random.default_rng(1).standard_normal((3, 8, 4) if name == "reductions" else (2, 8)).astype(np.float32),
        "s": np.arange(8, dtype=np.float32),
        "c": np.array(True),
        "k": np.array(3),
    }
    np.testing.assert_allclose(
        run_onnxruntime(after, given)[0], run_onnxruntime(before, given)[0], rtol=1e-5, atol=1e-5
    )
    assert check(certificate, out).startswith("accepted: ")
