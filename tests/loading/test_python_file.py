"""Models named by the Python file that defines them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import normdeploy
from normdeploy.errors import InputError, LoadError
from normdeploy.loading import load

NET = """
import torch
from torch import nn

from beside import Act


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(3, width), Act()

    def forward(self, x):
        return self.act(self.linear(x))
"""
BESIDE = "from torch import nn\n\n\nclass Act(nn.ReLU):\n    pass\n"
SECOND = "\n\nclass Other(nn.Module):\n    pass\n\n\ndef make(scale):\n    return Net(scale)\n\n\nnothing = 3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not the working directory, with a file of one module and a file of two."""
    (tmp_path / "one_net.py").write_text(NET)
    (tmp_path / "two_nets.py").write_text(NET + SECOND)
    (tmp_path / "beside.py").write_text(BESIDE)
    return tmp_path


@pytest.mark.parametrize("name", ["", ":Net"])
def test_export_python_file_is_verified_by_its_file(folder: Path, name: str) -> None:
    source = f"{folder}/one_net.py{name}"
    state = torch.get_rng_state()
    normdeploy.export(source, output=folder / "net.onnx", inputs="x[b,3]", dims="b=1:2:4", model_args={"width": 6})
    assert normdeploy.verify(source, folder / "net.onnx", model_args={"width": 6})
    assert str(folder) not in sys.path
    assert torch.equal(torch.get_rng_state(), state)


def test_load_function_of_a_python_file_gets_its_arguments(folder: Path) -> None:
    model = load(f"{folder}/two_nets.py:make", model_args={"scale": 5}, inputs=["x[2,3]"])
    assert model.program.state_dict["linear.weight"].shape == (5, 3)
    assert model.recorded == {"model_args": {"scale": 5}, "inputs": ["x[2,3]"]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two_nets.py", r"defines 2 modules; choose one: .*two_nets.py:Net, .*two_nets.py:Other"),
        ("two_nets.py:Nat", r"has no 'Nat'; its modules are .*two_nets.py:Net, .*two_nets.py:Other"),
        ("two_nets.py:make", r"make\(scale\) can't be called: .*--model-arg NAME=VALUE"),
        ("two_nets.py:nothing", "is int; pass a torch.nn.Module"),
        ("beside.py:nn", "is module; pass a torch.nn.Module"),
        ("one_net.py:Net", "Net needs example inputs: describe them with --input"),
    ],
)
def test_load_python_file_that_does_not_say_enough_names_what_there_is(folder: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load(f"{folder}/{name}")


def test_load_python_file_that_is_not_there_or_fails_is_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="file not found"):
        load(f"{folder}/none.py:Net")
    (folder / "bad.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match="can't be run: ZeroDivisionError"):
        load(f"{folder}/bad.py")
    with pytest.raises(InputError, match="is a Python file, which already contains its model: omit --model"):
        load(f"{folder}/one_net.py", model="one_net:Net")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(0)\n", r"it exits the process \(line 2 of broken.py\).*__name__ == '__main__'"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['-x'])\n",
            r"it exits the process \(line 2 of broken.py\)",
        ),
        (
            "import einops_extra\n",
            r"it imports 'einops_extra' \(line 1 of broken.py\), which can't be found: install it",
        ),
        ("from .layers import Act\n", r"it is part of a package .*`from package.module import Net`"),
        ("class Net(\n", r"line 1 of broken.py is not valid Python: '\(' was never closed"),
        ("x = 1\nx.y\n", r"AttributeError: 'int' object has no attribute 'y' \(line 2 of broken.py\)"),
    ],
)
def test_file_that_can_not_be_run_says_the_line_and_what_to_do(code: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(InputError, match=f"broken.py can't be run: .*{said}"):
        load(str(tmp_path / "broken.py"), inputs=["x[2]"])


def test_factory_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def make():\n    raise SystemExit\n")
    with pytest.raises(InputError, match=r"net.py:make failed: it exits the process \(line 2 of net.py\)"):
        load(f"{tmp_path}/net.py:make", inputs=["x[2]"])


def test_module_without_forward_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\nclass Net(torch.nn.Module):\n    def foward(self, x): return x\n")
    with pytest.raises(InputError, match="Net defines no forward, so it computes nothing"):
        load(tmp_path / "net.py", inputs=["x[2]"])


def test_parameters_that_are_given_nothing_are_named_with_what_to_do(tmp_path: Path) -> None:
    forward = "def forward(self, x, mask, size: int, mode: str): return x"
    (tmp_path / "net.py").write_text(f"import torch\nclass Net(torch.nn.Module):\n    {forward}\n")
    with pytest.raises(InputError) as raised:
        load(tmp_path / "net.py", inputs=["x[2]"])
    for part in (
        "it also needs 'mask', 'size', 'mode'",
        "--input 'mask:int64[batch,seq]'",
        "give 'size', 'mode' a default in forward, because a file accepts only tensors as inputs",
    ):
        assert part in str(raised.value)
