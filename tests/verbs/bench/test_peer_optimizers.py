"""``bench --against``: files that others write of the same model are raced beside, and what they can't do is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import normdeploy
from normdeploy.cli.app import app
from normdeploy.errors import InputError
from normdeploy.verbs.bench import timing as bench_timing
from normdeploy.verbs.bench.peer_optimizers import PEERS, check_peers


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "TURN", 1e-6)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()).eval()


@pytest.fixture(scope="module")
def ours(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("against") / "ours.onnx"
    normdeploy.export(net, torch.zeros(2, 8), output=path)
    return path


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """Install a module of this name for the test."""
    module = ModuleType(name)
    module.__spec__ = sys.__spec__
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_plain_export_is_raced_beside(net: nn.Module, ours: Path) -> None:
    race = normdeploy.bench([net, ours], torch.zeros(2, 8), rounds=3, against="plain")
    assert race
    assert {e.file for e in race.entries if e.runtime == "onnxruntime CPU"} == {"plain.onnx", "ours.onnx"}
    assert all(e.ratio is not None for e in race.entries)


def test_onnxruntime_s_own_tool(net: nn.Module, ours: Path) -> None:
    race = normdeploy.bench([net, ours], torch.zeros(2, 8), rounds=3, against=["plain", "ort-transformers"])
    assert race
    assert "ort-transformers.onnx" in {e.file for e in race.entries}


def test_tools_work_on_the_file_where_there_is_no_model(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[onnx.ModelProto] = []

    def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
        seen.append(proto)
        return proto

    pretend(monkeypatch, "onnxslim", slim=slim)
    race = normdeploy.bench([ours], rounds=3, against=["plain", "onnxslim"])
    assert {e.file for e in race.entries} == {"ours.onnx", "onnxslim.onnx"}
    assert [n.op_type for n in seen[0].graph.node] == [n.op_type for n in onnx.load(ours).graph.node]
    assert any(n.runtime == "plain" and "without a model" in n.reason for n in race.not_run)


def test_a_tool_that_fails_is_told_and_the_race_goes_on(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simplify(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
        raise RuntimeError("no such\nthing")

    pretend(monkeypatch, "onnxsim", simplify=simplify)
    race = normdeploy.bench([ours], rounds=3, against="onnxsim")
    assert race
    assert [n.reason for n in race.not_run if n.runtime == "onnxsim"] == ["it failed: RuntimeError: no such thing"]


def test_a_tool_that_computes_something_else_is_not_timed(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
        for tensor in proto.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            if array.dtype == np.float32 and array.size > 1:
                tensor.CopyFrom(onnx.numpy_helper.from_array(array * 2, tensor.name))
        return proto

    pretend(monkeypatch, "onnxslim", slim=slim)
    race = normdeploy.bench([ours], rounds=3, against="onnxslim")
    assert not race
    assert {e.file: bool(e.reason) for e in race.entries} == {"ours.onnx": False, "onnxslim.onnx": True}


def test_mistakes_are_told_before_any_work(ours: Path) -> None:
    with pytest.raises(InputError, match=r"unknown tool 'slim'.*plain, onnxslim, onnxsim, ort-transformers"):
        normdeploy.bench([ours], against="slim")
    with pytest.raises(InputError, match="omit --against"):
        normdeploy.bench([], norms="LayerNorm", against="plain")
    done = CliRunner().invoke(app, ["bench", str(ours), "--against", "plain,nobody"])
    assert done.exit_code == 1


def test_what_is_not_installed_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normdeploy.verbs.bench.peer_optimizers.find_spec", lambda name: None)
    check_peers(["plain"])
    for name in PEERS[1:]:
        with pytest.raises(InputError, match="is not installed; install it"):
            check_peers([name])
