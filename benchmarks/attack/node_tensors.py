"""Draw nodes that process numbers one by one, reduce, move or select them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper

from .node_draw import PRESENT, Draw


def _unary(d: Draw) -> None:
    d.tensor(*d.shape(0))
    for name in ("alpha", "beta", "gamma", "bias", "lambd"):
        d.set(name, 0.3, 1.0, 2.0, 0.0)
    for name in ("detect_negative", "detect_positive"):
        d.set(name, 0, 1)
    for name in ("start", "end"):
        d.set(name, -1, 0, 1, 2)


def _binary(d: Draw) -> None:
    shape = d.shape(0)
    d.tensor(*shape)
    low = 1 if d.op in ("Div", "Mod", "BitShift") else -3
    d.tensor(*shape[d.pick(0, 0, len(shape)) :], low=low)
    d.set("fmod", 1, 0)
    d.set("direction", "LEFT", "RIGHT", needed=True)


def _several(d: Draw) -> None:
    shape = d.shape(1)
    for _ in range(int(d.rng.integers(1, 4))):
        d.tensor(*shape)


def _along(d: Draw) -> None:
    shape = d.shape(1)
    d.tensor(*shape)
    d.axis(len(shape))
    for name in ("keepdims", "select_last_index"):
        d.set(name, 0, 1)
    d.set("p", 1, 2)


def _cumulative(d: Draw) -> None:
    shape = d.shape(1)
    d.tensor(*shape)
    d.given(int(d.rng.integers(len(shape))), d.pick(np.int32, np.int64))
    for name in ("exclusive", "reverse"):
        d.set(name, 0, 1)


def _concat(d: Draw) -> None:
    shape = d.shape(1)
    for _ in range(int(d.rng.integers(1, 4))):
        d.tensor(*shape)
    d.axis(len(shape), needed=True)


def _gather(d: Draw) -> None:
    shape = d.shape(1, 3, (2, 3))
    d.tensor(*shape)
    d.given(d.rng.integers(0, 2, shape), d.pick(np.int64, np.int32))
    d.axis(len(shape))


def _gather_nd(d: Draw) -> None:
    d.tensor(2, 3, 2)
    d.given(d.rng.integers(0, 2, (2, int(d.rng.integers(1, 3)))))
    d.set("batch_dims", 0, 1)


def _scatter(d: Draw) -> None:
    shape = d.shape(1, 2, (2, 3))
    d.tensor(*shape)
    # The rows of the indices are permutations, so that the order of updates does not matter.
    axis = d.axis(len(shape)) or 0
    indices = np.argsort(d.rng.random(shape), axis=axis)
    d.given(indices, d.pick(np.int64, np.int32))
    d.tensor(*shape)
    d.set("reduction", "none", "add", "mul", "max", "min")


def _scatter_nd(d: Draw) -> None:
    d.tensor(3, 2)
    d.given([[2], [0]])
    d.tensor(2, 2)
    d.set("reduction", "none", "add", "mul", "max", "min")


def _compress(d: Draw) -> None:
    d.tensor(3, 3)
    d.given([True, False, True], np.bool_)
    d.axis(2)


def _one_hot(d: Draw) -> None:
    d.inputs.append(d.rng.integers(0, 4, 3).astype(d.kind(0)))
    d.inputs.append(np.array(4 if d.coin() else [4], d.kind(1)))
    d.inputs.append(np.array([0, 5], d.kind(2)))
    d.axis(2)


def _top(d: Draw) -> None:
    shape = d.shape(1, 3, (2, 3, 4))
    d.tensor(*shape)
    d.set("k", 1, 2, needed=True)
    if d.opset >= 10:
        d.given([d.pick(1, 2)])
    d.axis(len(shape))
    for name in ("largest", "sorted"):
        d.set(name, 0, 1)


def _split(d: Draw) -> None:
    size = d.pick(4, 6, 5)
    shape = (3, size)
    d.tensor(*shape)
    d.attributes["axis"] = d.pick(1, -1)
    d.attributes["_outputs"] = count = d.pick(1, 2, 3)
    first = [1] * (count - 1)
    sizes = [*first, size - sum(first)]
    if d.coin():
        if d.opset < 13:
            d.set("split", sizes, needed=True)
        else:
            d.given(sizes)
    else:
        d.set("num_outputs", count, needed=True)


def _squeeze(d: Draw) -> None:
    d.tensor(1, 3, 1, 2)
    axes = d.pick([0], [2], [0, 2], [2, 0], [-2], [-4, 2])
    _axes(d, axes, needed=False)


def _unsqueeze(d: Draw) -> None:
    d.tensor(*d.shape(0, 2))
    rank = d.inputs[0].ndim  # type: ignore[union-attr]  # added above
    axes = d.pick([0], [rank], [-1], [0, rank + 1], [1, 0], [-1, 0])
    _axes(d, axes, needed=True)


def _axes(d: Draw, axes: list[int], *, needed: bool) -> None:
    """Pass axes as an attribute or as an input, depending on the opset."""
    if "axes" in d.schema.attributes:
        d.set("axes", axes, needed=needed)
    elif needed or d.coin(PRESENT):
        d.given(axes)


def _reduce(d: Draw) -> None:
    shape = d.shape(1)
    d.tensor(*shape)
    _axes(d, d.some_axes(len(shape)), needed=False)
    d.set("keepdims", 0, 1)
    d.set("noop_with_empty_axes", 0, 1)


def _reshape(d: Draw) -> None:
    d.tensor(2, 3, 2)
    d.given(d.pick([6, 2], [-1], [0, -1], [2, 3, 2, 1], [0, 0, 2]))
    d.set("allowzero", 0, 1)


def _expand(d: Draw) -> None:
    d.tensor(1, 3)
    d.given(d.pick([2, 1], [2, 1, 3], [1, 1], [3]))


def _tile(d: Draw) -> None:
    d.tensor(2, 3)
    d.given(d.pick([1, 2], [2, 1]))


def _slice(d: Draw) -> None:
    d.tensor(4, 5)
    starts, ends = d.pick(([1, 0], [3, 9]), ([-3, 1], [-1, -1]), ([0, 2], [4, 1]))
    if d.opset < 10:
        d.attributes.update(starts=starts, ends=ends)
        d.set("axes", [0, 1], [1, 0], [-1, 0])
        return
    kind = d.pick(np.int64, np.int32)
    d.given(starts, kind)
    d.given(ends, kind)
    if d.coin():
        d.given(d.pick([0, 1], [1, 0], [-1, 0]), kind)
        if d.coin():
            d.given(d.pick([1, 1], [2, 1], [1, -1]), kind)


def _pad(d: Draw) -> None:
    d.tensor(2, 4)
    pads = d.pick([0, 1, 0, 2], [0, 0, 1, 0], [1, -1, 0, 0], [0, 2, 0, -1], [0, 0, 0, 0])
    mode = d.set("mode", "constant", "edge", "reflect", "wrap")
    if d.opset < 11:
        d.attributes["pads"] = pads
        d.set("value", 0.0, 2.5, -1.0)
        return
    d.given(pads)
    if mode in (None, "constant") and d.coin():
        d.inputs.append(np.array(2, d.kind(0)))
        if d.opset >= 18 and d.coin():
            d.given([0, 1], d.pick(np.int64, np.int32))


def _clip(d: Draw) -> None:
    d.tensor(*d.shape())
    if d.opset < 11:
        for name in ("min", "max"):
            d.set(name, 0.5, -1.0, 2.0, float("inf"), float("-inf"))
        return
    for number in (d.pick(0, 1), d.pick(1, 2)):
        d.inputs.append(np.array(number, d.kind(0)) if d.coin(0.7) else None)


def _dropout(d: Draw) -> None:
    d.tensor(*d.shape())
    d.set("ratio", 0.3, 0.0, 0.5)
    d.set("seed", 3)
    if d.opset >= 12 and d.coin():
        d.inputs.append(np.array(d.pick(0.3, 0.0), d.kind(1)))
        if d.coin():
            d.given(False, np.bool_)


def _cast(d: Draw) -> None:
    d.tensor(*d.shape(), low=0)
    names = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_]
    d.attributes["to"] = helper.np_dtype_to_tensor_dtype(np.dtype(d.pick(*names)))
    d.set("saturate", 0, 1)
    d.inputs[0] = np.abs(np.nan_to_num(d.inputs[0], nan=1, posinf=1, neginf=1))  # type: ignore[call-overload]


def _cast_like(d: Draw) -> None:
    d.tensor(3, low=0)
    d.inputs[0] = np.abs(np.nan_to_num(d.inputs[0], nan=1, posinf=1, neginf=1))  # type: ignore[call-overload]
    d.tensor(1)
    d.set("saturate", 0, 1)


def _filled(d: Draw) -> None:
    d.given(list(d.shape()))
    dtype = np.dtype(d.pick(np.float32, np.int64, np.bool_, np.float16))
    d.set("value", onnx.numpy_helper.from_array(np.ones(1, dtype)))


def _where(d: Draw) -> None:
    shape = d.shape()
    d.given(d.rng.random(shape) < 0.5, np.bool_)
    d.tensor(*shape)
    d.tensor(*shape[-1:])


def _blocks(d: Draw) -> None:
    d.tensor(1, 8, 4, 4)
    d.set("blocksize", 2, needed=True)
    d.set("mode", "DCR", "CRD")


def _transpose(d: Draw) -> None:
    d.tensor(2, 3, 4)
    d.set("perm", [0, 2, 1], [2, 1, 0])


def _triangle(d: Draw) -> None:
    d.tensor(3, 4)
    d.set("upper", 0, 1)
    if d.coin():
        d.given(1)


def _eye(d: Draw) -> None:
    d.tensor(3, 4)
    d.set("k", -1, 1)
    d.set("dtype", 1, 7)


def _unique(d: Draw) -> None:
    d.tensor(5)
    d.set("sorted", 0, 1)
    d.axis(1)


def _reversed(d: Draw) -> None:
    d.tensor(3, 3)
    d.given([1, 3, 2])
    order = d.coin()
    if d.coin(0.7):
        d.attributes.update(batch_axis=int(order), time_axis=int(not order))


def _range(d: Draw) -> None:
    for number in (0, 5, 2):
        d.inputs.append(np.array(number, d.kind(0)))


def _det(d: Draw) -> None:
    d.tensor(2, 3, 3)


_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor HardSigmoid HardSwish Identity IsInf"
    " IsNaN LeakyRelu Log Mish Neg NonZero Reciprocal Relu Round Selu Shape Shrink Sigmoid Sign Sin Sinh Size Softplus"
    " Softsign Sqrt Tan Tanh ThresholdedRelu Gelu"
)
_BINARY = "Add Sub Mul Div Pow Mod Equal Greater Less GreaterOrEqual LessOrEqual PRelu BitShift"
_ALONG = "Softmax LogSoftmax Hardmax Flatten ArgMax ArgMin LpNormalization"
_REDUCE = "Max Mean Min Prod Sum SumSquare L1 L2 LogSum LogSumExp"
TENSORS: dict[str, Callable[[Draw], None]] = {
    **dict.fromkeys(_UNARY.split(), _unary),
    **dict.fromkeys(_BINARY.split(), _binary),
    **dict.fromkeys((f"Reduce{each}" for each in _REDUCE.split()), _reduce),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), _several),
    **dict.fromkeys(_ALONG.split(), _along),
    **dict.fromkeys(("Gather", "GatherElements"), _gather),
    **dict.fromkeys(("Scatter", "ScatterElements"), _scatter),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _blocks),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Compress": _compress,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "CumSum": _cumulative,
    "Det": _det,
    "Dropout": _dropout,
    "Expand": _expand,
    "EyeLike": _eye,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "ReverseSequence": _reversed,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unique": _unique,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
