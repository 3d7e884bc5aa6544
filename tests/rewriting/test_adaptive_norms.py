"""Group and instance norms whose scale and shift are data, as models compute them (``--fuse portable``).

tests/rewriting/test_epilogue_fusion.py has the spellings in nodes, and the lookalikes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normdeploy
from normdeploy.rewriting import epilogue_fusion
from normdeploy.rewriting.epilogue_rounding_cases import NormGrouping, make_epilogue_trial

CHANNELS = 8


class ScaleShift(nn.Module):
    """The middle of diffusers' ResnetBlock2D with ``time_embedding_norm="scale_shift"``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, CHANNELS)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.embed = nn.Linear(12, 2 * CHANNELS)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.embed(F.silu(embedding))[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(x) * (1 + scale) + shift)


class AdaGroupNorm(nn.Module):
    """AdaGroupNorm of diffusers: the group norm has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 2 * CHANNELS)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.embed(embedding)[:, :, None, None].chunk(2, dim=1)
        return F.group_norm(x, 2, eps=1e-6) * (1 + scale) + shift


class AdaIN(nn.Module):
    """Huang, Belongie, arXiv:1703.06868: the deviation and the mean of another image."""

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        deviation = (style.var((2, 3), keepdim=True) + 1e-5).sqrt()
        return F.instance_norm(x) * deviation + style.mean((2, 3), keepdim=True)


class SPADE(nn.Module):
    """Park et al., arXiv:1903.07291: scale and shift for each position, from a segmentation map."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gamma, self.beta = (nn.Conv2d(3, CHANNELS, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.gamma(segments)) + self.beta(segments)


class ConvSPADE(nn.Module):
    """SPADE by a BatchNorm behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(CHANNELS, affine=False)
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.spade = SPADE(norm)

    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        y: Tensor = self.spade(self.conv(x), segments)
        return y


IMAGE, EMBEDDING, MAP = (2, CHANNELS, 6, 5), (2, 12), (2, 3, 6, 5)
# name -> model, shape of its second input, own op
JOINED = {
    "scale_shift": (ScaleShift(), EMBEDDING, "AdaGroupNormSiLU"),
    "AdaGroupNorm": (AdaGroupNorm(), EMBEDDING, "AdaGroupNorm"),
    "AdaIN": (AdaIN(), IMAGE, "AdaGroupNorm"),
    "SPADE": (SPADE(nn.InstanceNorm2d(CHANNELS)), MAP, "AdaGroupNorm"),
    "SPADE of groups": (SPADE(nn.GroupNorm(2, CHANNELS, affine=False)), MAP, "AdaGroupNorm"),
}


@pytest.mark.parametrize("name", JOINED)
def test_adaptive_norm_of_model_becomes_one_op(name: str, tmp_path: Path) -> None:
    model, shape, op = JOINED[name]
    torch.manual_seed(0)
    example = (torch.randn(IMAGE), torch.randn(shape))
    result = normdeploy.export(model.eval(), example, output=tmp_path / "net.onnx", fuse="portable")
    ops = [n.op_type for n in result.proto.graph.node]
    assert [o for o in ops if "Norm" in o] == [op]
    (finding,) = result.summary.findings
    assert finding.status == "fused"
    assert finding.certificate is not None
    assert finding.certificate.method == "exact"
    assert normdeploy.verify(result)


@pytest.mark.parametrize("fuse", ["standard", "portable"])
def test_batch_norm_of_spade_folds_into_convolution(fuse: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = (torch.randn(IMAGE), torch.randn(MAP))
    result = normdeploy.export(ConvSPADE().eval(), example, output=tmp_path / "net.onnx", fuse=fuse)
    (finding,) = result.summary.findings
    assert (finding.kind, finding.status) == ("BatchNorm", "folded")
    assert not [n for n in result.proto.graph.node if "Norm" in n.op_type]
    assert normdeploy.verify(result)


def test_onnxruntime_tries_the_body_of_an_adaptive_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of the norm alone ran other nodes than the body's Reshape and InstanceNormalization."""
    tried = list[NormGrouping]()

    def record(grouping: NormGrouping, *rest: Any) -> Any:
        tried.append(grouping)
        return make_epilogue_trial(grouping, *rest)

    monkeypatch.setattr(epilogue_fusion, "make_epilogue_trial", record)
    torch.manual_seed(0)
    example = (torch.randn(IMAGE), torch.randn(IMAGE))
    normdeploy.export(AdaIN().eval(), example, output=tmp_path / "net.onnx", fuse="portable")
    assert [grouping.scaled for grouping in tried] == [True]
