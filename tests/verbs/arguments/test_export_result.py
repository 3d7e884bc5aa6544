"""The Python interface as people use it: results that print, stand for their model and their file, and calls written in
any usual way."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normdeploy
from models.layer import Norm
from normdeploy.dtypes import half_precision_of
from normdeploy.errors import InputError, NormdeployError
from normdeploy.findings.rendering import Renderable
from normdeploy.verbs.arguments.export_result import ExportResult


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), Norm(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(self.linear(x if y is None else x + y))


class OfABatch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.net(batch["x"])


HOMES = {
    "Comparison": "normdeploy.verbs.verify.comparison_result",
    "Bisection": "normdeploy.verbs.bisect.file_bisection",
    "Race": "normdeploy.verbs.bench.model_benchmark",
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def result(net: Net) -> ExportResult:
    return normdeploy.export(net, X)


def names(result: ExportResult) -> list[str]:
    return [value.name for value in result.proto.graph.input]


# ------------------------------------------------------------------ what is given


@pytest.mark.parametrize(
    ("args", "wanted"),
    [(X, ["x"]), ((X,), ["x"]), ([X, X], ["x", "y"]), ({"x": X, "y": X}, ["x", "y"]), (UserDict({"x": X}), ["x"])],
    ids=["tensor", "tuple", "list", "dict", "mapping"],
)
def test_example_arguments_as_people_write_them(net: Net, args: Any, wanted: list[str]) -> None:
    assert names(normdeploy.export(net, args)) == wanted


def test_a_dict_may_be_the_one_argument() -> None:
    torch.manual_seed(0)
    assert names(normdeploy.export(OfABatch().eval(), {"x": X})) == ["batch_x"]


def test_one_text_where_several_are_taken(net: Net) -> None:
    proto = normdeploy.export(net, X, inputs="x[batch,8]", dims="batch=1:4:16").proto
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_eval_is_called_so_in_both_interfaces(net: Net) -> None:
    trained = Net().train()
    trained.load_state_dict(net.state_dict())
    with pytest.raises(NormdeployError, match="training mode"):
        normdeploy.export(trained, X)
    assert normdeploy.verify(normdeploy.export(trained, X, eval=True), seeds=1)
    assert trained.training


@pytest.mark.parametrize("mended", [False, True])
def test_an_exported_program_in_memory(mended: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).train(mended)
    program = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=16)},))
    before = str(program)
    result = normdeploy.export(program, eval=mended)
    assert normdeploy.verify(result, seeds=1)
    assert normdeploy.verify(program, result.proto, eval=mended, seeds=1)
    assert str(program) == before
    with pytest.raises(InputError, match="already has inputs"):
        normdeploy.export(program, X)


@pytest.mark.parametrize(
    "options",
    [
        {"runtime": "onnx"},
        {"fuse": "all"},
        {"opset": 12},
        {"opset": "21"},
        {"precision": "int8"},
        {"strict": "yes"},
        {"compare_limit": -1},
        {"compare_limit": True},
        {"model": "nets:Net"},
        {"dims": "batch=1"},
    ],
)
def test_options_of_unknown_value_are_refused_before_any_work(net: Net, options: dict[str, Any]) -> None:
    stages: list[str] = []
    with pytest.raises(NormdeployError):
        normdeploy.export(net, X, progress=lambda stage, done, total: stages.append(stage), **options)
    assert set(stages) <= {"load"}


def test_unknown_options_are_errors_of_the_caller(net: Net) -> None:
    with pytest.raises(TypeError, match=r"export\(\) got an unexpected keyword argument 'runtme'"):
        normdeploy.export(net, X, runtme="any")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("verify", {"seeds": 0}),
        ("verify", {"seeds": True}),
        ("bench", {"rounds": 0}),
        ("build", {"library": "any"}),
    ],
)
def test_every_verb_looks_at_its_options_first(verb: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        getattr(normdeploy, verb)("no such model", "no such file", **options)


@pytest.mark.parametrize(
    ("name", "wanted"), [("fp16", "fp16"), ("Half", "fp16"), ("bfloat16", "bf16"), ("f32", None), (None, None)]
)
def test_precisions_in_every_usual_spelling(name: str | None, wanted: str | None) -> None:
    assert half_precision_of(name) == wanted


# ------------------------------------------------------------------ what comes back


def test_a_result_stands_for_its_model_and_its_file(net: Net, tmp_path: Path) -> None:
    result = normdeploy.export(net, {"x": X}, output=tmp_path / "m.onnx")
    assert normdeploy.verify(result, seeds=1)
    found = normdeploy.verify(result, [tmp_path / "m.onnx"], seeds=1)
    assert {r.file for r in found.results} == {"", "m.onnx"}, "its own file counts once"
    assert normdeploy.bisect(result, seeds=1)
    (tmp_path / "m.onnx").write_bytes(
        (tmp_path / "m.onnx").read_bytes().replace(b"LayerNormalization", b"LayerNormalizatiom")
    )
    with pytest.raises(NormdeployError):
        normdeploy.verify(result, seeds=1)  # the file as it is now, not as it was made
    with pytest.raises(InputError, match="its own example arguments"):
        normdeploy.verify(result, (), (X,))


def test_models_in_memory_stand_where_files_do(result: ExportResult, net: Net, tmp_path: Path) -> None:
    for file in (result, result.proto):
        done = normdeploy.run(file, {"x": X.numpy()})
        np.testing.assert_allclose(done.arrays["output"], net(X).detach().numpy(), atol=1e-5)
        assert normdeploy.check(file)
        with normdeploy.open_runner(file) as runner:
            assert runner.inputs[0].name == "x"
        assert [f.status for f in normdeploy.inspect(file).findings] == ["kept"]
        assert normdeploy.optimize(file).proto.graph.node
    assert normdeploy.verify(net, result.proto, X, seeds=1)
    assert normdeploy.build(result, tmp_path / "m.engine").path.exists()


def test_a_result_without_a_model_says_so(result: ExportResult) -> None:
    with pytest.raises(InputError, match="does not record its model"):
        normdeploy.verify(ExportResult(result.proto, None, result.summary))


def test_results_print_as_the_command_line_does(result: ExportResult, net: Net) -> None:
    assert "fused into LayerNormalization(axis=-1" in str(result)
    assert str(result).splitlines()[-1].startswith("1 fused;")
    summary, parity = normdeploy.inspect(net, X), normdeploy.verify(result, seeds=1)
    assert "would be fused into" in str(summary)
    assert str(parity).splitlines()[-1].startswith("verified")
    assert "nothing to find" in str(normdeploy.bisect(result, seeds=1))
    assert "float32[4, 8]" in str(normdeploy.run(result))
    assert "clean" in str(normdeploy.check(result))
    for told in (result, summary, parity):
        page = told._repr_html_()
        assert page.startswith("<pre")
        assert "<script" not in page
    assert "LayerNormalization(axis" in result._repr_html_()


@pytest.mark.parametrize("name", sorted(set(normdeploy.__all__) - {"__version__", "open_runner"}))
def test_every_verbs_result_can_be_shown(name: str) -> None:
    """By the annotation of each verb: a new one has to say how its result is shown."""
    verb = getattr(normdeploy, name)
    returned = verb.__annotations__["return"]
    home = vars(importlib.import_module(HOMES.get(returned, verb.__module__)))
    assert issubclass(home[returned], Renderable)
    assert home[returned].show is not Renderable.show


def test_what_files_bring_along_is_escaped(result: ExportResult) -> None:
    hostile = replace(result.summary.findings[0], module="<script>alert(1)</script>\x1b[2J")
    named = replace(result, summary=replace(result.summary, findings=(hostile,)))
    assert "<script" not in named._repr_html_()
    assert "\x1b[2J" not in str(named)


def test_completion_shows_the_verbs_before_one_is_used() -> None:
    code = "import normdeploy; print(sorted(set(normdeploy.__all__) - set(dir(normdeploy))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_repr_of_real_results_is_one_line_that_begins_with_the_verdict(result: ExportResult, net: Net) -> None:
    parity = normdeploy.verify(result, seeds=1)
    with normdeploy.open_runner(result) as runner:
        assert repr(runner).startswith(f"<{type(runner).__name__}: onnxruntime")
        told = [repr(runner)]
    told += [
        repr(made)
        for made in (
            result,
            normdeploy.inspect(net, X),
            parity,
            parity.results[0],
            normdeploy.bisect(result, seeds=1),
            normdeploy.run(result),
            normdeploy.check(result),
        )
    ]
    assert all(len(text) <= 300 and "\n" not in text for text in told), told
    for begins in (
        "<ExportResult: in memory; 1 fused; norm nodes ",
        "<Summary: 1 fused; norm nodes ",
        "<Comparison: verified",
        "<OutputResult: pass, ",
        "<Bisection: no output leaves the bound>",
        "<Check: passed; 1 file: 0 errors",
    ):
        assert any(text.startswith(begins) for text in told), (begins, told)
    assert any(text.startswith("<Inference: onnxruntime") and "float32[4, 8]" in text for text in told)
