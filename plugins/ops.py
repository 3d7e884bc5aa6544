"""Every op that has a kernel, in the order in which they are registered."""

from . import (
    add_layer_norm,
    add_layer_norm_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
    channel_layer_norm,
    group_norm,
    group_norm_apply,
    instance_norm,
    layer_norm,
    layer_norm_apply,
    layer_norm_quantize,
    modulated_layer_norm,
    rms_norm,
    rms_norm_quantize,
    scale_shift,
    statistics,
    std_norm,
)
from ._launch import Op

OPS: tuple[Op, ...] = (
    layer_norm.OP,
    rms_norm.OP,
    add_layer_norm.OP,
    add_rms_norm.OP,
    modulated_layer_norm.OP,
    std_norm.OP,
    channel_layer_norm.OP,
    instance_norm.OP,
    group_norm.OP,
    group_norm.SILU_OP,
    scale_shift.OP,
    statistics.OP,
    layer_norm_apply.OP,
    group_norm_apply.OP,
    layer_norm_quantize.OP,
    rms_norm_quantize.OP,
    add_layer_norm_quantize.OP,
    add_rms_norm_quantize.OP,
)
BY_NAME = {op.name: op for op in OPS}
