"""A squeeze of a dynamic dim keeps the axis, as it was traced, and size 1 is left out or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normdeploy
from normdeploy.errors import InputError
from tests.support import run_onnxruntime


class SqueezedAxis(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0).sum(0)


class SqueezedAxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).squeeze((0, 1)).sum(0)


class SqueezedEverywhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).squeeze().sum(0)


class SqueezedLength(nn.Module):
    """The axis that is squeezed has a size that is computed from a dynamic dim."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool1d(x[None], 1)[0].squeeze(0).sum(0)


class SqueezedOutput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze().sigmoid()


class SqueezedThenFlat(nn.Module):
    """Both branches give the same output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0).flatten()


DIFFERING = [SqueezedAxis, SqueezedAxes, SqueezedEverywhere, SqueezedLength]
AGREEING = [SqueezedOutput, SqueezedThenFlat]


def require_right_sizes(module: nn.Module, file: normdeploy.ExportResult, batches: tuple[int, ...]) -> None:
    for batch in batches:
        x = torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch))
        (given,) = run_onnxruntime(file.proto, {"x": x.numpy()})
        expected = module(x).numpy()
        assert given.shape == expected.shape
        np.testing.assert_allclose(given, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", DIFFERING)
def test_assumed_sizes_begin_at_2(kind: type[nn.Module]) -> None:
    module = kind().eval()
    file = normdeploy.export(module, inputs=["x[batch,4]"])
    assert any("begin at 2" in note and "test_dynamic_squeezes.py, line" in note for note in file.notes)
    require_right_sizes(module, file, (2, 3, 7))


@pytest.mark.parametrize("kind", DIFFERING)
def test_demanded_size_1_is_refused_with_the_line(kind: type[nn.Module]) -> None:
    with pytest.raises(InputError, match=r"test_dynamic_squeezes.py, line \d+: return .*squeeze"):
        normdeploy.export(kind().eval(), inputs=["x[batch,4]"], dims=["batch=1:2:8"])


@pytest.mark.parametrize("kind", AGREEING)
def test_size_1_stays_if_the_outputs_agree(kind: type[nn.Module]) -> None:
    module = kind().eval()
    file = normdeploy.export(module, inputs=["x[batch,4]"], dims=["batch=1:2:8"])
    require_right_sizes(module, file, (1, 2, 7))


def test_saved_program_keeps_the_axis(tmp_path: Path) -> None:
    module = SqueezedAxis().eval()
    dims = {"x": {0: torch.export.Dim("batch", min=2, max=8)}}
    program = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes=dims)
    targets = [node.target for node in program.graph.nodes]
    file = normdeploy.export(program)
    require_right_sizes(module, file, (2, 3, 7))
    assert [node.target for node in program.graph.nodes] == targets
