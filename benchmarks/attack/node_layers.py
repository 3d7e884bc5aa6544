"""Draw nodes of layers: convolutions, pools, norms, recurrences, resizes, losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .node_draw import Draw


def _windows(d: Draw, dims: int) -> list[int]:
    kernel = [d.pick(1, 2, 3) for _ in range(dims)]
    d.set("strides", *([s] * dims for s in (1, 2, 3)))
    d.set("dilations", [1] * dims, [2] * dims)
    if d.coin(0.3):
        d.set("auto_pad", "SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET", needed=True)
    else:
        d.set("pads", *([a] * dims + [b] * dims for a in (0, 1) for b in (0, 1)))
    return kernel


def _pool(d: Draw) -> None:
    dims = d.pick(1, 2, 2)
    d.tensor(1, 2, *(d.pick(5, 6, 7) for _ in range(dims)))
    kernel = _windows(d, dims)
    d.attributes["kernel_shape"] = kernel
    for name in ("ceil_mode", "count_include_pad", "storage_order"):
        d.set(name, 0, 1)
    d.set("p", 1, 2, 3)


def _global(d: Draw) -> None:
    d.tensor(2, 3, *d.shape(1, 2))
    d.set("p", 1, 2, 3)


def _convolution(d: Draw) -> None:
    dims, groups = d.pick(1, 2), d.pick(1, 2)
    d.tensor(1, 4, *(d.pick(5, 6) for _ in range(dims)))
    kernel = _windows(d, dims)
    shape = (4, 4 // groups) if d.op == "Conv" else (4, 2)
    d.tensor(*shape, *kernel)
    if d.coin():
        d.tensor(4 if d.op == "Conv" else 2 * groups)
    d.attributes["group"] = groups
    d.set("kernel_shape", kernel)
    d.set("output_padding", [1] * dims)


def _unpooled(d: Draw) -> None:
    d.tensor(1, 1, 2, 2)
    d.given(np.array([[[[5, 7], [13, 15]]]]))
    d.attributes["kernel_shape"] = [2, 2]
    d.set("strides", [2, 2], needed=True)
    d.set("pads", [0, 0, 0, 0])


def _rois(d: Draw) -> None:
    d.tensor(1, 2, 6, 6)
    if d.op == "MaxRoiPool":
        d.inputs.append(np.array([[0, 0, 0, 3, 3], [0, 1, 1, 5, 4]], d.kind(1)))
        d.attributes["pooled_shape"] = [2, 2]
    else:
        d.inputs.append(np.array([[0.5, 0, 3, 3], [1, 1.5, 5, 4]], d.kind(1)))
        d.given([0, 0])
    d.set("mode", "avg", "max")
    for name in ("output_height", "output_width"):
        d.set(name, 2)
    d.set("sampling_ratio", 0, 2)
    d.set("spatial_scale", 1.0, 0.5)
    d.set("coordinate_transformation_mode", "half_pixel", "output_half_pixel")


def _batch_norm(d: Draw) -> None:
    shape = d.pick((2, 3), (2, 3, 4), (2, 3, 2, 2))
    d.tensor(*shape)
    for low in (-2, -2, -2, 0.5):
        d.tensor(3, low=low)
    d.set("epsilon", 1e-5, 0.1)
    d.set("momentum", 0.9, 0.5)
    d.set("spatial", 1, 1, 0)
    training = d.set("training_mode", 0, 1)
    d.attributes["_outputs"] = d.pick(1, 3) if training else d.pick(1, 1, 1, 5)
    if d.opset >= 14:
        d.attributes["_outputs"] = 3 if training else 1


def _scaled_norm(d: Draw) -> None:
    d.tensor(2, 4, 3)
    groups = 2
    size = 4
    if d.op == "GroupNormalization":
        d.attributes["num_groups"] = groups
        size = groups if d.opset < 21 else 4
    for _ in range(2):
        d.tensor(size)
    d.set("epsilon", 1e-5, 0.1)
    d.set("stash_type", 1)


def _layer_norm(d: Draw) -> None:
    d.tensor(2, 3, 4)
    d.tensor(4)
    if d.coin():
        d.tensor(4)
    d.set("axis", -1, 2)
    d.set("epsilon", 1e-5, 0.1)
    d.attributes["_outputs"] = d.pick(1, 3)


def _local_norm(d: Draw) -> None:
    d.tensor(1, 4, 2, 2)
    d.attributes["size"] = d.pick(1, 2, 3)
    for name in ("alpha", "beta", "bias"):
        d.set(name, 0.3, 0.75, 1.0)


def _mean_variance(d: Draw) -> None:
    d.tensor(2, 3, 2, 2)
    d.set("axes", [0, 2, 3], [1], [0, 1])


def _gemm(d: Draw) -> None:
    first, second = d.coin(), d.coin()
    d.tensor(*((3, 2) if first else (2, 3)))
    d.tensor(*((4, 3) if second else (3, 4)))
    if d.coin(0.7):
        d.tensor(*d.pick((4,), (1,), (2, 4), (2, 1), ()))
    d.attributes.update({name: 1 for name, on in (("transA", first), ("transB", second)) if on})
    for name in ("alpha", "beta"):
        d.set(name, 0.5, 2.0)


def _matmul(d: Draw) -> None:
    d.tensor(*d.pick((2, 3), (2, 2, 3), (3,)))
    d.tensor(*d.pick((3, 4), (3,)))


def _recurrent(d: Draw) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[d.op]
    direction = d.set("direction", "forward", "reverse", "bidirectional")
    ways, hidden, length, batch, width = 2 if direction == "bidirectional" else 1, 2, 3, 2, 3
    layout = d.set("layout", 0, 1) or 0
    d.tensor(*((batch, length, width) if layout else (length, batch, width)), low=-1, high=1)
    d.tensor(ways, gates * hidden, width, low=-1, high=1)
    d.tensor(ways, gates * hidden, hidden, low=-1, high=1)
    if d.coin():
        d.tensor(ways, 2 * gates * hidden, low=-1, high=1)
        if d.coin():
            d.given([3, 2], np.int32)
    d.attributes["hidden_size"] = hidden
    d.set("clip", 0.5)
    d.set("linear_before_reset", 0, 1)
    d.set("input_forget", 0, 1)
    d.attributes["_outputs"] = d.pick(1, 2, 3) if d.op == "LSTM" else d.pick(1, 2)


_COORDINATES = (
    *("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_half_pixel_for_nn"),
    *("tf_crop_and_resize", "half_pixel_symmetric"),
)


def _resize(d: Draw) -> None:
    d.tensor(1, 2, 4, 4)
    scales = d.pick([1, 1, 2, 2], [1, 1, 1.5, 2.5], [1, 1, 0.6, 0.5])
    mode = d.set("mode", "nearest", "linear", "cubic")
    if d.op == "Upsample" and d.opset < 9:
        d.attributes["scales"] = [1.0, 1.0, 2.0, 2.0]
        return
    if d.opset < 11:
        d.given(scales, np.float32)
        return
    where = d.set("coordinate_transformation_mode", *_COORDINATES)
    if mode == "nearest":
        d.set("nearest_mode", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    d.set("cubic_coeff_a", -0.5, -0.75)
    d.set("exclude_outside", 0, 1)
    d.set("extrapolation_value", 1.0)
    d.set("antialias", 0, 1)
    d.inputs.append(np.array([0, 0, 0.1, 0.2, 1, 1, 0.7, 0.9], np.float32) if where == "tf_crop_and_resize" else None)
    if d.opset < 13 and d.inputs[-1] is None:
        d.inputs[-1] = np.zeros(0, np.float32)
    if d.coin(0.6):
        d.given(scales, np.float32)
    else:
        d.inputs.append(np.zeros(0, np.float32) if d.opset < 13 else None)
        d.given(d.pick([1, 2, 7, 5], [1, 2, 3, 3]))
        d.set("keep_aspect_ratio_policy", "stretch", "not_larger", "not_smaller")


def _grid(d: Draw) -> None:
    d.tensor(1, 2, 4, 4)
    d.inputs.append(d.rng.uniform(-1.3, 1.3, (1, 3, 3, 2)).astype(d.kind(1)))
    modes = ("bilinear", "nearest", "bicubic") if d.opset < 20 else ("linear", "nearest", "cubic")
    d.set("mode", *modes)
    d.set("padding_mode", "zeros", "border", "reflection")
    d.set("align_corners", 0, 1)


def _fourier(d: Draw) -> None:
    d.tensor(1, 4, 4, d.pick(1, 2))
    if d.coin():
        d.given(4)
    d.axis(3)
    for name in ("inverse", "onesided"):
        d.set(name, 0, 1)
    if d.opset >= 20 and d.coin():
        d.inputs.extend([None] * (2 - len(d.inputs)))
        d.given(d.pick(1, 2))


def _quantize(d: Draw) -> None:
    forward = d.op == "QuantizeLinear"
    per_axis = d.opset >= 13 and d.coin()
    shape = (2, 3, 4)
    kind = np.dtype(d.pick(np.uint8, np.int8))
    values = d.rng.integers(0, 100, shape)
    d.inputs.append((values / 7).astype(np.float32) if forward else values.astype(kind))
    axis = d.axis(3)
    size: tuple[int, ...] = (shape[1 if axis is None else axis],) if per_axis else ()
    d.inputs.append(d.rng.uniform(0.1, 1, size).astype(np.float32))
    if d.coin() or kind == np.int8:
        d.inputs.append(d.rng.integers(0, 9, size).astype(kind))
    d.set("saturate", 0, 1)


def _loss(d: Draw) -> None:
    d.tensor(3, 4)
    d.given(d.rng.integers(0, 4, 3))
    if d.coin():
        d.tensor(4, low=0.5)
    d.set("reduction", "none", "sum", "mean")
    d.set("ignore_index", 0, 2)
    if d.op == "SoftmaxCrossEntropyLoss":
        d.attributes["_outputs"] = d.pick(1, 2)


def _suppressed(d: Draw) -> None:
    corners = np.sort(d.rng.uniform(0, 1, (1, 5, 2, 2)), axis=2).reshape(1, 5, 4)
    d.given(corners, np.float32)
    d.given(d.rng.uniform(0, 1, (1, 2, 5)), np.float32)
    d.given([3])
    if d.coin():
        d.given([0.4], np.float32)
        if d.coin():
            d.given([0.3], np.float32)
    d.set("center_point_box", 0, 1)


LAYERS: dict[str, Callable[[Draw], None]] = {
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _global),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    **dict.fromkeys(("MaxRoiPool", "RoiAlign"), _rois),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), _scaled_norm),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _loss),
    "BatchNormalization": _batch_norm,
    "DFT": _fourier,
    "Gemm": _gemm,
    "GridSample": _grid,
    "LRN": _local_norm,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "MaxUnpool": _unpooled,
    "MeanVarianceNormalization": _mean_variance,
    "NonMaxSuppression": _suppressed,
}
