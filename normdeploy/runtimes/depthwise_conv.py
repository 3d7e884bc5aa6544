"""Compute convolutions of single channels in float64.

In float32, torch convolves all channels in one kernel. In float64, torch runs a separate convolution for each channel:
19,000 calls for one run of MobileOne. This module instead computes one product of whole tensors for each element of the
convolution's kernel:

    y[n, g, m, p] = b[g, m] + Σ over t of w[g, m, t] · x[n, g, stride · p + dilation · t]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

# Operator -> number of spatial dims.
_DIMS = {"aten::conv1d": 1, "aten::conv2d": 2, "aten::conv3d": 3}


def convolve_channels(schema: torch.FunctionSchema, args: Sequence[Any]) -> torch.Tensor | None:
    """Convolve each channel separately.

    Args:
        schema: schema of the operator.
        args: x [N, C, *sizes], weight [C · m, 1, *kernel], bias, stride, padding, dilation, groups.

    Returns:
        y [N, C · m, *sizes], or None if the operator is not a depthwise convolution in float64 (groups = C > 1).
    """
    dims = _DIMS.get(schema.name)
    # If ``groups`` is not given, there is one group, so the convolution is not depthwise.
    if dims is None or schema.overload_name or len(args) < 7:
        return None
    x, weight, bias, stride, padding, dilation, groups = args
    if x.dim() != dims + 2 or groups == 1 or x.shape[1] != groups or x.dtype != torch.float64:
        return None
    stride, padding, dilation = (_expand_to_dims(numbers, dims) for numbers in (stride, padding, dilation))
    padded = torch.nn.functional.pad(x, [size for size in reversed(padding) for _ in range(2)]).unsqueeze(2)
    kernel = weight.shape[2:]
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(padded.shape[3:], spans, stride, strict=True)]
    # torch rejects a kernel that is larger than its input.
    if min(sizes) < 1:
        return None
    # Taps are [1, C, m, *kernel], results [N, C, m, *sizes].
    taps = weight.reshape(1, groups, -1, *kernel)
    total = torch.zeros(x.shape[0], groups, taps.shape[2], *sizes, dtype=x.dtype)
    for place in product(*map(range, kernel)):
        window = padded
        for axis, (at, size) in enumerate(zip(place, sizes, strict=True)):
            first = at * dilation[axis]
            steps = slice(first, first + stride[axis] * (size - 1) + 1, stride[axis])
            window = window[(slice(None),) * (3 + axis) + (steps,)]
        total.addcmul_(window, taps[(..., *place)].reshape(1, groups, -1, *[1] * dims))
    if bias is not None:
        total += bias.reshape(1, groups, -1, *[1] * dims)
    return total.reshape(x.shape[0], -1, *sizes)


def _expand_to_dims(numbers: Any, dims: int) -> list[int]:
    """Return one number per spatial dim; a single number applies to all spatial dims."""
    if isinstance(numbers, int):
        every = [numbers]
    else:
        every = list(numbers)
    if len(every) == 1:
        return every * dims
    return every
