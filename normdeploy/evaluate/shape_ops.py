"""Evaluate ops that create tensors or move elements without arithmetic (https://onnx.ai/onnx/operators)."""

import math
from typing import Any

import numpy as np

from .evaluation_budget import require_room
from .evaluator_core import (
    Array,
    Attrs,
    Inputs,
    Result,
    Table,
    UnsupportedOp,
    decode_text,
    integers_from,
    optional_input,
    widen_attribute,
)


def _constant(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    if "value" in attrs:
        return widen_attribute(attrs["value"])
    for name, dtype in _CONSTANTS.items():
        if name in attrs:
            return np.array(attrs[name], dtype)
    raise UnsupportedOp(
        f"Constant with {', '.join(attrs) or 'no attribute'}; supported are value, {', '.join(_CONSTANTS)}"
    )


_CONSTANTS: dict[str, Any] = {
    "value_float": np.float64,
    "value_floats": np.float64,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def _constant_of_shape(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    shape = inputs[0].tolist()
    if "value" not in attrs:
        return np.zeros(shape)
    value = widen_attribute(attrs["value"])
    return np.full(shape, value.reshape(()), value.dtype)


def _range(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Compute start + i · delta for i < ceil((limit − start) / delta), in the type of start."""
    start, limit, delta = (value.item() for value in inputs)
    dtype = inputs[0].dtype
    if dtype.kind == "f":
        count = math.ceil((limit - start) / delta)
    else:
        count = -((start - limit) // delta)
    return start + np.arange(max(count, 0), dtype=dtype) * delta


def _shape(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return np.array(inputs[0].shape[attrs.get("start", 0) : attrs.get("end")], np.int64)


def _size(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return np.array(inputs[0].size, np.int64)


def _reshape(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    shape = integers_from(inputs, 1, attrs, "shape")
    assert shape is not None, "Reshape without a shape"
    if 0 in shape and not attrs.get("allowzero"):
        shape = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return x.reshape(shape)


def _flatten(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    shape = inputs[0].shape
    axis = attrs.get("axis", 1)
    return inputs[0].reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))


def _squeeze(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    axes = integers_from(inputs, 1, attrs, "axes")
    return inputs[0].squeeze(None if axes is None else tuple(axes))


def _unsqueeze(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    axes = integers_from(inputs, 1, attrs, "axes") or []
    shape = inputs[0].shape
    rank = len(shape) + len(axes)
    ones = {axis + rank if axis < 0 else axis for axis in axes}
    if len(ones) != len(axes) or not all(0 <= axis < rank for axis in ones):
        raise ValueError(
            f"Unsqueeze of a shape of {len(shape)} dims at axes {axes}: the axes must be distinct and below {rank}"
        )
    kept = iter(shape)
    return inputs[0].reshape([1 if i in ones else next(kept) for i in range(rank)])


def _transpose(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return inputs[0].transpose(attrs.get("perm"))


def _expand(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    shape = tuple(inputs[1].tolist())
    if shape == x.shape:
        return x
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, shape))


def _concat(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return np.concatenate(inputs, axis=attrs.get("axis", 1))


def _split(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Split into the given sizes, else into equal parts.

    The last part is smaller if the number of parts does not divide the length (opset 18).
    """
    x = inputs[0]
    axis = attrs.get("axis", 0)
    sizes = integers_from(inputs, 1, attrs, "split")
    if sizes is None:
        count = attrs.get("num_outputs", outputs)
        length = x.shape[axis]
        size = -(-length // count)
        sizes = [min(size, length - i * size) for i in range(count)]
    if sum(sizes) != x.shape[axis]:
        raise ValueError(
            f"Split into sizes {sizes} along an axis of length {x.shape[axis]}: the sizes must add up to the length"
        )
    index: list[Any] = [slice(None)] * x.ndim
    parts = []
    start = 0
    for size in sizes:
        index[axis] = slice(start, start + size)
        parts.append(x[tuple(index)])
        start += size
    return tuple(parts)


def _slice(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    """Slice by Python's rules, which ONNX shares for negative and out-of-range positions and negative steps."""
    x = inputs[0]
    starts = integers_from(inputs, 1, attrs, "starts") or []
    ends = integers_from(inputs, 2, attrs, "ends") or []
    axes = integers_from(inputs, 3, attrs, "axes") or range(len(starts))
    steps = integers_from(inputs, 4, attrs, "steps") or [1] * len(starts)
    index: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _gather(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    return inputs[0].take(inputs[1], attrs.get("axis", 0))


def _tile(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    if opset < 6:
        repeats = [1] * x.ndim
        repeats[inputs[2].item()] = inputs[1].item()
        return np.tile(x, repeats)
    return np.tile(x, inputs[1].tolist())


def pad_array(x: Array, begins: list[int], ends: list[int], value: Any = 0) -> Array:
    """Pad ``x`` with ``value``.

    Args:
        begins: elements to add before each dim; negative counts crop.
        ends: elements to add after each dim; negative counts crop.

    Returns: an array of x's dtype; ``x`` itself if all counts are 0.

    Raises:
        UnsupportedOp: the result has too many elements.
    """
    if not any(begins) and not any(ends):
        return x
    sizes = [n + b + e for n, b, e in zip(x.shape, begins, ends, strict=True)]
    require_room("Pad", math.prod(sizes), x.size)
    out = np.full(sizes, value, x.dtype)
    inner = tuple(slice(max(b, 0), n + b + min(e, 0)) for n, b, e in zip(x.shape, begins, ends, strict=True))
    kept = tuple(slice(max(-b, 0), n + min(e, 0)) for n, b, e in zip(x.shape, begins, ends, strict=True))
    out[inner] = x[kept]
    return out


def _pad(inputs: Inputs, attrs: Attrs, opset: int, outputs: int) -> Result:
    x = inputs[0]
    mode = decode_text(attrs.get("mode", "constant"))
    if mode != "constant":
        raise UnsupportedOp(f"Pad with mode {mode}; only constant is supported")
    pads = integers_from(inputs, 1, attrs, "pads" if opset >= 2 else "paddings")
    assert pads is not None, "Pad without pads"
    given = optional_input(inputs, 2)
    if given is None:
        value = attrs.get("value", 0)
    else:
        value = given.reshape(())
    axes = integers_from(inputs, 3, attrs, "axes") or range(x.ndim)
    begins = [0] * x.ndim
    ends = [0] * x.ndim
    half = len(pads) // 2
    for axis, begin, end in zip(axes, pads[:half], pads[half:], strict=True):
        begins[axis], ends[axis] = begin, end
    return pad_array(x, begins, ends, value)


TABLE: Table = {
    ("", "Constant"): _constant,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "Range"): _range,
    ("", "Shape"): _shape,
    ("", "Size"): _size,
    ("", "Reshape"): _reshape,
    ("", "Flatten"): _flatten,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Transpose"): _transpose,
    ("", "Expand"): _expand,
    ("", "Concat"): _concat,
    ("", "Split"): _split,
    ("", "Slice"): _slice,
    ("", "Gather"): _gather,
    ("", "Tile"): _tile,
    ("", "Pad"): _pad,
}
