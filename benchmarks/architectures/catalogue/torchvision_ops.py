"""Ops of torchvision in Python, for a torchvision whose compiled library does not load.

A wheel of torchvision is built for one torch. Beside another torch its library is missing, and with it the ops that the
detectors call. The implementations here follow torchvision's kernels for the CPU (``csrc/ops/cpu/nms_kernel.cpp`` and
``roi_align_kernel.cpp``), including the order of ties and samples outside of the image. Only rounding differs.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module

import numpy as np
import torch

# Keep the library objects alive, because torch removes their declarations with them.
_KEPT: list[torch.library.Library] = []
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_SCHEMAS = {
    "nms": _NMS,
    "qnms": _NMS,
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
}
# Elements of the interpolated rows that are held at once.
_CHUNK = 1 << 24


def declare_torchvision() -> None:
    """Declare the ops ``nms``, ``qnms`` and ``roi_align`` of torchvision, as far as they are missing.

    The declarations must precede the import of torchvision, which describes the sizes of the results of ``nms`` and
    ``qnms``. A torchvision whose compiled library loads must be imported before, because an op can't be declared twice.
    """
    if _KEPT:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        library.define(name + _SCHEMAS[name])
    # torchvision describes only nms and qnms if its library is missing.
    installed = importlib.util.find_spec("torchvision") is not None
    if installed:
        import_module("torchvision")
    for name, function in (("nms", suppress_boxes), ("roi_align", align_rois)):
        if name in missing and not torch._C._dispatch_has_kernel_for_dispatch_key(f"torchvision::{name}", "CPU"):
            library.impl(name, function, "CPU")
    if "nms" in missing and not installed:
        torch.library.register_fake("torchvision::nms", _describe_kept, lib=library)
    if "roi_align" in missing:
        torch.library.register_fake("torchvision::roi_align", _describe_aligned, lib=library)
    if installed:
        _allow_ops()


def _allow_ops() -> None:
    """Let torchvision's functions call the ops that are declared here."""
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        sys.modules[name]._has_ops = lambda: True  # type: ignore[attr-defined]


def suppress_boxes(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Suppress boxes that overlap a box with a higher score.

    Args:
        boxes: [N, 4], as x1, y1, x2, y2.
        scores: [N]. Among equal scores, the first box wins.
        iou_threshold: boxes whose intersection over union is greater are suppressed.

    Returns:
        int64, [kept]: indices of the boxes that are kept, in the order of their scores.
    """
    order = scores.sort(stable=True, descending=True).indices.numpy()
    x1, y1, x2, y2 = boxes.detach().numpy()[order].T
    areas = (x2 - x1) * (y2 - y1)
    # The kernel compares with a float64 threshold, which NumPy would otherwise round to the type of the boxes.
    threshold = np.float64(iou_threshold)
    alive = np.ones(len(order), bool)
    kept = []
    for i in range(len(order)):
        if not alive[i]:
            continue
        kept.append(order[i])
        rest = slice(i + 1, None)
        width = np.minimum(x2[i], x2[rest]) - np.maximum(x1[i], x1[rest])
        height = np.minimum(y2[i], y2[rest]) - np.maximum(y1[i], y1[rest])
        shared = width.clip(min=0) * height.clip(min=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            alive[rest] &= ~(shared / (areas[i] + areas[rest] - shared) > threshold)
    return torch.tensor(np.array(kept, np.int64))


def align_rois(
    image: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Pool regions of feature maps to one size, as the means of bilinear samples (He et al., Mask R-CNN, 2017).

    Bilinear samples are products of a row's and a column's weights, so each region is two products of matrices.

    Args:
        image: [N, C, H, W].
        rois: [K, 5], as index in the batch, x1, y1, x2, y2.
        spatial_scale: factor from the coordinates of ``rois`` to pixels of ``image``.
        sampling_ratio: samples per bin and axis; 0 or less for the number of pixels in a bin.
        aligned: True to shift the coordinates by half a pixel.

    Returns:
        [K, C, pooled_height, pooled_width].
    """
    _, channels, height, width = image.shape
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    settings = (sampling_ratio, aligned)
    columns = _mean_weights(corners[:, 0], corners[:, 2], width, pooled_width, *settings)
    rows = _mean_weights(corners[:, 1], corners[:, 3], height, pooled_height, *settings)
    indices = rois[:, 0].long()
    result = image.new_empty((len(rois), channels, pooled_height, pooled_width))
    step = max(1, _CHUNK // max(1, channels * height * width))
    for start in range(0, len(rois), step):
        part = slice(start, start + step)
        result[part] = rows[part, None] @ image[indices[part]] @ columns[part, None].transpose(-1, -2)
    return result


def _mean_weights(
    first: torch.Tensor, last: torch.Tensor, size: int, bins: int, sampling_ratio: int, aligned: bool
) -> torch.Tensor:
    """Compute the weights of the pixels of one axis in each bin.

    Args:
        first, last: [K], begin and end of each region, in pixels.

    Returns:
        [K, bins, size].
    """
    length = last - first
    if not aligned:
        length = length.clamp(min=1)
    bin_length = length / bins
    counts = torch.full_like(length, sampling_ratio) if sampling_ratio > 0 else bin_length.ceil()
    counts = counts.clamp(min=0)
    most = int(counts.max().item()) if len(counts) else 0
    sample = torch.arange(most)
    offset = (sample + 0.5).to(length.dtype) * (bin_length / counts)[:, None]
    edge = first[:, None] + torch.arange(bins) * bin_length[:, None]
    at = edge[:, :, None] + offset[:, None, :]
    # Samples more than one pixel outside of the image are 0, and samples between it and its edge take the edge's pixel.
    used = (sample < counts[:, None])[:, None, :] & (at >= -1) & (at <= size)
    at = torch.where(used, at, 0).clamp(0, size - 1)
    low = at.floor()
    share = torch.where(used, at - low, 0)
    weights = first.new_zeros((len(first), bins, size + 1))
    weights.scatter_add_(2, low.long(), torch.where(used, 1 - share, 0))
    weights.scatter_add_(2, low.long() + 1, share)
    return weights[:, :, :size] / counts.clamp(min=1)[:, None, None]


def _describe_kept(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Describe the result of ``nms``, whose size depends on values."""
    size = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty(size, dtype=torch.int64)


def _describe_aligned(
    image: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Describe the result of ``roi_align``."""
    return image.new_empty((rois.shape[0], image.shape[1], pooled_height, pooled_width))
