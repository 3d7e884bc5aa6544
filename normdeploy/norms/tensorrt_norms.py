"""Define the norm ops of TensorRT's plugins, and their rows.

Each definition follows the README and the plugin creator of a folder in TensorRT's plugin/. The plugin creator contains
the defaults.

The folders are groupNormPlugin, groupNormalizationPlugin, layerNormPlugin, instanceNormalizationPlugin,
skipLayerNormPlugin.
"""

from __future__ import annotations

from typing import Any

from .interpreter import EPSILON, Definition, Interpreter, Tensor, axes_from, scale_and_shift, silu
from .norm_op import NormOp, OpOwner, make_row
from .onnx_norms import group_norm_21

# Number of groups, a constant in groupNormPlugin.cpp
PLUGIN_GROUPS = 32
# Epsilon by type_id (0: float, 1: half). skipLayerNormPlugin uses std::numeric_limits<T>::epsilon() of the type.
PLUGIN_SKIP_EPSILONS = {0: 2.0**-23, 1: 2.0**-10}


def plugin_group_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int = PLUGIN_GROUPS,
    epsilon: float = EPSILON,
    bSwish: int = 0,
    **_: Any,
) -> Tensor:
    """Define GroupNorm of (N, C, H, W), followed by SiLU if ``bSwish`` is set.

    Returns:
        Y, of the shape and dtype of x.
    """
    y = o.cast_like(group_norm_21(o, x, scale, bias, num_groups, epsilon), x)
    if bSwish:
        return silu(o, y)
    return y


def plugin_group_normalization(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int = 1,
    eps: float | None = None,
    epsilon: float = EPSILON,
    **_: Any,
) -> Tensor:
    """Define GroupNormalizationPlugin of (N, C, …). Its creator names the attribute ``eps`` instead of ``epsilon``.

    Returns:
        Y, of the shape and dtype of x.
    """
    if eps is not None:
        epsilon = eps
    return o.cast_like(group_norm_21(o, x, scale, bias, num_groups, epsilon), x)


def plugin_layer_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    axis: int = -1,
    eps: float = EPSILON,
    epsilon: float | None = None,
    **_: Any,
) -> Tensor:
    """Define LayerNorm over ``axis`` and all axes after it, with one scale and bias value per element of these axes.

    Returns:
        Y, of the shape and dtype of x.
    """
    axes = axes_from(o, x, axis)
    normal = o.standardize(x, axes, eps if epsilon is None else epsilon)
    return o.cast_like(scale_and_shift(o, normal.value, scale, bias, lambda v: o.reshape_per_element(v, x, axes)), x)


def plugin_instance_norm(
    o: Interpreter,
    x: Tensor,
    scale: Tensor = None,
    shift: Tensor = None,
    /,
    *,
    epsilon: float,
    scales: Any = None,
    bias: Any = None,
    relu: int = 0,
    alpha: float = 0.0,
    **_: Any,
) -> Tensor:
    """Define InstanceNormalization_TRT of (N, C, …), followed by a leaky Relu of slope ``alpha`` if ``relu`` is set.

    Args:
        scale, shift: shape (C,); None to use the attributes ``scales`` and ``bias`` instead.

    Returns:
        Y, of the shape and dtype of x.
    """
    normal = o.standardize(x, range(2 - o.rank_of(x), 0), epsilon)
    if scale is None:
        scale = o.make_vector(scales, x, "scales")
        shift = o.make_vector(bias, x, "bias")
    y = o.cast_like(scale_and_shift(o, normal.value, scale, shift, lambda v: o.reshape_per_channel(v, x)), x)
    if not relu:
        return y
    if alpha:
        return o("LeakyRelu", y, alpha=float(alpha))
    return o("Relu", y)


def plugin_skip_layer_norm(
    o: Interpreter,
    x: Tensor,
    residual: Tensor,
    *,
    gamma: Any,
    beta: Any,
    bias: Any = None,
    type_id: int = 0,
    **_: Any,
) -> Tensor:
    """Define CustomSkipLayerNormPluginDynamic: the layer norm over H of x + residual + bias.

    The plugin stores gamma, beta and bias in float32, regardless of the dtype of its data.

    Args:
        x, residual: shape (S, B, H, 1, 1), or with H last.

    Returns:
        Y, of the shape and dtype of x.
    """
    if o.rank_of(x) == 5:
        trailing = 2
    else:
        trailing = 0
    total = o("Add", x, residual)
    if bias is not None:
        total = o.widen_for_statistics(total)
        total = o("Add", total, o.make_vector(bias, total, "bias", trailing))
    normal = o.standardize(total, range(-1 - trailing, 0), PLUGIN_SKIP_EPSILONS[type_id])
    scale, shift = (o.make_vector(v, x, name, trailing) for v, name in ((gamma, "gamma"), (beta, "beta")))
    return o.cast_like(scale_and_shift(o, normal.value, scale, shift), x)


def _plugin_creator_row(op: str, kind: str, inputs: str, attributes: str, definition: Definition) -> NormOp:
    return make_row(OpOwner.TENSORRT, op, kind, inputs, attributes, domains=(), definition=definition)


ROWS: tuple[NormOp, ...] = (
    _plugin_creator_row("GroupNorm", "GroupNorm", "X scale bias", "epsilon bSwish num_groups", plugin_group_norm),
    _plugin_creator_row(
        "GroupNormalizationPlugin",
        "GroupNorm",
        "X scale bias",
        "eps epsilon num_groups",
        plugin_group_normalization,
    ),
    _plugin_creator_row("LayerNorm", "LayerNorm", "X scale bias", "epsilon eps axis", plugin_layer_norm),
    _plugin_creator_row("LayerNormPlugin", "LayerNorm", "X scale bias", "epsilon eps axis", plugin_layer_norm),
    _plugin_creator_row(
        "InstanceNormalization_TRT",
        "InstanceNorm",
        "X scale? bias?",
        "epsilon scales bias relu alpha",
        plugin_instance_norm,
    ),
    _plugin_creator_row(
        "CustomSkipLayerNormPluginDynamic",
        "LayerNorm",
        "X residual",
        "type_id ld beta gamma bias has_bias",
        plugin_skip_layer_norm,
    ),
)
