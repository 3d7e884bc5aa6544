"""Define the norm ops of the ONNX standard, and their rows.

The definitions follow https://onnx.ai/onnx/operators. Variances are means of centered squares, as in the standard. The
function bodies in onnx's schemas compute E[x²] − E[x]² instead. This is the same function, but it loses digits in
float64 if the mean is large, and the prover can't see that it is non-negative. tests/norms/test_norms_definitions.py
compares the definitions with these bodies. tests/norms/test_norm_table.py compares the rows with onnx's schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .interpreter import (
    EPSILON,
    Interpreter,
    Tensor,
    axes_from,
    inverse_deviation,
    round_to_float32,
    scale_and_shift,
)
from .norm_op import NormOp, OpOwner, StatisticsKind, make_row

MEAN_VARIANCE_EPSILON = round_to_float32(1e-9)


def layer_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor = None, *, axis: int = -1, epsilon: float = EPSILON, **_: Any
) -> Any:
    """Define LayerNormalization over ``axis`` and all axes after it; scale and bias broadcast to x.

    Returns:
        Y, Mean, InvStdDev (None if unwanted).
    """
    normal = o.standardize(x, axes_from(o, x, axis), epsilon)
    return scale_and_shift(o, normal.value, scale, bias), normal.mean, inverse_deviation(o, 2, normal.deviation)


def rms_norm(o: Interpreter, x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = EPSILON, **_: Any) -> Any:
    """Define RMSNormalization, and SimplifiedLayerNormalization of onnxruntime.

    Returns:
        Y, and 1 / rms (None if unwanted).
    """
    normal = o.standardize(x, axes_from(o, x, axis), epsilon, centered=False)
    return scale_and_shift(o, normal.value, scale, None), inverse_deviation(o, 1, normal.deviation)


def instance_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = EPSILON, **_: Any
) -> Tensor:
    """Define InstanceNormalization of (N, C, …) over all but the first two axes; scale and bias of (C,).

    Returns:
        Y, of the shape of x.
    """
    normal = o.standardize(x, range(2 - o.rank_of(x), 0), epsilon)
    return scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_channel(v, x))


def group_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = EPSILON, **_: Any
) -> Tensor:
    """Define GroupNormalization of (N, C, …); scale and bias of (C,), before opset 21 of (num_groups,).

    Returns:
        Y, of the shape of x.
    """
    if o.opset >= 21:
        return group_norm_21(o, x, scale, bias, num_groups, epsilon)
    normal = o.standardize(o.split_into_groups(x, num_groups), [-1], epsilon)
    return o.reshape_like(
        scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_group(v, num_groups)), x
    )


def group_norm_21(o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float) -> Tensor:
    """Define GroupNormalization of (N, C, …) with scale and bias of (C,), at any opset.

    Returns:
        Y, of the shape of x.
    """
    normal = o.standardize(o.split_into_groups(x, groups), [-1], epsilon)
    return scale_and_shift(o, o.reshape_like(normal.value, x), scale, bias, lambda v: o.reshape_per_channel(v, x))


def batch_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = EPSILON,
    training_mode: int = 0,
    is_test: int = 0,
    spatial: int = 1,
    **_: Any,
) -> Tensor:
    """Define BatchNormalization of inference: (x − mean) / sqrt(variance + epsilon) · scale + bias, all four of (C,).

    Training mode and ``spatial`` = 0 are refused.

    Returns:
        Y, of the shape of x.
    """
    training = bool(training_mode)
    if o.opset < 14:
        training = o.wants_output(1) or (o.opset < 7 and not is_test)
    if training:
        o.refuse("BatchNormalization in training mode")
    if not spatial:
        o.refuse("BatchNormalization with spatial = 0")
    scale, bias, mean, variance = (o.reshape_per_channel(v, x) for v in (scale, bias, mean, variance))
    deviation = o("Sqrt", o("Add", variance, o.make_scalar(epsilon, variance)))
    return scale_and_shift(o, o("Div", o("Sub", x, mean), deviation), scale, bias)


def mean_variance_norm(o: Interpreter, x: Tensor, *, axes: Sequence[int] = (0, 2, 3), **_: Any) -> Tensor:
    """Define MeanVarianceNormalization: (x − mean) / (sqrt(variance) + 1e-9).

    Returns:
        Y, of the shape of x.
    """
    d = o("Sub", x, o.reduce("ReduceMean", x, axes))
    deviation = o("Sqrt", o.mean_square(d, axes))
    return o("Div", d, o("Add", deviation, o.make_scalar(MEAN_VARIANCE_EPSILON, deviation)))


def _standard_row(*words: str, **more: Any) -> NormOp:
    return make_row(OpOwner.ONNX, *words, **more)


# The versions in ``tensorrt`` come from onnx-tensorrt's changelog (LayerNormalization and GroupNormalization 8.6, local
# functions 9.0) and importer (GroupNormalization with a scale per channel 10.9, RMSNormalization 10.15). The
# TensorRT-RTX parsers 1.4, 1.5, 1.6 and 1.7 were tested (2026-11-21). All of them read every op as one NORMALIZATION
# layer, except RMSNormalization (primitives) and BatchNormalization (SCALE).
ROWS: tuple[NormOp, ...] = (
    _standard_row(
        "LayerNormalization",
        "LayerNorm",
        "X scale bias?",
        "axis epsilon stash_type",
        "Y mean inverse_deviation",
        since=17,
        plugin="LayerNorm",
        tensorrt=(8, 6),
        layer=True,
        definition=layer_norm,
    ),
    _standard_row(
        "RMSNormalization",
        "RMSNorm",
        "X scale",
        "axis epsilon stash_type",
        since=23,
        plugin="RMSNorm",
        tensorrt=(10, 15),
        typed_by="scale",
        centered=False,
        definition=rms_norm,
    ),
    _standard_row(
        "GroupNormalization",
        "GroupNorm",
        "X scale bias",
        "epsilon num_groups stash_type",
        since=21,
        plugin="GroupNorm",
        tensorrt=(10, 9),
        layer=True,
        definition=group_norm,
    ),
    _standard_row(
        "InstanceNormalization",
        "InstanceNorm",
        "X scale bias",
        "epsilon",
        since=6,
        bfloat16=22,
        plugin="InstanceNorm",
        tensorrt=(0,),
        layer=True,
        definition=instance_norm,
    ),
    _standard_row(
        "BatchNormalization",
        "BatchNorm",
        "X scale bias mean variance",
        "epsilon momentum",
        "Y mean variance saved_mean saved_variance",
        since=9,
        bfloat16=14,
        plugin="ScaleShift",
        tensorrt=(0,),
        layer=True,
        statistics=StatisticsKind.CONSTANT,
        definition=batch_norm,
    ),
    _standard_row(
        "MeanVarianceNormalization",
        "StdNorm",
        "X",
        "axes",
        since=9,
        bfloat16=13,
        definition=mean_variance_norm,
    ),
    _standard_row("LpNormalization", "L2Norm", "X", "axis p", bfloat16=22, centered=False),
    _standard_row(
        "LRN", "LRN", "X", "alpha beta bias size", bfloat16=13, centered=False, statistics=StatisticsKind.WINDOW
    ),
)

# Norm ops of older opsets that have another meaning now
OLD_ROWS: tuple[NormOp, ...] = (
    make_row(
        OpOwner.ONNX_18,
        "GroupNormalization",
        "GroupNorm",
        "X scale bias",
        "epsilon num_groups",
        since=18,
        definition=group_norm,
    ),
)
