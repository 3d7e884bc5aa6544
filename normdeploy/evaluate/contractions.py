"""Evaluate products, convolutions and average pools (https://onnx.ai/onnx/operators) in float64.

A convolution is one matrix product per group over unfolded windows.
"""

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from .evaluation_budget import require_room
from .evaluator_core import Array, Attrs, Inputs, Result, Table, decode_text, optional_input
from .shape_ops import pad_array

Sizes = tuple[int, ...]


class _KernelWindow(NamedTuple):
    """Geometry of a moving kernel; each field has one number per spatial dim.

    Attributes:
        begins: padding before the first element of each dim.
        ends: padding after the last element of each dim.
    """

    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    begins: Sizes
    ends: Sizes

    @property
    def dilated_extents(self) -> Sizes:
        """Return the length that the dilated kernel spans in each spatial dim."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))


def _same_padding(totals: list[int], auto_pad: str) -> tuple[Sizes, Sizes]:
    """Split each total padding over both ends. If the total is odd, SAME_UPPER puts the additional element at the end,
    SAME_LOWER at the start.
    """
    small = tuple(t // 2 for t in totals)
    large = tuple(t - t // 2 for t in totals)
    if auto_pad == "SAME_UPPER":
        return (small, large)
    return (large, small)


def _kernel_window(attrs: Attrs, kernel: Sizes, sizes: Sizes) -> _KernelWindow:
    """Build the window that the attributes describe for an input of spatial ``sizes``."""
    rank = len(kernel)
    strides = tuple(attrs.get("strides") or (1,) * rank)
    dilations = tuple(attrs.get("dilations") or (1,) * rank)
    auto_pad = decode_text(attrs.get("auto_pad", "NOTSET"))
    if auto_pad == "NOTSET":
        pads = tuple(attrs.get("pads") or (0,) * (2 * rank))
    else:
        pads = (0,) * (2 * rank)
    window = _KernelWindow(kernel, strides, dilations, pads[:rank], pads[rank:])
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return window
    totals = [
        max((-(-n // s) - 1) * s + e - n, 0) for n, s, e in zip(sizes, strides, window.dilated_extents, strict=True)
    ]
    begins, ends = _same_padding(totals, auto_pad)
    return window._replace(begins=begins, ends=ends)


def _pad_input(x: Array, window: _KernelWindow) -> Array:
    return pad_array(x, [0, 0, *window.begins], [0, 0, *window.ends])


def _unfold_windows(x: Array, window: _KernelWindow) -> Array:
    """Return a view (N, C, *out, *kernel) of the padded ``x`` (N, C, *sizes)."""
    out = tuple((n - e) // s + 1 for n, e, s in zip(x.shape[2:], window.dilated_extents, window.strides, strict=True))
    if min(out, default=1) < 1:
        raise ValueError(f"a kernel that spans {window.dilated_extents} is larger than the padded input {x.shape[2:]}")
    steps = x.strides[2:]
    strides = tuple(t * s for t, s in zip(steps, window.strides, strict=True)) + tuple(
        t * d for t, d in zip(steps, window.dilations, strict=True)
    )
    return np.lib.stride_tricks.as_strided(
        x, (*x.shape[:2], *out, *window.kernel), x.strides[:2] + strides, writeable=False
    )


def _conv(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    w = inputs[1]
    bias = optional_input(inputs, 2)
    groups = attrs.get("group", 1)
    rank = w.ndim - 2
    batch, channels = x.shape[:2]
    filters, depth = w.shape[:2]
    if channels != depth * groups or filters % groups:
        raise ValueError(
            f"Conv of {channels} channels with a weight of shape {w.shape} in {groups} groups: the number of "
            f"channels must be {depth} · {groups}"
        )
    window = _kernel_window(attrs, w.shape[2:], x.shape[2:])
    views = _unfold_windows(_pad_input(x, window), window)
    out = views.shape[2 : 2 + rank]
    # (N, C, *out, *kernel) → (C, *kernel, N, *out): one copy, then one product per group.
    columns = views.transpose(1, *range(2 + rank, 2 + 2 * rank), 0, *range(2, 2 + rank))
    columns = columns.reshape(groups, depth * math.prod(window.kernel), batch * math.prod(out))
    y = np.matmul(w.reshape(groups, filters // groups, columns.shape[1]), columns)
    return _add_bias(y.reshape(filters, batch, *out).swapaxes(0, 1), bias)


def _add_bias(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    return y + bias.reshape((-1,) + (1,) * (y.ndim - 2))


def _transposed_window(attrs: Attrs, kernel: Sizes, sizes: Sizes) -> tuple[_KernelWindow, Sizes]:
    """Compute the window of a ConvTranspose and the spatial sizes of its output.

    The standard's formulas are used, including ``output_shape`` and SAME padding.
    """
    rank = len(kernel)
    auto_pad = decode_text(attrs.get("auto_pad", "NOTSET"))
    window = _kernel_window({name: value for name, value in attrs.items() if name != "auto_pad"}, kernel, sizes)
    extra = attrs.get("output_padding") or (0,) * rank
    full = [
        (n - 1) * s + e + x for n, s, e, x in zip(sizes, window.strides, window.dilated_extents, extra, strict=True)
    ]
    target = attrs.get("output_shape")
    if target is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        target = [n * s for n, s in zip(sizes, window.strides, strict=True)]
    if target is None:
        return window, tuple(f - b - e for f, b, e in zip(full, window.begins, window.ends, strict=True))
    # If the requested size exceeds the elements that the kernel reaches, the elements at the end are zero.
    begins, ends = _same_padding([max(f - t, 0) for f, t in zip(full, target[-rank:], strict=True)], auto_pad)
    return window._replace(begins=begins, ends=ends), tuple(target[-rank:])


def _conv_transpose(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    w = inputs[1]
    bias = optional_input(inputs, 2)
    groups = attrs.get("group", 1)
    batch, channels, *sizes = x.shape
    filters = w.shape[1] * groups
    if channels != w.shape[0] or channels % groups:
        raise ValueError(
            f"ConvTranspose of {channels} channels with a weight of shape {w.shape} in {groups} groups: the "
            f"number of channels must be {w.shape[0]}"
        )
    window, out = _transposed_window(attrs, w.shape[2:], tuple(sizes))
    rows = x.swapaxes(0, 1).reshape(groups, channels // groups, batch * math.prod(sizes))
    columns = np.matmul(w.reshape(groups, channels // groups, -1).swapaxes(1, 2), rows)
    columns = columns.reshape(filters, *window.kernel, batch, *sizes)
    reach = [
        max((n - 1) * s + e, b + o)
        for n, s, e, b, o in zip(sizes, window.strides, window.dilated_extents, window.begins, out, strict=True)
    ]
    require_room("ConvTranspose", filters * batch * math.prod(reach), x.size)
    full = np.zeros((filters, batch, *reach))
    for offset in product(*(range(k) for k in window.kernel)):
        places = zip(offset, window.dilations, sizes, window.strides, strict=True)
        target: Any = (..., *(slice(o * d, o * d + (n - 1) * s + 1, s) for o, d, n, s in places))
        full[target] += columns[(slice(None), *offset)]
    inner: Any = (..., *(slice(b, b + o) for b, o in zip(window.begins, out, strict=True)))
    return _add_bias(full[inner].swapaxes(0, 1), bias)


def _average_pool(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Compute the mean of each window. The padding counts as elements only with ``count_include_pad``."""
    x: Array = inputs[0]
    window = _kernel_window(attrs, tuple(attrs["kernel_shape"]), x.shape[2:])
    counted = np.ones((1, 1, *x.shape[2:]))
    if attrs.get("count_include_pad"):
        counted = pad_array(counted, [0, 0, *window.begins], [0, 0, *window.ends], 1.0)
    else:
        counted = _pad_input(counted, window)
    x = _pad_input(x, window)
    if attrs.get("ceil_mode"):
        overhang = [0, 0, *_ceil_mode_overhang(x.shape[2:], window)]
        x, counted = pad_array(x, [0] * x.ndim, overhang), pad_array(counted, [0] * x.ndim, overhang)
    axes = tuple(range(x.ndim, 2 * x.ndim - 2))
    return np.add.reduce(_unfold_windows(x, window), axis=axes) / np.add.reduce(
        _unfold_windows(counted, window), axis=axes
    )


def _ceil_mode_overhang(padded: Sizes, window: _KernelWindow) -> list[int]:
    """Compute how far the last window of ceil_mode reaches beyond the padded input.

    A window that would start in the padding at the end is omitted.
    """
    reaches = []
    for n, extent, stride, end in zip(padded, window.dilated_extents, window.strides, window.ends, strict=True):
        last = -(-(n - extent) // stride)
        if last * stride >= n - end:
            last -= 1
        reaches.append(max(last * stride + extent - n, 0))
    return reaches


def _global_average_pool(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    return np.add.reduce(x, axis=tuple(range(2, x.ndim)), keepdims=True) / math.prod(x.shape[2:])


def _matmul(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return np.matmul(inputs[0], inputs[1])


def _gemm(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Compute alpha · A' B' + beta · C."""
    if attrs.get("transA"):
        a = inputs[0].T
    else:
        a = inputs[0]
    if attrs.get("transB"):
        b = inputs[1].T
    else:
        b = inputs[1]
    y: Any = a @ b
    alpha = attrs.get("alpha", 1.0)
    beta = attrs.get("beta", 1.0)
    c = optional_input(inputs, 2)
    if alpha != 1.0:
        y = alpha * y
    if c is not None:
        y = y + (c if beta == 1.0 else beta * c)
    return y.astype(a.dtype, copy=False)


def _einsum(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    # ``optimize`` searches for matrix products. On small operands, the search takes longer than it saves.
    return np.einsum(decode_text(attrs["equation"]), *inputs, optimize=sum(x.size for x in inputs) > 10_000)


TABLE: Table = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Einsum"): _einsum,
    ("", "Conv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "AveragePool"): _average_pool,
    ("", "GlobalAveragePool"): _global_average_pool,
}
