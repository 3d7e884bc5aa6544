"""The check of an exported file takes the outputs of a file that already ran, and judges them as its own run."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import normdeploy
from normdeploy.errors import ExportError
from normdeploy.loading import from_module
from normdeploy.verbs.verify.export_check import require_expected_outputs, run_expected


def check_outputs_that_ran(factor: float) -> list[str]:
    """Check a file that returned PyTorch's outputs times ``factor`` in the comparison with the original model."""
    torch.manual_seed(0)
    model = from_module(nn.Linear(4, 2).eval(), inputs=["x[batch,4]"])
    expected = run_expected(model)
    # onnxruntime can't load this file, so a second run would be noted.
    file = onnx.ModelProto()
    for run in expected.runs:
        run.known.file, run.known.file_outputs = file, [value * factor for value in run.outputs.values()]
    return require_expected_outputs(expected, file, lambda: model, "onnxruntime")


def test_file_that_already_ran_does_not_run_again() -> None:
    assert check_outputs_that_ran(1.0) == []


def test_wrong_outputs_of_a_file_that_already_ran_are_refused() -> None:
    with pytest.raises(ExportError, match="the file would be wrong, so nothing was written"):
        check_outputs_that_ran(1.001)


def test_outputs_of_another_file_are_not_taken() -> None:
    model = from_module(nn.Linear(4, 2).eval(), inputs=["x[batch,4]"])
    expected = run_expected(model)
    for run in expected.runs:
        run.known.file, run.known.file_outputs = onnx.ModelProto(), list(run.outputs.values())
    (note,) = require_expected_outputs(expected, onnx.ModelProto(), lambda: model, "onnxruntime")
    assert "onnxruntime can't load it" in note


class Patches(nn.Module):
    """Normalize pixels and embed patches of 768 pixels. Each row of the output has only two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 8, 16, 16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.embedding((pixels - 0.5) / 0.25)


@pytest.mark.parametrize("seed", [0, 3, 9, 12])
def test_rounding_of_long_sums_is_not_a_wrong_file(seed: int) -> None:
    torch.manual_seed(seed)
    net = Patches().eval()
    assert normdeploy.export(net, (torch.rand(2, 3, 32, 32),), inputs="pixels[2,3,32,32]{0:1}").model is not None
