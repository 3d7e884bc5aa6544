"""`-q`: nothing is printed where nothing went wrong, by us or by a library, on either descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from normdeploy.cli.console import show_progress
from normdeploy.log import start_logging

NET = """
import os
import subprocess

import torch
from torch import nn

os.write(1, b"a library's line")
os.write(2, b"a library's bar")
subprocess.run(["echo", "a library's compiler"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.rnn = nn.Linear(3, 4), nn.LayerNorm(4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return torch.distributions.Normal(self.rnn(self.norm(self.linear(x)))[0], 1.0).log_prob(x.sum())
"""
# In this order: each verb reads what those before it wrote.
VERBS = (
    ("export", "net.py", "-o", "net.onnx", "--input", "x[b,t,3]"),
    ("optimize", "net.onnx", "-o", "again.onnx"),
    ("inspect", "net.onnx"),
    ("check", "net.onnx"),
    ("verify", "net.py", "net.onnx"),
    ("bisect", "net.py", "net.onnx"),
    ("run", "net.onnx", "-o", "out.npz", "--input", "x=0:1"),
    ("package", "net.onnx", "-o", "bundle"),
    ("prove", "net.onnx", "again.onnx"),
    ("recheck", "bundle"),
    ("bench", "net.py", "net.onnx", "--input", "x[b,t,3]", "--rounds", "2"),
    ("bench", "--norms", "LayerNorm", "--rounds", "2"),
    ("export", "net.py", "-o", "kept.onnx", "--input", "x[b,t,3]", "--store", "store"),
    ("fleet", "run", "fleet.toml"),
    ("fleet", "recheck", "fleet.toml"),
)
FLEET = """
store = "fleet-store"

[defaults]
steps = ["verify", "package"]

[targets.cpu]
runtime = "onnxruntime"

[models.net]
source = "net.onnx"
"""


@pytest.mark.slow
def test_quiet_verbs_print_nothing(tmp_path: Path) -> None:
    """Each runs in a process of its own, whose descriptors are read: libraries write past Python's streams."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "fleet.toml").write_text(FLEET)
    for verb in VERBS:
        done = subprocess.run(
            [sys.executable, "-m", "normdeploy", *verb, "-q"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 0), verb[0]


def test_quiet_work_prints_nothing_and_what_follows_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress(quiet=True):
        os.write(1, b"a library's line")
        os.write(2, b"a library's bar")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="fails"), show_progress(quiet=True):
        raise ValueError("fails")
    os.write(2, b"the error")
    assert capfd.readouterr() == ("", "the error")


def test_log_of_a_quiet_verb_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    start_logging(1)
    try:
        with show_progress(quiet=True):
            os.write(2, b"logged")
    finally:
        start_logging(0)
    assert capfd.readouterr().err == "logged"
