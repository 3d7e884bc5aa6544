"""``verify`` of files in half precision: beside eager in that precision, on inputs that are half numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

import normdeploy
from normdeploy.loading import from_module
from normdeploy.precision.type_conversion import initializer_values
from normdeploy.runtimes.onnx_float64 import OnnxFloat64Runner
from normdeploy.runtimes.torch_runners import HalfRunner
from normdeploy.verbs.verify.comparison_result import Comparison
from normdeploy.verbs.verify.file_comparison import compare_files
from normdeploy.verbs.verify.runtime_candidates import OFF, ON, STEPWISE
from tests.support import parsed

HALVES = {"fp16": "float16", "bf16": "bfloat16"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


X = (torch.zeros(2, 5, 48),)


def compared(folder: Path, precision: str, keep_io: bool = False, spoil: str = "") -> Comparison:
    """``spoil``: a part of the name of an initializer whose numbers get twice as large."""
    module = Block().eval()
    file = folder / "half.onnx"
    normdeploy.export(module, X, output=file, precision=precision, keep_io=keep_io)
    if spoil:
        proto = onnx.load(file)
        (tensor,) = (t for t in proto.graph.initializer if spoil in t.name)
        doubled = numpy_helper.from_array(
            (2 * initializer_values(tensor)).astype(initializer_values(tensor).dtype), tensor.name
        )
        tensor.CopyFrom(doubled)
        onnx.save(proto, file)
    return compare_files(from_module(module, X), file)


@pytest.mark.parametrize("keep_io", [False, True])
@pytest.mark.parametrize("precision", HALVES)
def test_a_half_file_is_judged_by_eager_in_half(tmp_path: Path, precision: str, keep_io: bool) -> None:
    found = compared(tmp_path, precision, keep_io)
    assert found, found.results
    ran = {r.runtime: r for r in found.results}
    # onnxruntime's CPU provider has no bfloat16 kernels for this
    assert set(ran) == {"eager", STEPWISE} | ({OFF, ON} if precision == "fp16" else set())
    assert {r.dtype for r in found.results} == {HALVES[precision]}
    unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}[precision]
    assert ran["eager"].max_abs_error > 100 * 2.0**-24  # it was half indeed, not float32
    assert ran[STEPWISE].allowed < 64 * unit  # and nothing is let through that is far off
    assert any(f"eager also ran in {HALVES[precision]}" in note for note in found.notes)


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("spoil", ["norm.weight", "down.bias"])
def test_a_wrong_half_file_fails(tmp_path: Path, precision: str, spoil: str) -> None:
    found = compared(tmp_path, precision, spoil=spoil)
    assert not found
    assert all(r.verdict == "fail" for r in found.results if r.runtime != "eager")


def test_what_has_no_half_kernel_runs_in_float32_and_is_rounded() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) + torch.arange(3.0)

    x = np.eye(3, dtype=np.float32)[None] * np.float32(3)
    model = from_module(Inverse().eval(), (torch.from_numpy(x),))
    with HalfRunner(model, torch.float16) as runner:
        ((name, y),) = runner.infer({model.inputs[0].name: x}).items()
    assert name == model.outputs[0]
    assert y.dtype == np.float16
    np.testing.assert_array_equal(
        y, (np.linalg.inv(x).astype(np.float16) + np.arange(3, dtype=np.float16)).astype(np.float16)
    )


@pytest.mark.parametrize(("scale", "right"), [(1.0, True), (300.0, False)])
def test_a_file_whose_squares_leave_the_range_of_float16_is_wrong(scale: float, right: bool, tmp_path: Path) -> None:
    """The reference overflows in float16 too, and its error there was allowed to the file."""
    text = """<ir_version: 8, opset_import: ["": 15]> net (float[batch,8] x) => (float[batch,8] y)
      <int64[1] last = {1}, float epsilon = {0.01}> {
        scaled = Mul (x, scale)
        squares = Mul (scaled, scaled)
        total = ReduceSum <keepdims = 1> (squares, last)
        raised = Add (total, epsilon)
        length = Sqrt (raised)
        y = Div (scaled, length)
      }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), "scale"))
    onnx.save(proto, tmp_path / "float32.onnx")
    onnx.save(convert_float_to_float16(proto, keep_io_types=True), tmp_path / "float16.onnx")
    comparison = normdeploy.verify(tmp_path / "float32.onnx", tmp_path / "float16.onnx", seeds=2)
    assert bool(comparison) is right, str(comparison)
    assert any("values exceed float16's range" in note for note in comparison.notes) is not right


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (10.0, False)])
def test_another_epsilon_of_a_float16_norm_with_a_bias_is_wrong(factor: float, right: bool, tmp_path: Path) -> None:
    """At N(0, 1) the variance hides it from float16, at 1e-4 the bias does."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[batch,512] x) => (float[batch,512] y)
      <float epsilon = {0.001}> {
        mean = ReduceMean <axes = [1]> (x)
        centered = Sub (x, mean)
        squares = Mul (centered, centered)
        variance = ReduceMean <axes = [1]> (squares)
        raised = Add (variance, epsilon)
        deviation = Sqrt (raised)
        normed = Div (centered, deviation)
        y = Add (normed, beta)
      }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.linspace(0.5, 4, 512, dtype=np.float32), "beta"))
    onnx.save(proto, tmp_path / "float32.onnx")
    half = convert_float_to_float16(proto)
    (epsilon,) = (tensor for tensor in half.graph.initializer if tensor.name == "epsilon")
    epsilon.CopyFrom(numpy_helper.from_array((initializer_values(epsilon) * factor).astype(np.float16), "epsilon"))
    onnx.save(half, tmp_path / "float16.onnx")
    assert bool(normdeploy.verify(tmp_path / "float32.onnx", tmp_path / "float16.onnx", seeds=2)) is right


def test_roundings_of_subnormal_numbers_of_float16_have_its_one_spacing() -> None:
    """A mean of squares of 1e-4 is such a number, and its spacing is a part of an epsilon of 1e-6."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float16[N] x) => (float16[N] y) { y = Mul(x, factor) }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.7, np.float16), "factor"))
    x = np.array([0.0, 1e-6, 1e-4, 1.3], np.float16)
    runner = OnnxFloat64Runner(proto)
    exact = runner.infer({"x": x})["y"]
    away = np.max([np.abs(runner.run_rounded({"x": x}, seed)["y"] - exact) for seed in range(30)], axis=0)
    assert away[0] == 0
    # Below 2⁻¹⁴ a spacing is 2⁻²⁴: half of one is lost, and the result is rounded up or down to a number of them. Above
    # half a spacing is 2⁻¹¹ of the number.
    assert 2.0**-26 < away[1] <= 2.0**-24 + 2.0**-25
    assert 2.0**-12 < away[2] / exact[2] <= 2.0**-11
    assert 2.0**-12 < away[3] / exact[3] <= 2.0**-11


def test_what_overflows_in_other_rows_of_a_half_file_at_extreme_inputs_is_not_judged(tmp_path: Path) -> None:
    """x / √mean(x²), in half 0 where a square is infinite: beyond 256, and beyond 128 if 2x is squared."""

    def saved(name: str, kind: str, factor: float) -> Path:
        dtype = np.float32 if kind == "float" else np.float16
        proto = parsed(
            f"""net ({kind}[8, 4] x) => ({kind}[8, 4] y) {{
                t = Mul(x, factor) q = Mul(t, t) m = ReduceMean<axes = [-1]>(q) s = Mul(m, back) e = Add(s, eps)
                r = Sqrt(e) i = Reciprocal(r) y = Mul(x, i) }}""",
            opset=17,
            factor=dtype(factor),
            back=dtype(factor**-2),
            eps=dtype(1e-3),
        )
        onnx.save(proto, tmp_path / name)
        return tmp_path / name

    reference = saved("wide.onnx", "float", 1.0)
    assert normdeploy.verify(reference, saved("half.onnx", "float16", 2.0), seeds=1)
    # 16 x overflows at usual inputs too.
    assert not normdeploy.verify(reference, saved("wrong.onnx", "float16", 128.0), seeds=1)
