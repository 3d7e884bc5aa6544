"""Translate repeat_interleave, which torch's exporter translates wrongly if the number of repeats is dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op

from ..loading.recurrent_ops import int64_constant


def repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    """Repeat each slice along ``dim`` ``repeats`` times.

    A new axis of size 1 after ``dim`` is expanded and merged into ``dim``. onnxscript 0.7.2 expands the wrong axis, the
    one before the new axis, if ``repeats`` is a size of an input.

    Returns:
        the repeated tensor. If ``dim`` is None, the input is flattened first.
    """
    if dim is None:
        self = op.Reshape(self, int64_constant([-1]))
        dim = 0
        rank = 1
    else:
        rank = len(self.shape)
    place = dim % rank
    if isinstance(repeats, int):
        count = int64_constant([repeats])
    else:
        count = op.Reshape(repeats, int64_constant([1]))
    before = op.Shape(self, start=0, end=place)
    behind = op.Shape(self, start=place + 1)
    tiles = op.Concat(int64_constant([1] * (place + 1)), count, int64_constant([1] * (rank - place - 1)), axis=0)
    longer = op.Mul(op.Shape(self, start=place, end=place + 1), count)
    return op.Reshape(
        op.Expand(op.Unsqueeze(self, int64_constant([place + 1])), tiles),
        op.Concat(before, longer, behind, axis=0),
        allowzero=1,
    )


# In the format of torch.onnx.export's custom_translation_table.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.repeat_interleave.self_int: repeat_interleave
}
