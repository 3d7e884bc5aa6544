"""Define onnxruntime's norm ops, and their rows of the table of norm ops (`NormOp`).

The definitions follow onnxruntime's docs/ContribOperators.md. The schemas of the installed package agree with it.
"""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from .interpreter import (
    EPSILON,
    Interpreter,
    Tensor,
    inverse_deviation,
    round_to_float32,
    scale_and_shift,
    silu,
)
from .norm_op import CONTRIB, NormOp, OpOwner, make_row
from .onnx_norms import group_norm_21, layer_norm, rms_norm

# Default epsilon of the Skip… ops and of EmbedLayerNormalization
SKIP_EPSILON = round_to_float32(1e-12)


def _residual_sum(o: Interpreter, x: Tensor, residual: Tensor, added: Tensor) -> Tensor:
    total = o("Add", x, residual)
    if added is None:
        return total
    return o("Add", total, added)


def skip_layer_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    bias: Tensor = None,
    added: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """Define SkipLayerNormalization: the layer norm over H of sum = x + residual + added.

    Args:
        x: shape (B, S, H) or (T, H).
        residual: the shape of x, or a shape that broadcasts to it.
        scale, bias, added: shape (H,).

    Returns:
        Y, mean, 1 / deviation (None if unwanted), sum.
    """
    total = _residual_sum(o, x, residual, added)
    normal = o.standardize(total, [-1], epsilon)
    return scale_and_shift(o, normal.value, scale, bias), normal.mean, inverse_deviation(o, 2, normal.deviation), total


def skip_rms_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    added: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """Define SkipSimplifiedLayerNormalization: `skip_layer_norm` without a mean and a bias.

    Returns:
        Y, None, 1 / rms (None if unwanted), sum.
    """
    total = _residual_sum(o, x, residual, added)
    normal = o.standardize(total, [-1], epsilon, centered=False)
    return scale_and_shift(o, normal.value, scale, None), None, inverse_deviation(o, 2, normal.deviation), total


def embed_layer_norm(
    o: Interpreter,
    ids: Tensor,
    segments: Tensor,
    words: Tensor,
    positions: Tensor,
    segment_words: Tensor,
    scale: Tensor,
    bias: Tensor,
    mask: Tensor = None,
    position_ids: Tensor = None,
    *,
    epsilon: float = SKIP_EPSILON,
    **_: Any,
) -> Any:
    """Define EmbedLayerNormalization: the layer norm over H of the sum of the rows that the ids select.

    Args:
        ids, segments, mask, position_ids: shape (B, S). Without position_ids, the first S rows of ``positions`` are
            used.
        words, positions, segment_words: tables of shape (rows, H).

    Returns:
        Y, mask_index (the number of ones in each row of the mask, 0 without a mask; None if unwanted), sum.
    """
    if position_ids is None:
        length = o("Slice", o("Shape", ids), o.make_int64_vector([1], "start"), o.make_int64_vector([2], "end"))
        place = o("Slice", positions, o.make_int64_vector([0], "start"), length, o.make_int64_vector([0], "axes"))
    else:
        place = o("Gather", positions, position_ids, axis=0)
    total = o("Add", o("Gather", words, ids, axis=0), place)
    if segments is not None:
        total = o("Add", total, o("Gather", segment_words, segments, axis=0))
    normal = o.standardize(total, [-1], epsilon)
    y = scale_and_shift(o, normal.value, scale, bias)
    return y, _count_mask_ones(o, ids, mask) if o.wants_output(1) else None, total


def _count_mask_ones(o: Interpreter, ids: Tensor, mask: Tensor) -> Tensor:
    """Count the ones in each row of an int32 mask; zeros without a mask."""
    if mask is None:
        return o.reduce("ReduceSum", o("Sub", ids, ids), [1], keepdims=0)
    ones = o("Cast", o("Equal", mask, o.make_int32_scalar(1, "one")), to=TensorProto.INT32)
    return o.reduce("ReduceSum", ones, [1], keepdims=0)


def ort_group_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    groups: int,
    activation: int,
    channels_last: int = 1,
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """Define GroupNorm of (N, …, C), or of (N, C, …) if ``channels_last`` is 0; activation 1 is SiLU.

    Returns:
        Y, of the shape and dtype of x.
    """
    rank = o.rank_of(x)
    if channels_last:
        first = o("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
    else:
        first = x
    y = o.cast_like(group_norm_21(o, first, scale, bias, groups, epsilon), x)
    if channels_last:
        y = o("Transpose", y, perm=[0, *range(2, rank), 1])
    if activation == 1:
        return silu(o, y)
    return y


def skip_group_norm(
    o: Interpreter, x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor, added: Tensor = None, **attributes: Any
) -> Any:
    """Define SkipGroupNorm: `ort_group_norm` of sum = x + residual + added.

    Args:
        residual: the shape of x, (N, 1, 1, C) or (N, C).
        added: shape (C,).

    Returns:
        Y, sum.
    """
    if o.rank_of(residual) == 2:
        residual = o("Reshape", residual, o.make_int64_vector([0, 1, 1, -1], "shape"))
    total = _residual_sum(o, x, residual, added)
    return ort_group_norm(o, total, scale, bias, **attributes), total


def gated_rms_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    gate: Tensor,
    *,
    activation: str | bytes = "silu",
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """Define GatedRMSNorm: RMS norm of every C consecutive elements of a row, times scale, times SiLU or sigmoid of
    the gate.

    Args:
        x, gate: shape (…, H · C).
        scale: shape (C,).
        activation: "silu", its other name "swish", or "sigmoid".

    Returns:
        Y, of the shape and dtype of x.
    """
    if isinstance(activation, bytes):
        activation = activation.decode(errors="replace")
    if activation not in ("silu", "swish", "sigmoid"):
        o.refuse(f"its activation is {activation!r}; expected 'silu', 'swish' or 'sigmoid'")
    rows = o.split_last_axis(x, o.last_size_of(scale))
    normal = o.standardize(rows, [-1], epsilon, centered=False).value
    y = o("Mul", normal, o.widen_for_statistics(scale))
    if rows is not x:
        y = o.join_last_axes(y, x)
    wide_gate = o.widen_for_statistics(gate)
    if activation == "sigmoid":
        factor = o("Sigmoid", wide_gate)
    else:
        factor = silu(o, wide_gate)
    return o.cast_like(o("Mul", y, factor), x)


def branchwise_rms_norm(
    o: Interpreter, x: Tensor, scale: Tensor = None, *, num_branches: int = 0, epsilon: float = EPSILON, **_: Any
) -> Tensor:
    """Define BranchwiseRMSNorm: RMS norm of each branch of H elements.

    Args:
        x: shape (…, C, H), or (…, C · H) with ``num_branches`` = C.
        scale: shape (H,), (C, H) or (C · H,); None for 1.

    Returns:
        Y, of the shape and dtype of x.
    """
    if num_branches < 0:
        o.refuse(f"its number of branches is {num_branches}")
    rows = x
    if num_branches:
        size = o.last_size_of(x)
        if size % num_branches:
            o.refuse(f"its last size {size} is not divisible into {num_branches} branches")
        rows = o.split_last_axis(x, size // num_branches)
    y = o.standardize(rows, [-1], epsilon, centered=False).value
    if scale is not None:
        if o.rank_of(scale) == 1:
            scale = o.split_last_axis(scale, o.last_size_of(x) // max(num_branches, 1))
        y = o("Mul", y, o.widen_for_statistics(scale))
    if rows is not x:
        y = o.join_last_axes(y, x)
    return o.cast_like(y, x)


def _contrib_row(*words: str, domains: tuple[str, ...] = (CONTRIB,), **more: Any) -> NormOp:
    return make_row(OpOwner.ONNXRUNTIME, *words, domains=domains, **more)


_SUMMED = "Y mean inverse_deviation sum"
_EMBEDDED = "ids segments? words positions segment_words? scale bias mask? position_ids?"
# onnxruntime also accepts these ops in the default domain, in opsets in which the standard has no op of the same name.
_OPEN: dict[str, Any] = {
    "domains": (CONTRIB, ""),
    "typed_by": "scale",
}

ROWS: tuple[NormOp, ...] = (
    _contrib_row(
        "LayerNormalization",
        "LayerNorm",
        "X scale bias?",
        "axis epsilon stash_type",
        "Y mean inverse_deviation",
        definition=layer_norm,
        **_OPEN,
    ),
    _contrib_row(
        "SimplifiedLayerNormalization",
        "RMSNorm",
        "X scale",
        "axis epsilon stash_type",
        "Y inverse_deviation",
        centered=False,
        definition=rms_norm,
        **_OPEN,
    ),
    _contrib_row(
        "SkipLayerNormalization",
        "LayerNorm",
        "X residual scale bias? added?",
        "epsilon",
        _SUMMED,
        definition=skip_layer_norm,
    ),
    _contrib_row(
        "SkipSimplifiedLayerNormalization",
        "RMSNorm",
        "X residual scale added?",
        "epsilon",
        _SUMMED,
        centered=False,
        definition=skip_rms_norm,
    ),
    _contrib_row(
        "EmbedLayerNormalization",
        "LayerNorm",
        _EMBEDDED,
        "mask_index_type epsilon",
        "Y mask_index sum",
        definition=embed_layer_norm,
    ),
    _contrib_row(
        "GroupNorm",
        "GroupNorm",
        "X scale bias",
        "groups activation channels_last epsilon",
        definition=ort_group_norm,
    ),
    _contrib_row(
        "SkipGroupNorm",
        "GroupNorm",
        "X scale bias residual added?",
        "groups activation channels_last epsilon",
        "Y sum",
        definition=skip_group_norm,
    ),
    _contrib_row(
        "GatedRMSNorm",
        "RMSNorm",
        "X scale gate",
        "activation epsilon",
        centered=False,
        definition=gated_rms_norm,
    ),
    _contrib_row(
        "BranchwiseRMSNorm",
        "RMSNorm",
        "X scale?",
        "num_branches epsilon",
        centered=False,
        definition=branchwise_rms_norm,
    ),
)
