"""A runtime that is not here: every verb ends with exit code 3 and one sentence, neither right nor wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.cli import app
from normdeploy.errors import NEITHER, NOT_RUN
from normdeploy.runtimes.ort_runner import explain_missing_cuda
from normdeploy.runtimes.trt_runner import describe_missing_runtime

pytestmark = pytest.mark.skipif(
    not describe_missing_runtime("tensorrt") or not explain_missing_cuda(), reason="it is about a machine without a GPU"
)

# An engine of TensorRT starts so; nothing else of it is read where there is no GPU.
ENGINE = b"ftrt" + bytes(60)
FLEET = """
[targets.gpu]
runtime = "tensorrt"
compute_capability = "8.9"
[models.net]
source = "net.pt2"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its file, an engine of TensorRT, a bundle that holds it, and a fleet for it."""
    made = tmp_path_factory.mktemp("not_run")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).eval()
    torch.export.save(torch.export.export(net, (torch.randn(4, 6),)), made / "net.pt2")
    normdeploy.export(made / "net.pt2", output=made / "net.onnx")
    (made / "net.plan").write_bytes(ENGINE)
    (made / "fleet.toml").write_text(FLEET)
    normdeploy.package(made / "net.onnx", made / "bundle", source=made / "net.pt2", engines=[made / "net.plan"])
    return made


@pytest.fixture
def call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """Run a command line in the folder: its exit code, and the last line on standard error."""

    def called(words: str) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["normdeploy", *words.split()])
        with pytest.raises(SystemExit) as end:
            app.main()
        lines = capsys.readouterr().err.splitlines() or [""]
        return int(end.value.code or 0), lines[-1]

    return called


@pytest.mark.parametrize(
    "words",
    [
        "verify net.pt2 net.plan --seeds 1",
        "verify net.pt2 net.onnx net.plan --seeds 1",
        "verify net.pt2 net.onnx net.plan --seeds 1 -q",
        "verify net.pt2 net.plan --seeds 1 --store kept",
        "bench net.plan",
        "bench net.onnx net.plan --rounds 2",
        "bisect net.pt2 net.onnx --engine net.plan --seeds 1",
        "build net.onnx -o new.plan --library tensorrt",
        "build net.onnx -o new.plan --library tensorrt --store kept",
        "check net.onnx --runtime tensorrt --fail-on missing-kernel",
        "package net.onnx -o new_bundle --source net.pt2 --engine net.plan",
        "recheck bundle",
        "run net.plan -o out.npz",
        "run net.onnx -o out.npz --provider cuda",
        "fleet run fleet.toml",
        "fleet status fleet.toml",
        "fleet diff fleet.toml",
    ],
)
def test_verb_on_a_runtime_that_is_not_here_ends_with_3(words: str, call: Callable[[str], tuple[int, str]]) -> None:
    code, line = call(words)
    assert code == NOT_RUN
    assert line.startswith(f"{NEITHER}: ")
    assert ": no GPU" in line or "is not installed" in line or "a GPU" in line


@pytest.mark.parametrize("words", ["check net.onnx --runtime tensorrt", "verify net.pt2 net.onnx --seeds 1"])
def test_verb_that_needs_no_runtime_ends_with_0(words: str, folder: Path) -> None:
    """What nobody named, onnxruntime's CUDA provider among it, is told and has no exit code."""
    command = [sys.executable, "-m", "normdeploy", *words.split()]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0
