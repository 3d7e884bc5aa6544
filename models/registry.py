"""The list of every model, and what torch.export needs to know of one."""

from __future__ import annotations

from typing import Any

import torch

from .case import Case, Input, samples, seeded
from .rows import CASES, FIXED, TRAINING

__all__ = ["CASES", "FIXED", "TRAINING", "Case", "Input", "export_args", "samples", "seeded"]


def export_args(
    case: Case, dtype: torch.dtype = torch.float32, dynamic: bool = False
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, Any], ...] | None]:
    """Arguments for ``torch.export.export(module, args, dynamic_shapes=dynamic_shapes)``.

    Returns:
        args: random inputs at the opt sizes, floats in ``dtype``.
        dynamic_shapes: for each input its dynamic axes as named Dims with their ranges; None where static.

    Raises:
        ValueError: ``dynamic`` of a case that has no dynamic dimension.
    """
    if not dynamic:
        return samples(case, dtype), None
    if not case.dynamic:
        raise ValueError(f"case {case.name!r} has no dynamic dimension: ask for dynamic=False")
    dims: dict[str, Any] = {}
    shapes = []
    for spec in case.inputs:
        axes = {}
        for axis, size in enumerate(spec.shape):
            if not isinstance(size, int):
                name, low, _, high = size
                axes[axis] = dims.setdefault(name, torch.export.Dim(name, min=low, max=high))
        shapes.append(axes)
    return samples(case, dtype), tuple(shapes)
