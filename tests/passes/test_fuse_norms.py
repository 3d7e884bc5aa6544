"""FuseNorms in onnx_ir's pass managers, beside the passes of onnx_ir and onnxscript."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript.optimizer
import pytest
from onnx_ir.passes import common

from normdeploy.errors import CertificateError, GraphError, InputError
from normdeploy.passes import FuseNorms, norm_rewrite
from normdeploy.storage.onnx_files import iter_tensors
from tests.passes.graphs import model_with_norm, model_without_norm, sample
from tests.support import parsed, run_onnxruntime

_FUSED = ["MatMul", "LayerNormalization", "MatMul", "Twice"]


def _ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def _same_numbers(model: ir.Model, original: onnx.ModelProto) -> None:
    """A layer norm of 16 numbers and two products of 16 terms: well within 64 units of the last place."""
    (found,), (wanted,) = (run_onnxruntime(proto, sample()) for proto in (ir.to_proto(model), original))
    assert np.isfinite(wanted).all()
    assert np.abs(found - wanted).max() <= 64 * np.finfo(np.float32).eps * np.abs(wanted).max()


def test_norm_is_fused_in_place() -> None:
    model = ir.from_proto(model_with_norm())
    fuse = FuseNorms()
    result = fuse(model)
    assert result.model is model
    assert result.modified
    assert _ops(model) == _FUSED
    _same_numbers(model, model_with_norm())
    (rewrite,) = fuse.rewrites
    assert rewrite.modified
    (finding,) = rewrite.summary.findings
    assert finding.status == "fused"
    assert finding.certificate


def test_metadata_functions_and_shapes_are_kept() -> None:
    proto = model_with_norm()
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("out", 1, ["batch", 16]))
    model = ir.from_proto(proto)
    model.graph.meta["of mine"] = 1
    old = next(v for node in model.graph for v in node.outputs if v.name == "out")
    old.metadata_props["scale"] = "0.5"
    old.meta["seen"] = True
    FuseNorms()(model)
    assert model.metadata_props == {"team": "vision"}
    assert model.graph.metadata_props == {"part": "encoder"}
    assert model.graph.meta["of mine"] == 1
    assert list(model.functions) == [("own", "Twice", "")]
    assert [n.op_type for n in model.functions["own", "Twice", ""]] == ["Add"]
    assert [node.metadata_props["of"] for node in model.graph if node.op_type == "MatMul"] == ["hidden", "out"]
    (out,) = (v for node in model.graph for v in node.outputs if v.name == "out")
    assert str(out.shape) == "[batch,16]"
    assert out.type == ir.TensorType(ir.DataType.FLOAT)
    assert out.metadata_props == {"scale": "0.5"}
    assert out.meta["seen"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize("runtime", ["any", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("fuse", ["standard", "portable"])
def test_model_without_norm_stays_byte_for_byte(runtime: str, fuse: str) -> None:
    model = ir.from_proto(model_without_norm())
    graph = model.graph
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = FuseNorms(runtime=runtime, fuse=fuse)(model)
    assert not result.modified
    assert model.graph is graph
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_unchanged_weights_stay_external_and_folded_ones_do_not(tmp_path: Path) -> None:
    text = """net (float[batch, 3, 8, 8] x) => (float[batch, 4, 8, 8] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, first)
        n = BatchNormalization<epsilon = 1e-5>(a, scale, bias, mean, var)
        r = Relu(n)  y = Conv<pads = [1, 1, 1, 1]>(r, second)
    }"""
    rng = np.random.default_rng(0)
    draw = {"first": (4, 3, 3, 3), "second": (4, 4, 3, 3), "scale": (4,), "bias": (4,), "mean": (4,)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in draw.items()}
    proto = parsed(text, **weights, var=rng.uniform(0.5, 2, 4).astype(np.float32))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    model = ir.load(tmp_path / "m.onnx")
    stored = model.graph.initializers["second"].const_value
    assert isinstance(stored, ir.ExternalTensor)
    assert FuseNorms()(model).modified
    assert _ops(model) == ["Conv", "Relu", "Conv"]
    kept = model.graph.initializers
    assert kept["second"].const_value is stored
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for name, v in kept.items() if name != "second")
    ir.save(model, tmp_path / "n.onnx", external_data="n.data", size_threshold_bytes=0)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    (wanted,) = run_onnxruntime(onnx.load(tmp_path / "m.onnx"), feeds)
    (found,) = run_onnxruntime(onnx.load(tmp_path / "n.onnx"), feeds)
    # Sums of 27 and 36 products
    assert np.abs(found - wanted).max() <= 128 * np.finfo(np.float32).eps * np.abs(wanted).max()


def test_external_weights_of_a_body_and_of_a_constant_are_read(tmp_path: Path) -> None:
    text = """net (bool c, float[2, 4] x) => (float[2, 4] y) <int64[1] axes = {-1}, float e = {1e-5}> {
        m = ReduceMean<keepdims = 1>(x, axes)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<keepdims = 1>(s, axes)
        w = Add(v, e)  r = Sqrt(w)  n = Div(d, r)
        gamma = Constant<value = float[4] {1, 2, 3, 4}>()  h = Mul(n, gamma)
        y = If (c) <
            then_branch = t () => (float[2, 4] a) <float[4] gain = {2, 3, 4, 5}> { a = Mul(h, gain) },
            else_branch = e () => (float[2, 4] b) { b = Neg(h) }
        >
    }"""
    proto = parsed(text)
    # onnx moves only raw data into files.
    for tensor in iter_tensors(proto):
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save(
        proto,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
        convert_attribute=True,
    )
    model = ir.load(tmp_path / "m.onnx")
    (gamma,) = (node.attributes["value"].value for node in model.graph if node.op_type == "Constant")
    assert isinstance(gamma, ir.ExternalTensor)
    assert FuseNorms()(model).modified
    assert _ops(model) == ["LayerNormalization", "If"]
    rows = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    feeds = {"c": np.array(True), "x": rows}
    ir.save(model, tmp_path / "n.onnx")
    (found,) = run_onnxruntime(onnx.load(tmp_path / "n.onnx"), feeds)
    (wanted,) = run_onnxruntime(parsed(text), feeds)
    assert np.abs(found - wanted).max() <= 16 * np.finfo(np.float32).eps * np.abs(wanted).max()


def test_old_file_gets_the_version_that_functions_need() -> None:
    text = """net (float[batch, 16] x) => (float[batch, 16] y) <float e = {1e-3}> {
        s = Mul(x, x)  m = ReduceMean<axes = [-1], keepdims = 1>(s)  r = Sqrt(m)  o = Add(r, e)  y = Div(x, o)
    }"""
    model = ir.from_proto(parsed(text, opset=15, ir=7))
    assert FuseNorms(fuse="portable")(model).modified
    assert _ops(model) == ["OuterRMSNorm"]
    assert model.ir_version >= 8
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_sequential_with_passes_of_onnx_ir() -> None:
    model = ir.from_proto(model_with_norm())
    passes = ir.passes.Sequential(
        FuseNorms(),
        common.InlinePass(),
        common.RemoveUnusedFunctionsPass(),
        common.ShapeInferencePass(),
        common.CheckerPass(full_check=True),
    )
    assert passes.in_place
    assert passes(model).modified
    assert _ops(model) == ["MatMul", "LayerNormalization", "MatMul", "Add"]
    _same_numbers(model, model_with_norm())


def test_pass_manager_stops_when_nothing_changes() -> None:
    model = ir.from_proto(model_with_norm())
    fuse = FuseNorms(runtime="onnxruntime")
    ir.passes.PassManager([fuse, common.RemoveUnusedNodesPass()], steps=5, early_stop=True)(model)
    assert [rewrite.modified for rewrite in fuse.rewrites] == [True, False]
    assert _ops(model) == _FUSED


def test_onnxscript_optimizer_keeps_the_fused_norm() -> None:
    model = ir.from_proto(model_with_norm())
    FuseNorms()(model)
    onnxscript.optimizer.optimize_ir(model)
    assert _ops(model) == ["MatMul", "LayerNormalization", "MatMul", "Add"]
    _same_numbers(model, model_with_norm())


def test_before_onnxscripts_optimizer_a_small_epsilon_survives() -> None:
    """onnxscript deletes ``+ 1e-12``, and a row of zeros becomes NaN: the reason for the order on the page."""
    proto = model_with_norm()
    e = next(n for n in proto.graph.node if n.output[0] == "e")
    e.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.float32(1e-12)))
    first, last = (ir.from_proto(proto) for _ in range(2))
    FuseNorms()(first)
    onnxscript.optimizer.optimize_ir(first)
    onnxscript.optimizer.optimize_ir(last)
    after = FuseNorms()
    after(last)
    (kept,), (lost,) = (run_onnxruntime(ir.to_proto(model), sample()) for model in (first, last))
    assert np.isfinite(kept).all()
    assert np.isnan(lost[1]).all()
    assert after.rewrites[0].summary.findings[0].epsilon == 0


def test_onnxscripts_optimizer_inlines_own_ops() -> None:
    """The reason why ``fuse="portable"`` belongs after that optimizer."""
    text = """net (float[batch, 16] x) => (float[batch, 16] y) <int64[1] axes = {-1}, float e = {1e-3}> {
        s = Mul(x, x)  m = ReduceMean<keepdims = 1>(s, axes)  r = Sqrt(m)  o = Add(r, e)  y = Div(x, o)
    }"""
    model = ir.from_proto(parsed(text))
    FuseNorms(fuse="portable")(model)
    assert _ops(model) == ["OuterRMSNorm"]
    onnxscript.optimizer.optimize_ir(model)
    assert len(_ops(model)) > 1


def test_error_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CertificateError("not proved")

    monkeypatch.setattr(norm_rewrite, "optimize", fail)
    model = ir.from_proto(model_with_norm())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    fuse = FuseNorms(strict=True)
    with pytest.raises(CertificateError, match="not proved"):
        fuse(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert fuse.rewrites == []


def test_weight_without_value_is_refused() -> None:
    model = ir.from_proto(model_with_norm())
    model.graph.initializers["first"].const_value = None
    with pytest.raises(GraphError, match="the weight 'first' has no value"):
        FuseNorms()(model)


def test_unknown_option_is_refused_when_the_pass_is_made() -> None:
    with pytest.raises(InputError, match="unknown fuse 'plugin'"):
        FuseNorms(fuse="plugin")
