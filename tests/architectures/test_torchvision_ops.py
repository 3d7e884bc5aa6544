"""Ops of torchvision in Python: they agree with onnxruntime's ops, also for ties and samples outside of the image."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from benchmarks.architectures.catalogue.torchvision_ops import align_rois, declare_torchvision, suppress_boxes

Feeds = dict[str, np.ndarray]
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


def run_node(op_type: str, feeds: Feeds, **attributes: object) -> np.ndarray:
    """Run one node in onnxruntime."""
    node = helper.make_node(op_type, [*feeds], ["result"], **attributes)
    inputs = [helper.make_tensor_value_info(name, _TYPES[str(x.dtype)], x.shape) for name, x in feeds.items()]
    result = onnx.ValueInfoProto(name="result")
    graph = helper.make_graph([node], "graph", inputs, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (value,) = session.run(None, feeds)
    return np.asarray(value)


def draw_boxes(count: int, generator: torch.Generator) -> torch.Tensor:
    first = torch.rand(count, 2, generator=generator)
    return torch.cat([first, first + 0.5 * torch.rand(count, 2, generator=generator)], 1)


@pytest.mark.parametrize("grid", [0, 4], ids=["no ties", "ties"])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_suppress_boxes_keeps_the_boxes_of_onnxruntime(count: int, grid: int) -> None:
    generator = torch.Generator().manual_seed(count)
    boxes, scores = draw_boxes(count, generator), torch.rand(count, generator=generator)
    if grid:
        boxes, scores = (boxes * 8 * grid).round() / (8 * grid), (scores * grid).round() / grid
    feeds = {
        "boxes": boxes[None].numpy(),
        "scores": scores[None, None].numpy(),
        "most": np.array([count], np.int64),
        "threshold": np.array([0.5], np.float32),
    }
    kept = run_node("NonMaxSuppression", feeds)[:, 2]
    assert suppress_boxes(boxes, scores, 0.5).tolist() == kept.tolist()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [0, 2, 3])
def test_align_rois_has_the_values_of_onnxruntime(ratio: int, aligned: bool) -> None:
    generator = torch.Generator().manual_seed(ratio)
    image = torch.randn(2, 3, 12, 20, generator=generator)
    # A third of the boxes leaves the image, and some have no width.
    boxes = 40 * draw_boxes(30, generator) - 10
    boxes[:3, 2] = boxes[:3, 0]
    batch = torch.randint(0, 2, (30,), generator=generator)
    mode = "half_pixel" if aligned else "output_half_pixel"
    feeds = {"image": image.numpy(), "boxes": boxes.numpy(), "batch": batch.numpy()}
    expected = run_node(
        "RoiAlign",
        feeds,
        coordinate_transformation_mode=mode,
        output_height=4,
        output_width=3,
        sampling_ratio=ratio,
        spatial_scale=0.5,
    )
    rois = torch.cat([batch[:, None].float(), boxes], 1)
    result = align_rois(image, rois, 0.5, 4, 3, ratio, aligned)
    np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)


class Kept(nn.Module):
    def forward(self, boxes: torch.Tensor, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        rois = torch.cat([boxes.new_zeros(kept.shape[0], 1), boxes[kept]], 1)
        return torch.ops.torchvision.roi_align(image, rois, 1.0, 2, 2, 2, False)


def test_declared_ops_are_traced_with_a_size_that_depends_on_values() -> None:
    declare_torchvision()
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 4, 4, generator=generator)
    many, few = ((4 * draw_boxes(20, generator), torch.rand(20, generator=generator), image) for _ in range(2))
    program = torch.export.export(Kept(), many)
    results = [program.module()(*each) for each in (many, few)]
    assert len(results[0]) != len(results[1])
    for each, result in zip((many, few), results, strict=True):
        assert torch.equal(result, Kept()(*each))
