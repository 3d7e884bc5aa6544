"""Errors on dims name the module and the line that limit them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from normdeploy.errors import InputError
from normdeploy.loading import load


def fixed(x: torch.Tensor) -> torch.Tensor:
    return x.view(8, -1)


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * i for i, row in enumerate(x)])


def chunked(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * 2 for part in x.chunk(4, 0)], 0)


def short(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] <= 20 else x


def paired(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] % 4 != 0:
        raise ValueError("in fours")
    return x * 2


def square(x: torch.Tensor) -> torch.Tensor:
    return x + x.transpose(0, 1)


SOURCE = """
import torch
from torch import nn
from tests.loading import test_size_conditions


class Part(nn.Module):
    def forward(self, x):
        x = x + 0
        return test_size_conditions.{function}(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), Part())

    def forward(self, x):
        return self.body(x)
"""
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str, str]] = {
    "fixed": (fixed, "", "the model fixes it to the size 8", "x.view(8, -1)"),
    "counted": (counted, "", "the model fixes it to the size 8", "torch.stack"),
    "several conditions": (chunked, "", "the model fixes it to the size 8", "x.chunk(4, 0)"),
    "range": (short, "b=1:8:64", "accepts only from 1 to 20", "x.shape[0] <= 20"),
    "multiples": (paired, "b=1:8:64", "multiples of 4 from 4 to 64", "x.shape[0] % 4 != 0"),
    "equal": (square, "", "are always equal in the model in module", "x.transpose(0, 1)"),
}


@pytest.mark.parametrize(("function", "dim", "problem", "line"), CASES.values(), ids=CASES)
def test_error_on_a_dim_names_module_and_line_once(
    function: Callable[[torch.Tensor], torch.Tensor], dim: str, problem: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(SOURCE.format(function=function.__name__))
    with pytest.raises(InputError) as raised:
        load(f"{tmp_path}/net.py:Net", inputs=["x[b,t,8]"], dims=[dim] if dim else [])
    message = str(raised.value)
    assert problem in message
    assert message.count(f"in module 'body.1', line {_line(line)} of test_size_conditions.py ({_code(line)}") == 1
    assert not [words for words in ("size()", "An earlier try with", "Eq(", "Mod(") if words in message]


def test_size_that_one_of_two_inputs_fixes_names_its_line(tmp_path: Path) -> None:
    """torch.export compares both at its end, where no module runs."""
    forward = "return torch.stack([x[i, :n].mean(0) for i, n in enumerate(lengths.tolist())])"
    (tmp_path / "net.py").write_text(
        f"import torch\nclass Net(torch.nn.Module):\n    def forward(self, x, lengths):\n        {forward}\n"
    )
    with pytest.raises(InputError, match=r"fixes it to the size 8, .* in line 4 of net.py \(return torch.stack"):
        load(tmp_path / "net.py", inputs=["x[b,t,8]", "lengths:int64[b]{1:5}"])


def test_watching_leaves_torch_as_it_was(tmp_path: Path) -> None:
    log = ShapeEnv._log_guard
    (tmp_path / "net.py").write_text(SOURCE.format(function="square"))
    assert load(f"{tmp_path}/net.py:Net", inputs=["x[b,b,8]"])
    with pytest.raises(InputError):
        load(f"{tmp_path}/net.py:Net", inputs=["x[b,t,8]"])
    assert ShapeEnv._log_guard is log


def _code(part: str) -> str:
    return next(row for row in Path(__file__).read_text().splitlines() if part in row).strip()


def _line(part: str) -> int:
    return next(number for number, row in enumerate(Path(__file__).read_text().splitlines(), 1) if part in row)
