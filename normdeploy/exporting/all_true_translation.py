"""Translate the check of a tensor of conditions (``torch._check_tensor_all``), which torch's exporter can't write.

A file stops at no value, so the check itself is left out. Its operand is written, and then removed because nobody reads
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript import opset18 as op


def is_all_true(self: Any) -> Any:
    """Compute whether every element of a bool tensor is True.

    Returns:
        a bool scalar.
    """
    numbers = op.Cast(self, to=onnx.TensorProto.INT32)
    return op.Cast(op.ReduceMin(numbers, keepdims=0), to=onnx.TensorProto.BOOL)


# format of torch.onnx.export's custom_translation_table
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten._is_all_true.default: is_all_true}
