"""Every verb takes an ONNX model in memory in place of a file, and ``optimize`` gives back the class it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

import normdeploy
from models.layer import Norm
from normdeploy.errors import GraphError

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
# Kind of a model in memory -> function that makes such a model from torch's program.
KINDS: dict[str, Callable[[torch.onnx.ONNXProgram], Any]] = {
    "ONNXProgram": lambda program: program,
    "onnx_ir.Model": lambda program: onnx_ir.from_proto(program.model_proto),
    "ModelProto": lambda program: program.model_proto,
    "bytes": lambda program: program.model_proto.SerializeToString(),
}
CLASSES = {
    "ONNXProgram": torch.onnx.ONNXProgram,
    "onnx_ir.Model": onnx_ir.Model,
    "ModelProto": onnx.ModelProto,
    "bytes": bytes,
}


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), Norm(16)).eval()


@pytest.fixture(scope="module")
def program(net: torch.nn.Module) -> torch.onnx.ONNXProgram:
    made = torch.onnx.export(net, (X,), dynamo=True, verbose=False)
    assert made is not None
    return made


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str, program: torch.onnx.ONNXProgram) -> Any:
    return KINDS[kind](program)


def test_verbs_take_models_in_memory(model: Any, net: torch.nn.Module, tmp_path: Path) -> None:
    assert [f.status for f in normdeploy.inspect(model).findings] == ["fused"]
    assert normdeploy.check(model, fail_on="train-mode")
    assert normdeploy.verify(net, model, X, seeds=1, max_elements=64)
    assert normdeploy.verify(model, [model], seeds=1, max_elements=64)
    assert normdeploy.bisect(net, model, X, seeds=1, max_elements=64)
    assert normdeploy.bisect(model, model, seeds=1, max_elements=64)
    assert normdeploy.bench(model, rounds=1)
    wanted = net(X).detach().numpy()
    (made,) = normdeploy.run(model, {"input": X.numpy()}).arrays.values()
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    with normdeploy.open_runner(model) as runner:
        (made,) = runner.infer({"input": X.numpy()}).values()
    np.testing.assert_allclose(made, wanted, atol=1e-5)


def test_engines_and_bundles_are_made_of_models_in_memory(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert normdeploy.build(model, tmp_path / "m.engine").path.exists()
    assert normdeploy.package(model, tmp_path / "bundle", name="net")
    assert normdeploy.recheck(tmp_path / "bundle", onnx=model)


def test_optimize_gives_back_the_class_it_was_given(model: Any, kind: str, net: torch.nn.Module) -> None:
    result = normdeploy.optimize(model)
    assert isinstance(result.model, CLASSES[kind])
    assert [f.status for f in result.summary.findings] == ["fused"]
    assert normdeploy.verify(net, result.model, X, seeds=1, max_elements=64)
    assert normdeploy.verify(result, seeds=1, max_elements=64)


def test_optimize_to_a_file_gives_back_the_class_it_was_given(model: Any, kind: str, tmp_path: Path) -> None:
    result = normdeploy.optimize(model, tmp_path / "m.onnx")
    assert isinstance(result.model, CLASSES[kind])
    assert (tmp_path / "m.onnx").is_file()


def test_optimized_program_runs_as_torchs_own(program: torch.onnx.ONNXProgram, net: torch.nn.Module) -> None:
    made = normdeploy.optimize(program).model(X)[0]
    torch.testing.assert_close(made, net(X), atol=1e-5, rtol=1e-5)


def test_optimize_of_a_path_and_export_give_a_proto(net: torch.nn.Module, tmp_path: Path) -> None:
    normdeploy.export(net, X, output=tmp_path / "m.onnx")
    for path in (tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        assert isinstance(normdeploy.optimize(path).model, onnx.ModelProto)
    assert isinstance(normdeploy.export(net, X).model, onnx.ModelProto)


@pytest.mark.parametrize("verb", ["optimize", "inspect", "open_runner", "run", "bench"])
def test_bytes_that_are_no_model_are_refused_by_each_verb(verb: str) -> None:
    with pytest.raises(GraphError, match="the model \\(10 bytes\\) is not an ONNX file"):
        getattr(normdeploy, verb)(b"model.onnx")
