"""Evaluate convolutions and pools at a random point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...evaluate.evaluator_core import decode_text
from ...graphs.symbolic_sizes import Size
from .field_values import Axis, Degree, NotEvaluated, Value, axis_of_length, closed_if_static, is_open_axis
from .op_call import Call
from .residues import Array, matmul_modulo
from .value_helpers import refuse_special


def _window(call: Call, x: Value, kernel: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Read strides, dilations and pads.

    Returns:
        strides, dilations, pads at the begin and pads at the end.
    """
    rank = len(kernel)
    strides = list(call.attrs.get("strides") or [1] * rank)
    dilations = list(call.attrs.get("dilations") or [1] * rank)
    auto = decode_text(call.attrs.get("auto_pad", "NOTSET"))
    pads = list(call.attrs.get("pads") or [0] * (2 * rank))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        begins, ends = [], []
        if any(map(is_open_axis, x.factors[2:])):
            raise NotEvaluated("auto_pad for an open size")
        for n, k, s, d in zip(x.points[2:], kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            begins.append(small if auto == "SAME_UPPER" else large)
            ends.append(large if auto == "SAME_UPPER" else small)
        return strides, dilations, begins, ends
    if auto == "VALID":
        pads = [0] * (2 * rank)
    return strides, dilations, pads[:rank], pads[rank:]


def _unfold(a: Array, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array:
    """View windows.

    Returns:
        (N, C, *out, *kernel).
    """
    rank = len(kernel)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(n < e for n, e in zip(a.shape[2:], extents, strict=True)):
        raise NotEvaluated("a kernel that is larger than its input")
    view = np.lib.stride_tricks.sliding_window_view(a, extents, axis=tuple(range(2, 2 + rank)))
    cut: list[Any] = [slice(None), slice(None)]
    cut += [slice(None, None, s) for s in strides]
    cut += [slice(None, None, d) for d in dilations]
    return view[tuple(cut)]


def _pad_spatial(a: Array, begins: Sequence[int], ends: Sequence[int]) -> Array:
    if min([*begins, *ends], default=0) < 0:
        raise NotEvaluated("negative pads")
    return np.pad(a, [(0, 0), (0, 0), *zip(begins, ends, strict=True)])


def evaluate_conv(call: Call) -> Value:
    x, w, bias = call.data(0), call.data(1), call.optional(2)
    strides, dilations, begins, ends = _window(call, x, w.dims[2:])
    y = _convolve(call, x, w, strides, dilations, begins, ends, call.attrs.get("group", 1))
    return _with_bias(call, y, bias)


def _with_bias(call: Call, y: Value, bias: Value | None) -> Value:
    if bias is None:
        return y
    return call.add(y, call.reshape(bias, channel_shape(bias, y)))


def channel_shape(x: Value, y: Value) -> tuple[int, ...]:
    """Return the shape in which a vector over channels broadcasts to ``y``."""
    return (x.size, *(1,) * (y.rank - 2))


def _convolve(
    call: Call,
    x: Value,
    w: Value,
    strides: Sequence[int],
    dilations: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    groups: int,
) -> Value:
    refuse_special(x, w)
    field = call.field
    filters, depth, *kernel = w.dims
    batch, channels = x.points[:2]
    if is_open_axis(x.factors[1]) or channels != depth * groups or filters % groups:
        raise NotEvaluated("a convolution whose weight does not fit its input")
    opened = any(map(is_open_axis, x.factors[2:]))
    rank = len(kernel)
    gather: Array | None = None
    outer: tuple[Axis, ...] = ()
    if opened:
        outer, gather = _random_gather(call, x, kernel, (strides, dilations, begins, ends))
    rows = []
    out: tuple[int, ...] = ()
    for j, p in enumerate(field.arithmetic.primes):
        a = field.residues_modulo(x, j)
        if gather is not None:
            out = tuple(map(field.axis_points, outer))
            # (N·C, in)·(in, taps·out) becomes (N, G, C/G·taps, out).
            columns = matmul_modulo(a.reshape(batch * channels, -1), gather[j], p)
        else:
            windows = _unfold(_pad_spatial(a, begins, ends), kernel, strides, dilations)
            out = windows.shape[2 : 2 + rank]
            order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
            columns = windows.transpose(order)
        columns = columns.reshape(batch, groups, depth * math.prod(kernel), math.prod(out))
        weight = field.residues_modulo(w, j).reshape(groups, filters // groups, depth * math.prod(kernel))
        rows.append(matmul_modulo(weight, columns, p).reshape(batch, filters, *out))
    if not opened:
        outer = tuple(map(axis_of_length, out))
    degree = x.degree.times(w.degree)
    if opened:
        # The map is a sum over the places of each open axis.
        places = (size for axis in x.factors[2:] for size in axis if size.constant_value is None)
        degree = degree.times(Degree(1)).summed(places)
    axes = closed_if_static([x.factors[0], axis_of_length(filters), *outer]) if x.is_open else None
    return field.made(np.stack(rows), degree.plus(degree, max(depth * math.prod(kernel), 1)), axes=axes)


def _random_gather(
    call: Call, x: Value, kernel: Sequence[int], window: tuple[Sequence[int], ...]
) -> tuple[tuple[Axis, ...], Array]:
    """Draw the linear map from an input of open sizes to the elements that the taps read.

    Convolutions with equal windows have the same map. An equality that holds for every linear map holds for the map of
    the convolution. Without pads, each tap reads one element, so the weights of each tap and place add up to 1.

    Returns:
        axes of the result, and the map with shape (primes, input points, taps · output points).
    """
    field = call.field
    sizes = x.sizes[2:]
    strides, dilations, begins, ends = map(list, window)
    outer = []
    for i, size in enumerate(sizes):
        told = (kernel[i], strides[i], dilations[i], begins[i], ends[i])
        slack = (kernel[i] - 1) * dilations[i] - begins[i] - ends[i]
        if strides[i] == 1 and (slack <= 0 or size.constant_value is not None):
            outer.append(field.axis_of_size(size - slack))
        elif size.constant_value is not None:
            outer.append(axis_of_length((size.constant_value - slack - 1) // strides[i] + 1))
        else:
            outer.append((Size.opaque("places of a window", told, size),))
    name = repr(([n.terms for n in sizes], list(kernel), strides, dilations, begins, ends))
    inner = math.prod(x.points[2:])
    taps = math.prod(kernel) * math.prod(map(field.axis_points, outer))
    made = field.unknown.fill(f"gather {name}", (inner, taps)).copy()
    if not any((*begins, *ends)):
        rest = field.arithmetic.sum(made[:, 1:], (0,), keepdims=False)
        made[:, 0] = (1 - rest) % field.arithmetic.column(1)
    return tuple(outer), made


def evaluate_conv_transpose(call: Call) -> Value:
    """Convolve the input with zeros between its elements, with the flipped kernel."""
    x, w, bias = call.data(0), call.data(1), call.optional(2)
    if call.attrs.get("output_shape") or decode_text(call.attrs.get("auto_pad", "NOTSET")) != "NOTSET":
        raise NotEvaluated("ConvTranspose with output_shape or auto_pad")
    strides, dilations, begins, ends = _window(call, x, w.dims[2:])
    groups = call.attrs.get("group", 1)
    extra = list(call.attrs.get("output_padding") or [0] * len(strides))
    channels, depth, *kernel = w.dims
    if any(map(is_open_axis, x.factors[1:])):
        raise NotEvaluated("ConvTranspose of an open size")
    sizes = [(n - 1) * s + 1 for n, s in zip(x.points[2:], strides, strict=True)]
    places = np.zeros((*x.points[:2], *sizes), np.int64)
    cut: Any = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    places[cut] = np.arange(1, math.prod(x.points) + 1).reshape(x.points)
    axes = closed_if_static([*x.factors[:2], *map(axis_of_length, sizes)]) if x.is_open else None
    stuffed = call.gather_places(x, places, axes)
    # (C, M/G, *kernel) becomes (M, C/G, *kernel), flipped.
    index = np.arange(1, w.size + 1).reshape(groups, channels // groups, depth, *kernel).swapaxes(1, 2)
    index = index.reshape(groups * depth, channels // groups, *kernel)
    flipped = index[(slice(None), slice(None), *(slice(None, None, -1) for _ in kernel))]
    weight = call.gather_places(w, flipped)
    before = [(k - 1) * d - b for k, d, b in zip(kernel, dilations, begins, strict=True)]
    after = [(k - 1) * d - e + o for k, d, e, o in zip(kernel, dilations, ends, extra, strict=True)]
    y = _convolve(call, stuffed, weight, [1] * len(kernel), dilations, before, after, groups)
    return _with_bias(call, y, bias)


def evaluate_average_pool(call: Call) -> Value:
    x = call.data(0)
    refuse_special(x)
    if call.attrs.get("ceil_mode"):
        raise NotEvaluated("AveragePool with ceil_mode")
    kernel = list(call.attrs["kernel_shape"])
    strides, dilations, begins, ends = _window(call, x, kernel)
    field = call.field
    spatial = tuple(range(-len(kernel), 0))

    def add_windows(a: Array) -> Array:
        return np.add.reduce(_unfold(_pad_spatial(a, begins, ends), kernel, strides, dilations), axis=spatial)

    if x.is_open and any(map(is_open_axis, x.factors[2:])):
        raise NotEvaluated("AveragePool of an open size")
    total = np.stack([add_windows(row) for row in field.residues(x)])
    terms = math.prod(kernel)
    axes: tuple[Axis, ...] | None = None
    if x.is_open:
        axes = closed_if_static([*x.factors[:2], *map(axis_of_length, total.shape[3:])])
    made = field.made(field.arithmetic.reduce(total), x.degree.plus(x.degree, terms), sign=x.sign, axes=axes)
    counts = add_windows(np.ones((1, 1, *x.points[2:]), np.int64)).astype(np.float64)
    if call.attrs.get("count_include_pad"):
        counts = np.full_like(counts, terms)
    return call.divide(made, field.constant(counts))
