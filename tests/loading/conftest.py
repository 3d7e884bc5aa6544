"""A model in a package of the user's, for what is loaded by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, width, bias=bias), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


def make(**arguments):
    return Net(**arguments)


def fail():
    raise ValueError("on purpose")


nothing = dict
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A trained model whose package lies in the working directory and nowhere else."""
    monkeypatch.chdir(tmp_path)
    package = f"package_{abs(hash(request.node.name))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "nets.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(f"{package}.nets", fromlist=["Net"]).Net()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]
    torch.manual_seed(0)
    for _ in range(3):
        module(torch.randn(8, 3) * 2 + 1)
    module.where = f"{package}.nets:Net"
    return module.eval()
