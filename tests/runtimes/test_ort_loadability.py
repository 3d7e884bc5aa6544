"""A file that onnxruntime would not run is an error that names the ops to blame, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import normdeploy
from normdeploy.errors import ExportError, GraphError
from normdeploy.precision import half_conversion
from normdeploy.rewriting import norm_optimizer, rewrite_rollback
from normdeploy.runtimes.ort_loadability import find_load_failure


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3).double(), nn.ConvTranspose2d(4, 2, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


X = torch.randn(1, 3, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("limit", [rewrite_rollback.LIMIT, 0])
def test_ops_without_a_kernel_are_named_and_nothing_is_written(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(
        ExportError, match=r"nothing was written: .* Conv of float64 .*'first'.*; ConvTranspose of float64 "
    ) as error:
        normdeploy.export(Doubles().eval(), (X,), output=path, compare_limit=limit)
    assert "--runtime tensorrt" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_for_another_runtime_it_is_written_with_a_note(tmp_path: Path) -> None:
    result = normdeploy.export(Doubles().eval(), (X,), output=tmp_path / "m.onnx", runtime="tensorrt-rtx")
    assert any(
        note.startswith("the file was not run: onnxruntime has no kernel for Conv of float64") for note in result.notes
    )
    assert (tmp_path / "m.onnx").is_file()


def edited(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, edit: Any) -> None:
    """Plant a mistake behind everything that proves: ``edit`` changes what ``module.name`` makes."""
    right = getattr(module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = right(*args, **kwargs)
        edit(made if isinstance(made, onnx.ModelProto) else made[0])
        return made

    monkeypatch.setattr(module, name, wrong)


def wrong_bias(proto: onnx.ModelProto) -> None:
    """Give a convolution a bias of two dims, which loads and does not run."""
    conv = next(n for n in proto.graph.node if n.op_type == "Conv")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 2), np.float32), "bias2"))
    conv.input[2:] = ["bias2"]


def test_an_export_that_loads_and_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw export and result fail alike, and PyTorch runs the model: the export is to blame."""
    from normdeploy.verbs.export import export_function

    edited(monkeypatch, export_function, "export_without_weights", wrong_bias)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(1, 3, 6, 6)
    with pytest.raises(ExportError, match=r"loads it but does not run it: .*bias must be a 1D tensor"):
        normdeploy.export(net, (x,))


class Picky(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x.flatten()[index * index]


def test_samples_that_pytorch_does_not_take_either_say_nothing() -> None:
    args = (torch.randn(4), torch.tensor([1, 2]))
    result = normdeploy.export(Picky().eval(), args, inputs=["x[4]", "index:int64[2]{40:50}"])
    assert any("the whole model was not compared" in note for note in result.notes)


def test_ops_of_a_domain_of_ones_own_are_noted() -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 21, "my.own": 1]> g (float[2] x) => (float[2] y) { a = Relu(x) y ='
        " my.own.Twist(a) }"
    )
    found = find_load_failure(onnx.parser.parse_model(text))
    assert found is not None
    assert found.foreign
    assert "my.own.Twist of float32" in found.message


def test_what_is_made_of_a_file_that_loads_has_to_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].op_type = "NoSuchOp"

    relu = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) <float[1] w = {1}> { z = Add(x, w) y ='
        " Relu(z) }"
    )
    edited(monkeypatch, norm_optimizer, "optimize_with_steps", unknown)
    with pytest.raises(GraphError, match=r"not the optimized file, so nothing was written: .*NoSuchOp"):
        normdeploy.optimize(relu, tmp_path / "m.onnx", compare_limit=0)
    assert not list(tmp_path.iterdir())
    normdeploy.optimize(relu, tmp_path / "m.onnx", runtime="tensorrt", compare_limit=0)
    twisted = onnx.ModelProto()
    twisted.CopyFrom(relu)
    twisted.opset_import.append(helper.make_opsetid("com.nobody", 1))
    twisted.graph.node[0].domain = "com.nobody"
    # onnxruntime never could load it.
    normdeploy.optimize(twisted, compare_limit=0)


def single(body: str, opset: int = 21, domains: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}{domains}]> g {body}')


OTHERS = ', "my.own": 1'


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (single("(float[2, 8] x) => (float[2, 2] y) { y = Transpose <perm = [0, 0]> (x) }"), "perm .* repeated value"),
        (single("(float[2, 8] x) => (float[2, 8] y) { y = Relu (x) }", opset=999), "the file has opset 999"),
        (single("(float[2, 8] x) => (int64[2, 8] y) { y = Relu (x) }"), r"tensor\(int64\)"),
        (
            single(
                "(float[2, 8] x) => (float[2, 8] y) { y = com.microsoft.NoSuch (x) }", domains=', "com.microsoft": 1'
            ),
            "NoSuch",
        ),
        (
            single(
                "(float[2, 8] x) => (float[2, 2] y) <float[2, 8] a>"
                " { a = my.own.Twist (x) y = Transpose <perm = [0, 0]> (a) }",
                domains=OTHERS,
            ),
            "repeated value",
        ),
        # These load, and run on no values of x.
        (
            single("(float[2, 8] x) => (float[a, b] y) <int64[2] s = {3, 3}> { y = Reshape (x, s) }"),
            "cannot be reshape",
        ),
        (
            single("(float[2, 8] x) => (float[a] y) <int64[1] i = {7}> { z = Identity (i) y = Gather (x, z) }"),
            "idx=7 must be within",
        ),
        (single('(float[2, 8] x) => (float[a, b] y) { y = Einsum <equation = "ij->ik"> (x) }'), "Output subscript"),
    ],
)
def test_optimize_file_that_does_not_run_is_refused(proto: onnx.ModelProto, words: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=f"the input file does not run, so nothing was written: .*{words}"):
        normdeploy.optimize(proto, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    normdeploy.optimize(proto, tmp_path / "m.onnx", runtime="tensorrt")


@pytest.mark.parametrize(
    "body",
    [
        "(float[2, 8] x) => (float[2, 8] y) <float[2, 8] a> { a = my.own.Twist (x) y = Relu (a) }",
        "(bool b, float[2, 8] x) => (float[2, 8] y) { y = If (b) <then_branch = t () => (float[2, 8] p)"
        " { p = my.own.Twist (x) }, else_branch = e () => (float[2, 8] q) { q = Relu (x) }> }",
    ],
)
def test_optimize_file_with_ops_of_other_libraries_is_written(body: str, tmp_path: Path) -> None:
    result = normdeploy.optimize(single(body, domains=OTHERS), tmp_path / "m.onnx")
    assert any("the whole model was not compared" in note for note in result.notes)
    assert (tmp_path / "m.onnx").is_file()


def test_optimize_kernels_that_the_cpu_lacks_are_noted_unless_it_is_to_run_there() -> None:
    proto = single(
        "(double[1, 2, 5, 5] x, double[2, 2, 3, 3] w) => (double[1, 2, 7, 7] y) { y = ConvTranspose (x, w) }"
    )
    with pytest.raises(GraphError, match="has no kernel for ConvTranspose of float64"):
        normdeploy.optimize(proto, runtime="onnxruntime")
    assert normdeploy.optimize(proto).notes
    assert normdeploy.optimize(proto, runtime="onnxruntime", provider="cuda").notes


@pytest.mark.parametrize(
    "body",
    [
        # Another input may have another size, or another value, and run.
        "(float[a, 5] x) => (float[e, f] y) <int64[2] s = {3, 555}> { y = Reshape (x, s) }",
        "(float[2, 8] x, int64[1] i) => (float[1, 8] y) <int64 k = {40}> { j = Add (i, k) y = Gather (x, j) }",
        "(float[2, 8] x) => (float[2, 8] y) <int64 k = {40}> { i = Cast <to = 7> (x) j = Add (i, k)"
        " y = GatherElements (x, j) }",
    ],
)
def test_optimize_file_that_other_inputs_may_run_is_noted(body: str) -> None:
    assert any("the whole model was not compared" in note for note in normdeploy.optimize(single(body)).notes)


def test_trouble_bfloat16_kept_as_integers_is_read() -> None:
    scale = helper.make_tensor("scale", onnx.TensorProto.BFLOAT16, [8], [1.0] * 8)
    assert not scale.HasField("raw_data")
    proto = single("(bfloat16[2, 8] x, bfloat16[8] scale) => (bfloat16[2, 8] y) { y = LayerNormalization (x, scale) }")
    proto.graph.initializer.append(scale)
    assert find_load_failure(proto) is None


def test_half_precision_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    edited(monkeypatch, half_conversion, "write_half", lambda proto: proto.graph.node[0].ClearField("input"))
    with pytest.raises(GraphError, match="would not run in fp16, so nothing was written"):
        normdeploy.export(nn.Linear(4, 4).eval(), (torch.randn(2, 4),), precision="fp16")
