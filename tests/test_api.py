"""The verbs as functions."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import subprocess
import sys
import typing
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import normdeploy
from models.layer import Norm
from normdeploy.errors import InputError, NormdeployError, TrustError
from normdeploy.ort_sessions import child_process
from normdeploy.storage.export_record import read_record
from tests.cli.test_app import HEAVY, layer_norm_by_hand


class Block(torch.nn.Module):
    """A linear layer, its norm by hand, and one that must be left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = Norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.norm(self.linear(x), dim=-1), dim=-1)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def test_import_is_light() -> None:
    code = f"import sys, normdeploy; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_child_process_finds_this_very_package(tmp_path: Path) -> None:
    """Also where nothing is installed: -S leaves out what the environment of Python brings."""
    command = [sys.executable, "-S", "-P", "-c", "import normdeploy; print(normdeploy.__file__)"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=child_process.child_environment()
    )
    assert done.stdout.strip() == normdeploy.__file__


def test_no_submodule_takes_a_verbs_name() -> None:
    """Importing a submodule binds its name in the package: a verb of that name would be gone."""
    assert not {module.name for module in pkgutil.iter_modules(normdeploy.__path__)} & set(normdeploy.__all__)


def test_public_names_are_there_and_typed() -> None:
    for name in normdeploy.__all__:
        verb = getattr(normdeploy, name)
        if name != "__version__":
            assert verb.__doc__
            assert "return" in verb.__annotations__
    with pytest.raises(AttributeError, match="no attribute 'depoly'"):
        normdeploy.depoly  # noqa: B018


def test_export_of_a_live_module(block: Block, tmp_path: Path) -> None:
    weights = {name: value.clone() for name, value in block.state_dict().items()}
    x = torch.randn(3, 8)
    stages: list[str] = []
    result = normdeploy.export(
        block,
        (x,),
        inputs=["x:float32[batch,8]"],
        output=tmp_path / "m.onnx",
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert [(f.kind, f.status, f.module) for f in result.summary.findings if f.status == "fused"] == [
        ("LayerNorm", "fused", "norm")
    ]
    assert [f.status for f in result.summary.findings].count("refused") == 1
    assert result.path == tmp_path / "m.onnx"
    assert (
        [s for s in dict.fromkeys(stages) if s in result.seconds]
        == ["load", "export", "reference", "norms", "simplify", "compare", "check", "write"]
        == list(result.seconds)
    )
    assert result.notes == (
        "sizes assumed because none were stated: batch=1:3:64 (no known limit); state others with --dim",
    )
    assert result.summary.nodes_after == len(result.proto.graph.node) < result.summary.nodes_before
    assert not block.training
    assert all(torch.equal(weights[name], value) for name, value in block.state_dict().items())

    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, 8)
        (got,) = session.run(None, {"x": x.numpy()})
        want = block(x).detach().numpy()
        # components of vectors of length one, a dozen operations, each rounding once
        np.testing.assert_allclose(got, want, rtol=0, atol=16 * np.finfo(np.float32).eps)


def test_file_says_how_it_was_made(block: Block) -> None:
    proto = normdeploy.export(block, (torch.randn(2, 8),), runtime="onnxruntime").proto
    assert read_record(proto)["export"] == {
        "opset": None,
        "runtime": "onnxruntime",
        "fuse": "standard",
        "strict": False,
        "trust": False,
    }


def test_stated_opset_is_kept() -> None:
    result = normdeploy.export(torch.nn.GroupNorm(2, 4).eval(), (torch.randn(2, 4, 3),), opset=20, runtime="tensorrt")
    assert result.proto.opset_import[0].version == result.summary.opset == 20


def test_example_arguments_do_not_go_with_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="example arguments"):
        normdeploy.export(tmp_path / "model.pt", (torch.zeros(1),))


def test_optimize_leaves_its_argument_alone(tmp_path: Path) -> None:
    proto = onnx.load(layer_norm_by_hand(tmp_path / "in.onnx"))
    before = proto.SerializeToString(deterministic=True)
    result = normdeploy.optimize(proto)
    assert proto.SerializeToString(deterministic=True) == before
    assert [n.op_type for n in result.proto.graph.node] == ["LayerNormalization"]
    assert result.path is None


def test_inspect_takes_what_export_and_optimize_take(block: Block, tmp_path: Path) -> None:
    file = layer_norm_by_hand(tmp_path / "in.onnx")
    (tmp_path / "renamed").write_bytes(file.read_bytes())
    for source in (file, str(file), tmp_path / "renamed", onnx.load(file)):
        assert [f.kind for f in normdeploy.inspect(source).findings] == ["LayerNorm"]
    kinds = [(f.kind, f.status) for f in normdeploy.inspect(block, (torch.randn(2, 8),)).findings]
    assert kinds[0] == ("LayerNorm", "fused")


def test_unwritable_output_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(NormdeployError, match="does not exist"):
        normdeploy.export(tmp_path / "does-not-exist.pt", output=tmp_path / "no" / "m.onnx")


def test_results_are_frozen(tmp_path: Path) -> None:
    result = normdeploy.optimize(layer_norm_by_hand(tmp_path / "in.onnx"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.path = tmp_path  # type: ignore[misc]
    assert typing.get_type_hints(type(result), vars(sys.modules[type(result).__module__]))


def test_verify_of_a_live_module(block: Block, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    normdeploy.export(block, (x,), inputs=["x:float32[batch,8]"], output=tmp_path / "m.onnx")
    assert normdeploy.verify(block, tmp_path / "m.onnx", (x,), inputs=["x:float32[batch,8]"], seeds=1)
    with torch.no_grad():
        block.norm.gamma[0].mul_(1.001)
    assert not normdeploy.verify(block, tmp_path / "m.onnx", (x,), inputs=["x:float32[batch,8]"], seeds=1)


def test_verify_on_the_users_own_inputs(block: Block, tmp_path: Path) -> None:
    normdeploy.export(block, (torch.randn(3, 8),), output=tmp_path / "m.onnx")
    feeds = {"x": np.ones((3, 8), np.float32)}
    comparison = normdeploy.verify(block, tmp_path / "m.onnx", (torch.randn(3, 8),), feeds=feeds)
    assert comparison.cases == ("given input 0",)


FLAGS: dict[str, Any] = {"inputs": ["x:float32[batch,8]"], "dims": ["batch=1:4:16"]}
FACTORY: dict[str, Any] = {**FLAGS, "model": "factory:Net", "model_args": {"size": 8}}


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder as the working directory; ``factory`` is not imported yet."""
    monkeypatch.chdir(project)
    return project


def forget_factory(project: Path) -> None:
    sys.modules.pop("factory", None)
    (project / "imported").unlink(missing_ok=True)


def test_verify_remembers_the_flags_of_the_export(inside: Path) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    comparison = normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert comparison
    assert comparison.notes == ()


@pytest.mark.parametrize("by", ["another user", "another file"])
def test_flags_that_may_be_a_strangers_are_not_followed(inside: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    normdeploy.export("weights.pt", output="model.onnx", **FACTORY)
    forget_factory(inside)
    if by == "another user":
        monkeypatch.setenv("XDG_STATE_HOME", str(inside / "other"))
    else:
        torch.save({**torch.load("weights.pt"), "gamma": torch.ones(8)}, "weights.pt")
    with pytest.raises(InputError, match=r"factory:Net.*ignored because .*(another user|not the file)"):
        normdeploy.verify("weights.pt", "model.onnx", seeds=1)
    assert not (inside / "imported").exists()
    assert bool(normdeploy.verify("weights.pt", "model.onnx", seeds=1, **FACTORY)) == (by == "another user")


def test_trust_is_asked_once_for_one_file(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrustError, match="--trust-remote-code"):
        normdeploy.export("pickled.pt", output="model.onnx", **FLAGS)
    assert not (inside / "imported").exists()
    normdeploy.export("pickled.pt", output="model.onnx", trust=True, **FLAGS)
    assert normdeploy.verify("pickled.pt", "model.onnx", seeds=1)
    forget_factory(inside)
    monkeypatch.setenv("XDG_STATE_HOME", str(inside / "other"))
    with pytest.raises(TrustError, match="--trust-remote-code"):
        normdeploy.verify("pickled.pt", "model.onnx", seeds=1, **FLAGS)
    assert not (inside / "imported").exists()


def test_another_file_of_the_same_model_is_verified_with_a_note(inside: Path) -> None:
    normdeploy.export("model.pt", output="model.onnx")
    with zipfile.ZipFile("model.pt") as old, zipfile.ZipFile("again.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(
                entry, old.read(entry), compress_type=zipfile.ZIP_DEFLATED if entry.filename.endswith(".json") else None
            )
    assert Path("again.pt").read_bytes() != Path("model.pt").read_bytes()
    comparison = normdeploy.verify("again.pt", "model.onnx", seeds=1)
    assert comparison
    assert comparison.notes == ("model.onnx was exported from another file, not again.pt",)


def test_a_factory_that_a_file_records_means_nothing_of_a_source_that_holds_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user names the code on the command line, so none that the record names is needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recorded_net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(6, 4)\n"
    )
    net = importlib.import_module("recorded_net").Net().eval()
    torch.save(net.state_dict(), "weights.pt")
    torch.save(net, "whole.pt")
    normdeploy.export("weights.pt", model="recorded_net:Net", inputs=["x[batch,6]"], output="net.onnx")
    assert normdeploy.verify("whole.pt", "net.onnx", inputs=["x[batch,6]"], trust=True)
    program = torch.export.export(net, (torch.zeros(2, 6),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, "whole.pt2")
    assert normdeploy.verify("whole.pt2", "net.onnx")
