"""``examples/browser``: the page in headless Chromium returns the numbers of onnxruntime-web in Node.js."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import normdeploy
from normdeploy.environment import WEB
from tests.forked import ROOT
from tests.support import parsed


@pytest.fixture
def expected(web: None, tmp_path: Path) -> Path:
    """Outputs of a file with external weights, beside the file and its inputs."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("there is no Chromium here; install one (apt-get install chromium)")
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    text = "g (float[4, 64] x, int64[4] ids) => (float[4, 8] y, int64[4] same) { y = MatMul(x, w)  same = Neg(ids) }"
    target = tmp_path / "net.onnx"
    data = "net.onnx.data"
    onnx.save(parsed(text, w=weight), target, save_as_external_data=True, location=data, size_threshold=0)
    normdeploy.run(target, output=tmp_path / "expected.npz", runner=WEB)
    return tmp_path / "expected.npz"


def compared(expected: Path) -> subprocess.CompletedProcess[str]:
    program = ROOT / "examples" / "browser" / "compare.py"
    files = [expected.with_name(name) for name in ("net.onnx", "expected.inputs.npz", "expected.npz")]
    return subprocess.run([sys.executable, program, *files], capture_output=True, text=True, timeout=150)


def test_chromium_returns_the_numbers_of_node(expected: Path) -> None:
    done = compared(expected)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "y: equal to the 32 numbers" in done.stdout
    assert "same: equal to the 4 numbers" in done.stdout


def test_a_number_that_differs_fails(expected: Path) -> None:
    arrays = dict(np.load(expected))
    arrays["y"][1, 2] = np.nextafter(arrays["y"][1, 2], np.float32(np.inf))
    np.savez(expected, **arrays)
    done = compared(expected)
    assert done.returncode == 1
    assert "y: differs from the 32 numbers" in done.stdout
    assert "same: equal" in done.stdout


def test_a_page_that_fails_says_why(expected: Path) -> None:
    (expected.parent / "net.onnx.data").unlink()
    done = compared(expected)
    assert done.returncode == 1
    assert "Error" in done.stdout
