"""`normdeploy fleet` and `--store` of single verbs, with the real verbs on a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from normdeploy.ort_sessions import child_process

FLEET = """
[targets.cpu]
runtime = "onnxruntime"
[targets.ada]
runtime = "tensorrt-rtx"
compute_capability = "8.9"
[models.net]
source = "net.pt2"
[models.bad]
source = "bad.pt2"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fleet")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    torch.export.save(torch.export.export(net, (torch.randn(4, 6),), dynamic_shapes=shapes), made / "net.pt2")
    (made / "bad.pt2").write_text("no model")
    (made / "fleet.toml").write_text(FLEET)
    return made


def normdeploy(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*child_process.module_command("normdeploy"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env=child_process.child_environment() | {"COLUMNS": "200"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_fleet_and_single_verbs_share_a_store(folder: Path) -> None:
    words = ("fleet.toml", "--report", "r.json", "--markdown", "r.md", "--html", "r.html")
    told = normdeploy(folder, "fleet", "run", *words, code=1)
    assert "bad/default/cpu, bad/default/ada: failed (step export): " in told
    assert "net/default/ada: built (step verify): no GPU of compute capability 8.9" in told
    report = json.loads((folder / "r.json").read_text())
    assert report["counts"] == {"verified": 1, "built": 1, "failed": 2}
    assert not report["ok"]
    assert "| net | default | ✅ verified | 🔨 built |" in (folder / "r.md").read_text()
    page = (folder / "r.html").read_text()
    assert "<script" not in page
    assert "bad/default/export" in page
    again = normdeploy(folder, "fleet", "run", "fleet.toml", code=1)
    # The export that fails runs again. Its three dependent steps do not run, nor does a step that needs a missing GPU.
    assert "1 of 8 steps run, 3 from the store, 4 not run" in again
    assert "3 of 8 steps in the store" in normdeploy(folder, "fleet", "status", "fleet.toml", code=1)
    assert "torch" in normdeploy(folder, "fleet", "diff", "fleet.toml", "--against", "torch=9.9")

    shown = normdeploy(folder, "fleet", "show", "fleet.toml", "net/default/ada", "--log", "-o", "copied")
    assert "normdeploy export net.pt2 -o out/model.onnx --report out/report.json" in shown
    assert "LayerNorm" in shown
    assert (folder / "copied/net/default/ada/build/model.engine").stat().st_size > 0

    one = normdeploy(folder, "export", "net.pt2", "-o", "single.onnx", "--store", "store", "--report", "e.json")
    assert "from the store: made" in one
    assert (folder / "single.onnx").read_bytes() == (folder / "copied/net/default/export/model.onnx").read_bytes()
    assert json.loads((folder / "e.json").read_text())["verb"] == "export"
    onnx.checker.check_model(str(folder / "single.onnx"))
    for _ in range(2):
        built = normdeploy(
            folder, "build", "single.onnx", "-o", "s.engine", "--compute-capability", "8.9", "--store", "store"
        )
    assert "from the store: made" in built
    assert "0 steps and" in normdeploy(folder, "fleet", "gc", "store", "--older", "0")


def test_errors_are_one_line_and_write_nothing(folder: Path, tmp_path: Path) -> None:
    for words, said in (
        (("fleet", "run", "gone.toml"), "can't read 'gone.toml': No such file or directory"),
        (("fleet", "status", "fleet.toml", "--store", "nowhere"), "store not found: 'nowhere'"),
        (("fleet", "diff", "fleet.toml", "--against", "torch"), "--against is 'torch'; pass a library and a version"),
        (("fleet", "run", "fleet.toml", "--store", "net.pt2"), "the store 'net.pt2' can't be used"),
        (("fleet", "gc", "nowhere"), "store not found: 'nowhere'"),
        (("fleet", "run", "fleet.toml", "--report", "fleet.toml"), "would replace 'fleet.toml'"),
        (("export", "gone.pt2", "-o", "x.onnx", "--store", str(tmp_path / "s")), "file not found: 'gone.pt2'"),
        (("export", "bad.pt2", "-o", "x.onnx", "--store", str(tmp_path / "s")), "bad.pt2"),
    ):
        told = normdeploy(folder, *words, code=1).replace(f"{folder}{os.sep}", "")
        assert told.startswith("error: "), told
        assert said in told
        assert told.count("\n") == 1, told
    assert not (folder / "x.onnx").exists()
    assert not (folder / "nowhere").exists()


def test_help_brings_no_library_along() -> None:
    heavy = ("torch", "onnx", "rich.table", "jsonschema")
    code = f"import sys; from normdeploy.cli import app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_process.child_environment()
    )
    assert done.stdout == "[]\n"
