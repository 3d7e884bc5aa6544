"""A detector like YOLO, with the suppression of boxes in the file, at sizes that are multiples of 8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import normdeploy
from benchmarks.architectures.catalogue.torchvision_ops import declare_torchvision

INPUTS = ["images[1,3,height,32]{0:1}"]
DIMS = ["height=16:32:64:8"]


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
        )


class Detector(nn.Module):
    """Two levels; each cell predicts the distances to four sides, as distributions over bins, and scores of classes.

    Args:
        suppresses: True to suppress boxes with torchvision's operator, after the boxes with the best scores are chosen.
    """

    def __init__(self, *, suppresses: bool) -> None:
        super().__init__()
        self.suppresses = suppresses
        self.fine = nn.Sequential(ConvBlock(3, 8), ConvBlock(8, 16))
        self.coarse = ConvBlock(16, 16)
        self.heads = nn.ModuleList(nn.Conv2d(16, 4 * 4 + 3, 1) for _ in range(2))
        self.register_buffer("distances", torch.arange(4.0))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fine = self.fine(images)
        levels = [
            self.decode(head(features), stride)
            for features, stride, head in zip((fine, self.coarse(fine)), (4, 8), self.heads, strict=True)
        ]
        boxes = torch.cat([level[0] for level in levels], 1)[0]
        best, labels = torch.cat([level[1] for level in levels], 1)[0].max(1)
        scores, places = best.topk(20)
        boxes, labels = boxes[places], labels[places]
        if self.suppresses:
            # Boxes of different classes do not suppress each other.
            apart = boxes + 1000.0 * labels[:, None]
            kept = torch.ops.torchvision.nms(apart, scores, 0.3)
            boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
        return boxes, scores, labels

    def decode(self, raw: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = raw.shape[2:]
        raw = raw.flatten(2)
        sides = (raw[:, :16].unflatten(1, (4, 4)).softmax(2) * self.distances[:, None]).sum(2)
        left, top, right, bottom = sides.unbind(1)
        y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        x, y = x.flatten(), y.flatten()
        boxes = torch.stack([x - left, y - top, x + right, y + bottom], 2) * stride
        return boxes, raw[:, 16:].sigmoid().transpose(1, 2)


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Declare the operator. torch's exporter translates it only if a package called torchvision is found."""
    declare_torchvision()
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        yield


@pytest.mark.parametrize("suppresses", [False, True])
def test_detector_with_chosen_boxes_is_exported_and_verified(
    suppresses: bool, tmp_path: Path, torchvision: None
) -> None:
    torch.manual_seed(0)
    model = Detector(suppresses=suppresses)
    # The running statistics move in training mode.
    model(torch.rand(1, 3, 64, 32))
    model.eval()
    path = tmp_path / "detector.onnx"
    result = normdeploy.export(model, output=path, inputs=INPUTS, dims=DIMS)
    assert [finding.status for finding in result.summary.findings] == ["folded"] * 3
    ops = {node.op_type for node in onnx.load(path).graph.node}
    assert ("NonMaxSuppression" in ops) is suppresses
    images = torch.rand(1, 3, 64, 32)
    assert (len(model(images)[0]) < 20) is suppresses
    assert normdeploy.verify(model, path, inputs=INPUTS, dims=DIMS, seeds=2)
